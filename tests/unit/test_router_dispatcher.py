"""The dispatcher with trackers, queue and pool, between clients and workers in memory: whatever happens in whatever
order, each request has exactly one end, each worker exactly one release, and nothing is left of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.config import ROUTING_POLICIES, RouterConfig
from pdcore.errors import Overloaded, PdserveError, Unavailable
from pdcore.types import FinishReason, PriorityClass, Role, SamplingParams
from protos import admin_pb2, membership_pb2, worker_pb2
from router.dispatcher import Dispatcher, RunningRequest
from router.stream import Terminal
from router.text import StopWords, TextStream
from router.tracker import RequestState
from router.validation import GenerationRequest
from tests.support.memory_worker import MemoryWorker
from tests.support.null_worker import token_of
from tests.support.virtual_loop import VirtualLoop

POOLS = (
    {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE},
    {"p0": Role.PREFILL, "d0": Role.DECODE},
    {"p0": Role.PREFILL, "d0": Role.DECODE, "a0": Role.AGGREGATED},
    {"d0": Role.DECODE},
)
BUSY, DRAINING, BROKEN, TRANSFER, INVALID = (
    worker_pb2.FAILURE_CODE_OVERLOADED,
    worker_pb2.FAILURE_CODE_DRAINING,
    worker_pb2.FAILURE_CODE_INTERNAL,
    worker_pb2.FAILURE_CODE_TRANSFER,
    worker_pb2.FAILURE_CODE_INVALID,
)
MAX_TOKENS = 9


class Letters:
    """A detokenizer: one character for each token."""

    def push(self, token_id: int) -> str:
        return chr(33 + token_id)

    def flush(self) -> str:
        return ""


@dataclass
class Client:
    """One sample's reader. `tokens`, `text`: so far. `ends`: how often it was told that it is over."""

    handle: RunningRequest
    prompt: tuple[int, ...]
    sample: int
    max_tokens: int
    stop: str
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ends: list[Terminal] = field(default_factory=list)

    @cached_property
    def expected(self) -> tuple[list[int], str]:
        """What the undisturbed request gives."""
        tokens = [token_of(self.prompt, index, self.sample) for index in range(self.max_tokens)]
        text = "".join(chr(33 + token) for token in tokens)
        cut = text.find(self.stop) if self.stop else -1
        return (tokens, text) if cut < 0 else (tokens[: cut + len(self.stop)], text[:cut])

    @property
    def has_news(self) -> bool:
        return not self.ends and self.handle._active.stream._news

    def read(self) -> None:
        """All that is there; checks that it goes on where it left off."""
        chunk = self.handle.take()
        assert chunk.index == len(self.tokens)
        self.tokens += chunk.token_ids
        self.text += chunk.text
        tokens, text = self.expected
        assert self.tokens == tokens[: len(self.tokens)], "a gap, a repeat, or another token"
        if chunk.end is not None:
            self.ends.append(chunk.end)
            outcome = chunk.end.outcome
            if outcome.finish in (FinishReason.STOP, FinishReason.LENGTH):
                assert (self.tokens, self.text) == (tokens, text)
            assert (outcome.error is not None) == (outcome.finish is FinishReason.ERROR)
        self.handle.took(len(chunk.token_ids))


