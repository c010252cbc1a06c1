"""The public `Generation` service: a thin shell over validation, dispatcher and text."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import grpc

from pdcore.clock import Clock
from pdcore.config import RouterConfig
from pdcore.errors import InternalError, RequestError, Unavailable
from pdcore.types import FinishReason
from protos import generation_pb2, generation_pb2_grpc
from protos.convert import logprobs_to_proto, model_to_proto, stats_to_proto
from router.api_keys import Door, tenant_of
from router.claims import Claim, Claims
from router.dispatcher import Dispatcher, RunningRequest
from router.load_meter import Pacer
from router.logit_validation import check_token_ids
from router.pacing import pause
from router.stream import Chunk, Terminal
from router.text import TextStream
from router.tokenizer import TextModel
from router.tracker import Timeline
from router.turns import Turns
from router.validation import GenerationRequest, Limits, check_model, tokenize_input, validate
from router.wire_errors import abort

logger = logging.getLogger(__name__)

REQUEST_ID_METADATA = "x-request-id"
"""Initial metadata of Generate: the request's id, which the router makes if the client sent none."""

_FINISH = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
}

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def _with_status(handler: Handler) -> Handler:
    """Let nobody in without a key, where there are keys; and turn errors into statuses: a RequestError into its own,
    anything else into INTERNAL without details."""

    @wraps(handler)
    async def wrapper(self: GenerationService, request: Any, context: grpc.aio.ServicerContext) -> Any:
        failure: RequestError
        try:
            self.caller(context)
            return await handler(self, request, context)
        except RequestError as error:
            failure = error
        except grpc.aio.AbortError:
            raise
        except Exception:
            request_id = getattr(request, "request_id", "")[:128]
            logger.exception("internal error in a call, request %s", request_id, extra={"request_id": request_id})
            failure = InternalError(f"internal error, request {request_id}" if request_id else "internal error")
        with suppress(grpc.aio.InternalError, grpc.aio.UsageError):  # the call is over, and nobody there to be told
            await abort(context, failure)

    return wrapper  # type: ignore[return-value]


