"""Capacities in both forms against one worker after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.step_time import MIN_STEPS, StepTime
from pdcore.types import Role, WorkerLoad
from router.capacity import FEW, FewWorkers, ManyWorkers, capacity_of
from router.fleet import Fleet
from router.shedding import Ahead, Asked, Forecast, forecast, on_worker
from router.snapshot import InFlight, WorkerSnapshot
from tests.support import forecast_oracle

# Binary fractions, so that workers are alike or not, but never apart by what was rounded.
MODELS = st.builds(
    StepTime,
    base_ms=st.integers(0, 200).map(lambda n: n / 4),
    token_ms=st.integers(0, 64).map(lambda n: n / 64),
    attended_ms=st.integers(0, 64).map(lambda n: n / 2**20),
    steps=st.sampled_from([0, MIN_STEPS - 1, MIN_STEPS, MIN_STEPS, 99]),
    largest=st.sampled_from([1, 8192]),
    drift=st.sampled_from([0.5, 1.0, 2.0]),
)
WORKERS = st.builds(
    lambda role, model, queued, running, free, places, block_size, budget, mine, age_s: WorkerSnapshot(
        "",
        role,
        WorkerLoad(
            running=running, queued_prefill_tokens=queued, free_blocks=free, total_blocks=2000, step_time=model
        ),
        block_size=block_size,
        max_requests=places,
        max_queued_prefill_tokens=1 << 20,
        mine=mine,
        max_num_batched_tokens=budget,
        age_s=age_s,
    ),
    st.sampled_from(Role),
    MODELS,
    st.integers(0, 5000) | st.just(0),
    st.integers(0, 12) | st.just(0),
    st.integers(0, 2000) | st.integers(0, 40),
    st.integers(1, 12),
    st.sampled_from([16, 16, 64]),
    st.sampled_from([100, 512, 512, 8192]),
    st.builds(
        InFlight,
        requests=st.integers(0, 9),
        prefill_tokens=st.integers(0, 3000),
        new_requests=st.integers(0, 3),
        new_prefill_tokens=st.integers(0, 3000),
        new_blocks=st.integers(0, 300),
    )
    | st.just(InFlight()),
    st.sampled_from([0.0, 7.0]),
)
ASKED = st.integers(1, 9000).flatmap(lambda prompt: st.builds(Asked, st.just(prompt), st.integers(1, prompt)))
AHEAD = st.builds(Ahead, st.just(0) | st.integers(0, 10**6), st.integers(0, 60) | st.integers(0, 2))
START_MS = st.none() | st.sampled_from([0.0, 0.25, 20.0, 1e4])
PACE = st.sampled_from([0.25, 1.0, 1.5, 4.0])


def fleet_of(workers: Sequence[WorkerSnapshot], gone: Sequence[WorkerSnapshot], seed: int) -> Fleet:
    """Workers under any numbers, after some others have gone."""
    fleet = Fleet()
    numbers = [*range(len(workers) + len(gone))]
    random.Random(seed).shuffle(numbers)
    for number, worker in zip(numbers, [*gone, *workers], strict=True):
        worker.worker_id = f"w{number}"
        fleet.put(number, worker, 0.0)
    for worker in gone:
        fleet.remove(worker.worker_id)
    fleet.settle(0.0)
    return fleet


@settings(deadline=None, max_examples=400)
@given(
    workers=st.lists(WORKERS, max_size=24),
    gone=st.lists(WORKERS, max_size=4),
    seed=st.integers(0, 99),
    requests=st.lists(st.tuples(ASKED, AHEAD), min_size=1, max_size=4),
    start_ms=START_MS,
    pace=PACE,
)
def test_forecasts(
    workers: list[WorkerSnapshot],
    gone: list[WorkerSnapshot],
    seed: int,
    requests: list[tuple[Asked, Ahead]],
    start_ms: float | None,
    pace: float,
) -> None:
    fleet = fleet_of(workers, gone, seed)
    forms = [capacity_of(fleet, start_ms, pace, few=few) for few in (0, 1000)]
    for asked, ahead in requests:
        expected = forecast_oracle.forecast(asked, ahead, fleet.rows, start_ms, pace)
        if expected is None:
            assert forms == [None, None]
            return
        many, few = forms
        assert isinstance(many, ManyWorkers)
        assert isinstance(few, FewWorkers)
        for capacity in (many, few):
            found = forecast(asked, ahead, capacity)
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
            assert {type(ms) for ms in found} == {float}, "numpy's own numbers make what follows slow"
            if start_ms is not None:
                generating = forecast_oracle.generating(fleet.rows)
                free = sum(forecast_oracle.free_places(worker, asked.prompt_tokens) for worker in generating)
                assert capacity.free_places(asked.prompt_tokens) == free


@settings(deadline=None)
@given(workers=st.lists(WORKERS, min_size=1, max_size=6), gone=st.lists(WORKERS, max_size=2), asked=ASKED)
def test_on_each_worker(workers: list[WorkerSnapshot], gone: list[WorkerSnapshot], asked: Asked) -> None:
    fleet = fleet_of(workers, gone, 0)
    for worker in workers:
        found = on_worker(fleet, fleet.number_of[worker.worker_id], asked.prompt_tokens, asked.lacking)
        expected = forecast_oracle.on_worker(worker, asked.prompt_tokens, asked.lacking)
        assert found == (None if expected is None else pytest.approx(expected, rel=1e-9))


@settings(deadline=None)
@given(workers=st.lists(WORKERS, max_size=6), gone=st.lists(WORKERS, max_size=2), seed=st.integers(0, 99))
def test_who_computes_and_who_generates(workers: list[WorkerSnapshot], gone: list[WorkerSnapshot], seed: int) -> None:
    fleet = fleet_of(workers, gone, seed)
    for mask, who in (
        (fleet.computing, forecast_oracle.computing(workers)),
        (fleet.generating, forecast_oracle.generating(workers)),
    ):
        assert {fleet.id_of(number) for number in mask.nonzero()[0].tolist()} == {one.worker_id for one in who}


@pytest.mark.parametrize("count", [2, FEW, FEW + 1])
def test_later_reports_change_nothing(count: int) -> None:
    model = StepTime(base_ms=10.0, token_ms=1.0, steps=MIN_STEPS)

    def worker(number: int, queued: int, running: int) -> WorkerSnapshot:
        load = WorkerLoad(
            running=running, queued_prefill_tokens=queued, free_blocks=50, total_blocks=50, step_time=model
        )
        return WorkerSnapshot(f"w{number}", Role.AGGREGATED, load, 16, 4, 1 << 20, max_num_batched_tokens=512)

    fleet = Fleet.of([worker(number, 100, 2) for number in range(count)])
    capacity = capacity_of(fleet, 20.0, 1.0)
    for number in range(count):
        fleet.put(number, worker(number, 9000, 9), 0.0)
    fleet.remove("w0")
    assert capacity is not None
    assert forecast(Asked(90, 90), Ahead(0, 0), capacity) == Forecast(110.0, 100.0)
    level_ms = 110.0 + 522.0 / 512 * 64 / count
    assert forecast(Asked(90, 90), Ahead(64, 2), capacity).wait_ms == pytest.approx(level_ms)
    assert capacity.free_places(90) == 2 * count
