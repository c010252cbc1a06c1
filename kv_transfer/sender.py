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
from collections.abc import Callable, Sequence
from dataclasses import replace

from kv_transfer.codecs.registry import STANDARD, CodecRegistry
from kv_transfer.frames import MAX_FRAME_TOKENS, FrameLimits, wire_name
from kv_transfer.handshake import check_welcome, hello
from kv_transfer.manifest import FrameSpan, TicketRef
from kv_transfer.messages import Committed, FrameAck, FrameNack, PushReply, TicketRefused, Welcome
from kv_transfer.outbound import Peer, Send, SenderCounters
from kv_transfer.packing import PackedFrame, pack_frame
from kv_transfer.planning import Computing
from kv_transfer.session import (
    AbortSend,
    Acked,
    CommitConfirmed,
    Computed,
    Disconnected,
    FailureKind,
    Finish,
    FrameDropped,
    FrameSent,
    FrameTask,
    LayersDone,
    Nacked,
    Refused,
    SendAbort,
    SendDone,
    SendEffect,
    SendEvent,
    SendFailure,
    SendManifest,
    SendPlan,
    SendSession,
    Tick,
)
from kv_transfer.threads import CrashGuard, check_cores, pin_thread
from kv_transfer.transport import KvStore, SendOutcome
from kv_transfer.transports.grpc_push import GrpcPushLink
from pdcore.clock import Clock
from pdcore.config import TransferConfig
from pdcore.errors import FrameError, HandshakeRefused, TicketError, TransferError, TransferTimeout
from pdcore.faults import FaultPoints
from pdcore.types import DTYPE_BYTES, KvEndpoint, KvTicket, RequestKey

logger = logging.getLogger(__name__)

_POLL_S = 0.001  # between looks at the layers of a running step, while there are any to wait for
_TICK_S = 0.1
_IDLE_S = 1.0


