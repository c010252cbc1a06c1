"""Who owns which block of the paged KV cache. Numbers only: the memory itself belongs to the model runner."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from pdcore.types import RequestKey


class OwnerKind(StrEnum):
    """What may own a block."""

    SEQUENCE = "sequence"  # a sequence that computes, or waits for credit with its cache in place
    TICKET = "ticket"  # an uncommitted transfer that fills the block from another worker
    SEND = "send"  # a send session that still reads the block, its sequence having ended
    CACHE = "cache"  # the prefix cache


class Owner(NamedTuple):
    """One owner. `id` is a request key for sequences and sends, a ticket's name for tickets."""

    kind: OwnerKind
    id: str | RequestKey

    @classmethod
    def sequence(cls, key: RequestKey) -> Owner:
        return cls(OwnerKind.SEQUENCE, key)

    @classmethod
    def send(cls, key: RequestKey) -> Owner:
        return cls(OwnerKind.SEND, key)

    @classmethod
    def ticket(cls, name: str) -> Owner:
        return cls(OwnerKind.TICKET, name)


class BlockManager:
    """Every block is free or has exactly one owner::

                 allocate                transfer (commit)
        free ---------------> TICKET ------------------------+
         |                      | release                    v
         |  allocate            v        transfer (first token, abort)
         +----------------------------> SEQUENCE ----------------------> SEND
         ^                                  | release                     | release
         +----------------------------------+-----------------------------+

    An owner's blocks are in the order of its tokens: token t lives in ``blocks[t // block_size]``. Not thread-safe:
    the engine's lock protects it. A violated precondition is a bug of the engine and trips an assertion.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 1, num_blocks
        assert block_size >= 1, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block freed last is used next, while its lines may still be in the processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owned: dict[Owner, list[int]] = {}
        self._reserved = 0

    @property
    def free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    @property
    def reserved(self) -> int:
        """Blocks owned by tickets."""
        return self._reserved

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_of(self, owner: Owner) -> Sequence[int]:
        """The owner's blocks in token order; empty if it has none. Do not modify."""
        return self._owned.get(owner, ())

    def owners(self, kind: OwnerKind) -> list[Owner]:
        """Owners of that kind that hold blocks, the one that came to hold any first at the front."""
        return [owner for owner in self._owned if owner.kind is kind]

    def allocate(self, owner: Owner, count: int) -> list[int]:
        """Give `count` free blocks to `owner`, behind those it has. There must be that many."""
        assert 0 <= count <= len(self._free), (owner, count, len(self._free))
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        self._owned.setdefault(owner, []).extend(taken)
        if owner.kind is OwnerKind.TICKET:
            self._reserved += count
        return taken

    def transfer(self, source: Owner, target: Owner) -> None:
        """Make all blocks of `source` those of `target`, which must have none."""
        assert target not in self._owned, target
        blocks = self._owned.pop(source, None)
        if blocks is None:
            return
        self._owned[target] = blocks
        if source.kind is OwnerKind.TICKET:
            self._reserved -= len(blocks)
        if target.kind is OwnerKind.TICKET:
            self._reserved += len(blocks)

    def release(self, owner: Owner) -> int:
        """Free all blocks of `owner`; returns how many there were. Idempotent."""
        blocks = self._owned.pop(owner, None)
        if blocks is None:
            return 0
        if owner.kind is OwnerKind.TICKET:
            self._reserved -= len(blocks)
        self._free.extend(reversed(blocks))
        return len(blocks)

    def check_integrity(self) -> None:
        """Assert that every block is free or owned, once."""
        seen = list(self._free)
        for owner, blocks in self._owned.items():
            assert blocks, f"{owner} is listed without blocks"
            seen.extend(blocks)
        assert len(seen) == self.num_blocks, f"{self.num_blocks - len(seen)} blocks are lost"
        assert sorted(seen) == list(range(self.num_blocks)), "a block is free or owned twice, or does not exist"
        reserved = sum(len(blocks) for owner, blocks in self._owned.items() if owner.kind is OwnerKind.TICKET)
        assert reserved == self._reserved, (reserved, self._reserved)
