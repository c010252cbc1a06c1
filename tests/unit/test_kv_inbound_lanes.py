"""Whatever a sender says of lanes, every frame that it announces is answered once, or its stream ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.inbound_lanes import InboundLane, InboundLanes, PairLimit
from kv_transfer.lanes import ExpectedFrame, FrameSink, LaneError
from kv_transfer.manifest import TicketRef
from kv_transfer.messages import (
    LaneAccept,
    LaneClose,
    LaneClosed,
    LaneDown,
    LaneFrame,
    LaneOpen,
    ProcessGroupOpening,
    PushReply,
    ShmRing,
)
from pdcore.errors import FrameError

REF = TicketRef(0, 1)
CREDIT = 10_000
ROOM = 5_000
SHM = ShmRing(1, 1, 4096, bytes(16))


@dataclass(eq=False)
class FakeLane:
    """A `ReceiveLane` that takes frames when told to."""

    sink: FrameSink
    transport: str = "shm"
    refuses: bool = False
    waiting: list[ExpectedFrame] = field(default_factory=list)
    closed: bool = False

    def accept(self) -> None:
        if self.refuses:
            raise LaneError("not today")

    def expect(self, frame: ExpectedFrame) -> None:
        if frame.offset > 1 << 20:
            raise FrameError("not on the lane")
        if self.closed:
            self.sink.lost(frame)
        else:
            self.waiting.append(frame)

    def take(self) -> None:
        if self.waiting:
            frame = self.waiting.pop(0)
            self.sink.arrived(frame, memoryview(bytes(frame.total)) if frame.wanted else None, shared=True)

    def fail(self) -> None:
        self.sink.failed("broken")
        self.close()

    def close(self) -> None:
        self.closed = True
        lost, self.waiting = self.waiting, []
        for frame in lost:
            self.sink.lost(frame)

    def join(self, timeout_s: float) -> None:
        pass


@dataclass(eq=False)
class FakeHost:
    """A `LaneHost` that keeps books."""

    refuses: bool = False
    lanes: list[FakeLane] = field(default_factory=list)
    outstanding: int = 0
    arrived: list[tuple[ExpectedFrame, InboundLane]] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    replies: list[PushReply] = field(default_factory=list)

    def make(self, opening: LaneOpen, sink: FrameSink) -> FakeLane:
        self.lanes.append(FakeLane(sink, opening.transport, self.refuses))
        return self.lanes[-1]

    def room_for(self, ref: TicketRef) -> int:
        return ROOM if ref == REF else 0

    def credit_left(self) -> int:
        return CREDIT - self.outstanding

    def frame_expected(self, total: int) -> None:
        self.outstanding += total

    def frame_arrived(self, frame: ExpectedFrame, data: memoryview | None, shared: bool, lane: InboundLane) -> None:
        assert frame.wanted == (data is not None)
        self.arrived.append((frame, lane))

    def frame_lost(self, frame: ExpectedFrame, reason: str) -> None:
        assert reason
        self._answered(frame)

    def answer(self) -> None:
        """As a receive thread would, once it is done with a frame."""
        if self.arrived:
            frame, lane = self.arrived.pop(0)
            self._answered(frame)
            lane.answered()

    def _answered(self, frame: ExpectedFrame) -> None:
        self.outstanding -= frame.total
        self.answers.append((frame.frame_index, frame.total))

    def reply(self, reply: PushReply) -> None:
        self.replies.append(reply)


def lanes_of(host: FakeHost) -> InboundLanes:
    return InboundLanes(host, ("shm", "collective", "grpc"), PairLimit(8).admit)


def frame_on(lane: int, sequence: int, *, total: int = 300, index: int = 0, **more: object) -> LaneFrame:
    return LaneFrame(REF, index, 0, total, lane, sequence, 0)._replace(**more)  # type: ignore[arg-type]


class Conversation(RuleBasedStateMachine):
    """A sender that keeps to the protocol but loses announcements, and a lane that breaks whenever it likes."""

    @initialize(refuses=st.booleans())
    def begin(self, refuses: bool) -> None:
        self.host = FakeHost(refuses)
        self.lanes = lanes_of(self.host)
        self.number = -1
        self.open: dict[int, int] = {}  # lane -> next sequence
        self.kinds: dict[int, ShmRing | ProcessGroupOpening] = {}
        self.announced: list[tuple[int, int]] = []
        self.asked_to_close: set[int] = set()

    @rule(kind=st.sampled_from([SHM, ProcessGroupOpening()]))
    def open_one(self, kind: ShmRing | ProcessGroupOpening) -> None:
        if kind in [self.kinds[lane] for lane in self.open]:
            return
        self.number += 1
        self.kinds[self.number] = kind
        self.lanes.open(LaneOpen(self.number, kind), 0.0)
        self.open[self.number] = 0

    @rule(data=st.data(), total=st.integers(256, 4000), lost=st.booleans(), wanted=st.booleans())
    def announce(self, data: st.DataObject, total: int, lost: bool, wanted: bool) -> None:
        if not self.open or total > self.host.credit_left():
            return
        lane = data.draw(st.sampled_from(sorted(self.open)))
        sequence = self.open[lane]
        self.open[lane] += 1
        if lost:
            return
        index = len(self.announced)
        self.announced.append((index, total))
        ref = REF if wanted else TicketRef(9, 9)
        self.lanes.announced(frame_on(lane, sequence, total=total, index=index, ref=ref), 0.0)

    @rule(data=st.data())
    def close_one(self, data: st.DataObject) -> None:
        if self.open:
            lane = data.draw(st.sampled_from(sorted(self.open)))
            del self.open[lane]
            self.asked_to_close.add(lane)
            self.lanes.close(LaneClose(lane, "enough"))

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        if self.host.lanes:
            data.draw(st.sampled_from(self.host.lanes)).take()

    @rule(data=st.data())
    def break_one(self, data: st.DataObject) -> None:
        if self.host.lanes:
            data.draw(st.sampled_from(self.host.lanes)).fail()

    @rule()
    def answer(self) -> None:
        self.host.answer()

    @invariant()
    def the_books_are_right(self) -> None:
        assert len(set(self.host.answers)) == len(self.host.answers), "an answer came twice"
        assert set(self.host.answers) <= set(self.announced)
        held = sum(total for _, total in self.announced) - sum(total for _, total in self.host.answers)
        assert self.host.outstanding == held
        for kind in (LaneDown, LaneClosed, LaneAccept):
            told = [reply.lane for reply in self.host.replies if isinstance(reply, kind)]
            assert len(set(told)) == len(told), "told twice"
        closed = {reply.lane for reply in self.host.replies if isinstance(reply, LaneClosed)}
        assert closed <= self.asked_to_close

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        for lane in list(self.open):
            self.asked_to_close.add(lane)
            self.lanes.close(LaneClose(lane, "the end"))
        while self.host.arrived:
            self.host.answer()
        self.the_books_are_right()
        assert sorted(self.host.answers) == self.announced
        assert self.host.outstanding == 0
        closed = {reply.lane for reply in self.host.replies if isinstance(reply, LaneClosed)}
        assert closed == self.asked_to_close, "the sender waits for each"


Conversation.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestConversation = Conversation.TestCase


def test_a_lane_is_closed_only_behind_its_last_answer() -> None:
    host = FakeHost()
    lanes = lanes_of(host)
    lanes.open(LaneOpen(0, SHM), 0.0)
    lanes.announced(frame_on(0, 0), 0.0)
    host.lanes[0].take()
    lanes.close(LaneClose(0, "enough"))
    assert host.replies == [LaneAccept(0, None)]
    host.answer()
    assert host.replies[1:] == [LaneClosed(0)]


def test_what_was_announced_before_a_gap_is_taken_and_the_rest_refused() -> None:
    host = FakeHost()
    lanes = lanes_of(host)
    lanes.open(LaneOpen(0, SHM), 0.0)
    lanes.announced(frame_on(0, 0, index=0), 0.0)
    lanes.announced(frame_on(0, 2, index=2), 0.0)
    lanes.announced(frame_on(0, 3, index=3), 0.0)
    assert [index for index, _ in host.answers] == [2, 3]
    assert [type(reply) for reply in host.replies] == [LaneAccept, LaneDown]
    host.lanes[0].take()
    assert [frame.frame_index for frame, _ in host.arrived] == [0]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (frame_on(7, 0), "not open"),
        (frame_on(0, 0, total=10), "shorter than its header"),
        (frame_on(0, 0, total=CREDIT + 1), "credit"),
        (frame_on(0, 0, offset=1 << 30), "not on the lane"),
    ],
)
def test_a_sender_that_breaks_the_protocol(message: LaneFrame, words: str) -> None:
    host = FakeHost()
    lanes = lanes_of(host)
    lanes.open(LaneOpen(0, SHM), 0.0)
    with pytest.raises(FrameError, match=words):
        lanes.announced(message, 0.0)
    assert host.outstanding == 0


def test_lanes_that_may_not_be_opened() -> None:
    lanes = InboundLanes(FakeHost(), ("grpc",), PairLimit(1).admit)
    with pytest.raises(FrameError, match="not negotiated"):
        lanes.open(LaneOpen(0, SHM), 0.0)
    lanes = lanes_of(FakeHost())
    lanes.open(LaneOpen(0, SHM), 0.0)
    with pytest.raises(FrameError, match="twice"):
        lanes.open(LaneOpen(0, SHM), 0.0)
    with pytest.raises(FrameError, match="second lane"):
        lanes.open(LaneOpen(1, SHM), 0.0)
    lanes.close(LaneClose(0, "enough"))
    lanes.open(LaneOpen(1, SHM), 0.0)


def test_a_busy_group_is_not_closed_for_another_one() -> None:
    limit = PairLimit(1)
    hosts = [FakeHost() for _ in range(3)]
    first, second, third = (InboundLanes(host, ("shm", "collective", "grpc"), limit.admit) for host in hosts)
    first.open(LaneOpen(0, ProcessGroupOpening()), 0.0)
    first.announced(frame_on(0, 0), 0.0)
    second.open(LaneOpen(0, ProcessGroupOpening()), 1.0)
    (refused,) = hosts[1].replies
    assert isinstance(refused, LaneDown)
    assert "in use" in refused.reason
    hosts[0].lanes[0].take()
    hosts[0].answer()
    third.open(LaneOpen(0, ProcessGroupOpening()), 2.0)
    assert [type(reply) for reply in hosts[0].replies] == [LaneAccept, LaneDown]
    assert hosts[0].lanes[0].closed
    assert hosts[2].replies == [LaneAccept(0, None)]
    third.open(LaneOpen(1, SHM), 3.0)
    assert hosts[2].replies[-1] == LaneAccept(1, None), "shared memory takes no group's place"


def test_the_group_that_was_used_longest_ago_makes_room() -> None:
    limit = PairLimit(2)
    hosts = [FakeHost() for _ in range(3)]
    streams = [InboundLanes(host, ("collective", "grpc"), limit.admit) for host in hosts]
    streams[0].open(LaneOpen(0, ProcessGroupOpening()), 0.0)
    streams[1].open(LaneOpen(0, ProcessGroupOpening()), 1.0)
    streams[0].announced(frame_on(0, 0), 5.0)
    hosts[0].lanes[0].take()
    hosts[0].answer()
    streams[2].open(LaneOpen(0, ProcessGroupOpening()), 6.0)
    assert [host.lanes[0].closed for host in hosts] == [False, True, False]
