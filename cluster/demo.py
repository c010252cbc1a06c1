"""The demonstration: a small cluster of its own, three requests through its public API, and where their time went."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Protocol

import grpc

from cluster.timeline import Answer, finish_reason
from pdcore.errors import PdserveError
from protos import generation_pb2, generation_pb2_grpc

_ANSWER_S = 120.0  # bound of one answer


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request of the demonstration.

    Attributes:
        name: what the terminal calls it.
        message: the user's chat message.
        max_tokens: length of the answer at most.
    """

    name: str
    message: str
    max_tokens: int


class DemoView(Protocol):
    """Shows answers while they come in."""

    def begin(self, requests: Sequence[DemoRequest]) -> None:
        """These requests run at once from now on."""
        ...

    def text(self, name: str, piece: str) -> None:
        """Another piece of an answer."""
        ...

    def finish(self) -> None:
        """The requests of the last `begin` are done."""
        ...


def demo_rounds() -> list[list[DemoRequest]]:
    """The requests, in rounds: those of a round run at once."""
    document = _input("harbours.md")
    summarise = f"Summarise the following article in three sentences.\n\n{document}"
    return [
        [DemoRequest("chat", _input("chat.txt"), 48)],
        [DemoRequest("document", summarise, 32), DemoRequest("code", _input("code.txt"), 40)],
    ]


async def run_requests(address: str, rounds: Sequence[Sequence[DemoRequest]], view: DemoView) -> list[Answer]:
    """Send the requests to the router at `address`, greedily, and show the answers as they come.

    Raises:
        PdserveError: a request failed; names it and gives the cluster's words.
    """
    answers = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        for requests in rounds:
            view.begin(requests)
            try:
                answers += await asyncio.gather(*(_run(stub, request, view) for request in requests))
            finally:
                view.finish()
    return answers


def check_disaggregated(answers: Sequence[Answer]) -> None:
    """Make sure that the answers show what the demonstration is about.

    Raises:
        PdserveError: an answer was not completed, or one worker did all of it by itself; names request and reason.
    """
    for answer in answers:
        assert answer.end is not None, answer.name
        timeline, reason = answer.end.timeline, finish_reason(answer.end)
        if reason not in ("stop", "length"):
            raise PdserveError(f"request {answer.name!r} was not completed: it finished with {reason!r}")
        if timeline.mode != "disaggregated" or timeline.kv.wire_bytes == 0:
            raise PdserveError(
                f"request {answer.name!r} was not disaggregated: its mode was {timeline.mode!r} ({timeline.reason}), "
                f"and {timeline.kv.wire_bytes} bytes of KV travelled from {timeline.prefill_worker or 'nowhere'!r} "
                f"to {timeline.decode_worker or 'nowhere'!r}; a worker was lost or unreachable, try again"
            )


def to_dict(answers: Sequence[Answer]) -> dict[str, object]:
    """The finished requests as plain data."""
    return {"requests": [answer.to_dict() for answer in answers]}


async def _run(stub: generation_pb2_grpc.GenerationStub, request: DemoRequest, view: DemoView) -> Answer:
    answer = Answer(request.name)
    message = generation_pb2.GenerateRequest(
        request_id=f"demo-{request.name}",
        chat=generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content=request.message)]),
        sampling=generation_pb2.Sampling(max_tokens=request.max_tokens, temperature=0.0),
    )
    try:
        async for event in stub.Generate(message, timeout=_ANSWER_S):
            answer.add(event)
            view.text(request.name, event.text)
    except grpc.aio.AioRpcError as error:
        raise PdserveError(f"request {request.name!r} failed: {error.code().name}, {error.details()}") from error
    if answer.end is None:
        raise PdserveError(f"request {request.name!r} ended before its answer was complete")
    return answer


def _input(name: str) -> str:
    return (resources.files("cluster") / "demo_inputs" / name).read_text(encoding="utf-8").strip()
