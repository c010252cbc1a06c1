"""The life of requests through a real router, over real gRPC, with null workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import uvloop

from pdcore.config import KvCodecByClass, QueueConfig
from pdcore.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded, ReplaysExhausted, Unavailable
from pdcore.types import RequestKey, Role
from protos import worker_pb2
from router import calls
from router.client import AsyncClient, Sampling
from router.tracker import RequestTracker
from router.validation import validate
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.null_worker import NullWorker, token_of
from tests.support.tiny_model import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy.:DeprecationWarning")


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """What routers run on."""
    return uvloop.EventLoopPolicy()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


class Gate:
    """A hook that holds requests at one point until it is opened."""

    def __init__(self, point: str, index: int = 0, only: str = "") -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self.order: list[str] = []
        self._point, self._index, self._only = point, index, only

    async def __call__(self, point: str, key: RequestKey, index: int) -> None:
        if point == self._point and index == self._index and self._only in ("", key.request_id):
            self.order.append(key.request_id)
            self.reached.set()
            await self.opened.wait()


class Crash:
    """A hook that lets the worker vanish at one point, once."""

    def __init__(self, worker: NullWorker, point: str, index: int = 0) -> None:
        self._worker, self._point, self._index = worker, point, index
        self.done = False
        worker.hook = self

    async def __call__(self, point: str, key: RequestKey, index: int) -> None:
        if point == self._point and index == self._index and not self.done:
            self.done = True
            await self._worker.crash()
            await asyncio.sleep(60)


def expected(prompt: list[int], count: int, sample: int = 0) -> tuple[int, ...]:
    return tuple(token_of(tuple(prompt), index, sample) for index in range(count))


# -- the normal path ------------------------------------------------------------------------------------------------


async def test_prefill_then_decode(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        ids = await cluster.client.tokenize("hello")
        answer = await cluster.client.complete("hello", Sampling(max_tokens=20), request_id="r1")
        assert answer.token_ids == expected(ids, 20)
        assert answer.text == await cluster.client.detokenize(answer.token_ids)
        assert (answer.request_id, answer.finish_reason) == ("r1", "length")
        usage, timeline = answer.end.usage, answer.end.timeline
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 20, 0)
        assert (timeline.mode, timeline.reason) == ("disaggregated", "prefill_pool_serves")
        assert (timeline.prefill_worker, timeline.decode_worker, timeline.replays) == ("p0", "d0", 0)
        assert timeline.kv.wire_bytes == 100
        assert (timeline.prefill_queued_ms, timeline.prefill_ms) == (1.0, 2.0)
        assert 0 <= timeline.queued_ms <= timeline.ttft_ms <= timeline.total_ms
        assert timeline.second_token_ms > 0
        assert timeline.tpot_ms > 0
        await cluster.empty()
        assert cluster["p0"].commands["abort", "r1"] == cluster["d0"].commands["abort", "r1"] == 0
        assert cluster["d0"].commands["generate", "r1"] == 0


async def test_codec_and_salt_reach_both_workers(model: Path) -> None:
    """The client's word, else the class's; and what the workers say of the codec comes back."""
    workers = [
        NullWorker("p0", Role.PREFILL, codecs=("raw", "q8")),
        NullWorker("d0", Role.DECODE, codecs=("raw", "q8")),
    ]
    by_class = KvCodecByClass(batch="q8", interactive="raw")
    async with NullCluster(model, workers, kv_codec_by_class=by_class) as cluster:
        seen: dict[str, set[tuple[str, str]]] = {}

        async def look(point: str, key: RequestKey, _: int) -> None:
            for worker in workers:
                for held, job in worker.held.items():
                    seen.setdefault(held.request_id, set()).add((job.request.kv_codec, job.request.cache_salt))

        for worker in workers:
            worker.hook = look
        for name, fields in {
            "asked": {"kv_codec": "raw", "priority": "batch", "cache_salt": "s"},
            "batch": {"priority": "batch"},
            "interactive": {"priority": "interactive"},
            "standard": {},
        }.items():
            answer = await cluster.client.complete([1, 2], Sampling(max_tokens=2), request_id=name, **fields)
            assert (answer.end.timeline.kv.codec, answer.end.timeline.kv.codec_reason) == ("raw", "all it has")
        ids = {key.rpartition("/")[2]: values for key, values in seen.items()}
        assert ids == {
            "asked": {("raw", "s")},
            "batch": {("q8", "")},
            "interactive": {("raw", "")},
            "standard": {("", "")},
        }


async def test_a_codec_that_a_worker_lacks_is_refused(model: Path) -> None:
    workers = [
        NullWorker("p0", Role.PREFILL, codecs=("raw", "zstd", "q8")),
        NullWorker("d0", Role.DECODE, codecs=("raw", "zstd", "q8")),
        NullWorker("d1", Role.DECODE, codecs=("raw", "zstd")),
    ]
    async with NullCluster(model, workers) as cluster:
        for codec in ("q8", "q9"):
            with pytest.raises(InvalidRequest, match=f"kv_codec: must be one of auto, raw, zstd, got '{codec}'"):
                await cluster.client.complete([1, 2], Sampling(max_tokens=2), kv_codec=codec)
        await cluster.empty()
    async with NullCluster(model, [NullWorker("a0", Role.AGGREGATED)]) as cluster:
        answer = await cluster.client.complete([1, 2], Sampling(max_tokens=2), kv_codec="q8")
        assert answer.end.timeline.mode == "local"


async def test_the_first_token_comes_before_the_transfer(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        gate = cluster["p0"].hook = Gate("manifest")
        async with aclosing(cluster.client.generate([1, 2, 3], Sampling(max_tokens=3))) as events:
            first = await anext(events)
            assert list(first.token_ids) == [token_of((1, 2, 3), 0)]
            gate.opened.set()
            rest = [event async for event in events]
        assert [token for event in rest for token in event.token_ids] == list(expected([1, 2, 3], 3)[1:])
        assert next(event.token_index for event in rest) == 1


async def test_200_prompts_at_once_each_get_their_own_tokens(model: Path) -> None:
    async with NullCluster(
        model, [*pair(), NullWorker("p1", Role.PREFILL), NullWorker("d1", Role.DECODE)]
    ) as cluster:

        async def one(number: int) -> None:
            prompt = [number % 200, number // 200, *range(number % 7)]
            answer = await cluster.client.complete(prompt, Sampling(max_tokens=1 + number % 9))
            assert answer.token_ids == expected(prompt, 1 + number % 9)
            assert answer.end.usage.prompt_tokens == len(prompt)

        await asyncio.gather(*(one(number) for number in range(200)))
        await cluster.empty()
        prefills = {
            name: sum(n for (c, _), n in w.commands.items() if c == "prefill") for name, w in cluster.workers.items()
        }
        assert prefills["p0"] + prefills["p1"] == 200
        assert min(prefills["p0"], prefills["p1"]) >= 60


async def test_one_token_commits_nothing(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        answer = await cluster.client.complete([5, 6], Sampling(max_tokens=1), request_id="one")
        assert answer.token_ids == expected([5, 6], 1)
        assert answer.end.timeline.decode_worker == ""
        assert not answer.end.timeline.HasField("kv")
        await cluster.empty()
        assert cluster["d0"].commands["abort", "one"] == 1
        assert cluster["p0"].commands["abort", "one"] == 0


async def test_a_stop_token_is_in_the_ids_but_not_in_the_text(model: Path) -> None:
    tokens = [40, 41, 257, 42]
    workers = pair(script=lambda request, index: tokens[index])
    async with NullCluster(model, workers) as cluster:
        answer = await cluster.client.complete([1], Sampling(max_tokens=4))
        assert (answer.token_ids, answer.finish_reason) == ((40, 41, 257), "stop")
        assert answer.text == await cluster.client.detokenize([40, 41])
        ignoring = await cluster.client.complete([1], Sampling(max_tokens=4, ignore_eos=True))
        assert (ignoring.token_ids, ignoring.finish_reason) == ((40, 41, 257, 42), "length")
        own = await cluster.client.complete([1], Sampling(max_tokens=4, stop_token_ids=[41]))
        assert (own.token_ids, own.text) == ((40, 41), await cluster.client.detokenize([40]))


@pytest.mark.parametrize("cut", ["He", "llo wor", "world"])
async def test_a_stop_string_ends_the_request_everywhere(model: Path, cut: str) -> None:
    """The stop string begins in the first token, spans several, or comes late; what follows is not counted."""
    async with NullCluster(model, pair()) as cluster:
        ids = await cluster.client.tokenize("Hello world and more")
        for worker in cluster.workers.values():
            worker.script = lambda request, index: ids[index % len(ids)]
        answer = await cluster.client.complete(
            [1], Sampling(max_tokens=200, stop=["never", cut]), request_id="stopped"
        )
        assert answer.finish_reason == "stop"
        assert answer.text == "Hello world and more".split(cut)[0]
        assert answer.end.usage.completion_tokens == len(answer.token_ids) == "Hello world".index(cut) + len(cut)
        await cluster.empty()
        assert cluster["d0"].commands["abort", "stopped"] == 1


async def test_aggregated_and_decode_workers_run_requests_alone(model: Path) -> None:
    for role in (Role.AGGREGATED, Role.DECODE):
        async with NullCluster(model, [NullWorker("w0", role)]) as cluster:
            answer = await cluster.client.complete([9], Sampling(max_tokens=5))
            assert answer.token_ids == expected([9], 5)
            assert answer.end.timeline.mode == "local"
            assert answer.end.timeline.prefill_worker == answer.end.timeline.decode_worker == "w0"
            await cluster.empty()


async def test_a_prompt_that_is_computed_is_not_queued_any_more(model: Path) -> None:
    """Streams that run as a whole do not use up what a worker may hold queued: 1,024 prompt tokens."""
    held = asyncio.Event()

    async def hold(point: str, key: RequestKey, index: int) -> None:
        if point == "token" and index == 3:
            await held.wait()

    worker = NullWorker("a0", Role.AGGREGATED, hook=hold)
    async with NullCluster(model, [worker]) as cluster:
        prompts = [[number] * 600 for number in range(8)]
        answers = [asyncio.ensure_future(cluster.client.complete(p, Sampling(max_tokens=9))) for p in prompts]
        await until(lambda: len(worker.held) == 8, "all of them run")

        def nothing_is_queued() -> bool:
            snapshot = cluster.dispatcher.pool.snapshot("a0")
            return bool(snapshot.requests == 8 and snapshot.queued_prefill_tokens == 0)

        await until(nothing_is_queued, "their prompts count as computed")  # once the last one's first token is told
        held.set()
        assert [answer.token_ids for answer in await asyncio.gather(*answers)] == [expected(p, 9) for p in prompts]


async def test_what_a_request_may_ask_for_follows_the_workers(model: Path) -> None:
    async with NullCluster(model, [NullWorker("a0", Role.AGGREGATED, num_blocks=4)]) as cluster:
        with pytest.raises(InvalidRequest, match="context of 64 tokens"):
            await cluster.client.complete([7] * 100, Sampling(max_tokens=2))
        await cluster.replace(NullWorker("a1", Role.AGGREGATED, num_blocks=64))
        await cluster.connected()
        assert (await cluster.client.complete([7] * 100, Sampling(max_tokens=2))).token_ids == expected([7] * 100, 2)


async def test_a_small_window_only_slows_down(model: Path) -> None:
    async with NullCluster(model, pair(), token_window=1) as cluster:
        answer = await cluster.client.complete([7], Sampling(max_tokens=50), request_id="r")
        assert answer.token_ids == expected([7], 50)
        assert cluster["d0"].commands["credit", "r"] >= 48


# -- refusals and queueing ------------------------------------------------------------------------------------------


async def test_a_refused_reservation_goes_to_the_next_worker(model: Path) -> None:
    async with NullCluster(model, [*pair(), NullWorker("d1", Role.DECODE)]) as cluster:
        cluster["d0"].refuse = lambda command, request: worker_pb2.FAILURE_CODE_OVERLOADED
        for number in range(6):
            answer = await cluster.client.complete([number], Sampling(max_tokens=3))
            assert answer.end.timeline.decode_worker == "d1"
            assert answer.end.timeline.replays == 0
        await cluster.empty()


async def test_refused_everywhere_waits_in_the_queue(model: Path) -> None:
    async with NullCluster(model, pair(), token_window=4) as cluster:
        # Something runs, so that the refusal can be believed to be temporary.
        gate = cluster["d0"].hook = Gate("token", index=2, only="other")
        other = asyncio.ensure_future(cluster.client.complete([1], Sampling(max_tokens=5), request_id="other"))
        await gate.reached.wait()
        cluster["d0"].refuse = lambda command, request: worker_pb2.FAILURE_CODE_OVERLOADED
        waiting = asyncio.ensure_future(cluster.client.complete([2], Sampling(max_tokens=3), request_id="r"))
        await until(lambda: cluster["d0"].commands["reserve", "r"] >= 3, "asked again and again")
        running = cluster.router._dispatcher._active.values()
        await until(lambda: not any(one.reserved for one in running), "who waits does not keep its prompt twice")
        cluster["d0"].refuse = None
        answer = await waiting
        assert answer.token_ids == expected([2], 3)
        assert answer.end.timeline.replays == 0
        gate.opened.set()
        await other
        await cluster.empty()


async def test_a_reservation_that_an_idle_worker_refuses_is_run_locally(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        cluster["d0"].refuse = lambda command, request: (
            worker_pb2.FAILURE_CODE_OVERLOADED if command == "reserve" else None
        )
        answer = await cluster.client.complete([1, 2], Sampling(max_tokens=3))
        assert answer.end.timeline.reason == "kv_reservation_too_large"
        assert answer.token_ids == expected([1, 2], 3)


async def test_an_overloaded_prefill_worker_is_not_the_clients_problem(model: Path) -> None:
    async with NullCluster(model, [*pair(), NullWorker("p1", Role.PREFILL)]) as cluster:
        cluster["p0"].refuse = lambda command, request: worker_pb2.FAILURE_CODE_OVERLOADED
        for number in range(4):
            answer = await cluster.client.complete([number], Sampling(max_tokens=3), request_id=f"r{number}")
            assert answer.end.timeline.prefill_worker == "p1"
            assert answer.end.timeline.replays == 0
        await cluster.empty()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("code", ["OVERLOADED", "DRAINING", "INTERNAL"])
@pytest.mark.parametrize("spares", [0, 1, 4])
async def test_no_prefill_worker_takes_it_so_the_decode_side_computes(
    model: Path, spares: int, code: str, n: int
) -> None:
    """Three of them were asked once, and nobody waits for them."""
    workers = [*pair(), *(NullWorker(f"p{number + 1}", Role.PREFILL) for number in range(spares))]
    async with NullCluster(model, workers) as cluster:
        refusing = [worker for worker in workers if worker.role is Role.PREFILL]
        for worker in refusing:
            worker.refuse = lambda command, request: worker_pb2.FailureCode.Value(f"FAILURE_CODE_{code}")
        answers = await cluster.client.samples([1, 4], Sampling(max_tokens=5, n=n), request_id="r")
        assert [answer.token_ids for answer in answers] == [expected([1, 4], 5, sample) for sample in range(n)]
        timelines = [answer.end.timeline for answer in answers]
        assert {(t.mode, t.decode_worker) for t in timelines} == {("local", "d0")}
        tries = min(3, len(refusing))
        assert {t.replays for t in timelines} == {tries if code == "INTERNAL" else 0}
        asked = [worker.commands["prefill", "r"] for worker in refusing]
        assert (max(asked), sum(asked)) == (1, tries)
        assert cluster["d0"].commands["generate", "r"] == 1
        assert cluster["d0"].commands["abort", "r"] == tries  # the tickets
        await cluster.empty()


async def test_a_prefill_worker_that_drains_while_it_computes_is_waited_for(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        gate = cluster["p0"].hook = Gate("prefill")
        task = asyncio.ensure_future(cluster.client.complete([1], Sampling(max_tokens=5), request_id="r"))
        await gate.reached.wait()
        cluster["p0"].draining = True
        await until(lambda: cluster.dispatcher.pool.snapshot("p0") is None, "the router knows")
        later = await cluster.client.complete([2], Sampling(max_tokens=5))
        assert (later.end.timeline.mode, later.token_ids) == ("local", expected([2], 5))
        gate.opened.set()
        answer = await task
        assert (answer.end.timeline.mode, answer.end.timeline.replays) == ("disaggregated", 0)
        assert answer.token_ids == expected([1], 5)


async def test_a_draining_worker_gets_nothing_new(model: Path) -> None:
    async with NullCluster(model, [*pair(), NullWorker("d1", Role.DECODE)]) as cluster:
        cluster["d0"].draining = True
        await until(lambda: cluster.dispatcher.pool.snapshot("d0") is None, "the router knows")
        for number in range(4):
            answer = await cluster.client.complete([number], Sampling(max_tokens=2))
            assert answer.end.timeline.decode_worker == "d1"


async def test_invalid_on_the_worker_is_the_clients_error(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        cluster["d0"].refuse = lambda command, request: worker_pb2.FAILURE_CODE_INVALID
        with pytest.raises(InvalidRequest, match="refused by the test"):
            await cluster.client.complete([1], request_id="bad")
        assert cluster["d0"].commands["reserve", "bad"] == 1


async def test_overload_sheds_with_a_hint(model: Path) -> None:
    async with NullCluster(model, pair(), max_queue=2, max_queued_prefill_tokens=1) as cluster:
        gate = cluster["p0"].hook = Gate("prefill")
        running = [asyncio.ensure_future(cluster.client.complete([1, 1], Sampling(max_tokens=2))) for _ in range(3)]
        await until(lambda: cluster.dispatcher.queued == 2, "two wait")
        with pytest.raises(Overloaded) as caught:
            await cluster.client.complete([1, 1], request_id="shed")
        assert 0.5 <= caught.value.retry_after_s <= 30
        gate.opened.set()
        assert all(answer.finish_reason == "length" for answer in await asyncio.gather(*running))
        assert not any(request_id == "shed" for w in cluster.workers.values() for _, request_id in w.commands)


async def test_waiting_requests_start_in_class_order(model: Path) -> None:
    async with NullCluster(model, pair(), max_queued_prefill_tokens=1) as cluster:
        gate = cluster["p0"].hook = Gate("prefill")
        answers = [asyncio.ensure_future(cluster.client.complete([1, 1], Sampling(max_tokens=2), request_id="first"))]
        await gate.reached.wait()
        for waiting, name in enumerate(["batch", "standard", "interactive"], start=1):
            answers.append(
                asyncio.ensure_future(
                    cluster.client.complete([1, 1], Sampling(max_tokens=2), request_id=name, priority=name)
                )
            )
            await until(lambda count=waiting: cluster.dispatcher.queued == count, "it waits")
        gate.opened.set()
        await asyncio.gather(*answers)
        assert gate.order == ["first", "interactive", "standard", "batch"]


async def test_tenants_take_turns_and_workers_hear_who_it_is_for(model: Path) -> None:
    fair = QueueConfig("fair")
    async with NullCluster(model, pair(), max_queued_prefill_tokens=1, queue=fair) as cluster:
        gate = cluster["p0"].hook = Gate("prefill")
        heard: dict[str, tuple[str, int]] = {}

        async def look(point: str, key: RequestKey, _: int) -> None:
            for held, job in cluster["d0"].held.items():
                name = held.request_id.rpartition("/")[2]
                heard[name] = (job.request.tenant, job.request.request_class)

        cluster["d0"].hook = look
        answers = []
        for waiting, name in enumerate(["a0", "a1", "a2", "b0", "b1"]):
            answers.append(
                asyncio.ensure_future(
                    cluster.client.complete(
                        [1, 1], Sampling(max_tokens=2), request_id=name, tenant=name[0], priority="batch"
                    )
                )
            )
            if not waiting:
                await gate.reached.wait()
            await until(lambda count=waiting: cluster.dispatcher.queued == count, "it waits")
        gate.opened.set()
        await asyncio.gather(*answers)
        assert gate.order[:2] == ["a0", "b0"], "b has had nothing yet"
        assert heard["b0"] == ("b", worker_pb2.REQUEST_CLASS_BATCH)


async def test_an_id_in_flight_is_refused_and_free_again_afterwards(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        gate = cluster["d0"].hook = Gate("token", index=1)
        first = asyncio.ensure_future(cluster.client.complete([1], Sampling(max_tokens=3), request_id="same"))
        await gate.reached.wait()
        with pytest.raises(InvalidRequest, match="is running"):
            await cluster.client.complete([1], request_id="same")
        gate.opened.set()
        await first
        assert (
            await cluster.client.complete([1], Sampling(max_tokens=3), request_id="same")
        ).finish_reason == "length"


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["prefill", "manifest"])
@pytest.mark.parametrize("spare", [False, True])
async def test_a_prefill_worker_dies(model: Path, point: str, spare: bool) -> None:
    """Before the first token, or after it and before the commit; with another one, or with none left."""
    workers = pair() + ([NullWorker("p1", Role.PREFILL)] if spare else [])
    async with NullCluster(model, workers) as cluster:
        crashes = [Crash(worker, point) for name, worker in cluster.workers.items() if name == "p0"]
        tries = 2 if spare else 1
        for number in range(tries):
            answer = await cluster.client.complete([number, 4], Sampling(max_tokens=10), request_id=f"r{number}")
            assert answer.token_ids == expected([number, 4], 10)
            if answer.end.timeline.replays:
                assert cluster["d0"].commands["abort", f"r{number}"] == 1  # the ticket
        assert crashes[0].done
        if point == "prefill":
            assert answer.end.timeline.mode == ("disaggregated" if spare else "local")
        await until(lambda: not cluster["d0"].held, "d0 holds nothing")


@pytest.mark.parametrize("index", [0, 1, 7])
async def test_a_decode_worker_dies_and_the_client_sees_no_gap(model: Path, index: int) -> None:
    async with NullCluster(model, [*pair(), NullWorker("d1", Role.DECODE)]) as cluster:
        crashes = [Crash(cluster[name], "token", index) for name in ("d0",)]
        replays = 0
        for number in range(2):  # one of them runs on d0
            events = [e async for e in cluster.client.generate([number], Sampling(max_tokens=20))]
            tokens = [token for event in events for token in event.token_ids]
            assert tokens == list(expected([number], 20))
            position = 0
            for event in events:
                assert event.token_index == position
                position += len(event.token_ids)
            end = events[-1].end
            replays += end.timeline.replays
            assert end.usage.completion_tokens == 20
        assert crashes[0].done
        assert replays == 1
        await until(lambda: not cluster["d1"].held and not cluster["p0"].held, "nothing is held")


@pytest.mark.parametrize("how", ["silent", "hung"])
async def test_a_worker_that_stands_still_is_dead(model: Path, how: str) -> None:
    workers = [*pair(), NullWorker("d1", Role.DECODE)]
    async with NullCluster(model, workers, dead_after_s=0.6) as cluster:
        gate = cluster["d0"].hook = cluster["d1"].hook = Gate("token", index=3)
        task = asyncio.ensure_future(cluster.client.complete([8], Sampling(max_tokens=10), request_id="r"))
        await gate.reached.wait()
        stuck = next(worker for worker in cluster.workers.values() if worker.role is Role.DECODE and worker.held)
        setattr(stuck, how, True)
        other = cluster["d1" if stuck.worker_id == "d0" else "d0"]
        other.hook = None
        async with asyncio.timeout(30):
            answer = await task
        assert answer.token_ids == expected([8], 10)
        assert (answer.end.timeline.decode_worker, answer.end.timeline.replays) == (other.worker_id, 1)
        await cluster.empty()  # the session's end released the rest


async def test_a_hung_worker_gets_nothing_until_it_moves_again(model: Path) -> None:
    workers = [*pair(), NullWorker("d1", Role.DECODE)]
    async with NullCluster(model, workers, dead_after_s=0.6) as cluster:
        pool = cluster.dispatcher.pool
        hung = cluster["d0"]
        hung.hung = True  # with nothing to do: an idle worker that stands still is dead too
        await until(lambda: pool.snapshot("d0") is None, "the router knows")
        # It answers, so that sessions with it come up again and again; none of them counts.
        seen, sessions = 0, hung.sessions
        while seen < 3:
            await until(lambda known=sessions: hung.sessions > known, "the router tries again")
            seen, sessions = seen + 1, hung.sessions
            for _ in range(5):
                assert pool.snapshot("d0") is None
                answer = await cluster.client.complete([seen], Sampling(max_tokens=2))
                assert (answer.end.timeline.decode_worker, answer.end.timeline.replays) == ("d1", 0)
                await asyncio.sleep(0.05)
        problem = next(s.problem for s in pool.statuses() if s.worker.worker_id == "d0")
        assert "no progress" in problem
        hung.hung = False
        await until(lambda: pool.snapshot("d0") is not None, "it is used again")
        cluster["d1"].draining = True
        await until(lambda: pool.snapshot("d1") is None, "the router knows")
        assert (await cluster.client.complete([1], Sampling(max_tokens=2))).end.timeline.decode_worker == "d0"


async def test_an_idle_worker_that_moves_stays_connected(model: Path) -> None:
    async with NullCluster(model, pair(), dead_after_s=0.4) as cluster:
        await asyncio.sleep(1.5)
        assert [worker.sessions for worker in cluster.workers.values()] == [1, 1]


async def test_a_request_goes_to_a_worker_that_can_hold_it(model: Path) -> None:
    workers = [NullWorker("p0", Role.PREFILL, num_blocks=2), NullWorker("d0", Role.DECODE, num_blocks=8)]
    workers.append(NullWorker("d1", Role.DECODE))
    async with NullCluster(model, workers, worker_wait_s=0.5) as cluster:
        for number in range(4):
            answer = await cluster.client.complete([number], Sampling(max_tokens=128))
            assert answer.end.timeline.decode_worker == "d1"
        answer = await cluster.client.complete([1] * 40, Sampling(max_tokens=2))
        assert answer.end.timeline.reason == "prompt_too_large_for_prefill_pool"
        # The only worker that holds it dies: it waits for a restart, but not for ever.
        Crash(cluster["d1"], "token", index=3)
        with pytest.raises(Unavailable, match="KV cache"):
            await cluster.client.complete([1], Sampling(max_tokens=128))
        assert cluster["d0"].commands.total() <= 4  # the short ones
        assert (await cluster.client.complete([1], Sampling(max_tokens=4))).end.timeline.decode_worker == "d0"


async def test_the_bound_of_queued_prefill_is_two_steps_of_the_worker(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        snapshot = cluster.dispatcher.pool.snapshot("p0")
        assert snapshot is not None
        assert snapshot.max_queued_prefill_tokens == 1024
    async with NullCluster(model, pair(), max_queued_prefill_tokens=300) as cluster:
        snapshot = cluster.dispatcher.pool.snapshot("p0")
        assert snapshot is not None
        assert snapshot.max_queued_prefill_tokens == 300


@pytest.mark.parametrize("news", ["prefill_done", "kv_received", "failed", "reserve_granted", "worker_lost"])
async def test_a_bug_in_one_request_ends_no_session(model: Path, monkeypatch: pytest.MonkeyPatch, news: str) -> None:
    workers = [*pair(), NullWorker("d1", Role.DECODE)]
    async with NullCluster(model, workers) as cluster:
        original = getattr(RequestTracker, news)

        def broken(tracker: RequestTracker, *arguments: object, **options: object) -> object:
            if tracker.request_id == "buggy":
                raise RuntimeError("a bug")
            return original(tracker, *arguments, **options)

        monkeypatch.setattr(RequestTracker, news, broken)
        # Both wait there: an answer may be complete before the news of its prefill comes.
        gate = cluster["d0"].hook = cluster["d1"].hook = Gate("token", index=2)
        other = asyncio.ensure_future(cluster.client.complete([1], Sampling(max_tokens=5), request_id="other"))
        await gate.reached.wait()
        if news == "failed":
            cluster["p0"].refuse = lambda command, request: worker_pb2.FAILURE_CODE_TRANSFER
        buggy_gate = Gate("prefill")
        if news == "worker_lost":
            cluster["p0"].hook = buggy_gate
        buggy = asyncio.ensure_future(cluster.client.complete([2], Sampling(max_tokens=5), request_id="buggy"))
        if news == "worker_lost":
            await buggy_gate.reached.wait()
            await cluster["p0"].crash()
        with pytest.raises(InternalError, match="buggy"):
            await buggy
        gate.opened.set()
        answer = await other
        assert (answer.token_ids, answer.end.timeline.replays) == (expected([1], 5), 0)
        assert cluster["d0"].sessions == cluster["d1"].sessions == 1


async def test_nothing_is_armed_after_the_stop(model: Path) -> None:
    async with NullCluster(model, pair(), worker_wait_s=0.05) as cluster:
        dispatcher = cluster.dispatcher
        await cluster.router.stop()
        assert not dispatcher._pump.patience_is_running


async def test_replays_are_bounded(model: Path) -> None:
    spares = [NullWorker(f"p{number}", Role.PREFILL) for number in (1, 2, 3)]
    async with NullCluster(model, [*pair(), *spares], max_replays=2) as cluster:
        for name in ("p0", "p1", "p2", "p3"):
            cluster[name].refuse = lambda command, request: worker_pb2.FAILURE_CODE_INTERNAL
        with pytest.raises(Unavailable, match="given up after 2 replays"):
            await cluster.client.complete([1], request_id="r")
        assert sum(cluster[name].commands["prefill", "r"] for name in ("p0", "p1", "p2", "p3")) == 3
        await cluster.empty()
        assert cluster["d0"].commands["abort", "r"] == 3
        assert cluster.dispatcher.counters.replays == 2
        assert issubclass(ReplaysExhausted, Unavailable)


async def test_a_failed_transfer_goes_to_another_pair(model: Path) -> None:
    async with NullCluster(model, [*pair(), NullWorker("p1", Role.PREFILL)]) as cluster:
        cluster["p0"].refuse = cluster["p1"].refuse = _first_one_fails()
        answer = await cluster.client.complete([1], Sampling(max_tokens=5), request_id="r")
        timeline = answer.end.timeline
        assert answer.token_ids == expected([1], 5)
        assert (timeline.mode, timeline.replays) == ("disaggregated", 1)
        assert {cluster[name].commands["prefill", "r"] for name in ("p0", "p1")} == {1}
        counters = cluster.dispatcher.counters
        assert (counters.failed_transfers, counters.rebuilds, counters.replays) == (1, 0, 1)


@pytest.mark.parametrize("spare", [False, True])
async def test_a_transfer_that_cannot_be_had_is_rebuilt_on_the_decode_side(model: Path, spare: bool) -> None:
    workers = [*pair(), NullWorker("p1", Role.PREFILL)] if spare else pair()
    rebuilt: list[bool] = []

    def note(command: str, request: worker_pb2.WorkerRequest) -> int | None:
        rebuilt.append(command == "generate" and request.rebuild)
        return None

    async with NullCluster(model, workers) as cluster:
        for worker in workers:
            if worker.role is Role.PREFILL:
                worker.refuse = lambda command, request: worker_pb2.FAILURE_CODE_TRANSFER
        cluster["d0"].refuse = note
        answer = await cluster.client.complete([1], Sampling(max_tokens=5), request_id="r")
        timeline = answer.end.timeline
        assert answer.token_ids == expected([1], 5)
        assert (timeline.mode, timeline.reason, timeline.decode_worker) == ("local", "rebuild", "d0")
        assert rebuilt[-1]
        assert sum(rebuilt) == 1
        status = cluster.dispatcher.counters
        assert (status.failed_transfers, status.rebuilds) == (2 if spare else 1, 1)
        await cluster.empty()


async def test_a_rebuilt_request_that_is_replayed_is_not_a_rebuild_any_more(model: Path) -> None:
    asked: list[tuple[str, bool]] = []

    def note(command: str, request: worker_pb2.WorkerRequest) -> int | None:
        asked.append((command, request.rebuild))
        return worker_pb2.FAILURE_CODE_INTERNAL if request.rebuild else None

    async with NullCluster(model, pair()) as cluster:
        cluster["p0"].refuse = _first_one_fails()
        cluster["d0"].refuse = note
        answer = await cluster.client.complete([1], Sampling(max_tokens=5), request_id="r")
        assert (answer.token_ids, answer.end.timeline.replays) == (expected([1], 5), 2)
        # What failed the second time was no transfer.
        assert asked == [("reserve", False), ("generate", True), ("reserve", False)]
        await cluster.empty()


async def test_the_last_failed_transfer_is_counted_too(model: Path) -> None:
    async with NullCluster(model, pair(), max_replays=0) as cluster:
        cluster["p0"].refuse = _first_one_fails()
        with pytest.raises(Unavailable, match="given up after 0 replays"):
            await cluster.client.complete([1], request_id="r")
        assert cluster.dispatcher.counters.failed_transfers == 1
        assert cluster.dispatcher.counters.rebuilds == 0


def _first_one_fails() -> Callable[[str, worker_pb2.WorkerRequest], int | None]:
    codes = iter([worker_pb2.FAILURE_CODE_TRANSFER])
    return lambda command, request: next(codes, None)


async def test_a_restarted_worker_is_used_again(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        await cluster["d0"].crash()
        await cluster.replace(NullWorker("d0", Role.DECODE))
        await cluster.connected()
        answer = await cluster.client.complete([1], Sampling(max_tokens=3))
        assert answer.end.timeline.decode_worker == "d0"


async def test_requests_wait_for_a_restart_but_not_for_ever(model: Path) -> None:
    async with NullCluster(model, [NullWorker("d0", Role.DECODE)], worker_wait_s=0.5) as cluster:
        Crash(cluster["d0"], "token", index=2)
        with pytest.raises(Unavailable, match=r"no worker has been connected for 0\.5 s"):
            await cluster.client.complete([1], Sampling(max_tokens=9))
        with pytest.raises(Unavailable, match="no worker is connected"):
            await cluster.client.complete([1])
        cluster["d0"].hook = None
        await cluster.replace(NullWorker("d0", Role.DECODE))
        await cluster.connected()
        assert (await cluster.client.complete([1], Sampling(max_tokens=9))).token_ids == expected([1], 9)


async def test_without_decode_workers_prefill_workers_run_requests_as_a_whole(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        Crash(cluster["d0"], "token", index=2)
        answer = await cluster.client.complete([1], Sampling(max_tokens=9))
        assert answer.token_ids == expected([1], 9)
        timeline = answer.end.timeline
        assert (timeline.decode_worker, timeline.replays) == ("p0", 1)
        assert (timeline.mode, timeline.reason) == ("local", "replay"), "as it is counted"
        assert (timeline.prefill_worker, timeline.HasField("kv")) == ("p0", False)
        assert cluster.dispatcher.counters.decisions["local", "replay"] == 1
        answer = await cluster.client.complete([1], Sampling(max_tokens=9))
        timeline = answer.end.timeline
        assert (timeline.mode, timeline.reason, timeline.decode_worker) == ("local", "decode_pool_empty", "p0")
        assert cluster.dispatcher.pool.degraded == "no decode worker serves: prefill workers run requests as a whole"
        await cluster.replace(NullWorker("d0", Role.DECODE))
        await cluster.connected()
        answer = await cluster.client.complete([1], Sampling(max_tokens=9))
        assert answer.end.timeline.mode == "disaggregated"
        assert cluster.dispatcher.pool.degraded == ""


# -- cancels, deadlines, slow readers -------------------------------------------------------------------------------

STATES = {
    # state: (worker and point at which the request is held, workers that must be told to abort)
    "reserving": ("d0", Gate, ("reserve", 0), {"d0"}),
    "prefilling": ("p0", Gate, ("prefill", 0), {"p0", "d0"}),
    "transferring": ("p0", Gate, ("manifest", 0), {"p0", "d0"}),
    "committing": ("d0", Gate, ("commit", 0), {"p0", "d0"}),
    "decoding": ("d0", Gate, ("token", 3), {"d0"}),
}


@pytest.mark.parametrize("how", ["rpc", "disconnect", "deadline"])
@pytest.mark.parametrize("state", STATES)
async def test_an_end_from_outside_frees_every_worker_once(model: Path, state: str, how: str) -> None:
    async with NullCluster(model, pair()) as cluster:
        name, kind, arguments, told = STATES[state]
        gate = cluster[name].hook = kind(*arguments)
        timeout = 1.0 if how == "deadline" else None
        task = asyncio.ensure_future(
            cluster.client.complete([3, 1], Sampling(max_tokens=9), request_id="r", timeout_s=timeout)
        )
        await gate.reached.wait()
        if state == "decoding":
            # Each worker has a session of its own: the router may hear of tokens before it hears that p0 is done.
            await until(lambda: cluster.dispatcher._active["r"].tracker.holders == told, "the router knows")
        if how == "rpc":
            assert await cluster.client.cancel("r")
            answer = await task
            assert answer.finish_reason == "cancelled"
            assert answer.token_ids == expected([3, 1], len(answer.token_ids))
        elif how == "disconnect":
            task.cancel()
        else:
            with pytest.raises(DeadlineExceeded):
                await task
        await cluster.empty()
        await until(lambda: cluster.dispatcher.running == 0, "the router forgot it")
        for worker in cluster.workers.values():
            assert worker.commands["abort", "r"] == (1 if worker.worker_id in told else 0), worker.worker_id
        assert not await cluster.client.cancel("r")
        # Nothing is broken: the next request runs.
        gate.opened.set()
        assert (await cluster.client.complete([1], Sampling(max_tokens=5))).finish_reason == "length"


async def test_a_request_is_found_and_cancelled_while_its_prompt_is_looked_at(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, opened = asyncio.Event(), asyncio.Event()

    async def slowly(*arguments: Any, **named: Any) -> Any:
        reached.set()
        await opened.wait()
        return await validate(*arguments, **named)

    async with NullCluster(model, pair()) as cluster:
        with monkeypatch.context() as patch:
            patch.setattr(calls, "validate", slowly)
            tasks = [
                asyncio.ensure_future(cluster.client.samples([2, 2], Sampling(max_tokens=9, n=n), request_id=name))
                for name, n in (("r", 2), ("other", 1))
            ]
            await reached.wait()
            await until(lambda: len(cluster.router._calls._preparing) == 2, "both are looked at")
            assert not cluster.router._calls.cancel("r", "somebody else")
            assert await cluster.client.cancel("r")
            assert not await cluster.client.cancel("s")
            opened.set()
            ended, other = await asyncio.gather(*tasks)
        assert [answer.finish_reason for answer in ended] == ["cancelled"] * 2
        assert [answer.finish_reason for answer in other] == ["length"]
        assert not await cluster.client.cancel("r")
        assert not cluster.router._calls._preparing
        await cluster.empty()


@pytest.mark.parametrize("how", ["rpc", "disconnect", "deadline"])
async def test_an_end_from_outside_while_queued(model: Path, how: str) -> None:
    async with NullCluster(model, pair(), max_queued_prefill_tokens=1) as cluster:
        gate = cluster["p0"].hook = Gate("prefill", only="first")
        first = asyncio.ensure_future(cluster.client.complete([1, 1], Sampling(max_tokens=3), request_id="first"))
        await gate.reached.wait()
        timeout = 0.5 if how == "deadline" else None
        task = asyncio.ensure_future(cluster.client.complete([2, 2], request_id="r", timeout_s=timeout))
        await until(lambda: cluster.dispatcher.queued == 1, "it waits")
        if how == "rpc":
            assert await cluster.client.cancel("r")
            assert (await task).finish_reason == "cancelled"
        elif how == "disconnect":
            task.cancel()
        else:
            with pytest.raises(DeadlineExceeded):
                await task
        await until(lambda: cluster.dispatcher.queued == 0, "it is gone")
        gate.opened.set()
        assert (await first).finish_reason == "length"
        assert not any(request_id == "r" for w in cluster.workers.values() for _, request_id in w.commands)


async def test_a_slow_reader_pauses_only_itself(model: Path) -> None:
    async with (
        NullCluster(model, pair(), token_window=8) as cluster,
        AsyncClient(cluster.router.address, read_ahead_bytes=1024) as slow_client,
    ):
        decode = cluster["d0"]
        async with aclosing(slow_client.generate([1, 2], Sampling(max_tokens=1500), request_id="slow")) as events:
            first = await anext(events)

            def paused() -> bool:
                return any(job.key.request_id == "slow" and job.window <= 0 for job in decode.held.values())

            # For good: it also pauses for a moment whenever credit is on its way.
            credit = -1
            while not paused() or credit != decode.commands["credit", "slow"]:
                credit = decode.commands["credit", "slow"]
                await asyncio.sleep(0.2)
            fast = await cluster.client.complete([3], Sampling(max_tokens=300), request_id="fast")
            assert fast.token_ids == expected([3], 300)
            assert paused()
            assert decode.commands["credit", "slow"] == credit
            tokens = list(first.token_ids)
            async for event in events:
                tokens.extend(event.token_ids)
        assert tokens == list(expected([1, 2], 1500))
        await cluster.empty()


async def test_a_client_that_takes_nothing_is_cancelled(model: Path) -> None:
    async with (
        NullCluster(model, pair(), token_window=8, client_stall_timeout_s=0.4) as cluster,
        AsyncClient(cluster.router.address, read_ahead_bytes=1024) as slow_client,
    ):
        async with aclosing(slow_client.generate([1, 2], Sampling(max_tokens=1500), request_id="slow")) as events:
            await anext(events)
            await until(lambda: cluster["d0"].commands["abort", "slow"] == 1, "the worker is told")
            await cluster.empty()
            await until(lambda: cluster.dispatcher.running == 0, "the router forgot it")
        # A request whose worker is slow is not a stalled client.
        cluster["d0"].hook = gate = Gate("token", index=1)
        task = asyncio.ensure_future(cluster.client.complete([1], Sampling(max_tokens=3)))
        await gate.reached.wait()
        await asyncio.sleep(1.0)
        gate.opened.set()
        assert (await task).finish_reason == "length"
