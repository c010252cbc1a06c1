"""Whatever happens to a request, neither its prompt nor its answer is in a log, not even at DEBUG, nor what a bug
of ours says that stumbles over them."""

from __future__ import annotations

import json
import logging
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from decode_worker.worker import DecodeWorker
from engine.loader import load_runner
from pdcore.errors import InternalError, InvalidRequest, RequestError
from pdcore.types import Role, SamplingParams
from protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from router.client import Sampling
from router.tokenizer import TextModel
from router.tracker import RequestTracker
from tests.integration.test_open_inference import request as infer_request
from tests.integration.test_openai_tools import Actor
from tests.support.null_cluster import NullCluster, pair
from tests.support.processes import worker_config
from tests.support.session_client import SessionClient
from tests.support.specs import spec_of
from tests.support.tiny_model import tiny_llama
from tests.support.tool_model import tool_llama

MARKER = "Quetzalcoatlus"
IDS = [101, 103, 107, 109, 113]
SHOWN = ("101, 103, 107", "101 103 107", "prompt: 101", MARKER, MARKER.lower(), "Quetzal")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_llama(tmp_path_factory.mktemp("tools"))


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG)
    return caplog


def assert_silent(log: pytest.LogCaptureFixture) -> None:
    text = log.text + "".join(repr(record.__dict__) for record in log.records)
    assert len(log.records) > 3, "nothing was logged at all"
    assert [word for word in SHOWN if word in text] == []


def assert_bugs_are_found(log: pytest.LogCaptureFixture, function: str, kind: type[Exception], times: int) -> None:
    """At least so many errors are logged of this kind, with their frames down to a function."""
    bugs = [record for record in log.records if record.exc_info and record.exc_info[0].__name__ == kind.__name__]  # type: ignore[union-attr]
    found = [each for each in bugs if traceback.extract_tb(each.exc_info[2])[-1].name == function]  # type: ignore[index]
    assert len(found) >= times
    assert f", in {function}\n" in log.text


async def broken(self: TextModel, given: Any, *rest: Any) -> list[int]:
    """A bug that says what it stumbled over."""
    try:
        raise KeyError(MARKER)
    except KeyError as error:
        raise ValueError(f"cannot tokenize {MARKER}, {IDS}") from error


