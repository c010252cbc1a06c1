"""``/tokenize`` and ``/detokenize``, in the shapes of vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from pdcore.errors import InvalidRequest
from protos import generation_pb2
from router.openai.chat import ChatFields, ChatMessage, chat_of
from router.openai.fields import TokenIds
from router.openai.parsing import Message


class TokenizeRequest(ChatFields):
    """A text or a chat, one of both."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="Nothing but what is done anyway: true for a text, false for a chat."
    )
    return_token_strs: bool | None = Field(default=None, description="Also say what each token stands for.")


class DetokenizeRequest(Message):
    model: str | None = None
    tokens: TokenIds


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(BaseModel):
    prompt: str


def to_tokenize(body: TokenizeRequest) -> generation_pb2.TokenizeRequest:
    """Raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "must be set, or messages, and not both")
    chat = body.messages is not None
    if body.add_special_tokens not in (None, not chat):
        what = "the template of a chat has them already" if chat else "they are part of every prompt"
        raise InvalidRequest("add_special_tokens", f"must be {str(not chat).lower()}: {what}")
    if not chat and not body.model_fields_set.isdisjoint(ChatFields.model_fields):
        raise InvalidRequest("messages", "must be set: there are fields that belong to a chat")
    request = generation_pb2.TokenizeRequest(model=body.model or "")
    if body.messages is not None:
        request.chat.CopyFrom(chat_of(body.messages, body))
    else:
        request.prompt = body.prompt or ""
    return request
