"""The truth of one request: what was asked, what was delivered, who holds something of it, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from pdcore.errors import InvalidRequest, ReplaysExhausted, RequestError
from pdcore.logprobs import Logprobs
from pdcore.types import Branch, FinishReason, KvTransferStats, PriorityClass, RequestKey, RequestSpec, SamplingParams
from router.effects import (
    Effect,
    Ended,
    Outcome,
    PrefillComputed,
    Release,
    Requeue,
    SendCredit,
    SendGenerate,
    SendPrefill,
    SendReserve,
    WorkerFailed,
)
from router.policy import Route


class RequestState(StrEnum):
    """See `RequestTracker`."""

    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    ENDED = "ended"


class FailureKind(StrEnum):
    """What a worker's failure means for the request."""

    INVALID = "invalid"  # it can never run: not retried
    BUSY = "busy"  # no room, or draining: tried elsewhere or later, not counted as a replay
    BROKEN = "broken"  # worker or bug: replayed, a bounded number of times
    TRANSFER = "transfer"  # its KV did not arrive: as BROKEN, but where it goes on is `router.rebuild`'s business


class TokenSink(Protocol):
    """Where delivered tokens go, in order and once each."""

    def push(self, token_id: int, hidden: bool, logprobs: Logprobs | None) -> bool:
        """Take the next token; `hidden` ones are stop tokens. Returns True if a stop string is complete with it."""
        ...

    def push_prompt(self, logprobs: Logprobs) -> None:
        """Take the log-probabilities of the next prompt tokens."""
        ...


@dataclass(frozen=True, slots=True)
class _Held:
    """A token of the decode worker that waits for the prefill worker's word."""

    index: int
    token_id: int
    finish: FinishReason | None
    logprobs: Logprobs | None


_NOTHING: Sequence[Effect] = ()


@dataclass(slots=True)
class Timeline:
    """Where the time went. Times are seconds on the router's clock; None if it did not come to that.

    `prefill_queued_s` and `prefill_s` were measured by the worker that computed the first token. `mode`, `reason`,
    both workers and `kv` are those of one attempt: the last one that gave a token.
    """

    arrived: float
    chosen: float | None = None
    first_token: float | None = None
    second_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    prefill_queued_s: float = 0.0
    prefill_s: float = 0.0
    mode: str = ""
    reason: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    kv: KvTransferStats | None = None
    replays: int = 0
    cached_tokens: int = 0


