"""The router's view of all prefix caches, against simulated workers and a brute-force oracle of plain sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdcore.hashing import block_hashes, chain_root
from router.holders import Holders
from router.native.holders import native_holders
from router.native.prefix_tree import native_prefix_tree
from router.prefix_index import PrefixIndex
from router.prefix_tree import PrefixTree
from router.worker_sets import Group, WorkerNumbers, members

Path = tuple[int, ...]
Event = tuple[bool, bytes]

EXPECTED_S = 4.0
DEPTH = 5
WORKERS = 4
ROOMY = 10_000


@cache
def names(path: Path, salt: str = "", block_size: int = 1) -> list[bytes]:
    """A block for each token, if nothing else is said."""
    return block_hashes(chain_root("m", salt=salt), path, block_size)


PROMPTS = {path: names(path) for path in product((0, 1), repeat=DEPTH)}  # each other path is the beginning of some
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH).map(tuple)


def added(*found: bytes) -> list[Event]:
    return [(True, name) for name in found]


def removed(*lost: bytes) -> list[Event]:
    return [(False, name) for name in lost]


def by_worker(groups: Iterator[Group]) -> dict[int, int]:
    """Blocks of each worker; on the way, what is promised of groups is checked."""
    blocks: dict[int, int] = {}
    before: int | None = None
    for group in groups:
        assert group.blocks > 0 < group.workers
        assert before is None or group.blocks <= before
        before = group.blocks
        for worker in members(group.workers):
            assert worker not in blocks
            blocks[worker] = group.blocks
    return blocks


class TestEvents:
    def test_the_longest_match_of_every_worker_is_exact(self) -> None:
        index, prompt = PrefixIndex(ROOMY), names(tuple(range(50)))
        for worker in range(0, 50, 3):
            index.apply(worker, 0, added(*prompt[:worker]))
        assert by_worker(index.match(prompt, 0)) == {worker: worker for worker in range(3, 50, 3)}
        assert by_worker(index.match(prompt[:20], 0)) == {worker: min(worker, 20) for worker in range(3, 50, 3)}

    def test_prompts_match_as_far_as_they_agree(self) -> None:
        index = PrefixIndex(ROOMY)
        index.apply(3, 0, added(*names((1, 2, 3, 4))))
        assert by_worker(index.match(names((1, 2, 9, 4)), 0)) == {3: 2}
        assert by_worker(index.match(names((9, 2, 3, 4)), 0)) == {}
        assert by_worker(index.match([], 0)) == {}

    def test_evictions_count_whatever_their_order_in_a_batch(self) -> None:
        index, prompt = PrefixIndex(ROOMY), names((1, 2, 3, 4))
        index.apply(0, 0, added(*prompt))
        index.apply(0, 4, removed(prompt[2], prompt[3]))  # as an engine says it: a block, and what continues it
        assert by_worker(index.match(prompt, 0)) == {0: 2}
        index.apply(0, 6, [*added(prompt[2]), *removed(prompt[2]), *added(prompt[2])])
        assert by_worker(index.match(prompt, 0)) == {0: 3}

    def test_what_a_worker_says_twice_counts_once(self) -> None:
        index, prompt = PrefixIndex(ROOMY), names((1, 2))
        index.apply(0, 0, added(*prompt, *prompt))
        index.apply(0, 4, removed(*prompt, *prompt, b"never heard of"))
        index.check_integrity()
        assert index.counts.known == index.counts.names == 0

    @pytest.mark.parametrize(("first", "gap"), [(5, False), (2, True), (0, False)])
    def test_a_gap_makes_forget_and_go_on(self, first: int, gap: bool) -> None:
        index, old, new = PrefixIndex(ROOMY), names((1, 2)), names((3, 4))
        assert index.apply(0, 0, added(*old))
        index.apply(1, 0, added(*old))
        assert not index.apply(0, first, added(*new), gap)
        assert by_worker(index.match(old, 0)) == {1: 2}  # others are not concerned
        assert by_worker(index.match(new, 0)) == {0: 2}
        assert index.apply(0, first + 2, [])
        assert index.counts.gaps == 1

    def test_who_comes_late_has_a_gap(self) -> None:
        assert not PrefixIndex(ROOMY).apply(0, 7, [])

    def test_a_block_known_after_a_gap_stands_for_those_before_it(self) -> None:
        index, prompt = PrefixIndex(ROOMY), names((1, 2, 3))
        index.apply(0, 9, added(prompt[2]))
        assert by_worker(index.match(prompt, 0)) in ({}, {0: 3})  # never 1 or 2: that is not known of any block

    def test_a_worker_is_found_once_though_blocks_before_are_not_known(self) -> None:
        index, prompt = PrefixIndex(ROOMY), names((1, 2, 3, 4))
        index.apply(0, 9, added(prompt[0], prompt[2]))
        index.apply(1, 0, added(*prompt[:2]))
        assert by_worker(index.match(prompt, 0)) == {0: 3, 1: 2}

    def test_a_whole_state_takes_the_place_of_what_was_known(self) -> None:
        index, old, new = PrefixIndex(ROOMY), names((1, 2)), names((3, 4))
        index.apply(0, 0, added(*old), gap=True)
        index.restate(0, new, following=40)
        assert by_worker(index.match(old, 0)) == {}
        assert by_worker(index.match(new, 0)) == {0: 2}
        assert index.apply(0, 40, removed(new[1]))
        assert by_worker(index.match(new, 0)) == {0: 1}

    def test_a_worker_that_died_holds_nothing_and_begins_anew(self) -> None:
        index, prompt = PrefixIndex(ROOMY), names((1, 2))
        index.apply(0, 0, added(*prompt))
        index.expect([0], names((5,)), 0)
        index.forget(0)
        index.forget(0)  # whether it was known or not
        assert by_worker(index.match(prompt, 0)) == by_worker(index.match(names((5,)), 0)) == {}
        assert index.apply(0, 0, added(prompt[0]))
        assert by_worker(index.match(prompt, 0)) == {0: 1}

    def test_salts_and_block_sizes_are_kept_apart(self) -> None:
        index, tokens = PrefixIndex(ROOMY), tuple(range(8))
        index.apply(0, 0, added(*names(tokens, salt="mine")))
        index.apply(1, 0, added(*names(tokens, block_size=2)))
        assert by_worker(index.match(names(tokens), 0)) == {}
        assert by_worker(index.match(names(tokens, salt="mine"), 0)) == {0: 8}
        assert by_worker(index.match(names(tokens, block_size=2), 0)) == {1: 4}

    def test_only_those_asked_for_are_found(self) -> None:
        index, prompt = PrefixIndex(ROOMY), names((1, 2, 3))
        for worker in range(4):
            index.apply(worker, 0, added(*prompt[:worker]))
        index.expect([5], prompt, 0)
        index.expect([6], prompt, 0)
        assert by_worker(index.match(prompt, 0, among=1 << 2 | 1 << 5)) == {2: 2, 5: 3}
        assert by_worker(index.match(prompt, 0, among=0)) == {}


class TestExpectation:
    def test_siblings_that_arrive_together_find_the_first_one_s_worker(self) -> None:
        index, prompt = PrefixIndex(ROOMY), names((1, 2, 3))
        index.expect([7], prompt, now=0)
        assert by_worker(index.match(names((1, 2, 9)), now=0)) == {7: 2}

    def test_does_not_outlast_its_time(self) -> None:
        index, prompt = PrefixIndex(ROOMY, expected_s=4), names((1, 2, 3))
        index.expect([7], prompt, now=10)
        index.expect([7], prompt[:1], now=11)
        index.apply(7, 0, added(prompt[0]))
        assert by_worker(index.match(prompt, now=13.9)) == {7: 3}
        assert by_worker(index.match(prompt, now=14)) == {7: 1}
        assert index.counts.expected == 0

    def test_begins_anew_when_the_prompt_is_sent_again(self) -> None:
        index, prompt = PrefixIndex(ROOMY, expected_s=4), names((1, 2, 3))
        index.expect([7], prompt, now=0)
        index.expect([7], names((5, 6)), now=1)
        index.expect([7], prompt, now=3)
        assert by_worker(index.match(names((5, 6)), now=5)) == {}
        assert by_worker(index.match(prompt, now=6.9)) == {7: 3}
        assert by_worker(index.match(prompt, now=7)) == {}

    def test_ends_with_the_worker_s_word_on_the_last_block(self) -> None:
        index, prompt = PrefixIndex(ROOMY), names((1, 2, 3))
        index.expect([7], prompt, now=0)
        index.apply(7, 0, added(*prompt[:2]))
        assert by_worker(index.match(prompt, now=0)) == {7: 3}  # it has come so far, and goes on
        index.apply(7, 2, added(prompt[2]))
        assert index.counts.expected == 0
        index.apply(7, 3, removed(prompt[1], prompt[2]))
        assert by_worker(index.match(prompt, now=0)) == {7: 1}

    @pytest.mark.parametrize("events", [removed, lambda *found: [*added(*found), *removed(*found)]])
    def test_ends_when_the_last_block_is_gone_again(self, events: Callable[..., list[Event]]) -> None:
        index, prompt = PrefixIndex(ROOMY), names((1, 2, 3))
        index.expect([7], prompt, now=0)
        index.apply(7, 0, events(*prompt))
        assert by_worker(index.match(prompt, now=0)) == {}

    def test_ends_with_a_state_that_has_the_last_block(self) -> None:
        index, prompt = PrefixIndex(ROOMY), names((1, 2, 3))
        index.expect([7], prompt, now=0)
        index.restate(7, prompt[:2], following=2)
        assert by_worker(index.match(prompt, now=0)) == {7: 3}
        index.restate(7, prompt, following=3)
        assert index.counts.expected == 0

    def test_another_worker_s_word_does_not_end_it(self) -> None:
        index, prompt = PrefixIndex(ROOMY), names((1, 2, 3))
        index.expect([7], prompt, now=0)
        index.apply(6, 0, [*added(*prompt), *removed(*prompt)])
        assert by_worker(index.match(prompt, now=0)) == {7: 3}

    def test_what_is_cached_already_is_not_expected(self) -> None:
        index, prompt = PrefixIndex(ROOMY), names((1, 2, 3))
        index.apply(7, 0, added(*prompt))
        index.expect([7], prompt, now=0)
        assert index.counts.expected == 0

    def test_takes_no_more_than_its_share_and_the_latest_stay(self) -> None:
        index = PrefixIndex(max_blocks=40)
        for number in range(100):
            index.expect([number], names((number, 1, 2)), now=number / 1000)
            index.check_integrity()
        assert index.counts.expected <= 40 // 8
        assert by_worker(index.match(names((99, 1, 2)), now=0.1)) == {99: 3}
        assert by_worker(index.match(names((0, 1, 2)), now=0.1)) == {}
        index.expect([0], names(tuple(range(500))), now=0.2)
        assert by_worker(index.match(names(tuple(range(500))), now=0.2)) == {0: 4}  # the beginning counts


class TestBound:
    def test_is_kept_by_those_of_whom_most_is_known(self) -> None:
        index = PrefixIndex(max_blocks=100)
        small = names(tuple(range(1000, 1010)))
        index.apply(0, 0, added(*small))
        index.apply(1, 0, added(*names(tuple(range(200)))))
        counts = index.counts
        assert counts.known <= 100
        assert counts.known + counts.dropped == 210
        assert by_worker(index.match(small, 0)) == {0: 10}

    def test_what_is_used_stays_and_ends_go_before_beginnings(self) -> None:
        index = PrefixIndex(max_blocks=73)  # 64 for what is known
        used, unused = names(tuple(range(12))), names(tuple(range(100, 116)))
        index.apply(0, 0, added(*used, *unused))
        for round_ in range(20):
            index.expect([0], used, now=0)
            index.apply(0, 28 + 8 * round_, added(*names(tuple(range(1000 * round_, 1000 * round_ + 8)), salt="x")))
            index.check_integrity()
            assert by_worker(index.match(used, 0)) == {0: 12}
        assert by_worker(index.match(unused, 0)) == {}
        assert index.counts.dropped > 0

    def test_ends_go_before_beginnings(self) -> None:
        index, path = PrefixIndex(max_blocks=112), names(tuple(range(60)))
        index.apply(0, 0, added(*path))
        left = 60
        for number in range(3):
            index.apply(0, 60 + 20 * number, added(*names(tuple(range(20)), salt=str(number))))
            found = by_worker(index.match(path, 0)).get(0, 0)
            assert found <= left
            left = found
        assert 0 < left < 60

    def test_counts_what_is_expected_as_well(self) -> None:
        index = PrefixIndex(max_blocks=40)
        for number in range(40):
            index.expect([1], names((number, 51, 52)), now=0)
            index.apply(0, number, added(*names((number,), salt="x")))
            index.check_integrity()
        assert index.counts.expected == 4  # three names, one prompt
        assert 30 <= index.counts.known <= 36

    def test_what_was_about_to_go_can_be_said_again(self) -> None:
        index, path = PrefixIndex(max_blocks=40), names(tuple(range(50)))
        index.apply(0, 0, added(*path))
        index.apply(0, 50, added(*path[:20]))
        index.check_integrity()

    @pytest.mark.parametrize(("blocks", "seconds"), [(0, 1.0), (1, 0.0)])
    def test_impossible_ones_are_refused(self, blocks: int, seconds: float) -> None:
        with pytest.raises(ValueError, match=f"is {blocks if not blocks else seconds}, and must be"):
            PrefixIndex(blocks, seconds)


class TestWorkerSets:
    @given(st.sets(st.integers(0, 300)))
    def test_members(self, numbers: set[int]) -> None:
        workers = sum(1 << number for number in numbers)
        assert list(members(workers)) == sorted(numbers)

    def test_numbers_are_small_and_used_again(self) -> None:
        numbers = WorkerNumbers()
        assert [numbers.take(name) for name in ("a", "b", "c", "b")] == [0, 1, 2, 1]
        numbers.release("a")
        numbers.release("b")
        with pytest.raises(KeyError):
            numbers.id_of(1)
        assert [numbers.take(name) for name in ("d", "a", "e")] == [0, 1, 3]
        assert [numbers.id_of(number) for number in range(4)] == ["d", "a", "c", "e"]
        assert len(numbers) == 4
        with pytest.raises(KeyError):
            numbers.release("b")


class SimulatedWorker:
    """A cache of paths that is closed between two operations, and the batches that nobody has heard yet."""

    def __init__(self) -> None:
        self.cache: set[Path] = set()
        self.number = 0  # of the next event
        self.unheard: list[tuple[int, list[Event]]] = []

    def tell(self, events: list[Event]) -> None:
        self.unheard.append((self.number, events))
        self.number += len(events)

    def compute(self, path: Path) -> None:
        missing = [path[:end] for end in range(1, len(path) + 1) if path[:end] not in self.cache]
        self.cache.update(missing)
        self.tell(added(*(names(part)[-1] for part in missing)))

    def evict(self, path: Path, parents_first: bool) -> None:
        lost = sorted((held for held in self.cache if held[: len(path)] == path), key=len, reverse=not parents_first)
        self.cache.difference_update(lost)
        self.tell(removed(*(names(part)[-1] for part in lost)))


class IndexMachine(RuleBasedStateMachine):
    """Workers compute, evict, die and come back; their batches arrive late, or never; prompts are sent to them.

    The oracle keeps, of each worker, the names that it was told and has not been told to be gone, and whether that is
    the whole truth; and of each prompt sent, until when it counts.
    """

    @initialize(max_blocks=st.sampled_from([6, 24, ROOMY]), native=st.booleans())
    def build(self, max_blocks: int, native: bool) -> None:
        holders = native_holders() if native else Holders()
        tree = native_prefix_tree() if native else PrefixTree()
        assert holders is not None is not tree, "there is a C compiler where tests run"
        self.index = PrefixIndex(max_blocks, EXPECTED_S, holders, tree)
        self.roomy = max_blocks == ROOMY
        self.workers = [SimulatedWorker() for _ in range(WORKERS)]
        self.told: list[set[bytes]] = [set() for _ in range(WORKERS)]
        self.whole = [True] * WORKERS
        self.following = [0] * WORKERS
        self.sent: dict[tuple[int, Path], float] = {}
        self.now = 0.0

    # -- what happens --------------------------------------------------------------------------------------------

    @rule(worker=st.integers(0, WORKERS - 1), path=PATHS)
    def compute(self, worker: int, path: Path) -> None:
        self.workers[worker].compute(path)

    @rule(worker=st.integers(0, WORKERS - 1), path=PATHS, parents_first=st.booleans())
    def evict(self, worker: int, path: Path, parents_first: bool) -> None:
        self.workers[worker].evict(path, parents_first)

    @rule(worker=st.integers(0, WORKERS - 1), batches=st.integers(1, 4), gap=st.just(False) | st.booleans())
    def hear(self, worker: int, batches: int, gap: bool) -> None:
        """So many of its batches arrive as one."""
        source = self.workers[worker]
        heard, source.unheard = source.unheard[:batches], source.unheard[batches:]
        first = heard[0][0] if heard else source.number
        events = [event for _, part in heard for event in part]
        joined = not gap and first == self.following[worker]
        assert self.index.apply(worker, first, events, gap) == joined
        self.following[worker] = first + len(events)
        if not joined:
            self.told[worker].clear()
            self.whole[worker] = False
        for is_added, name in events:
            (self.told[worker].add if is_added else self.told[worker].discard)(name)
        self._said(worker, [name for _, name in events])

    @rule(worker=st.integers(0, WORKERS - 1), batches=st.integers(1, 3))
    def lose(self, worker: int, batches: int) -> None:
        del self.workers[worker].unheard[:batches]

    @rule(worker=st.integers(0, WORKERS - 1))
    def restate(self, worker: int) -> None:
        source = self.workers[worker]
        cached = [names(path)[-1] for path in sorted(source.cache, key=len)]
        self.index.restate(worker, cached, source.number)
        source.unheard.clear()
        self.told[worker] = set(cached)
        self.whole[worker] = True
        self.following[worker] = source.number
        self._said(worker, cached)

    @rule(worker=st.integers(0, WORKERS - 1))
    def die(self, worker: int) -> None:
        self.index.forget(worker)
        self.workers[worker] = SimulatedWorker()
        self.told[worker] = set()
        self.whole[worker] = True
        self.following[worker] = 0
        self.sent = {key: until for key, until in self.sent.items() if key[0] != worker}

    @rule(workers=st.lists(st.integers(0, WORKERS - 1), max_size=3), path=PATHS)
    def send(self, workers: list[int], path: Path) -> None:
        self.index.expect(workers, names(path), self.now)
        # With little room, what counts is the beginning, or nothing; an oracle of that would be the code once more.
        for worker in workers:
            if names(path)[-1] not in self.told[worker] or not self.roomy:
                self.sent[worker, path] = self.now + EXPECTED_S

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def _said(self, worker: int, said: list[bytes]) -> None:
        if self.roomy:
            self.sent = {k: until for k, until in self.sent.items() if k[0] != worker or names(k[1])[-1] not in said}

    # -- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def matches_are_what_was_told_or_sent(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_integrity()
        self.sent = {key: until for key, until in self.sent.items() if until > self.now}
        for path, prompt in PROMPTS.items():
            found = by_worker(self.index.match(prompt, self.now))
            column = np.zeros(WORKERS)
            assert self.index.fill(column, prompt, b"".join(prompt), self.now, value=3.0) == bool(found)
            assert column.tolist() == [3.0 * found.get(worker, 0) for worker in range(WORKERS)]
            for worker, told in enumerate(self.told):
                known = [name in told for name in prompt]
                least = known.index(False) if False in known else DEPTH
                most = max((end for end in range(1, DEPTH + 1) if known[end - 1]), default=0)
                expected = max(
                    (
                        next((i for i in range(len(sent)) if sent[i] != path[i]), len(sent))
                        for number, sent in self.sent
                        if number == worker
                    ),
                    default=0,
                )
                blocks = found.get(worker, 0)
                assert blocks <= max(most, expected)
                if self.roomy:
                    assert blocks >= max(least, expected)
                    assert blocks in (expected, least) or known[blocks - 1]
                if self.roomy and self.whole[worker]:
                    assert least == most  # what is known is closed
                    assert blocks == max(most, expected)

    @invariant()
    def nothing_is_given_up_without_need(self) -> None:
        if hasattr(self, "index") and self.roomy:
            assert self.index.counts.dropped == 0
            assert self.index.counts.known == sum(map(len, self.told))

    @invariant()
    def who_has_heard_everything_knows_the_cache(self) -> None:
        if not hasattr(self, "index") or not self.roomy:
            return
        for worker, source in enumerate(self.workers):
            if self.whole[worker] and not source.unheard and self.following[worker] == source.number:
                assert self.told[worker] == {names(path)[-1] for path in source.cache}


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
