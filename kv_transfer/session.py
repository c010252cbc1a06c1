"""The sender's side of one transfer as a pure state machine: events in, effects out.

Nothing here waits, sends, reads a clock or touches KV. `KvSender` feeds it what happens and carries out what it
says; the exhaustive tests feed it everything that could happen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from typing import NamedTuple, TypeAlias

from kv_transfer.manifest import FrameSpan, Manifest, TicketRef, frames_digest
from kv_transfer.planning import Computing, FramePlanner
from pdcore.types import RequestKey


@dataclass(frozen=True, slots=True)
class SendPlan:
    """The constants of one send.

    Attributes:
        key, ref: the request and the ticket that it fills.
        num_layers: layers of the model.
        token_start, token_end: tokens to send, counted from the start of the sequence.
        frame_tokens: tokens per frame at most.
        frame_bytes: raw bytes of a frame, about; see `FramePlanner.group_bytes`.
        layer_token_bytes: K and V of one token in one layer, in bytes.
        max_frame_retries: how often one frame may be sent again.
        timeout_s: seconds without progress, while the peer is waited for, until the send fails.
    """

    key: RequestKey
    ref: TicketRef
    num_layers: int
    token_start: int
    token_end: int
    frame_tokens: int
    frame_bytes: int
    layer_token_bytes: int
    max_frame_retries: int
    timeout_s: float


class LayersDone(NamedTuple):
    """Layers ``[0, layers)`` of step `step_id` are in the cache."""

    step_id: int
    layers: int


class Computed(NamedTuple):
    """All layers of tokens ``[0, token_end)`` are in the cache."""

    token_end: int


class Finish(NamedTuple):
    """Every token is computed, and these were sampled, one for each sample of the request."""

    first_tokens: tuple[int, ...]


class FrameSent(NamedTuple):
    """A frame taken with `take_frame` is on its way. `checksums`: of its sections' decoded bytes."""

    frame_index: int
    checksums: tuple[int, ...]
    wire_bytes: int


class FrameDropped(NamedTuple):
    """A frame taken with `take_frame` was not sent. `reason` is empty if only because the send is closing."""

    frame_index: int
    reason: str


class Acked(NamedTuple):
    """The receiver has scattered the frame."""

    frame_index: int


class Nacked(NamedTuple):
    """The receiver does not accept the frame."""

    frame_index: int
    retryable: bool
    reason: str


class CommitConfirmed(NamedTuple):
    """The receiver has made the ticket a sequence."""


class Refused(NamedTuple):
    """The receiver has given the ticket up."""

    reason: str


class Disconnected(NamedTuple):
    """The stream to the receiver is gone."""

    reason: str


class AbortSend(NamedTuple):
    """The owner of the request wants the send to end."""

    reason: str


class Tick(NamedTuple):
    """Time has passed."""


SendEvent: TypeAlias = (
    Computing
    | LayersDone
    | Computed
    | Finish
    | FrameSent
    | FrameDropped
    | Acked
    | Nacked
    | CommitConfirmed
    | Refused
    | Disconnected
    | AbortSend
    | Tick
)


class FailureKind(Enum):
    """Why a send failed."""

    ABORTED = "aborted"
    REFUSED = "refused"
    FRAME = "frame"
    DISCONNECTED = "disconnected"
    TIMEOUT = "timeout"


class SendFailure(NamedTuple):
    """Why a send failed, in kind and in words."""

    kind: FailureKind
    reason: str


class SendManifest(NamedTuple):
    """Effect: send this manifest behind the frames sent so far."""

    manifest: Manifest


class SendAbort(NamedTuple):
    """Effect: tell the receiver that the ticket will not be filled."""

    reason: str


class SendDone(NamedTuple):
    """Effect, once: no gather is in flight and none will start. `failure` is None if the receiver committed."""

    failure: SendFailure | None


SendEffect: TypeAlias = SendManifest | SendAbort | SendDone


class FrameTask(NamedTuple):
    """A frame to gather, encode and send. `attempt` is 0 the first time."""

    frame_index: int
    attempt: int
    span: FrameSpan


class SendPhase(StrEnum):
    """See `SendSession`."""

    SENDING = "sending"
    CONFIRMING = "confirming"
    CLOSING = "closing"
    DONE = "done"


