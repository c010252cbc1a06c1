"""What the router adds to the time to first token.

    python -m benchmarks.router ttft

The same null workers are asked in turn through a router, and by hand: `reserve` on the decode worker's session, then
with its ticket `prefill` on the prefill worker's, until that one reports the first token. Both go over gRPC on this
machine, one request at a time, and ask for one token. The router is asked with token ids, as the workers are, and
with a text of as many tokens, which it has to tokenise.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop
from tokenizers import Tokenizer

from benchmarks.router_load import Load, Stream, percentiles, shown, text_tokens, words
from benchmarks.router_processes import router_child, workers_child
from engine.model_store import resolve_model
from pdcore.types import PROTOCOL_VERSION, RequestKey, RequestSpec, SamplingParams
from protos import generation_pb2, generation_pb2_grpc, kv_pb2, worker_pb2, worker_pb2_grpc
from protos.convert import spec_to_proto

ANSWER_S = 10.0
WARM_UP = 20


class ByHand:
    """A session with one worker. Use with `async with`."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._waiting: dict[str, asyncio.Future[Any]] = {}

    async def __aenter__(self) -> ByHand:
        self._call = worker_pb2_grpc.WorkerStub(self._channel).Session()
        hello = worker_pb2.Hello(
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            router_id="by-hand",
            router_incarnation="by-hand-1",
        )
        await self._call.write(worker_pb2.SessionCommand(hello=hello))
        assert (await self._call.read()).HasField("welcome")
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        self._call.cancel()
        await self._channel.close()

    async def reserve(self, spec: RequestSpec) -> kv_pb2.Ticket:
        reserve = worker_pb2.Reserve(request=spec_to_proto(spec))
        answer: kv_pb2.Ticket = await self._ask(spec.key, worker_pb2.SessionCommand(reserve=reserve))
        return answer

    async def first_token(self, spec: RequestSpec, ticket: kv_pb2.Ticket) -> int:
        prefill = worker_pb2.Prefill(request=spec_to_proto(spec), ticket=ticket)
        answer: int = await self._ask(spec.key, worker_pb2.SessionCommand(prefill=prefill))
        return answer

    async def release(self, key: RequestKey) -> None:
        order = worker_pb2.Abort(request_id=key.request_id, attempt=key.attempt, reason="done")
        await self._call.write(worker_pb2.SessionCommand(abort=order))

    async def _ask(self, key: RequestKey, command: worker_pb2.SessionCommand) -> Any:
        answer = self._waiting[key.request_id] = asyncio.get_running_loop().create_future()
        await self._call.write(command)
        return await asyncio.wait_for(answer, ANSWER_S)

    async def _read(self) -> None:
        while isinstance(event := await self._call.read(), worker_pb2.SessionEvent):
            if event.HasField("reserve"):
                self._waiting.pop(event.reserve.request_id).set_result(event.reserve.granted)
            for token in event.report.tokens:
                self._waiting.pop(token.request_id).set_result(token.token_id)


@dataclass(frozen=True)
class Prompt:
    text: str
    ids: tuple[int, ...]


async def _run(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    model_path = resolve_model(args.model).path
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    texts = [words(args.tokens, seed) for seed in range(args.requests + WARM_UP)]
    prompts = [Prompt(text, tuple(tokenizer.encode(text).ids)) for text in texts]
    seconds: dict[str, list[float]] = {"by hand": [], "token ids": [], "text": [], "an empty call": []}
    with (
        workers_child(text_tokens(model_path), prefill=1, decode=1, step_s=0.01) as workers,
        router_child(model_path, workers.ready["membership"]) as router,
    ):
        addresses = workers.ready["workers"]
        async with (
            Load(router.ready["address"], connections=1) as load,
            ByHand(addresses["prefill-0"]) as prefill,
            ByHand(addresses["decode-0"]) as decode,
            grpc.aio.insecure_channel(router.ready["address"]) as channel,
        ):
            await load.ready(workers=2)
            stub = generation_pb2_grpc.GenerationStub(channel)
            gc.collect()
            gc.freeze()
            used = await asyncio.to_thread(router.cpu_s)
            for number, prompt in enumerate(prompts):
                took = {
                    "by hand": await _by_hand(decode, prefill, f"hand-{number}", prompt),
                    "token ids": await _routed(load, f"ids-{number}", prompt.ids),
                    "text": await _routed(load, f"text-{number}", prompt.text),
                }
                start = time.monotonic()
                await stub.GetModel(generation_pb2.GetModelRequest())
                took["an empty call"] = time.monotonic() - start
                if number >= WARM_UP:
                    for name, value in took.items():
                        seconds[name].append(value)
            used = await asyncio.to_thread(router.cpu_s) - used
    print(f"of the router's CPU for all three: {1000 * used / len(prompts):.2f} ms")
    return {name: percentiles(values) for name, values in seconds.items()}


async def _by_hand(decode: ByHand, prefill: ByHand, request_id: str, prompt: Prompt) -> float:
    key = RequestKey(request_id, 1)
    start = time.monotonic()
    spec = RequestSpec(key, prompt.ids, SamplingParams(max_tokens=1))
    await prefill.first_token(spec, await decode.reserve(spec))
    took = time.monotonic() - start
    await decode.release(key)
    return took


async def _routed(load: Load, request_id: str, prompt: str | tuple[int, ...]) -> float:
    stream = await load.stream(Stream(request_id), prompt, max_tokens=1)
    return stream.came[0] - stream.sent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer it is")
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt, about; no two are alike")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--json", type=Path)


def main(args: argparse.Namespace) -> None:
    ms = uvloop.run(_run(args))
    for name, values in ms.items():
        print(f"{name:14} {shown(values)}")
    hand = ms["by hand"]["median"]
    for name in ("token ids", "text"):
        print(f"the router adds {ms[name]['median'] - hand:.2f} ms to the median, asked with {name}")
    if args.json:
        args.json.write_text(json.dumps(ms, indent=2))
