"""Answers with tools, log-probabilities and all: what each piece of an output is told as."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from pdcore.errors import InvalidRequest, NoWorker, Overloaded, RateLimited, RequestError
from pdcore.logprobs import Logprobs
from pdcore.types import FinishReason
from router.effects import Outcome
from router.openai.chat import ChatFormat, ChatRequest, plan_chat
from router.openai.collected import Collected
from router.openai.parsing import parse
from router.openai.plan import Headers
from router.openai.response_format import ResponseFormat
from router.openai.responses import ResponseRequest, plan_response
from router.openai.usage import Usage
from router.stream import Chunk, Terminal
from router.text import ByteDetokenizer, Detokenizer, TokenTexts
from router.tokenizer import Special
from router.tools.formats import FORMATS
from router.tools.plan import plan_tools
from router.tools.tool import Tool, ToolUse
from router.tracker import Timeline

TOOLS = plan_tools(ToolUse((Tool("f"),)), FORMATS["hermes"], {}, None)
OUTPUT = 'Hm. <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
STOP = Terminal(Outcome(FinishReason.STOP), 3, len(OUTPUT), Timeline(0.0))


class Texts:
    """A token is a character."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def shown(self, token_id: int, skip_special: bool) -> bool:
        return True

    def detokenizer(self, special: Special) -> Detokenizer:
        return ByteDetokenizer(TokenTexts(lambda token_id, _: self.token_bytes(token_id)))


def call() -> Any:
    return SimpleNamespace(
        request=SimpleNamespace(tools=TOOLS, prompt=(1, 2, 3), special=Special.TOOLS), samples=[None]
    )


def chunks(text: str, size: int) -> list[Chunk]:
    made = []
    for start in range(0, len(text), size):
        ids = list(text[start : start + size].encode())
        logprobs = Logprobs(start, 0, tuple(-0.5 for _ in ids), (), ())
        made.append(Chunk(start, ids, text[start : start + size], None, logprobs))
    made[-1].end = STOP
    return made


def events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_every_token_of_a_chat_has_its_logprobs_once(size: int) -> None:
    body = parse(ChatRequest, b'{"messages": [{"role": "user", "content": "x"}], "logprobs": true, "stream": true}')
    form = ChatFormat(body, plan_chat(body, Headers("r"), "m", readable=True), Texts())
    form.begin(0, call())
    told = [event for chunk in chunks(OUTPUT, size) for event in events(form.event(0, 0, chunk))]
    choices = [event["choices"][0] for event in told]
    scored = [entry["token"] for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert "".join(scored) == OUTPUT
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hm."
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert pieces[0]["function"] == {"name": "f", "arguments": ""}
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"x": 1}'
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_a_whole_chat_is_what_its_stream_says() -> None:
    body = parse(ChatRequest, b'{"messages": [{"role": "user", "content": "x"}], "logprobs": true}')
    form = ChatFormat(body, plan_chat(body, Headers("r"), "m", readable=True), Texts())
    usage = Usage()
    collected = Collected(1, usage)
    await collected.begin(call())
    for chunk in chunks(OUTPUT, 5):
        await collected.write(0, chunk)
    (choice,) = json.loads(form.answer([collected], usage))["choices"]
    assert choice["message"]["content"] == "Hm."
    assert [called["function"] for called in choice["message"]["tool_calls"]] == [
        {"name": "f", "arguments": '{"x": 1}'}
    ]
    assert len(choice["logprobs"]["content"]) == len(OUTPUT)
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("size", [1, 4, 1000])
async def test_a_response_is_what_its_events_say(size: int) -> None:
    body = parse(ResponseRequest, b'{"input": "x", "include": ["message.output_text.logprobs"]}')
    output = f"{OUTPUT}\nSo."
    streamed, whole = (
        ResponseFormat(body, plan_response(body, Headers("r"), "m", readable=True), Texts()) for _ in range(2)
    )
    usage = Usage()
    collected = Collected(1, usage)
    await collected.begin(call())
    streamed.begin(0, call())
    told: list[dict[str, Any]] = []
    for chunk in chunks(output, size):
        await collected.write(0, chunk)
        told += events(streamed.event(0, 0, chunk))
    told += events(streamed.end(usage))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    final, answer = told[-1]["response"], json.loads(whole.answer([collected], usage))
    for response in (final, answer):
        response.pop("created_at")
        response.pop("completed_at")
        for item in response["output"]:
            item.pop("call_id", None)
            for part in item.get("content", ()):
                scored = part["logprobs"]
                assert "".join(entry["token"] for entry in scored) == part["text"]
    assert final == answer
    assert [item["type"] for item in answer["output"]] == ["message", "function_call", "message"]
    assert [item.get("arguments") or item["content"][0]["text"] for item in answer["output"]] == [
        "Hm.",
        '{"x": 1}',
        "So.",
    ]
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == ["completed"] * 3
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "Hm.So."
    assert "".join(entry["token"] for event in deltas for entry in event["logprobs"]) == "Hm.So."


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("full", 1.0), "rate_limit_exceeded"),
        (RateLimited("used up", 1.0), "rate_limit_exceeded"),
        (InvalidRequest("input", "is bad"), "invalid_prompt"),
        (NoWorker("none"), "server_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_response_that_fails_says_why_in_openais_words(error: RequestError, code: str) -> None:
    body = parse(ResponseRequest, b'{"input": "x", "stream": true}')
    form = ResponseFormat(body, plan_response(body, Headers("r"), "m", readable=True), Texts())
    form.begin(0, call())
    form.event(0, 0, chunks("So.", 2)[0])
    *_, last = events(form.failure(error))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": code, "message": str(error)}
