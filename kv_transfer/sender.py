"""The prefill worker's end: pushes a request's KV while it is still being computed.

Threads::

    the caller's       `open`, `computing`, `computed`, `finish`, `abort`: an event for the state machine, no more
    the pump (one)     watches layers, gathers, encodes, posts frames; carries out effects; calls `on_done`
    a link's reader    acknowledgements, credit, commits

They meet under one lock, which is never held while KV is read, encoded or `on_done` is called. A frame is gathered
only with its credit in hand, so what waits to be sent waits in the cache's own blocks.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from kv_transfer.choosing import Chosen, CodecChooser
from kv_transfer.codec_speed import assumed_costs
from kv_transfer.codecs.registry import STANDARD, CodecRegistry
from kv_transfer.lanes import LoadedFrame
from kv_transfer.manifest import MAX_REASON_CHARS
from kv_transfer.messages import Revocation
from kv_transfer.negotiation import GRPC
from kv_transfer.outbound import CodecCounters, Delivery, FrameTurn, Send, SenderCounters, next_attempt
from kv_transfer.packing import PackedFrame, pack_frame
from kv_transfer.peers import PeerTable
from kv_transfer.planning import Computing
from kv_transfer.preparing import SendMaker, refusal
from kv_transfer.session import (
    AbortSend,
    CommitConfirmed,
    Computed,
    FailureKind,
    Finish,
    FrameDropped,
    FrameSent,
    LayersDone,
    SendAbort,
    SendDone,
    SendEffect,
    SendEvent,
    SendFailure,
    SendManifest,
    Tick,
)
from kv_transfer.site import local_offer
from kv_transfer.threads import CrashGuard, check_cores, pin_thread
from kv_transfer.transport import KvStore, OpenLink, SendOutcome
from kv_transfer.transports.catalog import SendLanes
from kv_transfer.transports.grpc_push import GrpcPushLink
from pdcore.clock import Clock
from pdcore.config import TransferConfig
from pdcore.costs import CodecCost
from pdcore.errors import FrameError, TicketError, TicketRevoked, TransferError, TransferTimeout
from pdcore.faults import FaultPoints
from pdcore.tracebacks import wordless
from pdcore.types import KvTicket, RequestKey

logger = logging.getLogger(__name__)

_POLL_S = 0.001  # between looks at the layers of a running step, while there are any to wait for
_TICK_S = 0.1
_IDLE_S = 1.0
_FRAME_OVERHEAD = 1024  # a frame's header and the gaps between its parts take less


class KvSender:
    """Sends KV out of a paged cache. Thread-safe; every method returns at once, but `close`.

    Calls for a request that is not open (any more) are ignored: its send may have failed while its prefill ran on.

    Args:
        worker_id, incarnation: of this prefill worker.
        store: the cache. config: bounds and preferences.
        layers_done: step id -> layers of that step whose KV is in the cache; 0 if it is not the running step. Called
            from the pump, under the sender's lock: must be quick and take no lock.
        clock: of time-outs. faults: fault points of this process.
        codecs: those that can be used. costs: what is known of their speeds, by plain name; None for stated defaults.
        device: where the cache lives, as torch names it. encrypted: KV may leave the machine encrypted only.
        on_crash: told, once, that the pump has died of an error: nothing is sent any more, and no `on_done` follows.
            Called from the pump; must not block. None: it is only logged.
        open_link: makes the streams; tests put one here that loses messages.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: str,
        store: KvStore,
        config: TransferConfig,
        layers_done: Callable[[int], int],
        clock: Clock,
        faults: FaultPoints,
        codecs: CodecRegistry = STANDARD,
        costs: Mapping[str, CodecCost] | None = None,
        device: str = "cpu",
        encrypted: bool = False,
        on_crash: Callable[[BaseException], None] | None = None,
        open_link: OpenLink = GrpcPushLink,
    ) -> None:
        check_cores("transfer.cpu_affinity", config.cpu_affinity)
        self._store = store
        self._config = config
        self._layers_done = layers_done
        self._clock = clock
        self._faults = faults
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._deliveries: dict[RequestKey, Delivery] = {}
        self._turns: deque[Send] = deque()  # the order in which sends are served, round and round
        self._effects: deque[tuple[Send, SendEffect]] = deque()
        self._counters = SenderCounters()
        self._closing = False
        offer = local_offer(config.transport, config.interface, device, encrypted=encrypted)
        self._lanes = SendLanes(offer, device, config.lane_timeout_s, config.cpu_affinity)
        self._maker = SendMaker(store.geometry, config, codecs)
        dtype = store.geometry.dtype
        self._chooser = CodecChooser(codecs, dtype, assumed_costs(codecs, dtype) if costs is None else costs)
        self._peers = PeerTable(
            worker_id=worker_id,
            incarnation=incarnation,
            geometry=store.geometry,
            offer=offer,
            config=config,
            clock=clock,
            counters=self._counters,
            lanes=self._lanes,
            chooser=self._chooser,
            changed=self._changed,
            on_event=self._event,
            open_link=open_link,
        )
        self._pump = threading.Thread(target=CrashGuard(on_crash).run, args=(self._run,), name="kv-send", daemon=True)
        self._pump.start()

    # --- the owner ------------------------------------------------------------------------------------------------

    def open(
        self,
        key: RequestKey,
        ticket: KvTicket,
        block_ids: Sequence[int],
        on_done: Callable[[SendOutcome], None],
        codec: str = "",
    ) -> None:
        """Begin to send. The streams to the ticket's endpoints are opened at once where there are none.

        Args:
            block_ids: the request's block table; pinned by the caller until `on_done`.
            on_done: called exactly once, from the pump, when no gather of this request is in flight or will start.
                It must not block.
            codec: the request's: a plain name or ``auto``; empty for the configured one.

        Raises:
            TransferError: the ticket cannot be met: no common codec, another transport, heads that no endpoint takes,
                no incarnation, too few blocks; or the request is open already; or the sender is closing.
        """
        delivery = self._maker.make(key, ticket, block_ids, on_done, codec=codec, now=self._clock.now())
        with self._changed:
            if self._closing:
                raise TransferError("the sender is closing")
            if key in self._deliveries:
                raise refusal(f"request {key.request_id} attempt {key.attempt} is being sent already")
            self._deliveries[key] = delivery
            for send in delivery.sends:
                self._peers.attach(send)
                self._turns.append(send)
            self._changed.notify_all()

    def computing(self, key: RequestKey, token_start: int, token_end: int, step_id: int) -> None:
        """Step `step_id` computes these tokens: their layers may be sent as they complete."""
        self._post(key, Computing(token_start, token_end, step_id))

    def computed(self, key: RequestKey, token_end: int) -> None:
        """All layers of tokens ``[0, token_end)`` are in the cache."""
        self._post(key, Computed(token_end))

    def finish(self, key: RequestKey, *first_tokens: int) -> None:
        """All tokens are computed and `first_tokens` were sampled, one for each sample of the request: the manifest
        follows the last frame."""
        assert first_tokens, key
        self._post(key, Finish(first_tokens))

    def abort(self, key: RequestKey, reason: str) -> None:
        """End a send; `on_done` follows with an error, unless it is over. Idempotent."""
        self._post(key, AbortSend(reason))

    @property
    def open_sends(self) -> int:
        """Requests whose `on_done` has not been called."""
        with self._lock:
            return len(self._deliveries)

    @property
    def counters(self) -> SenderCounters:
        """A copy of the counters."""
        with self._lock:
            return self._counters.copy()

    def close(self, timeout_s: float = 5.0) -> None:
        """Abort every send, end every stream, and wait for the threads at most this long. Idempotent."""
        with self._changed:
            self._closing = True
            self._peers.start_closing()
            for send in list(self._turns):
                self._event(send, AbortSend("the prefill worker is shutting down"))
            self._changed.notify_all()
        deadline = self._clock.now() + timeout_s
        self._pump.join(timeout_s)
        with self._lock:
            links = self._peers.links()
        for link in links:
            link.finish()  # all at once: what one of them waits for must not be taken from the others' time
        for link in links:
            link.close(max(0.0, deadline - self._clock.now()))
        self._lanes.close(max(0.0, deadline - self._clock.now()))

    # --- events ---------------------------------------------------------------------------------------------------

    def _post(self, key: RequestKey, event: SendEvent) -> None:
        with self._changed:
            delivery = self._deliveries.get(key)
            if delivery is not None:
                for send in delivery.sends:
                    self._event(send, event)
                self._changed.notify_all()

    def _event(self, send: Send, event: SendEvent) -> None:
        """Feed the state machine; under the lock. What it says is done by the pump, in order."""
        now = self._clock.now()
        match event:
            case Computing(token_start, token_end, _):
                send.chunk = (token_end - token_start, now)
            case Computed() if send.chunk is not None:
                tokens, began_at = send.chunk
                self._chooser.pace.add(tokens, now - began_at)
                send.chunk = None
            case Finish():
                send.finished_at = now
            case CommitConfirmed() if send.forecast is not None and send.finished_at is not None:
                send.forecast.came_out(now - send.finished_at, now)
        for effect in send.session.on_event(event, now):
            self._effects.append((send, effect))

    # --- the pump -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pin_thread(self._config.cpu_affinity)
        while True:
            with self._changed:
                self._watch()
                effects = list(self._effects)
                self._effects.clear()
                opening = None if effects else self._peers.lane_to_open(self._clock.now())
                turn = None if effects or opening else self._next_frame()
                if not (effects or opening or turn):
                    if self._closing and not self._deliveries:
                        return
                    self._changed.wait(self._pause())
                    continue
            for send, effect in effects:
                self._perform(send, effect)
            if opening is not None:
                self._peers.open_lane(*opening)
            if turn is not None:
                self._send_frame(turn)

    def _watch(self) -> None:
        """Look at the clock and at the running step; under the lock."""
        now = self._clock.now()
        for send in self._turns:
            step_id = send.session.watched_step
            if step_id is not None:
                layers = self._layers_done(step_id)
                if layers > send.session.layers_seen:
                    self._event(send, LayersDone(step_id, layers))
            deadline = send.session.deadline()
            if deadline is not None and now >= deadline:
                self._event(send, Tick())
        self._peers.watch(now)

    def _next_frame(self) -> FrameTurn | None:
        """The next frame that is ready and has its credit; under the lock."""
        for _ in range(len(self._turns)):
            send = self._turns[0]
            self._turns.rotate(-1)
            peer = send.peer
            if not peer.ready or send.session.peek_frame() is None:
                continue
            lane = self._peers.lane_for(peer, next_attempt(send.session))
            chosen = self._choose(send, GRPC if lane is None else lane.transport)
            span = send.session.peek_frame()  # once more: how large frames are was chosen too
            if span is None:
                continue
            bound = send.limits.frame_bound(span)
            if bound > peer.credit and bound <= peer.window:
                continue
            if lane is not None and not lane.lane.has_room(bound) and bound <= peer.window:
                continue
            task = send.session.take_frame()
            assert task is not None
            if bound > peer.window:
                problem = f"a frame of up to {bound} bytes exceeds the receiver's credit of {peer.window}"
                self._event(send, FrameDropped(task.frame_index, problem))
                continue
            peer.credit -= bound
            self._unacked(bound)
            return FrameTurn(send, task, bound, lane, chosen.codec)
        return None

    def _choose(self, send: Send, transport: str) -> Chosen:
        """The codec of a send and how large its frames are: chosen when its first frame is ready, and once more when
        its link was measured."""
        now, address = self._clock.now(), send.peer.address
        chosen = send.chosen
        if chosen is None or (not chosen.final and self._chooser.link(address, transport).meter.measured(now)):
            planner = send.session.planner
            others = (other.session.planner.ready_bytes for other in self._turns if other is not send)
            chosen = send.chosen = self._chooser.choose(
                send.asked,
                send.limits.codecs,
                address,
                transport,
                raw_bytes=max(1, planner.left_bytes),
                most_frame_bytes=send.session.plan.frame_bytes,
                hidden_s=send.hidden_s(self._chooser.pace.seconds_per_token, now),
                encoder_queue_bytes=sum(others),
                now=now,
            )
            # The plan fits our own credit; the receiver's may be smaller, and two frames should fit in it.
            planner.fit(chosen.frame_bytes, send.peer.window // 2 - _FRAME_OVERHEAD)
            if send.session.started:
                send.forecast = None
            else:
                send.forecast, send.began_with = chosen.forecast, chosen.codec.name
        return chosen

    def _unacked(self, more: int) -> None:
        counters = self._counters
        counters.unacked_bytes += more
        counters.peak_unacked_bytes = max(counters.peak_unacked_bytes, counters.unacked_bytes)

    def _pause(self) -> float:
        """How long there is nothing to do unless something happens; under the lock."""
        if not self._deliveries:
            return _IDLE_S
        watching = any(send.session.watched_step is not None and send.peer.credit > 0 for send in self._turns)
        return _POLL_S if watching else _TICK_S

    def _send_frame(self, turn: FrameTurn) -> None:
        send, task, reserved = turn.send, turn.task, turn.reserved
        packed: PackedFrame | None = None
        loaded: LoadedFrame | None = None
        problem = ""
        span = task.span
        started = self._clock.now()
        try:
            self._faults.hit("prefill.before_frame")
            values = self._store.gather(
                span.layer_start, span.layer_count, send.block_ids, span.token_start, span.token_count
            )
            values = self._travelling(values, send)
            packed = pack_frame(values, send.limits, span, turn.codec)
        except Exception as error:
            # Whatever the cache objects to, this send must end and its gather must count as over.
            logger.exception("gathering frame %d of %s failed", task.frame_index, send.key, exc_info=wordless(error))
            problem = f"gather failed: {type(error).__name__}"
        if packed is not None and turn.lane is not None:
            loaded = turn.lane.lane.load(packed.data)
        with self._changed:
            now = self._clock.now()
            peer = send.peer
            if packed is None or peer.link is None or not send.session.active:
                if peer.link is not None:
                    peer.credit += reserved
                    self._unacked(-reserved)
                if turn.lane is not None and loaded is not None:
                    turn.lane.lane.unload(loaded)
                self._event(send, FrameDropped(task.frame_index, problem))
                return
            size = len(packed.data)
            peer.credit += reserved - size
            self._unacked(size - reserved)
            transport = self._peers.post(turn, packed.data, loaded)
            raw_bytes, codec = values.nbytes, turn.codec.name
            self._chooser.encoded(codec, raw_bytes, size, now - started, now)
            link = self._chooser.link(peer.address, transport)
            link.posted(send.limits.ref, task.frame_index, codec, raw_bytes=raw_bytes, wire_bytes=size, now=now)
            self._counters.frames += 1
            self._counters.wire_bytes += size
            self._counters.retries += task.attempt > 0
            packed_with = self._counters.codecs.setdefault(codec, CodecCounters())
            packed_with.raw_bytes += raw_bytes
            packed_with.wire_bytes += size
            self._event(send, FrameSent(task.frame_index, packed.checksums, size))

    def _travelling(self, values: torch.Tensor, send: Send) -> torch.Tensor:
        """The heads of what was gathered that go to this send's endpoint."""
        start = send.limits.head_start - self._store.geometry.head_start
        if send.limits.head_count == values.shape[3]:
            return values
        return values.narrow(3, start, send.limits.head_count).contiguous()

    def _perform(self, send: Send, effect: SendEffect) -> None:
        match effect:
            case SendManifest(manifest):
                self._faults.hit("prefill.before_manifest")
                link = send.peer.link
                if link is not None:
                    manifest = replace(manifest, codec_reason=send.codec_reason[:MAX_REASON_CHARS])
                    link.post_manifest(manifest, lambda: self._faults.hit("prefill.after_manifest"))
            case SendAbort(reason):
                link = send.peer.link
                if link is not None:
                    link.post_abort(send.limits.ref, reason)
            case SendDone(failure):
                self._done(send, failure)

    def _done(self, send: Send, failure: SendFailure | None) -> None:
        now = self._clock.now()
        delivery = send.delivery
        with self._changed:
            self._turns.remove(send)
            send.peer.sends.pop(send.limits.ref, None)
            silent = now - send.peer.heard_at >= self._config.send_timeout_s
            if failure is not None and failure.kind is FailureKind.TIMEOUT and silent:
                # Not one word for as long: the next send should find a new stream.
                self._peers.drop(send.peer, "the receiver is silent", refused=False)
            last = delivery.ended(failure)
            if last:
                del self._deliveries[delivery.key]
                first = delivery.failure
                self._counters.failed += first is not None and not _nobodys_fault(first)
            elif failure is not None:
                # A part of the heads is of no use.
                for other in delivery.sends:
                    self._event(other, AbortSend(failure.reason))
        if not last:
            return
        outcome = SendOutcome(
            key=delivery.key,
            error=None if delivery.failure is None else _error(delivery.failure),
            frames=sum(part.session.frames_sent for part in delivery.sends),
            wire_bytes=sum(part.session.wire_bytes for part in delivery.sends),
            seconds=now - delivery.opened_at,
        )
        try:
            delivery.on_done(outcome)
        except Exception as error:
            logger.exception("on_done of %s failed", send.key, exc_info=wordless(error))


def _nobodys_fault(failure: SendFailure) -> bool:
    return failure.kind is FailureKind.ABORTED or isinstance(failure.reason, Revocation)


def _error(failure: SendFailure) -> TransferError:
    match failure.kind:
        case FailureKind.ABORTED:
            return refusal(f"aborted: {failure.reason}")
        case FailureKind.REFUSED:
            revoked = isinstance(failure.reason, Revocation)
            return TicketRevoked(failure.reason) if revoked else TicketError(failure.reason)
        case FailureKind.FRAME:
            return FrameError(failure.reason)
        case FailureKind.TIMEOUT:
            return TransferTimeout(failure.reason)
        case FailureKind.DISCONNECTED:
            return TransferError(failure.reason)
