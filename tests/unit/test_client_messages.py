"""What the Python client makes of its arguments, before anything is sent."""

from __future__ import annotations

import pytest

from protos import generation_pb2
from router.client_messages import build_request, tokenize_request


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", bytearray(b"bytes"), 2.5, {"role": "user"}])
def test_what_is_no_prompt_is_said_to_be_none(prompt: object) -> None:
    with pytest.raises(ValueError, match=f"prompt: must be .*, got {type(prompt).__name__}"):
        build_request(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [["a"], [1.5], [-1], [{"role": 1}], [{"role": "user"}, "x"], [{"x": "y"}]])
def test_what_is_wrong_within_a_prompt_is_a_value_error(prompt: object) -> None:
    with pytest.raises(ValueError, match=r"prompt|message|range"):
        build_request(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", [1, 2], ["a"]])
def test_what_is_neither_text_nor_messages_has_no_tokens(prompt: object) -> None:
    with pytest.raises(ValueError, match="messages: must be"):
        tokenize_request(prompt, "")  # type: ignore[arg-type]


def test_every_kind_of_prompt() -> None:
    chat = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="x")])
    assert build_request("x").prompt == "x"
    for ids in ([3, 4], (3, 4), range(3, 5)):
        assert list(build_request(ids).token_ids.ids) == [3, 4]
    assert build_request([]).HasField("token_ids")
    assert build_request(chat).chat == chat
    assert build_request([{"role": "user", "content": "x"}]).chat == chat
