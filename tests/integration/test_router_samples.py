"""Several samples of one request through a real router, with null workers: one prefill, and none is lost."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path

import pytest

from pdcore.config import QueueConfig
from pdcore.errors import DeadlineExceeded, InvalidRequest, Unavailable
from pdcore.types import RequestKey, Role
from protos import worker_pb2
from router.active import ActiveRequest
from router.client import Completion, Sampling
from router.worker_client import WorkerClient
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.null_worker import NullWorker, token_of
from tests.support.tiny_model import tiny_llama

N = 3
SAMPLES = [f"r#{i}" for i in range(N)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def expected(count: int, sample: int, prompt: tuple[int, ...] = (1, 2)) -> tuple[int, ...]:
    return tuple(token_of(prompt, index, sample) for index in range(count))


async def ask(cluster: NullCluster, count: int = 8, n: int = N, **options: object) -> list[Completion]:
    """All samples; asserts that each has its tokens and that nothing is left of them."""
    answers = await cluster.client.samples([1, 2], Sampling(max_tokens=count, n=n, **options), request_id="r")  # type: ignore[arg-type]
    assert [answer.token_ids for answer in answers] == [expected(count, sample) for sample in range(n)]
    await settled(cluster)
    return answers


async def settled(cluster: NullCluster) -> None:
    await cluster.empty()
    assert not cluster.dispatcher.request_ids
    assert (cluster.dispatcher.queued, cluster.dispatcher.running) == (0, 0)


def count(cluster: NullCluster, command: str, *names: str) -> int:
    return sum(worker.commands[command, name] for worker in cluster.workers.values() for name in names)


async def test_one_ticket_and_one_prefill(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        answers = await ask(cluster, 20)
        for answer in answers:
            usage, timeline = answer.end.usage, answer.end.timeline
            assert (answer.request_id, answer.finish_reason) == ("r", "length")
            assert (usage.prompt_tokens, usage.completion_tokens) == (2, 20)
            assert (timeline.mode, timeline.prefill_worker, timeline.decode_worker) == ("disaggregated", "p0", "d0")
            assert (timeline.replays, timeline.prefill_ms, timeline.kv.wire_bytes) == (0, 2.0, 100)
        assert [count(cluster, name, "r") for name in ("reserve", "prefill", "generate", "abort")] == [1, 1, 0, 0]
        assert count(cluster, "abort", *SAMPLES) == count(cluster, "generate", *SAMPLES) == 0
        assert cluster.dispatcher.counters.finished == N


async def test_on_one_worker(model: Path) -> None:
    async with NullCluster(model, [NullWorker("a0", Role.AGGREGATED)]) as cluster:
        answers = await ask(cluster)
        assert {answer.end.timeline.mode for answer in answers} == {"local"}
        assert count(cluster, "generate", "r", *SAMPLES) == 1


async def test_events_say_whose_they_are_and_credit_comes_back_for_each(model: Path) -> None:
    async with NullCluster(model, pair(), token_window=4) as cluster:
        seen: dict[int, list[int]] = {i: [] for i in range(N)}
        ends = set()
        async with aclosing(cluster.client.generate([1, 2], Sampling(max_tokens=40, n=N), request_id="r")) as events:
            async for event in events:
                assert event.request_id == "r"
                assert event.token_index == len(seen[event.sample])
                assert event.sample not in ends
                seen[event.sample].extend(event.token_ids)
                if event.HasField("end"):
                    ends.add(event.sample)
        assert ends == set(range(N))
        assert all(tuple(tokens) == expected(40, sample) for sample, tokens in seen.items())
        await settled(cluster)


async def test_a_sample_that_ends_at_its_first_token_leaves_the_others_alone(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        stop = expected(1, 0)[0]
        answers = await cluster.client.samples([1, 2], Sampling(max_tokens=8, n=N, stop_token_ids=[stop]))
        assert answers[0].token_ids == (stop,)
        assert answers[0].finish_reason == "stop"
        for sample in (1, 2):
            tokens = expected(8, sample)
            cut = tokens.index(stop) + 1 if stop in tokens else 8
            assert answers[sample].token_ids == tokens[:cut]
        await settled(cluster)


async def test_all_samples_may_end_at_the_first_token(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        await ask(cluster, 1)
        assert cluster["d0"].commands["abort", "r"] == 1, "the ticket is given back"


@pytest.mark.parametrize("point", ["prefill", "manifest", "commit", "token", "reserve"])
@pytest.mark.parametrize("who", ["p0", "d0"])
async def test_a_worker_that_dies_at_any_point(model: Path, who: str, point: str) -> None:
    workers = [*pair(), NullWorker("p1", Role.PREFILL), NullWorker("d1", Role.DECODE)]
    async with NullCluster(model, workers) as cluster:
        dead = cluster[who]
        gone = False

        async def die(at: str, key: RequestKey, index: int) -> None:
            nonlocal gone
            if not gone and at == point and (point != "token" or index == 2):
                gone = True
                await dead.crash()
                await asyncio.sleep(60)

        dead.hook = die
        others = [worker for worker in workers if worker.role is dead.role and worker is not dead]
        for worker in others:
            worker.draining = True
        await until(lambda: sum(s.worker_id == who for s in cluster.dispatcher.pool.snapshots()) == 1, "who is there")
        for worker in others:
            worker.draining = False
        answers = await ask(cluster, 8)
        # A failed transfer may be known before its decode worker's death: a sample goes on there, then elsewhere.
        most = 2 if (who, point) == ("d0", "commit") else 1
        assert all(answer.end.timeline.replays <= most for answer in answers)


@pytest.mark.parametrize("spare", [False, True])
async def test_before_there_are_tokens_they_are_replayed_together(model: Path, spare: bool) -> None:
    """By another prefill worker, or by the decode worker."""
    async with NullCluster(model, pair() + ([NullWorker("p1", Role.PREFILL)] if spare else [])) as cluster:
        codes = iter([worker_pb2.FAILURE_CODE_INTERNAL])
        for worker in cluster.workers.values():
            if worker.role is Role.PREFILL:
                worker.refuse = lambda command, request: next(codes, None)
        answers = await ask(cluster)
        asked = [cluster.workers[name].commands["prefill", "r"] for name in ("p0", "p1") if name in cluster.workers]
        assert asked == ([1, 1] if spare else [1])
        assert count(cluster, "generate", "r") == (0 if spare else 1)
        assert count(cluster, "reserve", *SAMPLES) == 0
        assert {answer.end.timeline.mode for answer in answers} == {"disaggregated" if spare else "local"}
        assert [answer.end.timeline.replays for answer in answers] == [1] * N
        assert cluster.dispatcher.counters.replays == 1


async def test_an_id_that_comes_again_has_attempts_that_no_worker_has_seen(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        codes = iter([worker_pb2.FAILURE_CODE_INTERNAL])
        cluster["p0"].refuse = lambda command, request: next(codes, None)
        await cluster.client.samples([1, 2], Sampling(max_tokens=3, n=N), request_id="r")
        assert dict(cluster.dispatcher._last_attempts) == {"r": 2}
        await cluster.client.samples([1, 2], Sampling(max_tokens=3, n=2), request_id="r")
        await cluster.client.complete([1, 2], Sampling(max_tokens=3), request_id="r")
        assert dict(cluster.dispatcher._last_attempts) == {"r": 4}


async def test_after_the_first_tokens_each_goes_on_alone(model: Path) -> None:
    async with NullCluster(model, [*pair(), NullWorker("p1", Role.PREFILL)]) as cluster:
        pushes = 0

        async def fail_once(point: str, key: RequestKey, index: int) -> None:
            nonlocal pushes
            if point == "commit":
                pushes += 1
                if pushes == 1:
                    cluster["d0"].held.pop(key)  # refused: the transfer has failed, the first tokens are delivered

        cluster["d0"].hook = fail_once
        answers = await ask(cluster)
        assert [answer.end.timeline.replays for answer in answers] == [1] * N
        assert count(cluster, "reserve", *SAMPLES) + count(cluster, "generate", *SAMPLES) == N


async def test_a_busy_decode_worker_is_asked_again(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        codes = iter([worker_pb2.FAILURE_CODE_OVERLOADED] * 2)
        cluster["d0"].refuse = lambda command, request: next(codes, None)
        answers = await ask(cluster)
        assert [answer.end.timeline.replays for answer in answers] == [0] * N
        assert count(cluster, "reserve", *SAMPLES) == 0


async def test_a_failed_transfer_is_rebuilt_once_for_all(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        cluster["p0"].refuse = lambda command, request: worker_pb2.FAILURE_CODE_TRANSFER
        answers = await ask(cluster)
        assert {answer.end.timeline.reason for answer in answers} == {"rebuild"}
        assert count(cluster, "generate", "r", *SAMPLES) == 1


async def test_replays_used_up_end_the_call(model: Path) -> None:
    async with NullCluster(model, pair(), max_replays=1) as cluster:
        for worker in cluster.workers.values():
            worker.refuse = lambda command, request: (
                None if command == "reserve" else worker_pb2.FAILURE_CODE_INTERNAL
            )
        with pytest.raises(Unavailable, match="given up after 1 replays"):
            await cluster.client.samples([1, 2], Sampling(max_tokens=8, n=N), request_id="r")
        await settled(cluster)
        assert cluster.dispatcher.counters.failed == N


class Hold:
    """A hook that holds everything at one point."""

    def __init__(self, point: str, index: int = 0) -> None:
        self.reached = asyncio.Event()
        self._at = (point, index)

    async def __call__(self, point: str, key: RequestKey, index: int) -> None:
        if (point, index) == self._at:
            self.reached.set()
            await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("who", "point"), [("d0", "reserve"), ("p0", "prefill"), ("p0", "manifest"), ("d0", "token")]
)
@pytest.mark.parametrize("how", ["cancel", "leave", "deadline", "drain"])
async def test_the_end_of_the_call_frees_everything(model: Path, who: str, point: str, how: str) -> None:
    async with NullCluster(model, pair()) as cluster:
        hold = cluster[who].hook = Hold(point, 3 if point == "token" else 0)
        call = asyncio.ensure_future(
            cluster.client.samples(
                [1, 2], Sampling(max_tokens=8, n=N), request_id="r", timeout_s=0.5 if how == "deadline" else None
            )
        )
        await hold.reached.wait()
        with pytest.raises(InvalidRequest, match="is running"):
            await cluster.client.complete([1], request_id="r")
        match how:
            case "cancel":
                assert await cluster.client.cancel("r")
                answers = await call
                assert {answer.finish_reason for answer in answers} == {"cancelled"}
            case "leave":
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            case "deadline":
                with pytest.raises(DeadlineExceeded):
                    await call
            case "drain":
                await cluster.dispatcher.drain(0.0)
                with pytest.raises(Unavailable):
                    await call
        await settled(cluster)
        assert not await cluster.client.cancel("r")


async def test_samples_that_end_before_the_rest_is_there_are_not_counted(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        hold = cluster["d0"].hook = Hold("reserve")
        call = asyncio.ensure_future(cluster.client.samples([1, 2], Sampling(max_tokens=8, n=N), request_id="r"))
        await hold.reached.wait()
        for name in SAMPLES[:2]:
            assert not await cluster.client.cancel(name), "its id is nobody's but ours"
            cluster.dispatcher.cancel_active(cluster.dispatcher._active[name])
            assert (cluster.dispatcher.queued, cluster.dispatcher.running) == (0, 1)
        await cluster.client.cancel("r")
        await call
        await settled(cluster)


@pytest.mark.parametrize("who_speaks_first", ["d0", "p0"])
async def test_a_revoked_ticket_is_no_replay(model: Path, who_speaks_first: str) -> None:
    """Revoked for want of room after the first tokens: nobody's fault, for one sample or several."""
    async with NullCluster(model, pair(), max_replays=0) as cluster:
        worker, revoked = cluster["d0"], False

        async def revoke(point: str, key: RequestKey, index: int) -> None:
            nonlocal revoked
            if point == "commit" and not revoked:
                revoked = True
                await until(lambda: all(len(a.tracker.delivered) == 1 for a in samples()), "first tokens")
                failed = worker_pb2.RequestFailed(code=worker_pb2.FAILURE_CODE_OVERLOADED, message="revoked")
                job = worker.held[key]
                job.revoked = True
                if who_speaks_first == "d0":
                    worker._notice(job, failed=failed)
                worker._release(job)
                if who_speaks_first == "p0":
                    await asyncio.sleep(0.2)
                    worker._notice(job, failed=failed)

        def samples() -> list[ActiveRequest]:
            return [cluster.dispatcher._active[name] for name in SAMPLES]

        worker.hook = revoke
        answers = await ask(cluster)
        assert [answer.end.timeline.replays for answer in answers] == [0] * N