class RequestTracker:
    """State machine of one request. Pure: every call returns the effects that the caller has to carry out.

    ::

                   dispatch(disaggregated)              granted               first token (P)
          QUEUED ------------------------> RESERVING -----------> PREFILLING -----------------> TRANSFERRING
           ^ |                                |                       |                              |
           | |                                | refused               | commit (D: token or stats)   | commit
           | |    dispatch(local)             |                       v                              |
           | '--------------------------------|-----------------> DECODING <------------------------'
           |                                  |                       |
           '----------------------------------'-----------------------'   refusal; failure with replays left

          any --> ENDED     last token, stop string, cancel, deadline, error, replays used up

    Who holds something of the current attempt is in `_holders`. A worker is put in when it is given the request and
    taken out exactly once, by a `Release` effect: with an abort, or without one if the worker said itself that it is
    done, or is dead. The prefill worker is done once the decode worker has committed.

    Tokens are ordered and deduplicated by index: the prefill worker and the decode worker both report the first one.
    What a worker reports of an older attempt, or after the end, changes nothing.

    Log-probabilities come with their tokens, those of the prompt before the first token. Only the prefill worker has
    them of what it computed, and the decode worker may be heard first: what that one reports is held back then, and
    the prefill worker kept, until the latter has reported its token.

    Several samples of one prompt begin as a *trunk*, which is queued, dispatched and failed as above but delivers
    nothing: it ends when its `branches` have come to be, each with a tracker of its own. Those `join` its attempt
    instead of being dispatched, `part` from it if it is lost before they have a token, and go on alone after that.

    Windows: tokens that the decode worker reports in this attempt use `token_window`; they are returned, a quarter of
    the window at a time, once the client has taken them. A replay starts with a fresh window, so at most
    ``(replays + 1) * token_window`` tokens wait for a client that reads nothing.

    Args:
        last_attempt: the first attempt gets the next number. Another request may have used the same id before, and
            a worker may still be letting go of it: numbers that go on keep the two apart.
        sink: gets the delivered tokens. now: time of arrival. All times are seconds on one monotonic clock.
        kv_codec, cache_salt, tenant, priority, sample: see `RequestSpec`.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        token_window: int,
        max_replays: int,
        sink: TokenSink,
        now: float,
        last_attempt: int = 0,
        kv_codec: str = "",
        cache_salt: str = "",
        tenant: str = "",
        priority: PriorityClass = PriorityClass.STANDARD,
        sample: int = 0,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.state = RequestState.QUEUED
        self.attempt = last_attempt
        self.delivered: list[int] = []
        self.timeline = Timeline(arrived=now)
        self.outcome: Outcome | None = None
        self._token_window = token_window
        self._max_replays = max_replays
        self._kv_codec = kv_codec
        self._cache_salt = cache_salt
        self._tenant = tenant
        self._priority = priority
        self.sample = sample
        self._branches: tuple[Branch, ...] = ()
        self._sink = sink
        self._taken = 0
        # Of the current attempt: who holds something (False: only planned there), and who does what.
        self._holders: dict[str, bool] = {}
        self._prefill: str | None = None
        self._decode: str = ""
        self._route: Route | None = None
        self._base = 0  # tokens delivered before it
        self._decode_next = 0  # index that the decode worker reports next
        self._credited = 0
        self._held: list[_Held] = []
        self._kv: KvTransferStats | None = None  # once the decode worker has it
        self._revoked = False  # how the KV of what was delivered was lost last, if it was
        self._owed_by_prefill = False  # log-probabilities that nobody else has
        self._computing_whole = False  # one worker runs it, and has not computed the prompt, as far as is known
        self._steady = ""  # the decode worker, once nothing but its next token is expected
        # Prompt tokens from the front whose log-probabilities are delivered, or not wanted.
        self._prompt_scored = len(prompt) if params.prompt_logprobs is None else 1

    # -- what others may ask -----------------------------------------------------------------------------------

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request_id, self.attempt)

    @property
    def holders(self) -> frozenset[str]:
        """Workers that hold something of the request, or are planned to."""
        return frozenset(self._holders)

    @property
    def prefill_worker(self) -> str | None:
        """Of the last attempt; None if it ran on one worker."""
        return self._prefill

    @property
    def prompt_tokens(self) -> int:
        """Tokens to compute before a new one can be sampled."""
        return len(self.prompt) + len(self.delivered)

    # -- starting ----------------------------------------------------------------------------------------------

    def dispatch(self, route: Route, now: float, branches: tuple[Branch, ...] = ()) -> Sequence[Effect]:
        """A route was chosen; the request must be queued. Begins the next attempt, as a trunk if there are branches,
        which have joined already."""
        self._begin(route, now)
        self._branches = branches
        self._holders = {route.decode: True}
        if route.prefill is None:
            self.state = RequestState.DECODING
            return [SendGenerate(route.decode, self._spec())]
        self._holders[route.prefill] = False
        self.state = RequestState.RESERVING
        return [SendReserve(route.decode, self._spec())]

    def join(self, route: Route, now: float, trunk: Timeline) -> Branch:
        """The trunk of this sample, which must be queued, is about to be dispatched: what to tell it.

        `trunk`: what has become of it so far. Its replays are the sample's too, and count against the same bound.
        """
        self.timeline.replays = trunk.replays
        self._begin(route, now)
        self._holders = {route.decode: True}
        if route.prefill is not None:
            self._holders[route.prefill] = False
        self.state = RequestState.DECODING if route.prefill is None else RequestState.PREFILLING
        return Branch(self.key, self.sample)

    def trunk_granted(self) -> None:
        """The decode worker has made room for the trunk: the prefill worker is given it as well."""
        if self._prefill in self._holders:
            self._holders[self._prefill] = True

    def part(self) -> Sequence[Effect]:
        """The trunk's attempt is lost, and this sample has no token of it: it waits for the next one."""
        assert not self.delivered, self.key
        effects = self._release_all(None, "its trunk is run again")
        self.state = RequestState.QUEUED
        return effects

    def _begin(self, route: Route, now: float) -> None:
        assert self.state is RequestState.QUEUED, self.state
        self.attempt += 1
        self._base = self._decode_next = len(self.delivered)
        self._credited = 0
        self._route = route
        self._prefill, self._decode = route.prefill, route.decode
        self._held = []
        self._kv = None
        self._computing_whole = route.prefill is None
        wants_logprobs = self.params.logprobs is not None or self._prompt_scored < len(self.prompt)
        self._owed_by_prefill = route.prefill is not None and wants_logprobs
        if not self.delivered:
            self.timeline.chosen = now

    def reserve_granted(self, worker_id: str, attempt: int) -> Sequence[Effect]:
        """The decode worker has made room."""
        if self.state is not RequestState.RESERVING or not self._is_current(worker_id, attempt):
            return _NOTHING  # aborted meanwhile; the abort frees the ticket
        assert self._prefill is not None
        self._holders[self._prefill] = True
        self.state = RequestState.PREFILLING
        return [SendPrefill(self._prefill, self._spec())]

    def reserve_declined(self, worker_id: str, attempt: int) -> Sequence[Effect] | None:
        """The decode worker holds nearly all of the prompt and would rather run the request itself.

        Returns what ends this attempt; the caller dispatches the next one there at once. None if this attempt is not
        waiting for that worker's answer.
        """
        if self.state is not RequestState.RESERVING or not self._is_current(worker_id, attempt):
            return None
        effects = self._release_all(None, "run on the decode worker")
        self.state = RequestState.QUEUED
        return effects

    def reserve_refused(
        self, worker_id: str, attempt: int, kind: FailureKind, message: str, now: float
    ) -> Sequence[Effect]:
        """The decode worker makes no room and holds nothing."""
        if self.state is not RequestState.RESERVING:
            return _NOTHING
        return self.failed(worker_id, attempt, kind, message, now)

    # -- news from workers -------------------------------------------------------------------------------------

    def token(
        self,
        worker_id: str,
        attempt: int,
        index: int,
        token_id: int,
        finish: FinishReason | None,
        *,
        now: float,
        logprobs: Logprobs | None = None,
    ) -> Sequence[Effect]:
        """A worker reports a token. `index` counts generated tokens, those of earlier attempts included."""
        if worker_id == self._steady and attempt == self.attempt and index == len(self.delivered) and finish is None:
            return self._next_token(token_id, now)
        if attempt != self.attempt or self.state in (RequestState.QUEUED, RequestState.ENDED):
            return _NOTHING
        effects: list[Effect] = []
        if worker_id == self._decode and worker_id in self._holders and self.state is not RequestState.RESERVING:
            if self._owed_by_prefill:
                self._held.append(_Held(index, token_id, finish, logprobs))
                return _NOTHING
            if self.state is not RequestState.DECODING:
                self._committed(effects)
            effects += self._computed_whole()
            self._decode_next = max(self._decode_next, index + 1)
        elif worker_id != self._prefill or self.state is RequestState.RESERVING:
            return _NOTHING
        elif self.state is RequestState.PREFILLING:
            self.state = RequestState.TRANSFERRING
            effects.append(PrefillComputed(worker_id, self.key))
        if self._owed_by_prefill:
            return self._paid(worker_id, _Held(index, token_id, finish, logprobs), effects, now)

        expected = len(self.delivered)
        if index > expected or (index < expected and self.delivered[index] != token_id):
            problem = f"{worker_id} reported token {index} out of order or differently"
            effects += self._fail(worker_id, problem, now, done=False)
            return effects
        if index == expected:
            unscored = self._prompt_scored < len(self.prompt)
            if unscored or (self.params.logprobs is not None and logprobs is None):
                problem = f"{worker_id} reported token {index} without log-probabilities"
                effects += self._fail(worker_id, problem, now, done=False)
                return effects
            if expected == self._base:
                self._first_of_attempt()
            if expected == 0:
                self.timeline.first_token = now
            elif expected == 1:
                self.timeline.second_token = now
            self.timeline.last_token = now
            self.delivered.append(token_id)
            if worker_id == self._decode:
                self.timeline.decode_worker = worker_id
            # A structured output that is complete stops as well, at a token that belongs to it.
            params = self.params
            hidden = finish is FinishReason.STOP and (
                params.structured_output is None or token_id in params.stop_token_ids
            )
            if self._sink.push(token_id, hidden, logprobs):
                effects += self._end(Outcome(FinishReason.STOP), now, done=worker_id if finish else None)
                return effects
            if finish is None and len(self.delivered) >= self.params.max_tokens:
                effects += self._end(Outcome(FinishReason.LENGTH), now)
                return effects
            if worker_id == self._decode and expected > 0 and params.logprobs is None:
                self._steady = worker_id
        else:
            # The echo of a token that the client may have taken before the decode worker reported it.
            effects += self._credit()
            if index < expected - 1:
                return effects or _NOTHING
        if finish is not None:
            effects += self._end(Outcome(finish), now, done=worker_id)
        return effects or _NOTHING

    def _next_token(self, token_id: int, now: float) -> Sequence[Effect]:
        """What `token` does with nearly all tokens, quickly: the steady decode worker's next one, not its last."""
        self.timeline.last_token = now
        self.delivered.append(token_id)
        self._decode_next = len(self.delivered)
        if self._sink.push(token_id, False, None):
            return self._end(Outcome(FinishReason.STOP), now)
        if len(self.delivered) >= self.params.max_tokens:
            return self._end(Outcome(FinishReason.LENGTH), now)
        return _NOTHING

    def prompt_logprobs(self, worker_id: str, attempt: int, logprobs: Logprobs, now: float) -> Sequence[Effect]:
        """The worker that computes the prompt reports its tokens' log-probabilities; those delivered are dropped."""
        if attempt != self.attempt or self.state in (RequestState.QUEUED, RequestState.ENDED):
            return _NOTHING
        if worker_id != (self._prefill or self._decode):
            return _NOTHING
        if logprobs.start > self._prompt_scored or logprobs.end > len(self.prompt):
            problem = f"{worker_id} reported log-probabilities of prompt tokens {logprobs.start} to {logprobs.end}"
            return self._fail(worker_id, f"{problem} of {len(self.prompt)} out of order", now, done=False)
        if logprobs.end > self._prompt_scored:
            self._sink.push_prompt(logprobs.between(self._prompt_scored, logprobs.end))
            self._prompt_scored = logprobs.end
        return _NOTHING

    def prefill_done(
        self, worker_id: str, attempt: int, queued_s: float, compute_s: float, cached_tokens: int
    ) -> Sequence[Effect]:
        """The worker that computed the prompt reports how that went. A trunk that was to run there has branched."""
        computed_first = worker_id in (self._prefill, self._decode) and self._base == 0
        if attempt == self.attempt and computed_first and self.state is not RequestState.ENDED:
            self.timeline.prefill_queued_s = queued_s
            self.timeline.prefill_s = compute_s
            self.timeline.cached_tokens = cached_tokens
        if not self._is_current(worker_id, attempt):
            return _NOTHING
        if self._prefill is None:
            return self._branched() if self._branches else self._computed_whole()
        if self._branches and worker_id == self._prefill and self.state is RequestState.PREFILLING:
            self.state = RequestState.TRANSFERRING
            return [PrefillComputed(worker_id, self.key)]
        return _NOTHING

    def kv_received(self, worker_id: str, attempt: int, stats: KvTransferStats) -> Sequence[Effect]:
        """The decode worker has the KV and has committed the ticket: a trunk has branched."""
        if not self._is_current(worker_id, attempt) or worker_id != self._decode:
            return _NOTHING
        if self.state not in (RequestState.PREFILLING, RequestState.TRANSFERRING, RequestState.DECODING):
            return _NOTHING
        self._kv = stats
        effects: list[Effect] = []
        if self._branches:
            return self._branched()
        if self.state is not RequestState.DECODING:
            self._committed(effects)
        if len(self.delivered) > self._base:
            self.timeline.kv, self.timeline.decode_worker = stats, worker_id
        return effects

    def failed(self, worker_id: str, attempt: int, kind: FailureKind, message: str, now: float) -> Sequence[Effect]:
        """A worker gives the attempt up and holds nothing of it any more."""
        if not self._is_current(worker_id, attempt):
            return _NOTHING
        match kind:
            case FailureKind.INVALID:
                error = InvalidRequest("request", message)
                return self._end(Outcome(FinishReason.ERROR, error), now, done=worker_id)
            case FailureKind.BUSY:
                if self._prefill is not None and self.delivered:
                    # The KV was there; a worker that refuses to compute it again has lost nothing.
                    self._revoked = True
                return self._requeue(worker_id, counted=False, reason=message)
            case FailureKind.BROKEN:
                return self._fail(worker_id, message, now)
            case FailureKind.TRANSFER:
                pair = None if self._prefill is None else (self._prefill, self._decode)
                return self._fail(worker_id, message, now, pair=pair)

    def worker_lost(self, worker_id: str, reason: str, now: float) -> Sequence[Effect]:
        """The session with a worker has ended; the worker holds nothing of this router any more."""
        if worker_id not in self._holders:
            return _NOTHING
        if not self._holders[worker_id]:
            return self._requeue(worker_id, counted=False, reason=reason)
        return self._fail(worker_id, reason, now)

    # -- the client's side -------------------------------------------------------------------------------------

    def took(self, tokens: int) -> Sequence[Effect]:
        """The client has taken `tokens` more tokens."""
        self._taken += tokens
        assert self._taken <= len(self.delivered), (self._taken, len(self.delivered))
        return self._credit()

    def cancel(self, now: float) -> Sequence[Effect]:
        """The client cancelled or went away."""
        return self._end(Outcome(FinishReason.CANCELLED), now)

    def abandon(self, error: RequestError, now: float) -> Sequence[Effect]:
        """End with an error: deadline, drain, no worker."""
        return self._end(Outcome(FinishReason.ERROR, error), now)

    def dissolve(self, now: float) -> Sequence[Effect]:
        """End a trunk that has no branch to run any more."""
        return self._end(Outcome(FinishReason.CANCELLED), now)

    # -- inside ------------------------------------------------------------------------------------------------

    def _branched(self) -> Sequence[Effect]:
        """The branches are on their own. The workers know that the trunk is over; what a prefill worker still holds
        is theirs to release."""
        effects = [
            Release(worker, self.key, False, "branched", True, self._decode if worker == self._prefill else "")
            for worker in self._holders
        ]
        self._holders = {}
        self.state = RequestState.ENDED
        self.outcome = Outcome(FinishReason.STOP)
        return [*effects, Ended(self.outcome)]

    def _spec(self) -> RequestSpec:
        assert self._route is not None
        params = self.params
        if params.prompt_logprobs is not None and self._prompt_scored == len(self.prompt):
            # The client has them: a worker that runs the request again need not compute them again.
            params = replace(params, prompt_logprobs=None)
        return RequestSpec(
            self.key,
            self.prompt,
            params,
            tuple(self.delivered),
            self._token_window,
            cache_salt=self._cache_salt,
            kv_codec=self._kv_codec,
            rebuild=self._route.rebuild,
            revoked=self._revoked and not self._route.rebuild,
            tenant=self._tenant,
            priority=self._priority,
            sample=self.sample,
            branches=self._branches,
        )

    def _is_current(self, worker_id: str, attempt: int) -> bool:
        return attempt == self.attempt and self._holders.get(worker_id, False)

    def _credit(self) -> Sequence[Effect]:
        """Return what is due of the decode worker's window, if it is enough to be worth a message."""
        if self.state is not RequestState.DECODING:
            return _NOTHING
        due = min(self._taken, self._decode_next) - self._base - self._credited
        if due < max(1, self._token_window // 4):
            return _NOTHING
        self._credited += due
        return [SendCredit(self._decode, self.key, due)]

    def _computed_whole(self) -> Sequence[Effect]:
        """The worker that runs the request as a whole has computed the prompt, and generates from now on."""
        if not self._computing_whole:
            return _NOTHING
        self._computing_whole = False
        return [PrefillComputed(self._decode, self.key)]

    def _first_of_attempt(self) -> None:
        """The attempt gives a token: the timeline is of this one from now on."""
        assert self._route is not None
        self.timeline.mode = self._route.mode.value
        self.timeline.reason = self._route.reason
        self.timeline.prefill_worker = self._prefill or self._decode
        self.timeline.decode_worker = self._decode if self.state is RequestState.DECODING else ""
        self.timeline.kv = self._kv

    def _committed(self, effects: list[Effect]) -> None:
        """The decode worker has the KV: the prefill worker is done and frees its blocks itself."""
        self.state = RequestState.DECODING
        if not self._owed_by_prefill:
            self._release_prefill(effects)

    def _release_prefill(self, effects: list[Effect]) -> None:
        if self._prefill is not None and self._holders.pop(self._prefill, None) is not None:
            effects.append(Release(self._prefill, self.key, False, "committed", served=True, peer=self._decode))

    def _paid(self, prefill: str, first: _Held, effects: list[Effect], now: float) -> Sequence[Effect]:
        """The prefill worker has reported its token: take it, then what was held back meanwhile."""
        self._owed_by_prefill = False
        if self.state is RequestState.DECODING:
            self._release_prefill(effects)
        held, self._held = self._held, []
        attempt = self.attempt
        for worker_id, entry in [(prefill, first), *((self._decode, entry) for entry in held)]:
            effects += self.token(
                worker_id,
                attempt,
                entry.index,
                entry.token_id,
                entry.finish,
                now=now,
                logprobs=entry.logprobs,
            )
        return effects or _NOTHING

    def _release_all(self, done: str | None, reason: str, served: str = "") -> list[Effect]:
        """Take every holder out; all but `done` and those that were only planned must be told."""
        self._steady = ""
        holders, self._holders = self._holders, {}
        return [
            Release(worker_id, self.key, sent and worker_id != done, reason, served=worker_id == served)
            for worker_id, sent in holders.items()
        ]

    def _requeue(
        self, worker_id: str, counted: bool, reason: str, *, done: bool = True, pair: tuple[str, str] | None = None
    ) -> list[Effect]:
        effects = self._release_all(worker_id if done else None, reason)
        self.state = RequestState.QUEUED
        effects.append(Requeue(counted, worker_id, reason, frozenset(pair or ())))
        return effects

    def _fail(
        self, worker_id: str, reason: str, now: float, *, done: bool = True, pair: tuple[str, str] | None = None
    ) -> list[Effect]:
        """The attempt is lost through `worker_id`; `done`: it holds nothing any more."""
        self._revoked = False
        failed = WorkerFailed(worker_id, self.key, reason, pair)
        if self.timeline.replays < self._max_replays:
            self.timeline.replays += 1
            return [failed, *self._requeue(worker_id, True, reason, done=done, pair=pair)]
        error = ReplaysExhausted(f"given up after {self.timeline.replays} replays; the last failure: {reason}")
        return [failed, *self._end(Outcome(FinishReason.ERROR, error), now, done=worker_id if done else None)]

    def _end(self, outcome: Outcome, now: float, done: str | None = None) -> list[Effect]:
        if self.state is RequestState.ENDED:
            return []
        reason = outcome.finish.value if outcome.error is None else type(outcome.error).__name__
        served = ""
        if outcome.finish in (FinishReason.STOP, FinishReason.LENGTH):
            served = self._decode if self.state is RequestState.DECODING else self._prefill or self._decode
        effects = self._release_all(done, reason, served=served)
        self.state = RequestState.ENDED
        self.outcome = outcome
        self.timeline.ended = now
        effects.append(Ended(outcome))
        return effects
