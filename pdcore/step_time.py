"""What a step of an engine takes, learned from the steps that it has made. Pure.

::

    t = a + b * tokens + c * attended        attended = sum of tokens * context over the sequences of the step

`a` is what a step costs whatever is in it (the weights are read once), `b` what a token costs in the linear layers,
`c` what it costs to attend to one token of context. Every worker fits its own, all the time: the machine's load, the
batch and the model decide.

The fit is a least-squares one of *relative* errors, so that decodes of 20 ms count as much as prefills of a second,
with coefficients that are never negative. Samples are kept by size, in powers of two of their tokens, and only those
of the same size make each other fade: a long stretch of decodes does not make the model forget what a prompt costs. A
sample far off is taken as far as it is plausible, so one stall of the machine changes little, and a machine that
stays slow is believed after some two dozen steps of each size. Until then, and where the formula is not the whole
truth, predictions are scaled by how the last few steps compared to it (`drift`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

FADE = 1 / 8
"""Weight of a new sample among those of its size."""
ERROR_FADE = 1 / 32
"""Weight of a new step in the mean error."""
RECENT = 5
FENCE = 0.5
"""How much slower or faster than expected a step was counts up to this far from the median of the last few of its
size."""
MAX_DRIFT = 4.0
"""Predictions are scaled by no more than this, either way."""
MIN_STEPS = 4
"""Steps before anything is predicted."""
REACH = 2
"""Steps of up to so many times the tokens of the largest one seen are predicted with confidence."""

Row = tuple[float, float, float]


class StepShape(NamedTuple):
    """What a step's time depends on: tokens computed, and the sum over them of the context that each attends to."""

    tokens: int
    attended: int

    def __add__(self, other: object) -> StepShape:
        assert isinstance(other, StepShape)
        return StepShape(self.tokens + other.tokens, self.attended + other.attended)


@dataclass(frozen=True, slots=True)
class StepTime:
    """A fitted model; with `steps` below `MIN_STEPS` it says nothing.

    Attributes:
        base_ms, token_ms, attended_ms: a, b and c of the module, in milliseconds.
        error: mean of |real - predicted| / predicted over late steps.
        steps: steps seen. largest: tokens of the largest of them.
        drift: median of real time over what the coefficients say, of the last few steps; predictions have it in them.
    """

    base_ms: float = 0.0
    token_ms: float = 0.0
    attended_ms: float = 0.0
    error: float = 0.0
    steps: int = 0
    largest: int = 0
    drift: float = 1.0

    @property
    def known(self) -> bool:
        """Whether enough steps were seen to predict others."""
        return self.steps >= MIN_STEPS

    @property
    def reach(self) -> int:
        """Tokens of the largest step that may be predicted with confidence."""
        return REACH * self.largest

    def predict_ms(self, shape: StepShape) -> float:
        """What a step of that shape should take, in milliseconds."""
        return self.drift * (self.base_ms + self.token_ms * shape.tokens + self.attended_ms * shape.attended)


