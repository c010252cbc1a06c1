"""Workers chosen in C: the same as by numpy, at the same costs to the bit, and without a compiler all the same."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.hashing import HASH_BYTES
from pdcore.native_build import NativeUnavailable
from pdcore.step_time import StepTime
from pdcore.types import Role, WorkerLoad
from router import worker_sets
from router.candidates import NOTHING_AHEAD, Ahead, Candidates, Is
from router.fleet import Fleet
from router.holders import Holders
from router.links import Links
from router.native import library
from router.native.candidates import NativeCandidates, native_candidates
from router.native.holders import native_holders
from router.native.library import routing_library
from router.native.prefix_tree import native_prefix_tree
from router.policy import Route, RouteRequest, choose
from router.prefix_tree import PrefixTree
from router.ranking import Best
from router.snapshot import InFlight, WorkerSnapshot
from router.worker_sets import members, spread

ROLES = [value for name, value in vars(Is).items() if name.isupper() and value <= Is.WHOLE_CALMLY]


def some_fleet(rng: random.Random, count: int) -> Fleet:
    """Workers of which many are alike, and some know nothing of their steps; some rows are free."""
    fleet = Fleet()
    for number in range(count):
        load = WorkerLoad(
            queued_prefill_tokens=rng.choice([0, 0, 300, 2000]),
            running=rng.choice([0, 1, 5, 8]),
            free_blocks=rng.choice([0, 20, 100, 100]),
            total_blocks=rng.choice([30, 100, 100]),
            yielding_requests=rng.choice([0, 1]),
            yielding_blocks=rng.choice([0, 10]),
            step_time=rng.choice(
                [StepTime(), StepTime(10.0, 0.3, 1e-4, steps=9, largest=512), StepTime(12.3, 0.31, 2e-4, steps=9)]
            ),
        )
        mine = InFlight(requests=rng.choice([0, 2]), prefill_tokens=rng.choice([0, 700]))
        row = WorkerSnapshot(
            f"w{number}",
            rng.choice(list(Role)) if rng.random() < 0.7 else rng.choice([Role.PREFILL, Role.DECODE]),
            load,
            rng.choice([16, 16, 32]),
            8,
            1024,
            mine,
            decisions=rng.choice([0, 0, 3]),
            max_num_batched_tokens=rng.choice([256, 512]),
            age_s=rng.choice([0.0, 1.5]),
        )
        fleet.put(number, row, 0.0)
    for number in range(count):
        if rng.random() < 0.1:
            fleet.remove(f"w{number}")
    fleet.settle(0.0)
    return fleet


def some_links(rng: random.Random, count: int) -> Links:
    """Rows shorter and longer than a fleet of so many, workers without one, and some that are gone."""
    links = Links()
    for prefill in rng.sample(range(count + 2), rng.choice([0, 1, count // 2, count])):
        for decode in rng.sample(range(count + 9), rng.randrange(count + 9)):
            links.seen(prefill, decode, rng.choice([0.01, 0.5, 2.0]))
    for _ in range(rng.choice([0, 1, count // 2])):
        links.forget(rng.randrange(count + 9))
    return links


def some_request(rng: random.Random, count: int) -> RouteRequest:
    tokens = rng.choice([1, 60, 300, 1000, 1600])
    links = some_links(rng, count) if rng.random() < 0.7 else None
    cached = np.array([rng.choice([0, 0, 16, 160, tokens]) for _ in range(count)], np.float64)
    names = [f"w{number}" for number in range(count)]
    return RouteRequest(
        tokens,
        tokens + rng.choice([1, 100, 500]),
        samples=rng.choice([1, 1, 4]),
        resumes=rng.random() < 0.1,
        interactive=rng.random() < 0.5,
        local_only=rng.random() < 0.1,
        exclude=frozenset(rng.sample(names, rng.choice([0, 0, 1, count // 2]))),
        avoid=frozenset(rng.sample(names, rng.choice([0, 0, 1, count - 1]))),
        closed=np.array([rng.random() < 0.3 for _ in range(count)]) if rng.random() < 0.3 else None,
        cached=np.minimum(cached, tokens) if rng.random() < 0.7 else None,
        draw=rng.randrange(1 << 40),
        links=links,
        disaggregate=rng.choice(["always", "auto", "auto"]),
        handover_ms=rng.choice([0.0, 20.0]),
        itl_ms=rng.choice([0.0, 15.0, 100.0]),
    )


def in_c(request: RouteRequest, fleet: Fleet, ahead: Ahead = NOTHING_AHEAD) -> NativeCandidates:
    found = native_candidates(request, fleet, ahead)
    assert found is not None, "there is a C compiler where tests run"
    return found


class Calls:
    """The library, and the names of the functions that were called."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return getattr(routing_library(), name)

    def look(self, request: RouteRequest, fleet: Fleet, ahead: Ahead) -> NativeCandidates:
        return NativeCandidates(cast(ctypes.PyDLL, self), request, fleet, ahead)


