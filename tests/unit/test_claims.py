"""The controller's table of idempotency keys, compared with one that scans everything."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.claims import ClaimHolder, ClaimTable, Granted, Held, Refused

OPENS_AT = 5.0
MAX_CLAIMS = 4

KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])
HOLDERS = st.builds(
    ClaimHolder,
    st.sampled_from(["r0", "r1"]),
    st.sampled_from(["i0", "i1"]),
    st.sampled_from(["x", "y"]),
    st.integers(1, 2),
)
TTLS = st.sampled_from([0.5, 1.0, 3.0])


def holder(router_id: str = "r0", incarnation: str = "i0", request_id: str = "x", serial: int = 1) -> ClaimHolder:
    return ClaimHolder(router_id, incarnation, request_id, serial)


class ClaimMachine(RuleBasedStateMachine):
    """`model`: key -> (holder, when it ends), scanned at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = ClaimTable(max_claims=MAX_CLAIMS, opens_at=OPENS_AT)
        self.model: dict[bytes, tuple[ClaimHolder, float]] = {}

    def expire(self) -> None:
        self.model = {key: (who, ends) for key, (who, ends) in self.model.items() if ends > self.now}

    def hold(self, key: bytes, who: ClaimHolder, ttl_s: float) -> bool:
        if key in self.model:
            self.model[key] = (who, max(self.model[key][1], self.now + ttl_s))
            return True
        if len(self.model) == MAX_CLAIMS:
            return False
        self.model[key] = (who, self.now + ttl_s)
        return True

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=KEYS, who=HOLDERS, ttl_s=TTLS)
    def claim(self, key: bytes, who: ClaimHolder, ttl_s: float) -> None:
        self.expire()
        answer = self.table.claim(key, who, ttl_s, self.now)
        held = self.model.get(key)
        if held is not None and held[0] != who:
            assert answer == Held(held[0])
        elif held is None and self.now < OPENS_AT:
            assert isinstance(answer, Refused)
            assert "just been started" in answer.reason
        elif self.hold(key, who, ttl_s):
            assert answer == Granted()
        else:
            assert answer == Refused("too many idempotency keys are in use")

    @rule(key=KEYS, who=HOLDERS, ttl_s=TTLS)
    def renew(self, key: bytes, who: ClaimHolder, ttl_s: float) -> None:
        self.expire()
        renewed = self.table.renew(key, who, ttl_s, self.now)
        held = self.model.get(key)
        assert renewed == ((held is None or held[0] == who) and self.hold(key, who, ttl_s))

    @rule(key=KEYS, who=HOLDERS)
    def release(self, key: bytes, who: ClaimHolder) -> None:
        self.table.release(key, who)
        if key in self.model and self.model[key][0] == who:
            del self.model[key]

    @rule(router_id=st.sampled_from(["r0", "r1"]), but=st.sampled_from(["", "i1"]))
    def router_is_gone(self, router_id: str, but: str) -> None:
        self.table.forget_router(router_id, but=but)
        self.model = {
            key: (who, ends)
            for key, (who, ends) in self.model.items()
            if who.router_id != router_id or who.incarnation == but
        }

    @invariant()
    def agree(self) -> None:
        self.expire()
        assert self.table.holders(self.now) == {key: who for key, (who, _) in self.model.items()}
        self.table.check_integrity()


TestClaimMachine = ClaimMachine.TestCase
TestClaimMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_memory_stays_bounded_over_many_short_requests() -> None:
    table = ClaimTable(max_claims=10)
    for number in range(5000):
        key = number.to_bytes(4, "big")
        assert table.claim(key, holder(serial=number), 1e6, 0.0) == Granted()
        table.release(key, holder(serial=number))
        table.check_integrity()
    assert len(table) == 0


def test_a_claim_that_is_renewed_outlives_its_first_time() -> None:
    table = ClaimTable(max_claims=10)
    table.claim(b"k", holder(), 1.0, 0.0)
    for tenth in range(1, 50):
        assert table.renew(b"k", holder(), 1.0, tenth / 10)
    assert table.claim(b"k", holder(request_id="y"), 1.0, 5.0) == Held(holder())
    assert table.claim(b"k", holder(request_id="y"), 1.0, 5.95) == Granted()
    assert not table.renew(b"k", holder(), 1.0, 6.0), "too late"


def test_a_late_release_does_not_free_what_a_request_of_the_same_id_has_claimed_since() -> None:
    table = ClaimTable(max_claims=10)
    table.claim(b"k", holder(serial=1), 1.0, 0.0)
    table.release(b"k", holder(serial=1))
    table.claim(b"k", holder(serial=2), 1.0, 0.1)
    table.release(b"k", holder(serial=1))
    assert table.holders(0.2) == {b"k": holder(serial=2)}
