"""Bad input: every field, with its limit; and the defaults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdcore.errors import InvalidRequest, UnknownModel
from pdcore.structured import StructureKind
from pdcore.types import PriorityClass
from protos import generation_pb2, worker_pb2
from router.client import Sampling, build_request
from router.tokenizer import SLICE_CHARS, Special, TextModel
from router.tools.events import Content
from router.validation import GenerationRequest, Limits, tokenize_input, validate
from tests.support.tiny_model import tiny_llama
from tests.support.tool_model import tool_llama

# The tokenizer knows one token, <|eos|>, that is past this vocabulary.
LIMITS = Limits(context_tokens=64, vocab_size=257)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def no_template(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tiny_llama(tmp_path_factory.mktemp("tiny"))
    (folder / "chat_template.jinja").unlink()
    return TextModel.load(folder)


async def check(message: generation_pb2.GenerateRequest, model: TextModel) -> GenerationRequest:
    return await validate(message, text_model=model, served_name="tiny", limits=LIMITS, in_flight={"running"})


def ok(**sampling: Any) -> generation_pb2.GenerateRequest:
    return build_request("hello", Sampling(**sampling))


def raw(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(**fields)


BAD = {
    "no input": (raw(), "input", "must be set"),
    "empty prompt": (build_request(""), "prompt", "must not be empty"),
    "empty token ids": (build_request([]), "token_ids.ids", "at least one token"),
    "no messages": (raw(chat=generation_pb2.Chat()), "chat.messages", "at least one message"),
    "role": (build_request([{"role": "bot", "content": "x"}]), "chat.messages[0].role", "system, .*assistant, tool"),
    "token id": (build_request([1, 257]), "token_ids.ids[1]", "below the vocabulary size 257, got 257"),
    "text token": (build_request("x<|eos|>"), "prompt[1]", "below the vocabulary size 257, got 257"),
    "prompt length": (build_request("x" * 64), "prompt", "has 64 tokens; .* context of 64 tokens"),
    "token ids length": (build_request([1] * 64), "token_ids.ids", "has 64 tokens"),
    "chat length": (build_request([{"role": "user", "content": "x" * 64}]), "chat", "context of 64 tokens"),
    "hopeless length": (build_request("x" * 10**6), "prompt", "1000000 characters cannot fit"),
    "hopeless chat": (build_request([{"role": "user", "content": "x" * 10**6}]), "chat", "cannot fit"),
    "many messages": (build_request([{"role": "user", "content": ""}] * 65), "chat.messages", "64 tokens, got 65"),
    "prompt and output": (ok(max_tokens=60), "sampling.max_tokens", r"prompt \(5 tokens\).*\(60\).*64"),
    "max_tokens": (ok(max_tokens=0), "sampling.max_tokens", "at least 1"),
    "min_tokens": (ok(max_tokens=5, min_tokens=6), "sampling.min_tokens", r"at most max_tokens \(5\), got 6"),
    "temperature": (ok(temperature=2.5), "sampling.temperature", r"in \[0, 2\], got 2.5"),
    "temperature < 0": (ok(temperature=-0.1), "sampling.temperature", r"in \[0, 2\]"),
    "temperature nan": (ok(temperature=float("nan")), "sampling.temperature", "got nan"),
    "temperature inf": (ok(temperature=float("inf")), "sampling.temperature", "got inf"),
    "top_p 0": (ok(top_p=0.0), "sampling.top_p", r"in \(0, 1\]"),
    "top_p": (ok(top_p=1.5), "sampling.top_p", "got 1.5"),
    "top_p nan": (ok(top_p=float("nan")), "sampling.top_p", "got nan"),
    "min_p": (ok(min_p=1.0), "sampling.min_p", r"in \[0, 1\)"),
    "min_p nan": (ok(min_p=float("nan")), "sampling.min_p", "got nan"),
    "top_k": (ok(top_k=2**31), "sampling.top_k", "at most 2147483647"),
    "stops": (ok(stop=["x"] * 17), "sampling.stop", "at most 16 strings, got 17"),
    "empty stop": (ok(stop=["a", ""]), "sampling.stop[1]", "1 to 256 characters, got 0"),
    "long stop": (ok(stop=["x" * 257]), "sampling.stop[0]", "1 to 256 characters, got 257"),
    "stop token": (ok(stop_token_ids=[3, 257]), "sampling.stop_token_ids[1]", "below the vocabulary size"),
    "stop tokens": (ok(stop_token_ids=[1] * 65), "sampling.stop_token_ids", "at most 64, got 65"),
    "presence": (ok(presence_penalty=2.5), "sampling.presence_penalty", r"in \[-2, 2\], got 2.5"),
    "frequency nan": (ok(frequency_penalty=float("nan")), "sampling.frequency_penalty", "got nan"),
    "repetition": (ok(repetition_penalty=0.0), "sampling.repetition_penalty", r"in \[0.01, 100\], got 0"),
    "repetition nan": (ok(repetition_penalty=float("nan")), "sampling.repetition_penalty", "got nan"),
    "bias": (ok(logit_bias={3: 101.0}), "sampling.logit_bias", r"in \[-100, 100\], got 101 for token 3"),
    "bias nan": (ok(logit_bias={3: float("nan")}), "sampling.logit_bias", "got nan"),
    "bias token": (ok(logit_bias={257: 1.0}), "sampling.logit_bias", "below the vocabulary size 257, got 257"),
    "biases": (
        ok(logit_bias=dict.fromkeys(range(1025), 1.0)),
        "sampling.logit_bias",
        "at most 1024 tokens, got 1025",
    ),
    "allowed": (ok(allowed_token_ids=[1, 257]), "sampling.allowed_token_ids[1]", "below the vocabulary size 257"),
    "allowed twice": (
        ok(allowed_token_ids=[1] * 258),
        "sampling.allowed_token_ids",
        "no more than the vocabulary has",
    ),
    "none left": (ok(allowed_token_ids=[0], bad_words=["!"]), "sampling.allowed_token_ids", "must leave a token"),
    "no early token": (
        ok(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1),
        "sampling.allowed_token_ids",
        "must leave a token",
    ),
    "bad words": (ok(bad_words=["x"] * 129), "sampling.bad_words", "at most 128 words, got 129"),
    "empty bad word": (ok(bad_words=["x", ""]), "sampling.bad_words[1]", "1 to 256 characters, got 0"),
    "long bad word": (ok(bad_words=["x" * 257]), "sampling.bad_words[0]", "1 to 256 characters, got 257"),
    "unwritable bad word": (ok(bad_words=["a<|eos|>"]), "sampling.bad_words[0]", "no tokens that this model could"),
    "logprobs": (ok(logprobs=21), "sampling.logprobs", "at most 20, got 21"),
    "prompt logprobs": (ok(prompt_logprobs=21), "sampling.prompt_logprobs", "at most 20, got 21"),
    "codec": (build_request("x", kv_codec="q9"), "kv_codec", "one of auto, raw, zstd, .*fp8, got 'q9'"),
    "salt": (build_request("x", cache_salt="s" * 129), "cache_salt", "at most 128 characters, got 129"),
    "id length": (build_request("x", request_id="a" * 129), "request_id", "at most 128 characters, got 129"),
    "id characters": (build_request("x", request_id="a b"), "request_id", "letters, digits"),
    "id newline": (build_request("x", request_id="a\n"), "request_id", "letters, digits"),
    "id in use": (build_request("x", request_id="running"), "request_id", "is running"),
    "tenant": (build_request("x", tenant="t" * 129), "tenant", "at most 128 characters, got 129"),
    "priority": (raw(prompt="x", priority=9), "priority", "got 9"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("message", "field", "problem"), BAD.values(), ids=BAD.keys())
async def test_bad_input_names_field_and_limit(
    model: TextModel, message: generation_pb2.GenerateRequest, field: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await check(message, model)
    assert caught.value.field == field
    assert re.search(problem, caught.value.problem), caught.value.problem


async def test_unknown_model(model: TextModel) -> None:
    with pytest.raises(UnknownModel, match="'other' is not served here; served: tiny"):
        await check(build_request("x", model="other"), model)


async def test_chat_without_a_template(no_template: TextModel) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        await check(build_request([{"role": "user", "content": "x"}]), no_template)


async def test_defaults(model: TextModel) -> None:
    request = await check(build_request("hello"), model)
    params = request.params
    assert params.max_tokens == 59  # what is left of the context
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.stop_token_ids, params.min_tokens) == ((257,), 0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words) == ((), (), ())
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert (request.include_stop, request.special) == (False, Special.HIDDEN)
    assert request.priority is PriorityClass.STANDARD
    assert re.fullmatch("[0-9a-f]{16}", request.request_id)
    other = await check(build_request("hello"), model)
    assert other.params.seed != params.seed
    assert other.request_id != request.request_id


async def test_what_the_client_says_counts(model: TextModel) -> None:
    sampling = Sampling(
        max_tokens=59, temperature=0, top_k=5, top_p=0.5, min_p=0.25, seed=2**64 - 1, stop=["x"],
        stop_token_ids=[7, 7], ignore_eos=True, min_tokens=2,
    )  # fmt: skip
    request = await check(
        build_request("hello", sampling, model="tiny", request_id="a.B-1:_", tenant="t", priority="batch"), model
    )
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (59, 0.0, 5, 0.5)
    assert (params.min_p, params.seed, params.min_tokens) == (0.25, 2**64 - 1, 2)
    assert params.stop_token_ids == (7,)
    assert (request.request_id, request.tenant, request.stops) == ("a.B-1:_", "t", ("x",))
    assert request.priority is PriorityClass.BATCH
    assert (request.kv_codec, request.cache_salt) == ("", "")
    request = await check(build_request("hello", kv_codec="bexp3", cache_salt="tenant 7"), model)
    assert (request.kv_codec, request.cache_salt) == ("bexp3", "tenant 7")


async def test_what_changes_logits(model: TextModel) -> None:
    sampling = Sampling(
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        logit_bias={9: -100.0, 3: 1.5},
        allowed_token_ids=[5, 3, 5],
        logprobs=0,
        prompt_logprobs=20,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    request = await check(build_request("hello", sampling), model)
    params = request.params
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-2.0, 0.5, 1.25)
    assert params.logit_bias == ((3, 1.5), (9, -100.0))
    assert params.allowed_token_ids == (3, 5)
    assert (params.logprobs, params.prompt_logprobs) == (0, 20)
    assert (request.include_stop, request.special) == (True, Special.SHOWN)
    assert (await check(ok(repetition_penalty=0.01), model)).params.repetition_penalty == pytest.approx(0.01)


async def test_bad_words_are_meant_with_and_without_a_space(model: TextModel) -> None:
    ids = {character: (await model.tokenize_words([character]))[0][0] for character in "ab "}
    a, b, space = ids["a"], ids["b"], ids[" "]
    request = await check(ok(bad_words=["a", "ab", " b", " ", "a"]), model)
    assert request.params.bad_words == ((a,), (space, a), (a, b), (space, a, b), (space, b), (space,))


async def test_only_codecs_that_all_workers_have_may_be_asked_for(model: TextModel) -> None:
    limits = Limits(context_tokens=64, vocab_size=257, kv_codecs=frozenset({"raw", "q8"}))

    async def ask(codec: str) -> str:
        message = build_request("x", kv_codec=codec)
        request = await validate(message, text_model=model, served_name="tiny", limits=limits, in_flight=())
        return request.kv_codec

    assert [await ask(codec) for codec in ("", "auto", "raw", "q8")] == ["", "auto", "raw", "q8"]
    with pytest.raises(InvalidRequest, match=r"must be one of auto, raw, q8, got 'tc4', .*pdserve calibrate"):
        await ask("tc4")


async def test_a_seed_of_zero_is_a_seed(model: TextModel) -> None:
    assert (await check(ok(seed=0), model)).params.seed == 0


async def test_generation_config_defaults(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_llama(tmp_path_factory.mktemp("tiny"))
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [257, 9], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 10,'
        ' "repetition_penalty": 1.5}'
    )
    model = TextModel.load(folder)
    params = (await check(build_request("hello"), model)).params
    assert params.repetition_penalty == 1.5
    assert (await check(ok(repetition_penalty=1.0), model)).params.repetition_penalty == 1.0
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.9, 20, 10)
    assert params.stop_token_ids == (257, 9)
    params = (await check(ok(temperature=0, top_k=0), model)).params
    assert (params.temperature, params.top_k) == (0.0, 0)


async def test_a_default_of_max_tokens(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    for suggested, given, expected in ((None, None, 59), (10, None, 10), (10, 20, 20), (10, 0, 59), (None, 100, 59)):
        (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": suggested}))
        model = TextModel.load(folder, default_max_tokens=given)
        assert (await check(build_request("hello"), model)).params.max_tokens == expected
        assert (await check(ok(max_tokens=3), model)).params.max_tokens == 3


async def test_chat_is_rendered(model: TextModel) -> None:
    request = await check(build_request([{"role": "user", "content": "hi"}]), model)
    assert request.prompt == tuple(await model.tokenize("<user>hi\n<assistant>", 64))


# -- tools ----------------------------------------------------------------------------------------------------------

USER = generation_pb2.ChatMessage(role="user", content="x")
F = generation_pb2.Tool(
    name="f", description="F.", parameters='{"type": "object", "properties": {"n": {"type": "integer"}}}'
)
REQUIRED, NONE = generation_pb2.TOOL_CHOICE_MODE_REQUIRED, generation_pb2.TOOL_CHOICE_MODE_NONE


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextModel]:
    model = TextModel.load(tool_llama(tmp_path_factory.mktemp("tools")))
    yield model
    model.close()


def chat(*messages: generation_pb2.ChatMessage, **fields: Any) -> generation_pb2.GenerateRequest:
    return raw(chat=generation_pb2.Chat(messages=messages or [USER], **fields))


def says(role: str, content: str = "x", **fields: Any) -> generation_pb2.ChatMessage:
    return generation_pb2.ChatMessage(role=role, content=content, **fields)


def call(**fields: Any) -> generation_pb2.ToolCall:
    return generation_pb2.ToolCall(**fields)


def choice(mode: Any = 0, *names: str) -> generation_pb2.ToolChoice:
    return generation_pb2.ToolChoice(mode=mode, names=names)


def tool(**fields: Any) -> generation_pb2.Tool:
    return generation_pb2.Tool(**({"name": "f"} | fields))


DEEP = '{"x": ' * 70 + "1" + "}" * 70
# ruff: noqa: E501  # rows of a table

BAD_CHATS = {
    "name": (chat(says("user", name="n" * 65)), "chat.messages[0].name", "at most 64 characters, got 65"),
    "call id": (chat(says("tool", tool_call_id="n" * 129)), "chat.messages[0].tool_call_id", "at most 128"),
    "call id of a user": (chat(says("user", tool_call_id="c")), "chat.messages[0].tool_call_id", "role tool"),
    "calls of a user": (chat(says("user", tool_calls=[call(name="f")])), "chat.messages[0].tool_calls", "assistant"),
    "call without a name": (chat(says("assistant", tool_calls=[call()])), "chat.messages[0].tool_calls[0].name", "empty"),
    "call's name": (
        chat(says("assistant", tool_calls=[call(name="f" * 257)])),
        "chat.messages[0].tool_calls[0].name",
        "at most 256",
    ),
    "call's id": (
        chat(says("assistant", tool_calls=[call(name="f", id="i" * 129)])),
        "chat.messages[0].tool_calls[0].id",
        "at most 128",
    ),
    "many calls": (chat(says("assistant", tool_calls=[call(name="f")] * 129)), "chat.messages[0].tool_calls", "at most 128"),
    "hopeless arguments": (
        chat(says("assistant", tool_calls=[call(name="f", arguments="x" * 10**6)])),
        "chat",
        "cannot fit",
    ),
    "tools": (chat(tools=[tool()] * 129), "chat.tools", "at most 128, got 129"),
    "tool name": (chat(tools=[tool(name="f g")]), "chat.tools[0].name", "1 to 64 letters, digits, _ or -, got 'f g'"),
    "no tool name": (chat(tools=[tool(name="")]), "chat.tools[0].name", "1 to 64"),
    "same tool": (chat(tools=[F, tool(name="g"), F]), "chat.tools[2].name", "'f' is the name of another"),
    "schema": (chat(tools=[tool(parameters="{")]), "chat.tools[0].parameters", "must be a JSON object: "),
    "schema list": (chat(tools=[tool(parameters="[]")]), "chat.tools[0].parameters", "must be a JSON object"),
    "schema type": (chat(tools=[tool(parameters='{"type": "string"}')]), "chat.tools[0].parameters", "of an object"),
    "deep schema": (chat(tools=[tool(parameters=DEEP)]), "chat.tools[0].parameters", "at most 64 levels"),
    "very deep schema": (chat(tools=[tool(parameters='{"x":' * 12_000)]), "chat.tools[0].parameters", "at most 64 levels"),
    "large schema": (
        chat(tools=[tool(parameters=json.dumps({"x": "y" * (64 << 10)}))]),
        "chat.tools[0].parameters",
        "at most 65536 bytes",
    ),
    "choice": (chat(tools=[F], tool_choice=choice(9)), "chat.tool_choice.mode", "got 9"),
    "choice of nothing": (chat(tool_choice=choice(REQUIRED)), "chat.tool_choice", "needs tools"),
    "choice of another": (chat(tools=[F], tool_choice=choice(0, "f", "g")), "chat.tool_choice.names[1]", "got 'g'"),
    "choice and form": (
        raw(
            chat=generation_pb2.Chat(messages=[USER], tools=[F], tool_choice=choice(REQUIRED)),
            sampling=generation_pb2.Sampling(structured_output=worker_pb2.StructuredOutput(json_object=True)),
        ),
        "sampling.structured_output.json_object",
        "cannot be had where the tool choice requires a call",
    ),
    "form and tools": (
        raw(
            chat=generation_pb2.Chat(messages=[USER], tools=[F]),
            sampling=generation_pb2.Sampling(structured_output=worker_pb2.StructuredOutput(regex="x")),
        ),
        "sampling.structured_output.regex",
        "together with tools; json_schema and json_object can",
    ),
    "strict": (
        chat(tools=[tool(strict=True, parameters='{"type": "object", "properties": {"x": {"uniqueItems": true}}}')]),
        "chat.tools",
        "cannot be held to their schemas.*uniqueItems",
    ),
    "half a character in a schema": (
        chat(tools=[tool(parameters='{"properties": {"x": {"const": "\\ud800"}}}')]),
        "chat.tools[0].parameters",
        "halves of characters",
    ),
    "half a character beside tools": (
        raw(
            chat=generation_pb2.Chat(messages=[USER], tools=[F]),
            sampling=generation_pb2.Sampling(
                structured_output=worker_pb2.StructuredOutput(json_schema='{"const": "\\ud800"}')
            ),
        ),
        "sampling.structured_output.json_schema",
        "halves of characters",
    ),
    "half a character in variables": (
        chat(template_arguments='{"x": "\\ud800"}'),
        "chat.template_arguments",
        "halves of characters",
    ),
    "continued user": (chat(continue_final_message=True), "chat.continue_final_message", "with the role assistant"),
    "variables": (chat(template_arguments="[1]"), "chat.template_arguments", "JSON object"),
    "variable": (chat(template_arguments='{"a b": 1}'), "chat.template_arguments", "'a b' is not the name"),
    "router's variable": (chat(template_arguments='{"tools": 1}'), "chat.template_arguments", "tools is set by"),
    "large variables": (
        chat(template_arguments=json.dumps({"x": "y" * (16 << 10)})),
        "chat.template_arguments",
        "at most 16384 bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("message", "field", "problem"), BAD_CHATS.values(), ids=BAD_CHATS.keys())
async def test_bad_chats_name_field_and_limit(
    tool_model: TextModel, message: generation_pb2.GenerateRequest, field: str, problem: str
) -> None:
    limits = Limits(context_tokens=10_000, vocab_size=512)
    with pytest.raises(InvalidRequest) as caught:
        await validate(message, text_model=tool_model, served_name="tiny", limits=limits, in_flight=())
    assert caught.value.field == field
    assert re.search(problem, caught.value.problem), caught.value.problem


async def wide(message: generation_pb2.GenerateRequest, model: TextModel) -> GenerationRequest:
    limits = Limits(context_tokens=2000, vocab_size=512)
    return await validate(message, text_model=model, served_name="tiny", limits=limits, in_flight=())


async def test_a_template_without_tools_refuses_them(model: TextModel) -> None:
    with pytest.raises(InvalidRequest, match=r"chat\.tools: .*knows of no tools"):
        await wide(chat(tools=[F]), model)
    with pytest.raises(InvalidRequest, match=r"tool_calls: .*knows of no tool calls"):
        await wide(chat(says("assistant", tool_calls=[call(name="f")])), model)
    assert (await wide(chat(), model)).tools is None
    unwanted = chat(tools=[F])
    unwanted.chat.tool_choice.mode = generation_pb2.TOOL_CHOICE_MODE_NONE
    assert (await wide(unwanted, model)).prompt == (await wide(chat(), model)).prompt


async def test_tools_and_calls_are_rendered(tool_model: TextModel) -> None:
    message = chat(
        says("developer", "d"),
        USER,
        says("assistant", "", tool_calls=[call(id="c", name="f", arguments='{"n":  1}')]),
        says("tool", "done", tool_call_id="c", name="f"),
        tools=[F],
        template_arguments='{"enable_thinking": false}',
    )
    described = json.dumps(
        {"type": "function", "function": {"name": "f", "description": "F.", "parameters": json.loads(F.parameters)}}
    )
    expected = (
        f"<tool>{described}</tool>"
        '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>\n'
        '<system>d\n<user>x\n<assistant><tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>\n'
        "<tool>done\n<assistant>!"
    )
    request = await wide(message, tool_model)
    assert request.prompt == tuple(await tool_model.tokenize(expected, 2000))
    assert 510 in request.prompt
    assert request.special is Special.TOOLS
    assert request.params.structured_output is None
    tokens = await tokenize_input(
        generation_pb2.TokenizeRequest(chat=message.chat), tool_model, Limits(context_tokens=2000, vocab_size=512)
    )
    assert tokens == list(request.prompt)


@pytest.mark.parametrize("arguments", ["", "{", "[1]", DEEP])
async def test_arguments_that_are_wrong_stay_as_they_are(tool_model: TextModel, arguments: str) -> None:
    request = await wide(chat(says("assistant", "", tool_calls=[call(name="f", arguments=arguments)])), tool_model)
    written = json.dumps(arguments) if arguments else "{}"
    text = f'<assistant><tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>\n<assistant>'
    assert request.prompt == tuple(await tool_model.tokenize(text, 2000))


async def test_no_tools_are_told_where_none_may_be_called(tool_model: TextModel) -> None:
    request = await wide(chat(tools=[F], tool_choice=choice(NONE)), tool_model)
    assert request.prompt == (await wide(chat(), tool_model)).prompt
    assert request.special is Special.HIDDEN
    assert request.tools is not None
    assert request.tools.parser().feed("<tool_call>") == [Content("<tool_call>")]


async def test_the_final_message_goes_on(tool_model: TextModel) -> None:
    request = await wide(chat(USER, says("assistant", "It is "), continue_final_message=True), tool_model)
    assert request.prompt == tuple(await tool_model.tokenize("<user>x\n<assistant>It is ", 2000))


async def test_wanted_calls_are_a_grammar(tool_model: TextModel) -> None:
    several = await wide(chat(tools=[F, tool(name="g")], tool_choice=choice(REQUIRED)), tool_model)
    one = await wide(chat(tools=[F, tool(name="g")], tool_choice=choice(REQUIRED, "g")), tool_model)
    single = await wide(chat(tools=[F], tool_choice=choice(REQUIRED), parallel_tool_calls=False), tool_model)
    for request in (several, one, single):
        assert request.params.structured_output is not None
        assert request.params.structured_output.kind is StructureKind.GRAMMAR
        assert "<[510]>" in request.params.structured_output.sources[0]
    sources = [request.params.structured_output.sources[0] for request in (several, one, single)]  # type: ignore[union-attr]
    assert ["args_1" in source for source in sources] == [True, False, False]
    assert [")*" in source for source in sources] == [True, True, False]
    assert (await wide(chat(tools=[tool(strict=True)]), tool_model)).params.structured_output is not None
    assert (await wide(chat(tools=[F], tool_choice=choice(0, "f")), tool_model)).params.structured_output is not None


class Encodes:
    """Records how many characters are tokenised at once."""

    def __init__(self, model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chars: list[int] = []
        encode = model._encode

        def recorded(text: str, *, add_special_tokens: bool) -> list[int]:
            self.chars.append(len(text))
            return encode(text, add_special_tokens=add_special_tokens)

        monkeypatch.setattr(model, "_encode", recorded)


LONG = "some words \n" * 60_000
LONG_INPUTS = {
    "prompt": build_request(LONG),
    "chat": build_request([{"role": "user", "content": LONG}]),
}


@pytest.mark.parametrize("kind", LONG_INPUTS)
async def test_of_an_over_long_text_little_is_tokenised(
    model: TextModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # By its characters it could fit: 14 of them are one token at best.
    limits = Limits(context_tokens=65_000, vocab_size=512)
    assert len(LONG) < limits.context_tokens * model.max_token_chars
    for message in (LONG_INPUTS[kind], generation_pb2.TokenizeRequest(prompt=LONG)):
        encodes = Encodes(model, monkeypatch)
        with pytest.raises(InvalidRequest, match="more tokens than the context of 65000 tokens") as caught:
            await tokenize_input(message, model, limits)
        assert caught.value.field in (kind, "prompt")
        assert len(encodes.chars) == 1
        assert encodes.chars[0] <= SLICE_CHARS


async def test_a_long_text_that_fits_is_tokenised_as_a_whole(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model._encode(LONG, add_special_tokens=True)
    fits = Limits(context_tokens=len(whole), vocab_size=512)
    encodes = Encodes(model, monkeypatch)
    assert await tokenize_input(build_request(LONG), model, fits) == whole
    *slices, last = encodes.chars
    assert last == len(LONG) == sum(slices)
    assert max(slices) <= SLICE_CHARS
    with pytest.raises(InvalidRequest, match="more"):
        await tokenize_input(build_request(LONG), model, Limits(len(whole) - 1, 512))


@pytest.mark.parametrize("text", ["x" * (3 * SLICE_CHARS + 1), "ab " * SLICE_CHARS, " " * (2 * SLICE_CHARS)])
async def test_slices_refuse_nothing_that_fits(model: TextModel, text: str) -> None:
    whole = model._encode(text, add_special_tokens=True)
    assert await model.tokenize(text, len(whole)) == whole
