"""How many tokens the prompts of a step get, and which of them: pure functions, called by the scheduler.

Two limits meet here: the token budget, and with `target_itl_ms` the time that the running decodes allow the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdcore.config import SchedulerConfig
from pdcore.step_time import StepShape, StepTime
from pdcore.types import PriorityClass

OLDEST_SHARE = 4
"""The oldest prefill is sure of one part in this many of the prefill budget."""

MIN_PREFILL_TOKENS = 16
"""What prompts get in each step whatever `target_itl_ms` says: no decode may stop them for ever."""


class Prefill(NamedTuple):
    """A prompt that may get tokens in this step.

    Attributes:
        remaining: tokens that it lacks (>= 1). context: tokens that it has in the cache.
        started: it holds blocks already; else it takes them with its first tokens.
        rank: the lower goes first, whatever its length. lane: its class.
    """

    remaining: int
    context: int = 0
    started: bool = True
    rank: tuple[float, float] = (0.0, 0.0)
    lane: PriorityClass = PriorityClass.STANDARD


class PrefillPlaces:
    """Places for prompts that are computed in part, see `max_partial_prefills`: who is one needs one.

    With two or more places one of them is never a long prompt's: short prompts that come while long ones are computed
    find it free.
    """

    def __init__(self, started: Iterable[int], config: SchedulerConfig) -> None:
        """`started`: tokens that each prompt lacks that holds blocks already."""
        taken = list(started)
        most = config.max_partial_prefills
        self._config = config
        self._free: float = most - len(taken) if most else float("inf")
        self._free_long: float = max(1, most - 1) - sum(map(self._is_long, taken)) if most else float("inf")

    def _is_long(self, remaining: int) -> bool:
        return 0 < self._config.long_prefill_tokens < remaining

    def needed(self, remaining: int) -> bool:
        """Whether a prompt is sure to be computed in part, or long, so that it may not begin without a place."""
        return remaining > self._config.prefill_chunk_tokens or self._is_long(remaining)

    def take(self, remaining: int) -> bool:
        """Take a place for a prompt that begins; False if there is none for it."""
        long = self._is_long(remaining)
        if self._free < 1 or (long and self._free_long < 1):
            return False
        self._free -= 1
        self._free_long -= long
        return True

    @property
    def any_free(self) -> bool:
        return self._free >= 1


def split_prefill_budget(prefills: Sequence[Prefill], budget: int, config: SchedulerConfig) -> list[int]:
    """Share `budget` tokens among prompts, of which each gets `prefill_chunk_tokens` at most.

    One part in `OLDEST_SHARE` goes to the oldest, the rest to the one with the fewest tokens left, then the next,
    within each rank. So a long prompt does not block short ones, prompts of equal length are served in order, and the
    oldest always moves on; hence every prompt ends.

    A prompt that begins now must find a place (see `PrefillPlaces`), or be computed as a whole. Without either it
    gets nothing, and the little that is left of the budget at that point is not used.

    Args:
        prefills: the oldest first. budget: tokens for all (>= 0).

    Returns:
        Tokens for each, in the same order. Each of them is at least what it is with a smaller budget.
    """
    places = PrefillPlaces((p.remaining for p in prefills if p.started), config)
    wanted: list[int] = []
    placed: list[bool] = []
    for prefill in prefills:
        first = not any(placed)
        placed.append(
            prefill.started or ((first or places.needed(prefill.remaining)) and places.take(prefill.remaining))
        )
        denied = places.needed(prefill.remaining) and not placed[-1]
        wanted.append(0 if denied else min(prefill.remaining, config.prefill_chunk_tokens))
    if sum(wanted) <= budget:
        return wanted

    shares = [0] * len(prefills)
    left = budget
    if any(placed):
        oldest = placed.index(True)
        shares[oldest] = min(wanted[oldest], budget, _sure_of(prefills, oldest, budget, config))
        left -= shares[oldest]
    # The one that is nearest to its end first; the older first among equals.
    for i in sorted(range(len(prefills)), key=lambda i: (prefills[i].rank, prefills[i].remaining)):
        more = min(wanted[i] - shares[i], left)
        left -= more
        # It would begin, not end, and have no place: what it may not use stays unused.
        if shares[i] + more < wanted[i] and not placed[i] and not places.any_free:
            continue
        shares[i] += more
    return shares


def _sure_of(prefills: Sequence[Prefill], oldest: int, budget: int, config: SchedulerConfig) -> int:
    """Tokens that the oldest prefill gets before all others."""
    others = any(prefill.lane is not PriorityClass.BATCH for prefill in prefills)
    if config.queue.policy == "priority" and prefills[oldest].lane is PriorityClass.BATCH and others:
        share = config.queue.batch_share
        return max(1, int(budget * share)) if share else 0
    return max(1, budget // OLDEST_SHARE)


def prefill_shape(prefills: Sequence[Prefill], shares: Sequence[int]) -> StepShape:
    """What these tokens of prompts add to a step."""
    return StepShape(
        sum(shares), sum(tokens * (p.context + tokens) for p, tokens in zip(prefills, shares, strict=True))
    )


def prefill_budget(
    decodes: StepShape, prefills: Sequence[Prefill], most: int, step_time: StepTime, config: SchedulerConfig
) -> int:
    """Tokens for prompts in a step with these decodes: the most, up to `most`, with which the step is expected to
    stay within `target_itl_ms`.

    Never less than `MIN_PREFILL_TOKENS` (or `most`), and while the model of step times has seen small steps only, no
    more than it can tell about.
    """
    target = config.target_itl_ms
    if not target or not decodes.tokens or not prefills:
        return most
    floor = min(most, MIN_PREFILL_TOKENS)
    if not step_time.known:
        return floor
    most = max(floor, min(most, step_time.reach - decodes.tokens))

    def fits(budget: int) -> bool:
        shares = split_prefill_budget(prefills, budget, config)
        return step_time.predict_ms(decodes + prefill_shape(prefills, shares)) <= target

    if fits(most):
        return most
    # No share shrinks as the budget grows, so neither does the time. `low` is allowed, `high` does not fit.
    low, high = floor, most
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
