"""Whether long prompts that are tokenised delay other requests' tokens.

    python -m benchmarks.router prompts

Streams of null workers run at a moderate pace: first alone, then while `--prompts` texts of `--tokens` tokens
come a second, which ask for one token each, and short ones beside them. Late is a token as in `relay`; the first
tokens' times are those of the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import uvloop

from benchmarks.router_load import Load, Stream, percentiles, shown, text_tokens, words
from benchmarks.router_processes import router_child, workers_child
from benchmarks.router_relay import all_begun, lateness
from engine.model_store import resolve_model

SETTLE_S = 1.0
SHORT_TOKENS = 64
END_S = 60.0


@dataclass(frozen=True)
class Result:
    """What `--json` gets, in milliseconds. `alone`, `beside`: how late tokens are without and with the prompts.
    `long`, `short`: time to first token of those."""

    alone: dict[str, float]
    beside: dict[str, float]
    long: dict[str, float]
    short: dict[str, float]
    prompts: int
    router_cpu: float


async def _run(args: argparse.Namespace) -> Result:
    model_path = resolve_model(args.model).path
    count = int(args.prompts * args.seconds)
    texts = [(words(args.tokens, seed), words(SHORT_TOKENS, -1 - seed)) for seed in range(count)]
    with (
        workers_child(text_tokens(model_path), prefill=1, decode=1, step_s=1 / args.pace) as workers,
        router_child(model_path, workers.ready["membership"]) as router,
    ):
        async with Load(router.ready["address"], args.connections) as load:
            await load.ready(workers=2)
            streams = [Stream(f"stream-{number}") for number in range(args.streams)]
            tasks = [asyncio.create_task(load.stream(stream, range(300, 316), 1 << 22)) for stream in streams]
            await all_begun(streams, tasks)
            gc.collect()  # takes a third of a second, so not while messages count
            gc.freeze()
            await asyncio.sleep(SETTLE_S)
            start = time.monotonic()
            await asyncio.sleep(args.seconds)
            between, used = time.monotonic(), await asyncio.to_thread(router.cpu_s)
            asked: list[asyncio.Task[Stream]] = []
            for number, (long, short) in enumerate(texts):
                await asyncio.sleep(between + number / args.prompts - time.monotonic())
                asked.append(asyncio.create_task(load.stream(Stream(f"long-{number}"), long, 1)))
                asked.append(asyncio.create_task(load.stream(Stream(f"short-{number}"), short, 1)))
            async with asyncio.timeout(END_S):
                answered = await asyncio.gather(*asked)
            end = time.monotonic()
            used = await asyncio.to_thread(router.cpu_s) - used
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, grpc.aio.AioRpcError):
                    raise outcome
            reported = await asyncio.to_thread(workers.reported)
    firsts = [stream.came[0] - stream.sent for stream in answered]
    return Result(
        alone=percentiles(lateness(streams, reported, start, between)),
        beside=percentiles(lateness(streams, reported, between, end)),
        long=percentiles(firsts[::2]),
        short=percentiles(firsts[1::2]),
        prompts=count,
        router_cpu=used / (end - between),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer it is")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--pace", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--prompts", type=float, default=10.0, help="a second, and as many short ones")
    parser.add_argument("--tokens", type=int, default=10_000, help="of each of them")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each half")
    parser.add_argument("--json", type=Path)


def main(args: argparse.Namespace) -> None:
    result = uvloop.run(_run(args))
    print(f"{args.streams} streams of {args.pace:g} tokens/s are late")
    print(f"  alone:                   {shown(result.alone)}")
    print(f"  beside {args.prompts:g} prompts a second: {shown(result.beside)}")
    print(f"first token of prompts of {args.tokens:,} tokens: {shown(result.long)}")
    print(f"first token of prompts of {SHORT_TOKENS} tokens: {shown(result.short)}")
    print(f"of a core meanwhile: router {result.router_cpu:.2f}")
    if args.json:
        args.json.write_text(json.dumps(asdict(result), indent=2))
