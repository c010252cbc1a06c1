"""What tenants may ask of this router: requests and tokens a minute, and requests at a time. Pure.

Each rate is a token bucket: it holds a minute's worth, fills up at the rate, and a request takes from it::

    requests a minute    1
    tokens a minute      prompt + max_tokens of every sample; what was not used comes back at the end

A request goes in when the bucket has what it takes, or is full: one that takes more than a minute's worth waits for a
full bucket and leaves a debt. So over any time of `t` minutes a tenant gets at most its rate times ``t + 1``, and at
most one such request beside.

Tenants that have no entry of their own each have the limits of `OTHERS`. The state of those is bounded: of more than
`max_tenants`, those without a running request that asked longest ago are forgotten, as if their buckets were full.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdcore.classes import OTHERS, TenantLimits
from pdcore.types import PriorityClass

MAX_TENANTS = 4096
CONCURRENT_RETRY_S = 1.0
"""Hint to a tenant whose requests are all running: when one of them ends, nobody knows."""


class OverLimit(NamedTuple):
    """Why a request may not go in. `limit`: what is used up, and its value. `retry_after_s`: seconds."""

    limit: str
    retry_after_s: float


@dataclass(slots=True, eq=False)
class Charge:
    """What an admitted request took. `open`: it is still to be settled."""

    tenant: str
    tokens: int
    open: bool = True


@dataclass(slots=True)
class _Bucket:
    """`capacity` and `level` in what it holds, `rate` per second, `at` in seconds; a rate of 0 is no limit."""

    capacity: float
    at: float
    level: float = 0.0

    def __post_init__(self) -> None:
        self.level = self.capacity

    def wait_s(self, wanted: float, now: float) -> float:
        """Seconds until so much may be taken; 0 if now."""
        if not self.capacity:
            return 0.0
        self._fill(now)
        lacking = min(wanted, self.capacity) - self.level
        return max(0.0, lacking * 60.0 / self.capacity)

    def take(self, wanted: float, now: float) -> None:
        """Take it, or give it back if negative."""
        if self.capacity:
            self._fill(now)
            self.level = min(self.capacity, self.level - wanted)

    def _fill(self, now: float) -> None:
        self.level = min(self.capacity, self.level + (now - self.at) * self.capacity / 60.0)
        self.at = now


@dataclass(slots=True)
class _State:
    limits: TenantLimits
    requests: _Bucket
    tokens: _Bucket
    running: int = 0


class TenantBook:
    """Who has used what. Not thread-safe; `now` is in seconds and never goes back.

    ::

        over_limit --> admit --> settle, once for each admitted request
    """

    def __init__(self, limits: Sequence[TenantLimits], max_tenants: int = MAX_TENANTS) -> None:
        self._limits = {entry.tenant: entry for entry in limits}
        self._others = self._limits.pop(OTHERS, TenantLimits(OTHERS))
        self._max_tenants = max_tenants
        self._named: dict[str, _State] = {}  # with an entry of their own: as many as that
        self._rest: OrderedDict[str, _State] = OrderedDict()  # who asked longest ago first

    def default_class(self, tenant: str) -> PriorityClass:
        """Of the tenant's requests that name none."""
        return self._limits.get(tenant, self._others).default_class

    def over_limit(self, tenant: str, tokens: int, now: float) -> OverLimit | None:
        """Whether a request of so many tokens may not go in now; counts nothing."""
        state = self._state(tenant, now)
        if state is None:
            return None
        limits = state.limits
        over = []
        if limits.max_concurrent and state.running >= limits.max_concurrent:
            over.append(OverLimit(f"{limits.max_concurrent} requests at a time", CONCURRENT_RETRY_S))
        wait_s = state.requests.wait_s(1, now)
        if wait_s > 0:
            over.append(OverLimit(f"{limits.requests_per_minute} requests a minute", wait_s))
        wait_s = state.tokens.wait_s(tokens, now)
        if wait_s > 0:
            over.append(OverLimit(f"{limits.tokens_per_minute} tokens a minute", wait_s))
        return max(over, key=lambda entry: entry.retry_after_s, default=None)

    def admit(self, tenant: str, tokens: int, now: float) -> Charge:
        """A request goes in. The caller has asked `over_limit` with the same arguments."""
        state = self._state(tenant, now)
        if state is not None:
            state.running += 1
            state.requests.take(1, now)
            state.tokens.take(tokens, now)
        return Charge(tenant, tokens)

    def settle(self, charge: Charge, used: int, now: float, *, counts: bool = True) -> None:
        """A request has ended and used so many tokens. If it does not count, it was never there. Idempotent."""
        if not charge.open:
            return
        charge.open = False
        state = self._state(charge.tenant, now)
        if state is None:
            return
        state.running -= 1
        assert state.running >= 0, charge.tenant
        state.tokens.take(used - charge.tokens, now)
        if not counts:
            state.requests.take(-1, now)

    def running(self, tenant: str) -> int:
        """The tenant's requests that have not ended, as far as they are counted."""
        state = self._named.get(tenant) or self._rest.get(tenant)
        return 0 if state is None else state.running

    def __len__(self) -> int:
        """Tenants of which something is remembered."""
        return len(self._named) + len(self._rest)

    def _state(self, tenant: str, now: float) -> _State | None:
        """None if the tenant has no limits."""
        limits = self._limits.get(tenant, self._others)
        if not limits.limited:
            return None
        states = self._named if tenant in self._limits else self._rest
        state = states.get(tenant)
        if state is None:
            state = _State(limits, _Bucket(limits.requests_per_minute, now), _Bucket(limits.tokens_per_minute, now))
            states[tenant] = state
        if tenant not in self._limits:
            self._rest.move_to_end(tenant)
            self._forget()
        return state

    def _forget(self) -> None:
        """Keep at most `max_tenants`, and those with running requests."""
        for tenant in list(self._rest) if len(self._rest) > self._max_tenants else ():
            if len(self._rest) <= self._max_tenants or tenant == next(reversed(self._rest)):
                break
            if not self._rest[tenant].running:
                del self._rest[tenant]