class World:
    """A dispatcher, its workers and its clients. `step` lets one thing happen, chosen by a number."""

    def __init__(self, pools: int = 0, window: int = 4, router_id: str = "router", **options: object) -> None:
        self.loop = VirtualLoop()
        settings = {"max_replays": 3, "max_queue": 6, "worker_wait_s": 5.0, "token_window": window, **options}
        config = RouterConfig(router_id, "", "null", "", **settings)  # type: ignore[arg-type]
        self.dispatcher = self.loop.inside(
            lambda: Dispatcher(config, self.loop, incarnation="1", on_change=lambda: None)
        )
        self.bugs: list[Exception] = []
        real = self.dispatcher._bug

        def bug(active: object, error: Exception) -> None:
            self.bugs.append(error)
            real(active, error)  # type: ignore[arg-type]

        self.dispatcher._bug = bug  # type: ignore[method-assign]
        self.workers: dict[str, MemoryWorker] = {}
        for name, role in POOLS[pools].items():
            self.workers[name] = MemoryWorker(name, role, self.dispatcher, self.workers, self.loop.time)
            self.connect(name)
        self.clients: list[Client] = []
        self.calls: dict[str, list[Client]] = {}
        self.draining: asyncio.Future[bool] | None = None
        self.number = 0

    # -- what can happen -----------------------------------------------------------------------------------------

    def connect(self, name: str, restarted: bool = True) -> None:
        worker = self.workers[name]
        if worker.session is not None:
            return
        session = worker.connect(restarted)
        pool = self.dispatcher.pool
        pool._clients[name] = session  # type: ignore[assignment]
        pool._states[name] = membership_pb2.WORKER_STATE_SERVING
        self.loop.inside(lambda: self.dispatcher.on_connected(session))  # type: ignore[arg-type]

    def submit(
        self, n: int = 1, max_tokens: int = MAX_TOKENS, stop_at: int = 0, timeout_s: float | None = None
    ) -> str:
        """A new request, or "" if it is not taken. `stop_at`: a stop string ends with the token at this index."""
        self.number += 1
        name, prompt = f"r{self.number}", (self.number, 7, 7)
        stop = "".join(chr(33 + token_of(prompt, i)) for i in (stop_at - 1, stop_at)) if stop_at else ""
        request = GenerationRequest(
            request_id=name,
            prompt=prompt,
            params=SamplingParams(max_tokens=max_tokens),
            samples=n,
            stops=(stop,) if stop else (),
            priority=PriorityClass.STANDARD,
            tenant="",
        )
        texts = [TextStream(Letters(), StopWords(request.stops)) for _ in range(n)]
        deadline = None if timeout_s is None else self.loop.time() + timeout_s
        try:
            handles = self.loop.inside(lambda: self.dispatcher.submit(request, texts, deadline))
        except (Unavailable, Overloaded):
            return ""
        clients = [Client(handle, prompt, sample, max_tokens, stop) for sample, handle in enumerate(handles)]
        self.clients += clients
        self.calls[name] = clients
        return name

    def shut_down(self, timeout_s: float) -> None:
        if self.draining is None:
            self.draining = self.loop.create_task(self.dispatcher.drain(timeout_s))
            self.loop.pass_time(0.0)

    def read(self, client: Client) -> None:
        if client.has_news:
            self.loop.inside(client.read)

    def progress(self) -> list[Callable[[], None]]:
        """What goes on by itself: commands arrive, tokens are made, news arrive."""
        found: list[Callable[[], None]] = []
        for worker in self.workers.values():
            if worker.session is not None and worker.inbox:
                found.append(worker.take_command)
            found += [lambda worker=worker, job=job: worker.work(job) for job in worker.ready()]  # type: ignore[misc]
            if worker.session is not None and worker.outbox:
                found += [lambda worker=worker: worker.report(False), lambda worker=worker: worker.report(True)]  # type: ignore[misc]
        return found

    def step(self, number: int) -> None:
        """One thing happens."""
        number, kind = divmod(number, 24)
        names = sorted(self.workers)
        worker = self.workers[names[number % len(names)]]
        number //= len(names)
        match kind:
            case 0 | 1:
                self.submit(
                    n=(1, 1, 1, 2, 3)[number % 5],
                    max_tokens=(1, 2, MAX_TOKENS, MAX_TOKENS)[number // 5 % 4],
                    stop_at=(0, 0, 1, 4)[number // 20 % 4],
                    timeout_s=(None, None, 0.5, 3.0)[number // 80 % 4],
                )
            case 2 | 15:
                self.loop.pass_time((0.001, 0.001, 0.001, 0.05, 0.7, 4.0)[number % 6])
            case 3 if worker.session is not None and worker.inbox:
                code = (BUSY, BUSY, BROKEN, INVALID if number % 5 == 0 else BUSY)[number % 4]
                self.loop.inside(lambda: worker.take_command(code))
            case 4 if worker.holds:
                job = list(worker.holds.values())[number % len(worker.holds)]
                worker.fail(job, BUSY if number // 7 % 2 else BROKEN)
            case 16 if sending := [job for job in worker.holds.values() if job.phase == "sending"]:
                worker.fail(sending[number % len(sending)], TRANSFER)
            case 5 if worker.session is not None and number % 3 == 0:
                self.loop.inside(lambda: worker.lose_session("dead"))
            case 6:
                self.connect(worker.worker_id, restarted=number % 2 == 0)
            case 7 if worker.session is not None and number % 4 == 0:
                worker.draining = True
                self.loop.inside(lambda: worker.report(True))
            case 8 if self.calls and number % 3 == 0:
                name = list(self.calls)[number // 3 % len(self.calls)]
                self.loop.inside(lambda: self.dispatcher.cancel(name))
            case 9 if self.clients and number % 3 == 0:
                self.loop.inside(self.clients[number // 3 % len(self.clients)].handle.cancel)
            case 10 if self.calls and number % 3 == 0:  # the client is gone, and with it all its samples
                for client in list(self.calls.values())[number // 3 % len(self.calls)]:
                    self.loop.inside(client.handle.cancel)
            case 11 if number % 40 == 0:
                self.shut_down((0.0, 0.3, 20.0)[number // 40 % 3])
            case 17 if worker.session is not None:
                self.loop.inside(lambda: worker.report(number % 2 == 0))
            case 12 | 13 | 14 if self.clients:
                self.read(self.clients[number % len(self.clients)])
            case _:
                possible = self.progress()
                if possible:
                    self.loop.inside(possible[number % len(possible)])
        self.check()

    # -- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every step."""
        assert not self.bugs, self.bugs
        active = self.dispatcher._active
        holders = {one.tracker.key: one.tracker.holders for one in active.values()}
        for name, worker in self.workers.items():
            if worker.session is None:
                continue
            # Given and not released is what the tracker counts as held: exactly one release each, and none too late.
            for key in worker.session.given:
                assert name in holders.get(key, ()), f"{name} was never told that {key} is over"
            for key in self.dispatcher.pool._books[name].assignments:
                assert name in holders.get(key, ()), f"{key} is in the book of {name}"
        for one in active.values():
            if one.tracker.state is RequestState.DECODING and len(one.tracker.delivered) > one.tracker._base:
                for name in one.tracker.holders & self.dispatcher.pool._books.keys():
                    given = self.dispatcher.pool._books[name].assignments.get(one.tracker.key)
                    assert given is None or not given.prefill_tokens, f"{name} has computed the prompt of {given}"
        waiting = self.dispatcher._queue.waiting()
        assert len(waiting) == len(set(waiting))
        queued = {n for n, one in active.items() if one.tracker.state is RequestState.QUEUED and not one.waits}
        assert set(waiting) == queued
        assert all(one.tracker.state is not RequestState.ENDED for one in active.values())
        assert all(len(client.ends) <= 1 for client in self.clients)

    def settle(self) -> None:
        """Everything goes on until all requests have ended; then nothing is left of them, anywhere."""
        for _ in range(5000):
            for client in self.clients:
                self.read(client)
            possible = self.progress()
            for action in possible[:1]:
                self.loop.inside(action)
                self.check()
            if not possible:
                if not self.dispatcher.request_ids:
                    break
                for worker in self.workers.values():
                    if worker.session is not None:
                        self.loop.inside(lambda worker=worker: worker.report(True))  # type: ignore[misc]
                self.loop.pass_time(0.2)
        for client in self.clients:
            self.read(client)
        self.nothing_is_left()

    def nothing_is_left(self) -> None:
        dispatcher = self.dispatcher
        self.check()
        assert [len(client.ends) for client in self.clients] == [1] * len(self.clients)
        assert not dispatcher._active
        assert not dispatcher._groups
        assert (dispatcher.queued, dispatcher.running) == (0, 0)
        assert not dispatcher._queue._running
        assert dispatcher.counters.finished + dispatcher.counters.failed == len(self.clients)
        for name, worker in self.workers.items():
            if worker.session is not None:
                assert not worker.inbox
                assert not worker.holds, f"{name} holds {list(worker.holds)}"
                assert not worker.session.given
                book = dispatcher.pool._books[name]
                assert (book.assignments, book.prefilling, book.prefill_tokens) == ({}, {}, 0)
                assert (book.new_requests, book.new_prefill_tokens, book.new_blocks) == (0, 0, 0)

    def close(self) -> None:
        """The router stops; no timer stays armed."""
        try:
            self.loop.run_until_complete(self.dispatcher.stop())
            if self.draining is not None:
                self.loop.run_until_complete(self.draining)
            assert not self.loop.armed()
            assert not any(worker.session for worker in self.workers.values())
        finally:
            self.loop.close()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of requests end here, each with its lines in the log."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def play(pools: int, window: int, numbers: list[int], options: dict[str, object]) -> None:
    world = World(pools, window, **options)
    try:
        for number in numbers:
            world.step(number)
        world.settle()
        world.close()
    finally:
        world.loop.close()


OPTIONS = ({}, {"replays_per_s": 0.5, "breaker_failures": 1}, {"max_replays": 20, "max_queue": 100})


@settings(max_examples=60, deadline=None)
@given(
    pools=st.integers(0, len(POOLS) - 1),
    window=st.sampled_from([1, 4]),
    options=st.sampled_from(OPTIONS),
    numbers=st.lists(st.integers(0, 24 * 4 * 1000), min_size=10, max_size=100),
)
def test_any_order_of_things(pools: int, window: int, options: dict[str, object], numbers: list[int]) -> None:
    play(pools, window, numbers, options)


def test_many_orders_of_things() -> None:
    """Longer ones, drawn at random: deeper than hypothesis goes in the time."""
    for seed in range(120):
        dice = random.Random(seed)
        numbers = [dice.randrange(24 * 4 * 1000) for _ in range(dice.choice([60, 150]))]
        try:
            play(seed // 4 % len(POOLS), dice.choice([1, 4]), numbers, dice.choice(OPTIONS))
        except (AssertionError, PdserveError) as error:
            raise AssertionError(f"seed {seed}") from error


# -- cancels in every state -----------------------------------------------------------------------------------------

PATHS = {
    # Steps to the state, the state, and who holds what then: (worker, what it has).
    "queued": ([], RequestState.QUEUED, set()),
    "reserve is sent": (["start"], RequestState.RESERVING, set()),
    "ticket is granted": (["start", "take d0"], RequestState.RESERVING, {("d0", "ticket")}),
    "prefill is sent": (["start", "take d0", "hear d0"], RequestState.PREFILLING, {("d0", "ticket")}),
    "prefilling": (
        ["start", "take d0", "hear d0", "take p0"],
        RequestState.PREFILLING,
        {("d0", "ticket"), ("p0", "prefill")},
    ),
    "sending": (
        ["start", "take d0", "hear d0", "take p0", "work p0", "hear p0"],
        RequestState.TRANSFERRING,
        {("d0", "ticket"), ("p0", "sending")},
    ),
    "committed unheard": (
        ["start", "take d0", "hear d0", "take p0", "work p0", "hear p0", "work p0"],
        RequestState.TRANSFERRING,
        {("d0", "sequence")},
    ),
    "decoding": (
        ["start", "take d0", "hear d0", "take p0", "work p0", "hear p0", "work p0", "work d0", "hear d0"],
        RequestState.DECODING,
        {("d0", "sequence")},
    ),
    "waiting for a replay": (["start", "take d0", "fail d0", "hear d0"], RequestState.QUEUED, set()),
    "replayed": (
        [
            *("start", "take d0", "hear d0", "take p0", "work p0", "hear p0", "work p0", "work d0", "work d0"),
            *("hear d0", "fail d0", "hear d0", "start", "take d0"),
        ],
        RequestState.DECODING,
        {("d0", "sequence")},
    ),
}


def _walk(world: World, path: list[str]) -> None:
    for what in path:
        verb, _, name = what.partition(" ")
        if verb == "start":
            world.loop.pass_time(1.0)
            continue
        worker = world.workers[name]
        if verb == "take":
            while worker.inbox:
                world.loop.inside(worker.take_command)
        elif verb == "hear":
            world.loop.inside(lambda worker=worker: worker.report(True))  # type: ignore[misc]
        elif verb == "work":
            for job in worker.ready():
                worker.work(job)
        else:
            for job in list(worker.holds.values()):
                worker.fail(job, BROKEN)
        world.check()


@pytest.mark.parametrize("how", ["id", "handle", "deadline", "shutdown"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", PATHS)
def test_an_end_from_outside_reaches_whoever_holds_it(name: str, n: int, how: str) -> None:
    path, state, held = PATHS[name]
    world = World(1, window=4)
    for worker in world.workers.values():
        worker.draining = not path  # or it would not wait
        world.loop.inside(lambda worker=worker: worker.report(True))  # type: ignore[misc]
    if not path:
        world.dispatcher.pool._states = dict.fromkeys(world.workers, membership_pb2.WORKER_STATE_SERVING)
        for name_ in ("p0", "d0"):
            world.workers[name_].draining = False
            world.loop.inside(lambda w=world.workers[name_]: w.report(True))  # type: ignore[misc]
        for worker in world.workers.values():  # full, as far as is known
            assert worker.session is not None
            worker.session.load = replace(worker.session.load, running=6, free_blocks=0)
    call = world.submit(n=n, timeout_s=20.0 if how == "deadline" else None)
    _walk(world, path)
    clients = world.calls[call]
    states = {client.handle._active.tracker.state for client in clients}
    assert {(w.worker_id, job.phase) for w in world.workers.values() for job in w.holds.values()} == held
    assert n > 1 or states == {state}
    delivered = [len(client.handle._active.tracker.delivered) for client in clients]

    if how == "id":
        assert world.loop.inside(lambda: world.dispatcher.cancel(call))
    elif how == "handle":
        for client in clients:
            world.loop.inside(client.handle.cancel)
    elif how == "deadline":
        world.loop.pass_time(20.0)
    else:
        world.shut_down(0.0)
    world.check()
    for client in clients:
        world.read(client)
        assert [end.outcome.finish for end in client.ends] == [
            FinishReason.CANCELLED if how in ("id", "handle") else FinishReason.ERROR
        ]
    assert [len(client.tokens) for client in clients] == delivered
    # Nobody goes on by itself: whoever held something was told.
    for worker in world.workers.values():
        while worker.inbox:
            world.loop.inside(worker.take_command)
        assert not worker.holds, (worker.worker_id, list(worker.holds))
    world.settle()
    world.close()


# -- replays are bounded, and lost to nobody ------------------------------------------------------------------------


def _run(world: World, seconds: float, tick: float = 0.1) -> None:
    """Let everything go on for so long; nothing takes time by itself."""
    for _ in range(round(seconds / tick)):
        for _ in range(10_000):
            for client in world.clients:
                world.read(client)
            possible = world.progress()
            if not possible:
                break
            world.loop.inside(possible[0])
        for worker in world.workers.values():
            if worker.session is not None:
                world.loop.inside(lambda worker=worker: worker.report(True))  # type: ignore[misc]
        world.loop.pass_time(tick)
    world.check()


@pytest.mark.parametrize("timeout_s", [None, 0.1])
def test_the_first_replay_starts_at_once_and_the_next_ones_after_a_backoff(timeout_s: float | None) -> None:
    world = World(1, max_replays=4)
    given = _break(world, "d0")
    call = world.submit(timeout_s=timeout_s)
    _run(world, 3.0, tick=0.01)
    assert [end.outcome.finish for end in world.calls[call][0].ends] == [FinishReason.ERROR]
    pauses = [later - earlier for earlier, later in itertools.pairwise(given)]
    assert pauses[0] < 0.03
    if timeout_s is None:
        for pause, full in zip(pauses[1:], (0.1, 0.2, 0.4), strict=True):
            assert full / 2 <= pause <= full + 0.03
    else:
        assert len(given) > 2, "before the deadline there is another try"
        assert 0.03 < pauses[1] <= timeout_s / 2 + 0.03
    world.close()


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_routers_that_see_the_same_draw_by_themselves(policy: str) -> None:
    """Before equal workers, the first requests of many routers do not all go to one; a router repeats itself."""
    routers = [f"router-{number}" for number in range(12)]
    taken: list[str] = []
    for router_id in [*routers, routers[0]]:
        world = World(0, router_id=router_id, policy=policy)
        world.submit(max_tokens=2)
        taken += [name for name, worker in world.workers.items() if worker.inbox]
        world.settle()
        world.close()
    assert set(taken) == {"d0", "d1"}
    assert taken[0] == taken[-1]


@pytest.mark.parametrize("pools", [1, 3])  # where a ticket is refused, and where the request is
def test_a_refused_request_tries_again_well_before_its_deadline(pools: int) -> None:
    world, timeout_s = World(pools), 1.0
    asked: list[float] = []
    take_command = world.workers["d0"].take_command

    def refuse(_: worker_pb2.FailureCode.ValueType | None = None) -> None:
        asked.append(world.loop.time() - began)
        take_command(BUSY)

    world.workers["d0"].take_command = refuse  # type: ignore[method-assign]
    began = world.loop.time()
    call = world.submit(timeout_s=timeout_s)
    _run(world, 2.0, tick=0.005)
    assert [end.outcome.finish for end in world.calls[call][0].ends] == [FinishReason.ERROR]
    assert len(asked) > 5
    for earlier, later in itertools.pairwise(asked):
        assert later - earlier <= (timeout_s - earlier) / 2 + 0.01
    world.close()


def test_a_mass_failure_is_no_storm_and_loses_nobody() -> None:
    world = World(1, max_queue=500, max_replays=1, replays_per_s=1.0, replay_share=0.0)
    starts: list[float] = []
    take_command = world.workers["d0"].take_command

    def take(refuse: worker_pb2.FailureCode.ValueType | None = None) -> None:
        command = world.workers["d0"].inbox[0]
        if command.HasField("reserve") and command.reserve.request.attempt > 1:
            starts.append(world.loop.time())
        take_command(refuse)

    world.workers["d0"].take_command = take  # type: ignore[method-assign]
    for _ in range(25):
        assert world.submit(max_tokens=2)
    # The first attempt of each fails.
    for _ in range(500):
        for job in list(world.workers["d0"].holds.values()):
            if job.phase == "ticket" and job.key.attempt == 1:
                world.workers["d0"].fail(job, BROKEN)
        possible = world.progress()
        if possible:
            world.loop.inside(possible[0])
        if world.dispatcher.counters.replays == 25:
            break
        world.loop.pass_time(0.01)
    assert world.dispatcher.counters.replays == 25
    began = world.loop.time()
    late = world.submit(max_tokens=2)  # does not wait for those that wait for their turn
    _run(world, 2.0)
    assert world.calls[late][0].ends
    _run(world, 30.0)
    world.settle()
    assert all(client.ends[0].outcome.finish is FinishReason.LENGTH for client in world.clients)
    assert all(client.ends[0].timeline.replays <= 1 for client in world.clients)
    assert len(starts) == 25
    # The savings of ten seconds are spent at once; the others have their turn one by one.
    replays = [at for at in starts if at > began]
    assert len(replays) >= 10
    assert all(later - earlier >= 0.8 for earlier, later in itertools.pairwise(replays))
    world.close()


def test_what_starts_pays_for_replays_and_what_comes_back_does_not() -> None:
    world = World(1, replay_share=0.5, replays_per_s=1.0)
    for _ in range(3):
        assert world.submit(max_tokens=2)
    _run(world, 0.1)
    assert all(client.ends for client in world.clients)
    savings = world.dispatcher._replays._budget.balance(world.loop.time())
    assert savings == pytest.approx(10.0 + 3 * 0.5, abs=0.1)
    _break(world, "d0")
    assert world.submit(max_tokens=2)
    _run(world, 3.0)
    savings = world.dispatcher._replays._budget.balance(world.loop.time())
    assert savings < 10.0 + 4 * 0.5 - 1.0
    world.settle()
    world.close()


def test_reports_grow_old() -> None:
    world = World(1)
    world.loop.inside(lambda: world.workers["d0"].report(True))
    world.loop.pass_time(1.5)
    world.loop.inside(lambda: world.workers["p0"].report(True))
    ages = {snapshot.worker_id: snapshot.age_s for snapshot in world.dispatcher.pool.snapshots()}
    assert ages == pytest.approx({"d0": 1.5, "p0": 0.0}, abs=0.01)
    world.close()


def test_the_turn_of_one_that_is_cancelled_goes_to_the_next() -> None:
    world = World(1, max_replays=1, replays_per_s=0.1, replay_share=0.0)  # one is saved up
    calls = [world.submit() for _ in range(3)]

    def fail_all() -> None:
        for _ in range(100):
            for job in list(world.workers["d0"].holds.values()):
                world.workers["d0"].fail(job, BROKEN)
            possible = world.progress()
            if not possible:
                return
            world.loop.inside(possible[0])

    fail_all()
    turns = [world.calls[call][0].handle._active.turn for call in calls]
    assert turns == pytest.approx([0.0, 10.0, 20.0], abs=0.1)
    world.loop.inside(lambda: world.dispatcher.cancel(calls[2]))
    assert world.dispatcher._replays._budget.balance(0.0) == pytest.approx(-1.0, abs=0.01)
    _run(world, 15.0)
    assert all(world.calls[call][0].ends for call in calls)
    world.close()


# -- circuit breakers -----------------------------------------------------------------------------------------------


def _break(world: World, name: str, code: worker_pb2.FailureCode.ValueType = BROKEN) -> list[float]:
    """From now on the worker fails whatever it is given; returns the times at which it was given something."""
    worker = world.workers[name]
    given: list[float] = []
    take = worker.take_command

    def broken(refuse: worker_pb2.FailureCode.ValueType | None = None) -> None:
        work = worker.inbox[0].WhichOneof("command") in ("reserve", "prefill", "generate")
        if work:
            given.append(world.loop.time())
        take(code if work else refuse)

    worker.take_command = broken  # type: ignore[method-assign]
    return given


def _load(world: World, seconds: float) -> list[str]:
    """Ten requests a second."""
    calls = []
    for _ in range(round(10 * seconds)):
        calls.append(world.submit(max_tokens=2))
        _run(world, 0.1)
    return calls


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_worker_that_fails_time_and_again_is_left_alone(name: str) -> None:
    world = World(0, max_replays=3, max_queue=100)
    given = _break(world, name)
    calls = _load(world, 10.0)
    _run(world, 5.0)
    # Five in a row open it; then probes after 1, 2 and 4 seconds, about.
    assert 5 <= len(given) <= 9, given
    assert given[4] < 2.5
    assert all(later - earlier > 0.9 for earlier, later in itertools.pairwise(given[4:]))
    assert all(client.ends[0].outcome.finish is FinishReason.LENGTH for call in calls for client in world.calls[call])
    status = {status.worker.worker_id: status for status in world.dispatcher.pool.statuses()}
    assert status[name].circuit in (admin_pb2.CIRCUIT_STATE_OPEN, admin_pb2.CIRCUIT_STATE_HALF_OPEN)
    assert status[name].last_failure.endswith("refused")
    assert status["p1"].circuit == status["d1"].circuit == admin_pb2.CIRCUIT_STATE_CLOSED
    # It is well again: the next probe is served, and it gets its share.
    del world.workers[name].take_command  # type: ignore[method-assign]
    _run(world, 10.0)
    _load(world, 5.0)
    assert {s.circuit for s in world.dispatcher.pool.statuses()} == {admin_pb2.CIRCUIT_STATE_CLOSED}
    world.settle()
    world.close()


@pytest.mark.parametrize("code", [BUSY, DRAINING])
def test_refusals_open_nothing(code: worker_pb2.FailureCode.ValueType) -> None:
    world = World(0, max_queue=100)
    given = _break(world, "p0", code)
    _load(world, 5.0)
    assert len(given) > 20
    assert world.dispatcher.pool.health.shunned() == frozenset()
    world.settle()
    world.close()


def test_the_only_worker_is_used_whatever_its_circuit() -> None:
    """It fails all but every third request."""
    world = World(3, max_replays=20, max_queue=100, breaker_failures=1)
    worker, count = world.workers["d0"], itertools.count()
    take = worker.take_command

    def mostly_broken(refuse: worker_pb2.FailureCode.ValueType | None = None) -> None:
        work = worker.inbox[0].WhichOneof("command") in ("reserve", "generate")
        take(BROKEN if work and next(count) % 3 else refuse)

    worker.take_command = mostly_broken  # type: ignore[method-assign]
    calls = _load(world, 3.0)
    _run(world, 30.0)
    assert world.dispatcher.pool.health.state("d0")[1].endswith("refused")
    assert all(world.calls[call][0].ends[0].outcome.finish is FinishReason.LENGTH for call in calls)
    world.settle()
    world.close()


def test_prefill_workers_with_open_circuits_leave_the_prompt_to_the_decode_side() -> None:
    world = World(0, max_queue=100, breaker_failures=1)
    given = _break(world, "p0") + _break(world, "p1")
    _load(world, 1.0)
    assert world.dispatcher.pool.health.shunned() == {"p0", "p1"}
    before = len(given)
    call = world.submit(max_tokens=2)
    _run(world, 0.1)
    timeline = world.calls[call][0].ends[0].timeline
    assert (timeline.mode, timeline.replays, len(given)) == ("local", 0, before)
    world.settle()
    world.close()


def test_a_prefill_worker_that_refused_is_asked_again_if_nobody_else_is_left() -> None:
    world = World(1)
    call = world.submit(max_tokens=2)
    _walk(world, ["start", "take d0", "hear d0"])
    prefill = world.workers["p0"]
    world.loop.inside(lambda: prefill.take_command(BUSY))
    world.loop.inside(lambda: prefill.report(True))
    world.loop.inside(lambda: world.workers["d0"].lose_session("dead"))
    _run(world, 1.0)
    (end,) = world.calls[call][0].ends
    assert (end.outcome.finish, end.timeline.decode_worker) == (FinishReason.LENGTH, "p0")
    world.settle()
    world.close()
