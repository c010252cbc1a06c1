"""When a client tries again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    RateLimited,
    RequestError,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from router.client_retry import MAX_BACKOFF_S, NEVER, SPREAD, Retry

ROOMY = Retry(attempts=100, max_wait_s=1e9)


def wait(retry: Retry, error: RequestError, tried: int = 1, waited: float = 0.0, left: float | None = None) -> float:
    """With the shortest spread; -1 if the error is final."""
    found = retry.wait_s(error, tried, waited, left, 0.0)
    return -1.0 if found is None else found


def test_the_hint_is_waited_for_and_the_backoff_grows() -> None:
    assert wait(ROOMY, Overloaded("x", 3.0)) == 3.0
    assert wait(ROOMY, RateLimited("x", 100.0)) == 100.0, "longer than any backoff"
    waits = [wait(ROOMY, Unavailable("x", None), tried) for tried in range(1, 8)]
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert wait(ROOMY, Unavailable("x", 3.0)) == 3.0
    assert wait(ROOMY, Overloaded("x", 0.0), 3) == 1.0, "a hint of nothing is no invitation to come at once"
    assert wait(ROOMY, Unavailable("x", None), 99) == MAX_BACKOFF_S


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("f", "p"),
        UnknownModel("m", []),
        Unauthenticated("x"),
        AlreadyRunning("x", "r"),
        DeadlineExceeded("x"),
        InternalError("x"),
    ],
)
def test_what_would_fail_again_is_final(error: RequestError) -> None:
    assert wait(ROOMY, error) == -1.0


def test_bounds() -> None:
    three = Retry(attempts=3, max_wait_s=10.0)
    assert [wait(three, Unavailable("x", None), tried) for tried in (1, 2, 3)] == [0.25, 0.5, -1.0]
    assert wait(three, Overloaded("x", 10.0)) == 10.0
    assert wait(three, Overloaded("x", 10.1)) == -1.0
    assert wait(three, Overloaded("x", 5.0), waited=5.1) == -1.0
    assert wait(three, Overloaded("x", 5.0), left=5.1) == 5.0
    assert wait(three, Overloaded("x", 5.0), left=5.0) == -1.0, "the deadline would pass meanwhile"
    assert wait(NEVER, Overloaded("x", 0.0)) == -1.0


@pytest.mark.parametrize("bad", [{"attempts": 0}, {"max_wait_s": -1.0}, {"first_wait_s": 0.0}])
def test_bad_bounds_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="attempts >= 1"):
        Retry(**bad)  # type: ignore[arg-type]


@given(
    attempts=st.integers(1, 50),
    max_wait=st.floats(0, 100),
    hints=st.lists(st.floats(0, 50), min_size=60, max_size=60),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=60, max_size=60),
)
def test_a_call_ends_within_its_bounds_and_never_comes_before_the_hint(
    attempts: int, max_wait: float, hints: list[float], draws: list[float]
) -> None:
    retry, waited, tried = Retry(attempts, max_wait), 0.0, 0
    for hint, draw in zip(hints, draws, strict=True):
        tried += 1
        found = retry.wait_s(Overloaded("x", hint), tried, waited, None, draw)
        if found is None:
            break
        assert hint <= found <= (1 + SPREAD) * max(hint, MAX_BACKOFF_S)
        waited += found
    else:
        raise AssertionError("it never ended")
    assert tried <= attempts
    assert waited <= max_wait
