"""OpenAI's HTTP interface without HTTP: what a body comes to, and what an error looks like."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from google.protobuf.json_format import MessageToDict

from pdcore import errors
from pdcore.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    NoWorker,
    Overloaded,
    RateLimited,
    ReplaysExhausted,
    RequestCancelled,
    RequestError,
    Unauthenticated,
    Unavailable,
    UnknownMethod,
    UnknownModel,
)
from pdcore.logprobs import Logprobs
from pdcore.types import MAX_SAMPLES
from router.openai.app import make_app
from router.openai.chat import ChatRequest, plan_chat
from router.openai.completions import CompletionRequest, plan_completions
from router.openai.errors import KINDS, HttpProblem, renamed, reply_of
from router.openai.face import Face
from router.openai.logprobs import LOWEST, CompletionLogprobs, chat_content, prompt_entries, topped
from router.openai.parsing import parse
from router.openai.plan import Headers, headers_of, plain
from router.openai.responses import ResponseRequest, plan_response
from router.openai.tokens import TokenizeRequest, to_tokenize
from router.wire_errors import CODES

HEADERS = Headers("id-1", idempotency_key="key", tenant="org", remaining_s=5.0, stream_remaining_s=7.0)

EXAMPLES: list[tuple[RequestError, int, str | None]] = [
    (InvalidRequest("n", "must be 1"), 400, None),
    (InvalidRequest("prompt", "is long").with_facts(context_tokens=5), 400, "context_length_exceeded"),
    (UnknownModel("gpt", ["a"]), 404, "model_not_found"),
    (Unauthenticated("no key"), 401, "invalid_api_key"),
    (AlreadyRunning("it runs", "other"), 409, "idempotency_key_in_use"),
    (RateLimited("used up", 2.0), 429, "rate_limit_exceeded"),
    (Overloaded("full", 1.5), 429, "overloaded"),
    (Unavailable("not now", None), 503, "unavailable"),
    (NoWorker("none"), 503, "no_worker"),
    (Draining("going"), 503, "draining"),
    (ReplaysExhausted("given up"), 503, "replays_exhausted"),
    (DeadlineExceeded("late"), 504, "deadline_exceeded"),
    (RequestCancelled("gone"), 499, "cancelled"),
    (UnknownMethod("what?"), 404, "unknown_method"),
    (InternalError("a bug"), 500, "internal_error"),
    (HttpProblem(418, "teapot", "no coffee"), 418, "teapot"),
]


@pytest.mark.parametrize(("error", "status", "code"), EXAMPLES, ids=[type(e[0]).__name__ for e in EXAMPLES])
def test_every_error_has_a_status_and_a_body(error: RequestError, status: int, code: str | None) -> None:
    reply = reply_of(error)
    body = json.loads(reply.body)["error"]
    assert (reply.status, body["code"], body["message"]) == (status, code, str(error))
    assert set(body) == {"message", "type", "param", "code"}
    names = {name for name, _ in reply.headers}
    assert (b"retry-after" in names) == (b"retry-after-ms" in names) == (error.retry_after_s is not None)


def test_http_and_grpc_know_the_same_errors() -> None:
    """The first class that fits counts, in both tables: none is hidden by its base, and none is left to the rest."""
    tree = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestError)]
    for table in (KINDS, CODES):
        kinds = [kind for kind, _ in table]
        for kind in tree:
            if kind is not RequestError:
                assert any(issubclass(kind, known) for known in kinds), kind
        for index, kind in enumerate(kinds):
            assert not any(issubclass(kind, earlier) for earlier in kinds[:index]), kind
    assert {kind for kind, _ in CODES} <= {kind for kind, _ in KINDS}


def test_retry_hints_are_whole_seconds_and_milliseconds() -> None:
    assert dict(reply_of(Overloaded("full", 1.234)).headers) == {b"retry-after": b"2", b"retry-after-ms": b"1234"}
    assert dict(reply_of(Overloaded("full", 0.0)).headers) == {b"retry-after": b"1", b"retry-after-ms": b"1"}


def test_names_of_fields_are_those_of_http() -> None:
    names = [("chat.messages", "messages"), ("chat", "messages"), ("sampling.", ""), ("tenant", "")]
    for ours, theirs in (
        ("chat.messages[3].role", "messages[3].role"),
        ("chat", "messages"),
        ("chatter", "chatter"),
        ("sampling.top_p", "top_p"),
        ("tenant", "body"),
    ):
        assert renamed(InvalidRequest(ours, "is bad"), names).field == theirs
    error = InvalidRequest("sampling.n", "is bad", [("sampling.top_p", "too")]).with_facts(limit=3)
    error.request_id = "mine"
    told = renamed(error, names)
    assert told.violations == (("n", "is bad"), ("top_p", "too"))
    assert (told.facts, told.request_id, str(told)) == ({"limit": "3"}, "mine", "n: is bad; top_p: too")


def test_several_faults_are_told_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(CompletionRequest, b'{"temperature": "x", "n": 1.5}')
    assert [field for field, _ in caught.value.violations] == ["n", "temperature", "prompt"]
    assert "must be set" in str(caught.value)


def test_no_error_shows_what_was_in_the_body() -> None:
    for body in (
        b'{"prompt": {"secret": 1}}',
        b'{"prompt": "secret", "n": "secret"}',
        b'{"prompt": "secret" secret}',
        b'{"prompt": "x", "stop": [1, "secret"]}',
        b'{"prompt": "x", "logit_bias": {"secret": 1}, "priority": "secret"}',
    ):
        with pytest.raises(InvalidRequest) as caught:
            plan_completions(parse(CompletionRequest, body), HEADERS, "m")
        assert "secret" not in str(caught.value), body


def chat(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "hi"}]
    return parse(ChatRequest, json.dumps({"messages": messages, **fields}).encode())


def test_null_is_unset() -> None:
    optional = {name: None for name, field in ChatRequest.model_fields.items() if not field.is_required()}
    plan = plan_chat(chat(**optional, audio=None, made_up=None), HEADERS, "m")
    (request,) = plan.requests
    assert MessageToDict(request) == {
        "requestId": "id-1",
        "chat": {"messages": [{"role": "user", "content": "hi"}]},
        "sampling": {},
        "tenant": "org",
        "idempotencyKey": "key",
    }
    assert (plan.samples, plan.stream, plan.remaining_s) == (1, False, 5.0)


def test_harmless_fields_are_accepted_whatever_they_hold() -> None:
    plan = plan_chat(
        chat(user={"a": 1}, metadata=[1], store=True, service_tier="flex", prediction={"x": 1}, modalities=["text"]),
        HEADERS,
        "m",
    )
    assert not plan.requests[0].sampling.ListFields()


def test_what_has_no_effect_is_not_kept() -> None:
    """It may be megabytes, and the message is there as long as its request runs."""
    body = parse(CompletionRequest, b'{"prompt":"x","metadata":[[],[],[]],"prediction":null,"user":"u"}')
    assert (body.metadata, body.user) == (None, None)


def test_what_several_prompts_have_a_copy_of_is_bounded() -> None:
    body = CompletionRequest(prompt=["x"] * 128, allowed_token_ids=[100_000] * 30_000)
    with pytest.raises(InvalidRequest, match="prompt: must be fewer, or have less beside them: 128 come to"):
        plan_completions(body, Headers("r"), "m")
    body.prompt = ["x"]
    assert len(plan_completions(body, Headers("r"), "m").requests) == 1


@pytest.mark.parametrize("form", ['{"prompt":%s}', '{"prompt":"x","metadata":%s}', '{"a":%s}'])
def test_a_body_of_many_parts_is_refused_unread(form: str) -> None:
    """A reader takes seconds for it, in which nothing else of the router runs."""
    with pytest.raises(InvalidRequest, match="at most 32768 names, lists and objects"):
        parse(CompletionRequest, (form % ("[" + "[]," * (1 << 16) + "1]")).encode())


def test_no_room_is_made_for_samples_that_are_refused() -> None:
    """Four thousand million of them, whose places would be made before the core sees the request."""
    plan = plan_chat(chat(n=2**32 - 1), HEADERS, "m")
    assert (plan.samples, plan.requests[0].sampling.n) == (MAX_SAMPLES, 2**32 - 1)


def test_prompts_in_all_their_forms() -> None:
    for prompt, wanted in (
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ):
        body = parse(CompletionRequest, json.dumps({"prompt": prompt}).encode())
        plan = plan_completions(body, HEADERS, "m")
        assert [r.prompt or list(r.token_ids.ids) for r in plan.requests] == wanted
    ids = [request.request_id for request in plan.requests]
    keys = [request.idempotency_key for request in plan.requests]
    assert ids == ["id-1", "id-1"]
    assert keys[0] == "key"
    assert len(set(keys)) == 2
    assert all(len(key) <= 128 for key in keys)
    again = plan_completions(body, HEADERS, "m")
    assert [request.idempotency_key for request in again.requests] == keys
    for prompt in ([], [[]], [1, "a"], ["a", 1], [[1], "a"], [True], [-1], [2**32], 1, {}, ["a"] * 129):
        with pytest.raises(InvalidRequest) as caught:
            plan_completions(parse(CompletionRequest, json.dumps({"prompt": prompt}).encode()), HEADERS, "m")
        assert caught.value.field == "prompt"


def test_forms_of_the_output_by_every_name() -> None:
    schema = {"type": "object"}
    for fields, constraint, value in (
        ({"guided_json": schema}, "json_schema", '{"type": "object"}'),
        ({"guided_json": '{"type":"object"}'}, "json_schema", '{"type":"object"}'),
        ({"json_schema": "{}"}, "json_schema", "{}"),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": "g"}, "grammar", "g"),
        ({"ebnf": "g"}, "grammar", "g"),
        ({"structured_outputs": {"json": schema}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
        ({"structured_outputs": {"grammar": "g"}}, "grammar", "g"),
    ):
        output = plan_chat(chat(**fields), HEADERS, "m").requests[0].sampling.structured_output
        assert (output.WhichOneof("constraint"), getattr(output, constraint)) == (constraint, value)
    for fields in ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}):
        output = plan_chat(chat(**fields), HEADERS, "m").requests[0].sampling.structured_output
        assert list(output.choice.choices) == ["a", "b"]
    with pytest.raises(InvalidRequest, match=r"may not be set beside structured_outputs\.json"):
        plan_chat(chat(structured_outputs={"json": schema}, regex="a"), HEADERS, "m")


def test_headers() -> None:
    raw = [
        (b"x-request-id", b"abc"),
        (b"idempotency-key", b"k"),
        (b"openai-organization", b"org"),
        (b"x-stainless-read-timeout", b"600"),
        (b"x-envoy-expected-rq-timeout-ms", b"1500"),
    ]
    assert headers_of(raw) == Headers("abc", "k", "org", 1.5, 1.5)
    assert headers_of(raw[:4]) == Headers("abc", "k", "org", 600.0, None)
    for odd in (b"", b"nan", b"-1", b"inf", b"NOT_GIVEN", b"\xff"):
        made = headers_of([(b"x-stainless-read-timeout", odd)])
        assert made.remaining_s is None
        assert len(made.request_id) == 16
    assert plain("a b\n") != "a b\n"
    assert plain("a-b") == "a-b"


class Texts:
    """Tokens are bytes; 256 and above are special."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<special>"

    def shown(self, token_id: int, skip_special: bool) -> bool:
        return not skip_special or token_id < 256


