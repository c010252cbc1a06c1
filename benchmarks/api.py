"""What the two faces of a router cost, side by side in one run: gRPC `Generate`, and OpenAI's completions over HTTP.

    python -m benchmarks.api --json build/api.json

Null workers in a process of their own generate; the router, alone in its process, does all that it does for anybody.
First, one request at a time, by each face in turn: the time to first token of prompts of `--tokens` token ids. Then
`--connections` streams at once, each on a connection of its own, by one face and then by the other: tokens a second
that came, the router's CPU (getrusage, all threads), and how large messages are.

Neither client has a library whose time would count as the router's, but the streams of gRPC, which are grpc.aio's.
Clients keep what comes as bytes and look at it afterwards, so that they are not what is measured. A message of HTTP
is an event; its size has the framing of chunks in it, that of gRPC has the five bytes before a message, and neither
what TCP and HTTP/2 add.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/engine.py hides the package else

import uvloop

from benchmarks.router_load import STOPS, Load, Stream, generate_request, percentiles, shown, text_tokens
from benchmarks.router_processes import SERVED_NAME, Child, cpu_s, router_child, workers_child
from engine.model_store import resolve_model
from protos import generation_pb2
from tests.support.http2 import DATA, END_STREAM, HEADERS, WINDOW_UPDATE, Frame, Http2Connection

WARM_UP = 20
GRPC_HEAD_BYTES = 5
_END = b"0\r\n\r\n"
_EVENT = b"data: {"
ANSWER_S = 120.0
WANTED_MS = 1.0
"""That HTTP may add to the median time to first token."""


@dataclass
class Answer(asyncio.Protocol):
    """An HTTP connection that keeps what comes, and when (seconds on the machine's monotonic clock)."""

    sent: float = 0.0
    came: list[tuple[float, bytes]] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.came.append((time.monotonic(), data))
        if data.endswith(_END) and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the router closed the connection"))

    async def ask(self, host: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Send a request, and wait for the end of its answer."""
        body = json.dumps(
            {
                "model": SERVED_NAME,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                "stop": list(STOPS),
                "ignore_eos": True,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        self.came.clear()
        self.done = asyncio.get_running_loop().create_future()
        self.sent = time.monotonic()
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await asyncio.wait_for(self.done, ANSWER_S)

    def first_token_s(self) -> float:
        return next(at for at, data in self.came if _EVENT in data) - self.sent

    def messages(self) -> tuple[int, int]:
        """How many events came, and how many bytes with them."""
        text = b"".join(data for _, data in self.came)
        events = text.partition(b"\r\n\r\n")[2]
        return events.count(_EVENT), len(events)


class BareCalls(Http2Connection):
    """Calls of Generate one after the other, without a gRPC library, whose own time would count as the router's."""

    _stream = -1

    async def ask(self, request: generation_pb2.GenerateRequest) -> float:
        """Run a request to its end; returns seconds to the first of its answer's messages."""
        self._stream += 2
        self._first: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sent = time.monotonic()
        self.call(self._stream, "/pdserve.v1.Generation/Generate", request.SerializeToString())
        await asyncio.wait_for(self._ended, ANSWER_S)
        self.frames.clear()
        return self._first.result() - sent

    def _take(self, frame: Frame) -> None:
        super()._take(frame)
        if frame.stream != self._stream:
            return
        if frame.kind == DATA:
            self.send(WINDOW_UPDATE, payload=struct.pack("!I", len(frame.payload)))
            if not self._first.done():
                self._first.set_result(time.monotonic())
        if frame.kind == HEADERS and frame.flags & END_STREAM:
            self._ended.set_result(None)


async def connect(address: str) -> Answer:
    host, _, port = address.rpartition(":")
    _, answer = await asyncio.get_running_loop().create_connection(Answer, host.strip("[]"), int(port))
    return answer


@dataclass(frozen=True)
class Streamed:
    """Many streams by one face: tokens that came each second, and for a second of the router's CPU."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    router_cpu: float
    load_cpu: float
    tokens_per_message: float
    bytes_per_message: float


async def _ttft(args: argparse.Namespace, grpc_address: str, address: str) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"grpc": [], "http": []}
    answer = await connect(address)
    async with BareCalls(grpc_address) as calls:
        for number in range(args.requests + WARM_UP):
            prompt = [300 + number, *range(300, 299 + args.tokens)]  # like no other
            by_grpc = await calls.ask(generate_request(f"grpc-{number}", prompt, 1))
            await answer.ask(address, [100_000 + number, *prompt[1:]], 1)
            if number >= WARM_UP:
                seconds["grpc"].append(by_grpc)
                seconds["http"].append(answer.first_token_s())
    answer.transport.close()
    return seconds


async def _streamed(
    args: argparse.Namespace, router: Child, run: Callable[[int, list[int]], Awaitable[tuple[int, int]]]
) -> Streamed:
    """`run`: a stream, by its number and prompt; returns its messages and their bytes."""
    gc.collect()
    router_before, load_before, start = await asyncio.to_thread(router.cpu_s), cpu_s(), time.monotonic()
    prompts = ([300 + number, *range(300, 315)] for number in range(args.connections))
    counts = await asyncio.gather(*(run(number, prompt) for number, prompt in enumerate(prompts)))
    took = time.monotonic() - start
    router_used, load_used = await asyncio.to_thread(router.cpu_s) - router_before, cpu_s() - load_before
    tokens, messages = args.connections * args.output, sum(count for count, _ in counts)
    return Streamed(
        tokens_per_s=tokens / took,
        tokens_per_cpu_s=tokens / router_used,
        router_cpu=router_used / took,
        load_cpu=load_used / took,
        tokens_per_message=tokens / messages,
        bytes_per_message=sum(size for _, size in counts) / messages,
    )


async def _run(args: argparse.Namespace) -> dict[str, object]:
    model_path = resolve_model(args.model).path
    with (
        workers_child(text_tokens(model_path), prefill=2, decode=2, step_s=args.connections / args.rate) as workers,
        router_child(model_path, workers.ready["membership"], http_port=0) as router,
    ):
        address = router.ready["http_address"]
        async with Load(router.ready["address"], connections=args.connections) as load:
            await load.ready(workers=4)
            gc.collect()
            gc.freeze()
            ttft = await _ttft(args, router.ready["address"], address)
            answers = await asyncio.gather(*(connect(address) for _ in range(args.connections)))

            async def by_grpc(number: int, prompt: list[int]) -> tuple[int, int]:
                stream = await load.stream(Stream(f"many-{number}"), prompt, args.output)
                return len(stream.messages), sum(GRPC_HEAD_BYTES + len(message) for message in stream.messages)

            async def by_http(number: int, prompt: list[int]) -> tuple[int, int]:
                await answers[number].ask(address, prompt, args.output)
                return answers[number].messages()

            streamed = {
                "grpc": await _streamed(args, router, by_grpc),
                "http": await _streamed(args, router, by_http),
            }
            for answer in answers:
                answer.transport.close()
    return {
        "ttft_ms": {face: percentiles(values) for face, values in ttft.items()},
        "streamed": {face: asdict(result) for face, result in streamed.items()},
    }


def verdict(ttft_ms: Mapping[str, Mapping[str, float]]) -> str:
    """What HTTP adds to the median time to first token, and whether that is as wanted, in words."""
    added = ttft_ms["http"]["median"] - ttft_ms["grpc"]["median"]
    return f"http adds {added:.2f} ms to the median, {'within' if added <= WANTED_MS else 'above'} {WANTED_MS:g} ms"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer it is")
    parser.add_argument("--requests", type=int, default=300, help="for the time to first token, by each face")
    parser.add_argument("--tokens", type=int, default=128, help="of their prompts")
    parser.add_argument("--connections", type=int, default=100, help="streams at once")
    parser.add_argument("--output", type=int, default=600, help="tokens of each stream")
    parser.add_argument("--rate", type=float, default=6000, help="tokens a second that the workers generate")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    result = uvloop.run(_run(args))
    ttft, streamed = result["ttft_ms"], result["streamed"]
    assert isinstance(ttft, dict)
    assert isinstance(streamed, dict)
    for face, ms in ttft.items():
        print(f"{face}: first token after {shown(ms)}")
    print(verdict(ttft))
    for face, many in streamed.items():
        print(
            f"{face}: {many['tokens_per_s']:,.0f} tokens/s over {args.connections} connections, "
            f"{many['tokens_per_cpu_s']:,.0f} for a second of the router's CPU; "
            f"{many['tokens_per_message']:.2f} tokens and {many['bytes_per_message']:.0f} bytes a message; "
            f"of a core: router {many['router_cpu']:.2f}, load {many['load_cpu']:.2f}"
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
