"""What the router adds to the time to first token.

    python -m benchmarks.router ttft

The same null workers are asked in turn through a router, and by hand: `reserve` on the decode worker's session, then
with its ticket `prefill` on the prefill worker's, until that one reports the first token. Both go over gRPC on this
machine, one request at a time, and ask for one token. The router is asked with token ids, as the workers are, and
with a text of as many tokens, which it has to tokenise.

What a process between client and workers adds in any case, on this machine and by the same gRPC library, shows a bare
relay: it does by hand what the client did, for whoever calls it, checks nothing and chooses nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvloop
from tokenizers import Tokenizer

from benchmarks.router_by_hand import ByHand
from benchmarks.router_load import Load, Stream, percentiles, shown, text_tokens, words
from benchmarks.router_processes import relay_child, router_child, workers_child
from engine.model_store import resolve_model
from pdcore.types import RequestKey, RequestSpec, SamplingParams
from protos import generation_pb2, generation_pb2_grpc

ANSWER_S = 10.0
WARM_UP = 20


@dataclass(frozen=True)
class Prompt:
    text: str
    ids: tuple[int, ...]


async def _run(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    model_path = resolve_model(args.model).path
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    texts = [words(args.tokens, seed) for seed in range(args.requests + WARM_UP)]
    prompts = [Prompt(text, tuple(tokenizer.encode(text).ids)) for text in texts]
    names = ("by hand", "bare relay", "token ids", "text", "an empty call")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with (
        workers_child(text_tokens(model_path), prefill=1, decode=1, step_s=0.01) as workers,
        router_child(model_path, workers.ready["membership"]) as router,
        relay_child(workers.ready["workers"]) as relay,
    ):
        addresses = workers.ready["workers"]
        async with (
            Load(router.ready["address"], connections=1) as load,
            Load(relay.ready["address"], connections=1) as relayed,
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
                    "bare relay": await _routed(relayed, f"relay-{number}", prompt.ids),
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
    print(f"a bare relay adds {ms['bare relay']['median'] - hand:.2f} ms to the median, asked with token ids")
    for name in ("token ids", "text"):
        print(f"the router adds {ms[name]['median'] - hand:.2f} ms to the median, asked with {name}")
    if args.json:
        args.json.write_text(json.dumps(ms, indent=2))
