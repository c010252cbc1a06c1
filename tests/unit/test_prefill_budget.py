"""How prompts share a step: places, shares, and the time that running decodes allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import (
    MIN_PREFILL_TOKENS,
    OLDEST_SHARE,
    Prefill,
    PrefillPlaces,
    prefill_budget,
    prefill_shape,
    split_prefill_budget,
)
from pdcore.config import QueueConfig, SchedulerConfig
from pdcore.step_time import StepShape, StepTime
from pdcore.types import PriorityClass


def config(chunk: int = 512, partial: int = 0, long: int = 0, itl: float = 0.0, **queue: object) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_batched_tokens=8192,
        prefill_chunk_tokens=chunk,
        max_partial_prefills=partial,
        long_prefill_tokens=long,
        target_itl_ms=itl,
        queue=QueueConfig(**queue),  # type: ignore[arg-type]
    )


def split(remaining: list[int], budget: int, chunk: int = 512) -> list[int]:
    return split_prefill_budget([Prefill(tokens) for tokens in remaining], budget, config(chunk))


class TestShares:
    def test_a_long_prompt_does_not_block_short_ones(self) -> None:
        assert split([10_000, 100, 120], 512) == [512 - 220, 100, 120]

    def test_a_long_prompt_goes_on_among_many_short_ones(self) -> None:
        shares = split([10_000, *[100] * 20], 512)
        assert shares[0] == 512 // OLDEST_SHARE
        assert shares[1:4] == [100, 100, 100]

    def test_equal_prompts_are_served_in_order(self) -> None:
        assert split([400, 400, 400], 512) == [400, 112, 0]

    def test_the_chunk_size_bounds_each(self) -> None:
        assert split([1000, 1000], 512, chunk=100) == [100, 100]

    @pytest.mark.parametrize("budget", [0, 1, 3])
    def test_a_tiny_budget_goes_to_the_oldest_at_least(self, budget: int) -> None:
        shares = split([50, 2, 2], budget)
        assert sum(shares) == budget
        assert shares[0] == min(budget, 1)

    @given(
        remaining=st.lists(st.integers(1, 300), max_size=12),
        budget=st.integers(0, 400),
        chunk=st.integers(1, 200),
    )
    def test_all_of_the_budget_is_used_and_no_more(self, remaining: list[int], budget: int, chunk: int) -> None:
        shares = split(remaining, budget, chunk)
        wanted = [min(tokens, chunk) for tokens in remaining]
        assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
        assert sum(shares) == min(budget, sum(wanted))
        if remaining and budget:
            assert shares[0] >= min(wanted[0], max(1, budget // OLDEST_SHARE))

    def test_every_prompt_ends_under_a_flood_of_short_ones(self) -> None:
        long, steps = 5000, 0
        while long > 0:
            steps += 1
            long -= split([long, *[40] * 30], 256)[0]
        assert steps <= -(-5000 // (256 // OLDEST_SHARE))

    def test_a_better_rank_goes_first_and_the_oldest_still_moves_on(self) -> None:
        prefills = [Prefill(100, rank=(1, 0)), Prefill(300, rank=(0, 0)), Prefill(50, rank=(1, 0))]
        assert split_prefill_budget(prefills, 200, config()) == [50, 150, 0]

    def test_a_batch_prompt_in_front_is_sure_of_its_share_only(self) -> None:
        batch = Prefill(1000, rank=(2, 0), lane=PriorityClass.BATCH)
        other = Prefill(1000, rank=(0, 0), lane=PriorityClass.INTERACTIVE)
        assert split_prefill_budget([batch, other], 200, config(batch_share=0.1)) == [20, 180]
        assert split_prefill_budget([batch, other], 5, config(batch_share=0.1)) == [1, 4]
        assert split_prefill_budget([batch, other], 200, config(batch_share=0.0)) == [0, 200]
        assert split_prefill_budget([batch, batch], 200, config(batch_share=0.0)) == [200, 0]


class TestPlaces:
    def test_no_more_prompts_are_computed_in_part_than_may(self) -> None:
        prefills = [Prefill(1000), Prefill(900, started=False), Prefill(800, started=False)]
        assert split_prefill_budget(prefills, 400, config(chunk=100, partial=2)) == [100, 100, 0]

    def test_who_fits_as_a_whole_needs_no_place(self) -> None:
        prefills = [Prefill(1000), Prefill(50, started=False), Prefill(60, started=False)]
        assert split_prefill_budget(prefills, 400, config(partial=1)) == [290, 50, 60]

    def test_who_would_begin_without_a_place_gets_nothing(self) -> None:
        prefills = [Prefill(1000), Prefill(300, started=False)]
        assert split_prefill_budget(prefills, 200, config(partial=1)) == [50, 0]
        assert split_prefill_budget(prefills, 200, config(partial=2)) == [50, 150]

    def test_long_prompts_leave_a_place_to_others(self) -> None:
        places = PrefillPlaces([5000], config(chunk=100, partial=3, long=1000))
        assert places.take(2000)
        assert not places.take(2000)
        assert places.take(1000), "not long"
        assert not places.take(200)

    def test_the_only_place_may_be_a_long_prompt_s(self) -> None:
        assert PrefillPlaces([], config(partial=1, long=1000)).take(2000)

    def test_no_limit(self) -> None:
        places = PrefillPlaces([5000] * 50, config(long=1000))
        assert all(places.take(5000) for _ in range(50))


PREFILLS = st.lists(
    st.builds(
        Prefill,
        remaining=st.integers(1, 300),
        context=st.integers(0, 2000),
        started=st.booleans(),
        rank=st.tuples(st.sampled_from([0.0, 0.0, 1.0]), st.sampled_from([0.0, 0.0, 7.5])),
        lane=st.sampled_from(PriorityClass),
    ),
    max_size=8,
)
LIMITS = st.builds(
    config,
    chunk=st.integers(1, 200),
    partial=st.integers(0, 4),
    long=st.sampled_from([0, 50, 150]),
    itl=st.floats(1.0, 120.0),
    batch_share=st.sampled_from([0.0, 0.1, 0.5]),
)


@given(PREFILLS, st.integers(0, 400), LIMITS)
def test_no_share_shrinks_as_the_budget_grows_and_places_are_kept(
    prefills: list[Prefill], budget: int, limits: SchedulerConfig
) -> None:
    shares = split_prefill_budget(prefills, budget, limits)
    more = split_prefill_budget(prefills, budget + 1, limits)
    assert all(small <= large for small, large in zip(shares, more, strict=True))
    assert sum(shares) <= budget
    if limits.max_partial_prefills:
        started = sum(p.started for p in prefills)
        begun = sum(not p.started and 0 < n < p.remaining for p, n in zip(prefills, shares, strict=True))
        assert begun <= max(0, limits.max_partial_prefills - started)


TIMES = st.builds(
    StepTime,
    base_ms=st.floats(0, 30),
    token_ms=st.floats(0, 2),
    attended_ms=st.floats(0, 0.01),
    steps=st.just(100),
    largest=st.sampled_from([20, 100, 10_000]),
)


@given(PREFILLS, st.integers(0, 300), LIMITS, TIMES, st.integers(0, 16), st.integers(1, 3000))
def test_the_budget_is_the_largest_that_keeps_the_target(
    prefills: list[Prefill], most: int, limits: SchedulerConfig, times: StepTime, decodes: int, context: int
) -> None:
    """Against trying every budget."""
    shape = StepShape(decodes, decodes * context)
    found = prefill_budget(shape, prefills, most, times, limits)
    if not decodes or not prefills:
        assert found == most
        return
    floor = min(most, MIN_PREFILL_TOKENS)
    allowed = max(floor, min(most, times.reach - decodes))
    fitting = [
        budget
        for budget in range(floor, allowed + 1)
        if times.predict_ms(shape + prefill_shape(prefills, split_prefill_budget(prefills, budget, limits)))
        <= limits.target_itl_ms
    ]
    assert found == max(fitting, default=floor)


class TestTarget:
    TIMES = StepTime(base_ms=10.0, token_ms=1.0, attended_ms=0.0, steps=50, largest=1000)

    def test_without_a_target_or_decodes_the_budget_is_what_is_left(self) -> None:
        decodes = StepShape(4, 400)
        assert prefill_budget(decodes, [Prefill(900)], 500, self.TIMES, config()) == 500
        assert prefill_budget(StepShape(0, 0), [Prefill(900)], 500, self.TIMES, config(itl=50.0)) == 500

    def test_the_time_that_is_left(self) -> None:
        assert prefill_budget(StepShape(4, 400), [Prefill(900)], 500, self.TIMES, config(itl=50.0)) == 36

    def test_a_target_that_cannot_be_kept_stops_no_prompt(self) -> None:
        budget = prefill_budget(StepShape(4, 400), [Prefill(900)], 500, self.TIMES, config(itl=5.0))
        assert budget == MIN_PREFILL_TOKENS
        assert prefill_budget(StepShape(4, 400), [Prefill(900)], 3, self.TIMES, config(itl=5.0)) == 3

    def test_nothing_known_means_small_steps_that_grow(self) -> None:
        decodes, limits = StepShape(4, 400), config(itl=500.0)
        assert prefill_budget(decodes, [Prefill(900)], 400, StepTime(), limits) == MIN_PREFILL_TOKENS
        small = StepTime(base_ms=10.0, token_ms=1.0, steps=4, largest=20)
        assert prefill_budget(decodes, [Prefill(900)], 400, small, limits) == 2 * 20 - 4