def in_numpy(request: RouteRequest, fleet: Fleet, _: Ahead = NOTHING_AHEAD) -> Candidates:
    return Candidates(request, fleet)


@settings(deadline=None, max_examples=120)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 2, 3, 7, 8, 30, 130]))
def test_both_see_the_same_workers_and_choose_the_same_one_at_the_same_cost(seed: int, count: int) -> None:
    rng = random.Random(seed)
    fleet, request = some_fleet(rng, count), some_request(rng, count)
    plain, native = Candidates(request, fleet), in_c(request, fleet)
    assert [native.any(kind) for kind in ROLES] == [plain.any(kind) for kind in ROLES]
    first = plain.prefill(Is.PREFILLS | Is.CAN_PREFILL)
    assert native.prefill(Is.PREFILLS | Is.CAN_PREFILL) == first
    for who in (Is.DECODES | Is.TAKES_TICKET, Is.DECODES_SAMPLES | Is.TAKES_TICKET_IF_GIVEN_WAY):
        for computes in (first, None):
            assert native.decode(who, computes) == plain.decode(who, computes)
    for who in (Is.WHOLE, Is.WHOLE_CALMLY | Is.RUNS_WHOLE_NOW, Is.AGGREGATED | Is.RUNS_WHOLE_NOW):
        assert native.whole(who) == plain.whole(who)
    assert choose(request, fleet, in_c) == choose(request, fleet, in_numpy)


DECODE = [
    kind | takes
    for kind in (Is.DECODES, Is.DECODES_SAMPLES)
    for takes in (Is.TAKES_TICKET, Is.TAKES_TICKET_IF_GIVEN_WAY)
]
WHOLE = [kind | Is.RUNS_WHOLE_NOW for kind in (Is.WHOLE, Is.WHOLE_CALMLY, Is.AGGREGATED, Is.DECODES)]


@settings(deadline=None, max_examples=120)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 2, 3, 8, 30, 130]))
def test_what_was_found_ahead_is_what_numpy_finds_in_whatever_order_it_is_asked_for(seed: int, count: int) -> None:
    rng = random.Random(seed)
    fleet, request = some_fleet(rng, count), some_request(rng, count)
    ahead = (
        rng.choice([0, Is.PREFILLS, Is.PREFILLS | Is.CAN_PREFILL, Is.PREFILLS | Is.CAN_PREFILL]),
        rng.choice([0, *DECODE]),
        rng.choice([0, *WHOLE]),
    )
    plain, native = Candidates(request, fleet), in_c(request, fleet, ahead)
    firsts: list[Best | None] = [native.prefill(ahead[0]) if ahead[0] else None]
    assert firsts[0] is None or firsts[0] == plain.prefill(ahead[0])
    for _ in range(12):
        match rng.randrange(3):
            case 0:
                kinds = rng.choice([ahead[0] or Is.PREFILLS, Is.PREFILLS, Is.PREFILLS | Is.CAN_PREFILL])
                first = native.prefill(kinds)
                assert first == plain.prefill(kinds)
                firsts.append(first)
            case 1:
                kinds, first = rng.choice([ahead[1] or DECODE[0], rng.choice(DECODE)]), rng.choice(firsts)
                assert native.decode(kinds, first) == plain.decode(kinds, first)
            case 2:
                kinds = rng.choice([ahead[2] or WHOLE[0], rng.choice(WHOLE)])
                assert native.whole(kinds) == plain.whole(kinds)


MEASURED = StepTime(10.0, 0.3, steps=9, largest=512)


def two_pools(*others: WorkerSnapshot, step_time: StepTime = MEASURED) -> Fleet:
    load = WorkerLoad(free_blocks=100, total_blocks=100, step_time=step_time)
    pools = [
        WorkerSnapshot(f"{role}-{name}", role, load, 16, 8, 1024, max_num_batched_tokens=512)
        for role in (Role.PREFILL, Role.DECODE)
        for name in "ab"
    ]
    return Fleet.of([*pools, *others])


