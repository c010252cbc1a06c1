"""Answers of the Open Inference Protocol: what the samples of a request's texts come to, as tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from pdcore.types import FinishReason
from protos.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from router.calls import Call, Calls
from router.claims import key_of
from router.open_inference_request import OUTPUTS, InferRequest, parameter
from router.stream import Chunk
from router.tensors import Element, Tensor, add_output

VERSION = "1"
"""Of the model: the only one that there is."""
FINAL = "triton_final_response"
"""Parameter of a response on a stream: whether it is the last one of its request."""

_UNFINISHED = b"None"  # as vLLM's backend for Triton says it
_FINISH = {FinishReason.STOP: b"stop", FinishReason.LENGTH: b"length", FinishReason.CANCELLED: b"cancelled"}

Send = Callable[[ModelInferResponse], Awaitable[None]]


@dataclass(slots=True)
class _Answer:
    """Of every sample of every text, the text first: its text, its finish reason, and its number of tokens."""

    texts: list[str]
    finished: list[bytes]
    tokens: list[int]

    @classmethod
    def empty(cls, count: int) -> _Answer:
        return cls([""] * count, [_UNFINISHED] * count, [0] * count)

    def add(self, place: int, chunk: Chunk) -> None:
        self.texts[place] += chunk.text
        self.tokens[place] += len(chunk.token_ids)
        if chunk.end is not None and chunk.end.outcome.error is None:  # an error is told by itself
            self.finished[place] = _FINISH[chunk.end.outcome.finish]


class Inference:
    """A request that runs.

    Args:
        message: as it came. asked: what it asks for. request_id: its name here.
        send: takes the responses of a streamed answer; returns once there is room for more, and raises ClientGone.
    """

    def __init__(
        self, calls: Calls, message: ModelInferRequest, asked: InferRequest, request_id: str, send: Send | None = None
    ) -> None:
        self._calls = calls
        self._message = message
        self._asked = asked
        self._request_id = request_id
        self._send = send
        self._count = len(asked.requests) * asked.samples
        self._left = self._count
        self._prompt_tokens = [0] * self._count
        self._whole = _Answer.empty(self._count)

    async def run(self, *, caller: str | None, remaining_s: float | None) -> ModelInferResponse:
        """Run it to its end; a streamed answer is sent on the way.

        Args:
            caller, remaining_s: see `Calls.run`.

        Returns:
            All of it.

        Raises:
            RequestError: one of its texts was refused, or has failed; the others are ended then.
        """
        if self._asked.timeout_s is not None:
            remaining_s = self._asked.timeout_s if remaining_s is None else min(remaining_s, self._asked.timeout_s)
        several = len(self._asked.requests) > 1
        with self._calls.sharing(self._request_id) if several else nullcontext():
            await self._run(caller, remaining_s, several=several)
        return self._response(self._whole)

    async def _run(self, caller: str | None, remaining_s: float | None, *, several: bool) -> None:
        runs = []
        keys: set[str] = set()
        for number, request in enumerate(self._asked.requests):
            request.request_id = self._request_id
            if request.idempotency_key in keys:  # one key for several texts, which do not exclude each other
                request.idempotency_key = key_of(request.idempotency_key, number)
            keys.add(request.idempotency_key)
            sink = _Sink(self, number)
            part = number if several else None
            runs.append(self._calls.run(request, sink, caller=caller, remaining_s=remaining_s, part=part))
        if not several:
            await runs[0]
        else:
            tasks = [asyncio.ensure_future(run) for run in runs]
            try:
                await asyncio.gather(*tasks)
            finally:  # the first error is the request's
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def began(self, number: int, prompt_tokens: int) -> None:
        """A text has been let in."""
        samples = self._asked.samples
        self._prompt_tokens[number * samples : (number + 1) * samples] = [prompt_tokens] * samples

    async def take(self, number: int, sample: int, chunk: Chunk) -> None:
        """There is more of a text's sample."""
        place = number * self._asked.samples + sample
        self._left -= chunk.end is not None and chunk.end.outcome.error is None
        if not self._asked.stream or self._send is None:
            self._whole.add(place, chunk)
            return
        news = _Answer.empty(self._count)
        news.add(place, chunk)
        response = self._response(news)
        response.parameters[FINAL].CopyFrom(parameter(self._left == 0))
        await self._send(response)

    def _response(self, answer: _Answer) -> ModelInferResponse:
        asked = self._asked
        inputs = [request.prompt for request in asked.requests for _ in range(asked.samples)]
        texts = (
            [before + text for before, text in zip(inputs, answer.texts, strict=True)] if asked.echo else answer.texts
        )
        values: dict[str, Sequence[Element]] = {
            "text_output": [text.encode() for text in texts],
            "finish_reason": answer.finished,
            "num_input_tokens": self._prompt_tokens,
            "num_output_tokens": answer.tokens,
        }
        response = ModelInferResponse(model_name=self._message.model_name, model_version=VERSION, id=self._message.id)
        response.parameters["request_id"].CopyFrom(parameter(self._request_id))
        shape = (len(asked.requests), asked.samples) if asked.batched else (self._count,)
        for name in asked.outputs:
            add_output(response, Tensor(name, OUTPUTS[name], shape, values[name]), raw=asked.raw)
        return response


class _Sink:
    """What comes of one text. A `router.calls.Sink`."""

    def __init__(self, inference: Inference, number: int) -> None:
        self._inference = inference
        self._number = number

    async def begin(self, call: Call) -> None:
        """See `router.calls.Sink`."""
        self._inference.began(self._number, len(call.request.prompt))

    async def write(self, sample: int, chunk: Chunk) -> None:
        """See `router.calls.Sink`."""
        await self._inference.take(self._number, sample, chunk)
