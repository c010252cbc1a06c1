"""Clients that leave, or whose deadline passes, where a request is with no worker: being tokenized, or held up by its
reader. test_router_flow.py has the states on workers and in the queue."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from pdcore.errors import DeadlineExceeded
from protos import generation_pb2_grpc
from router.client import Sampling, build_request
from router.tokenizer import TextModel
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("how", ["disconnect", "deadline"])
async def test_while_its_prompt_is_tokenized(model: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    reached, given_up = asyncio.Event(), asyncio.Event()

    async def endless(*_: object) -> list[int]:
        reached.set()
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            given_up.set()
            raise
        return [1]

    async with NullCluster(model, pair()) as cluster:
        with monkeypatch.context() as patched:
            patched.setattr(TextModel, "tokenize", endless)
            timeout_s = 1.0 if how == "deadline" else None
            task = asyncio.ensure_future(cluster.client.complete("text", request_id="r", timeout_s=timeout_s))
            await reached.wait()
            if how == "disconnect":
                task.cancel()
            else:
                with pytest.raises(DeadlineExceeded) as late:
                    await task
                assert late.value.request_id == "r"
            await asyncio.wait_for(given_up.wait(), 20.0)
        assert cluster.dispatcher.running == cluster.dispatcher.queued == 0
        assert not any(worker.commands for worker in cluster.workers.values())
        answer = await cluster.client.complete("text", Sampling(max_tokens=2), request_id="r")
        assert answer.finish_reason == "length"


@pytest.mark.parametrize("how", ["disconnect", "deadline"])
async def test_while_its_reader_holds_it_up(model: Path, how: str) -> None:
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with (
        NullCluster(model, pair(), token_window=8) as cluster,
        grpc.aio.insecure_channel(cluster.router.address, options=options) as channel,
    ):
        calls, clock = cluster.router._calls, cluster.router._clock
        assert calls is not None
        call = generation_pb2_grpc.GenerationStub(channel).Generate(
            build_request([1, 2], Sampling(max_tokens=3000), request_id="r"),
            timeout=4.0 if how == "deadline" else None,
        )
        await call.read()

        def held_up() -> bool:
            return any(c.writing_since is not None and clock.now() - c.writing_since > 0.2 for c in calls._running)

        await until(held_up, "a write waits for its reader")
        if how == "disconnect":
            call.cancel()
        await cluster.empty()
        await until(lambda: cluster.dispatcher.running == 0 and not calls._running, "the router forgot it")
        assert cluster["d0"].commands["abort", "r"] == 1
        assert (await cluster.client.complete([1], Sampling(max_tokens=2))).finish_reason == "length"