@dataclass(slots=True)
class SendSession:
    """One send.

    ::

                      last frame sent and Finish             CommitConfirmed
        SENDING ------------------------------> CONFIRMING ------------------> CLOSING --> DONE
           |              (SendManifest)            |                             ^      no gather in flight
           |                                        |                             |      (SendDone, once)
           '----------------------------------------'-----------------------------'
             AbortSend, Refused, Disconnected, Tick past the bound, Nacked for good
             (SendAbort unless the receiver knows already or cannot be told)

    In SENDING and CONFIRMING `take_frame` hands out frames: new ones as tokens and layers become ready, and nacked
    ones again. A frame is *gathering* from `take_frame` to `FrameSent` or `FrameDropped`, then *unacked* until
    `Acked` or `Nacked`. Events that make no sense in a state (late, repeated) change nothing.

    The bound on silence runs only while the receiver is waited for (something is ready, unacked or unconfirmed): a
    prompt may queue for its prefill as long as it likes.
    """

    plan: SendPlan
    phase: SendPhase = SendPhase.SENDING
    planner: FramePlanner = field(init=False)
    spans: list[FrameSpan] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    checksums: dict[int, tuple[int, ...]] = field(default_factory=dict)
    gathering: set[int] = field(default_factory=set)
    unacked: set[int] = field(default_factory=set)
    retry: list[int] = field(default_factory=list)
    first_tokens: tuple[int, ...] = ()
    failure: SendFailure | None = None
    progress_at: float = 0.0
    frames_sent: int = 0
    wire_bytes: int = 0

    def __post_init__(self) -> None:
        plan = self.plan
        self.planner = FramePlanner(
            num_layers=plan.num_layers,
            token_start=plan.token_start,
            token_end=plan.token_end,
            frame_tokens=plan.frame_tokens,
            group_bytes=plan.frame_bytes,
            layer_token_bytes=plan.layer_token_bytes,
        )

    # --- questions ------------------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """A frame has been handed out."""
        return bool(self.spans)

    @property
    def active(self) -> bool:
        """The outcome is open."""
        return self.phase in (SendPhase.SENDING, SendPhase.CONFIRMING)

    @property
    def watched_step(self) -> int | None:
        """The step whose layer progress would make more frames ready; None if there is none."""
        return self.planner.watched_step if self.phase is SendPhase.SENDING else None

    @property
    def layers_seen(self) -> int:
        """Layers of the watched step that are known to be in the cache."""
        return self.planner.chunk_layers

    @property
    def waits_for_peer(self) -> bool:
        """Progress depends on the receiver."""
        if not self.active:
            return False
        return (
            self.phase is SendPhase.CONFIRMING
            or bool(self.unacked or self.retry)
            or self.planner.next_span() is not None
        )

    def deadline(self) -> float | None:
        """Reading of the clock at which a `Tick` fails the send; None while the receiver is not waited for."""
        return self.progress_at + self.plan.timeout_s if self.waits_for_peer else None

    def peek_frame(self) -> FrameSpan | None:
        """The span of the frame that `take_frame` would hand out."""
        if not self.active:
            return None
        return self.spans[self.retry[0]] if self.retry else self.planner.next_span()

    # --- transitions ----------------------------------------------------------------------------------------------

    def take_frame(self) -> FrameTask | None:
        """Hand out the next frame to gather, encode and send: a nacked one first. None if nothing is ready."""
        if not self.active:
            return None
        if self.retry:
            index = self.retry.pop(0)
        else:
            span = self.planner.next_span()
            if span is None:
                return None
            index = len(self.spans)
            self.spans.append(span)
            self.attempts.append(0)
            self.planner.take(span)
        self.gathering.add(index)
        return FrameTask(index, self.attempts[index], self.spans[index])

    def on_event(self, event: SendEvent, now: float) -> tuple[SendEffect, ...]:
        """Take one event at clock reading `now`; returns what is to be done, in order."""
        if self.phase is SendPhase.DONE:
            return ()
        waited = self.waits_for_peer
        effects = [*self._apply(event, now), *self._settle()]
        if not waited and self.waits_for_peer:
            self.progress_at = now
        return tuple(effects)

    def _apply(self, event: SendEvent, now: float) -> tuple[SendEffect, ...]:
        match event:
            case FrameSent(index, checksums, wire_bytes):
                return self._frame_sent(index, checksums, wire_bytes, now)
            case FrameDropped(index, reason):
                self.gathering.discard(index)
                return self._fail(FailureKind.FRAME, reason) if reason else ()
        if not self.active:
            return ()
        match event:
            case Computing():
                self.planner.computing(event)
            case LayersDone(step_id, layers):
                self.planner.layers_done(step_id, layers)
            case Computed(token_end):
                self.planner.computed_to(token_end)
            case Finish(first_tokens):
                self.planner.computed_to(self.plan.token_end)
                self.first_tokens = first_tokens
            case Acked(index):
                if index in self.unacked:
                    self.unacked.remove(index)
                    self.progress_at = now
            case Nacked(index, retryable, reason):
                return self._nacked(index, retryable, reason)
            case CommitConfirmed():
                if self.phase is SendPhase.CONFIRMING:
                    self.phase = SendPhase.CLOSING
            case Refused(reason):
                return self._fail(FailureKind.REFUSED, reason, tell=False)
            case Disconnected(reason):
                return self._fail(FailureKind.DISCONNECTED, reason, tell=False)
            case AbortSend(reason):
                return self._fail(FailureKind.ABORTED, reason)
            case Tick():
                deadline = self.deadline()
                if deadline is not None and now >= deadline:
                    return self._fail(
                        FailureKind.TIMEOUT,
                        f"no progress for {self.plan.timeout_s} s: {len(self.unacked)} frames unacknowledged, "
                        f"{self.phase.value}",
                    )
        return ()

    def _frame_sent(
        self, index: int, checksums: tuple[int, ...], wire_bytes: int, now: float
    ) -> tuple[SendEffect, ...]:
        assert index in self.gathering, index
        self.gathering.remove(index)
        self.frames_sent += 1
        self.wire_bytes += wire_bytes
        if not self.active:
            return ()
        known = self.checksums.setdefault(index, checksums)
        if known != checksums:
            # The blocks are pinned, so a second gather must read what the first one read.
            return self._fail(FailureKind.FRAME, f"frame {index} changed between two tries")
        self.unacked.add(index)
        self.progress_at = now
        return ()

    def _nacked(self, index: int, retryable: bool, reason: str) -> tuple[SendEffect, ...]:
        if index not in self.unacked:
            return ()
        self.unacked.remove(index)
        if not retryable:
            return self._fail(FailureKind.FRAME, f"frame {index} was not accepted: {reason}")
        if self.attempts[index] >= self.plan.max_frame_retries:
            return self._fail(FailureKind.FRAME, f"frame {index} failed {self.attempts[index] + 1} times: {reason}")
        self.attempts[index] += 1
        self.retry.append(index)
        return ()

    def _fail(self, kind: FailureKind, reason: str, tell: bool = True) -> tuple[SendEffect, ...]:
        if not self.active:
            return ()
        self.phase = SendPhase.CLOSING
        self.failure = SendFailure(kind, reason)
        self.retry.clear()
        self.unacked.clear()
        return (SendAbort(reason),) if tell else ()

    def _settle(self) -> tuple[SendEffect, ...]:
        """Transitions that need no event of their own."""
        if self.phase is SendPhase.SENDING and self.first_tokens and self._all_sent():
            self.phase = SendPhase.CONFIRMING
            return (SendManifest(self._manifest()),)
        if self.phase is SendPhase.CLOSING and not self.gathering:
            self.phase = SendPhase.DONE
            return (SendDone(self.failure),)
        return ()

    def _all_sent(self) -> bool:
        """Every token of every layer has been sent at least once."""
        return len(self.checksums) == len(self.spans) and self.planner.exhausted

    def _manifest(self) -> Manifest:
        return Manifest(
            ref=self.plan.ref,
            key=self.plan.key,
            num_tokens=self.plan.token_end,
            num_frames=len(self.spans),
            first_tokens=self.first_tokens,
            digest=frames_digest(self.checksums[index] for index in range(len(self.spans))),
        )

    # --- for the exhaustive tests ---------------------------------------------------------------------------------

    def copy(self) -> SendSession:
        """An independent session in the same state."""
        twin = object.__new__(SendSession)
        for item in fields(self):
            value = getattr(self, item.name)
            mutable = isinstance(value, list | dict | set | FramePlanner)
            setattr(twin, item.name, value.copy() if mutable else value)
        return twin

    def snapshot(self) -> tuple[object, ...]:
        """Hashable value of all that can still make a difference; texts and counters do not."""
        if not self.active:
            return self.phase, self.failure and self.failure.kind, frozenset(self.gathering)
        return (
            self.phase,
            self.planner.snapshot(),
            tuple(self.spans),
            tuple(self.attempts),
            tuple(sorted(self.checksums.items())),
            frozenset(self.gathering),
            frozenset(self.unacked),
            tuple(self.retry),
            self.first_tokens,
            self.progress_at,
        )
