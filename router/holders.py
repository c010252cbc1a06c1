"""Which workers hold which blocks, by the blocks' names. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.fleet import Column
from router.worker_sets import Group, WorkerSet, spread

_SHARDS = 256  # by a name's first byte; a dict that grows copies itself, and no large one shall make requests wait


class Holders:
    """Sets of workers by name. `router.native.holders` is the same in C, and several times as fast.

    Workers are small numbers, see `router.worker_sets`.
    """

    def __init__(self) -> None:
        self._shards: list[dict[bytes, WorkerSet]] = [{} for _ in range(_SHARDS)]

    def __len__(self) -> int:
        """Names that somebody holds."""
        return sum(len(shard) for shard in self._shards)

    def add(self, worker: int, names: Sequence[bytes]) -> None:
        """The worker, which held none of these, does so now."""
        # Successive names are often of one path, and held by the same others: such sets are made once and shared.
        bit, shards = 1 << worker, self._shards
        seen = shared = 0
        for name in names:
            shard = shards[name[0]]
            others = shard.setdefault(name, bit)
            if others is not bit:
                if others is not seen:
                    seen, shared = others, others | bit
                shard[name] = shared

    def remove(self, worker: int, names: Sequence[bytes]) -> None:
        """The worker, which held all these, does so no longer."""
        bit, shards = 1 << worker, self._shards
        for name in names:
            shard = shards[name[0]]
            if rest := shard[name] & ~bit:
                shard[name] = rest
            else:
                del shard[name]

    def match(self, hashes: Sequence[bytes], among: WorkerSet) -> Iterator[Group]:
        """How many of a prompt's first blocks each worker holds; see `PrefixIndex.match`."""
        shards = self._shards
        # A range of depths, with the workers that hold the blocks up to either end. All hold the first 0 blocks, none
        # one more than there are. Ranges that remain to be searched are shallower, the next one last.
        none: WorkerSet = 0
        low, holding_low, high, holding_high = 0, among, len(hashes) + 1, none
        shallower: list[tuple[int, WorkerSet, int, WorkerSet]] = []
        while True:
            while high - low > 1:
                # Many prompts are like no other, which their first block shows.
                middle = (low + high) // 2 if low else 1
                name = hashes[middle - 1]
                # Who holds more holds this, and who holds this holds less, known or not.
                holding = shards[name[0]].get(name, none) & holding_low | holding_high
                if holding == holding_high:
                    high = middle
                elif holding == holding_low:
                    low = middle
                else:
                    shallower.append((low, holding_low, middle, holding))
                    low, holding_low = middle, holding
            if low:
                yield Group(low, holding_low ^ holding_high)
            if not shallower:
                return
            low, holding_low, high, holding_high = shallower.pop()

    def fill(self, column: Column, hashes: Sequence[bytes], joined: bytes, among: WorkerSet, value: float) -> bool:
        """Write `value` for every block that each worker holds into a column by number. Returns whether any does.

        `joined`: the names one after the other, for whoever reads them so.
        """
        groups = list(self.match(hashes, among))
        if groups:
            spread(column, [group.workers for group in groups], [value * group.blocks for group in groups])
        return bool(groups)

    def items(self) -> dict[bytes, WorkerSet]:
        """Everything, for checks."""
        assert all(name[0] == number for number, shard in enumerate(self._shards) for name in shard)
        return {name: workers for shard in self._shards for name, workers in shard.items()}
