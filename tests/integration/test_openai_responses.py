"""``/v1/responses`` by OpenAI's own client: items, events, tools and conversations that go on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pdcore.types import Role
from tests.integration.test_openai import Cluster
from tests.integration.test_openai_tools import ARGUMENTS, COLOGNE, TWO, WEATHER, Actor, Weather
from tests.integration.test_router_flow import Gate
from tests.support.null_cluster import pair, until
from tests.support.null_worker import NullWorker
from tests.support.tool_model import tool_llama

TOOL: Any = {"type": "function", **WEATHER["function"], "strict": False}
CLOCK: Any = {"type": "function", "name": "clock", "parameters": None, "strict": False}


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


async def respond(cluster: Cluster, **fields: Any) -> Any:
    return await cluster.api.responses.create(**({"model": "null", "input": "Well?"} | fields))


async def test_a_text(cluster: Cluster, actor: Actor) -> None:
    actor.says("Fine.")
    cluster["p0"].cached_tokens = 3
    response = await respond(cluster, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, user="me")
    assert actor.prompt == "<system>Be brief.\n<user>Well?\n<assistant>"
    assert response.output_text == "Fine."
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (response.object, response.status, response.model, response.error) == (
        "response",
        "completed",
        "null",
        None,
    )
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert response.user == "me"
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(actor.asked[-1].prompt), 6)
    assert usage.total_tokens == usage.input_tokens + 6
    assert usage.input_tokens_details.cached_tokens == 3
    assert response.id.startswith("resp_")
    cut = await respond(cluster, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (cut.output_text, cut.output[0].status) == ("Fin", "incomplete")
    actor.says("")
    empty = await respond(cluster)
    assert (empty.output_text, len(empty.output), empty.status) == ("", 1, "completed")


async def test_the_events_of_a_text(cluster: Cluster, actor: Actor) -> None:
    actor.says("Fine, thank you.")
    events = [event async for event in await respond(cluster, stream=True)]
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas >= 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *(["output_text.delta"] * deltas),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Fine, thank you."
    )
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert events[2].item.content == []
    final = events[-1].response
    assert final.output_text == "Fine, thank you."
    assert final.usage.output_tokens == 17
    assert len({event.item_id for event in events if hasattr(event, "item_id")} | {final.output[0].id}) == 1
    cut = [event async for event in await respond(cluster, stream=True, max_output_tokens=2)]
    assert cut[-1].type == "response.incomplete"


async def test_calls_and_their_events(cluster: Cluster, actor: Actor) -> None:
    actor.says(TWO)
    response = await respond(cluster, tools=[TOOL, CLOCK])
    message, first, second = response.output
    assert message.content[0].text == "Let me see."
    assert (first.type, first.name, first.arguments, first.status) == (
        "function_call",
        "get_weather",
        ARGUMENTS,
        "completed",
    )
    assert (second.name, second.arguments) == ("clock", "{}")
    assert first.call_id.startswith("call_")
    assert first.call_id != second.call_id
    assert first.id != second.id
    async with cluster.api.responses.stream(model="null", input="Well?", tools=[TOOL, CLOCK]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    called = kinds[kinds.index("function_call_arguments.delta") :]
    assert called[-2:] == ["output_item.done", "completed"]
    assert kinds.count("function_call_arguments.done") == 2
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3
    of = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in of if event.output_index == 1) == ARGUMENTS
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert final.output[1].arguments == ARGUMENTS  # type: ignore[union-attr]


async def test_answers_are_parsed_by_the_client(cluster: Cluster, actor: Actor) -> None:
    """What its helpers make of a class, and of our answer."""
    responses = cluster.api.responses
    actor.says(COLOGNE.model_dump_json())
    response = await responses.parse(model="null", input="Well?", text_format=Weather)
    assert response.output_parsed == COLOGNE
    schema = json.loads(actor.asked[-1].sampling.structured_output.json_schema)
    assert (schema["required"], schema["additionalProperties"]) == (["city", "days"], False)
    async with responses.stream(model="null", input="Well?", text_format=Weather) as stream:
        events = [event async for event in stream]
        assert (await stream.get_final_response()).output_parsed == COLOGNE
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert done.parsed == COLOGNE
    assert json.loads(actor.asked[-1].sampling.structured_output.json_schema) == schema

    tool: Any = openai.pydantic_function_tool(Weather, name="get_weather")["function"]
    actor.says(f'<tool_call>\n{{"name": "get_weather", "arguments": {COLOGNE.model_dump_json()}}}\n</tool_call>')
    response = await responses.parse(model="null", input="Well?", tools=[{"type": "function", **tool}])
    (call,) = response.output
    assert call.type == "function_call"
    assert Weather.model_validate_json(call.arguments) == COLOGNE
    assert "TEXT" in actor.grammar, "it is strict"


async def test_a_conversation_goes_on(cluster: Cluster, actor: Actor) -> None:
    actor.says(TWO)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Well?"}]}]
    response = await respond(cluster, input=items, tools=[TOOL, CLOCK])
    items += response.output
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "wet"}
        for item in response.output
        if item.type == "function_call"
    ]
    actor.says("Rain.")
    response = await respond(cluster, input=items, tools=[TOOL, CLOCK], tool_choice="auto")
    assert response.output_text == "Rain."
    _, _, spoken = actor.prompt.partition("<user>")
    assert spoken == (
        "Well?\n<assistant>Let me see.<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "K\u00f6ln"}}\n</tool_call><tool_call>\n'
        '{"name": "clock", "arguments": {}}\n</tool_call>\n<tool>wet\n<tool>wet\n<assistant>'
    )


async def test_choices_and_forms(cluster: Cluster, actor: Actor) -> None:
    actor.says("{}")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "number", "schema": schema, "strict": True}
    response = await respond(cluster, text={"format": form})
    assert json.loads(actor.asked[-1].sampling.structured_output.json_schema) == schema
    assert response.text.format.name == "number"
    await respond(cluster, text={"format": {"type": "json_object"}})
    assert actor.asked[-1].sampling.structured_output.json_object
    response = await respond(cluster, tools=[TOOL, CLOCK], tool_choice={"type": "function", "name": "clock"})
    assert response.tool_choice.name == "clock"
    assert "start: calls" in actor.grammar
    assert "get_weather" not in actor.grammar
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [CLOCK, TOOL]}
    response = await respond(cluster, tools=[TOOL, CLOCK], tool_choice=allowed, parallel_tool_calls=False)
    assert ")*" not in actor.grammar
    assert response.tool_choice.mode == "required"
    assert [tool.name for tool in response.tools] == ["get_weather", "clock"]
    assert response.parallel_tool_calls is False
    response = await respond(
        cluster, tools=[TOOL], tool_choice="none", top_p=0.5, extra_body={"seed": 3, "stop": "}"}
    )
    assert (response.tool_choice, response.output_text) == ("none", "{")
    assert (actor.asked[-1].sampling.seed, actor.asked[-1].sampling.top_p) == (3, 0.5)
    response = await respond(cluster, include=["message.output_text.logprobs"], top_logprobs=2)
    scored = response.output[0].content[0].logprobs
    assert [len(entry.top_logprobs) for entry in scored] == [2, 2]
    assert "".join(entry.token for entry in scored) == "{}"


async def test_logprobs_are_those_of_the_messages_text(cluster: Cluster, actor: Actor) -> None:
    """Not those of a call, of a stop string or of the end; with each delta come those of its text."""
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "tools": [TOOL, CLOCK]}
    for says, stop, text in (
        (TWO, None, "Let me see."),
        ("Wait, \u00e9\U0001f600 <tool_calm", None, "Wait, \u00e9\U0001f600 <tool_calm"),
        ("Fine.STOP", "STOP", "Fine."),
    ):
        actor.says(says)
        whole = await respond(cluster, **asked, extra_body={"stop": stop})
        scored = whole.output[0].content[0].logprobs
        assert bytes(byte for entry in scored for byte in entry.bytes).decode() == text
        assert all(len(entry.top_logprobs) == 1 for entry in scored)
        stream = await respond(cluster, **asked, extra_body={"stop": stop}, stream=True)
        events = [event async for event in stream]
        assert events[-1].response.output[0].content[0].logprobs == scored
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in scored]
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        assert len(done.logprobs) == len(scored)


# ruff: noqa: E501  # rows of a table

BAD: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": 5}),
    ("input", {"input": []}),
    ("input[0]", {"input": [{"type": "reasoning", "summary": []}]}),
    ("input[0]", {"input": ["x"]}),
    ("input[0].role", {"input": [{"role": "judge", "content": "x"}]}),
    ("input[0].content", {"input": [{"role": "user", "content": []}]}),
    ("input[1].content[0].type", {"input": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "input_image"}]}]}),
    ("input[1]", {"input": [{"role": "user", "content": "x"}, *[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 200]}),
    ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "x"}]}),
    ("input[1].call_id", {"input": [{"role": "user", "content": "x"}, {"type": "function_call_output", "call_id": "c" * 129, "output": "x"}]}),
    ("input[0].name", {"input": [{"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].name", {"tools": [{"type": "function", "name": "a b"}]}),
    ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "web_search"}}),
    ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "function", "name": "g"}}),
    ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [CLOCK, {"type": "function", "name": "g"}]}}),
    ("tool_choice.foo", {"tools": [CLOCK], "tool_choice": {"type": "function", "name": "clock", "foo": 1}}),
    ("tool_choice.foo", {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [CLOCK], "foo": 1}}),
    ("tool_choice.tools[0].foo", {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [CLOCK | {"foo": 1}]}}),
    ("user", {"user": ["me"]}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "thing"}}}}),
    ("max_output_tokens", {"max_output_tokens": 10**9}),
    ("temperature", {"temperature": 3}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("include[0]", {"include": ["file_search_call.results"]}),
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("conversation", {"conversation": "conv_1"}),
    ("store", {"store": True}),
    ("background", {"background": True}),
    ("truncation", {"truncation": "auto"}),
    ("reasoning.effort", {"reasoning": {"effort": "high"}}),
    ("foo", {"foo": 1}),
]  # fmt: skip


async def test_what_is_wrong_is_named(cluster: Cluster) -> None:
    for param, fields in BAD:
        with pytest.raises(openai.BadRequestError) as caught:
            await cluster.api.responses.create(model="null", input="Well?", extra_body=fields)
        assert caught.value.param == param, caught.value.body
    with pytest.raises(openai.NotFoundError) as unknown:
        await respond(cluster, model="gpt")
    assert unknown.value.param == "model"


async def test_a_stream_that_fails_says_so(model: Path, actor: Actor) -> None:
    actor.says("Fine, thank you.")
    gate = Gate("token", index=5)
    worker = NullWorker("a0", Role.AGGREGATED, hook=gate, script=actor)
    async with Cluster(model, [worker], max_replays=0) as cluster:
        stream = await respond(cluster, stream=True)
        seen = [await anext(stream)]
        await gate.reached.wait()
        await worker.crash()
        seen += [event async for event in stream]
        assert seen[-1].type == "response.failed"
        assert seen[-1].response.status == "failed"
        assert seen[-1].response.error.code == "server_error"
        assert seen[-1].response.output[0].content[0].text == "Fine,"
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        await until(lambda: not cluster.dispatcher.running, "the request is over")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
async def test_a_stream_with_calls_may_be_cut_anywhere(
    cluster: Cluster, actor: Actor, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """By its client, after each piece that came; then nothing runs on, and nothing is logged as a fault of ours."""
    actor.says(TWO)
    body: dict[str, Any] = {"model": "null", "stream": True}
    if path == "/v1/responses":
        body |= {"input": "Well?", "tools": [TOOL, CLOCK]}
    else:
        clock = {"type": "function", "function": {"name": "clock"}}
        body |= {"messages": [{"role": "user", "content": "Well?"}], "tools": [WEATHER, clock], "n": 2}
    cut, over = 0, False
    async with httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as client:
        while not over:
            cut += 3
            async with client.stream("POST", path, json=body) as response:
                assert response.status_code == 200
                events = response.aiter_lines()
                came = 0
                while came < cut and not over:
                    over = await anext(events, None) is None
                    came += 1
    assert cut > 20
    await cluster.empty()
    await until(lambda: cluster.dispatcher.running == 0, "the router forgot them")
    assert "Traceback" not in caplog.text
