"""The ring's space against a brute-force map of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.lanes import LaneError
from kv_transfer.ring import ALIGNMENT, RingSpace
from kv_transfer.transports import shm

SIZE = 16 * ALIGNMENT


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_regions_never_overlap_and_room_comes_back(data: st.DataObject) -> None:
    ring = RingSpace(SIZE)
    taken: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        if taken and data.draw(st.booleans()):
            offset = data.draw(st.sampled_from(sorted(taken)))
            ring.give(offset)
            del taken[offset]
        else:
            size = data.draw(st.integers(1, SIZE + 1))
            fits = ring.fits(size)
            found = ring.take(size)
            assert fits == (found is not None)
            if found is None:
                assert taken or size > SIZE, "an empty ring takes whatever is not larger than it"
                continue
            assert found % ALIGNMENT == 0
            assert found + size <= SIZE
            for other, length in taken.items():
                assert found + size <= other or other + length <= found, "two frames in one place"
            taken[found] = size
        assert ring.empty == (not taken)


def in_order(given: list[int]) -> list[int]:
    return given


def newest_first(given: list[int]) -> list[int]:
    return given[::-1]


def test_everything_given_back_is_everything_free() -> None:
    orders: list[Callable[[list[int]], list[int]]] = [in_order, newest_first]
    for order in orders:
        ring = RingSpace(SIZE)
        for _ in range(10):
            offsets = [ring.take(5 * ALIGNMENT) for _ in range(3)]
            assert None not in offsets
            assert ring.take(2 * ALIGNMENT) is None
            for offset in order([offset for offset in offsets if offset is not None]):
                ring.give(offset)
            assert ring.empty
            whole = ring.take(SIZE)
            assert whole == 0
            ring.give(whole)


def test_a_full_ring_is_not_taken_for_an_empty_one() -> None:
    ring = RingSpace(SIZE)
    first = ring.take(SIZE // 2)
    assert first == 0
    assert ring.take(SIZE // 2) == SIZE // 2
    ring.give(first)
    assert ring.take(SIZE // 2) == 0, "wrapped, up to the last byte"
    assert not ring.fits(1)
    assert ring.take(1) is None


def test_a_ring_takes_a_small_part_of_the_memory_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = cast(Any, None)
    monkeypatch.setattr(shm, "available_memory", lambda: 100 << 20)
    with pytest.raises(LaneError, match=r"no shared memory of .* bytes: 104857600 are available"):
        shm.ShmSendLane(16 << 20, listener).offer()
    lane = shm.ShmSendLane(1 << 20, listener)
    assert lane.offer().size > 0
    lane.close()
    monkeypatch.setattr(shm, "available_memory", lambda: None)
    lane = shm.ShmSendLane(16 << 20, listener)
    assert lane.offer().size > 0
    lane.close()
