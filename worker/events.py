"""Engine results as the messages of a session."""

from __future__ import annotations

from engine.engine import TokenOut
from pdcore.types import FinishReason
from protos import worker_pb2

_FINISH = {
    None: worker_pb2.TOKEN_FINISH_UNSPECIFIED,
    FinishReason.STOP: worker_pb2.TOKEN_FINISH_STOP,
    FinishReason.LENGTH: worker_pb2.TOKEN_FINISH_LENGTH,
}


def token_event(token: TokenOut) -> worker_pb2.TokenEvent:
    """Without request id and attempt, which the session fills in as its router knows them."""
    return worker_pb2.TokenEvent(
        sample=token.sample, index=token.index, token_id=token.token_id, finish=_FINISH[token.finish]
    )
