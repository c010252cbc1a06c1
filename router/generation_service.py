"""The public `Generation` service: gRPC's side of `router.calls`."""

from __future__ import annotations

import grpc

from pdcore.types import FinishReason
from protos import generation_pb2, generation_pb2_grpc
from protos.convert import logprobs_to_proto, model_to_proto, stats_to_proto
from router.api_keys import Door
from router.calls import Call, Calls, ClientGone
from router.stream import Chunk, Terminal
from router.tracker import Timeline
from router.wire_errors import REQUEST_ID_METADATA

_FINISH = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
}


class _Stream:
    """A call's answer as a stream of events."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._request_id = ""

    async def begin(self, call: Call) -> None:
        """See `router.calls.Sink`."""
        self._request_id = call.request_id
        # Fires however the call ends, also while a write waits for room.
        self._context.add_done_callback(lambda _: call.cancel())
        try:
            await self._context.send_initial_metadata(((REQUEST_ID_METADATA, call.request_id),))
        except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
            raise ClientGone from error

    async def write(self, sample: int, chunk: Chunk) -> None:
        """See `router.calls.Sink`."""
        try:
            await self._context.write(_event(self._request_id, sample, chunk))
        except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
            raise ClientGone from error


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """See generation.proto. Methods raise RequestError, and `router.guard` stands before them."""

    def __init__(self, calls: Calls, door: Door) -> None:
        self._calls = calls
        self._door = door

    def _caller(self, context: grpc.aio.ServicerContext) -> str | None:
        """The tenant whose key the call has; None where there are no keys."""
        return self._door.caller(context.invocation_metadata() or ())

    # A coroutine that writes, not a generator: it learns at once when the client has gone.
    async def Generate(  # type: ignore[override]
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        remaining_s = context.time_remaining()
        await self._calls.run(request, _Stream(context), caller=self._caller(context), remaining_s=remaining_s)

    async def Cancel(
        self, request: generation_pb2.CancelRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.CancelReply:
        return generation_pb2.CancelReply(found=self._calls.cancel(request.request_id, self._caller(context)))

    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.GetModelReply:
        return generation_pb2.GetModelReply(
            model=model_to_proto(self._calls.model(request.model)),
            has_chat_template=self._calls.text_model.has_chat_template,
            end_token_ids=self._calls.text_model.end_token_ids,
        )

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.TokenizeReply:
        return generation_pb2.TokenizeReply(token_ids=await self._calls.tokenize(request))

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.DetokenizeReply:
        return generation_pb2.DetokenizeReply(text=await self._calls.detokenize(request))


def _event(request_id: str, sample: int, chunk: Chunk) -> generation_pb2.GenerateEvent:
    event = generation_pb2.GenerateEvent(
        request_id=request_id, sample=sample, token_index=chunk.index, token_ids=chunk.token_ids, text=chunk.text
    )
    if chunk.logprobs is not None:
        event.logprobs.CopyFrom(logprobs_to_proto(chunk.logprobs))
    if chunk.prompt_logprobs is not None:
        event.prompt_logprobs.CopyFrom(logprobs_to_proto(chunk.prompt_logprobs))
    if chunk.end is not None and chunk.end.outcome.error is None:
        event.end.CopyFrom(_end(chunk.end))
    return event


def _end(terminal: Terminal) -> generation_pb2.End:
    return generation_pb2.End(
        finish_reason=_FINISH[terminal.outcome.finish],
        usage=generation_pb2.Usage(
            prompt_tokens=terminal.prompt_tokens,
            cached_tokens=terminal.timeline.cached_tokens,
            completion_tokens=terminal.completion_tokens,
        ),
        timeline=timeline_to_proto(terminal.timeline, terminal.completion_tokens),
    )


def timeline_to_proto(timeline: Timeline, completion_tokens: int) -> generation_pb2.Timeline:
    """Points in time to the durations that clients see, in milliseconds; 0 for what did not happen."""

    def between(start: float | None, stop: float | None) -> float:
        return 0.0 if start is None or stop is None else 1000 * (stop - start)

    decoding = between(timeline.first_token, timeline.last_token)
    return generation_pb2.Timeline(
        queued_ms=between(timeline.arrived, timeline.chosen),
        prefill_queued_ms=1000 * timeline.prefill_queued_s,
        prefill_ms=1000 * timeline.prefill_s,
        ttft_ms=between(timeline.arrived, timeline.first_token),
        second_token_ms=between(timeline.first_token, timeline.second_token),
        tpot_ms=decoding / (completion_tokens - 1) if completion_tokens > 1 else 0.0,
        total_ms=between(timeline.arrived, timeline.ended),
        mode=timeline.mode,
        reason=timeline.reason,
        prefill_worker=timeline.prefill_worker,
        decode_worker=timeline.decode_worker,
        kv=None if timeline.kv is None else stats_to_proto(timeline.kv),
        replays=timeline.replays,
    )
