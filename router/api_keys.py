"""API keys: whose a call is.

A key file is a YAML or JSON mapping of SHA-256 digests of keys (64 hexadecimal digits) to tenants::

    9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08: acme
    60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752: {tenant: ops, admin: true}

So a file that is read by somebody else gives no keys away, if keys are long and random (``openssl rand -hex 32``, and
``printf %s KEY | sha256sum`` for its digest), and no key is in the router's memory for longer than a call.

Neither keys nor digests are in errors or logs.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from pdcore.api_key import AUTHORIZATION, MAX_KEY_CHARS, SCHEME
from pdcore.errors import ConfigError, InvalidRequest, Unauthenticated

MAX_FILE_BYTES = 16 << 20
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_KEY = "router.api_keys_file"

Metadata = Sequence[tuple[str, str | bytes]]


class Holder(NamedTuple):
    """Whose a key is. `admin`: it also opens what operators ask."""

    tenant: str
    admin: bool = False


class ApiKeys:
    """Known keys.

    Comparisons take the same time whatever the key: digests are found by a second digest that is keyed with a secret
    of this process, about which times say nothing, and compared as a whole.

    Args:
        holders: by the SHA-256 of their keys, 32 bytes each.
    """

    def __init__(self, holders: Mapping[bytes, Holder]) -> None:
        self._secret = secrets.token_bytes(32)
        self._holders = {self._blind(digest): (digest, holder) for digest, holder in holders.items()}

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Read a key file. Raises ConfigError, which names lines but shows none of what is in them."""
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe may take for ever
                raise ConfigError(_KEY, str(path), "a readable UTF-8 file (it is something else)")
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ConfigError(_KEY, str(path), f"a file of at most {MAX_FILE_BYTES} bytes")
            root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8"
            raise ConfigError(_KEY, str(path), f"a readable UTF-8 file ({why})") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            where = "" if mark is None else f" (line {mark.line + 1})"
            raise ConfigError(_KEY, str(path), f"valid YAML or JSON{where}") from None
        if not isinstance(root, yaml.MappingNode) or not root.value:
            raise ConfigError(_KEY, str(path), "a mapping of SHA-256 digests of keys to tenants, not an empty one")
        holders: dict[bytes, Holder] = {}
        for key, value in root.value:  # as text: digests of digits alone are no numbers
            line = f"in line {key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode) or _DIGEST.fullmatch(key.value) is None:
                raise ConfigError(_KEY, str(path), f"64 hexadecimal digits, the SHA-256 of a key, {line}")
            holder = _holder(value)
            if holder is None or not 1 <= len(holder.tenant) <= 128:
                allowed = f"a tenant's name of 1 to 128 characters, or {{tenant: NAME, admin: true}}, {line}"
                raise ConfigError(_KEY, str(path), allowed)
            digest = bytes.fromhex(key.value)
            if digest in holders:
                raise ConfigError(_KEY, str(path), f"each key once; it is given again {line}")
            holders[digest] = holder
        return cls(holders)

    def holder(self, metadata: Metadata) -> Holder:
        """Whose the call with this metadata is. Raises Unauthenticated."""
        given = [value for name, value in metadata if name == AUTHORIZATION]
        if not given:
            raise Unauthenticated("an API key is needed: send `authorization: Bearer KEY`")
        words = given[0].split(maxsplit=1) if isinstance(given[0], str) else []
        if len(given) != 1 or len(words) != 2 or words[0].lower() != SCHEME.lower() or len(words[1]) > MAX_KEY_CHARS:
            raise Unauthenticated("`authorization` must be given once, as `Bearer KEY`")
        digest = hashlib.sha256(words[1].encode()).digest()
        known, holder = self._holders.get(self._blind(digest), (b"", Holder("")))
        if not hmac.compare_digest(known, digest):
            raise Unauthenticated("the API key is not known here")
        return holder

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _holder(value: yaml.Node) -> Holder | None:
    """What stands behind a key in the file; None if it is neither form."""
    if isinstance(value, yaml.ScalarNode):
        return Holder(value.value)
    if not isinstance(value, yaml.MappingNode):
        return None
    # As text, as above: a tenant may be called 007.
    scalars = [pair for pair in value.value if all(isinstance(node, yaml.ScalarNode) for node in pair)]
    said = {name.value: field.value for name, field in scalars}
    if len(said) != len(value.value) or not {"tenant"} <= said.keys() <= {"tenant", "admin"}:
        return None
    admin = said.get("admin", "false")
    return Holder(said["tenant"], admin == "true") if admin in ("true", "false") else None


class Door:
    """Whose a call is, with or without keys.

    Args:
        keys: None where there are none, and tenants are who they say they are.
    """

    def __init__(self, keys: ApiKeys | None) -> None:
        self._keys = keys

    def replace(self, keys: ApiKeys) -> None:
        """These keys open from now on, and no others."""
        self._keys = keys

    def caller(self, metadata: Metadata) -> str | None:
        """The tenant whose key the call has; None where there are no keys. Raises Unauthenticated."""
        return None if self._keys is None else self._keys.holder(metadata).tenant

    def admit_admin(self, metadata: Metadata) -> None:
        """Let an operator pass; anybody is one where there are no keys. Raises Unauthenticated."""
        if self._keys is not None and not self._keys.holder(metadata).admin:
            raise Unauthenticated("the API key is no operator's: in the file of keys it needs `admin: true`")


def tenant_of(caller: str | None, asked: str) -> str:
    """The tenant of a request that names `asked` (or none, if that is empty). Raises InvalidRequest."""
    if caller is None:
        return asked
    if asked not in ("", caller):
        raise InvalidRequest("tenant", "must be empty or the tenant that the API key belongs to")
    return caller
