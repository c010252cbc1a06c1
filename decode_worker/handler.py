"""The decode role: take KV under a ticket, or run a whole request, and report its tokens.

The life of a request here::

    reserve --> TICKET --(verified manifest)--> SEQUENCE --(last token)--> gone
                  |  '- revoked, expired, sender gone -> failure reported -> gone
    generate -----|--------------------------> SEQUENCE
                  '---- abort, in either ----> gone

A ticket's blocks go back to the engine in `on_release` only, which the receiver calls when no scatter is in flight.
The request may be here again by then, under the same key: a router that would rather have it run here than wait for a
prefill worker (see ``KvTicket.run_here``) aborts the ticket and sends `generate` at once. So a ticket's end concerns
the very request that it was granted to, and no other of that key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.engine import Engine, StepPlan, StepResult
from engine.sequence import SequenceKind
from kv_transfer.messages import Revocation
from kv_transfer.receiver import KvReceiver
from pdcore.errors import PdserveError, TicketError, TicketRevoked, TransferError
from pdcore.faults import FaultPoints
from pdcore.types import KvTicket, KvTransferStats, RequestKey, RequestSpec
from worker.events import prefill_notice, prompt_logprobs_notice, token_event
from worker.handler import NoRoom, NotMyRole, Reporter, TransferLoad, failed_notice, stats_notice

_REVOKED = "revoked: a running sequence needs the blocks"


def ticket_owner(key: RequestKey) -> str:
    """Name under which the engine knows the blocks of a request's ticket."""
    return f"{key.request_id}#{key.attempt}"


