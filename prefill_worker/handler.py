"""The prefill role: compute a prompt's KV, push it to the ticket's endpoints while computing, sample one token.

The life of a request here::

    prefill -> QUEUED --(first step planned)--> SENDING --(send over: committed, failed or aborted)--> gone
                  '------------- abort -----------> gone

While QUEUED the request holds nothing but its place in the engine. From the first step on its blocks belong to the
engine's sequence and then to the send; `KvSender`'s single `on_done` is the one place that gives them up. Full ones
are in the engine's prefix cache as soon as they are computed: the next prompt shares them while they are being sent.

If no worker that should decode serves, requests come here as a whole (`prefill_worker.whole`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.engine import Chunk, Engine, StepPlan, StepResult, TokenOut
from engine.sequence import SequenceKind
from kv_transfer.sender import KvSender
from kv_transfer.transport import SendOutcome
from pdcore.errors import InvalidRequest, PdserveError, TransferError
from pdcore.faults import FaultPoints
from pdcore.types import KvTicket, RequestKey, RequestSpec
from prefill_worker.whole import WholeRequests
from worker.events import prefill_notice, prompt_logprobs_notice, token_event
from worker.handler import NotMyRole, Reporter, TransferLoad, failed_notice


@dataclass(slots=True)
class _Prefill:
    spec: RequestSpec
    ticket: KvTicket
    sending: bool = False  # the sender has the request and will call on_done
    aborted: bool = False  # its router wants to hear no more of it


class PrefillHandler:
    """`RoleHandler` of a prefill worker. Thread-safe."""

    def __init__(
        self, engine: Engine, sender: KvSender, reporter: Reporter, faults: FaultPoints, wake: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._sender = sender
        self._reporter = reporter
        self._faults = faults
        self._lock = threading.Lock()
        self._requests: dict[RequestKey, _Prefill] = {}
        self._trunks: dict[RequestKey, RequestKey] = {}  # of branches
        self._wake = wake
        self._whole = WholeRequests(engine, reporter, wake)

    # -- commands ----------------------------------------------------------------------------------------------

    def reserve(self, router_id: str, spec: RequestSpec) -> KvTicket:
        raise NotMyRole("a prefill worker grants no tickets")

    def generate(self, router_id: str, spec: RequestSpec) -> None:
        self._whole.generate(spec)

    def prefill(self, router_id: str, spec: RequestSpec, ticket: KvTicket) -> None:
        self._faults.hit("prefill.before_start")
        expected = len(spec.known_tokens)
        if ticket.num_tokens != expected:
            raise InvalidRequest("ticket.num_tokens", f"is {ticket.num_tokens}, the prompt has {expected}")
        self._engine.check_runnable(spec, SequenceKind.PREFILL)  # without the lock, for it may take a while
        with self._lock:
            self._engine.add(spec, SequenceKind.PREFILL)
            self._requests[spec.key] = _Prefill(spec, ticket)
            self._trunks.update(dict.fromkeys(spec.branch_keys, spec.key))
        self._wake()

    def abort(self, key: RequestKey, reason: str) -> None:
        if self._whole.abort(key):
            return
        with self._lock:
            request = self._requests.get(key)
            if request is None or request.aborted:
                return
            request.aborted = True
            self._engine.abort(key)
            if not request.sending:
                self._drop(key)
                return
        self._sender.abort(key, reason)

    def credit(self, key: RequestKey, tokens: int) -> None:
        """What is sent elsewhere has one token here, and needs no credit."""
        if key in self._whole:
            self._whole.credit(key, tokens)

    def renew(self, router_id: str) -> None:
        """A prefill worker grants no leases."""

    def revoke(self, ticket_owner: str) -> None:
        raise AssertionError("a prefill worker grants no tickets")

    # -- the engine's news -------------------------------------------------------------------------------------

    def on_plan(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            if self._open(chunk):
                self._sender.computing(chunk.key, chunk.token_start, chunk.token_end, plan.step_id)

    def _open(self, chunk: Chunk) -> bool:
        """Hand the request to the sender when its blocks are known; False if it is not to be sent."""
        key = chunk.key
        with self._lock:
            request = self._requests.get(key)
            if request is None or request.aborted:
                return False
            if request.sending:
                return True
            self._faults.hit("prefill.before_first_chunk")
            try:
                self._sender.open(key, request.ticket, chunk.block_ids, self._on_sent, request.spec.kv_codec)
            except TransferError as error:
                self._engine.abort(key)
                self._drop(key)
                failure = error
            else:
                request.sending = True
                # What the first chunk does not begin with was in the prefix cache, and can be sent at once.
                self._sender.computed(key, chunk.token_start)
                return True
        self._report_failure(key, failure)
        return False

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        if plan.chunks:
            self._faults.hit("prefill.after_chunk")
        for chunk in plan.chunks:
            self._sender.computed(chunk.key, chunk.token_end)
        for stats in result.prefilled:
            self._reporter.notice(stats.key, prefill_notice(stats))
        for scored in result.prompt_logprobs:
            self._reporter.notice(scored.key, prompt_logprobs_notice(scored.logprobs))
        self._whole.begin_report(result)
        # The client should have its first token before the manifest travels: report, then finish.
        self._reporter.tokens([(token.key, token_event(token)) for token in result.tokens])
        for key, error in result.rejected:
            if not self._whole.reject(key, error):
                self._reject(self._trunks.get(key, key), error)
        firsts: dict[RequestKey, list[TokenOut]] = {}
        for token in result.tokens:
            if token.key in self._whole:
                continue
            firsts.setdefault(self._trunks.get(token.key, token.key), []).append(token)
        for key, tokens in firsts.items():
            if all(token.finish is not None for token in tokens):
                self._end_at_first_token(key)
            else:
                self._sender.finish(key, *(token.token_id for token in tokens))
        self._whole.end_report(result)

    def _end_at_first_token(self, key: RequestKey) -> None:
        """Nothing is to be committed: the end of the send is no news to the router."""
        with self._lock:
            request = self._requests.get(key)
            if request is None:
                return
            request.aborted = True
        self._sender.abort(key, "the request ended at its first token")

    def _reject(self, key: RequestKey, error: PdserveError) -> None:
        """The engine has given the request up; its blocks wait for the send to end."""
        with self._lock:
            request = self._requests.get(key)
            if request is None or request.aborted:
                return
            request.aborted = True
            if not request.sending:
                self._drop(key)
        self._reporter.notice(key, failed_notice(error))
        if request.sending:
            self._sender.abort(key, str(error))
        else:
            self._reporter.forget(key)

    def _on_sent(self, outcome: SendOutcome) -> None:
        """The sender reads none of the request's blocks any more."""
        with self._lock:
            request = self._requests.get(outcome.key)
            if request is None:
                return
            self._engine.abort(outcome.key)  # still computing, if the send failed early
            self._drop(outcome.key)
        if outcome.error is not None and not request.aborted:
            self._report_failure(outcome.key, outcome.error)
        else:
            self._reporter.forget(outcome.key)
        self._wake()

    def _drop(self, key: RequestKey) -> None:
        self._engine.release_send(key)
        request = self._requests.pop(key, None)
        if request is not None:
            for branch in request.spec.branch_keys:
                self._trunks.pop(branch, None)

    def _report_failure(self, key: RequestKey, error: PdserveError) -> None:
        self._reporter.notice(key, failed_notice(error))
        self._reporter.forget(key)

    # -- state -------------------------------------------------------------------------------------------------

    def held(self) -> Sequence[RequestKey]:
        with self._lock:
            held = list(self._requests)
        return [*held, *self._whole.keys()]

    def transfers(self) -> TransferLoad:
        counters = self._sender.counters
        events = {
            "frames_retried": counters.retries,
            "lanes_failed": sum(lane.failures for lane in counters.lanes.values()),
            "frames_moved": sum(lane.moved_frames for lane in counters.lanes.values()),
            "sends_failed": counters.failed,
        }
        for transport, lane in counters.lanes.items():
            events |= {
                f"{transport}_frames": lane.frames,
                f"{transport}_bytes": lane.frame_bytes,
                f"{transport}_opened": lane.opened,
                f"{transport}_downgrades": lane.downgrades,
            }
        for codec, packed in counters.codecs.items():
            events |= {f"codec_{codec}_raw_bytes": packed.raw_bytes, f"codec_{codec}_wire_bytes": packed.wire_bytes}
        return TransferLoad(0, self._sender.open_sends, events)

    def end_streams(self) -> None:
        """A prefill worker's transfers are streams of its own."""

    def close(self) -> None:
        self._sender.close()