AGGREGATED = WorkerSnapshot("a", Role.AGGREGATED, WorkerLoad(free_blocks=100, total_blocks=100), 16, 8, 1024)
ONE_CALL = {
    "always": (two_pools(), RouteRequest(300, 350)),
    "auto": (two_pools(), RouteRequest(300, 350, disaggregate="auto", handover_ms=1e3)),
    "calmly": (two_pools(AGGREGATED), RouteRequest(300, 350, disaggregate="auto", itl_ms=1e3, links=Links())),
    "samples": (two_pools(), RouteRequest(300, 350, samples=3, disaggregate="auto")),
    "nothing measured": (two_pools(step_time=StepTime()), RouteRequest(300, 350, disaggregate="auto")),
    "rebuild": (two_pools(), RouteRequest(300, 350, rebuild=True)),
    "resumes": (two_pools(), RouteRequest(300, 350, resumes=True)),
    "local only": (two_pools(), RouteRequest(300, 350, local_only=True)),
    "aggregated workers": (Fleet.of([AGGREGATED]), RouteRequest(300, 350)),
    "a prefill worker alone": (Fleet.of([replace(AGGREGATED, role=Role.PREFILL)]), RouteRequest(300, 350)),
    "decode workers alone": (Fleet.of([replace(AGGREGATED, role=Role.DECODE)]), RouteRequest(300, 350)),
}


@pytest.mark.parametrize("name", ONE_CALL)
def test_a_usual_choice_takes_one_call(name: str) -> None:
    fleet, request = ONE_CALL[name]
    calls = Calls()
    assert isinstance(choose(request, fleet, calls.look), Route)
    assert calls.names == ["pdrt_look"]


def test_batch_requests_are_asked_to_give_way_in_a_call_of_its_own() -> None:
    load = WorkerLoad(running=3, total_blocks=100, yielding_requests=2, yielding_blocks=60)
    fleet = two_pools()
    for row in fleet.rows:
        if row.role is Role.DECODE:
            fleet.put(fleet.number_of[row.worker_id], replace(row, load=load), 0.0)
    calls = Calls()
    assert isinstance(choose(RouteRequest(300, 350, interactive=True), fleet, calls.look), Route)
    assert calls.names == ["pdrt_look", "pdrt_decode"]


def test_other_policies_are_numpy_alone() -> None:
    fleet = some_fleet(random.Random(1), 5)
    assert native_candidates(RouteRequest(9, 9, policy="least_loaded"), fleet) is None


def test_columns_that_do_not_fit_are_refused_and_others_read_right() -> None:
    rng = random.Random(2)
    fleet = some_fleet(rng, 20)
    with pytest.raises(ValueError, match="shape"):
        native_candidates(RouteRequest(900, 950, cached=np.zeros(19)), fleet)
    cached = np.zeros(40, np.float32)[::2]
    cached[7:] = 160
    plain = cached.astype(np.float64)
    frozen = plain.copy()
    frozen.setflags(write=False)
    for column in (cached, frozen):
        asked = RouteRequest(900, 950, cached=column)
        assert choose(asked, fleet) == choose(replace(asked, cached=plain), fleet, in_numpy)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sets(st.integers(0, 300), min_size=1), max_size=12), st.booleans())
def test_sets_are_spread_over_a_column(drawn: list[set[int]], native: bool) -> None:
    sets = [sum(1 << number for number in numbers) for numbers in drawn]
    column, expected = np.zeros(280), np.zeros(301)
    column[:9] = expected[:9] = 3.5
    for value, workers in enumerate(sets, 1):
        rows = list(members(workers))
        expected[rows] = np.maximum(expected[rows], value)
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(worker_sets, "routing_library", lambda: None)
        spread(column, sets, [float(value) for value in range(1, len(sets) + 1)])
    assert column.tolist() == expected[:280].tolist()


def test_without_a_compiler_numpy_chooses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(3)
    fleet, request = some_fleet(rng, 30), some_request(rng, 30)
    chosen = choose(request, fleet)

    def none(*_: Any) -> None:
        raise NativeUnavailable("no C compiler")

    monkeypatch.setattr(library, "open_library", none)
    routing_library.cache_clear()
    try:
        assert choose(request, fleet) == chosen
        assert "no C compiler" in caplog.text
    finally:
        routing_library.cache_clear()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1 << 32), st.sampled_from([2, 70, 300]))