async def test_the_policy_static_waits_for_the_samples(model: Path) -> None:
    workers = [NullWorker("a0", Role.AGGREGATED, step_s=0.002)]
    async with NullCluster(model, workers, queue=QueueConfig(policy="static")) as cluster:
        params = Sampling(max_tokens=60, n=N)
        first = asyncio.ensure_future(cluster.client.samples([1, 2], params, request_id="r"))
        await until(lambda: "r" not in cluster.dispatcher._active and bool(cluster.dispatcher._groups), "the samples")
        await cluster.client.complete([3, 4], Sampling(max_tokens=2), request_id="s")
        assert not cluster.dispatcher._groups, "the second one began beside the first one's samples"
        await first
        await settled(cluster)


async def test_news_of_the_prefill_may_come_after_the_commit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with NullCluster(model, pair()) as cluster:
        dispatcher, held = cluster.dispatcher, []
        on_report = dispatcher.on_report

        def late(client: WorkerClient, report: worker_pb2.Report) -> None:
            if client.worker_id == "p0" and held is not None and (report.tokens or report.notices):
                kept = worker_pb2.Report()
                kept.CopyFrom(report)
                held.append((client, kept))
                return
            on_report(client, report)
            if any(notice.HasField("kv_received") for notice in report.notices):
                for entry in held:
                    on_report(*entry)
                held.clear()

        monkeypatch.setattr(dispatcher, "on_report", late)
        answers = await ask(cluster)
        assert {answer.end.timeline.prefill_ms for answer in answers} == {2.0}
        assert {answer.end.timeline.replays for answer in answers} == {0}


