"""What transfers say of links."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.links import NEWS, Links


def test_a_pair_has_its_own_mean_and_others_have_that_of_all() -> None:
    links = Links()
    assert links.token_ms(0, 3) == 0.0
    links.seen(0, 2, 5.0)
    assert np.asarray(links.token_ms(0, 4)).tolist() == [5.0, 5.0, 5.0, 5.0]
    links.seen(0, 1, 1.0)
    mean = (1 - NEWS) * 5.0 + NEWS * 1.0
    assert np.asarray(links.token_ms(0, 4)).tolist() == pytest.approx([mean, 1.0, 5.0, mean])
    assert links.token_ms(7, 4) == pytest.approx(mean)
    assert links.token_ms(None, 4) == pytest.approx(mean)
    assert np.asarray(links.token_ms(0, 2)).tolist() == pytest.approx([mean, 1.0]), "fewer are left"


def test_who_is_gone_leaves_nothing_to_the_next_one_of_its_number() -> None:
    links = Links()
    links.seen(0, 1, 8.0)
    links.seen(0, 2, 8.0)
    links.seen(3, 1, 8.0)
    for _ in range(40):
        links.seen(3, 2, 1.0)
    links.forget(1)
    links.forget(1)
    assert np.asarray(links.token_ms(0, 3)).tolist() == pytest.approx([1.0, 1.0, 8.0], rel=0.01)
    links.forget(0)
    assert links.token_ms(0, 3) == pytest.approx(1.0, rel=0.01)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 9)), max_size=40))
def test_native_code_finds_the_rows_that_there_are(steps: list[tuple[int, int]]) -> None:
    links = Links()
    for prefill, decode in steps:
        if decode < 0:
            links.forget(prefill)
        else:
            links.seen(prefill, decode, 1.0 + prefill)
        table = (ctypes.c_uint64 * (2 * links.rows)).from_address(links.rows_at or 1)
        for number in range(10):
            at, size = table[2 * number : 2 * number + 2] if number < links.rows else (0, 0)
            row = links.of(number)
            if row is None:
                assert (at, size) == (0, 0)
            else:
                np.testing.assert_array_equal((ctypes.c_double * size).from_address(at), row)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.floats(0, 1e3)), max_size=40))
def test_means_are_those_of_a_plain_loop(seen: list[tuple[int, int, float]]) -> None:
    links, pairs, every = Links(), dict[tuple[int, int], float](), math.nan
    for prefill, decode, ms in seen:
        links.seen(prefill, decode, ms)
        old = pairs.get((prefill, decode))
        pairs[prefill, decode] = ms if old is None else (1 - NEWS) * old + NEWS * ms
        every = ms if math.isnan(every) else (1 - NEWS) * every + NEWS * ms
    for prefill in range(4):
        column = np.broadcast_to(np.asarray(links.token_ms(prefill, 6)), 6)
        usual = 0.0 if math.isnan(every) else every
        assert column.tolist() == pytest.approx([pairs.get((prefill, decode), usual) for decode in range(6)])
