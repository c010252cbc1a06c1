"""The workers' circuit breakers, fed with what becomes of attempts there."""

from __future__ import annotations

import logging

from pdcore.clock import Clock
from pdcore.types import RequestKey
from router.breaker import Breaker, BreakerPolicy, BreakerState

logger = logging.getLogger(__name__)


class WorkerHealth:
    """A breaker for every incarnation of a worker, as long as it is a member. A change of state is a line in the log.

    Everything happens on one event loop.
    """

    def __init__(self, policy: BreakerPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._breakers: dict[str, tuple[str, Breaker]] = {}  # by worker id, with the incarnation
        self._troubled: dict[str, BreakerState] = {}  # as logged last; closed ones are left out

    # -- what happens --------------------------------------------------------------------------------------------

    def connected(self, worker_id: str, incarnation: str) -> None:
        """A session begins. One that came back is not better for it; a new incarnation has a clean record."""
        known = self._breakers.get(worker_id)
        if known is None or known[0] != incarnation:
            self._breakers[worker_id] = (incarnation, Breaker(self._policy))
            self._troubled.pop(worker_id, None)

    def lost(self, worker_id: str, reason: str, *, for_good: bool) -> None:
        """Its session has ended. `for_good`: it is not a member any more, or another incarnation is."""
        for _, breaker in self._breakers.values():
            breaker.forget_peer(worker_id)  # what failed with it is explained
        if for_good:
            self._breakers.pop(worker_id, None)
            self._troubled.pop(worker_id, None)
        else:
            self.failed(worker_id, None, reason)

    def started(self, worker_id: str, key: RequestKey) -> None:
        """An attempt is sent there."""
        breaker = self._breaker(worker_id)
        if worker_id in self._troubled and breaker is not None:
            if breaker.started(key, self._clock.now()):
                logger.info("circuit of %s: half open, %s tries it", worker_id, key.request_id)
            self._note(worker_id, breaker)

    def released(self, worker_id: str, key: RequestKey, served: bool, peer: str) -> None:
        """An attempt is over there. `served`, `peer`: see `router.effects.Release`."""
        breaker = self._breaker(worker_id)
        if breaker is None:
            return
        if served:
            breaker.served(key, self._clock.now())
            self._note(worker_id, breaker)
        breaker.ended(key)
        for one, other in ((worker_id, peer), (peer, worker_id)):
            if peer and (end := self._breaker(one)) is not None:
                end.forget_peer(other)

    def failed(self, worker_id: str, key: RequestKey | None, reason: str) -> None:
        """An attempt failed there by its own fault, or with its session."""
        breaker = self._breaker(worker_id)
        if breaker is not None:
            breaker.failed(key, reason, self._clock.now())
            self._note(worker_id, breaker)

    def transfer_failed(self, pair: tuple[str, str], key: RequestKey, reason: str, *, only_decode: bool) -> None:
        """KV did not get from the first to the second of `pair`. `only_decode`: no other decode worker is there."""
        now, (prefill, decode) = self._clock.now(), pair
        for worker_id, peer, only_peer in ((prefill, decode, only_decode), (decode, prefill, False)):
            breaker = self._breaker(worker_id)
            if breaker is not None:
                breaker.transfer_failed(key, peer, reason, now, only_peer=only_peer)
                self._note(worker_id, breaker)

    # -- views ---------------------------------------------------------------------------------------------------

    def shunned(self) -> frozenset[str]:
        """Workers that get nothing while another one could take it."""
        if not self._troubled:
            return frozenset()
        now, shunned = self._clock.now(), set()
        for worker_id in list(self._troubled):
            _, breaker = self._breakers[worker_id]
            if breaker.shunned(now):
                shunned.add(worker_id)
            self._note(worker_id, breaker)
        return frozenset(shunned)

    def state(self, worker_id: str) -> tuple[BreakerState, str]:
        """And the last failure, if there was one."""
        breaker = self._breaker(worker_id)
        if breaker is None:
            return BreakerState.CLOSED, ""
        return breaker.state(self._clock.now()), breaker.last_failure

    def _breaker(self, worker_id: str) -> Breaker | None:
        known = self._breakers.get(worker_id)
        return None if known is None else known[1]

    def _note(self, worker_id: str, breaker: Breaker) -> None:
        """Remember and log the state, if it is another one."""
        state = breaker.state(self._clock.now())
        if state is self._troubled.get(worker_id, BreakerState.CLOSED):
            return
        if state is BreakerState.CLOSED:
            del self._troubled[worker_id]
            logger.info("circuit of %s: closed", worker_id)
            return
        self._troubled[worker_id] = state
        if state is BreakerState.OPEN:
            logger.warning("circuit of %s: open: %s", worker_id, breaker.last_failure)
