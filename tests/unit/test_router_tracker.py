"""The request tracker: by example, and as a state machine over every interleaving that hypothesis finds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdcore.errors import DeadlineExceeded, InvalidRequest, ReplaysExhausted
from pdcore.logprobs import Logprobs
from pdcore.types import FinishReason, KvTransferStats, SamplingParams
from router.effects import (
    Effect,
    Ended,
    PrefillComputed,
    Release,
    Requeue,
    SendCredit,
    SendGenerate,
    SendPrefill,
    SendReserve,
)
from router.policy import Mode, Route
from router.tracker import FailureKind, RequestState, RequestTracker

STATS = KvTransferStats(1, 100, 50, "raw", "grpc", 0.01)
DISAGGREGATED = Route(Mode.DISAGGREGATED, "d0", "p0", "test")
LOCAL = Route(Mode.LOCAL, "d0", None, "test")


class Sink:
    """Records tokens; says that a stop string is complete after `stop_at` of them."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.tokens: list[int] = []
        self.hidden: list[bool] = []
        self.logprobs: list[Logprobs | None] = []
        self.scored: list[int] = []
        self.stop_at = stop_at

    def push(self, token_id: int, hidden: bool, logprobs: Logprobs | None) -> bool:
        self.tokens.append(token_id)
        self.hidden.append(hidden)
        self.logprobs.append(logprobs)
        return len(self.tokens) == self.stop_at

    def push_prompt(self, logprobs: Logprobs) -> None:
        self.scored.extend(range(logprobs.start, logprobs.end))


