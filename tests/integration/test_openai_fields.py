"""Every field of every request of OpenAI's interface: what it does. And what the log has of those refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tokenizers import Tokenizer

from pdcore.types import Role
from protos import worker_pb2
from router.openai.chat import ChatRequest
from router.openai.completions import CompletionRequest
from router.openai.parsing import Message
from router.openai.responses import LOGPROBS, ResponseRequest
from router.openai.tokens import DetokenizeRequest, TokenizeRequest
from tests.integration.test_openai import Cluster
from tests.support.null_worker import NullWorker, saying
from tests.support.tool_model import tool_llama

IGNORED = "Accepted, without effect."
SAYS = "Hi<|bos|>!"
"""Of the workers: four tokens, of which one is special, and the end."""


@dataclass
class Seen:
    """What came of a request.

    Attributes:
        request: that the worker got; an empty one if there was none. prompt: its text.
        answer: the body; of a stream ``{"events": [...]}``. header: x-request-id of the response.
    """

    request: worker_pb2.WorkerRequest
    prompt: str
    answer: dict[str, Any]
    header: str

    @property
    def sampling(self) -> worker_pb2.WorkerSampling:
        return self.request.sampling

    @property
    def grammar(self) -> str:
        return self.sampling.structured_output.grammar

    @property
    def first(self) -> dict[str, Any]:
        """The first choice, or the text of the first item."""
        if "output" in self.answer:
            part: dict[str, Any] = self.answer["output"][0]["content"][0]
            return part
        choice: dict[str, Any] = self.answer["choices"][0]
        return choice

    @property
    def text(self) -> str:
        return str(self.first["message"]["content"] if "message" in self.first else self.first["text"])

    @property
    def tokens(self) -> int:
        """Of the output."""
        usage = self.answer["usage"]
        return int(usage.get("completion_tokens", usage.get("output_tokens")))

    @property
    def refused(self) -> str | None:
        """The field that is wrong."""
        return self.answer["error"]["param"] if self.answer.get("error") else None


class Row(NamedTuple):
    """With a field of this value the check holds; without it, with no more than `beside`, it does not."""

    value: object
    check: Callable[[Seen], bool]
    beside: Mapping[str, object] = {}


def equals(name: str, value: object, sent: object = None, **beside: object) -> Row:
    """A field of the worker's sampling."""

    def check(seen: Seen) -> bool:
        found = getattr(seen.sampling, name)
        return (list(found) if isinstance(value, list) else found) == value

    return Row(value if sent is None else sent, check, beside)


def form(kind: str, value: object) -> Row:
    return Row(value, lambda seen: seen.sampling.structured_output.WhichOneof("constraint") == kind)


def refused(name: str, value: object, **beside: object) -> Row:
    """The value that would change something is refused."""
    return Row(value, lambda seen: seen.refused == name, beside)


CHAT_TOOL = {"type": "function", "function": {"name": "clock"}}
TOOL = {"type": "function", "name": "clock"}
TURNS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So"}]

