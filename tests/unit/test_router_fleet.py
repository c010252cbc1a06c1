"""Columns of workers: what they say of each, and that they stay true while workers come, change and go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.step_time import StepTime
from pdcore.types import Role, WorkerLoad
from router.fleet import REFRESH_S, STALE_S, Fleet, prompt_limit, room_tokens
from router.snapshot import InFlight, WorkerSnapshot

MODEL = StepTime(base_ms=10.0, token_ms=1.0, attended_ms=0.001, steps=50, largest=512)
COLUMNS = [name for name in Fleet.__annotations__ if not name.startswith("_")] + ["known"]


def worker(name: str = "w", role: Role = Role.PREFILL, **load: object) -> WorkerSnapshot:
    reported = replace(WorkerLoad(free_blocks=100, total_blocks=100), **load)  # type: ignore[arg-type]
    return WorkerSnapshot(name, role, reported, 16, 8, 1024, max_num_batched_tokens=512)


WORKERS = st.builds(
    lambda name, role, running, queued, free, yielding, yielded, mine, known, age: replace(
        worker(
            f"w{name}",
            role,
            running=running,
            queued_prefill_tokens=queued,
            free_blocks=free,
            yielding_requests=min(yielding, running),
            yielding_blocks=yielded,
            step_time=MODEL if known else StepTime(),
        ),
        mine=mine,
        age_s=age,
    ),
    st.integers(0, 9),
    st.sampled_from(Role),
    st.integers(0, 12),
    st.integers(0, 3000),
    st.integers(0, 100),
    st.integers(0, 20),
    st.sampled_from([0, 0, 7, 20]),
    st.builds(
        InFlight,
        requests=st.integers(0, 9),
        prefill_tokens=st.integers(0, 3000),
        longest_prefill=st.integers(0, 3000),
    ),
    st.booleans(),
    st.sampled_from([0.0, 1.0, 7.0]),
)


@given(WORKERS, st.integers(1, 4000))
def test_the_longest_prompt_does_not_count(w: WorkerSnapshot, tokens: int) -> None:
    queued = w.queued_prefill_tokens
    longest = max(tokens, min(w.mine.longest_prefill, queued))
    assert (tokens <= prompt_limit(w)) == (queued + tokens - longest <= w.max_queued_prefill_tokens)


@given(WORKERS, st.integers(1, 4000), st.booleans())
def test_room(w: WorkerSnapshot, tokens: int, give_way: bool) -> None:
    requests = w.requests - give_way * w.load.yielding_requests
    blocks = w.free_blocks + give_way * w.load.yielding_blocks
    fits = requests < w.max_requests and (w.requests == 0 or blocks >= w.blocks_for(tokens))
    gives = (w.load.yielding_requests, w.load.yielding_blocks) if give_way else (0, 0)
    assert (tokens <= room_tokens(w, *gives)) == fits
    fleet = Fleet.of([w])
    assert (fleet.room_if_given_way if give_way else fleet.room_tokens)[0] == room_tokens(w, *gives)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), WORKERS, st.booleans()), max_size=30))
def test_columns_stay_true_while_workers_come_change_and_go(steps: list[tuple[int, WorkerSnapshot, bool]]) -> None:
    fleet, rows = Fleet(), dict[int, WorkerSnapshot]()
    for number, drawn, leaves in steps:
        w = replace(drawn, worker_id=f"w{number}")
        if leaves:
            rows.pop(number, None)
            fleet.remove(w.worker_id)
        else:
            rows[number] = w
            fleet.put(number, w, 0.0)
    fleet.settle(100 * REFRESH_S)
    fresh = Fleet.of([replace(w, age_s=w.age_s + 100 * REFRESH_S) for w in rows.values()], 100 * REFRESH_S)
    assert {fleet.id_of(number) for number in fleet.number_of.values()} == {w.worker_id for w in rows.values()}
    for name in ("prefillers", "decode_workers", "aggregated_workers", "decoders", "measured"):
        assert getattr(fleet, name) == getattr(fresh, name)
    assert fleet.prefillers == sum(w.role is Role.PREFILL for w in rows.values())
    assert fleet.decoders == len(rows) - fleet.prefillers
    for name in COLUMNS:
        column, same = getattr(fleet, name), getattr(fresh, name)
        np.testing.assert_allclose(column[list(rows)], same, err_msg=name)
        if column.dtype == np.bool_:
            assert not np.delete(column, [number for number in rows]).any(), "who is gone is in no pool"


@settings(deadline=None)
@given(st.lists(WORKERS, min_size=1, max_size=8))
def test_a_row_is_written_as_settling_makes_it(drawn: list[WorkerSnapshot]) -> None:
    workers = [replace(w, worker_id=f"w{number}") for number, w in enumerate(drawn)]
    fleet = Fleet.of(workers)
    settled = {name: getattr(fleet, name).copy() for name in COLUMNS}
    for number, w in enumerate(workers):
        fleet.put(number, w, 0.0)
    for name, column in settled.items():
        np.testing.assert_allclose(getattr(fleet, name), column, rtol=1e-14, err_msg=name)


def test_a_queue_is_believed_less_as_time_passes() -> None:
    fleet = Fleet.of([worker("a", queued_prefill_tokens=400, step_time=MODEL), worker("b", step_time=MODEL)])
    assert fleet.queued_ms.tolist() == [410.0, 0.0]
    fleet.settle(STALE_S)
    assert fleet.queued_ms == pytest.approx([310.0, 110.0]), "half of it, and half of the mean"
    fleet.put(0, worker("a", queued_prefill_tokens=400, step_time=MODEL), STALE_S)
    assert fleet.queued_ms[0] == pytest.approx(410.0), "just heard"


def test_names_that_are_not_there_are_in_no_mask() -> None:
    fleet = Fleet.of([worker("a"), worker("b", Role.DECODE)])
    assert fleet.mask_of({"c"}) is None
    mask = fleet.mask_of({"b", "c"})
    assert mask is not None
    assert mask.tolist() == [False, True]
    rows = np.array([True, False])
    assert [fleet.mask_of(names, rows).tolist() for names in ({"b"}, {"c"})] == [[True, True], [True, False]]  # type: ignore[union-attr]
    assert rows.tolist() == [True, False]
    assert fleet.column({"b": 5.0, "c": 7.0}).tolist() == [0.0, 5.0]
    fleet.remove("b")
    fleet.remove("b")
    assert fleet.mask_of({"b"}) is None
    assert not fleet.decode.any()
    assert Fleet().empty