def make(
    sink: Sink | None = None,
    *,
    max_tokens: int = 4,
    max_replays: int = 2,
    window: int = 8,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> RequestTracker:
    return RequestTracker(
        request_id="r",
        prompt=(1, 2, 3),
        params=SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
        token_window=window,
        max_replays=max_replays,
        sink=sink or Sink(),
        now=10.0,
    )


def to_prefilling(tracker: RequestTracker) -> int:
    tracker.dispatch(DISAGGREGATED, 11.0)
    tracker.reserve_granted("d0", tracker.attempt)
    return tracker.attempt


def token(
    tracker: RequestTracker,
    worker: str,
    index: int,
    token_id: int,
    finish: FinishReason | None = None,
    now: float = 12,
    logprobs: Logprobs | None = None,
) -> Sequence[Effect]:
    return tracker.token(worker, tracker.attempt, index, token_id, finish, now=now, logprobs=logprobs)


def of(index: int) -> Logprobs:
    """Of the token at `index`."""
    return Logprobs(index, 0, (-float(index),))


def aborts(effects: Sequence[Effect]) -> set[str]:
    return {effect.worker_id for effect in effects if isinstance(effect, Release) and effect.abort}


def outcome(effects: Sequence[Effect]) -> Ended:
    (ended,) = [effect for effect in effects if isinstance(effect, Ended)]
    return ended


def test_normal_life() -> None:
    sink = Sink()
    tracker = make(sink)
    (reserve,) = tracker.dispatch(DISAGGREGATED, 11.0)
    assert isinstance(reserve, SendReserve)
    assert reserve.worker_id == "d0"
    (prefill,) = tracker.reserve_granted("d0", 1)
    assert isinstance(prefill, SendPrefill)
    assert prefill.worker_id == "p0"
    assert prefill.spec.prompt == (1, 2, 3)
    assert token(tracker, "p0", 0, 50, now=12.0) == [PrefillComputed("p0", tracker.key)]
    assert tracker.state is RequestState.TRANSFERRING
    (released,) = tracker.kv_received("d0", 1, STATS)
    assert released == Release("p0", tracker.key, abort=False, reason="committed", served=True, peer="d0")
    assert not token(tracker, "d0", 0, 50)  # the echo
    token(tracker, "d0", 1, 51, now=13.0)
    token(tracker, "d0", 2, 52, now=14.0)
    effects = token(tracker, "d0", 3, 53, FinishReason.LENGTH, now=15.0)
    assert not aborts(effects)
    assert outcome(effects).outcome.finish is FinishReason.LENGTH
    assert sink.tokens == [50, 51, 52, 53]
    timeline = tracker.timeline
    assert (timeline.arrived, timeline.chosen, timeline.first_token, timeline.second_token) == (
        10.0,
        11.0,
        12.0,
        13.0,
    )
    assert (timeline.last_token, timeline.ended) == (15.0, 15.0)
    assert (timeline.mode, timeline.prefill_worker, timeline.decode_worker) == ("disaggregated", "p0", "d0")
    assert timeline.kv is STATS


def test_the_echo_may_come_before_the_prefill_workers_token() -> None:
    sink = Sink()
    tracker = make(sink)
    to_prefilling(tracker)
    effects = token(tracker, "d0", 0, 50)
    assert effects == [Release("p0", tracker.key, abort=False, reason="committed", served=True, peer="d0")]
    assert not token(tracker, "p0", 0, 50)
    assert sink.tokens == [50]
    assert not tracker.worker_lost("p0", "gone", 13.0)
    assert tracker.state is RequestState.DECODING


def test_a_request_that_ends_at_its_first_token_frees_the_ticket() -> None:
    tracker = make(max_tokens=1)
    to_prefilling(tracker)
    effects = token(tracker, "p0", 0, 50, FinishReason.LENGTH)
    assert aborts(effects) == {"d0"}
    assert outcome(effects).outcome.finish is FinishReason.LENGTH
    assert tracker.timeline.decode_worker == ""
    assert Release("p0", tracker.key, abort=False, reason="length", served=True) in effects
    assert Release("d0", tracker.key, abort=True, reason="length") in effects


def test_a_stop_token_has_no_text() -> None:
    sink = Sink()
    tracker = make(sink)
    tracker.dispatch(LOCAL, 11.0)
    token(tracker, "d0", 0, 50)
    effects = token(tracker, "d0", 1, 2, FinishReason.STOP)
    assert outcome(effects).outcome.finish is FinishReason.STOP
    assert sink.hidden == [False, True]


def test_a_stop_string_aborts_the_worker_and_drops_what_follows() -> None:
    sink = Sink(stop_at=2)
    tracker = make(sink)
    tracker.dispatch(LOCAL, 11.0)
    token(tracker, "d0", 0, 50)
    effects = token(tracker, "d0", 1, 51)
    assert aborts(effects) == {"d0"}
    assert outcome(effects).outcome.finish is FinishReason.STOP
    assert not token(tracker, "d0", 2, 52)
    assert tracker.delivered == [50, 51]


def test_a_stop_string_in_the_first_token_aborts_both_workers() -> None:
    tracker = make(Sink(stop_at=1))
    to_prefilling(tracker)
    assert aborts(token(tracker, "p0", 0, 50)) == {"p0", "d0"}


def test_a_refusal_is_no_replay() -> None:
    tracker = make(max_replays=0)
    for attempt in range(1, 20):
        tracker.dispatch(DISAGGREGATED, 11.0)
        effects = tracker.reserve_refused("d0", attempt, FailureKind.BUSY, "full", 12.0)
        assert not aborts(effects)
        assert effects[-1] == Requeue(False, "d0", "full")
        assert {effect.worker_id for effect in effects if isinstance(effect, Release)} == {"d0", "p0"}
    assert tracker.timeline.replays == 0


@pytest.mark.parametrize("who", ["d0", "p0"])
def test_a_ticket_that_is_taken_back_after_the_first_token_is_told_as_the_reason(who: str) -> None:
    """Until something else loses what was computed: a refusal to compute it again does not, a worker's death does."""

    def sent(route: Route) -> tuple[bool, bool]:
        (effect,) = tracker.dispatch(route, 12.0)
        assert isinstance(effect, SendGenerate)
        return effect.spec.revoked, effect.spec.rebuild

    tracker = make(max_tokens=9)
    attempt = to_prefilling(tracker)
    tracker.token("p0", attempt, 0, 7, None, now=11.0)
    tracker.failed(who, attempt, FailureKind.BUSY, "revoked", 11.0)
    assert sent(LOCAL) == (True, False)
    tracker.failed("d0", tracker.attempt, FailureKind.BUSY, "draining", 12.0)
    assert sent(LOCAL) == (True, False)
    tracker.failed("d0", tracker.attempt, FailureKind.BROKEN, "died", 12.0)
    assert sent(LOCAL) == (False, False)


def test_a_ticket_that_is_taken_back_before_the_first_token_has_lost_nothing() -> None:
    tracker = make()
    attempt = to_prefilling(tracker)
    tracker.failed("d0", attempt, FailureKind.BUSY, "revoked", 11.0)
    (effect,) = tracker.dispatch(DISAGGREGATED, 12.0)
    assert isinstance(effect, SendReserve)
    assert not effect.spec.revoked


def test_an_invalid_request_is_not_retried() -> None:
    tracker = make()
    to_prefilling(tracker)
    effects = tracker.failed("p0", 1, FailureKind.INVALID, "too long", 12.0)
    assert aborts(effects) == {"d0"}
    assert isinstance(outcome(effects).outcome.error, InvalidRequest)


def test_replay_goes_on_from_the_delivered_tokens() -> None:
    sink = Sink()
    tracker = make(sink)
    to_prefilling(tracker)
    token(tracker, "p0", 0, 50)
    token(tracker, "d0", 0, 50)
    token(tracker, "d0", 1, 51)
    effects = tracker.worker_lost("d0", "dead", 13.0)
    assert effects[-1] == Requeue(True, "d0", "dead")
    (generate,) = tracker.dispatch(Route(Mode.LOCAL, "d1", None, "replay"), 14.0)
    assert isinstance(generate, SendGenerate)
    assert generate.spec.delivered == (50, 51)
    assert generate.spec.key.attempt == 2
    assert not tracker.token("d0", 1, 2, 99, None, now=15.0)  # late news of the dead attempt
    token(tracker, "d1", 2, 52)
    effects = token(tracker, "d1", 3, 53, FinishReason.LENGTH)
    assert sink.tokens == [50, 51, 52, 53]
    assert tracker.timeline.replays == 1
    timeline = tracker.timeline
    assert (timeline.mode, timeline.reason, timeline.kv) == ("local", "replay", None)
    assert (timeline.prefill_worker, timeline.decode_worker) == ("d1", "d1")


def test_late_tokens_of_an_older_attempt_change_nothing() -> None:
    """The same worker runs the next attempt, and its reports of the older one are still on their way."""
    sink = Sink()
    tracker = make(sink)
    to_prefilling(tracker)
    tracker.worker_lost("p0", "dead", 12.0)
    tracker.dispatch(LOCAL, 13.0)
    assert not tracker.token("d0", 1, 0, 50, None, now=14.0)
    assert not tracker.token("d0", 1, 3, 50, FinishReason.LENGTH, now=14.0)
    assert not tracker.failed("d0", 1, FailureKind.BROKEN, "late", 14.0)
    assert not tracker.kv_received("d0", 1, STATS)
    assert sink.tokens == []
    assert tracker.state is RequestState.DECODING


def test_prefill_death_after_the_first_token_aborts_the_ticket() -> None:
    tracker = make()
    to_prefilling(tracker)
    token(tracker, "p0", 0, 50)
    effects = tracker.worker_lost("p0", "dead", 13.0)
    assert aborts(effects) == {"d0"}
    assert tracker.state is RequestState.QUEUED


def test_prefill_death_while_only_planned_there_counts_nothing() -> None:
    tracker = make(max_replays=0)
    tracker.dispatch(DISAGGREGATED, 11.0)
    effects = tracker.worker_lost("p0", "dead", 12.0)
    assert aborts(effects) == {"d0"}
    assert effects[-1] == Requeue(False, "p0", "dead")


def test_replays_are_bounded() -> None:
    tracker = make(max_replays=2)
    for _ in range(2):
        tracker.dispatch(LOCAL, 11.0)
        assert isinstance(tracker.worker_lost("d0", "dead", 12.0)[-1], Requeue)
    tracker.dispatch(LOCAL, 11.0)
    effects = tracker.failed("d0", tracker.attempt, FailureKind.BROKEN, "bug", 12.0)
    assert isinstance(outcome(effects).outcome.error, ReplaysExhausted)


@pytest.mark.parametrize(("index", "token_id"), [(2, 52), (0, 99)], ids=["gap", "different"])
def test_a_worker_that_reports_nonsense_is_given_up(index: int, token_id: int) -> None:
    sink = Sink()
    tracker = make(sink)
    tracker.dispatch(LOCAL, 11.0)
    token(tracker, "d0", 0, 50)
    effects = tracker.token("d0", 1, index, token_id, None, now=12.0)
    assert aborts(effects) == {"d0"}
    assert isinstance(effects[-1], Requeue)
    assert sink.tokens == [50]


def test_credit_returns_what_the_client_took_in_quarters_of_the_window() -> None:
    tracker = make(window=8, max_tokens=100)
    tracker.dispatch(LOCAL, 11.0)
    for index in range(8):
        token(tracker, "d0", index, index)
    assert not tracker.took(1)
    assert tracker.took(1) == [SendCredit("d0", tracker.key, 2)]
    assert not tracker.took(1)
    assert tracker.took(5) == [SendCredit("d0", tracker.key, 6)]


def test_a_replays_window_is_not_credited_with_older_tokens() -> None:
    tracker = make(window=4, max_tokens=100)
    tracker.dispatch(LOCAL, 11.0)
    for index in range(4):
        token(tracker, "d0", index, index)
    tracker.worker_lost("d0", "dead", 12.0)
    tracker.dispatch(LOCAL, 13.0)
    assert not tracker.took(4)
    token(tracker, "d0", 4, 4)
    assert tracker.took(1) == [SendCredit("d0", tracker.key, 1)]


def test_a_replays_credit_starts_anew() -> None:
    tracker = make(window=4, max_tokens=100)
    tracker.dispatch(LOCAL, 11.0)
    for index in range(4):
        token(tracker, "d0", index, index)
    assert tracker.took(4) == [SendCredit("d0", tracker.key, 4)]
    tracker.worker_lost("d0", "dead", 12.0)
    tracker.dispatch(LOCAL, 13.0)
    token(tracker, "d0", 4, 4)
    assert tracker.took(1) == [SendCredit("d0", tracker.key, 1)]


def test_the_echo_is_credited_too() -> None:
    tracker = make(window=8, max_tokens=100)
    to_prefilling(tracker)
    token(tracker, "p0", 0, 50)
    assert not tracker.took(1)  # nobody to credit yet
    token(tracker, "d0", 0, 50)
    token(tracker, "d0", 1, 51)
    assert tracker.took(1) == [SendCredit("d0", tracker.key, 2)]


def test_an_echo_that_the_client_took_before_is_credited_at_once() -> None:
    tracker = make(window=1, max_tokens=100)
    to_prefilling(tracker)
    token(tracker, "p0", 0, 50)
    assert not tracker.took(1)
    assert SendCredit("d0", tracker.key, 1) in token(tracker, "d0", 0, 50)


def test_a_worker_that_holds_nearly_all_of_the_prompt_runs_it_itself() -> None:
    tracker = make()
    tracker.dispatch(DISAGGREGATED, 1.0)
    assert tracker.reserve_declined("d1", tracker.attempt) is None, "somebody else's answer"
    effects = tracker.reserve_declined("d0", tracker.attempt)
    assert effects is not None
    assert aborts(effects) == {"d0"}, "the ticket goes back; the prefill worker was only planned"
    assert {effect.worker_id for effect in effects if isinstance(effect, Release)} == {"d0", "p0"}
    (generate,) = tracker.dispatch(LOCAL, 2.0)
    assert isinstance(generate, SendGenerate)
    assert generate.spec.key.attempt == 2
    assert tracker.reserve_declined("d0", 1) is None, "too late"
    assert tracker.timeline.replays == 0


def test_deadline_while_reserving() -> None:
    tracker = make()
    tracker.dispatch(DISAGGREGATED, 11.0)
    effects = tracker.abandon(DeadlineExceeded("late"), 12.0)
    assert aborts(effects) == {"d0"}
    assert isinstance(outcome(effects).outcome.error, DeadlineExceeded)
    assert not tracker.reserve_granted("d0", 1)


def test_a_reused_id_continues_its_attempts() -> None:
    tracker = RequestTracker(
        request_id="r",
        prompt=(1,),
        params=SamplingParams(max_tokens=1),
        token_window=8,
        max_replays=1,
        sink=Sink(),
        now=0.0,
        last_attempt=7,
    )
    tracker.dispatch(LOCAL, 1.0)
    assert tracker.key.attempt == 8
    assert not tracker.token("d0", 7, 0, 1, None, now=2.0)


# -- log-probabilities ----------------------------------------------------------------------------------------------


def test_the_decode_worker_is_held_back_until_the_prefill_worker_has_told() -> None:
    sink = Sink()
    tracker = make(sink, logprobs=0)
    to_prefilling(tracker)
    assert not tracker.kv_received("d0", 1, STATS)
    assert tracker.state is RequestState.DECODING
    assert tracker.holders == {"p0", "d0"}
    assert not token(tracker, "d0", 0, 50)  # the echo knows no log-probabilities
    assert not token(tracker, "d0", 1, 51, logprobs=of(1))
    assert sink.tokens == []
    (released,) = token(tracker, "p0", 0, 50, logprobs=of(0))
    assert released == Release("p0", tracker.key, abort=False, reason="committed", served=True, peer="d0")
    assert (sink.tokens, sink.logprobs) == ([50, 51], [of(0), of(1)])
    token(tracker, "d0", 2, 52, logprobs=of(2))
    assert outcome(token(tracker, "d0", 3, 53, FinishReason.LENGTH, logprobs=of(3)))
    assert sink.logprobs == [of(0), of(1), of(2), of(3)]


def test_log_probabilities_that_die_with_the_prefill_worker_are_computed_again() -> None:
    sink = Sink()
    tracker = make(sink, logprobs=0)
    to_prefilling(tracker)
    tracker.kv_received("d0", 1, STATS)
    token(tracker, "d0", 0, 50)
    effects = tracker.worker_lost("p0", "gone", 13.0)
    assert aborts(effects) == {"d0"}
    assert any(isinstance(effect, Requeue) and effect.counted for effect in effects)
    assert sink.tokens == []


def test_without_log_probabilities_nobody_waits() -> None:
    sink = Sink()
    tracker = make(sink)
    to_prefilling(tracker)
    tracker.kv_received("d0", 1, STATS)
    token(tracker, "d0", 0, 50)
    assert sink.tokens == [50]
    assert not tracker.worker_lost("p0", "gone", 13.0)


def test_a_token_without_the_log_probabilities_asked_for_is_nonsense() -> None:
    tracker = make(logprobs=0)
    tracker.dispatch(LOCAL, 11.0)
    effects = token(tracker, "d0", 0, 50)
    assert any(isinstance(effect, Requeue) and effect.counted for effect in effects)
    assert aborts(effects) == {"d0"}


def test_prompt_tokens_are_scored_once_and_before_the_first_token() -> None:
    sink = Sink()
    tracker = make(sink, prompt_logprobs=2)
    to_prefilling(tracker)
    assert not tracker.prompt_logprobs("p0", 1, Logprobs(1, 0, (-1.0,)), 12.0)
    assert not tracker.prompt_logprobs("d0", 1, Logprobs(2, 0, (-1.0,)), 12.0)  # it computes no prompt
    early = token(tracker, "p0", 0, 50)
    assert any(isinstance(effect, Requeue) for effect in early)  # a prompt token was left out
    (generate,) = tracker.dispatch(LOCAL, 13.0)
    assert isinstance(generate, SendGenerate)
    assert generate.spec.params.prompt_logprobs == 2
    tracker.prompt_logprobs("d0", tracker.attempt, Logprobs(1, 0, (-1.0, -2.0)), 14.0)
    assert sink.scored == [1, 2]
    token(tracker, "d0", 0, 60)
    assert sink.tokens == [60]
    tracker.worker_lost("d0", "gone", 15.0)
    (again,) = tracker.dispatch(LOCAL, 16.0)
    assert isinstance(again, SendGenerate)
    assert again.spec.params.prompt_logprobs is None  # the client has them all


@pytest.mark.parametrize("logprobs", [Logprobs(2, 0, (-1.0,)), Logprobs(1, 0, (-1.0,) * 3)])
def test_prompt_tokens_out_of_order_are_nonsense(logprobs: Logprobs) -> None:
    tracker = make(prompt_logprobs=0)
    to_prefilling(tracker)
    assert aborts(tracker.prompt_logprobs("p0", 1, logprobs, 12.0)) == {"p0", "d0"}


# -- the state machine ----------------------------------------------------------------------------------------------

WORKERS = ("p0", "p1", "d0", "d1")
MAX_TOKENS = 12
MAX_REPLAYS = 2


@dataclass
class Worker:
    """A worker's side of the protocol, one command and one event at a time.

    `holds`: attempt -> (phase, tokens to report next, credit left).
    """

    name: str
    inbox: deque = field(default_factory=deque)
    outbox: deque = field(default_factory=deque)
    holds: dict[int, list] = field(default_factory=dict)

    def in_phase(self, *phases: str) -> list[int]:
        return [attempt for attempt, job in self.holds.items() if job[0] in phases]

    def ready(self) -> list[int]:
        return [attempt for attempt in self.in_phase("prefill", "sequence") if self.holds[attempt][2] > 0]

    def lose_session(self) -> None:
        self.inbox.clear()
        self.outbox.clear()
        self.holds.clear()


class TrackerMachine(RuleBasedStateMachine):
    """A tracker between four workers whose commands and news travel in queues, a client, and a clock.

    Token i of attempt a is ``1000 * a + i``: whatever is delivered must be of the attempt that is current then. With
    `logprobs` every token has them but the echo of a decode worker, and the second of the two prompt tokens too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.window = 4
        self.logprobs = False
        self.sent: set[tuple[str, int]] = set()
        self.replays = 0
        self.workers = {name: Worker(name) for name in WORKERS}
        self.given: set[tuple[str, int]] = set()
        self.released: Counter[tuple[str, int]] = Counter()
        self.ended: list[Ended] = []
        self.waiting = True
        self.sink = Sink()
        self.history: list[tuple] = []
        self.now = 0.0
        self.taken = 0
        self.make_tracker()

    def make_tracker(self) -> None:
        self.tracker = RequestTracker(
            request_id="r",
            prompt=(1, 2),
            params=SamplingParams(
                max_tokens=MAX_TOKENS,
                logprobs=0 if self.logprobs else None,
                prompt_logprobs=0 if self.logprobs else None,
            ),
            token_window=self.window,
            max_replays=MAX_REPLAYS,
            sink=self.sink,
            now=0.0,
        )

    @initialize(window=st.sampled_from([1, 2, 4, 9]), logprobs=st.booleans())
    def choose_window(self, window: int, logprobs: bool) -> None:
        self.window = window
        self.logprobs = logprobs
        self.make_tracker()

    def perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendReserve(worker, spec) | SendGenerate(worker, spec):
                    assert spec.delivered == tuple(self.sink.tokens)
                    assert (spec.params.prompt_logprobs is None) == (not self.logprobs or bool(self.sink.scored))
                    self.given.add((worker, spec.key.attempt))
                    self.sent.add((worker, spec.key.attempt))
                    self.workers[worker].inbox.append((type(effect).__name__, spec.key.attempt, len(spec.delivered)))
                case SendPrefill(worker, spec):
                    self.sent.add((worker, spec.key.attempt))
                    self.workers[worker].inbox.append(("SendPrefill", spec.key.attempt, len(spec.delivered)))
                case SendCredit(worker, key, tokens):
                    assert tokens > 0
                    self.workers[worker].inbox.append(("Credit", key.attempt, tokens))
                case Release(worker, key, abort, _):
                    assert (worker, key.attempt) in self.given
                    self.released[worker, key.attempt] += 1
                    if abort:
                        assert (worker, key.attempt) in self.sent, "told to abort what it was never given"
                        self.workers[worker].inbox.append(("Abort", key.attempt, 0))
                case Requeue(counted, _, _):
                    assert not self.ended
                    self.replays += counted
                    self.waiting = True
                case Ended():
                    self.ended.append(effect)

    @precondition(lambda self: self.waiting and not self.ended)
    @rule(prefill=st.sampled_from(["p0", "p1", None]), decode=st.sampled_from(["d0", "d1"]))
    def dispatch(self, prefill: str | None, decode: str) -> None:
        self.waiting = False
        mode = Mode.LOCAL if prefill is None else Mode.DISAGGREGATED
        if prefill is not None:
            self.given.add((prefill, self.tracker.attempt + 1))
        self.perform(self.tracker.dispatch(Route(mode, decode, prefill, "test"), self.now))

    @rule(
        choices=st.lists(st.integers(0, 1000), min_size=1, max_size=8), refuse=st.sampled_from([*[False] * 5, True])
    )
    def things_go_on(self, choices: list[int], refuse: bool) -> None:
        """Some of what can happen next happens: commands and news arrive, workers make tokens, transfers end."""
        for choice in choices:
            possible = self.possible()
            if not possible:
                return
            action, worker, attempt = possible[choice % len(possible)]
            action(worker, refuse if action == self.take_command else attempt)
            self.check()

    def possible(self) -> list[tuple[Callable[[Worker, int], None], Worker, int]]:
        actions: list[tuple[Callable[[Worker, int], None], Worker, int]] = []
        for worker in self.workers.values():
            if worker.inbox:
                actions.append((self.take_command, worker, 0))
            if worker.outbox:
                actions.append((self.news, worker, 0))
            actions += [(self.make_token, worker, attempt) for attempt in worker.ready()]
            actions += [(self.end_transfer, worker, attempt) for attempt in worker.in_phase("sending")]
        return actions

    def take_command(self, worker: Worker, refuse: int = False) -> None:
        command, attempt, number = worker.inbox.popleft()
        match command:
            case "SendReserve" if refuse:
                worker.outbox.append(("refused", attempt))
            case "SendReserve":
                worker.holds[attempt] = ["ticket", number, self.window, ()]
                worker.outbox.append(("granted", attempt))
            case "SendPrefill" | "SendGenerate" if refuse:
                worker.outbox.append(("failed", attempt, FailureKind.BUSY))
            case "SendPrefill":
                worker.holds[attempt] = ["prefill", number, 1, (1,)]
            case "SendGenerate":
                worker.holds[attempt] = ["sequence", number, self.window, (1,)]
            case "Credit":
                if attempt in worker.holds:
                    worker.holds[attempt][2] += number
                    assert worker.holds[attempt][2] <= self.window, "more credit than the window"
            case "Abort":
                worker.holds.pop(attempt, None)

    def make_token(self, worker: Worker, attempt: int) -> None:
        job = worker.holds[attempt]
        index = job[1]
        last = index + 1 == MAX_TOKENS
        logprobs = None
        if self.logprobs and job[3] != ("echo",):
            logprobs = of(index)
            worker.outbox.extend(("scores", attempt, position) for position in job[3])
        job[3] = ()
        finish = FinishReason.LENGTH if last else None
        worker.outbox.append(("token", attempt, index, 1000 * attempt + index, finish, logprobs))
        job[1] += 1
        job[2] -= 1
        if last:
            del worker.holds[attempt]
        elif job[0] == "prefill":
            job[0] = "sending"

    def end_transfer(self, worker: Worker, attempt: int) -> None:
        """The manifest arrives at whichever decode worker has the ticket, or the transfer fails."""
        first = worker.holds.pop(attempt)[1] - 1
        for target in (self.workers["d0"], self.workers["d1"]):
            job = target.holds.get(attempt)
            if job is not None and job[0] == "ticket":
                target.holds[attempt] = ["sequence", first, self.window, ("echo",)]
                target.outbox.append(("received", attempt))
                return
        worker.outbox.append(("failed", attempt, FailureKind.BROKEN))

    @rule(name=st.sampled_from(WORKERS), data=st.data(), kind=st.sampled_from(FailureKind))
    def worker_fails_a_request(self, name: str, data: st.DataObject, kind: FailureKind) -> None:
        worker = self.workers[name]
        if not worker.holds or kind is FailureKind.INVALID:
            return
        attempt = data.draw(st.sampled_from(sorted(worker.holds)))
        del worker.holds[attempt]
        worker.outbox.append(("failed", attempt, kind))

    def news(self, worker: Worker, _: int = 0) -> None:
        event = worker.outbox.popleft()
        self.history.append((worker.name, event))
        self.hear(worker.name, event)

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def an_old_token_comes_again(self, data: st.DataObject) -> None:
        name, event = data.draw(st.sampled_from(self.history))
        if event[0] == "token" and event[4] is None:
            self.hear(name, event)

    def hear(self, name: str, event: tuple) -> None:
        self.now += 1.0
        kind, attempt = event[0], event[1]
        match kind:
            case "granted":
                self.perform(self.tracker.reserve_granted(name, attempt))
            case "refused":
                self.perform(self.tracker.reserve_refused(name, attempt, FailureKind.BUSY, "full", self.now))
            case "received":
                self.perform(self.tracker.kv_received(name, attempt, STATS))
            case "failed":
                self.perform(self.tracker.failed(name, attempt, event[2], "failed", self.now))
            case "scores":
                scored = Logprobs(event[2], 0, (-1.0,))
                self.perform(self.tracker.prompt_logprobs(name, attempt, scored, self.now))
            case "token":
                _, _, index, token_id, finish, logprobs = event
                before, current = len(self.sink.tokens), self.tracker.attempt
                self.perform(
                    self.tracker.token(name, attempt, index, token_id, finish, now=self.now, logprobs=logprobs)
                )
                after = len(self.sink.tokens)
                assert self.sink.tokens[before:] == [1000 * current + i for i in range(before, after)]
                assert self.logprobs or after <= before + 1, "held back for nothing"

    @rule(name=st.sampled_from(WORKERS))
    def a_session_breaks(self, name: str) -> None:
        self.workers[name].lose_session()
        self.perform(self.tracker.worker_lost(name, "dead", self.now))

    @rule(share=st.floats(0, 1))
    def the_client_takes_tokens(self, share: float) -> None:
        count = round(share * (len(self.sink.tokens) - self.taken))
        if count == 0:
            return
        self.taken += count
        self.perform(self.tracker.took(count))

    @rule(stop=st.integers(0, 60))
    def a_stop_string_will_complete(self, stop: int) -> None:
        if stop < 3 and self.sink.stop_at is None:
            self.sink.stop_at = len(self.sink.tokens) + 1 + stop

    @rule(how=st.sampled_from(["cancel", "deadline", None, None, None, None, None, None]))
    def the_client_gives_up(self, how: str | None) -> None:
        if how == "cancel":
            self.perform(self.tracker.cancel(self.now))
        elif how == "deadline":
            self.perform(self.tracker.abandon(DeadlineExceeded("late"), self.now))

    @invariant()
    def tokens_come_in_order_and_once(self) -> None:
        assert [token % 1000 for token in self.sink.tokens] == list(range(len(self.sink.tokens)))
        assert self.tracker.delivered == self.sink.tokens
        expected = [of(i) if self.logprobs else None for i in range(len(self.sink.tokens))]
        assert self.sink.logprobs == expected
        assert self.sink.scored in ([1], []) if self.logprobs else self.sink.scored == []
        assert self.sink.scored or not self.logprobs or not self.sink.tokens

    @invariant()
    def ends_at_most_once(self) -> None:
        assert len(self.ended) <= 1
        assert (self.tracker.state is RequestState.ENDED) == bool(self.ended)
        if self.ended and self.ended[0].outcome.finish is FinishReason.LENGTH:
            assert len(self.sink.tokens) == MAX_TOKENS

    @invariant()
    def releases_once_whoever_holds_nothing_any_more(self) -> None:
        assert all(count == 1 for count in self.released.values())
        current = {(worker, self.tracker.attempt) for worker in self.tracker.holders}
        assert current == {pair for pair in self.given if self.released[pair] == 0}

    @invariant()
    def replays_are_bounded(self) -> None:
        assert self.replays == self.tracker.timeline.replays <= MAX_REPLAYS

    @invariant()
    def the_prefill_worker_is_let_go_at_the_commit(self) -> None:
        """Or, if it owes log-probabilities, when it has told them."""
        if self.tracker.state is RequestState.DECODING:
            assert len(self.tracker.holders) == 1 + self.tracker._owed_by_prefill

    @invariant()
    def waits_or_runs_or_has_ended(self) -> None:
        assert (self.tracker.state is RequestState.QUEUED) == (self.waiting and not self.ended)

    def check(self) -> None:
        self.tokens_come_in_order_and_once()
        self.ends_at_most_once()
        self.releases_once_whoever_holds_nothing_any_more()
        self.replays_are_bounded()
        self.the_prefill_worker_is_let_go_at_the_commit()
        self.waits_or_runs_or_has_ended()

    def teardown(self) -> None:
        """From wherever it stands the request comes to its end, and then nobody holds anything."""
        for _ in range(100 * MAX_TOKENS):
            if self.waiting and not self.ended:
                self.dispatch("p0", "d0")
            self.the_client_takes_tokens(1.0)
            for action, worker, attempt in self.possible()[:1]:
                action(worker, 0 if action == self.take_command else attempt)
            self.check()
        assert len(self.ended) == 1, "it does not come to an end"
        self.perform(self.tracker.cancel(self.now))
        assert len(self.ended) == 1
        assert not self.possible()
        leftover = {worker.name: worker.holds for worker in self.workers.values() if worker.holds}
        assert not leftover, leftover


TestTrackerMachine = TrackerMachine.TestCase
TestTrackerMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
