"""Load on a router that costs little itself: streams of messages that are kept as they come and parsed afterwards."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from tokenizers import Tokenizer

from benchmarks.router_processes import REPOSITORY, SERVED_NAME
from protos import admin_pb2, admin_pb2_grpc, generation_pb2

STOPS = ("\n\nUser:", "<|end of answer|>", "Traceback (most", "###")
"""Stop strings that every stream is looked through for, and that do not come."""

READY_S = 30.0


def text_tokens(model_path: Path) -> list[int]:
    """Some thousand tokens of English, which the null workers say."""
    text = (REPOSITORY / "docs" / "kv-protocol.md").read_text(encoding="utf-8").replace("#", "")
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return tokens


def words(tokens: int, seed: int) -> str:
    """A text of about so many tokens, like no other of another seed."""
    draw = random.Random(seed)
    nouns = ["worker", "router", "token", "block", "cache", "ticket", "session", "prompt", "layer", "stream"]
    return " ".join(f"{draw.choice(nouns)} {draw.randrange(100)}" for _ in range(tokens // 4))


def generate_request(request_id: str, prompt: str | Sequence[int], max_tokens: int) -> generation_pb2.GenerateRequest:
    sampling = generation_pb2.Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, stop=STOPS)
    request = generation_pb2.GenerateRequest(request_id=request_id, model=SERVED_NAME, sampling=sampling)
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


@dataclass
class Stream:
    """One call of Generate: when each message came (seconds on the machine's monotonic clock), and the messages."""

    request_id: str
    sent: float = 0.0
    came: list[float] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)

    def parsed(self) -> list[generation_pb2.GenerateEvent]:
        return [generation_pb2.GenerateEvent.FromString(message) for message in self.messages]


class Load:
    """Clients of one router, each with a connection of its own. Use with `async with`."""

    def __init__(self, address: str, connections: int = 8) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(connections)]
        self._calls = [
            channel.unary_stream(
                "/pdserve.v1.Generation/Generate",
                request_serializer=generation_pb2.GenerateRequest.SerializeToString,
                response_deserializer=None,  # bytes as they are
            )
            for channel in self._channels
        ]
        self._next = 0

    async def ready(self, workers: int) -> None:
        """Until the router has a session with so many workers."""
        stub = admin_pb2_grpc.AdminStub(self._channels[0])
        async with asyncio.timeout(READY_S):
            while True:
                status = await stub.GetStatus(admin_pb2.GetStatusRequest(), wait_for_ready=True)
                if sum(worker.connected for worker in status.workers) == workers:
                    return
                await asyncio.sleep(0.05)

    async def stream(self, stream: Stream, prompt: str | Sequence[int], max_tokens: int) -> Stream:
        """Run a request to its end, or until this task is cancelled."""
        request = generate_request(stream.request_id, prompt, max_tokens)
        call = self._calls[self._next % len(self._calls)]
        self._next += 1
        stream.sent = time.monotonic()
        messages = call(request)
        while (message := await messages.read()) is not grpc.aio.EOF:
            stream.came.append(time.monotonic())
            stream.messages.append(message)
        return stream

    async def __aenter__(self) -> Load:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Of seconds, in milliseconds."""
    p50, p99, most = np.percentile(np.array(values) * 1000, (50, 99, 100))
    return {"median": float(p50), "p99": float(p99), "most": float(most)}


def shown(ms: dict[str, float]) -> str:
    return f"{ms['median']:.2f} ms in the median, {ms['p99']:.2f} at P99, {ms['most']:.2f} at most"