SHARED: dict[str, Row] = {
    "model": refused("model", "gpt"),
    "stream": Row(True, lambda seen: "events" in seen.answer),
    "temperature": equals("temperature", 0.5),
    "top_p": equals("top_p", 0.75),
    "top_k": equals("top_k", 20),
    "min_p": equals("min_p", 0.25),
    "repetition_penalty": equals("repetition_penalty", 1.5),
    "seed": equals("seed", 2**64 - 1, sent=-1),
    "stop": Row("i", lambda seen: seen.text == "H"),
    "ignore_eos": Row(True, lambda seen: seen.tokens > 5),
    "priority": Row("batch", lambda seen: seen.request.request_class == worker_pb2.REQUEST_CLASS_BATCH),
    "request_id": Row("mine", lambda seen: seen.request.request_id == seen.header == "mine"),
    "cache_salt": Row("salt", lambda seen: seen.request.cache_salt == "salt"),
    "kv_codec": Row("raw", lambda seen: seen.request.kv_codec == "raw"),
}
GENERATION: dict[str, Row] = SHARED | {
    "stream_options": Row(
        {"include_usage": True}, lambda seen: bool(seen.answer["events"][-1].get("usage")), {"stream": True}
    ),
    "max_tokens": equals("max_tokens", 2),
    "n": Row(2, lambda seen: len(seen.answer["choices"]) == 2),
    "frequency_penalty": equals("frequency_penalty", 0.5),
    "presence_penalty": equals("presence_penalty", -0.5),
    "logit_bias": equals("bias_token_ids", [5], sent={"5": -3}),
    "min_tokens": equals("min_tokens", 2),
    "stop_token_ids": Row([99, 98], lambda seen: {98, 99} <= set(seen.sampling.stop_token_ids)),
    "include_stop_str_in_output": Row(True, lambda seen: seen.text == "Hi", {"stop": "i"}),
    "skip_special_tokens": Row(False, lambda seen: seen.text == SAYS),
    "allowed_token_ids": equals("allowed_token_ids", [3, 4]),
    "bad_words": Row(["a"], lambda seen: len(seen.sampling.bad_words) > 0),
    "response_format": form("json_object", {"type": "json_object"}),
    "structured_outputs": form("choice", {"choice": ["a"]}),
    "guided_json": form("json_schema", {"type": "object"}),
    "guided_regex": form("regex", "a"),
    "guided_choice": form("choice", ["a", "b"]),
    "guided_grammar": form("grammar", 'start: "a"'),
    "regex": form("regex", "a"),
    "ebnf": form("grammar", 'start: "a"'),
    "json_schema": form("json_schema", '{"type": "object"}'),
}
TEMPLATE: dict[str, Row] = {
    "tools": Row([CHAT_TOOL], lambda seen: '"clock"' in seen.prompt),
    "chat_template_kwargs": Row({"enable_thinking": False}, lambda seen: seen.prompt.endswith("!")),
    "reasoning_effort": Row("none", lambda seen: seen.prompt.endswith("!")),
    "continue_final_message": Row(True, lambda seen: seen.prompt.endswith("So"), {"messages": TURNS}),
    "add_generation_prompt": refused("add_generation_prompt", True, messages=TURNS, continue_final_message=True),
    "messages": Row(TURNS[:1] * 2, lambda seen: seen.prompt.count("<user>") == 2),
}
CHAT: dict[str, Row] = GENERATION | TEMPLATE | {
    "max_completion_tokens": equals("max_tokens", 2),
    "logprobs": Row(True, lambda seen: bool(seen.first["logprobs"])),
    "top_logprobs": equals("logprobs", 2, logprobs=True),
    "prompt_logprobs": Row(1, lambda seen: len(seen.answer.get("prompt_logprobs", ())) == len(seen.request.prompt)),
    "tool_choice": Row("required", lambda seen: bool(seen.grammar), {"tools": [CHAT_TOOL]}),
    "parallel_tool_calls": Row(
        False, lambda seen: ")*" not in seen.grammar, {"tools": [CHAT_TOOL], "tool_choice": "required"}
    ),
    "modalities": refused("modalities[0]", ["audio"]),
    "verbosity": refused("verbosity", "low"),
}  # fmt: skip
COMPLETION: dict[str, Row] = GENERATION | {
    "prompt": Row("hello", lambda seen: seen.prompt == "hello"),
    "echo": Row(True, lambda seen: seen.text == "xHi!"),
    "logprobs": equals("logprobs", 2),
    "prompt_logprobs": Row(1, lambda seen: seen.first.get("prompt_logprobs") == [None]),
    "best_of": refused("best_of", 3),
    "skip_special_tokens": Row(
        False,
        lambda seen: seen.text == SAYS and seen.first["logprobs"]["text_offset"] == [0, 1, 2, 9, 10],
        {"logprobs": 0},
    ),
}
RESPONSE: dict[str, Row] = SHARED | {
    "input": Row(TURNS, lambda seen: "So" in seen.prompt),
    "instructions": Row("Be brief.", lambda seen: "<system>Be brief." in seen.prompt),
    "max_output_tokens": equals("max_tokens", 2),
    "temperature": Row(0.5, lambda seen: seen.sampling.temperature == seen.answer["temperature"] == 0.5),
    "top_p": Row(0.75, lambda seen: seen.sampling.top_p == seen.answer["top_p"] == 0.75),
    "top_logprobs": equals("logprobs", 2, include=[LOGPROBS]),
    "include": Row([LOGPROBS], lambda seen: len(seen.first["logprobs"]) == len("Hi!")),
    "text": form("json_object", {"format": {"type": "json_object"}}),
    "tools": Row([TOOL], lambda seen: '"clock"' in seen.prompt),
    "tool_choice": Row("required", lambda seen: bool(seen.grammar), {"tools": [TOOL]}),
    "parallel_tool_calls": Row(
        False, lambda seen: ")*" not in seen.grammar, {"tools": [TOOL], "tool_choice": "required"}
    ),
    "stream_options": refused("stream_options.foo", {"foo": 1}),
    "metadata": Row({"a": "b"}, lambda seen: seen.answer["metadata"] == {"a": "b"}),
    "user": Row("me", lambda seen: seen.answer["user"] == "me"),
    "reasoning": Row({"effort": "none"}, lambda seen: seen.prompt.endswith("!")),
    "store": refused("store", True),
    "background": refused("background", True),
    "truncation": refused("truncation", "auto"),
    "chat_template_kwargs": TEMPLATE["chat_template_kwargs"],
}
TOKENIZE: dict[str, Row] = {
    "model": refused("model", "gpt"),
    "prompt": Row("hello", lambda seen: seen.answer.get("count") == 5),
    "add_special_tokens": refused("add_special_tokens", False),
    "return_token_strs": Row(True, lambda seen: seen.answer.get("token_strs") == ["x"]),
}
DETOKENIZE: dict[str, Row] = {
    "model": refused("model", "gpt"),
    "tokens": Row([0, 0], lambda seen: len(seen.answer["prompt"]) == 2),
}
KINDS: list[tuple[str, type[Message], dict[str, object], dict[str, Row]]] = [
    ("/v1/chat/completions", ChatRequest, {"messages": TURNS[:1]}, CHAT),
    ("/v1/completions", CompletionRequest, {"prompt": "x"}, COMPLETION),
    ("/v1/responses", ResponseRequest, {"input": "x"}, RESPONSE),
    ("/tokenize", TokenizeRequest, {"prompt": "x"}, TOKENIZE),
    ("/tokenize", TokenizeRequest, {"messages": TURNS[:1]}, TEMPLATE),
    ("/detokenize", DetokenizeRequest, {"tokens": [0]}, DETOKENIZE),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_llama(tmp_path_factory.mktemp("tools"))


@dataclass
class Asker:
    cluster: Cluster
    tokenizer: Tokenizer
    client: httpx.AsyncClient
    requests: list[worker_pb2.WorkerRequest] = field(default_factory=list)

    async def ask(self, path: str, body: Mapping[str, object]) -> Seen:
        self.requests.clear()
        response = await self.client.post(path, json=body)
        assert response.status_code < 500, response.text
        if response.headers["content-type"].startswith("text/event-stream"):
            lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
            answer: dict[str, Any] = {"events": [json.loads(line) for line in lines]}
        else:
            answer = response.json()
        request = self.requests[-1] if self.requests else worker_pb2.WorkerRequest()
        prompt = list(request.prompt) or answer.get("tokens", [])
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        return Seen(request, text, answer, response.headers["x-request-id"])


@pytest.fixture
async def asker(model: Path) -> AsyncIterator[Asker]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    requests: list[worker_pb2.WorkerRequest] = []
    worker = NullWorker(
        "a0",
        Role.AGGREGATED,
        script=saying(SAYS, tokenizer, 257),
        refuse=lambda command, request: requests.append(request),
    )
    async with (
        Cluster(model, [worker]) as cluster,
        httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as client,
    ):
        yield Asker(cluster, tokenizer, client, requests)


@pytest.mark.parametrize(
    ("path", "kind", "least", "rows"), KINDS, ids=[f"{row[0]}-{next(iter(row[2]))}" for row in KINDS]
)
async def test_every_field_does_what_it_is_there_for(
    asker: Asker, path: str, kind: type[Message], least: dict[str, object], rows: dict[str, Row]
) -> None:
    """A field that is new has to be told here."""
    ignored = {name for name, known in kind.model_fields.items() if known.description == IGNORED}
    told = TOKENIZE.keys() | TEMPLATE.keys() if kind is TokenizeRequest else rows.keys()
    assert told == kind.model_fields.keys() - ignored
    for name, row in rows.items():
        without = least | row.beside
        assert row.check(await asker.ask(path, without | {name: row.value})), name
        if name not in least:
            assert not row.check(await asker.ask(path, without)), name
    plain = await asker.ask(path, least)
    for name in ignored:
        seen = await asker.ask(path, least | {name: {"a": [1]}})
        assert (seen.text, seen.sampling.temperature) == (plain.text, plain.sampling.temperature), name


async def test_a_request_that_is_refused_is_in_the_log_by_its_id(
    asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="router")
    for number, (path, body, reason) in enumerate(
        (
            ("/v1/completions", {"prompt": "my secret", "top_p": 0}, "INVALID_REQUEST"),
            ("/v1/completions", {"prompt": "my secret", "my secret": 1}, "INVALID_REQUEST"),
            ("/v1/responses", {"input": "my secret", "model": "gpt"}, "UNKNOWN_MODEL"),
            ("/v1/my secret", {}, "NOT_FOUND"),
        )
    ):
        response = await asker.client.post(path, json=body, headers={"x-request-id": f"refused-{number}"})
        assert response.status_code >= 400
        assert f"request refused-{number} fails: {reason}" in caplog.text
    assert "secret" not in caplog.text.replace("/v1/my%20secret", "")
