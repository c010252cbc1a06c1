"""Which worker holds how much of a prompt, as its events tell and as was just sent to it. Pure.

Names of blocks are those of `pdcore.hashing`: one stands for a block and all before it, for model and salt,
so what must be kept apart has names apart. That goes for block sizes too: a prompt has a list of names for each.

A worker's cache is *closed*: with a block it holds all blocks before it. So for each worker the names of a prompt are
cached up to some block and not behind it, and that block is found by halving::

    prompt          b0  b1  b2  b3  b4  b5  b6  b7
    worker 1        x   x   x   x   x   x               holds 6 blocks
    worker 2        x   x   x                           holds 3: it and worker 3 are one group
    worker 3        x   x   x

What is known of a worker is closed too if it is everything: at the end of every batch of events, from an empty cache
or from `restate` on. Where something was lost (a gap) or given up (the bound), a block may be known and one before it
not. Then the answer ends at one of the blocks that are known and have no known successor: never more than the worker
holds, by what it has announced, and never less than what is known from the first block on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from router.expected_prefixes import ExpectedPrefixes
from router.fleet import Column
from router.holders import Holders
from router.native.holders import NativeHolders, native_holders
from router.native.prefix_tree import NativePrefixTree
from router.prefix_tree import PrefixTree
from router.worker_sets import Group, WorkerSet

EXPECTED_SHARE = 8
"""One in so many entries of an index is for what workers are expected to announce."""


@dataclass(slots=True)
class _Known:
    """What is known of one worker's cache.

    Attributes:
        recent: names in the order of announcement or, later, use. cold: names in the order in which they will be
            given up if nobody uses them. Dicts, whose values mean nothing: sets have no order, and cost the garbage
            collector time.
        following: number of the event that comes next.
    """

    recent: dict[bytes, None] = field(default_factory=dict)
    cold: dict[bytes, None] = field(default_factory=dict)
    following: int = 0

    def __len__(self) -> int:
        return len(self.recent) + len(self.cold)

    def __contains__(self, name: bytes) -> bool:
        return name in self.recent or name in self.cold

    def use(self, hashes: Sequence[bytes]) -> None:
        """A prompt of these names goes to the worker: what is cold of its known beginning becomes recent."""
        if not self.cold:  # nothing had to be given up yet
            return
        for name in hashes:
            if name in self.cold:
                del self.cold[name]
                self.recent[name] = None
            elif name not in self.recent:
                return

    def give_up(self) -> list[bytes]:
        """Forget the next eighth of what is cold; returns the names."""
        if not self.cold:
            self._cool()
        names = list(islice(self.cold, (len(self.cold) + 7) // 8))
        for name in names:
            del self.cold[name]
        # Before the last are gone, so that there is time to use what is cold.
        if 3 * len(self.cold) < len(self.recent):
            self._cool()
        return names

    def _cool(self) -> None:
        """The older half of what is recent becomes cold, to be given up after what is cold already."""
        older = list(islice(self.recent, (len(self.recent) + 1) // 2))
        for name in older:
            del self.recent[name]
        # A block is announced, or used, after those before it: in the reverse order ends are given up first.
        self.cold.update(dict.fromkeys(reversed(older)))


class IndexCounts(NamedTuple):
    """What an index holds and what it has lost.

    Attributes:
        known: pairs of a worker and a block in its cache. names: different names among them.
        expected: prompts that workers were sent, and different names in them.
        dropped: known pairs given up because the index was full. gaps: times that a worker's events did not join on.
    """

    known: int
    names: int
    expected: int
    dropped: int
    gaps: int


class PrefixIndex:
    """Follows the prefix caches of many workers. Workers are small numbers, see `router.worker_sets`.

    Not thread-safe. Every operation is complete when it returns, and none waits.

    Args:
        max_blocks: entries at most: known pairs of worker and block, and what is expected (see `EXPECTED_SHARE`).
            When it is full, workers of which no less is known than of the average take turns to give up a little of
            what was announced or used longest ago, ends before beginnings.
        expected_s: how long a prompt that a worker was sent counts as cached there if the worker says nothing.
        holders, tree: empty ones; None is the fastest there is.
    """

    def __init__(
        self,
        max_blocks: int,
        expected_s: float = 10.0,
        holders: Holders | NativeHolders | None = None,
        tree: PrefixTree | NativePrefixTree | None = None,
    ) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks is {max_blocks}, and must be at least 1")
        if expected_s <= 0:
            raise ValueError(f"expected_s is {expected_s}, and must be above 0")
        for_expected = max_blocks // EXPECTED_SHARE
        self._expected = ExpectedPrefixes(for_expected, expected_s, tree)
        self._max_known = max_blocks - for_expected
        self._known: OrderedDict[int, _Known] = OrderedDict()  # by worker; the first is the next to give up something
        self._holders = holders if holders is not None else new_holders()
        self._pairs = 0
        self._dropped = 0
        self._gaps = 0
        self._changes = 0

    # -- what workers tell ---------------------------------------------------------------------------------------

    def apply(self, worker: int, first: int, events: Sequence[tuple[bool, bytes]], gap: bool = False) -> bool:
        """The worker's cache gained (True) or lost (False) blocks; `events` have the numbers first, first + 1, ...

        Batches of a worker come in order, and each ends where the worker's cache was closed.

        Returns False if events before `first` are missing: by `gap`, or because `first` is not the number that
        follows those applied last (0, for a worker that is new). Then what was known of the cache is forgotten, and
        `restate` would bring it back.
        """
        known = self._known_of(worker)
        joined = not gap and first == known.following
        if not joined:
            self._gaps += 1
            self._forget_known(worker, known)
        known.following = first + len(events)
        self._apply(worker, known, events)
        self._make_room()
        return joined

    def restate(self, worker: int, names: Sequence[bytes], following: int) -> None:
        """The worker's cache holds exactly the blocks of these names, each behind the one before it in its path.

        `following`: number of the first event that this does not contain.
        """
        known = self._known_of(worker)
        self._forget_known(worker, known)
        known.following = following
        self._apply(worker, known, [(True, name) for name in names])
        self._make_room()

    def forget(self, worker: int) -> None:
        """The worker is gone, or starts anew with an empty cache and events from 0 on."""
        known = self._known.pop(worker, None)
        if known is not None:
            self._forget_known(worker, known)
        self._expected.forget(worker)

    def _apply(self, worker: int, known: _Known, events: Sequence[tuple[bool, bytes]]) -> None:
        before = len(known)
        recent, cold = known.recent, known.cold
        # Runs of names that came or went.
        run: list[bytes] = []
        coming = True
        for added, name in events:
            if added is not coming:
                self._change(worker, coming, run)
                run, coming = [], added
            if added:
                if name not in cold and name not in recent:
                    recent[name] = None
                    run.append(name)
            elif name in recent:
                del recent[name]
                run.append(name)
            elif name in cold:
                del cold[name]
                run.append(name)
        self._change(worker, coming, run)
        self._pairs += len(known) - before
        last_names = self._expected.last_names(worker)
        if last_names:
            for name in last_names & {name for _, name in events}:
                self._expected.end(worker, name)

    def _change(self, worker: int, coming: bool, names: Sequence[bytes]) -> None:
        if names:
            self._changes += 1
            (self._holders.add if coming else self._holders.remove)(worker, names)

    def _known_of(self, worker: int) -> _Known:
        known = self._known.get(worker)
        if known is None:
            known = self._known[worker] = _Known()
        return known

    def _forget_known(self, worker: int, known: _Known) -> None:
        for names in (known.recent, known.cold):
            self._change(worker, False, list(names))
            self._pairs -= len(names)
            names.clear()

    # -- what is sent to workers ---------------------------------------------------------------------------------

    def expect(
        self, workers: Iterable[int], hashes: Sequence[bytes], now: float, joined: bytes | None = None
    ) -> None:
        """A prompt of these full blocks was sent to these workers: from now on they count as cached there.

        They do so until a worker's events name the last of them, as added or removed, and for `expected_s` at most.

        Args:
            hashes: for the workers' block size. now: seconds on a clock that never goes back.
            joined: the names one after the other, if they are there already.
        """
        self._expected.expire(now)
        if not hashes:
            return
        lacking = []
        for worker in workers:
            known = self._known.get(worker)
            if known is not None:
                known.use(hashes)
            if known is None or hashes[-1] not in known:
                lacking.append(worker)
        if lacking:
            self._expected.add(lacking, hashes, b"".join(hashes) if joined is None else joined, now)

    def match(self, hashes: Sequence[bytes], now: float, among: WorkerSet = -1) -> Iterator[Group]:
        """How many of a prompt's first blocks each worker holds, or is expected to, whichever is more.

        Groups come in falling order of blocks, and each is looked for when it is asked for: whoever sees that no
        further one can be better stops, and saves the rest. A group takes about ``log2(len(hashes))`` look-ups.
        Nothing is touched; the index must not change before the last group that is asked for.

        Args:
            hashes: names of the prompt's full blocks, for one block size. now: see `expect`.
            among: the workers that are asked for; all, if nothing is said.

        Returns:
            Groups of workers that hold so much and no more, disjoint. Workers that hold nothing are in none.
        """
        self._expected.expire(now)
        known = self._holders.match(hashes, among)
        expected = self._expected.match(hashes, among)
        return _deepest(known, expected) if expected else known

    def version(self, now: float) -> int:
        """As long as this is the same, so is what `match` and `fill` find."""
        self._expected.expire(now)
        return self._changes + self._expected.changes

    def fill(
        self,
        column: Column,
        hashes: Sequence[bytes],
        joined: bytes,
        now: float,
        *,
        value: float,
        among: WorkerSet = -1,
    ) -> bool:
        """What `match` finds, as `value` for every block, by number of the worker. Returns whether there is any.

        Args:
            column: zeros where the workers are that are asked for. joined: the names one after the other.
        """
        self._expected.expire(now)
        known = self._holders.fill(column, hashes, joined, among, value)
        return self._expected.fill(column, hashes, joined, among, value) or known

    # -- the bound -----------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        while self._pairs > self._max_known:
            # Workers take turns, which finds one in a moment; those below the average are passed over.
            worker = next(iter(self._known))
            self._known.move_to_end(worker)
            known = self._known[worker]
            if len(known) * len(self._known) < self._pairs:
                continue
            names = known.give_up()
            self._change(worker, False, names)
            self._pairs -= len(names)
            self._dropped += len(names)

    # -- views ---------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> IndexCounts:
        return IndexCounts(self._pairs, len(self._holders), len(self._expected), self._dropped, self._gaps)

    def check_integrity(self) -> None:
        """Assert what holds between two calls."""
        self._expected.check_integrity()
        held = self._holders.items()
        told: dict[bytes, WorkerSet] = {}
        for worker, known in self._known.items():
            assert not known.recent.keys() & known.cold.keys()
            for name in (*known.recent, *known.cold):
                told[name] = told.get(name, 0) | 1 << worker
        assert held == told
        assert self._pairs == sum(len(known) for known in self._known.values())
        assert self._pairs <= self._max_known


def new_holders() -> Holders | NativeHolders:
    """The fastest there are."""
    native = native_holders()
    return Holders() if native is None else native


def _deepest(known: Iterator[Group], expected: list[Group]) -> Iterator[Group]:
    """Both as one, in falling order of blocks; a worker is only where it has most. Uses `expected` up."""
    placed: WorkerSet = 0
    for blocks, workers in _merged(known, expected):
        if fresh := workers & ~placed:
            yield Group(blocks, fresh)
            placed |= fresh


def _merged(known: Iterator[Group], expected: list[Group]) -> Iterator[Group]:
    # As heapq.merge does it, in a quarter of the time.
    for group in known:
        while expected and expected[-1].blocks > group.blocks:
            yield expected.pop()
        yield group
    yield from reversed(expected)
