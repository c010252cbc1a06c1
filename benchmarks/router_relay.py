"""How many tokens the router relays for a second of its CPU, and how late they are.

    python -m benchmarks.router relay --rate 6000     what a message with one token costs
    python -m benchmarks.router relay --rate 40000    more than that: tokens are put together

`--rate` tokens a second come from null workers in a process of their own, in steps: every running request gets a
token a step, and a decode worker reports its requests' tokens in one message. The router, alone in its process, turns
them into text, looks for four stop strings, and writes each stream's messages. The load, in a third process, keeps
messages as bytes. Late is a token by the time between the worker's step and its arrival at the client, all on one
machine's clock: whatever waits on the way counts, workers' and clients' own delay too.

CPU time is that of the whole process, all threads, by getrusage. If a process other than the router's has no time
left (`of a core` near 1), its own delay is what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import uvloop

from benchmarks.router_load import Load, Stream, percentiles, shown, text_tokens
from benchmarks.router_processes import cpu_s, router_child, workers_child
from engine.model_store import resolve_model
from protos import generation_pb2

BEGIN_S = 60.0
SETTLE_S = 2.0
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Result:
    """What `--json` gets, over the time measured.

    Attributes:
        cpu: seconds of CPU that each process used for each second.
        late: of tokens, milliseconds.
    """

    streams: int
    seconds: float
    tokens: int
    messages: int
    single: int
    cpu: dict[str, float]
    tokens_per_cpu_s: float
    messages_per_cpu_s: float
    tokens_per_message: float
    late: dict[str, float]


async def all_begun(streams: list[Stream], tasks: list[asyncio.Task[Stream]]) -> None:
    """Until each stream has had something."""
    async with asyncio.timeout(BEGIN_S):
        while not all(stream.messages for stream in streams):
            for task in tasks:
                if task.done():
                    task.result()
                    raise SystemExit("a stream has ended before its time")
            await asyncio.sleep(0.05)


async def _run(args: argparse.Namespace) -> Result:
    model_path = resolve_model(args.model).path
    tokens = text_tokens(model_path)
    workers_wanted = {"prefill": args.prefill, "decode": args.decode}
    with (
        workers_child(tokens, step_s=args.streams / args.rate, **workers_wanted) as workers,
        router_child(model_path, workers.ready["membership"]) as router,
    ):
        async with Load(router.ready["address"], args.connections) as load:
            await load.ready(args.prefill + args.decode)
            streams = [Stream(f"relay-{number}") for number in range(args.streams)]
            tasks = []
            for number, stream in enumerate(streams):
                prompt = [300 + number, *range(300, 300 + PROMPT_TOKENS - 1)]
                tasks.append(asyncio.create_task(load.stream(stream, prompt, 1 << 22)))
                await asyncio.sleep(0.002)
            await all_begun(streams, tasks)
            gc.collect()  # takes a third of a second, so not while messages count
            gc.freeze()
            await asyncio.sleep(SETTLE_S)
            children = {"router": router, "workers": workers}

            async def used() -> dict[str, float]:
                there = {name: await asyncio.to_thread(child.cpu_s) for name, child in children.items()}
                return {**there, "load": cpu_s()}

            before, start = await used(), time.monotonic()
            await asyncio.sleep(args.seconds)
            after, end = await used(), time.monotonic()
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, grpc.aio.AioRpcError):
                    raise outcome
            reported = await asyncio.to_thread(workers.reported)
    return _result(streams, reported, start, end, {name: after[name] - before[name] for name in after})


def within(stream: Stream, start: float, end: float) -> Iterator[tuple[float, generation_pb2.GenerateEvent]]:
    """The stream's messages that came in that time, each with when it did."""
    first, last = bisect_left(stream.came, start), bisect_left(stream.came, end)
    for came, message in zip(stream.came[first:last], stream.messages[first:last], strict=True):
        yield came, generation_pb2.GenerateEvent.FromString(message)


def lateness(
    streams: Sequence[Stream], reported: Mapping[str, Sequence[float]], start: float, end: float
) -> list[float]:
    """Seconds between report and arrival of each token that came in that time."""
    return [
        came - reported[stream.request_id][event.token_index + number]
        for stream in streams
        for came, event in within(stream, start, end)
        for number in range(len(event.token_ids))
    ]


def _result(
    streams: list[Stream], reported: dict[str, list[float]], start: float, end: float, used: dict[str, float]
) -> Result:
    counts = Counter(len(event.token_ids) for stream in streams for _, event in within(stream, start, end))
    messages, tokens = counts.total(), sum(count * times for count, times in counts.items())
    return Result(
        streams=len(streams),
        seconds=end - start,
        tokens=tokens,
        messages=messages,
        single=counts[1],
        cpu={name: seconds / (end - start) for name, seconds in used.items()},
        tokens_per_cpu_s=tokens / used["router"],
        messages_per_cpu_s=messages / used["router"],
        tokens_per_message=tokens / messages,
        late=percentiles(lateness(streams, reported, start, end)),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer it is")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=6000.0, help="tokens a second, all streams together")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers")
    parser.add_argument("--decode", type=int, default=4, help="decode workers")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)


def main(args: argparse.Namespace) -> None:
    result = uvloop.run(_run(args))
    print(
        f"{result.streams} streams, {result.tokens / result.seconds:,.0f} tokens/s of {args.rate:,.0f} asked for, "
        f"{result.messages / result.seconds:,.0f} messages/s for {result.seconds:.1f} s; "
        f"{result.tokens_per_message:.2f} tokens a message, {result.single / result.messages:.1%} have one"
    )
    print("of a core: " + ", ".join(f"{name} {used:.2f}" for name, used in result.cpu.items()))
    print(
        f"for a second of the router's CPU: {result.tokens_per_cpu_s:,.0f} tokens, "
        f"{result.messages_per_cpu_s:,.0f} messages"
    )
    print(f"late: {shown(result.late)}")
    if args.json:
        args.json.write_text(json.dumps(asdict(result), indent=2))