class DecodeHandler:
    """`RoleHandler` of decode and aggregated workers, and the receiver's `TicketHost`. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        reporter: Reporter,
        faults: FaultPoints,
        *,
        wake: Callable[[], None],
        address: Callable[[], str],
        grants: bool,
    ) -> None:
        self._engine = engine
        self._reporter = reporter
        self._faults = faults
        self._wake = wake
        self._address = address
        self._grants = grants
        self._lock = threading.RLock()
        self._requests: dict[RequestKey, RequestSpec] = {}
        # Blocks reserved and not yet committed or returned, including those of aborted requests.
        self._tickets: dict[str, RequestSpec] = {}
        self.receiver: KvReceiver | None = None  # set by the worker: the receiver needs its host first

    # -- commands ----------------------------------------------------------------------------------------------

    def prefill(self, router_id: str, spec: RequestSpec, ticket: KvTicket) -> None:
        raise NotMyRole("a decode worker sends no KV")

    def reserve(self, router_id: str, spec: RequestSpec) -> KvTicket:
        self._faults.hit("decode.before_reserve")
        if not self._grants or self.receiver is None:
            raise NotMyRole("an aggregated worker takes no KV from others")
        owner = ticket_owner(spec.key)
        self._engine.check_runnable(spec)
        tokens = len(spec.known_tokens)
        # In one piece: an abort or a revocation finds the request before it has anything, or with its ticket.
        with self._lock:
            reserved = self._engine.reserve(owner, spec)
            if reserved is None:
                raise NoRoom(f"no room for {tokens} tokens of KV")
            try:
                ticket = self.receiver.grant(
                    spec.key,
                    router_id,
                    tokens,
                    reserved.blocks,
                    self._address(),
                    prefix_tokens=reserved.prefix_tokens,
                    codec=spec.kv_codec,
                )
            except PdserveError:
                self._engine.release_ticket(owner)
                raise
            self._tickets[owner] = spec
            self._take(spec)
        self._faults.hit("decode.after_reserve")
        return replace(ticket, run_here=reserved.run_here)

    def generate(self, router_id: str, spec: RequestSpec) -> None:
        self._engine.check_runnable(spec)  # without the lock, for it may take a while
        with self._lock:
            self._engine.add(spec, SequenceKind.GENERATE)
            self._take(spec)
        self._wake()

    def _take(self, spec: RequestSpec) -> None:
        """Answer for a request from now on, and for its branches if it is a trunk."""
        self._requests.update(dict.fromkeys((spec.key, *spec.branch_keys), spec))

    def _drop(self, key: RequestKey) -> bool:
        """The request is over, with the branches that it has not become yet. False if there is none."""
        spec = self._requests.pop(key, None)
        if spec is not None and spec.key == key:
            for branch in spec.branch_keys:
                self._requests.pop(branch, None)
        return spec is not None

    def _branched(self, trunk: RequestKey) -> None:
        """A trunk has become its branches."""
        self._requests.pop(trunk, None)
        self._reporter.branched(trunk)

    def abort(self, key: RequestKey, reason: str) -> None:
        with self._lock:
            # From here on a commit that is under way finds the request gone and gives its blocks back.
            if not self._drop(key):
                return
            self._engine.abort(key)
        if self.receiver is not None:
            self.receiver.release(key, reason)
        self._wake()

    def credit(self, key: RequestKey, tokens: int) -> None:
        self._engine.add_credit(key, tokens)
        self._wake()

    def renew(self, router_id: str) -> None:
        if self.receiver is not None:
            self.receiver.renew(router_id)

    def revoke(self, ticket_owner: str) -> None:
        with self._lock:
            spec = self._tickets.get(ticket_owner)
        if spec is not None and self.receiver is not None:
            self.receiver.revoke(spec.key, _REVOKED)

    # -- TicketHost --------------------------------------------------------------------------------------------

    def on_commit(self, key: RequestKey, first_tokens: tuple[int, ...], stats: KvTransferStats) -> bool:
        owner = ticket_owner(key)
        with self._lock:
            spec = self._tickets.get(owner)
            if spec is None or self._requests.get(key) is not spec:
                return False
            # Before the commit: a request that ends with its next step is forgotten, and its news with it.
            self._reporter.notice(key, stats_notice(stats))
            try:
                self._engine.commit_ticket(owner, spec, *first_tokens, exact=stats.lossless)
            except PdserveError as error:  # a first token that no model of ours can have sampled, say
                # Whatever is wrong, it came by the transfer: the request itself was fit when it was reserved.
                self._drop(key)
                self._reporter.notice(key, failed_notice(TransferError(str(error))))
                self._reporter.forget(key)
                return False
            del self._tickets[owner]
            if spec.branches:
                for branch in spec.branch_keys:
                    if branch not in self._requests:  # aborted while the ticket was open
                        self._engine.abort(branch)
                self._branched(key)
        self._wake()
        return True

    def on_release(self, key: RequestKey, reason: str, failed: bool) -> None:
        owner = ticket_owner(key)
        with self._lock:
            self._engine.release_ticket(owner)
            spec = self._tickets.pop(owner, None)
            wanted = spec is not None and self._requests.get(key) is spec
            if wanted:
                self._drop(key)
        # Whoever aborted it has forgotten it, and may have sent the same key again since.
        if wanted:
            if failed:
                # Revoked for want of blocks: no fault of anybody's, and not to be counted as one.
                error = TicketRevoked(reason) if isinstance(reason, Revocation) else TicketError(reason)
                self._reporter.notice(key, failed_notice(error))
            self._reporter.forget(key)
        self._wake()

    # -- the engine's news -------------------------------------------------------------------------------------

    def on_plan(self, plan: StepPlan) -> None:
        """Nothing to prepare: a decode worker's steps touch no transfer."""

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        self._faults.hit("decode.after_step")
        for stats in result.prefilled:
            self._reporter.notice(stats.key, prefill_notice(stats))
        for scored in result.prompt_logprobs:
            self._reporter.notice(scored.key, prompt_logprobs_notice(scored.logprobs))
        with self._lock:
            for trunk in result.forked:
                self._branched(trunk)
        self._reporter.tokens([(token.key, token_event(token)) for token in result.tokens])
        for key, error in result.rejected:
            self._reporter.notice(key, failed_notice(error))
        over = [token.key for token in result.tokens if token.finish is not None]
        over += [key for key, _ in result.rejected]
        for key in over:
            with self._lock:
                self._drop(key)
            self._reporter.forget(key)
        self._faults.hit("decode.after_report")

    # -- state -------------------------------------------------------------------------------------------------

    def held(self) -> Sequence[RequestKey]:
        with self._lock:
            return list({*self._requests, *(spec.key for spec in self._tickets.values())})

    def transfers(self) -> TransferLoad:
        if self.receiver is None:
            return TransferLoad(0, 0, {})
        counters = self.receiver.counters
        events = {"frames_rejected": counters.rejected, "tickets_failed": counters.failed}
        return TransferLoad(self.receiver.open_tickets, 0, events)

    def end_streams(self) -> None:
        if self.receiver is not None:
            self.receiver.close_streams()

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