def test_log_probabilities_as_json_can_say_them() -> None:
    logprobs = Logprobs(0, 2, (-math.inf, -1.0), (97, 98, 195, 169), (-0.1, -math.inf, -1.0, -2.0))
    content = chat_content(logprobs, [120, 195], Texts())
    assert content[0]["logprob"] == content[0]["top_logprobs"][1]["logprob"] == LOWEST
    assert content[1]["token"] == "\ufffd"
    assert content[1]["bytes"] == [195]
    entries = prompt_entries([5, 120, 195], logprobs, Texts())
    assert entries[0] is None
    assert set(entries[1] or ()) == {"97", "98", "120"}
    assert (entries[2] or {})["195"]["rank"] == 1
    assert topped(logprobs, 1) == Logprobs(0, 1, logprobs.values, (97, 195), (-0.1, -1.0))
    assert topped(logprobs, 0).top_ids == ()
    json.loads(json.dumps([content, entries], allow_nan=False))


def test_offsets_of_tokens_in_the_text() -> None:
    state = CompletionLogprobs(Texts(), skip_special=True)
    first = state.of([256, 97, 195], Logprobs(0, 0, (-1.0, -1.0, -1.0)))
    second = state.of([169, 98], Logprobs(3, 0, (-1.0, -1.0)))
    assert first["text_offset"] + second["text_offset"] == [0, 0, 1, 1, 2]
    assert first["tokens"] == ["<special>", "a", "bytes:\\xc3"]
    assert first["top_logprobs"][1] == {"a": -1.0}


