"""Names for the KV of blocks of tokens: equal exactly if the same model computed it from the same tokens.

::

    root            = H(model digest, salt)
    name of block 0 = H(root, tokens of block 0)
    name of block i = H(name of block i - 1, tokens of block i)

A name stands for everything up to the end of its block, since KV depends on all tokens before it. Only full blocks
have one. Workers name what they hold and routers what a prompt needs by these same functions, so the numbers must
come out equal in every process and on every machine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
"""Length of a name. Two different chains share one by accident with probability 2 ** -128."""

_ROOT = b"pdserve.root"  # personalises the root's hash, so that no root is ever the name of a block


def chain_root(model_digest: str, salt: str = "") -> bytes:
    """What the first block's name is chained to; HASH_BYTES long.

    Args:
        model_digest: see `pdcore.types.KvGeometry`. It is taken from the weights as they are computed with, so an
            adapter that was merged into them makes another model; a worker has no others.
        salt: requests with different salts never share KV, nor learn from its timing what others have asked.
    """
    digest = blake2b(digest_size=HASH_BYTES, person=_ROOT)
    for text in (model_digest, salt):
        raw = text.encode()
        # With its length in front, so that no two pairs run together to the same bytes.
        digest.update(struct.pack("<Q", len(raw)) + raw)
    return digest.digest()


def block_hashes(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Names of the full blocks of `tokens`, in order; tokens behind the last full block are passed over.

    A long sequence is named piece by piece: the last name is the parent of the next piece.

    Args:
        parent: name of the block before the first, or `chain_root`.
        tokens: token ids in ``[0, 2 ** 32)``.
    """
    count = len(tokens) // block_size
    raw = memoryview(struct.pack(f"<{count * block_size}I", *tokens[: count * block_size]))
    step = 4 * block_size
    names: list[bytes] = []
    for start in range(0, len(raw), step):
        digest = blake2b(parent, digest_size=HASH_BYTES)
        digest.update(raw[start : start + step])
        parent = digest.digest()
        names.append(parent)
    return names
