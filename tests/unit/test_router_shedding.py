"""When a first token is expected, what is shed for it, and where batch requests are held back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pdcore.classes import ClassObjective, ClassObjectives
from pdcore.step_time import MIN_STEPS, StepTime
from pdcore.types import PriorityClass, Role, WorkerLoad
from router.capacity import Capacity, capacity_of, prompt_ms
from router.fleet import Fleet
from router.gaps import closed_to_batch
from router.shedding import (
    ARRIVING,
    CERTAIN,
    HOPELESS,
    MAX_PACE,
    WAITING,
    Ahead,
    Asked,
    Forecast,
    Pace,
    forecast,
    on_worker,
    verdict,
)
from router.snapshot import InFlight, WorkerSnapshot

STEADY = StepTime(base_ms=10.0, token_ms=0.9, steps=MIN_STEPS)
"""A step of 100 tokens takes 100 ms, so a token takes 1 ms."""


def worker(
    name: str = "p",
    role: Role = Role.PREFILL,
    *,
    step_time: StepTime = STEADY,
    queued: int = 0,
    running: int = 0,
    by_class: tuple[int, ...] = (0, 0, 0),
    max_requests: int = 8,
) -> WorkerSnapshot:
    load = WorkerLoad(
        running=running, queued_prefill_tokens=queued, free_blocks=90, total_blocks=100, step_time=step_time
    )
    return WorkerSnapshot(
        name,
        role,
        load,
        block_size=16,
        max_requests=max_requests,
        max_queued_prefill_tokens=200,
        mine=InFlight(by_class=by_class),
        max_num_batched_tokens=100,
    )


def capacity(*workers: WorkerSnapshot, start_ms: float | None = None, pace: float = 1.0) -> Capacity:
    """With a decode worker that has room, if nobody else generates."""
    if all(one.role is Role.PREFILL for one in workers):
        workers = (*workers, worker("d", Role.DECODE))
    found = capacity_of(Fleet.of(workers), start_ms, pace)
    assert found is not None
    return found


def wait_ms(ahead: int, *workers: WorkerSnapshot) -> float:
    return forecast(Asked(100, 100), Ahead(ahead, 1), capacity(*workers)).wait_ms


class TestForecast:
    def test_what_is_ahead_is_computed_first_then_the_prompt(self) -> None:
        found = forecast(Asked(200, 150), Ahead(300, 2), capacity(worker(queued=100)))
        assert found.wait_ms == pytest.approx(100 + 300)
        assert found.own_ms == pytest.approx(2 * 10 + 150 * 0.9)

    def test_attention_counts_for_the_prompt(self) -> None:
        dear = replace(STEADY, attended_ms=0.01)
        found = forecast(Asked(200, 100), Ahead(), capacity(worker(step_time=dear)))
        assert found.own_ms == pytest.approx(100 + 0.01 * (100 * 100 + 100 * 100 / 2))

    def test_it_is_poured_over_the_workers(self) -> None:
        assert wait_ms(300, worker("a"), worker("b")) == pytest.approx(150)
        assert wait_ms(300, worker("a", queued=100), worker("b")) == pytest.approx(200)
        assert wait_ms(50, worker("a", queued=100), worker("b")) == pytest.approx(50)
        assert wait_ms(0, worker("a", queued=100), worker("b", queued=300)) == pytest.approx(100)

    @given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), min_size=1, max_size=6), st.integers(0, 60))
    def test_pouring_is_handing_out_steps_one_by_one(self, lanes: list[tuple[int, int]], steps: int) -> None:
        """Against giving each step of 100 tokens to whoever is free first. A step is at most as fine as it gets."""
        workers = [
            worker(str(n), queued=100 * queued, step_time=replace(STEADY, base_ms=10.0 * slow, token_ms=0.9 * slow))
            for n, (queued, slow) in enumerate(lanes)
        ]
        free = [100.0 * queued * slow for queued, slow in lanes]
        for _ in range(steps):
            first = min(range(len(free)), key=lambda n: free[n])
            free[first] += 100.0 * lanes[first][1]
        longest_step = 100.0 * max(slow for _, slow in lanes)
        assert abs(wait_ms(100 * steps, *workers) - min(free)) <= longest_step + 1e-6

    def test_the_pace_of_starts_counts_if_it_is_better_than_what_step_times_say(self) -> None:
        busy = [worker("a", queued=100), worker("b", queued=500)]
        asked, ahead = Asked(100, 100), Ahead(10_000, 3)
        assert forecast(asked, ahead, capacity(*busy, start_ms=50.0)).wait_ms == pytest.approx(100 + 3 * 50)
        assert forecast(asked, ahead, capacity(*busy, start_ms=10**6)).wait_ms == wait_ms(10_000, *busy)

    def test_places_that_must_come_free_are_waited_for(self) -> None:
        decode = worker("d", Role.DECODE, running=8)
        full = capacity(worker(), decode, start_ms=400.0)
        assert forecast(Asked(100, 100), Ahead(100, 1), full).wait_ms == pytest.approx(2 * 400)
        unknown = capacity(worker(), decode)
        assert forecast(Asked(100, 100), Ahead(100, 1), unknown).wait_ms == pytest.approx(100)
        some = capacity(worker(), worker("d", Role.DECODE, running=6), start_ms=400.0)
        assert forecast(Asked(100, 100), Ahead(0, 1), some).wait_ms == 0
        assert forecast(Asked(100, 100), Ahead(0, 2), some).wait_ms == pytest.approx(400)
        assert forecast(Asked(1600, 100), Ahead(0, 0), some).wait_ms == pytest.approx(400), "90 free blocks, not 101"
        idle = capacity(worker(), worker("d", Role.DECODE), start_ms=400.0)
        assert forecast(Asked(1600, 100), Ahead(0, 0), idle).wait_ms == 0, "who is idle is asked in any case"

    def test_who_computes_prompts(self) -> None:
        prefill, decode, whole = worker("p"), worker("d", Role.DECODE), worker("a", Role.AGGREGATED)

        def computing(*workers: WorkerSnapshot) -> list[WorkerSnapshot]:
            return [workers[number] for number in Fleet.of(workers).computing.nonzero()[0].tolist()]

        assert computing(prefill, decode) == [prefill]
        assert computing(prefill, decode, whole) == [prefill, whole]
        assert computing(decode, whole) == [whole]
        assert computing(decode) == [decode]
        assert computing(prefill, whole) == [whole], "nobody takes what the prefill worker computes"
        assert computing(prefill) == [prefill], "in need it runs requests as a whole"

    def test_nothing_is_foretold_before_anything_is_known(self) -> None:
        new = Fleet.of([worker(step_time=StepTime()), worker("d", Role.DECODE)])
        assert capacity_of(new, None, 1.0) is None
        assert capacity_of(Fleet(), None, 1.0) is None
        assert on_worker(new, 0, 10, 10) is None

    def test_a_new_worker_is_as_fast_as_the_fastest(self) -> None:
        slow = worker("slow", step_time=replace(STEADY, token_ms=9.0))
        assert wait_ms(300, slow, worker("known"), worker("new", step_time=StepTime())) < 150

    def test_on_one_worker(self) -> None:
        assert on_worker(Fleet.of([worker(queued=100)]), 0, 100, 100) == pytest.approx(200)
        assert prompt_ms((10.0, 0.9, 0.0), 100, 101, 0) == pytest.approx(20 + 101 * 0.9)


ASKED = Asked(100, 100, objective_ms=1000.0)


class TestVerdict:
    def test_by_the_objective_when_it_comes(self) -> None:
        assert verdict(ASKED, Forecast(ARRIVING * 1000 - 100, 100)) is None
        overdue = verdict(ASKED, Forecast(ARRIVING * 1000 + 400, 100))
        assert overdue is not None
        assert (overdue.cause, overdue.allowed_ms) == ("objective", ARRIVING * 1000)
        assert overdue.retry_after_s == pytest.approx(0.5)

    def test_by_the_objective_while_it_waits(self) -> None:
        asked = replace(ASKED, waited_ms=600.0)
        assert verdict(asked, Forecast(WAITING * 1000 - 700, 100)) is None
        overdue = verdict(asked, Forecast(WAITING * 1000 - 699, 100))
        assert overdue is not None
        assert overdue.retry_after_s == 0, "one that came now would have time"

    def test_a_prompt_that_takes_longer_than_the_objective_may_wait_about_as_long(self) -> None:
        assert verdict(ASKED, Forecast(ARRIVING * 6000 - 3000, 3000)) is None
        assert verdict(ASKED, Forecast(3000, 3000)) is not None
        assert verdict(replace(ASKED, waited_ms=0.0), Forecast(2600, 3000)) is None

    def test_without_an_objective_only_the_client_counts(self) -> None:
        batch = replace(ASKED, objective_ms=0.0)
        assert verdict(batch, Forecast(10**9, 100)) is None
        overdue = verdict(replace(batch, deadline_ms=1000.0), Forecast(CERTAIN * 1000, 100))
        assert overdue is not None
        assert overdue.cause == "deadline"
        assert verdict(replace(batch, deadline_ms=1000.0), Forecast(CERTAIN * 1000 - 101, 100)) is None

    def test_idle_clusters_shed_only_what_is_hopeless(self) -> None:
        assert verdict(ASKED, Forecast(0, 10**6)) is None
        hurried = replace(ASKED, deadline_ms=100.0)
        assert verdict(hurried, Forecast(0, 100 * HOPELESS)) is None
        assert verdict(hurried, Forecast(0, 100 * HOPELESS + 1)) is not None

    @given(
        model=st.builds(
            StepTime,
            base_ms=st.floats(0, 1e6),
            token_ms=st.floats(0, 1e4),
            attended_ms=st.floats(0, 10),
            steps=st.just(MIN_STEPS),
            drift=st.floats(0.25, 4),
        ),
        prompt=st.integers(1, 4000),
        objective_ms=st.floats(0, 1e5),
        waited_ms=st.none() | st.floats(0, 1e6),
        pace=st.floats(1 / MAX_PACE, MAX_PACE),
        others=st.lists(st.integers(0, 10_000), max_size=3),
    )
    def test_however_wrong_it_is_an_idle_worker_gets_work(  # type: ignore[no-untyped-def]
        self, model, prompt, objective_ms, waited_ms, pace, others
    ) -> None:
        """Whatever the step times: with one idle worker and nothing ahead nothing is shed, so there is goodput."""
        assume(model.base_ms + model.token_ms > 0)
        workers = [worker("idle", step_time=model)]
        workers += [worker(str(n), step_time=model, queued=queued) for n, queued in enumerate(others)]
        workers.append(worker("d", Role.DECODE))
        asked = Asked(prompt, prompt, objective_ms, math.inf, waited_ms)
        assert verdict(asked, forecast(asked, Ahead(), capacity(*workers, start_ms=1e6, pace=pace))) is None

    @given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000), st.floats(100, 1e4), st.floats(100, 1e5))
    def test_more_ahead_is_never_better(
        self, tokens: int, more: int, queued: int, objective_ms: float, deadline_ms: float
    ) -> None:
        asked, busy = Asked(100, 100, objective_ms, deadline_ms), capacity(worker(queued=queued + 1))
        less = verdict(asked, forecast(asked, Ahead(tokens, 1), busy))
        worse = verdict(asked, forecast(asked, Ahead(tokens + more, 2), busy))
        assert less is None or worse is not None
        for overdue in (less, worse):
            assert overdue is None or (overdue.retry_after_s >= 0 and overdue.expected_ms > overdue.allowed_ms)


class TestPace:
    def test_predictions_come_to_what_is_seen(self) -> None:
        pace = Pace()
        assert pace.factor == 1
        for _ in range(60):
            pace.observe(1000, 2500)
        assert pace.factor == pytest.approx(2.5, rel=0.02)
        for _ in range(60):
            pace.observe(1000, 500)
        assert pace.factor == pytest.approx(0.5, rel=0.02)

    def test_one_stall_moves_it_little_and_nothing_moves_it_far(self) -> None:
        pace = Pace()
        for _ in range(60):
            pace.observe(1000, 1000)
        pace.observe(1000, 10**9)
        assert pace.factor < 1.4
        for _ in range(60):
            pace.observe(1000, 10**9)
        assert pace.factor <= MAX_PACE
        for _ in range(200):
            pace.observe(1000, 0)
        assert pace.factor >= 1 / MAX_PACE

    def test_differences_of_milliseconds_say_nothing(self) -> None:
        pace = Pace()
        for _ in range(60):
            pace.observe(1, 10)
        assert pace.factor < 2.6

    def test_it_scales_both_parts(self) -> None:
        found = forecast(ASKED, Ahead(300, 1), capacity(worker(), pace=2.0))
        assert found == pytest.approx((600, 200))


class TestGaps:
    """A decode step of n requests takes 10 + 0.9 n ms."""

    CLASSES = ClassObjectives(
        interactive=ClassObjective(itl_ms=13.0), standard=ClassObjective(itl_ms=15.0), batch=ClassObjective()
    )

    def names(self, *workers: WorkerSnapshot) -> list[str]:
        """Of those that are open to a batch request."""
        closed = closed_to_batch(Fleet.of(workers), 100, self.CLASSES)
        return [worker.worker_id for worker, shut in zip(workers, closed, strict=True) if not shut]

    def test_batch_goes_where_the_pace_of_the_others_stays(self) -> None:
        few = worker("few", Role.DECODE, running=2, by_class=(1, 0, 1))
        many = worker("many", Role.DECODE, running=3, by_class=(1, 0, 2))
        assert self.names(few, many) == ["few"]

    def test_the_shortest_objective_there_counts(self) -> None:
        patient = worker("patient", Role.DECODE, running=4, by_class=(0, 4, 0))
        crowded = worker("crowded", Role.DECODE, running=5, by_class=(0, 4, 1))
        assert self.names(patient, crowded) == ["patient"]

    def test_batch_alone_takes_all(self) -> None:
        assert self.names(worker("batch", Role.DECODE, running=7, by_class=(0, 0, 7))) == ["batch"]

    def test_context_counts(self) -> None:
        dear = replace(STEADY, attended_ms=0.01)
        workers = [worker("d", Role.DECODE, step_time=dear, running=1, by_class=(1, 0, 0))]
        assert self.names(*workers) == []
        assert not closed_to_batch(Fleet.of(workers), 10, replace(self.CLASSES, interactive=ClassObjective())).any()

    def test_prefill_workers_and_unknown_ones_are_open(self) -> None:
        prefill = worker("p", running=9, by_class=(9, 0, 0))
        unknown = worker("new", Role.AGGREGATED, running=7, by_class=(7, 0, 0), step_time=StepTime())
        assert self.names(prefill, unknown) == ["p", "new"]
        assert self.names(prefill) == [], "in need it generates, too"


def test_classes_by_their_names() -> None:
    classes = ClassObjectives()
    found = [classes.of(priority) for priority in PriorityClass]
    assert found == [classes.interactive, classes.standard, classes.batch]
    assert classes.batch.ttft_ms == 0, "batch fills the gaps"