@dataclass(slots=True)
class _Samples:
    """Faded sums over steps of one size: of x x^T (upper triangle) and of x y; and how the last ones compared to what
    was expected of them."""

    xx: list[float] = field(default_factory=lambda: [0.0] * 6)
    xy: list[float] = field(default_factory=lambda: [0.0] * 3)
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def plausible(self, ms: float, expected: float) -> float:
        """The time as far as it is believed. One stall moves little, times that are all off are believed."""
        self.ratios.append(ms / expected)
        usual = expected * sorted(self.ratios)[len(self.ratios) // 2]
        return min(max(ms, usual * (1 - FENCE)), usual * (1 + FENCE))

    def add(self, shape: StepShape, ms: float) -> None:
        tokens, attended = shape
        products = (1.0, tokens, attended, tokens * tokens, tokens * attended, attended * attended)
        self.xx = [(1.0 - FADE) * old + new for old, new in zip(self.xx, products, strict=True)]
        self.xy = [
            (1.0 - FADE) * old + new for old, new in zip(self.xy, (ms, tokens * ms, attended * ms), strict=True)
        ]

    @property
    def weight(self) -> float:
        """By which squares of these times become squares of relative errors, about: one over their mean, squared."""
        return (self.xx[0] / self.xy[0]) ** 2


class StepTimeModel:
    """Learns from one step after another; see the module. Not thread-safe."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Samples] = {}
        self._fitted = StepTime()
        self._ratios: deque[float] = deque(maxlen=RECENT)

    @property
    def fitted(self) -> StepTime:
        """The model as of the last step."""
        return self._fitted

    def observe(self, shape: StepShape, ms: float) -> None:
        """A step of this shape took `ms` milliseconds. Ignored if it has no tokens, or that is no time."""
        if shape.tokens < 1 or not 0.0 < ms < float("inf"):
            return
        before = self._fitted
        error = before.error
        samples = self._sizes.setdefault(shape.tokens.bit_length(), _Samples())
        if before.known:
            predicted = max(before.predict_ms(shape), 1e-6)
            error += ERROR_FADE * (abs(ms - predicted) / predicted - error)
            expected = predicted / before.drift
            self._ratios.append(min(max(ms / expected, 1 / MAX_DRIFT), MAX_DRIFT))
            ms = samples.plausible(ms, expected)
        samples.add(shape, ms)
        weighted = [(samples.weight, samples) for samples in self._sizes.values()]
        base, token, attended = fit(
            [sum(weight * samples.xx[i] for weight, samples in weighted) for i in range(6)],
            [sum(weight * samples.xy[i] for weight, samples in weighted) for i in range(3)],
        )
        largest = max(before.largest, shape.tokens)
        drift = sorted(self._ratios)[len(self._ratios) // 2] if len(self._ratios) == RECENT else 1.0
        self._fitted = StepTime(base, token, attended, error, before.steps + 1, largest, drift)


def fit(xx: Sequence[float], xy: Sequence[float]) -> Row:
    """The three coefficients >= 0 with the least sum of squares.

    Args:
        xx: upper triangle of the sum of x x^T, row by row (6 numbers). xy: sum of x y (3 numbers).

    Of the coefficients that are not forced to zero the best ones solve the normal equations: all choices of which
    ones to force are tried, the fewest first. A hair of ridge keeps apart what the data cannot tell apart.
    """
    # Columns of like size, whatever the units.
    scale = [max(xx[i], 1e-300) ** 0.5 for i in (0, 3, 5)]
    matrix = [
        [xx[0] / scale[0] ** 2 + 1e-9, xx[1] / (scale[0] * scale[1]), xx[2] / (scale[0] * scale[2])],
        [0.0, xx[3] / scale[1] ** 2 + 1e-9, xx[4] / (scale[1] * scale[2])],
        [0.0, 0.0, xx[5] / scale[2] ** 2 + 1e-9],
    ]
    for i, j in ((1, 0), (2, 0), (2, 1)):
        matrix[i][j] = matrix[j][i]
    target = [value / size for value, size in zip(xy, scale, strict=True)]
    best: Row = (0.0, 0.0, 0.0)
    best_gain = 0.0
    for free in ((0, 1, 2), *combinations(range(3), 2), (0,), (1,), (2,)):
        solution = _solve([[matrix[i][j] for j in free] for i in free], [target[i] for i in free])
        if solution is None or min(solution) < 0.0:
            continue
        # At the solution of the normal equations the sum of squares is lower by x . target than without any.
        gain = sum(value * target[i] for value, i in zip(solution, free, strict=True))
        if gain > best_gain:
            full = [0.0, 0.0, 0.0]
            for value, i in zip(solution, free, strict=True):
                full[i] = value / scale[i]
            best, best_gain = (full[0], full[1], full[2]), gain
        if len(free) == 3:
            break  # nothing beats the unconstrained optimum
    return best


def _solve(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """Gaussian elimination of a small symmetric positive definite system; None if it is not."""
    size = len(target)
    rows = [[*row, value] for row, value in zip(matrix, target, strict=True)]
    for pivot in range(size):
        if rows[pivot][pivot] <= 1e-12:
            return None
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            rows[below] = [low - factor * high for low, high in zip(rows[below], rows[pivot], strict=True)]
    solution = [0.0] * size
    for pivot in reversed(range(size)):
        known = sum(rows[pivot][j] * solution[j] for j in range(pivot + 1, size))
        solution[pivot] = (rows[pivot][size] - known) / rows[pivot][pivot]
    return solution
