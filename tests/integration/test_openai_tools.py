"""Tools and forms of answers by OpenAI's own client: what the model is told, and how its calls come back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer

from protos import worker_pb2
from tests.integration.test_openai import Cluster
from tests.integration.test_router_flow import Gate
from tests.support.null_cluster import pair
from tests.support.null_worker import Script, saying
from tests.support.tiny_model import tiny_llama
from tests.support.tool_model import tool_llama

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
USER: Any = {"role": "user", "content": "Well?"}
ARGUMENTS = '{"city":  "K\u00f6ln"}'
ONE = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TWO = f'Let me see.\n{ONE}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'


class Actor:
    """What the null workers say, and what they were asked."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.asked: list[worker_pb2.WorkerRequest] = []
        self.says("")

    def says(self, text: str) -> None:
        self._script: Script = saying(text, self._tokenizer, 257)

    def count(self, text: str) -> int:
        """Its tokens."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def __call__(self, request: worker_pb2.WorkerRequest, index: int) -> int:
        if not index:
            self.asked.append(request)
        return self._script(request, index)

    @property
    def prompt(self) -> str:
        """Of the last request."""
        return str(self._tokenizer.decode(list(self.asked[-1].prompt), skip_special_tokens=False))

    @property
    def grammar(self) -> str:
        return self.asked[-1].sampling.structured_output.grammar


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_llama(tmp_path_factory.mktemp("tools"))


@pytest.fixture
def actor(model: Path) -> Actor:
    return Actor(model)


@pytest.fixture
async def cluster(model: Path, actor: Actor) -> AsyncIterator[Cluster]:
    async with Cluster(model, pair(script=actor)) as running:
        yield running


async def chat(cluster: Cluster, **fields: Any) -> Any:
    return await cluster.api.chat.completions.create(**({"model": "null", "messages": [USER]} | fields))


async def test_calls_of_a_whole_answer(cluster: Cluster, actor: Actor) -> None:
    actor.says(TWO)
    answer = await chat(cluster, tools=[WEATHER, CLOCK])
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name, first.function.arguments) == ("function", "get_weather", ARGUMENTS)
    assert (second.function.name, second.function.arguments) == ("clock", "{}")
    assert first.id != second.id
    assert json.dumps(WEATHER, ensure_ascii=False) in actor.prompt
    actor.says(ONE)
    message = (await chat(cluster, tools=[WEATHER])).choices[0].message
    assert message.content is None
    assert [call.function.name for call in message.tool_calls] == ["get_weather"]
    actor.says("No.")
    answer = await chat(cluster, tools=[WEATHER])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("No.", "stop")
    assert answer.choices[0].message.tool_calls is None


async def test_calls_of_a_stream(cluster: Cluster, actor: Actor) -> None:
    actor.says(TWO)
    events = [event async for event in await chat(cluster, tools=[WEATHER, CLOCK], stream=True)]
    deltas = [event.choices[0].delta for event in events]
    assert (deltas[0].role, deltas[0].content) == ("assistant", None)
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    begun = [(call.index, call.type, call.function.name) for call in calls if call.id]
    assert begun == [(0, "function", "get_weather"), (1, "function", "clock")]
    arguments = ["".join(c.function.arguments for c in calls if c.index == index) for index in (0, 1)]
    assert arguments == [ARGUMENTS, "{}"]
    assert [event.choices[0].finish_reason for event in events if event.choices[0].finish_reason] == ["tool_calls"]
    # The client's own helper puts them together.
    async with cluster.api.chat.completions.stream(model="null", messages=[USER], tools=[WEATHER, CLOCK]) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Let me see."
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls or ()] == [
        ("get_weather", ARGUMENTS),
        ("clock", "{}"),
    ]


async def test_arguments_come_as_the_model_writes_them(cluster: Cluster, actor: Actor) -> None:
    actor.says(TWO)
    written = TWO[: TWO.index("K\u00f6ln")]
    gate = cluster["d0"].hook = Gate("token", index=actor.count(written))
    stream = await chat(cluster, tools=[WEATHER, CLOCK], stream=True)
    before = after = ""
    async for event in stream:
        for call in event.choices[0].delta.tool_calls or ():
            if gate.opened.is_set():
                after += call.function.arguments
            else:
                before += call.function.arguments
        if before == '{"city":  "':
            gate.opened.set()
    assert before + after == ARGUMENTS + "{}"
    assert after


async def test_samples_and_limits_beside_calls(cluster: Cluster, actor: Actor) -> None:
    actor.says(ONE)
    answer = await chat(cluster, tools=[WEATHER], n=2)
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [1, 1]
    events = [event async for event in await chat(cluster, tools=[WEATHER], n=2, stream=True)]
    for index in (0, 1):
        of = [event.choices[0].delta for event in events if event.choices[0].index == index]
        calls = [call for delta in of for call in delta.tool_calls or ()]
        assert "".join(call.function.arguments for call in calls) == ARGUMENTS
    cut = await chat(cluster, tools=[WEATHER], max_tokens=60)
    assert cut.choices[0].finish_reason == "length"
    assert ARGUMENTS.startswith(cut.choices[0].message.tool_calls[0].function.arguments)


async def test_the_conversation_goes_on_with_results(cluster: Cluster, actor: Actor) -> None:
    actor.says(TWO)
    message = (await chat(cluster, tools=[WEATHER, CLOCK])).choices[0].message
    actor.says("Rain.")
    results = [{"role": "tool", "tool_call_id": call.id, "content": "wet"} for call in message.tool_calls]
    answer = await chat(cluster, messages=[USER, message, *results], tools=[WEATHER, CLOCK])
    assert answer.choices[0].message.content == "Rain."
    expected = f'<assistant>Let me see.{ONE.replace("  ", " ")}<tool_call>\n{{"name": "clock", "arguments": {{}}}}'
    assert expected in actor.prompt
    assert actor.prompt.endswith("<tool>wet\n<tool>wet\n<assistant>")


async def test_choices(cluster: Cluster, actor: Actor) -> None:
    actor.says(ONE)
    await chat(cluster, tools=[WEATHER, CLOCK], tool_choice="required")
    assert "start: calls" in actor.grammar
    assert all(word in actor.grammar for word in ("get_weather", "clock", ")*"))
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = await chat(cluster, tools=[WEATHER, CLOCK], tool_choice=named)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert "clock" not in actor.grammar
    assert ")*" not in actor.grammar
    await chat(
        cluster,
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK]}},
    )
    assert "TEXT" in actor.grammar
    assert "get_weather" not in actor.grammar
    assert "get_weather" in actor.prompt
    answer = await chat(cluster, tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert "get_weather" not in actor.prompt
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    await chat(cluster, tools=[strict])
    assert "TEXT" in actor.grammar
    actor.says(TWO)
    answer = await chat(cluster, tools=[WEATHER, CLOCK], parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_weather"]
    await chat(cluster, tool_choice="auto", parallel_tool_calls=True)
    assert not actor.asked[-1].sampling.HasField("structured_output")


async def test_forms_of_answers(cluster: Cluster, actor: Actor) -> None:
    actor.says("{}")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema, "strict": True}}
    await chat(cluster, response_format=form)
    assert json.loads(actor.asked[-1].sampling.structured_output.json_schema) == schema
    await chat(cluster, response_format={"type": "json_object"})
    assert actor.asked[-1].sampling.structured_output.json_object
    await chat(cluster, response_format={"type": "text"})
    assert not actor.asked[-1].sampling.HasField("structured_output")
    await chat(cluster, response_format=form, tools=[CLOCK])
    assert "content | calls" in actor.grammar
    await cluster.api.completions.create(
        model="null", prompt="x", extra_body={"response_format": {"type": "json_object"}}
    )
    assert actor.asked[-1].sampling.structured_output.json_object


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    days: list[int] | None


COLOGNE = Weather(city="K\u00f6ln", days=[1, 2])


async def test_answers_are_parsed_by_the_client(cluster: Cluster, actor: Actor) -> None:
    """What its helpers make of a class, and of our answer."""
    asked: Any = {"model": "null", "messages": [USER]}
    chats = cluster.api.chat.completions
    actor.says(COLOGNE.model_dump_json())
    answer = await chats.parse(**asked, response_format=Weather)
    assert answer.choices[0].message.parsed == COLOGNE
    schema = json.loads(actor.asked[-1].sampling.structured_output.json_schema)
    assert (schema["required"], schema["additionalProperties"]) == (["city", "days"], False)
    async with chats.stream(**asked, response_format=Weather) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == COLOGNE
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert json.loads(actor.asked[-1].sampling.structured_output.json_schema) == schema
    with pytest.raises(openai.LengthFinishReasonError):
        await chats.parse(**asked, response_format=Weather, max_tokens=3)

    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    actor.says(f'<tool_call>\n{{"name": "get_weather", "arguments": {COLOGNE.model_dump_json()}}}\n</tool_call>')
    answer = await chats.parse(**asked, tools=[tool])
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == COLOGNE
    assert "TEXT" in actor.grammar, "it is strict"
    async with chats.stream(**asked, tools=[tool]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == COLOGNE
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.parsed_arguments) == ("get_weather", COLOGNE)


async def test_templates_are_told_more(cluster: Cluster, actor: Actor) -> None:
    await chat(cluster, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert actor.prompt.endswith("<assistant>!")
    more = {"continue_final_message": True, "add_generation_prompt": False}
    await chat(cluster, messages=[USER, {"role": "assistant", "content": "It is"}], extra_body=more)
    assert actor.prompt.endswith("<assistant>It is")
    root = cluster.api.with_options(base_url=f"http://{cluster.router.http_address}")
    body = {"messages": [USER], "tools": [CLOCK]}
    counted: Any = await root.post("/tokenize", cast_to=object, body=body)
    await chat(cluster, tools=[CLOCK])
    assert counted["tokens"] == list(actor.asked[-1].prompt)


# ruff: noqa: E501  # rows of a table

BAD: list[tuple[str, dict[str, Any]]] = [
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools[1].function.name", {"tools": [CLOCK, CLOCK]}),
    ("tools[0].function.parameters", {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}),
    ("tools[0].foo", {"tools": [CLOCK | {"foo": 1}]}),
    ("tool_choice", {"tools": [CLOCK], "tool_choice": "sometimes"}),
    ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "function"}}),
    ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}),
    ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ("tool_choice.foo", {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}, "foo": 1}}),
    ("tool_choice.function.foo", {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock", "foo": 1}}}),
    ("tool_choice.foo", {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK]}, "foo": 1}}),
    ("tool_choice.allowed_tools.foo", {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK], "foo": 1}}}),
    ("tool_choice.allowed_tools.tools[1].foo", {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK, CLOCK | {"foo": 1}]}}}),
    ("tool_choice.allowed_tools.tools[0].function.foo", {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "clock", "foo": 1}}]}}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("messages[0].content", {"messages": [{"role": "assistant"}]}),
    ("messages[0].tool_calls", {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": ""}}]}]}),
    ("messages[0].tool_calls[0].function.name", {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "", "arguments": ""}}]}]}),
    ("messages[0].tool_calls[0].id", {"messages": [{"role": "assistant", "tool_calls": [{"id": "a" * 129, "function": {"name": "f", "arguments": ""}}]}]}),
    ("messages[0].name", {"messages": [{"role": "user", "content": "x", "name": "n" * 65}]}),
    ("response_format.type", {"response_format": {"type": "grammar"}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}}),
    ("response_format", {"tools": [CLOCK], "tool_choice": "required", "response_format": {"type": "json_object"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"tools": []}}),
    ("continue_final_message", {"continue_final_message": True}),
    ("add_generation_prompt", {"add_generation_prompt": False}),
]  # fmt: skip


async def test_what_is_wrong_is_named(cluster: Cluster) -> None:
    for param, fields in BAD:
        with pytest.raises(openai.BadRequestError) as caught:
            await cluster.api.chat.completions.create(**({"model": "null", "messages": [USER], "extra_body": fields}))
        assert caught.value.param == param, caught.value.body


async def test_a_model_that_knows_no_tools_or_whose_calls_nobody_can_read(
    model: Path, tmp_path_factory: pytest.TempPathFactory, actor: Actor
) -> None:
    async def refused(folder: Path) -> str:
        async with Cluster(folder, pair(script=actor)) as cluster:
            with pytest.raises(openai.BadRequestError) as caught:
                await chat(cluster, tools=[CLOCK])
            assert caught.value.param == "tools"
            return str(caught.value)

    plain = tiny_llama(tmp_path_factory.mktemp("plain"))
    assert "knows of no tools" in await refused(plain)
    (plain / "chat_template.jinja").write_text("<tool_call>{{ messages }}")
    assert "knows of no tools" in await refused(plain)
    odd = tool_llama(tmp_path_factory.mktemp("odd"))
    (odd / "chat_template.jinja").write_text("{{ tools }}{{ messages }}")
    assert "router.tool_call_parser" in await refused(odd)
    async with Cluster(odd, pair(script=actor)) as cluster:
        actor.says('{"name": "clock", "parameters": {}}')
        answer = await chat(cluster, tools=[CLOCK], tool_choice="required")
        assert answer.choices[0].message.tool_calls[0].function.name == "clock"
    async with Cluster(odd, pair(script=actor), tool_call_parser="pythonic") as cluster:
        actor.says("[clock()]")
        answer = await chat(cluster, tools=[CLOCK])
        assert answer.choices[0].message.tool_calls[0].function.name == "clock"
