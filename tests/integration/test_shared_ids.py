"""One id for all prompts of a call: what `Cancel` finds by it, and who else may have it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from pdcore.errors import InvalidRequest
from pdcore.types import RequestKey
from protos import open_inference_pb2
from protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from router.client import AsyncClient, Sampling
from tests.support.null_cluster import NullCluster, pair, tasks, until
from tests.support.tiny_model import tiny_llama

LONGEST = "x" * 128
KEYS = {"right": "acme", "other": "evil"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


class Hold:
    """A hook that holds every request at its second token. `held`: their ids."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.opened = asyncio.Event()

    async def __call__(self, point: str, key: RequestKey, index: int) -> None:
        if point == "token" and index == 1:
            self.held.add(key.request_id)
            await self.opened.wait()


@pytest.fixture
async def cluster(model: Path, tmp_path: Path) -> AsyncIterator[NullCluster]:
    keys = tmp_path / "keys.yaml"
    keys.write_text("".join(f"{hashlib.sha256(key.encode()).hexdigest()}: {who}\n" for key, who in KEYS.items()))
    async with NullCluster(model, pair(), http_port=0, api_keys_file=str(keys)) as cluster:
        cluster["d0"].hook = Hold()
        yield cluster


async def by_http(cluster: NullCluster, name: str) -> list[str]:
    """Ask about two prompts; returns why each ended. Raises InvalidRequest if the id is refused."""
    headers = {"authorization": "Bearer right", "x-request-id": name}
    body = {"prompt": ["a", "b"], "max_tokens": 9}
    async with httpx.AsyncClient(headers=headers, timeout=60.0) as client:
        reply = await client.post(f"http://{cluster.router.http_address}/v1/completions", json=body)
    assert reply.headers["x-request-id"] == name
    if reply.status_code == 400:
        raise InvalidRequest(*reply.json()["error"]["message"].split(": ", 1))
    if reply.status_code != 200:
        return [reply.json()["error"]["code"]]
    return [choice["finish_reason"] for choice in reply.json()["choices"]]


async def by_inference(cluster: NullCluster, name: str) -> list[str]:
    """The same. Here a request may have any id: one that it cannot have gives way to another."""
    message = open_inference_pb2.ModelInferRequest(id=name)
    text = message.inputs.add(name="text_input", datatype="BYTES", shape=[2])
    text.contents.bytes_contents.extend([b"a", b"b"])
    message.parameters["max_tokens"].int64_param = 9
    message.parameters["return_finish_reason"].bool_param = True
    async with grpc.aio.insecure_channel(cluster.router.address) as channel:
        infer = GRPCInferenceServiceStub(channel).ModelInfer
        answer = await infer(message, metadata=(("authorization", "Bearer right"),))
    if answer.parameters["request_id"].string_param != name:
        raise InvalidRequest("request_id", "is running")
    (reasons,) = [output for output in answer.outputs if output.name == "finish_reason"]
    return [reason.decode() for reason in reasons.contents.bytes_contents]


Ask = Callable[[NullCluster, str], Awaitable[list[str]]]
ASKS = pytest.mark.parametrize("ask", [by_http, by_inference])
CANCELLED = {by_http: ["cancelled"], by_inference: ["cancelled", "cancelled"]}


@ASKS
@pytest.mark.parametrize("name", ["x", LONGEST])
async def test_cancel_ends_all_that_runs_under_an_id(cluster: NullCluster, ask: Ask, name: str) -> None:
    before = tasks()
    hold = cluster["d0"].hook
    assert isinstance(hold, Hold)
    async with (
        AsyncClient(cluster.router.address, api_key="right") as mine,
        AsyncClient(cluster.router.address, api_key="other") as others,
    ):
        running = asyncio.ensure_future(ask(cluster, name))
        await until(lambda: len(hold.held) == 2, "both run")
        assert await others.cancel(name) is False
        assert not running.done()
        assert await mine.cancel(name) is True
        assert await running == CANCELLED[ask]  # type: ignore[index]
        assert await mine.cancel(name) is False
        hold.opened.set()
        assert await ask(cluster, name) == ["length", "length"]
    await cluster.at_rest(before)


@ASKS
async def test_the_id_is_taken_while_its_prompts_run(cluster: NullCluster, ask: Ask) -> None:
    hold = cluster["d0"].hook
    assert isinstance(hold, Hold)
    async with AsyncClient(cluster.router.address, api_key="right") as client:
        running = asyncio.ensure_future(ask(cluster, "x"))
        await until(lambda: len(hold.held) == 2, "both run")
        with pytest.raises(InvalidRequest, match="'x' is running"):
            await client.complete("a", request_id="x")
        with pytest.raises(InvalidRequest, match=r"x-request-id: .* 'x' is running"):
            await by_http(cluster, "x")
        hold.opened.set()
        with pytest.raises(InvalidRequest):
            await by_inference(cluster, "x")
        assert await running == ["length", "length"]
        assert (await client.complete("a", Sampling(max_tokens=2), request_id="x")).request_id == "x"


@ASKS
async def test_ids_that_look_like_those_of_its_prompts_are_others(cluster: NullCluster, ask: Ask) -> None:
    hold = cluster["d0"].hook
    assert isinstance(hold, Hold)
    async with AsyncClient(cluster.router.address, api_key="right") as client:
        names = ("x-0", "x.0", "x:0", "x_0")
        asked = [asyncio.ensure_future(client.complete("a", Sampling(max_tokens=9), request_id=n)) for n in names]
        await until(lambda: len(hold.held) == len(names), "all run")
        running = asyncio.ensure_future(ask(cluster, "x"))
        await until(lambda: len(hold.held) == len(names) + 2, "and both prompts")
        assert await client.cancel("x") is True
        assert await running == CANCELLED[ask]  # type: ignore[index]
        hold.opened.set()
        assert {answer.finish_reason for answer in await asyncio.gather(*asked)} == {"length"}


@ASKS
async def test_prompts_that_are_being_tokenized_are_found(
    cluster: NullCluster, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = cluster.router._text_model
    tokenize = model.tokenize
    waiting: list[asyncio.Event] = []

    async def slowly(*args: Any) -> Any:
        waiting.append(asyncio.Event())
        await waiting[-1].wait()
        return await tokenize(*args)

    monkeypatch.setattr(model, "tokenize", slowly)
    async with AsyncClient(cluster.router.address, api_key="right") as client:
        single = asyncio.ensure_future(client.complete("a", Sampling(max_tokens=2), request_id="x"))
        await until(lambda: len(waiting) == 1, "one is tokenized, and has not got its id yet")
        running = asyncio.ensure_future(ask(cluster, "x"))
        await until(lambda: len(waiting) == 3, "so are the prompts of a call that has got it")
        waiting[0].set()
        with pytest.raises(InvalidRequest, match="'x' is running"):
            await single
        assert await client.cancel("x") is True
        for event in waiting:
            event.set()
        assert await running == CANCELLED[ask]  # type: ignore[index]