def test_tokenize_requests() -> None:
    for body, field in (
        ({}, "prompt"),
        ({"prompt": "x", "messages": []}, "prompt"),
        ({"prompt": "x", "add_special_tokens": False}, "add_special_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "x", "tools": []}, "messages"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            to_tokenize(parse(TokenizeRequest, json.dumps(body).encode()))
        assert caught.value.field == field
    developer = parse(TokenizeRequest, b'{"messages": [{"role": "developer", "content": "x"}]}')
    assert to_tokenize(developer).chat.messages[0].role == "developer"  # the core knows what the template makes of it


TOOL_CHOICE = {"type": "function", "function": {"name": "f"}}
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    none: Any = None
    face = Face(none, none, none, served_name="m", serving=lambda: True, max_body_bytes=1)
    made: dict[str, Any] = make_app(face).openapi()
    return made


def test_the_description_has_every_path_body_and_error(description: dict[str, Any]) -> None:
    paths = description["paths"]
    assert set(paths) == {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/v1/models/{model}", "/tokenize",
        "/detokenize", "/health", "/version", "/metrics",
    }  # fmt: skip
    known = set(description["components"]["schemas"])
    refs = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                refs.add(node["$ref"].rpartition("/")[2])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(description)
    assert refs <= known
    assert "HTTPValidationError" not in known
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert "422" not in operation["responses"]
            if method == "post":
                assert operation["security"] == [{"bearer": []}, {}]
                assert {"400", "401", "413", "503"} <= set(operation["responses"]), path


def test_the_description_and_the_documentation_have_the_same_errors(description: dict[str, Any]) -> None:
    operations = [operation for path in description["paths"].values() for operation in path.values()]
    described = {int(status) for operation in operations for status in operation["responses"]}
    page = (Path(__file__).parents[2] / "docs" / "openai.md").read_text()
    table = page.partition("| status | code |")[2].partition("\n\n")[0]
    told = {int(status) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for status in row.split(",")}
    assert described - {200} == told


def test_the_description_allows_what_is_allowed(description: dict[str, Any]) -> None:
    for name, body, fits in (
        ("CompletionRequest", {"prompt": "x"}, True),
        ("CompletionRequest", {"prompt": [[1], [2, 3]], "stop": ["a"], "n": 2, "seed": -1, "user": "me"}, True),
        ("CompletionRequest", {"prompt": "x", "temperature": 3}, False),
        ("CompletionRequest", {"prompt": [1, "a"]}, False),
        ("CompletionRequest", {"prompt": "x", "foo": 1}, False),
        ("ChatRequest", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True),
        ("ChatRequest", {"messages": [{"role": "judge", "content": "x"}]}, False),
        ("ChatRequest", {"messages": []}, False),
        ("ChatRequest", {"messages": [{"role": "user", "content": "x"}], "tool_choice": TOOL_CHOICE}, True),
        ("ChatRequest", {"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "function"}}, False),
        ("ResponseRequest", {"input": "x", "tool_choice": "none"}, True),
        ("ResponseRequest", {"input": [{"role": "user", "content": "x"}, CALL_ITEM]}, True),
        ("ResponseRequest", {"input": [{"type": "reasoning"}]}, False),
        ("ResponseRequest", {"input": "x", "store": True}, False),
    ):
        schema = {**description, "$ref": f"#/components/schemas/{name}"}
        validator = jsonschema.Draft202012Validator(schema)
        assert validator.is_valid(body) == fits, (name, body)


def test_every_interface_names_fields_as_its_clients_know_them() -> None:
    said = [
        plan_chat(chat(), HEADERS, "m").names[0],
        plan_completions(CompletionRequest(prompt=["x"]), HEADERS, "m").names[0],
        plan_response(ResponseRequest(input="x"), HEADERS, "m", readable=True).names[0],
    ]
    for names in said:
        assert {("tenant", "OpenAI-Organization"), ("request_id", "x-request-id")} <= set(names)


def test_no_reasoning_is_told_to_the_template() -> None:
    said = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    for kwargs, expected in (
        (None, said),
        ({"enable_thinking": True, "x": 1}, {**said, "enable_thinking": True, "x": 1}),
    ):
        asked = chat(reasoning_effort="none", chat_template_kwargs=kwargs)
        response = ResponseRequest.model_validate(
            {"input": "x", "reasoning": {"effort": "none"}, "chat_template_kwargs": kwargs}
        )
        plans = plan_chat(asked, HEADERS, "m"), plan_response(response, HEADERS, "m", readable=True)
        assert [json.loads(plan.requests[0].chat.template_arguments) for plan in plans] == [expected, expected]
    assert plan_chat(chat(), HEADERS, "m").requests[0].chat.template_arguments == ""


@pytest.mark.parametrize(
    ("kind", "body", "told"),
    [
        (ResponseRequest, {"input": "x", "store": True}, "store: must be false"),
        (ChatRequest, {"messages": []}, "messages: must have at least 1 item, not 0"),
        (ChatRequest, {}, "messages: must be set"),
        (CompletionRequest, {"prompt": "x", "n": "2"}, "n: must be a valid integer"),
    ],
)
def test_what_is_wrong_is_said_in_words_of_json(kind: type, body: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(kind, json.dumps(body).encode())
    assert str(error.value) == told
