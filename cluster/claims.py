"""Which request holds which idempotency key: the controller's table. Pure; times are seconds on one monotonic clock.

::

    (free) --claim--> HELD --release | ttl without renewal | its router died or was replaced--> (free)
                       ^ |
                       '-' claim or renewal by the same request

The table is in memory only. A controller that was started anew begins with an empty one and gives nothing before
`opens_at`, by when every router has renewed what it holds, or has given it up (docs/adr/0017).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_SPARE_DEADLINES = 64


class ClaimHolder(NamedTuple):
    """A request on one incarnation of a router. `serial`: of the claim, since a request id may be used again."""

    router_id: str
    incarnation: str
    request_id: str
    serial: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The key is the asker's."""


@dataclass(frozen=True, slots=True)
class Held:
    """The key is another request's."""

    by: ClaimHolder


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing is given at present, whoever may hold the key; `reason` is for the client."""

    reason: str


@dataclass(slots=True, eq=False)
class _Claim:
    key: bytes
    holder: ClaimHolder
    expires: float


class ClaimTable:
    """Keys and their holders.

    Args:
        max_claims: claims at most; more are refused.
        opens_at: before that time no key is given to a request that does not say it has it already.
    """

    def __init__(self, *, max_claims: int, opens_at: float = float("-inf")) -> None:
        assert max_claims >= 1, max_claims
        self._max_claims = max_claims
        self._opens_at = opens_at
        self._claims: dict[bytes, _Claim] = {}
        # One entry per claim, at a time when it may have ended; entries of claims that are gone stay until then.
        self._deadlines: list[tuple[float, int, _Claim]] = []
        self._entries = 0  # ever made: makes entries of equal time comparable

    def __len__(self) -> int:
        """Claims that have not been seen to end."""
        return len(self._claims)

    def claim(self, key: bytes, holder: ClaimHolder, ttl_s: float, now: float) -> Granted | Held | Refused:
        """Give the key to `holder` for `ttl_s` if it is free, or its own already."""
        self._expire(now)
        claim = self._claims.get(key)
        if claim is not None and claim.holder != holder:
            return Held(claim.holder)
        if claim is None and now < self._opens_at:
            wait_s = self._opens_at - now
            return Refused(f"the controller has just been started; idempotency keys are taken in {wait_s:.1f} s")
        return Granted() if self._hold(key, holder, now + ttl_s) else Refused("too many idempotency keys are in use")

    def renew(self, key: bytes, holder: ClaimHolder, ttl_s: float, now: float) -> bool:
        """`holder` says that it has the key, and wants it for `ttl_s` more. False if it is another's by now.

        A key that nobody has is given: this controller may not know it because it was started anew.
        """
        self._expire(now)
        claim = self._claims.get(key)
        if claim is not None and claim.holder != holder:
            return False
        return self._hold(key, holder, now + ttl_s)

    def release(self, key: bytes, holder: ClaimHolder) -> None:
        """`holder` has ended. No effect if the key is not its own."""
        claim = self._claims.get(key)
        if claim is not None and claim.holder == holder:
            del self._claims[key]
            self._compact()

    def forget_router(self, router_id: str, *, but: str = "") -> None:
        """The router's process has died, or another incarnation, `but`, has taken its place: its claims end."""
        gone = [
            key
            for key, claim in self._claims.items()
            if claim.holder.router_id == router_id and claim.holder.incarnation != but
        ]
        for key in gone:
            del self._claims[key]
        self._compact()

    def holders(self, now: float) -> dict[bytes, ClaimHolder]:
        """Who holds what."""
        self._expire(now)
        return {key: claim.holder for key, claim in self._claims.items()}

    def check_integrity(self) -> None:
        """Raise AssertionError if a claim could not expire, or memory is not bounded."""
        due = {id(claim) for _, _, claim in self._deadlines}
        assert len(self._claims) <= self._max_claims
        assert all(id(claim) in due for claim in self._claims.values())
        assert len(self._deadlines) <= 2 * len(self._claims) + _SPARE_DEADLINES, len(self._deadlines)

    def _hold(self, key: bytes, holder: ClaimHolder, expires: float) -> bool:
        """False if there is no room."""
        claim = self._claims.get(key)
        if claim is not None:
            claim.expires = max(claim.expires, expires)
            return True
        if len(self._claims) >= self._max_claims:
            return False
        claim = self._claims[key] = _Claim(key, holder, expires)
        self._put(claim)
        return True

    def _put(self, claim: _Claim) -> None:
        self._entries += 1
        heapq.heappush(self._deadlines, (claim.expires, self._entries, claim))

    def _live(self, claims: Iterable[_Claim]) -> list[_Claim]:
        return [claim for claim in claims if self._claims.get(claim.key) is claim]

    def _compact(self) -> None:
        """Many short requests must not leave an entry each until their time."""
        if len(self._deadlines) <= 2 * len(self._claims) + _SPARE_DEADLINES:
            return
        live = self._live(claim for _, _, claim in self._deadlines)
        self._deadlines = []
        for claim in live:
            self._put(claim)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            claim = heapq.heappop(self._deadlines)[2]
            if self._claims.get(claim.key) is not claim:
                continue
            if claim.expires <= now:
                del self._claims[claim.key]
            else:  # it has been renewed since
                self._put(claim)
        self._compact()
