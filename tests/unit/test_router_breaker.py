"""The circuit breaker: as a state machine against a plain account of what happened, and the workers' together."""

from __future__ import annotations

import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdcore.clock import ManualClock
from pdcore.types import RequestKey
from router.breaker import Breaker, BreakerPolicy, BreakerState
from router.worker_health import WorkerHealth

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
POLICY = BreakerPolicy(failures=3, share=0.5, window=8, open_s=1.0, max_open_s=5.0, trust_s=10.0)


class BreakerMachine(RuleBasedStateMachine):
    """Attempts start, are served, fail, and end without a word, at any time and in any order.

    `record`: verdicts since it was closed last. `running`: attempts, with whether each is the probe.
    """

    @initialize()
    def begin(self) -> None:
        self.breaker = Breaker(POLICY)
        self.now = 0.0
        self.number = 0
        self.running: dict[RequestKey, bool] = {}
        self.record: list[bool] = []
        self.open_until: float | None = None
        self.openings = 0
        self.probed_at = 0.0

    @property
    def probe(self) -> RequestKey | None:
        return next((key for key, probe in self.running.items() if probe), None)

    @property
    def expected(self) -> BreakerState:
        if self.open_until is None:
            return CLOSED
        if self.now < self.open_until:
            return OPEN
        if self.probe is not None and self.now >= self.probed_at + POLICY.trust_s:
            self.closes()
            return CLOSED
        return HALF_OPEN

    def closes(self) -> None:
        self.open_until, self.openings, self.record = None, 0, []
        self.running = dict.fromkeys(self.running, False)

    def opens(self) -> None:
        self.open_until = self.now + min(5.0, 2.0**self.openings)
        self.openings += 1
        self.running = dict.fromkeys(self.running, False)

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def an_attempt_starts(self) -> None:
        self.number += 1
        key = RequestKey(f"r{self.number}", 1)
        tries = self.expected is HALF_OPEN and self.probe is None
        assert self.breaker.started(key, self.now) == tries
        self.running[key] = tries
        if tries:
            self.probed_at = self.now

    @rule(data=st.data(), how=st.sampled_from(["served", "failed", "failed", "nothing"]))
    def an_attempt_ends(self, data: st.DataObject, how: str) -> None:
        if not self.running:
            return
        key = data.draw(st.sampled_from(sorted(self.running)))
        state, probe = self.expected, self.running[key]
        if how == "served":
            self.breaker.served(key, self.now)
        elif how == "failed":
            self.breaker.failed(key, "why", self.now)
        self.breaker.ended(key)
        del self.running[key]
        if how != "nothing":
            self.verdict(how == "failed", state, probe)

    @rule()
    def the_session_is_lost(self) -> None:
        state = self.expected
        self.breaker.failed(None, "lost", self.now)
        self.verdict(True, state, True)

    def verdict(self, failed: bool, state: BreakerState, decides: bool) -> None:
        if state is CLOSED:
            self.record.append(failed)
            recent = self.record[-POLICY.window :]
            if self.record[-POLICY.failures :] == [True] * POLICY.failures or (
                failed and len(recent) == POLICY.window and sum(recent) >= POLICY.share * POLICY.window
            ):
                self.opens()
        elif state is HALF_OPEN and decides:
            if failed:
                self.opens()
            else:
                self.closes()

    @invariant()
    def is_as_told(self) -> None:
        if hasattr(self, "breaker"):
            assert self.breaker.state(self.now) is self.expected

    @invariant()
    def is_shunned_while_open_or_tried(self) -> None:
        if hasattr(self, "breaker"):
            expected = self.expected
            tried = expected is HALF_OPEN and self.probe is not None
            assert self.breaker.shunned(self.now) == (expected is OPEN or tried)

    def teardown(self) -> None:
        """Whatever happened: the next request but one gets through."""
        if hasattr(self, "breaker"):
            self.now += POLICY.max_open_s + POLICY.trust_s
            assert not self.breaker.shunned(self.now)


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# -- of all workers -------------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def health(clock: ManualClock) -> WorkerHealth:
    health = WorkerHealth(POLICY, clock)
    for worker in ("p0", "p1", "d0", "d1"):
        health.connected(worker, "1")
    return health


