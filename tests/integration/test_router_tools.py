"""Chats with tools over gRPC: what the model is told, and what its answer looks like."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import jsonschema
import pytest
from tokenizers import Tokenizer

from pdcore.types import Role
from protos import generation_pb2, generation_pb2_grpc, worker_pb2
from router.tools.events import Answer, Call
from router.tools.formats import FORMATS
from router.tools.tool import Tool
from tests.support.local_cluster import LocalCluster
from tests.support.null_cluster import NullCluster, pair
from tests.support.null_worker import saying
from tests.support.processes import worker_config
from tests.support.tool_model import tool_llama

CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
CHAT = generation_pb2.Chat(
    messages=[generation_pb2.ChatMessage(role="user", content="go")],
    tools=[generation_pb2.Tool(name="f", parameters='{"type": "object", "properties": {"n": {"type": "integer"}}}')],
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_llama(tmp_path_factory.mktemp("tools"))


async def test_calls_are_in_the_text_and_their_marks_seen(model: Path) -> None:
    asked: list[worker_pb2.WorkerRequest] = []
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    script = saying(f"Well.\n{CALL}", tokenizer, 257)

    def recorded(request: worker_pb2.WorkerRequest, index: int) -> int:
        asked.append(request)
        return script(request, index)

    async with (
        NullCluster(model, pair(script=recorded)) as cluster,
        grpc.aio.insecure_channel(cluster.router.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)

        async def text(chat: generation_pb2.Chat) -> str:
            return "".join([event.text async for event in stub.Generate(generation_pb2.GenerateRequest(chat=chat))])

        answer, parser = Answer(), FORMATS["hermes"].parser([Tool("f")])
        answer.add(parser.feed(await text(CHAT)) + parser.finish())
        assert answer == Answer("Well.", [Call("f", '{"n": 1}')])
        tokens = await stub.Tokenize(generation_pb2.TokenizeRequest(chat=CHAT))
        assert list(asked[0].prompt) == list(tokens.token_ids)
        assert '"name": "f"' in tokenizer.decode(list(tokens.token_ids), skip_special_tokens=False)
        # Without tools the marks are special tokens like others.
        plain = generation_pb2.Chat(messages=CHAT.messages)
        assert await text(plain) == f"Well.\n{CALL}".replace("<tool_call>", "").replace("</tool_call>", "")
        asked.clear()
        required = generation_pb2.ToolChoice(mode=generation_pb2.TOOL_CHOICE_MODE_REQUIRED)
        await text(generation_pb2.Chat(messages=CHAT.messages, tools=CHAT.tools, tool_choice=required))
        grammar = asked[0].sampling.structured_output.grammar
        assert "start: calls" in grammar
        assert json.dumps('"f", "arguments": ')[1:-1] in grammar


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["C", "F"]}},
    "required": ["n", "unit"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_a_model_that_knows_nothing_calls_the_tool_that_it_has_to(model: Path, tmp_path: Path) -> None:
    """Random weights, real workers: what keeps the output to the form is the grammar alone."""
    chat = generation_pb2.Chat(
        messages=CHAT.messages,
        tools=[
            generation_pb2.Tool(name="g", parameters=json.dumps(SCHEMA)),
            generation_pb2.Tool(name="f", parameters=json.dumps(SCHEMA)),
        ],
        tool_choice=generation_pb2.ToolChoice(mode=generation_pb2.TOOL_CHOICE_MODE_REQUIRED, names=["f"]),
        parallel_tool_calls=False,
    )
    workers = [worker_config(model, Role.AGGREGATED)]
    with (
        LocalCluster(model, tmp_path, workers, forked=True) as cluster,
        grpc.insecure_channel(cluster.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        for seed in range(3):
            sampling = generation_pb2.Sampling(max_tokens=200, seed=seed, temperature=1.5)
            events = list(stub.Generate(generation_pb2.GenerateRequest(chat=chat, sampling=sampling), timeout=60))
            assert events[-1].end.finish_reason == generation_pb2.FINISH_REASON_STOP
            answer, parser = Answer(), FORMATS["hermes"].parser([Tool("f")])
            answer.add(parser.feed("".join(event.text for event in events)) + parser.finish())
            (call,) = answer.calls
            assert (answer.content, call.name) == ("", "f")
            jsonschema.validate(json.loads(call.arguments), SCHEMA)
