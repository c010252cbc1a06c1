"""Engine results as the messages of a session. Neither has request id and attempt, which the session fills in as its
router knows them."""

from __future__ import annotations

from engine.engine import PrefillStats, TokenOut
from pdcore.types import FinishReason
from protos import worker_pb2

_FINISH = {
    None: worker_pb2.TOKEN_FINISH_UNSPECIFIED,
    FinishReason.STOP: worker_pb2.TOKEN_FINISH_STOP,
    FinishReason.LENGTH: worker_pb2.TOKEN_FINISH_LENGTH,
}


def token_event(token: TokenOut) -> worker_pb2.TokenEvent:
    return worker_pb2.TokenEvent(
        sample=token.sample, index=token.index, token_id=token.token_id, finish=_FINISH[token.finish]
    )


def prefill_notice(stats: PrefillStats) -> worker_pb2.RequestNotice:
    done = worker_pb2.PrefillDone(
        queued_s=stats.queued_s, compute_s=stats.compute_s, chunks=stats.chunks, cached_tokens=stats.cached_tokens
    )
    return worker_pb2.RequestNotice(prefill_done=done)
