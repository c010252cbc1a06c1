"""How much a client may ask to be tokenized, checked before anything is done with it. Pure but for the messages."""

from __future__ import annotations

from pdcore.errors import InvalidRequest
from protos import generation_pb2

TOKEN_BYTES = 4


def check_prompt_size(
    message: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest, max_bytes: int
) -> None:
    """Raises InvalidRequest for a prompt of more than `max_bytes`: of text in UTF-8, of a whole chat with all that
    its template gets, or of token ids at `TOKEN_BYTES` each."""
    field = message.WhichOneof("input")
    match field:
        case "prompt":
            size = _utf8_bytes(message.prompt, max_bytes)
        case "chat":
            size = message.chat.ByteSize()
        case "token_ids" if isinstance(message, generation_pb2.GenerateRequest):
            size = TOKEN_BYTES * len(message.token_ids.ids)
        case _:
            return
    _check(str(field), size, max_bytes)


def check_detokenize_size(message: generation_pb2.DetokenizeRequest, max_bytes: int) -> None:
    """The same for token ids whose text is asked for."""
    _check("token_ids", TOKEN_BYTES * len(message.token_ids), max_bytes)


def _check(field: str, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise InvalidRequest(field, f"has {size} bytes, more than the {max_bytes} that this cluster takes")


def _utf8_bytes(text: str, enough: int) -> int:
    """Bytes of a text in UTF-8; found without a copy where it is clear that there are `enough` for it, or too few."""
    return len(text) if 4 * len(text) <= enough or len(text) > enough else len(text.encode())
