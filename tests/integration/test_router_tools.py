"""Chats with tools over gRPC: what the model is told, and what its answer looks like."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from protos import generation_pb2, generation_pb2_grpc, worker_pb2
from router.tools.events import Answer, Call
from router.tools.formats import FORMATS
from router.tools.tool import Tool
from tests.support.null_cluster import NullCluster, pair
from tests.support.null_worker import saying
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