async def test_the_router(model: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async with NullCluster(model, pair(), http_port=0, max_replays=0) as cluster:
        client, url = cluster.client, f"http://{cluster.router.http_address}/v1"
        await client.complete(MARKER, Sampling(max_tokens=3, stop=[MARKER]))
        await client.complete(IDS, Sampling(max_tokens=3))
        refused: list[tuple[Any, Sampling]] = [
            (MARKER, Sampling(temperature=9)),
            (MARKER, Sampling(regex=f"({MARKER}")),
            (MARKER, Sampling(json_schema=f'{{"type": "{MARKER}"}}')),
            (MARKER, Sampling(bad_words=[MARKER * 100])),
            (MARKER * 5000, Sampling()),
            ([*IDS, 10**6], Sampling()),
            ([{"role": MARKER, "content": MARKER}], Sampling()),
        ]
        for prompt, sampling in refused:
            with pytest.raises(InvalidRequest):
                await client.complete(prompt, sampling)
        async with httpx.AsyncClient() as http:
            body = {"model": "null", "prompt": MARKER, "max_tokens": 2}
            assert (await http.post(f"{url}/completions", json=body)).status_code == 200
            assert (await http.post(f"{url}/completions", json=body | {MARKER: 1, "n": MARKER})).status_code == 400
            half, headers = f'{{"prompt": "{MARKER}', {"content-type": "application/json"}
            reply = await http.post(f"{url}/completions", content=half, headers=headers)
            assert reply.status_code == 400

        # A bug of ours that says what it stumbled over, in a task and in a worker's answer.
        with monkeypatch.context() as patch:
            patch.setattr(TextModel, "tokenize", broken)
            with pytest.raises(InternalError):
                await client.complete(MARKER, Sampling(max_tokens=3))
        with monkeypatch.context() as patch:
            patch.setattr(RequestTracker, "prefill_done", lambda self, *_: int(f"{MARKER} {self.prompt}"))
            with pytest.raises(InternalError):
                await client.complete(IDS, Sampling(max_tokens=3))
        for worker in cluster.workers.values():
            await worker.crash()
        with pytest.raises(RequestError):
            await client.complete(MARKER, Sampling(max_tokens=3), timeout_s=1.0)
    assert_bugs_are_found(log, "broken", ValueError, 1)
    assert_bugs_are_found(log, "<lambda>", ValueError, 1)
    assert_silent(log)


async def test_prompts_are_logged_if_that_is_asked_for(model: Path, log: pytest.LogCaptureFixture) -> None:
    """Once each, and nothing else of a request: no answer, and no prompt that was refused."""
    async with NullCluster(model, pair(), http_port=0, log_prompts=True) as cluster:
        client, url = cluster.client, f"http://{cluster.router.http_address}/v1"
        said = await client.detokenize(IDS)
        await client.samples(f'{MARKER}\nrequest "one"', Sampling(max_tokens=3, n=2), request_id="text")
        await client.complete(IDS, Sampling(max_tokens=3), request_id="ids")
        with pytest.raises(InvalidRequest):
            await client.complete(MARKER, Sampling(temperature=9), request_id="refused")
        async with httpx.AsyncClient() as http:
            body = {"model": "null", "prompt": MARKER, "max_tokens": 2, "request_id": "http"}
            assert (await http.post(f"{url}/completions", json=body)).status_code == 200
    shown = {getattr(record, "request_id", ""): record for record in log.records if "prompt is" in record.message}
    assert list(shown) == ["text", "ids", "http"]
    assert all(record.levelno == logging.INFO for record in shown.values())
    assert shown["text"].message == f'request text: its prompt is "{MARKER}\\nrequest \\"one\\""'
    assert shown["ids"].message == f"request ids: its prompt is {json.dumps(said, ensure_ascii=False)}"
    assert log.text.count(MARKER) == 2


async def test_the_other_faces_of_a_router(
    tool_model: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats, tools, responses, tokens, the Open Inference Protocol; whole and streamed; answered, refused, broken."""
    actor = Actor(tool_model)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    about = {"name": "weather", "description": MARKER, "parameters": parameters}
    tool = {"type": "function", "function": about}
    chat = {"model": "null", "messages": [{"role": "user", "content": MARKER}], "max_tokens": 200}
    response = {"model": "null", "input": MARKER, "max_output_tokens": 200}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("v1/chat/completions", chat),
        ("v1/chat/completions", chat | {"stream": True}),
        ("v1/chat/completions", chat | {"tools": [tool]}),
        ("v1/chat/completions", chat | {"tools": [tool], "stream": True}),
        ("v1/responses", response),
        ("v1/responses", response | {"tools": [{"type": "function", **about}], "stream": True}),
        ("tokenize", {"model": "null", "prompt": MARKER}),
        ("tokenize", {"model": "null", "messages": chat["messages"]}),
    ]
    call = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{MARKER}"}}}}\n</tool_call>'
    async with (
        NullCluster(tool_model, pair(script=actor), http_port=0) as cluster,
        httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as http,
        grpc.aio.insecure_channel(cluster.router.address) as channel,
    ):
        stub = GRPCInferenceServiceStub(channel)

        async def streamed(message: Any) -> Any:
            stream = stub.ModelStreamInfer(iter([message]))
            return [each async for each in stream]

        for said in (call, call[:-30], f'<tool_call>{{"{MARKER}"'):  # a call, half of one, and none
            actor.says(said)
            for path, body in bodies:
                answer = await http.post(f"/{path}", json=body)
                assert answer.status_code == 200, answer.text
        for path, body in bodies:
            for wrong in ({MARKER: MARKER}, {"model": MARKER}, {"max_tokens": MARKER}):
                assert (await http.post(f"/{path}", json=body | wrong)).status_code in (400, 404)
        ids = (await http.post("/tokenize", json=bodies[-2][1])).json()["tokens"]
        answer = await http.post("/detokenize", json={"model": "null", "tokens": ids})
        assert MARKER in answer.text
        assert (await http.post("/detokenize", json={"model": "null", "tokens": [*IDS, 10**6]})).status_code == 400
        message = infer_request(MARKER, max_tokens=20)
        assert (await stub.ModelInfer(message)).outputs
        assert len(await streamed(infer_request(MARKER, max_tokens=20, stream=True))) > 1
        bad = infer_request(MARKER, **{MARKER: 1})
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ModelInfer(bad)
        assert (await streamed(bad))[0].error_message

        with monkeypatch.context() as patch:
            for method in ("tokenize", "tokenize_chat"):
                patch.setattr(TextModel, method, broken)
            for path, body in bodies:
                answer = await http.post(f"/{path}", json=body)
                assert answer.status_code == 500
                assert MARKER not in answer.text
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await stub.ModelInfer(message)
            assert failed.value.code() is grpc.StatusCode.INTERNAL
            assert MARKER not in failed.value.details()
            (told,) = await streamed(message)
            assert told.error_message.startswith("internal error")
            assert MARKER not in told.error_message
    assert_bugs_are_found(log, "broken", ValueError, len(bodies) + 2)
    assert_silent(log)


def test_a_worker(model: Path, log: pytest.LogCaptureFixture) -> None:
    """A request that runs, some that are refused, and steps that fail until the worker does."""
    config = replace(worker_config(model, Role.DECODE), dead_after_s=3.0)
    failing = False

    def runner_of(given: Any) -> Any:
        runner = load_runner(given.engine)
        run = runner.run

        def maybe(step: Any) -> Any:
            if failing:
                raise RuntimeError(f"the device is gone while it had {MARKER}: {IDS}")
            return run(step)

        runner.run = maybe  # type: ignore[method-assign]
        return runner

    worker = DecodeWorker(config, runner_of)
    try:
        worker.start()
        with SessionClient(worker.address) as session:
            good = spec_of(IDS, max_tokens=3)
            session.generate(good)
            session.wait_finished(good.key.request_id)
            for bad in (
                spec_of([*IDS, 10**6]),
                spec_of(IDS * 1000),
                replace(spec_of(IDS), params=SamplingParams(max_tokens=10**6)),
            ):
                session.reserve(bad)
            failing = True
            for _ in range(50):  # some of them share a step
                session.generate(spec_of(IDS, max_tokens=3))
                if worker.failed.wait(0.1):
                    break
            assert worker.failed.is_set()
    finally:
        worker.stop()
        assert MARKER not in worker.problem
    assert_bugs_are_found(log, "maybe", RuntimeError, 1)
    assert_silent(log)


def test_it_would_be_found(log: pytest.LogCaptureFixture) -> None:
    for number in range(4):
        logging.getLogger("router").debug("prompt %d: %s", number, IDS)
    with pytest.raises(AssertionError, match="101"):
        assert_silent(log)