@pytest.mark.parametrize("n", [0, 17])
async def test_how_many_samples_there_may_be(model: Path, n: int) -> None:
    async with NullCluster(model, pair()) as cluster:
        with pytest.raises(InvalidRequest, match=rf"sampling\.n: must be in \[1, 16\], got {n}"):
            await cluster.client.samples([1, 2], Sampling(max_tokens=8, n=n))
        await ask(cluster, 4, n=16)
        await ask(cluster, 4, n=1)
        with pytest.raises(ValueError, match="samples"):
            await cluster.client.complete([1, 2], Sampling(n=2))


@pytest.mark.parametrize("seed", range(6))
async def test_random_deaths_lose_nothing(model: Path, seed: int) -> None:
    """Many requests at once, some with one sample, while workers die and come back at random moments."""
    dice = random.Random(seed)
    workers = [
        NullWorker(name, role, step_s=0.001)
        for name, role in (
            ("p0", Role.PREFILL),
            ("p1", Role.PREFILL),
            ("d0", Role.DECODE),
            ("d1", Role.DECODE),
        )
    ]
    async with NullCluster(model, workers, max_replays=50, replays_per_s=1000.0) as cluster:

        async def one(number: int) -> None:
            n, tokens = dice.choice([1, 2, 5]), dice.randint(1, 30)
            while True:
                try:
                    answers = await cluster.client.samples([number, 2], Sampling(max_tokens=tokens, n=n))
                    break
                except Unavailable as error:  # it came while both were away, and was not taken
                    if "no decode or aggregated worker is connected" not in str(error):
                        raise
                    await asyncio.sleep(0.05)
            found = [answer.token_ids for answer in answers]
            assert found == [expected(tokens, sample, (number, 2)) for sample in range(n)]

        calls = [asyncio.ensure_future(one(number)) for number in range(24)]
        for _ in range(5):
            await asyncio.sleep(dice.uniform(0.005, 0.06))
            name = dice.choice(sorted(cluster.workers))
            old = cluster.workers[name]
            await old.crash()
            await cluster.replace(NullWorker(name, old.role, step_s=0.001))
        await asyncio.wait_for(asyncio.gather(*calls), 60)
        await settled(cluster)