@dataclass(eq=False, slots=True)
class _Call:
    """A Generate call: a request's samples, which share one stream.

    `claim`: of its idempotency key. `ended`: samples whose end is told, or about to be.
    `writing_since`: when the write in progress began (seconds on the clock). `turn`: one writes at a time.
    """

    request_id: str
    samples: list[RunningRequest]
    task: asyncio.Task[Any]
    claim: Claim | None = None
    ended: int = 0
    writing_since: float | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def cancel(self) -> None:
        """End what has not ended."""
        for sample in self.samples:
            sample.cancel()


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """See generation.proto."""

    def __init__(
        self,
        config: RouterConfig,
        dispatcher: Dispatcher,
        text_model: TextModel,
        *,
        door: Door,
        claims: Claims,
        clock: Clock,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._text_model = text_model
        self._door = door
        self._claims = claims
        self._clock = clock
        self._calls: set[_Call] = set()
        self._pacer = Pacer(clock.now())
        self._turns = Turns()

    def caller(self, context: grpc.aio.ServicerContext) -> str | None:
        """The tenant whose key the call has; None where there are no keys. Raises Unauthenticated."""
        return self._door.caller(context.invocation_metadata() or ())

    # -- Generate ------------------------------------------------------------------------------------------------

    # A coroutine that writes, not a generator: it learns at once when the client has gone.
    @_with_status
    async def Generate(  # type: ignore[override]
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        remaining = context.time_remaining()
        deadline = None if remaining is None else self._clock.now() + remaining
        if self._dispatcher.draining:
            raise Unavailable("the router is draining")
        tenant = tenant_of(self.caller(context), request.tenant)
        admission = self._dispatcher.admission
        admission.knock(tenant)  # before the prompt is tokenized
        checked = await validate(
            request,
            text_model=self._text_model,
            served_name=self._config.served_name,
            limits=self._limits(),
            in_flight=self._dispatcher.request_ids,
            tenant=tenant,
            default_class=admission.default_class(tenant),
        )
        texts = [
            self._text_model.stream(
                checked.stops,
                include_stop=checked.include_stop,
                min_tokens=checked.params.min_tokens,
                skip_special=checked.skip_special,
            )
            for _ in range(checked.samples)
        ]
        async with self._claims.held(checked.tenant, checked.idempotency_key, checked.request_id) as claim:
            await self._run(checked, texts, deadline, claim, context)

    async def _run(
        self,
        request: GenerationRequest,
        texts: Sequence[TextStream],
        deadline: float | None,
        claim: Claim | None,
        context: grpc.aio.ServicerContext,
    ) -> None:
        samples = self._dispatcher.submit(request, texts, deadline)
        task = asyncio.current_task()
        assert task is not None
        call = _Call(request.request_id, samples, task, claim)
        self._calls.add(call)
        # Fires however the call ends, also when this coroutine is stuck in a write.
        context.add_done_callback(lambda _: call.cancel())
        try:
            await asyncio.sleep(0)  # what the request's worker is told first goes out before this does
            await context.send_initial_metadata(((REQUEST_ID_METADATA, request.request_id),))
            await self._stream_all(call, context)
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            return  # a write failed: the client went away, and there is nobody to tell
        finally:
            call.cancel()
            self._calls.discard(call)

    async def _stream_all(self, call: _Call, context: grpc.aio.ServicerContext) -> None:
        if len(call.samples) == 1:
            await self._stream(call, 0, context)
            return
        tasks = [asyncio.ensure_future(self._stream(call, sample, context)) for sample in range(len(call.samples))]
        try:
            await asyncio.gather(*tasks)
        finally:  # the first error is the call's; the others have nobody to write to any more
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, call: _Call, sample: int, context: grpc.aio.ServicerContext) -> None:
        """Write a sample's chunks, each with all that is there by then: when `router.pacing` has it, and in turn."""
        running = call.samples[sample]
        written_at = -math.inf
        while True:
            await running.ready()
            now = self._clock.now()
            delay = pause(self._pacer.look(now), now - written_at)
            if delay:
                await asyncio.sleep(delay)
            await self._turns.turn()
            chunk = running.take()
            error = chunk.end.outcome.error if chunk.end is not None else None
            if chunk.end is not None:
                call.ended += 1
                if call.ended == len(call.samples):
                    await self._claims.give_back(call.claim)  # so that who hears of the end may use the key again
            if error is None or chunk.token_ids or chunk.prompt_logprobs is not None:
                event = _event(call.request_id, sample, chunk)
                async with call.turn:
                    call.writing_since = written_at = self._clock.now()
                    await context.write(event)
                    call.writing_since = None
                running.took(len(chunk.token_ids))
            if error is not None:
                raise error
            if chunk.end is not None:
                return

    async def watch_stalls(self) -> None:
        """Cancel calls whose client takes nothing for `client_stall_timeout_s`. Runs until cancelled."""
        limit = self._config.client_stall_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            now = self._clock.now()
            for call in [c for c in self._calls if c.writing_since is not None and now - c.writing_since > limit]:
                request_id = call.request_id
                logger.warning(
                    "request %s: the client took nothing for %.1f s",
                    request_id,
                    limit,
                    extra={"request_id": request_id},
                )
                call.cancel()
                call.task.cancel()

    # -- the small ones ------------------------------------------------------------------------------------------

    @_with_status
    async def Cancel(
        self, request: generation_pb2.CancelRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.CancelReply:
        return generation_pb2.CancelReply(found=self._dispatcher.cancel(request.request_id, self.caller(context)))

    @_with_status
    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.GetModelReply:
        check_model(request.model, self._config.served_name)
        model = self._dispatcher.pool.model
        if model is None:
            raise Unavailable("no worker is connected")
        return generation_pb2.GetModelReply(
            model=model_to_proto(model),
            has_chat_template=self._text_model.has_chat_template,
            end_token_ids=self._text_model.end_token_ids,
        )

    @_with_status
    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.TokenizeReply:
        check_model(request.model, self._config.served_name)
        return generation_pb2.TokenizeReply(token_ids=await tokenize_input(request, self._text_model, self._limits()))

    @_with_status
    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.DetokenizeReply:
        check_model(request.model, self._config.served_name)
        limits = self._dispatcher.pool.limits()
        vocab_size = self._text_model.vocab_size if limits is None else limits.vocab_size
        check_token_ids("token_ids", request.token_ids, vocab_size)
        return generation_pb2.DetokenizeReply(text=await self._text_model.detokenize(request.token_ids))

    def _limits(self) -> Limits:
        limits = self._dispatcher.pool.limits()
        if limits is None:
            raise Unavailable("no worker is connected")
        return limits


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