class KvSender:
    """Sends KV out of a paged cache. Thread-safe; every method returns at once, but `close`.

    Calls for a request that is not open (any more) are ignored: its send may have failed while its prefill ran on.

    Args:
        worker_id, incarnation: of this prefill worker.
        store: the cache. config: bounds and preferences.
        layers_done: step id -> layers of that step whose KV is in the cache; 0 if it is not the running step. Called
            from the pump, under the sender's lock: must be quick and take no lock.
        clock: of time-outs. faults: fault points of this process.
        codecs: those that can be used.
        on_crash: told, once, that the pump has died of an error: nothing is sent any more, and no `on_done` follows.
            Called from the pump; must not block. None: it is only logged.
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
        on_crash: Callable[[BaseException], None] | None = None,
    ) -> None:
        check_cores("transfer.cpu_affinity", config.cpu_affinity)
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._store = store
        self._config = config
        self._codecs = codecs
        self._layers_done = layers_done
        self._clock = clock
        self._faults = faults
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._sends: dict[RequestKey, Send] = {}
        self._turns: deque[Send] = deque()  # the order in which sends are served, round and round
        self._peers: dict[tuple[str, str], Peer] = {}
        self._effects: deque[tuple[Send, SendEffect]] = deque()
        self._counters = SenderCounters()
        self._closing = False
        self._pump = threading.Thread(target=CrashGuard(on_crash).run, args=(self._run,), name="kv-send", daemon=True)
        self._pump.start()

    # --- the owner ------------------------------------------------------------------------------------------------

    def open(
        self, key: RequestKey, ticket: KvTicket, block_ids: Sequence[int], on_done: Callable[[SendOutcome], None]
    ) -> None:
        """Begin a send. The stream to the ticket's worker is opened at once if there is none.

        Args:
            block_ids: the request's block table; pinned by the caller until `on_done`.
            on_done: called exactly once, from the pump, when no gather of this request is in flight or will start.
                It must not block.

        Raises:
            TransferError: the ticket cannot be met: no common codec, another transport, another range of heads, no
                incarnation, too few blocks; or the request is open already; or the sender is closing.
        """
        send = self._new_send(key, ticket, block_ids, on_done)
        with self._changed:
            if self._closing:
                raise TransferError("the sender is closing")
            if key in self._sends:
                raise _refusal(f"request {key.request_id} attempt {key.attempt} is being sent already")
            self._attach(send)
            self._sends[key] = send
            self._turns.append(send)
            self._changed.notify_all()

    def computing(self, key: RequestKey, token_start: int, token_end: int, step_id: int) -> None:
        """Step `step_id` computes these tokens: their layers may be sent as they complete."""
        self._post(key, Computing(token_start, token_end, step_id))

    def computed(self, key: RequestKey, token_end: int) -> None:
        """All layers of tokens ``[0, token_end)`` are in the cache."""
        self._post(key, Computed(token_end))

    def finish(self, key: RequestKey, first_token: int) -> None:
        """All tokens are computed and `first_token` was sampled: the manifest follows the last frame."""
        self._post(key, Finish(first_token))

    def abort(self, key: RequestKey, reason: str) -> None:
        """End a send; `on_done` follows with an error, unless it is over. Idempotent."""
        self._post(key, AbortSend(reason))

    @property
    def open_sends(self) -> int:
        """Sends whose `on_done` has not been called."""
        with self._lock:
            return len(self._sends)

    @property
    def counters(self) -> SenderCounters:
        """A copy of the counters."""
        with self._lock:
            return replace(self._counters)

    def close(self, timeout_s: float = 5.0) -> None:
        """Abort every send, end every stream, and wait for the threads at most this long. Idempotent."""
        with self._changed:
            self._closing = True
            for send in list(self._sends.values()):
                self._event(send, AbortSend("the prefill worker is shutting down"))
            self._changed.notify_all()
        deadline = self._clock.now() + timeout_s
        self._pump.join(timeout_s)
        with self._lock:
            links = [peer.link for peer in self._peers.values() if peer.link is not None]
        for link in links:
            link.finish()  # all at once: what one of them waits for must not be taken from the others' time
        for link in links:
            link.close(max(0.0, deadline - self._clock.now()))

    # --- opening --------------------------------------------------------------------------------------------------

    def _new_send(
        self, key: RequestKey, ticket: KvTicket, block_ids: Sequence[int], on_done: Callable[[SendOutcome], None]
    ) -> Send:
        geometry = self._store.geometry
        if not ticket.worker_incarnation:
            raise _refusal("the ticket names no incarnation of the decode worker")
        if not 0 <= ticket.prefix_tokens < ticket.num_tokens <= len(block_ids) * geometry.block_size:
            raise _refusal(
                f"a ticket for tokens [{ticket.prefix_tokens}, {ticket.num_tokens}) and {len(block_ids)} blocks of "
                f"{geometry.block_size} tokens"
            )
        endpoint = self._endpoint(ticket)
        codec = self._codecs.choose(self._config.codec, ticket.codecs, geometry.dtype)
        limits = FrameLimits.for_ticket(
            ref=TicketRef(ticket.ticket_id, ticket.generation),
            key=key,
            geometry=geometry,
            token_start=ticket.prefix_tokens,
            token_end=ticket.num_tokens,
            codecs=(wire_name(codec.name, codec.calibration),),
        )
        now = self._clock.now()
        return Send(
            key=key,
            session=SendSession(self._plan(limits)),
            limits=limits,
            codec=codec,
            block_ids=tuple(block_ids),
            on_done=on_done,
            peer=Peer(endpoint.address, ticket.worker_incarnation, now, now),
            opened_at=now,
        )

    def _endpoint(self, ticket: KvTicket) -> KvEndpoint:
        heads = self._store.geometry.num_kv_heads
        usable = [endpoint for endpoint in ticket.endpoints if endpoint.transport == self._config.transport]
        if not usable:
            offered = ", ".join(endpoint.transport for endpoint in ticket.endpoints) or "nothing"
            raise _refusal(f"no common transport: ours is {self._config.transport}, theirs {offered}")
        whole = [endpoint for endpoint in usable if (endpoint.head_start, endpoint.head_count) == (0, heads)]
        if not whole:
            ranges = ", ".join(f"[{e.head_start}, {e.head_start + e.head_count})" for e in usable)
            raise _refusal(f"no endpoint takes heads [0, {heads}); theirs take {ranges}")
        return whole[0]

    def _plan(self, limits: FrameLimits) -> SendPlan:
        """Frames of about `frame_bytes`, and never so large that two would not fit in the credit."""
        config = self._config
        per_layer = 2 * limits.head_count * limits.head_dim * DTYPE_BYTES[limits.dtype]
        bound = config.credit_bytes // 2
        tokens = min(config.frame_tokens, MAX_FRAME_TOKENS)
        while tokens > 1 and limits.frame_bound(FrameSpan(0, 1, 0, tokens)) > bound:
            tokens //= 2
        header = limits.frame_bound(FrameSpan(0, 1, 0, tokens)) - tokens * per_layer
        return SendPlan(
            key=limits.key,
            ref=limits.ref,
            num_layers=limits.num_layers,
            token_start=limits.token_start,
            token_end=limits.token_end,
            frame_tokens=tokens,
            frame_bytes=min(config.frame_bytes, bound - header),
            layer_token_bytes=per_layer,
            max_frame_retries=config.max_frame_retries,
            timeout_s=config.send_timeout_s,
        )

    def _attach(self, send: Send) -> None:
        """Give a send its stream; under the lock."""
        name = (send.peer.address, send.peer.incarnation)
        peer = self._peers.get(name)
        if peer is None:
            now = self._clock.now()
            peer = Peer(*name, opened_at=now, heard_at=now)
            self._peers[name] = peer
            self._counters.links += 1
            peer.link = GrpcPushLink(
                peer.address,
                hello(self._worker_id, self._incarnation, peer.incarnation, self._store.geometry),
                _PeerListener(self, peer),
                message_bytes=self._config.message_bytes,
                cores=self._config.cpu_affinity,
            )
        send.peer = peer
        peer.sends[send.limits.ref] = send

    # --- events ---------------------------------------------------------------------------------------------------

    def _post(self, key: RequestKey, event: SendEvent) -> None:
        with self._changed:
            send = self._sends.get(key)
            if send is not None:
                self._event(send, event)
                self._changed.notify_all()

    def _event(self, send: Send, event: SendEvent) -> None:
        """Feed the state machine; under the lock. What it says is done by the pump, in order."""
        for effect in send.session.on_event(event, self._clock.now()):
            self._effects.append((send, effect))

    def reply_arrived(self, peer: Peer, reply: PushReply) -> None:
        """The receiver said something; called from its link's reader."""
        with self._changed:
            peer.heard_at = self._clock.now()
            match reply:
                case Welcome():
                    self._welcomed(peer, reply)
                case FrameAck(ref, frame_index, credit_bytes):
                    self._credit(peer, credit_bytes)
                    self._peer_event(peer, ref, Acked(frame_index))
                case FrameNack(ref, frame_index, credit_bytes, retryable, reason):
                    self._credit(peer, credit_bytes)
                    self._peer_event(peer, ref, Nacked(frame_index, retryable, reason))
                case Committed(ref):
                    self._peer_event(peer, ref, CommitConfirmed())
                case TicketRefused(ref, reason):
                    self._peer_event(peer, ref, Refused(reason))
            self._changed.notify_all()

    def _welcomed(self, peer: Peer, reply: Welcome) -> None:
        try:
            check_welcome(reply, peer.incarnation, self._store.geometry)
        except HandshakeRefused as error:
            self._drop_peer(peer, str(error), refused=True)
            return
        peer.window = peer.credit = reply.credit_bytes

    def _credit(self, peer: Peer, credit_bytes: int) -> None:
        peer.credit += credit_bytes
        if peer.link is not None:
            self._counters.unacked_bytes -= credit_bytes

    def _peer_event(self, peer: Peer, ref: TicketRef, event: SendEvent) -> None:
        send = peer.sends.get(ref)
        if send is not None:
            self._event(send, event)

    def link_closed(self, peer: Peer, reason: str, refused: bool) -> None:
        """The stream to a receiver is gone; called from its reader, once."""
        with self._changed:
            self._drop_peer(peer, reason, refused)
            self._changed.notify_all()

    def _drop_peer(self, peer: Peer, reason: str, refused: bool) -> None:
        """Forget a stream, and end or move the sends that relied on it; under the lock."""
        if peer.link is None:
            return
        peer.link.cancel()
        peer.link = None
        self._counters.unacked_bytes -= peer.window - peer.credit
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
                self._attach(send)
            else:
                self._event(send, Disconnected(reason))

    # --- the pump -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pin_thread(self._config.cpu_affinity)
        while True:
            with self._changed:
                self._watch()
                effects = list(self._effects)
                self._effects.clear()
                work = self._next_frame() if not effects else None
                if not effects and work is None:
                    if self._closing and not self._sends:
                        return
                    self._changed.wait(self._pause())
                    continue
            for send, effect in effects:
                self._perform(send, effect)
            if work is not None:
                self._send_frame(*work)

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
        for peer in list(self._peers.values()):
            if peer.window == 0 and now - peer.opened_at >= self._config.send_timeout_s:
                self._drop_peer(peer, f"no welcome within {self._config.send_timeout_s} s", refused=True)

    def _next_frame(self) -> tuple[Send, FrameTask, int] | None:
        """The next frame that is ready and has its credit, and that credit; under the lock."""
        for _ in range(len(self._turns)):
            send = self._turns[0]
            self._turns.rotate(-1)
            peer = send.peer
            span = send.session.peek_frame() if peer.ready else None
            if span is None:
                continue
            bound = send.limits.frame_bound(span)
            if bound > peer.credit and bound <= peer.window:
                continue
            task = send.session.take_frame()
            assert task is not None
            if bound > peer.window:
                problem = f"a frame of up to {bound} bytes exceeds the receiver's credit of {peer.window}"
                self._event(send, FrameDropped(task.frame_index, problem))
                continue
            peer.credit -= bound
            self._unacked(bound)
            return send, task, bound
        return None

    def _unacked(self, more: int) -> None:
        counters = self._counters
        counters.unacked_bytes += more
        counters.peak_unacked_bytes = max(counters.peak_unacked_bytes, counters.unacked_bytes)

    def _pause(self) -> float:
        """How long there is nothing to do unless something happens; under the lock."""
        if not self._sends:
            return _IDLE_S
        watching = any(send.session.watched_step is not None and send.peer.credit > 0 for send in self._turns)
        return _POLL_S if watching else _TICK_S

    def _send_frame(self, send: Send, task: FrameTask, reserved: int) -> None:
        packed: PackedFrame | None = None
        problem = ""
        span = task.span
        try:
            self._faults.hit("prefill.before_frame")
            values = self._store.gather(
                span.layer_start, span.layer_count, send.block_ids, span.token_start, span.token_count
            )
            packed = pack_frame(values, send.limits, span, send.codec)
        except Exception as error:
            # Whatever the cache objects to, this send must end and its gather must count as over.
            logger.exception("gathering frame %d of %s failed", task.frame_index, send.key)
            problem = f"gather failed: {error}"
        with self._changed:
            peer = send.peer
            if packed is None or peer.link is None or not send.session.active:
                if peer.link is not None:
                    peer.credit += reserved
                    self._unacked(-reserved)
                self._event(send, FrameDropped(task.frame_index, problem))
                return
            size = len(packed.data)
            peer.credit += reserved - size
            self._unacked(size - reserved)
            peer.link.post_frame(send.limits.ref, task.frame_index, task.attempt, packed.data)
            self._counters.frames += 1
            self._counters.wire_bytes += size
            self._counters.retries += task.attempt > 0
            self._event(send, FrameSent(task.frame_index, packed.checksums, size))

    def _perform(self, send: Send, effect: SendEffect) -> None:
        match effect:
            case SendManifest(manifest):
                self._faults.hit("prefill.before_manifest")
                link = send.peer.link
                if link is not None:
                    link.post_manifest(manifest, lambda: self._faults.hit("prefill.after_manifest"))
            case SendAbort(reason):
                link = send.peer.link
                if link is not None:
                    link.post_abort(send.limits.ref, reason)
            case SendDone(failure):
                self._done(send, failure)

    def _done(self, send: Send, failure: SendFailure | None) -> None:
        now = self._clock.now()
        with self._changed:
            del self._sends[send.key]
            self._turns.remove(send)
            send.peer.sends.pop(send.limits.ref, None)
            silent = now - send.peer.heard_at >= self._config.send_timeout_s
            if failure is not None and failure.kind is FailureKind.TIMEOUT and silent:
                # Not one word for as long: the next send should find a new stream.
                self._drop_peer(send.peer, "the receiver is silent", refused=False)
        outcome = SendOutcome(
            key=send.key,
            error=None if failure is None else _error(failure),
            frames=send.session.frames_sent,
            wire_bytes=send.session.wire_bytes,
            seconds=now - send.opened_at,
        )
        try:
            send.on_done(outcome)
        except Exception:
            logger.exception("on_done of %s failed", send.key)


class _PeerListener:
    """`LinkListener` of one peer."""

    def __init__(self, sender: KvSender, peer: Peer) -> None:
        self._sender = sender
        self._peer = peer

    def on_reply(self, reply: PushReply) -> None:
        self._sender.reply_arrived(self._peer, reply)

    def on_closed(self, reason: str, refused: bool) -> None:
        self._sender.link_closed(self._peer, reason, refused)


def _refusal(problem: str) -> TransferError:
    """A `TransferError` that trying again cannot cure."""
    error = TransferError(problem)
    error.retryable = False
    return error


def _error(failure: SendFailure) -> TransferError:
    match failure.kind:
        case FailureKind.ABORTED:
            return _refusal(f"aborted: {failure.reason}")
        case FailureKind.REFUSED:
            return TicketError(failure.reason)
        case FailureKind.FRAME:
            return FrameError(failure.reason)
        case FailureKind.TIMEOUT:
            return TransferTimeout(failure.reason)
        case FailureKind.DISCONNECTED:
            return TransferError(failure.reason)
