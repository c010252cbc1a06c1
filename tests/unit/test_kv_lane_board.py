"""The order in which lanes are opened, left and tried again."""

from __future__ import annotations

import pytest

from kv_transfer.lane_board import FrameName, LaneBoard, LaneState, OutboundLane
from kv_transfer.lanes import LoadedFrame
from kv_transfer.manifest import TicketRef

NO_LANE = None  # the board holds lanes and calls none
REF = TicketRef(3, 9)


def open_next(board: LaneBoard, now: float) -> OutboundLane:
    transport = board.due(now)
    assert transport is not None
    return board.opening(transport, NO_LANE, now)  # type: ignore[arg-type]


def send(board: LaneBoard, lane: OutboundLane, index: int, now: float) -> FrameName:
    name = FrameName(REF, index)
    board.sent(lane, name, LoadedFrame(100, 0, None), now)
    return name


def test_a_stream_without_lanes_waits_for_none() -> None:
    board = LaneBoard(("grpc",))
    assert board.settled
    assert board.due(0.0) is None
    assert board.pick() is None


def test_frames_wait_until_the_best_lane_is_ready() -> None:
    board = LaneBoard(("collective", "shm", "grpc"), 1e12)
    assert not board.settled
    lane = open_next(board, 0.0)
    assert lane.transport == "collective"
    assert board.due(0.0) is None, "one at a time"
    assert board.pick() is None
    board.ready(lane, 0.1)
    assert board.settled
    assert board.pick() is lane
    assert board.due(100.0) is None, "there is nothing better"


def test_frames_do_not_wait_for_ever() -> None:
    board = LaneBoard(("shm", "grpc"), patient_until=5.0)
    lane = open_next(board, 0.0)
    assert board.due(4.9) is None
    assert not board.settled
    assert board.due(5.0) is None
    assert board.settled
    assert board.pick() is None
    board.ready(lane, 6.0)
    assert board.pick() is lane, "better late than never"


def test_each_transport_is_tried_before_frames_go_on_the_stream() -> None:
    board = LaneBoard(("collective", "shm", "grpc"), 1e12)
    first = open_next(board, 0.0)
    assert board.fail(first, 0.5)
    assert not board.fail(first, 0.5), "known"
    assert not board.settled
    assert board.due(0.5) == "shm"
    board.not_opened("shm", 0.6)
    assert board.settled
    assert board.pick() is None
    assert board.due(0.7) is None


def test_a_lane_that_failed_is_tried_again_after_a_growing_pause() -> None:
    board = LaneBoard(("shm", "grpc"), 1e12)
    now, pauses = 0.0, []
    for _ in range(12):
        lane = open_next(board, now)
        board.ready(lane, now)
        board.fail(lane, now)
        assert board.due(now + 1e9) is None, "the old one is still closing"
        board.closed(lane)
        failed = now
        while board.due(now) is None:
            now += 0.5
        pauses.append(now - failed)
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(pauses) == 300.0


def test_a_lane_that_carries_frames_has_its_failures_forgiven() -> None:
    board = LaneBoard(("shm", "grpc"), 1e12)
    for start in (0.0, 1000.0):
        lane = open_next(board, start)
        board.fail(lane, start)
        board.closed(lane)
    lane = open_next(board, 2000.0)
    board.ready(lane, 2000.0)
    assert board.answered(send(board, lane, 0, 2000.0), 2000.0) is not None
    board.fail(lane, 2001.0)
    board.closed(lane)
    assert board.due(2001.9) is None
    assert board.due(2002.0) == "shm"


def test_what_has_no_place_is_asked_again_before_long() -> None:
    board = LaneBoard(("collective", "grpc"), 1e12)
    for now in range(10):
        assert board.due(float(now)) == "collective"
        board.postponed("collective", float(now))
        assert board.settled
        assert board.due(now + 0.9) is None


def test_a_better_lane_that_comes_back_is_used_again() -> None:
    board = LaneBoard(("collective", "shm", "grpc"), 1e12)
    board.not_opened("collective", 0.0)
    shm = open_next(board, 0.0)
    board.ready(shm, 0.0)
    assert board.pick() is shm
    best = open_next(board, 5.0)
    assert best.transport == "collective"
    assert board.pick() is shm
    board.ready(best, 5.0)
    assert board.pick() is best
    board.fail(best, 6.0)
    assert board.pick() is shm


def test_answers_find_their_lane_and_the_rest_is_lost_with_it() -> None:
    board = LaneBoard(("shm", "grpc"), 1e12)
    lane = open_next(board, 0.0)
    board.ready(lane, 0.0)
    names = [send(board, lane, index, float(index)) for index in range(3)]
    assert lane.sequence == 3
    assert lane.silent_since() == 0.0
    answered = board.answered(names[0], 0.5)
    assert answered is not None
    assert answered[0] is lane
    assert lane.silent_since() == 1.0
    assert board.answered(names[0], 0.5) is None, "once"
    board.fail(lane, 4.0)
    assert lane.silent_since() == 4.0, "it is for the receiver to close it"
    assert board.answered(names[2], 4.5) is not None, "it was under way when the lane failed"
    assert board.find(lane.number) is lane
    assert list(board.closed(lane)) == [names[1]]
    assert board.find(lane.number) is None
    assert list(board) == []


def test_a_lane_is_silent_only_while_nothing_is_answered() -> None:
    """A slow link takes long over the last of many frames, and is heard of all the while."""
    board = LaneBoard(("shm", "grpc"), 1e12)
    lane = open_next(board, 0.0)
    board.ready(lane, 0.0)
    names = [send(board, lane, index, 0.0) for index in range(5)]
    for second, name in enumerate(names[:4], start=1):
        board.answered(name, float(second))
        assert lane.silent_since() == second
    board.answered(names[4], 5.0)
    assert lane.silent_since() is None
    send(board, lane, 9, 50.0)
    assert lane.silent_since() == 50.0


def test_numbers_are_never_used_twice() -> None:
    board = LaneBoard(("shm", "grpc"), 1e12)
    numbers = []
    for now in (0.0, 1000.0, 2000.0):
        lane = open_next(board, now)
        numbers.append(lane.number)
        board.fail(lane, now)
        board.closed(lane)
    assert numbers == [0, 1, 2]


def test_a_lane_that_became_ready_too_late_stays_closed() -> None:
    board = LaneBoard(("shm", "grpc"), 1e12)
    lane = open_next(board, 0.0)
    assert lane.silent_since() == 0.0
    board.fail(lane, 3.0)
    board.ready(lane, 3.1)
    assert lane.state is LaneState.CLOSING
    assert board.pick() is None


def test_an_idle_lane_makes_room_without_blame() -> None:
    board = LaneBoard(("collective", "grpc"), 1e12)
    lane = open_next(board, 0.0)
    board.ready(lane, 0.0)
    board.retire(lane, 1.0)
    assert lane.silent_since() == 1.0
    board.closed(lane)
    assert board.due(0.0) == "collective"


@pytest.mark.parametrize("transports", [("grpc",), ("shm", "grpc"), ("collective", "shm", "grpc")])
def test_once_settled_always_settled(transports: tuple[str, ...]) -> None:
    board = LaneBoard(transports, 1e12)
    now = 0.0
    while (transport := board.due(now)) is not None:
        board.not_opened(transport, now)
    assert board.settled
    lane = open_next(board, 1e6) if len(transports) > 1 else None
    assert board.settled
    if lane is not None:
        board.fail(lane, 1e6)
        assert board.settled
