"""The workers that a router uses: sessions with the members, their loads, and what this router has given to each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from pdcore.clock import Clock
from pdcore.config import CODECS, RouterConfig
from pdcore.errors import Unavailable
from pdcore.types import ModelInfo, PriorityClass, RequestKey, Role
from protos import admin_pb2, membership_pb2, worker_pb2
from protos.convert import load_to_proto
from router.breaker import BreakerPolicy, BreakerState
from router.fleet import Fleet
from router.native.library import routing_library
from router.snapshot import WorkerSnapshot
from router.validation import Limits
from router.worker_book import WorkerBook
from router.worker_client import (
    NO_LONGER_USED,
    RouterIdentity,
    SessionListener,
    SessionTiming,
    WorkerClient,
    WorkerFacts,
)
from router.worker_health import WorkerHealth
from router.worker_sets import WorkerNumbers
from security.internal import PLAIN, Internal

_CIRCUITS = {
    BreakerState.CLOSED: admin_pb2.CIRCUIT_STATE_CLOSED,
    BreakerState.OPEN: admin_pb2.CIRCUIT_STATE_OPEN,
    BreakerState.HALF_OPEN: admin_pb2.CIRCUIT_STATE_HALF_OPEN,
}

MAX_PROBLEM_CHARS = 1000

MAX_CREDIT_WAIT_S = 0.01
FASTEST_STREAM = 5000.0
"""Tokens a second. What is left of a window while its return waits keeps such a stream going."""


def credit_wait_s(token_window: int) -> float:
    """Seconds for which returned tokens may wait for company, so that one message takes those of many requests.

    They are returned a quarter of the window at a time (see `RequestTracker`), so three are left meanwhile.
    """
    return min(MAX_CREDIT_WAIT_S, 0.75 * token_window / FASTEST_STREAM)


class WorkerPool:
    """Holds one `WorkerClient` per member, by worker id.

    Args:
        listener: gets the sessions' news. on_change: called after a worker came, went, or began to drain.
        internal: how workers are called.
    """

    def __init__(
        self,
        config: RouterConfig,
        incarnation: str,
        listener: SessionListener,
        clock: Clock,
        on_change: Callable[[], None],
        *,
        internal: Internal = PLAIN,
    ) -> None:
        self._config = config
        self._internal = internal
        self._identity = RouterIdentity(config.router_id, incarnation, config.served_name)
        self._timing = SessionTiming(config.heartbeat_s, config.dead_after_s, credit_wait_s(config.token_window))
        self._listener = listener
        self._clock = clock
        self._on_change = on_change
        self.health = WorkerHealth(BreakerPolicy(failures=config.breaker_failures), clock)
        self._clients: dict[str, WorkerClient] = {}
        self._states: dict[str, membership_pb2.WorkerState.ValueType] = {}
        self._books: dict[str, WorkerBook] = {}
        self._exchanges: dict[str, asyncio.Task[None]] = {}
        self.numbers = WorkerNumbers()  # of those with a session
        self._fleet = Fleet()
        routing_library()  # built now if need be, not while the first request waits
        self._changed: set[str] = set()  # whose rows in it are not true any more
        self._limits: Limits | None = None  # None if they are to be found again

    # -- members -------------------------------------------------------------------------------------------------

    def on_members(self, members: Mapping[str, membership_pb2.Member]) -> None:
        """The list of members: connect to new ones, drop those that vanished, replace those that restarted."""
        serving = membership_pb2.WORKER_STATE_SERVING
        self._states = {worker_id: member.state for worker_id, member in members.items()}
        self._changed.update(self._books)
        self._limits = None
        for worker_id in self._clients.keys() | members.keys():
            client, member = self._clients.get(worker_id), members.get(worker_id)
            if client is not None and member is not None and client.member.incarnation == member.worker.incarnation:
                continue
            old = self._clients.pop(worker_id, None)
            new = self._client(member.worker) if member is not None and member.state == serving else None
            if new is not None:
                self._clients[worker_id] = new
            if old is not None or new is not None:
                previous = self._exchanges.get(worker_id)
                self._exchanges[worker_id] = asyncio.create_task(self._exchange(previous, old, new))
        self._on_change()

    def sessions(self) -> tuple[int, str]:
        """With how many workers there are some, and why not with the others, in a few words."""
        lacking = [f"{name}: {client.problem}" for name, client in self._clients.items() if not client.connected]
        return len(self._clients) - len(lacking), "; ".join(lacking)[:MAX_PROBLEM_CHARS]

    def _client(self, member: membership_pb2.WorkerDescription) -> WorkerClient:
        return WorkerClient(
            member,
            identity=self._identity,
            timing=self._timing,
            listener=self._listener,
            clock=self._clock,
            max_message_bytes=self._config.max_message_bytes,
            internal=self._internal,
        )

    async def _exchange(
        self, previous: asyncio.Task[None] | None, old: WorkerClient | None, new: WorkerClient | None
    ) -> None:
        """One after the other per worker id, so that a session's end is known before its successor begins."""
        if previous is not None:
            await previous
        if old is not None:
            await old.stop()
        if new is not None and self._clients.get(new.worker_id) is new:
            new.start()

    async def stop(self) -> None:
        """End all sessions; every worker releases what this router had there."""
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.stop() for client in clients), *self._exchanges.values())

    # -- sessions ------------------------------------------------------------------------------------------------

    def connected(self, client: WorkerClient) -> None:
        self._books[client.worker_id] = WorkerBook()
        self.health.connected(client.worker_id, client.member.incarnation)
        self.numbers.take(client.worker_id)
        self._changed.add(client.worker_id)
        self._limits = None
        self._on_change()

    def lost(self, client: WorkerClient, reason: str) -> None:
        if self._books.pop(client.worker_id, None) is not None:
            self._fleet.remove(client.worker_id)
            self.numbers.release(client.worker_id)
            self._changed.discard(client.worker_id)
        self._limits = None
        self.health.lost(client.worker_id, reason, for_good=reason == NO_LONGER_USED)
        self._on_change()

    def reported(self, client: WorkerClient) -> None:
        """A report has come: it contains what was sent before it, about."""
        book = self._books[client.worker_id]
        book.reported()
        self._changed.add(client.worker_id)
        if client.draining and not book.draining:
            book.draining = True
            self._on_change()

    def send(self, worker_id: str, command: worker_pb2.SessionCommand) -> None:
        client = self._clients.get(worker_id)
        if client is not None:
            client.send(command)

    def credit(self, worker_id: str, key: RequestKey, tokens: int) -> None:
        client = self._clients.get(worker_id)
        if client is not None:
            client.credit(key, tokens)

    # -- what is given to whom -----------------------------------------------------------------------------------

    def assign(
        self,
        worker_id: str,
        key: RequestKey,
        *,
        prefill_tokens: int,
        cache_tokens: int,
        priority: PriorityClass,
    ) -> None:
        """A request is sent to a worker, or is about to be."""
        client, book = self._clients.get(worker_id), self._books.get(worker_id)
        if client is not None and client.facts is not None and book is not None:
            book.assign(key, prefill_tokens, client.facts.geometry.blocks_for(cache_tokens), priority)
            self._changed.add(worker_id)
            self.health.started(worker_id, key)

    def prefill_computed(self, worker_id: str, key: RequestKey) -> None:
        book = self._books.get(worker_id)
        if book is not None:
            book.prefill_computed(key)
            self._changed.add(worker_id)

    def release(self, worker_id: str, key: RequestKey, *, served: bool = False, peer: str = "") -> None:
        """The attempt is over there; see `router.effects.Release`."""
        book = self._books.get(worker_id)
        if book is not None:
            book.release(key)
            self._changed.add(worker_id)
        self.health.released(worker_id, key, served, peer)

    def failed(self, worker_id: str, key: RequestKey, reason: str, pair: tuple[str, str] | None) -> None:
        """An attempt was lost; see `router.effects.WorkerFailed`."""
        if pair is None:
            self.health.failed(worker_id, key, reason)
            return
        decode = [c for c in self._clients.values() if c.facts is not None and c.facts.role is Role.DECODE]
        self.health.transfer_failed(pair, key, reason, only_decode=len(decode) < 2)

    # -- views ---------------------------------------------------------------------------------------------------

    def fleet(self) -> Fleet:
        """The workers that are connected and take new requests, settled for now. To be read before anything changes.

        What they say of themselves changes on the way only: a worker that drains says so in a report.
        """
        now = self._clock.now()
        self._fleet.reserve(len(self.numbers))
        for worker_id in self._changed:
            client = self._clients.get(worker_id)
            row = None if client is None else self._snapshot(client, now)
            if row is None:
                self._fleet.remove(worker_id)
            else:
                self._fleet.put(self.numbers.take(worker_id), row, now)
        self._changed.clear()
        self._fleet.settle(now)
        return self._fleet

    def snapshots(self) -> list[WorkerSnapshot]:
        """The workers that are connected and take new requests."""
        now = self._clock.now()
        return [row for client in self._clients.values() if (row := self._snapshot(client, now)) is not None]

    def snapshot(self, worker_id: str) -> WorkerSnapshot | None:
        """None if the worker is not connected or takes nothing new."""
        client = self._clients.get(worker_id)
        return None if client is None else self._snapshot(client, self._clock.now())

    def _takes_requests(self, client: WorkerClient) -> WorkerFacts | None:
        """Facts of a worker that is connected and takes new requests; None of others."""
        serving = self._states.get(client.worker_id) == membership_pb2.WORKER_STATE_SERVING
        return client.facts if serving and not client.draining else None

    def _snapshot(self, client: WorkerClient, now: float) -> WorkerSnapshot | None:
        facts = self._takes_requests(client)
        if facts is None:
            return None
        worker_id = client.worker_id
        book = self._books[worker_id]
        return WorkerSnapshot(
            worker_id=worker_id,
            role=facts.role,
            load=client.load,
            block_size=facts.geometry.block_size,
            max_requests=min(self._config.max_running_per_worker, facts.max_num_seqs),
            # About two steps of work: one that runs, and one that is ready when it ends.
            max_queued_prefill_tokens=self._config.max_queued_prefill_tokens or 2 * facts.max_num_batched_tokens,
            mine=book.in_flight(),
            decisions=book.decisions,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            age_s=max(0.0, now - client.load_at),
        )

    @property
    def route_possible(self) -> bool:
        """Whether a worker is connected and takes new requests: in need, each can run them as a whole."""
        # Asked for every request, so no row is made anew for it.
        return any(self._takes_requests(client) is not None for client in self._clients.values())

    def role_of(self, worker_id: str) -> Role | None:
        """None if the worker is not connected."""
        client = self._clients.get(worker_id)
        return None if client is None or client.facts is None else client.facts.role

    @property
    def degraded(self) -> str:
        """What the cluster does without, and how it serves in spite of it; empty if all is well."""
        fleet = self.fleet()
        prefill, decode, aggregated = (bool(pool.any()) for pool in (fleet.prefill, fleet.decode, fleet.aggregated))
        if prefill and not decode:
            others = "aggregated" if aggregated else "prefill"
            return f"no decode worker serves: {others} workers run requests as a whole"
        if decode and not prefill:
            others = "decode and aggregated" if aggregated else "decode"
            return f"no prefill worker serves: {others} workers run requests as a whole"
        return ""

    @property
    def model(self) -> ModelInfo | None:
        """The model of the connected workers; None while there is none."""
        return next((c.facts.model for c in self._clients.values() if c.facts is not None), None)

    def limits(self) -> Limits | None:
        """What a request may ask for; None while no worker is connected.

        The largest KV pool counts: the policy gives a request only to workers that hold it. Prefill workers run
        requests as a whole only if nobody else could.
        """
        if self._limits is None:  # every request asks, and there may be a thousand workers
            self._limits = self._limits_of_workers()
        return self._limits

    def _limits_of_workers(self) -> Limits | None:
        everybody = [c.facts for c in self._clients.values() if c.facts is not None]
        facts = [facts for facts in everybody if facts.role is not Role.PREFILL] or everybody
        if not facts:
            return None
        pool_tokens = max(f.geometry.num_blocks * f.geometry.block_size for f in facts)
        model_tokens = min(f.model.max_model_len for f in facts)
        return Limits(min(model_tokens, pool_tokens), facts[0].model.vocab_size, self._kv_codecs())

    def _kv_codecs(self) -> frozenset[str]:
        """Codecs that KV may go by, whichever workers are chosen; all there are while no two can exchange KV."""
        facts = [
            c.facts for c in self._clients.values() if c.facts is not None and c.facts.role is not Role.AGGREGATED
        ]
        if {f.role for f in facts} != {Role.PREFILL, Role.DECODE}:
            return frozenset(CODECS)
        return frozenset.intersection(*(f.kv_codecs for f in facts))

    def statuses(self) -> list[admin_pb2.WorkerStatus]:
        """Every member that the router knows, connected or not, by worker id."""
        now = self._clock.now()
        return [self._status(client, now) for _, client in sorted(self._clients.items())]

    def _status(self, client: WorkerClient, now: float) -> admin_pb2.WorkerStatus:
        circuit, last_failure = self.health.state(client.worker_id)
        return admin_pb2.WorkerStatus(
            worker=client.member,
            state=self._state(client),
            connected=client.connected,
            problem=client.problem,
            load=load_to_proto(client.load) if client.connected else None,
            load_age_ms=1000 * (now - client.load_at) if client.connected else 0.0,
            circuit=_CIRCUITS[circuit],
            last_failure=last_failure,
        )

    async def last_steps(self, count: int) -> list[admin_pb2.WorkerSteps]:
        """What the last `count` steps of each worker did, or why it does not say, by worker id."""
        clients = [client for _, client in sorted(self._clients.items())]
        return list(await asyncio.gather(*(self._last_steps(client, count) for client in clients)))

    async def _last_steps(self, client: WorkerClient, count: int) -> admin_pb2.WorkerSteps:
        said = admin_pb2.WorkerSteps(worker_id=client.worker_id, role=client.member.role)
        try:
            said.steps.extend((await client.last_steps(count)).steps)
        except Unavailable as error:
            said.problem = str(error)
        return said

    def _state(self, client: WorkerClient) -> membership_pb2.WorkerState.ValueType:
        draining = client.draining or client.worker_id not in self._states
        return membership_pb2.WORKER_STATE_DRAINING if draining else self._states[client.worker_id]
