"""The model of step times: what it learns, how it takes noise and stalls, and that the fit is the best there is."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.step_time import MIN_STEPS, StepShape, StepTime, StepTimeModel, fit

TRUTH = StepTime(base_ms=8.0, token_ms=1.5, attended_ms=0.002)


def shapes(rng: random.Random, count: int) -> list[StepShape]:
    """Decodes alone, decodes with a chunk, chunks alone."""
    found = []
    for _ in range(count):
        decodes, chunk = rng.choice([0, 4, 16]), rng.choice([0, 16, 100, 256])
        context = rng.randint(1, 2000)
        tokens = max(1, decodes + chunk)
        found.append(StepShape(tokens, decodes * context + chunk * (rng.randint(0, 1500) + chunk)))
    return found


def learned(times: list[tuple[StepShape, float]]) -> StepTimeModel:
    model = StepTimeModel()
    for shape, ms in times:
        model.observe(shape, ms)
    return model


def test_it_finds_what_is_true() -> None:
    rng = random.Random(1)
    model = learned([(shape, TRUTH.predict_ms(shape)) for shape in shapes(rng, 200)]).fitted
    assert model.base_ms == pytest.approx(TRUTH.base_ms, rel=0.01)
    assert model.token_ms == pytest.approx(TRUTH.token_ms, rel=0.01)
    assert model.attended_ms == pytest.approx(TRUTH.attended_ms, rel=0.01)
    assert model.error < 0.02
    assert (model.steps, model.known) == (200, True)


def test_it_says_nothing_before_it_has_seen_enough() -> None:
    model = StepTimeModel()
    for i in range(MIN_STEPS):
        assert not model.fitted.known, i
        model.observe(StepShape(4, 100), 10.0)
    assert model.fitted.known
    assert model.fitted.largest == 4
    assert model.fitted.reach == 8


def test_noise_shows_as_error_and_not_in_the_coefficients() -> None:
    rng = random.Random(2)
    noisy = [(shape, TRUTH.predict_ms(shape) * rng.uniform(0.8, 1.2)) for shape in shapes(rng, 600)]
    model = learned(noisy).fitted
    for shape in shapes(rng, 50):
        assert model.predict_ms(shape) == pytest.approx(TRUTH.predict_ms(shape), rel=0.2)
    assert 0.05 < model.error < 0.2


def test_a_stall_of_the_machine_changes_little() -> None:
    rng = random.Random(3)
    model = learned([(shape, TRUTH.predict_ms(shape) * rng.uniform(0.9, 1.1)) for shape in shapes(rng, 200)])
    before = model.fitted
    model.observe(StepShape(4, 2000), 100 * before.predict_ms(StepShape(4, 2000)))
    for shape in shapes(rng, 50):
        assert model.fitted.predict_ms(shape) == pytest.approx(before.predict_ms(shape), rel=0.2)


def test_a_machine_that_stays_slow_is_believed() -> None:
    rng = random.Random(4)
    model = learned([(shape, TRUTH.predict_ms(shape) * rng.uniform(0.9, 1.1)) for shape in shapes(rng, 200)])
    for shape in shapes(rng, 600):
        model.observe(shape, 5 * TRUTH.predict_ms(shape))
    for shape in shapes(rng, 50):
        assert model.fitted.predict_ms(shape) == pytest.approx(5 * TRUTH.predict_ms(shape), rel=0.2)


def test_where_the_formula_is_not_the_whole_truth_the_last_steps_count() -> None:
    """Prompts whose tokens cost more the longer the context is, by more than the formula has."""

    def real(shape: StepShape) -> float:
        return TRUTH.predict_ms(shape) + 3e-9 * shape.attended**2

    rng = random.Random(6)
    model = learned([(shape, TRUTH.predict_ms(shape)) for shape in shapes(rng, 100)])
    off = []
    for context in range(100, 6000, 100):
        shape = StepShape(108, 8 * 500 + 100 * context)
        off.append(real(shape) / model.fitted.predict_ms(shape))
        model.observe(shape, real(shape))
    assert all(0.85 < ratio < 1.15 for ratio in off[10:])
    for shape in shapes(rng, 5):
        model.observe(shape, 50 * model.fitted.predict_ms(shape))
    assert model.fitted.drift == 4.0, "no prediction is scaled without bounds"


def test_long_decoding_does_not_make_it_forget_what_a_prompt_costs() -> None:
    rng = random.Random(5)
    model = learned([(shape, TRUTH.predict_ms(shape)) for shape in shapes(rng, 100)])
    for step in range(3000):
        shape = StepShape(8, 8 * (200 + step))
        model.observe(shape, TRUTH.predict_ms(shape))
    prompt = StepShape(256, 256 * 600)
    assert model.fitted.predict_ms(prompt) == pytest.approx(TRUTH.predict_ms(prompt), rel=0.05)


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_ignored(ms: float) -> None:
    model = learned([(StepShape(4, 100), ms), (StepShape(0, 0), 5.0)])
    assert model.fitted.steps == 0


ROWS = st.lists(
    st.tuples(st.floats(1.0, 1.0), st.floats(0, 300), st.floats(0, 1e5), st.floats(0.1, 500)), min_size=1, max_size=12
)


@given(ROWS)
def test_the_fit_is_the_best_one_without_negative_coefficients(rows: list[tuple[float, float, float, float]]) -> None:
    """The conditions of the optimum: no coefficient can be moved, within its bounds, to a lower sum of squares."""
    x, y = np.array([row[:3] for row in rows]), np.array([row[3] for row in rows])
    xx, xy = x.T @ x, x.T @ y
    found = np.array(fit([xx[0, 0], xx[0, 1], xx[0, 2], xx[1, 1], xx[1, 2], xx[2, 2]], list(xy)))
    assert (found >= 0).all()
    # In columns of like size; what ridge and rounding leave is small against the target.
    size = np.sqrt(np.maximum(np.diag(xx), 1e-300))
    slope = (xx @ found - xy) / size
    close = 1e-4 * max(float(np.abs(xy / size).max()), 1e-9)
    assert (slope >= -close).all(), "one more of something would be better"
    assert (slope[found > 0] <= close).all(), "less of something would be better"


@given(ROWS, st.floats(0, 200), st.floats(0, 2), st.floats(0, 0.01))
def test_no_other_coefficients_are_better(
    rows: list[tuple[float, float, float, float]], base: float, token: float, attended: float
) -> None:
    x, y = np.array([row[:3] for row in rows]), np.array([row[3] for row in rows])
    xx, xy = x.T @ x, x.T @ y
    found = np.array(fit([xx[0, 0], xx[0, 1], xx[0, 2], xx[1, 1], xx[1, 2], xx[2, 2]], list(xy)))
    ours = float(np.sum((x @ found - y) ** 2))
    theirs = float(np.sum((x @ np.array([base, token, attended]) - y) ** 2))
    assert ours <= theirs + 1e-5 * float(y @ y)