def key(number: int) -> RequestKey:
    return RequestKey(f"r{number}", 1)


def break_link(health: WorkerHealth, prefill: str, decode: str, times: int = 3, only_decode: bool = False) -> None:
    for number in range(times):
        health.transfer_failed((prefill, decode), key(number), "checksum", only_decode=only_decode)


def test_one_bad_link_opens_neither_end(health: WorkerHealth) -> None:
    break_link(health, "p0", "d0", 50)
    assert health.shunned() == frozenset()


@pytest.mark.parametrize(("links", "bad"), [(["p0 d0", "p0 d1"], "p0"), (["p0 d0", "p1 d0"], "d0")])
def test_transfers_that_fail_with_two_peers_open_the_end_that_they_share(
    health: WorkerHealth, links: list[str], bad: str
) -> None:
    for _ in range(3):
        for link in links:
            break_link(health, *link.split(), times=1)
    assert health.shunned() == {bad}


def test_links_that_work_again_are_forgotten(health: WorkerHealth) -> None:
    break_link(health, "p0", "d0")
    health.released("p0", key(9), served=True, peer="d0")
    break_link(health, "p0", "d1")
    break_link(health, "p1", "d0")
    assert health.shunned() == frozenset()


def test_transfers_to_a_worker_that_died_are_no_evidence(health: WorkerHealth) -> None:
    break_link(health, "p0", "d0")
    health.lost("d0", "dead", for_good=True)
    break_link(health, "p0", "d1")
    assert health.shunned() == frozenset()


def test_with_a_single_decode_worker_the_prefill_end_is_opened(health: WorkerHealth) -> None:
    break_link(health, "p0", "d0", only_decode=True)
    assert health.shunned() == {"p0"}


def test_a_new_incarnation_has_a_clean_record_and_a_new_session_has_not(
    health: WorkerHealth, clock: ManualClock
) -> None:
    for number in range(2):
        health.failed("d0", key(number), "bug")
    health.lost("d0", "stream ended", for_good=False)
    assert health.shunned() == {"d0"}
    health.connected("d0", "1")
    assert health.shunned() == {"d0"}
    health.connected("d0", "2")
    assert health.shunned() == frozenset()
    assert health.state("d0") == (CLOSED, "")


def test_one_that_is_no_member_any_more_is_forgotten(health: WorkerHealth) -> None:
    for number in range(3):
        health.failed("d0", key(number), "bug")
    health.lost("d0", "not used", for_good=True)
    assert health.shunned() == frozenset()
    health.failed("d0", key(4), "late news")
    health.released("d0", key(4), served=True, peer="p0")
    assert health.state("d0") == (CLOSED, "")


def test_changes_are_logged_once_each(
    health: WorkerHealth, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for number in range(6):
        health.failed("d0", key(number), "bug")
    assert health.state("d0") == (OPEN, "bug")
    clock.advance(1.0)
    assert health.shunned() == frozenset()
    health.started("d0", key(7))
    assert health.shunned() == {"d0"}
    health.started("d0", key(8))
    health.released("d0", key(7), served=True, peer="")
    health.released("d0", key(8), served=True, peer="")
    assert health.shunned() == frozenset()
    assert [record.getMessage() for record in caplog.records] == [
        "circuit of d0: open: bug",
        "circuit of d0: half open, r7 tries it",
        "circuit of d0: closed",
    ]


def test_a_probe_that_was_cancelled_says_nothing_and_the_next_one_tries(
    health: WorkerHealth, clock: ManualClock
) -> None:
    for number in range(3):
        health.failed("d0", key(number), "bug")
    clock.advance(1.0)
    health.started("d0", key(7))
    health.released("d0", key(7), served=False, peer="")
    assert health.shunned() == frozenset()
    assert health.state("d0")[0] is HALF_OPEN
    health.started("d0", key(8))
    health.failed("d0", key(8), "again")
    health.released("d0", key(8), served=False, peer="")
    assert health.state("d0") == (OPEN, "again")
    clock.advance(1.5)
    assert health.shunned() == {"d0"}, "twice as long"
    clock.advance(0.5)
    assert health.shunned() == frozenset()
