"""A plain client of the public API. As a program (``ADDRESS TOKENS MAX``) it streams one request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from protos import generation_pb2, generation_pb2_grpc


@dataclass(slots=True)
class Outcome:
    """What a client saw of one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: generation_pb2.End | None = None
    error: grpc.StatusCode | None = None
    details: str = ""


def request_of(prompt: Sequence[int] | str, max_tokens: int, **sampling: object) -> generation_pb2.GenerateRequest:
    """Greedy and past the end tokens unless `sampling` says otherwise."""
    fields: dict[str, object] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    message = generation_pb2.GenerateRequest(sampling=generation_pb2.Sampling(**(fields | sampling)))  # type: ignore[arg-type]
    if isinstance(prompt, str):
        message.prompt = prompt
    else:
        message.token_ids.ids.extend(prompt)
    return message


def generate(
    address: str,
    prompt: Sequence[int] | str,
    max_tokens: int,
    *,
    request_id: str = "",
    timeout_s: float = 60.0,
    **sampling: object,
) -> Outcome:
    """Run one request to its end and check what the stream promises: indexes in order, one `end`, at the end."""
    message = request_of(prompt, max_tokens, **sampling)
    message.request_id = request_id
    outcome = Outcome()
    with grpc.insecure_channel(address) as channel:
        try:
            for event in generation_pb2_grpc.GenerationStub(channel).Generate(message, timeout=timeout_s):
                assert outcome.end is None, "an event after the last one"
                if event.token_ids:
                    assert event.token_index == len(outcome.tokens), (event.token_index, len(outcome.tokens))
                outcome.tokens.extend(event.token_ids)
                outcome.text += event.text
                if event.HasField("end"):
                    outcome.end = event.end
        except grpc.RpcError as error:
            outcome.error, outcome.details = error.code(), error.details()
    assert (outcome.end is None) != (outcome.error is None), "exactly one terminal event"
    return outcome


if __name__ == "__main__":
    address, prompt, limit = sys.argv[1:]
    print(generate(address, [int(t) for t in prompt.split(",")], int(limit)))
