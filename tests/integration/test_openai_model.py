"""OpenAI's client and a real model: the same tokens, log-probabilities and counts as over gRPC."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from pdcore.logprobs import Logprobs
from pdcore.types import Role
from router.client import Client, Sampling
from tests.support.local_cluster import LocalCluster
from tests.support.processes import worker_config
from tests.support.tool_model import tool_llama

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog is not amused: \u00e9t\u00e9."


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model = tool_llama(tmp_path_factory.mktemp("model"))
    configs = [worker_config(model, Role.AGGREGATED)]
    with LocalCluster(model, tmp_path_factory.mktemp("cluster"), configs, forked=True, http_port=0) as cluster:
        yield cluster


@pytest.fixture
def grpc(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.address) as client:
        yield client


@pytest.fixture
def api(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    base = f"http://{cluster.router.http_address}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        yield client


def test_the_same_as_over_grpc(api: openai.OpenAI, grpc: Client) -> None:
    sampling = Sampling(
        max_tokens=40, temperature=0.9, seed=7, ignore_eos=True, logprobs=3, logit_bias={65: 2.0}, n=2, top_k=50
    )
    wanted = grpc.samples(PROMPT, sampling)
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 0.9,
        "seed": 7,
        "logprobs": 3,
        "logit_bias": {"65": 2},
        "n": 2,
        "extra_body": {"ignore_eos": True, "top_k": 50},
    }
    answer = api.completions.create(**fields)
    texts = [sample.text for sample in wanted]
    assert [choice.text for choice in answer.choices] == texts
    assert texts[0] != texts[1]
    for choice, sample in zip(answer.choices, wanted, strict=True):
        found = choice.logprobs
        assert found is not None
        assert isinstance(sample.logprobs, Logprobs)
        assert found.token_logprobs == pytest.approx(list(sample.logprobs.values), abs=1e-4)
        assert found.tokens is not None
        assert len(found.tokens) == len(sample.token_ids) == 40
        assert found.text_offset is not None
        assert found.text_offset == sorted(found.text_offset)
        assert found.text_offset[0] == 0
        assert found.text_offset[-1] <= len(choice.text)
        assert found.top_logprobs is not None
        for index, (top, token) in enumerate(zip(found.top_logprobs, found.tokens, strict=True)):
            likeliest = sample.logprobs.top_values[3 * index : 3 * index + 3]
            assert 3 <= len(top) <= 4
            assert sorted(top.values(), reverse=True)[:3] == pytest.approx(list(likeliest), abs=1e-4)
            assert top[token] == pytest.approx(sample.logprobs.values[index], abs=1e-4)
    texts = ["", ""]
    scored: list[list[float]] = [[], []]
    offsets: list[list[int]] = [[], []]
    for event in api.completions.create(**fields, stream=True):
        (piece,) = event.choices
        texts[piece.index] += piece.text
        if piece.logprobs is not None:
            scored[piece.index] += piece.logprobs.token_logprobs or []
            offsets[piece.index] += piece.logprobs.text_offset or []
    assert texts == [choice.text for choice in answer.choices]
    for index, choice in enumerate(answer.choices):
        assert choice.logprobs is not None
        assert scored[index] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
        assert offsets[index] == choice.logprobs.text_offset


def test_a_prompt_is_scored_by_echo(api: openai.OpenAI, grpc: Client) -> None:
    wanted = grpc.complete(PROMPT, Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=2))
    assert isinstance(wanted.prompt_logprobs, Logprobs)
    for max_tokens in (0, 1):
        answer = api.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=max_tokens, temperature=0, echo=True, logprobs=2
        )
        (choice,) = answer.choices
        assert choice.text == PROMPT + (wanted.text if max_tokens else "")
        found = choice.logprobs
        assert found is not None
        count = len(PROMPT.encode()) + max_tokens
        assert found.token_logprobs is not None
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1 : len(PROMPT.encode())] == pytest.approx(
            list(wanted.prompt_logprobs.values), abs=1e-4
        )
        assert found.tokens is not None
        assert [len(found.tokens), len(found.text_offset or ()), len(found.top_logprobs or ())] == 3 * [count]
        assert found.tokens[:3] == ["T", "h", "e"]
        # Half a character has a name of its own, and both halves stand at the same place of the text.
        where = PROMPT.encode().index(b"\xc3")
        assert found.tokens[where : where + 2] == ["bytes:\\xc3", "bytes:\\xa9"]
        assert found.text_offset is not None
        assert found.text_offset[where : where + 3] == [PROMPT.index("\u00e9"), PROMPT.index("\u00e9"), where + 1]
    answer = api.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 2}
    )
    first, *others = answer.choices[0].prompt_logprobs  # type: ignore[attr-defined]
    assert first is None
    ids = grpc.tokenize(PROMPT)
    own = [entry[str(token_id)]["logprob"] for entry, token_id in zip(others, ids[1:], strict=True)]
    assert own == pytest.approx(list(wanted.prompt_logprobs.values), abs=1e-4)
    assert all(2 <= len(entry) <= 3 for entry in others)


def test_a_chat_is_scored(api: openai.OpenAI, grpc: Client) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    wanted = grpc.complete(
        [{"role": "user", "content": "hello"}], Sampling(max_tokens=12, temperature=0.0, logprobs=2, ignore_eos=True)
    )
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    answer = api.chat.completions.create(**fields)
    assert answer.choices[0].message.content == wanted.text
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content
    assert content is not None
    assert isinstance(wanted.logprobs, Logprobs)
    assert [entry.logprob for entry in content] == pytest.approx(list(wanted.logprobs.values), abs=1e-4)
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(math.isclose(entry.top_logprobs[0].logprob, entry.logprob, abs_tol=1e-4) for entry in content)
    told = b"".join(bytes(entry.bytes or ()) for entry in content)
    assert told.decode(errors="replace") == wanted.text
    events = list(api.chat.completions.create(**fields, stream=True))
    streamed = [entry for e in events if e.choices[0].logprobs for entry in e.choices[0].logprobs.content or ()]
    assert [(entry.token, entry.bytes) for entry in streamed] == [(entry.token, entry.bytes) for entry in content]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in content], abs=1e-4)


class Wish(BaseModel):
    """What somebody wants."""

    drink: Literal["tea", "coffee"]
    cups: Literal[1, 2]


def test_answers_and_calls_have_the_form_that_was_asked_for(api: openai.OpenAI) -> None:
    """A model of random numbers would say anything else."""
    asked: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Well?"}],
        "max_tokens": 200,
        "temperature": 1,
        "seed": 1,
    }
    chats = api.chat.completions
    answer = chats.parse(**asked, response_format=Wish)
    assert isinstance(answer.choices[0].message.parsed, Wish)
    assert answer.choices[0].finish_reason == "stop"
    answer = chats.parse(**(asked | {"max_tokens": 20}), response_format={"type": "json_object"})
    assert (answer.choices[0].message.content or "").lstrip().startswith("{")
    response = api.responses.parse(model="tiny", input="Well?", text_format=Wish, max_output_tokens=200)
    assert isinstance(response.output_parsed, Wish)

    tools = [openai.pydantic_function_tool(Wish, name=name) for name in ("bring", "send")]
    named = {"type": "function", "function": {"name": "send"}}
    for choice, names in (("required", {"bring", "send"}), (named, {"send"})):
        answer = chats.parse(**asked, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.function.name in names
        assert isinstance(call.function.parsed_arguments, Wish)
        assert answer.choices[0].finish_reason == "tool_calls"


def test_forms_stops_and_counts(api: openai.OpenAI) -> None:
    answer = api.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=20, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert answer.choices[0].text in ("yes", "no")
    assert answer.choices[0].finish_reason == "stop"
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = api.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=60, extra_body={"guided_json": schema, "temperature": 0}
    )
    assert json.loads(answer.choices[0].text) in ({"a": 1}, {"a": 2})
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert 0 < cached < usage.prompt_tokens, "all but the last block was computed for the requests before"
