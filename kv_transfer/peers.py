"""The receivers that a sender talks to: their streams, their credit, their lanes, the sends that rely on them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kv_transfer.choosing import CodecChooser
from kv_transfer.handshake import check_welcome, hello
from kv_transfer.lane_board import FrameName, LaneBoard, LaneState, OutboundLane
from kv_transfer.lanes import LaneError, LoadedFrame
from kv_transfer.manifest import TicketRef
from kv_transfer.messages import (
    Committed,
    FrameAck,
    FrameNack,
    LaneAccept,
    LaneClose,
    LaneClosed,
    LaneDown,
    LaneFrame,
    LaneOpen,
    PushReply,
    TicketRefused,
    Welcome,
)
from kv_transfer.negotiation import COLLECTIVE, GRPC, Offer
from kv_transfer.outbound import FrameTurn, Peer, Send, SenderCounters
from kv_transfer.session import Acked, CommitConfirmed, Disconnected, Nacked, Refused, SendEvent
from kv_transfer.transport import OpenLink, PushLink
from kv_transfer.transports.catalog import SendLanes
from pdcore.clock import Clock
from pdcore.config import TransferConfig
from pdcore.errors import HandshakeRefused
from pdcore.types import KvGeometry

logger = logging.getLogger(__name__)


class PeerTable:
    """One `Peer` for each receiver process that is sent to.

    Called under the sender's lock, but for `open_lane` (the pump's) and what links and lanes report, which take it.

    Args:
        worker_id, incarnation, geometry, offer: of the sender, as it introduces itself.
        config, clock, counters, lanes, chooser: the sender's.
        changed: the sender's lock; notified when there may be something new to do.
        on_event: feeds a send's state machine; called under the lock.
        open_link: makes the streams.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: str,
        geometry: KvGeometry,
        offer: Offer,
        config: TransferConfig,
        clock: Clock,
        counters: SenderCounters,
        lanes: SendLanes,
        chooser: CodecChooser,
        changed: threading.Condition,
        on_event: Callable[[Send, SendEvent], None],
        open_link: OpenLink,
    ) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._geometry = geometry
        self._offer = offer
        self._config = config
        self._clock = clock
        self._counters = counters
        self._lanes = lanes
        self._chooser = chooser
        self._changed = changed
        self._on_event = on_event
        self._open_link = open_link
        self._closing = False
        self._peers: dict[tuple[str, str], Peer] = {}

    # --- streams --------------------------------------------------------------------------------------------------

    def attach(self, send: Send) -> None:
        """Give a send its stream."""
        name = (send.peer.address, send.peer.incarnation)
        peer = self._peers.get(name)
        if peer is None:
            now = self._clock.now()
            peer = Peer(*name, opened_at=now, heard_at=now)
            self._peers[name] = peer
            self._counters.links += 1
            peer.link = self._open_link(
                peer.address,
                hello(self._worker_id, self._incarnation, peer.incarnation, self._geometry, self._offer),
                _PeerListener(self, peer),
                message_bytes=self._config.message_bytes,
                cores=self._config.cpu_affinity,
            )
        send.peer = peer
        peer.sends[send.limits.ref] = send

    def drop(self, peer: Peer, reason: str, refused: bool) -> None:
        """Forget a stream and its lanes, and end or move the sends that relied on it."""
        if peer.link is None:
            return
        peer.link.cancel()
        peer.link = None
        for lane in peer.board:
            lane.lane.close()
        self._counters.unacked_bytes -= peer.window - peer.credit
        self._chooser.broken(peer.address)
        del self._peers[peer.address, peer.incarnation]
        sends = list(peer.sends.values())
        peer.sends.clear()
        for send in sends:
            # An idle stream may have died unnoticed. A ticket listens to the stream of its first frame, so a send
            # that has sent nothing may start over on a new one; once.
            if (
                send.session.active
                and not send.session.started
                and not (refused or send.reconnected or self._closing)
            ):
                send.reconnected = True
                self.attach(send)
            else:
                self._on_event(send, Disconnected(reason))

    def watch(self, now: float) -> None:
        """Look at the clock: drop the streams that were never welcomed, give up the lanes that are silent."""
        for peer in self.peers():
            if peer.window == 0 and now - peer.opened_at >= self._config.send_timeout_s:
                self.drop(peer, f"no welcome within {self._config.send_timeout_s} s", refused=True)
                continue
            for lane in peer.board:
                since = lane.silent_since()
                # Frames do not wait for an opening as long as that; those under way on a lane wait for its answers.
                ready = lane.state is LaneState.READY
                bound = self._config.lane_timeout_s if ready else self._config.send_timeout_s
                if since is None or now - since < bound:
                    continue
                if lane.state is LaneState.CLOSING:
                    # What it holds of the credit and of the process groups would be lost for the stream's life.
                    self.drop(peer, f"the receiver does not close lane {lane.number} within {bound} s", refused=False)
                    break
                self._give_up(peer, lane, f"no answer for {bound} s")
            self._drop_if_unanswered(peer, now)

    def _drop_if_unanswered(self, peer: Peer, now: float) -> None:
        """Every frame is answered, long after its send has failed if need be: a stream on which one is not has lost
        it or its answer, and would lack its credit for ever."""
        bound = 2 * self._config.send_timeout_s
        name, (_, sent_at) = next(iter(peer.unanswered.items()), (None, (0, now)))
        if name is not None and now - sent_at >= bound:
            self.drop(peer, f"frame {name.frame_index} of a ticket is not answered within {bound} s", refused=False)

    def start_closing(self) -> None:
        """From now on no send is moved to a new stream, and no lane is opened."""
        self._closing = True

    def peers(self) -> list[Peer]:
        """Those with a stream."""
        return list(self._peers.values())

    def links(self) -> list[PushLink]:
        """The streams that are open."""
        return [peer.link for peer in self._peers.values() if peer.link is not None]

    # --- frames ---------------------------------------------------------------------------------------------------

    def lane_for(self, peer: Peer, attempt: int) -> OutboundLane | None:
        """How a frame's try should go; None for the stream. What failed again and again tries another way."""
        return peer.board.pick() if attempt <= self._config.max_frame_retries else None

    def post(self, turn: FrameTurn, frame: bytes, loaded: LoadedFrame | None) -> str:
        """Send a frame; returns the transport.

        Args:
            loaded: `frame` on `turn.lane`; None if it goes on the stream.
        """
        send, task, lane = turn.send, turn.task, turn.lane
        peer, ref = send.peer, send.limits.ref
        assert peer.link is not None
        if lane is not None and loaded is not None and lane.state is not LaneState.READY:
            lane.lane.unload(loaded)
            loaded = None
        if lane is None or loaded is None:
            transport = GRPC
            peer.link.post_frame(ref, task.frame_index, task.attempt, frame)
        else:
            transport = lane.transport
            message = LaneFrame(ref, task.frame_index, task.attempt, len(frame), lane.number, lane.sequence, 0)
            peer.board.sent(lane, FrameName(ref, task.frame_index), loaded, self._clock.now())
            lane.lane.post(loaded, message, peer.link.post_lane)
        peer.unanswered[FrameName(ref, task.frame_index)] = len(frame), self._clock.now()
        counters = self._counters.lane(transport)
        counters.frames += 1
        counters.frame_bytes += len(frame)
        return transport

    # --- lanes ----------------------------------------------------------------------------------------------------

    def lane_to_open(self, now: float) -> tuple[Peer, str] | None:
        """A peer, and the transport that should be opened to it."""
        if self._closing:
            return None
        for peer in self._peers.values():
            transport = peer.board.due(now) if peer.sends else None
            if transport is None:
                continue
            if transport != COLLECTIVE or self._pair_is_free(peer):
                return peer, transport
            peer.board.postponed(transport, now)
        return None

    def open_lane(self, peer: Peer, transport: str) -> None:
        """Open this end of a lane and ask the receiver for the other; called by the pump, without the lock."""
        listener = _LaneListener(self, peer)
        lane = self._lanes.make(transport, peer.window, listener)
        try:
            how = lane.offer()
        except LaneError as error:
            with self._changed:
                peer.board.not_opened(transport, self._clock.now())
                self._count_failure(peer, transport, str(error), broke=False)
            return
        with self._changed:
            if peer.link is None:
                lane.close()
                return
            listener.lane = peer.board.opening(transport, lane, self._clock.now())
            peer.link.post_lane(LaneOpen(listener.lane.number, how))

    def lane_ready(self, peer: Peer, lane: OutboundLane) -> None:
        """A lane may be used; told by itself."""
        with self._changed:
            peer.board.ready(lane, self._clock.now())
            if lane.state is LaneState.READY:
                self._counters.lane(lane.transport).opened += 1
                logger.info("lane %d to %s is open: %s", lane.number, peer.address, lane.transport)
            self._changed.notify_all()

    def lane_failed(self, peer: Peer, lane: OutboundLane, reason: str) -> None:
        """A lane is of no more use; told by itself."""
        with self._changed:
            self._give_up(peer, lane, reason)
            self._changed.notify_all()

    def _give_up(self, peer: Peer, lane: OutboundLane, reason: str) -> None:
        """Use a lane no more. Its frames are sent again as the receiver answers that they did not come."""
        broke = lane.state is LaneState.READY
        if peer.link is not None and peer.board.fail(lane, self._clock.now()):
            lane.lane.close()
            peer.link.post_lane(LaneClose(lane.number, reason))
            self._count_failure(peer, lane.transport, reason, broke)

    def _count_failure(self, peer: Peer, transport: str, reason: str, broke: bool) -> None:
        counters = self._counters.lane(transport)
        counters.failures += 1
        counters.downgrades += broke
        logger.warning("%s to %s failed, the next best is used: %s", transport, peer.address, reason)

    def _pair_is_free(self, peer: Peer) -> bool:
        """There may be one more process group; makes room by closing one that is idle, for the next time."""
        pairs = [
            (other, lane) for other in self._peers.values() for lane in other.board if lane.transport == COLLECTIVE
        ]
        if len(pairs) < self._config.max_pairs:
            return True
        idle = [
            pair for pair in pairs if pair[1].state is LaneState.READY and not (pair[1].under_way or pair[0].sends)
        ]
        if idle:
            other, lane = min(idle, key=lambda pair: pair[1].used_at)
            assert other.link is not None
            other.board.retire(lane, self._clock.now())
            lane.lane.close()
            other.link.post_lane(LaneClose(lane.number, "idle, and another pair needs its place"))
        return False

    def _closed(self, peer: Peer, lane: OutboundLane) -> None:
        """A lane is gone. The receiver has not heard of the frames that it has not answered."""
        for name in peer.board.closed(lane):
            self._credit(peer, name)
            self._chooser.link(peer.address, lane.transport).lost(name.ref, name.frame_index)
            self._peer_event(peer, name.ref, Nacked(name.frame_index, True, "lost with its lane"))
            self._counters.lane(lane.transport).moved_frames += 1

    # --- what links report ------------------------------------------------------------------------------------------

    def reply_arrived(self, peer: Peer, reply: PushReply) -> None:
        """The receiver said something; called from its link's reader."""
        accepted: OutboundLane | None = None
        with self._changed:
            peer.heard_at = self._clock.now()
            match reply:
                case Welcome():
                    self._welcomed(peer, reply)
                case FrameAck(ref, frame_index, _, held_s, work_s):
                    transport = self._answered(peer, ref, frame_index, nacked=False)
                    link = self._chooser.link(peer.address, transport)
                    link.answered(ref, frame_index, held_s, work_s, peer.heard_at)
                    self._peer_event(peer, ref, Acked(frame_index))
                case FrameNack(ref, frame_index, _, retryable, reason):
                    transport = self._answered(peer, ref, frame_index, nacked=True)
                    self._chooser.link(peer.address, transport).lost(ref, frame_index)
                    self._peer_event(peer, ref, Nacked(frame_index, retryable, reason))
                case Committed(ref):
                    self._peer_event(peer, ref, CommitConfirmed())
                case TicketRefused(ref, reason):
                    self._peer_event(peer, ref, Refused(reason))
                case LaneAccept(number):
                    lane = peer.board.find(number)
                    accepted = lane if lane is not None and lane.state is LaneState.OPENING else None
                case LaneDown(number, reason):
                    lane = peer.board.find(number)
                    if lane is not None:
                        self._give_up(peer, lane, reason)
                case LaneClosed(number):
                    lane = peer.board.find(number)
                    if lane is not None and lane.state is LaneState.CLOSING:
                        self._closed(peer, lane)
            self._changed.notify_all()
        if accepted is not None:
            assert isinstance(reply, LaneAccept)
            accepted.lane.accepted(reply.how)  # it may tell at once how that went

    def _welcomed(self, peer: Peer, reply: Welcome) -> None:
        if peer.window:
            return  # a second one would give credit and lanes anew that are in use
        try:
            check_welcome(reply, peer.incarnation, self._geometry, self._offer.transports)
        except HandshakeRefused as error:
            self.drop(peer, str(error), refused=True)
            return
        peer.window = peer.credit = reply.credit_bytes
        patient_until = self._clock.now() + self._config.lane_timeout_s
        peer.board = LaneBoard(reply.negotiation.transports, patient_until)
        peer.left_out = reply.negotiation.left_out
        self._chooser.told(peer.address, reply.decode_rates)
        for left_out in peer.left_out:
            logger.info("no %s to %s: %s", left_out.transport, peer.address, left_out.reason)

    def _answered(self, peer: Peer, ref: TicketRef, frame_index: int, nacked: bool) -> str:
        """A frame is answered; returns the transport that it went by."""
        name = FrameName(ref, frame_index)
        self._credit(peer, name)
        answered = peer.board.answered(name, self._clock.now())
        if answered is None:
            return GRPC
        lane, loaded = answered
        lane.lane.unload(loaded)
        self._counters.lane(lane.transport).moved_frames += nacked and lane.state is LaneState.CLOSING
        return lane.transport

    def _credit(self, peer: Peer, name: FrameName) -> None:
        """A frame's credit is ours again; once, however often it is answered."""
        size, _ = peer.unanswered.pop(name, (0, 0.0))
        peer.credit += size
        if peer.link is not None:
            self._counters.unacked_bytes -= size

    def _peer_event(self, peer: Peer, ref: TicketRef, event: SendEvent) -> None:
        send = peer.sends.get(ref)
        if send is not None:
            self._on_event(send, event)

    def link_closed(self, peer: Peer, reason: str, refused: bool) -> None:
        """The stream to a receiver is gone; called from its reader, once."""
        with self._changed:
            self.drop(peer, reason, refused)
            self._changed.notify_all()


class _PeerListener:
    """`LinkListener` of one peer."""

    def __init__(self, peers: PeerTable, peer: Peer) -> None:
        self._peers = peers
        self._peer = peer

    def on_reply(self, reply: PushReply) -> None:
        self._peers.reply_arrived(self._peer, reply)

    def on_closed(self, reason: str, refused: bool) -> None:
        self._peers.link_closed(self._peer, reason, refused)


class _LaneListener:
    """`LaneListener` of one lane. `lane` is set before the receiver hears of it."""

    def __init__(self, peers: PeerTable, peer: Peer) -> None:
        self._peers = peers
        self._peer = peer
        self.lane: OutboundLane | None = None

    def on_ready(self) -> None:
        assert self.lane is not None
        self._peers.lane_ready(self._peer, self.lane)

    def on_failed(self, reason: str) -> None:
        assert self.lane is not None
        self._peers.lane_failed(self._peer, self.lane, reason)
