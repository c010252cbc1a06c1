"""Engine results as messages. Those of a session have no request id and attempt, which the session fills in as its
router knows them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.engine import PrefillStats, TokenOut
from engine.step_log import StepRecord
from pdcore.logprobs import Logprobs
from pdcore.types import FinishReason
from protos import worker_pb2
from protos.convert import logprobs_to_proto

_FINISH = {
    None: worker_pb2.TOKEN_FINISH_UNSPECIFIED,
    FinishReason.STOP: worker_pb2.TOKEN_FINISH_STOP,
    FinishReason.LENGTH: worker_pb2.TOKEN_FINISH_LENGTH,
}


def token_event(token: TokenOut) -> worker_pb2.TokenEvent:
    event = worker_pb2.TokenEvent(index=token.index, token_id=token.token_id, finish=_FINISH[token.finish])
    if token.logprobs is not None:
        event.logprobs.CopyFrom(logprobs_to_proto(token.logprobs))
    return event


def prefill_notice(stats: PrefillStats) -> worker_pb2.RequestNotice:
    done = worker_pb2.PrefillDone(
        queued_s=stats.queued_s, compute_s=stats.compute_s, chunks=stats.chunks, cached_tokens=stats.cached_tokens
    )
    return worker_pb2.RequestNotice(prefill_done=done)


def prompt_logprobs_notice(logprobs: Logprobs) -> worker_pb2.RequestNotice:
    return worker_pb2.RequestNotice(prompt_logprobs=logprobs_to_proto(logprobs))


def steps_reply(records: Sequence[StepRecord], now: float) -> worker_pb2.GetStepsReply:
    """`now`: on the clock of the records."""
    return worker_pb2.GetStepsReply(
        steps=[
            worker_pb2.StepRecord(
                step=record.step,
                age_s=now - record.started,
                tokens=record.tokens,
                decodes=record.decodes,
                prefills=record.prefills,
                attended=record.attended,
                bound_by=record.bound_by,
                free_blocks=record.free_blocks,
                preempted=record.preempted,
                swapped_out=record.swapped_out,
                swapped_in=record.swapped_in,
                running=record.running,
                waiting_interactive=record.waiting[0],
                waiting_standard=record.waiting[1],
                waiting_batch=record.waiting[2],
                predicted_ms=record.predicted_ms,
                ms=record.ms,
            )
            for record in records
        ]
    )
