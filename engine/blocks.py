"""Who uses which block of the paged KV cache. Numbers only: the memory itself belongs to the model runner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from engine.prefix_cache import PrefixCache
from pdcore.types import RequestKey


class OwnerKind(StrEnum):
    """What may own a block."""

    SEQUENCE = "sequence"  # a sequence that computes, or waits for credit with its cache in place
    TICKET = "ticket"  # an uncommitted transfer that fills the block from another worker, or holds a cached one
    SEND = "send"  # a send session that still reads the block, its sequence having ended
    SWAP = "swap"  # a copy to or from host memory that is under way


class Owner(NamedTuple):
    """One owner. `id` is a ticket's name for tickets, and a request key for all others."""

    kind: OwnerKind
    id: str | RequestKey

    @classmethod
    def sequence(cls, key: RequestKey) -> Owner:
        return cls(OwnerKind.SEQUENCE, key)

    @classmethod
    def send(cls, key: RequestKey) -> Owner:
        return cls(OwnerKind.SEND, key)

    @classmethod
    def swap(cls, key: RequestKey) -> Owner:
        return cls(OwnerKind.SWAP, key)

    @classmethod
    def ticket(cls, name: str) -> Owner:
        return cls(OwnerKind.TICKET, name)


class BlockManager:
    """Blocks by who uses them. An owner's blocks move together::

                 allocate                transfer (commit)
        free ---------------> TICKET ------------------------+
         |                      | release                    v
         |  allocate            v        transfer (first token, abort)
         +----------------------------> SEQUENCE ----------------------> SEND
         |                                | ^ |                           |
         |                swap out begins v | | release                   | release
         |  allocate                SWAP ---+ | swap in has ended         |
         +--------------------------> |       |                           |
         ^                            |       |                           |
         +----------------------------+-------+---------------------------+

    A block that is full and computed can be published to the prefix cache, from where later owners share it::

                  allocate                publish                share
        free ------------------> private ---------> cached, used <------> cached, idle --- evict ---> free
         ^     release              |      by its owner and others  last release    by allocate
         +--------------------------+

    The samples of one request share the full blocks of its prompt as well, cached or not (`fork`).

    *Private* blocks have one owner and are not cached: they are the only ones that may be written. *Idle* blocks are
    used by the cache alone; they count as free, for `allocate` takes them when there are no others. `_refs` counts
    a block's owners, and the cache as one more.

    An owner's blocks are in the order of its tokens: token t lives in ``blocks[t // block_size]``; shared ones are
    at the front. Not thread-safe: the engine's lock protects it. A violated precondition is a bug of the engine and
    trips an assertion.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 1, num_blocks
        assert block_size >= 1, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = PrefixCache()
        # A stack: the block freed last is used next, while its lines may still be in the processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._owned: dict[Owner, list[int]] = {}
        self._shared_fronts: dict[Owner, int] = {}  # of tickets: how many blocks they hold by `share`
        self._reserved = 0

    @property
    def free(self) -> int:
        """Blocks that `allocate` can give: nobody uses them, but perhaps the cache."""
        return len(self._free) + self.cache.idle

    @property
    def cached(self) -> int:
        """Blocks in the prefix cache, idle and used."""
        return len(self.cache)

    @property
    def reserved(self) -> int:
        """Blocks allocated to tickets; those that they share are not among them."""
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

    def is_private(self, block: int) -> bool:
        """Whether the block has one owner and is not cached, so that its owner may write it."""
        return self._refs[block] == 1 and block not in self.cache

    def holders(self, block: int) -> int:
        """How many owners the block has."""
        return self._refs[block] - (block in self.cache)

    def shared(self, owner: Owner, wanted: Container[int] = ()) -> tuple[int, ...]:
        """The owner's blocks that have other owners too, so that they would not come free with this one alone, or
        that are among the `wanted`."""
        blocks = self._owned.get(owner, ())
        return tuple(block for block in blocks if self.holders(block) > 1 or block in wanted)

    def freed_by(self, owners: Iterable[Owner]) -> int:
        """How many blocks come free if all of these owners give theirs up."""
        uses = Counter(block for owner in owners for block in self._owned.get(owner, ()))
        return sum(count == self.holders(block) for block, count in uses.items())

    def shared_front(self, owner: Owner) -> int:
        """How many of the owner's blocks, from the front, are cached and have other owners too."""
        blocks = self._owned.get(owner, ())
        count = 0
        while count < len(blocks) and blocks[count] in self.cache and self._refs[blocks[count]] > 2:
            count += 1
        return count

    def allocated(self, owner: Owner) -> int:
        """How many of a ticket's blocks were allocated to it; it shares the others."""
        return len(self._owned.get(owner, ())) - self._shared_fronts.get(owner, 0)

    def used(self, blocks: Sequence[int]) -> list[int]:
        """Those of these cached blocks that have an owner."""
        return [block for block in blocks if self._refs[block] > 1]

    def allocate(self, owner: Owner, count: int) -> list[int]:
        """Give `count` free blocks to `owner`, behind those it has. There must be that many."""
        assert 0 <= count <= self.free, (owner, count, self.free)
        if count == 0:
            return []
        while len(self._free) < count:
            self._uncached(self.cache.evict())
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for block in taken:
            self._refs[block] = 1
        self._owned.setdefault(owner, []).extend(taken)
        if owner.kind is OwnerKind.TICKET:
            self._reserved += count
        return taken

    def share(self, owner: Owner, blocks: Sequence[int]) -> None:
        """Make `owner`, which must have no blocks, one more owner of these cached ones."""
        assert owner not in self._owned, owner
        if not blocks:
            return
        for block in blocks:
            assert block in self.cache, block
            self._refs[block] += 1
            self.cache.use(block)
        self._owned[owner] = list(blocks)
        if owner.kind is OwnerKind.TICKET:
            self._shared_fronts[owner] = len(blocks)

    def fork(self, source: Owner, target: Owner, shared: int, own: int = 0) -> list[int]:
        """Make `target`, which must have no blocks, one more owner of the first `shared` blocks of `source`, which
        are full and will not be written any more, and give it the last `own` of them altogether. Returns its blocks.
        """
        assert target not in self._owned, target
        assert OwnerKind.TICKET not in (source.kind, target.kind), (source, target)
        blocks = self._owned.get(source, [])
        assert shared + own <= len(blocks), (source, shared, own)
        for block in blocks[:shared]:
            self._refs[block] += 1
            if block in self.cache:
                self.cache.use(block)
        taken = blocks[:shared] + blocks[len(blocks) - own :]
        del blocks[len(blocks) - own :]
        if taken:
            self._owned[target] = taken
        return taken

    def publish(self, owner: Owner, hashes: Sequence[bytes], count: int, guess: int = 0) -> None:
        """Put the first `count` blocks of a sequence, which are full, into the prefix cache under these names.

        Those whose names are there already are passed over. `guess`: see `PrefixCache.match`.
        """
        assert owner.kind is OwnerKind.SEQUENCE, owner
        blocks = self._owned[owner]
        for i in range(self.cache.match(hashes, count, guess), count):
            # Taken out of the cache while others shared it (see `unpublish`): it does not come back.
            if not self.is_private(blocks[i]):
                return
            self.cache.insert(blocks[i], hashes[i], hashes[i - 1] if i else None)
            self._refs[blocks[i]] += 1

    def unpublish(self, owner: Owner) -> None:
        """Take the owner's blocks, and what continues them, out of the prefix cache: no others come to use them."""
        for block in self._owned.get(owner, ()):
            if block in self.cache:
                self._uncached(self.cache.drop(block))

    def transfer(self, source: Owner, target: Owner) -> None:
        """Make all blocks of `source` those of `target`, which must have none and is no ticket."""
        assert target not in self._owned, target
        assert target.kind is not OwnerKind.TICKET, target
        blocks = self._owned.pop(source, None)
        if blocks is None:
            return
        self._owned[target] = blocks
        if source.kind is OwnerKind.TICKET:
            self._reserved -= len(blocks) - self._shared_fronts.pop(source, 0)

    def release(self, owner: Owner) -> int:
        """Take all blocks from `owner`; returns how many there were. Idempotent."""
        blocks = self._owned.pop(owner, None)
        if blocks is None:
            return 0
        if owner.kind is OwnerKind.TICKET:
            self._reserved -= len(blocks) - self._shared_fronts.pop(owner, 0)
        last_cached: int | None = None
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)
            elif last_cached is None and block in self.cache:
                last_cached = block
        if last_cached is not None:
            self.cache.rest(last_cached, self._refs)
        return len(blocks)

    def _uncached(self, blocks: Sequence[int]) -> None:
        """These blocks have left the cache: those that nobody uses are free."""
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)

    def check_integrity(self) -> None:
        """Assert that every block is free or used, that each use is counted once, and that the cache is in order."""
        uses: Counter[int] = Counter(block for block in range(self.num_blocks) if block in self.cache)
        for owner, blocks in self._owned.items():
            assert blocks, f"{owner} is listed without blocks"
            assert len(set(blocks)) == len(blocks), f"{owner} has a block twice"
            uses.update(blocks)
        assert all(0 <= block < self.num_blocks for block in uses), "a block does not exist"
        for block, refs in enumerate(self._refs):
            assert refs == uses[block], f"block {block} has {uses[block]} users and a count of {refs}"
        free = [block for block, refs in enumerate(self._refs) if refs == 0]
        assert sorted(self._free) == free, "a block is lost, or free and used"
        for owner, front in self._shared_fronts.items():
            assert owner.kind is OwnerKind.TICKET, owner
            assert 0 < front <= len(self._owned[owner]), owner
        reserved = 0
        for owner in self.owners(OwnerKind.TICKET):
            fresh = self._owned[owner][self._shared_fronts.get(owner, 0) :]
            assert all(self.is_private(block) for block in fresh), f"{owner} would write a block that others use"
            reserved += len(fresh)
        assert reserved == self._reserved, (reserved, self._reserved)
        self.cache.check_integrity(self._refs)
