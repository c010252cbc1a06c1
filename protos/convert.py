"""Between protobuf messages and pdcore's types. Every reading checks what the wire could have made up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pdcore.errors import InvalidRequest
from pdcore.logprobs import Logprobs
from pdcore.step_time import StepTime
from pdcore.structured import StructuredOutput, StructureKind
from pdcore.types import (
    Branch,
    KvEndpoint,
    KvGeometry,
    KvTicket,
    KvTransferStats,
    ModelInfo,
    PriorityClass,
    RequestKey,
    RequestSpec,
    Role,
    SamplingParams,
    WorkerLoad,
)
from protos import kv_pb2, worker_pb2

if TYPE_CHECKING:  # workers speak no public API
    from protos import generation_pb2

_ROLE_TO_PROTO = {
    Role.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    Role.DECODE: worker_pb2.WORKER_ROLE_DECODE,
    Role.AGGREGATED: worker_pb2.WORKER_ROLE_AGGREGATED,
}
_ROLE_FROM_PROTO = {number: role for role, number in _ROLE_TO_PROTO.items()}
_CLASS_TO_PROTO = {
    PriorityClass.INTERACTIVE: worker_pb2.REQUEST_CLASS_INTERACTIVE,
    PriorityClass.STANDARD: worker_pb2.REQUEST_CLASS_STANDARD,
    PriorityClass.BATCH: worker_pb2.REQUEST_CLASS_BATCH,
}
_CLASS_FROM_PROTO = {number: name for name, number in _CLASS_TO_PROTO.items()}


def role_to_proto(role: Role) -> worker_pb2.WorkerRole.ValueType:
    return _ROLE_TO_PROTO[role]


def role_from_proto(role: int) -> Role:
    """Raises InvalidRequest for a number that names no role."""
    try:
        return _ROLE_FROM_PROTO[role]  # type: ignore[index]  # an open enum: any int may come
    except KeyError:
        raise InvalidRequest("worker.role", f"unknown role number {role}") from None


def geometry_to_proto(geometry: KvGeometry) -> kv_pb2.Geometry:
    return kv_pb2.Geometry(
        model_digest=geometry.model_digest,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        dtype=geometry.dtype,
        block_size=geometry.block_size,
        num_blocks=geometry.num_blocks,
        head_start=geometry.head_start,
    )


def geometry_from_proto(message: kv_pb2.Geometry) -> KvGeometry:
    return KvGeometry(
        model_digest=message.model_digest,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        dtype=message.dtype,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        head_start=message.head_start,
    )


def model_to_proto(model: ModelInfo) -> worker_pb2.ModelDescription:
    return worker_pb2.ModelDescription(
        name=model.name,
        digest=model.digest,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
    )


def model_from_proto(message: worker_pb2.ModelDescription) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        digest=message.digest,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        dtype=message.dtype,
    )


def ticket_to_proto(ticket: KvTicket) -> kv_pb2.Ticket:
    return kv_pb2.Ticket(
        num_tokens=ticket.num_tokens,
        prefix_tokens=ticket.prefix_tokens,
        lease_s=ticket.lease_s,
        codecs=ticket.codecs,
        endpoints=[
            kv_pb2.Endpoint(
                address=endpoint.address,
                transport=endpoint.transport,
                head_start=endpoint.head_start,
                head_count=endpoint.head_count,
                ticket_id=endpoint.ticket_id,
                generation=endpoint.generation,
                worker_incarnation=endpoint.worker_incarnation,
            )
            for endpoint in ticket.endpoints
        ],
        run_here=ticket.run_here,
    )


def ticket_from_proto(message: kv_pb2.Ticket) -> KvTicket:
    return KvTicket(
        num_tokens=message.num_tokens,
        prefix_tokens=message.prefix_tokens,
        lease_s=message.lease_s,
        codecs=tuple(message.codecs),
        endpoints=tuple(
            KvEndpoint(
                address=endpoint.address,
                transport=endpoint.transport,
                head_start=endpoint.head_start,
                head_count=endpoint.head_count,
                ticket_id=endpoint.ticket_id,
                generation=endpoint.generation,
                worker_incarnation=endpoint.worker_incarnation,
            )
            for endpoint in message.endpoints
        ),
        run_here=message.run_here,
    )


def stats_to_proto(stats: KvTransferStats) -> kv_pb2.TransferStats:
    return kv_pb2.TransferStats(
        blocks=stats.blocks,
        raw_bytes=stats.raw_bytes,
        wire_bytes=stats.wire_bytes,
        codec=stats.codec,
        transport=stats.transport,
        seconds=stats.seconds,
        frames=stats.frames,
        retries=stats.retries,
        lossless=stats.lossless,
        codec_reason=stats.codec_reason,
    )


def measured(value: float) -> float:
    """A time that somebody else has measured; 0 if it is none, so that no mean ever becomes inf or nan by it."""
    return value if 0.0 <= value < math.inf else 0.0


def stats_from_proto(message: kv_pb2.TransferStats) -> KvTransferStats:
    return KvTransferStats(
        blocks=message.blocks,
        raw_bytes=message.raw_bytes,
        wire_bytes=message.wire_bytes,
        codec=message.codec,
        transport=message.transport,
        seconds=measured(message.seconds),
        frames=message.frames,
        retries=message.retries,
        lossless=message.lossless,
        codec_reason=message.codec_reason,
    )


def load_to_proto(load: WorkerLoad) -> worker_pb2.Load:
    return worker_pb2.Load(
        step=load.step,
        waiting=load.waiting,
        running=load.running,
        paused=load.paused,
        queued_prefill_tokens=load.queued_prefill_tokens,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        reserved_blocks=load.reserved_blocks,
        open_tickets=load.open_tickets,
        open_sends=load.open_sends,
        preemptions=load.preemptions,
        recomputed_tokens=load.recomputed_tokens,
        transfer_events=load.transfers,
        step_ms=load.step_ms,
        progress=load.progress,
        cached_blocks=load.cached_blocks,
        cached_tokens=load.cached_tokens,
        swapped=load.swapped,
        swaps_out=load.swaps_out,
        swaps_in=load.swaps_in,
        swap_used_bytes=load.swap_used_bytes,
        step_time=step_time_to_proto(load.step_time),
        yielding_requests=load.yielding_requests,
        yielding_blocks=load.yielding_blocks,
        stalled_requests=load.stalled_requests,
        stalled_blocks=load.stalled_blocks,
    )


def step_time_to_proto(model: StepTime) -> worker_pb2.StepTime:
    return worker_pb2.StepTime(
        base_ms=model.base_ms,
        token_ms=model.token_ms,
        attended_ms=model.attended_ms,
        error=model.error,
        steps=model.steps,
        largest=model.largest,
        drift=model.drift,
    )


def step_time_from_proto(message: worker_pb2.StepTime) -> StepTime:
    model = message.base_ms, message.token_ms, message.attended_ms, message.drift
    if any(measured(value) != value for value in model):
        return StepTime()
    return StepTime(
        base_ms=message.base_ms,
        token_ms=message.token_ms,
        attended_ms=message.attended_ms,
        error=message.error,
        steps=message.steps,
        largest=message.largest,
        drift=message.drift or 1.0,
    )


def load_from_proto(message: worker_pb2.Load) -> WorkerLoad:
    return WorkerLoad(
        step=message.step,
        waiting=message.waiting,
        running=message.running,
        paused=message.paused,
        queued_prefill_tokens=message.queued_prefill_tokens,
        free_blocks=message.free_blocks,
        total_blocks=message.total_blocks,
        reserved_blocks=message.reserved_blocks,
        open_tickets=message.open_tickets,
        open_sends=message.open_sends,
        preemptions=message.preemptions,
        recomputed_tokens=dict(message.recomputed_tokens),
        transfers=dict(message.transfer_events),
        step_ms=message.step_ms,
        progress=message.progress,
        cached_blocks=message.cached_blocks,
        cached_tokens=message.cached_tokens,
        step_time=step_time_from_proto(message.step_time),
        yielding_requests=message.yielding_requests,
        yielding_blocks=message.yielding_blocks,
        stalled_requests=message.stalled_requests,
        stalled_blocks=message.stalled_blocks,
        swapped=message.swapped,
        swaps_out=message.swaps_out,
        swaps_in=message.swaps_in,
        swap_used_bytes=message.swap_used_bytes,
    )


def structured_to_proto(output: StructuredOutput | None) -> worker_pb2.StructuredOutput | None:
    if output is None:
        return None
    match output.kind:
        case StructureKind.JSON_OBJECT:
            return worker_pb2.StructuredOutput(json_object=True)
        case StructureKind.JSON_SCHEMA:
            return worker_pb2.StructuredOutput(json_schema=output.sources[0])
        case StructureKind.REGEX:
            return worker_pb2.StructuredOutput(regex=output.sources[0])
        case StructureKind.CHOICE:
            return worker_pb2.StructuredOutput(choice=worker_pb2.Choice(choices=output.sources))
        case StructureKind.GRAMMAR:
            return worker_pb2.StructuredOutput(grammar=output.sources[0])


def structured_from_proto(
    sampling: worker_pb2.WorkerSampling | generation_pb2.Sampling,
) -> StructuredOutput | None:
    """None if the output is free. Raises InvalidRequest if the message is there and says nothing."""
    if not sampling.HasField("structured_output"):
        return None
    message = sampling.structured_output
    field = message.WhichOneof("constraint")
    if field is None:
        allowed = ", ".join(kind.value for kind in StructureKind)
        raise InvalidRequest("sampling.structured_output", f"one of {allowed} must be set")
    kind = StructureKind(field)
    match kind:
        case StructureKind.JSON_OBJECT:
            if not message.json_object:
                raise InvalidRequest("sampling.structured_output.json_object", "must be true, or not set")
            return StructuredOutput(kind)
        case StructureKind.CHOICE:
            return StructuredOutput(kind, tuple(message.choice.choices))
        case _:
            return StructuredOutput(kind, (getattr(message, field),))


def spec_to_proto(spec: RequestSpec) -> worker_pb2.WorkerRequest:
    params = spec.params
    return worker_pb2.WorkerRequest(
        request_id=spec.key.request_id,
        attempt=spec.key.attempt,
        prompt=spec.prompt,
        delivered=spec.delivered,
        sampling=worker_pb2.WorkerSampling(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            stop_token_ids=params.stop_token_ids,
            min_tokens=params.min_tokens,
            structured_output=structured_to_proto(params.structured_output),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            bias_token_ids=[token for token, _ in params.logit_bias],
            biases=[bias for _, bias in params.logit_bias],
            allowed_token_ids=params.allowed_token_ids,
            bad_words=[worker_pb2.TokenSequence(token_ids=word) for word in params.bad_words],
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        ),
        token_window=spec.token_window,
        kv_codec=spec.kv_codec,
        cache_salt=spec.cache_salt,
        rebuild=spec.rebuild,
        revoked=spec.revoked,
        tenant=spec.tenant,
        request_class=_CLASS_TO_PROTO[spec.priority],
        sample=spec.sample,
        branches=[
            worker_pb2.Branch(request_id=branch.key.request_id, attempt=branch.key.attempt, sample=branch.sample)
            for branch in spec.branches
        ],
    )


def spec_from_proto(message: worker_pb2.WorkerRequest) -> RequestSpec:
    """Raises InvalidRequest for an empty prompt, a `max_tokens` or window below 1, tokens without their bias, or an
    empty structured output."""
    sampling = message.sampling
    if not message.prompt:
        raise InvalidRequest("prompt", "must have at least one token")
    if sampling.max_tokens < 1:
        raise InvalidRequest("sampling.max_tokens", "must be at least 1")
    if message.token_window < 1:
        raise InvalidRequest("token_window", "must be at least 1")
    if len(sampling.bias_token_ids) != len(sampling.biases):
        problem = f"{len(sampling.bias_token_ids)} tokens have {len(sampling.biases)} biases"
        raise InvalidRequest("sampling.logit_bias", problem)
    return RequestSpec(
        key=RequestKey(message.request_id, message.attempt),
        prompt=tuple(message.prompt),
        params=SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            stop_token_ids=tuple(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            structured_output=structured_from_proto(sampling),
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
            logit_bias=tuple(zip(sampling.bias_token_ids, sampling.biases, strict=True)),
            allowed_token_ids=tuple(sampling.allowed_token_ids),
            bad_words=tuple(tuple(word.token_ids) for word in sampling.bad_words),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        ),
        delivered=tuple(message.delivered),
        token_window=message.token_window,
        kv_codec=message.kv_codec,
        cache_salt=message.cache_salt,
        rebuild=message.rebuild,
        revoked=message.revoked,
        tenant=message.tenant,
        priority=_CLASS_FROM_PROTO.get(message.request_class, PriorityClass.STANDARD),
        sample=message.sample,
        branches=tuple(Branch(RequestKey(b.request_id, b.attempt), b.sample) for b in message.branches),
    )


def logprobs_to_proto(logprobs: Logprobs) -> worker_pb2.Logprobs:
    return worker_pb2.Logprobs(
        start=logprobs.start,
        top=logprobs.top,
        values=logprobs.values,
        top_ids=logprobs.top_ids,
        top_values=logprobs.top_values,
    )


def logprobs_from_proto(message: worker_pb2.Logprobs) -> Logprobs:
    """Raises InvalidRequest if the lengths do not agree."""
    logprobs = Logprobs(
        message.start, message.top, tuple(message.values), tuple(message.top_ids), tuple(message.top_values)
    )
    if not logprobs.well_formed:
        raise InvalidRequest(
            "logprobs", f"{len(message.top_ids)} likeliest tokens of {len(logprobs)} x {message.top}"
        )
    return logprobs