def test_holders_in_c_are_those_of_python(seed: int, workers: int) -> None:
    rng = random.Random(seed)
    native, plain = native_holders(), Holders()
    assert native is not None
    paths = [[rng.randbytes(HASH_BYTES) for _ in range(rng.choice([1, 40, 200]))] for _ in range(30)]
    held: dict[int, set[bytes]] = {}
    for _ in range(300):
        worker, path = rng.randrange(workers), rng.choice(paths)
        mine = held.setdefault(worker, set())
        if rng.random() < 0.7:
            names = [name for name in path[: rng.randrange(len(path) + 1)] if name not in mine]
            mine.update(names)
            native.add(worker, names)
            plain.add(worker, names)
        else:
            names = [name for name in path[rng.randrange(len(path)) :] if name in mine]
            mine.difference_update(names)
            native.remove(worker, names)
            plain.remove(worker, names)
    assert native.items() == plain.items()
    assert len(native) == len(plain)
    for path in paths:
        for among in (-1, rng.getrandbits(workers), 0):
            assert list(native.match(path, among)) == list(plain.match(path, among))
            columns = np.zeros((2, workers))
            for column, holders in zip(columns, (native, plain), strict=True):
                holders.fill(column, path, b"".join(path), among, 16.0)
            assert columns[0].tolist() == columns[1].tolist()
    for worker, mine in held.items():
        native.remove(worker, list(mine))
    assert len(native) == 0
    assert native.items() == {}
    with pytest.raises(ValueError, match="16 bytes"):
        native.add(0, [b"short"])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1 << 32), st.sampled_from([2, 70, 300]), st.sampled_from([3, 40]))
def test_the_tree_in_c_is_that_of_python(seed: int, workers: int, depth: int) -> None:
    rng = random.Random(seed)
    native, plain = native_prefix_tree(), PrefixTree()
    assert native is not None
    stem = [rng.randbytes(HASH_BYTES) for _ in range(depth)]

    def some_path() -> list[bytes]:
        """It leaves the others' way anywhere, mostly; a name stands for all before it."""
        begun = stem[: rng.randrange(depth + 1)]
        return begun + [rng.randbytes(HASH_BYTES) for _ in range(rng.choice([0, 1, depth]) or not begun)]

    prompts: list[tuple[int, Any, int]] = []
    paths = [some_path() for _ in range(12)]
    for step in range(400):
        if rng.random() < (0.7 if step < 250 else 0.2):
            worker, path = rng.randrange(workers), rng.choice([*paths, some_path()])
            edge, end = plain.enter(worker, path, b""), native.enter(worker, path, b"".join(path))
            prompts.append((worker, edge, end))
            for other in rng.sample(range(workers), rng.choice([0, 0, 1, 2])):
                plain.join(other, edge)
                native.join(other, end)
                prompts.append((other, edge, end))
        elif prompts:
            worker, edge, end = prompts.pop(rng.randrange(len(prompts)))
            plain.leave(worker, edge)
            native.leave(worker, end)
        if step % 20 == 0:
            plain.check_integrity()
            native.check_integrity()
            assert native.names == plain.names
            for path in (*paths, stem, []):
                among = rng.choice([-1, rng.getrandbits(workers), 0, 1 << workers - 1])
                assert native.match(path, among) == plain.match(path, among)
                columns = np.full((2, workers - 1), 17.0)
                found = [
                    tree.fill(column, path, b"".join(path), among, 16.0)
                    for column, tree in zip(columns, (native, plain), strict=True)
                ]
                assert found[0] == found[1] == bool(plain.match(path, among))
                assert columns[0].tolist() == columns[1].tolist()
    for worker, edge, end in prompts:
        plain.leave(worker, edge)
        native.leave(worker, end)
    native.check_integrity()
    assert native.names == plain.names == 0
    with pytest.raises(ValueError, match="16 bytes"):
        native.match([b"short"], -1)


def test_a_fleet_that_grows_gets_a_larger_place_for_results() -> None:
    fleet = some_fleet(random.Random(1), 2)
    asked = RouteRequest(900, 950, draw=3)
    in_c(asked, fleet)
    before = fleet.workspace
    fleet.reserve(200)
    assert choose(asked, fleet, in_c) == choose(asked, fleet, in_numpy)
    assert fleet.workspace is not before
