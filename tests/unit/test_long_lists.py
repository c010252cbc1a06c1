"""A message has room for millions of entries of any list in it: none of them is gone through before it is counted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pdcore.config import RouterConfig
from pdcore.errors import InvalidRequest
from protos import admin_pb2, generation_pb2, open_inference_pb2
from router.open_inference_request import understand
from router.prompt_size import check_detokenize_size, check_prompt_size
from router.tensors import _TYPES
from router.tokenizer import TextModel
from router.validation import Limits, tokenize_input, validate
from tests.support.tool_model import tool_llama

COUNT = 300_000
MAX_STEPS = 30_000
"""Lines of Python that a message may take: a tenth of a line for each entry."""
LIMITS = Limits(context_tokens=1000, vocab_size=512)
CONFIG = RouterConfig("r", "", "tiny", "")

SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["Generation"],
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
)

# Fields that name what is too long, if it is not the list itself.
NAMED = {
    "chat.messages.tool_calls": "chat.messages[0].tool_calls",
    "sampling.structured_output.choice.choices": "sampling.structured_output.choice",
    "inputs.shape": "inputs[].shape",
    "inputs.parameters": "inputs[].parameters",
    "outputs.parameters": "outputs[text_output].parameters",
}
NAMED |= {
    f"inputs.contents.{field.name}": "inputs[]" for field in open_inference_pb2.InferTensorContents.DESCRIPTOR.fields
}


def lists_of(message: Descriptor, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of every list and map in a message."""
    for field in message.fields:
        here = (*path, field.name)
        if field.is_repeated:
            yield here
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from lists_of(field.message_type, here)


MESSAGES = {method.input_type.full_name: method.input_type for service in SERVICES for method in service.methods}
LISTS = [(name, path) for name, message in MESSAGES.items() for path in lists_of(message)]


def fill(message: Any, path: tuple[str, ...]) -> None:
    """Put `COUNT` entries into a list. Those that it is in have one."""
    name, *rest = path
    field: FieldDescriptor = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if rest:
        fill(value.add() if field.is_repeated else value, tuple(rest))
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        texts = field.message_type.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
        for key in range(COUNT):
            if texts:
                value.get_or_create(str(key))
            else:
                value[key] = 1.0
    elif field.message_type is not None:
        value.MergeFrom([GetMessageClass(field.message_type)()] * COUNT)
    else:
        empty = {FieldDescriptor.TYPE_STRING: "", FieldDescriptor.TYPE_BYTES: b""}
        value.extend([empty.get(field.type, 1)] * COUNT)


@contextmanager
def steps() -> Iterator[list[int]]:
    """Counts lines of Python, each time that they run."""
    count = [0]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        count[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextModel]:
    model = TextModel.load(tool_llama(tmp_path_factory.mktemp("tools")))
    yield model
    model.close()


async def take(message: Message, model: TextModel) -> None:
    """What becomes of a message before it is run."""
    match message:
        case generation_pb2.GenerateRequest():
            check_prompt_size(message, CONFIG.max_prompt_bytes)
            await validate(message, text_model=model, served_name="tiny", limits=LIMITS, in_flight=())
        case generation_pb2.TokenizeRequest():
            check_prompt_size(message, CONFIG.max_prompt_bytes)
            await tokenize_input(message, model, LIMITS)
        case generation_pb2.DetokenizeRequest():
            check_detokenize_size(message, COUNT)
        case open_inference_pb2.ModelInferRequest():
            understand(message)
        case _:
            raise AssertionError(
                f"a list in a message of which this test knows nothing: {message.DESCRIPTOR.full_name}"
            )


@pytest.mark.parametrize(
    ("name", "path"), LISTS, ids=[".".join((name.rpartition(".")[2], *path)) for name, path in LISTS]
)
async def test_long_lists_are_refused_by_their_length(model: TextModel, name: str, path: tuple[str, ...]) -> None:
    message: Any = GetMessageClass(MESSAGES[name])()
    if path[0] == "sampling":
        message.prompt = "a"
    elif path[0] == "chat" and path[1] != "messages":
        message.chat.messages.add(role="user", content="a")
    fill(message, path)
    if name.endswith("ModelInferRequest"):
        if path[0] == "inputs" and len(path) > 1:
            message.inputs[0].datatype = next(
                (kind for kind, (_, where) in _TYPES.items() if where == path[-1]), "BYTES"
            )
        if path == ("outputs", "parameters"):
            message.outputs[0].name = "text_output"
        if path[0] not in ("inputs", "raw_input_contents"):
            text = message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
            text.contents.bytes_contents.append(b"a")
    with pytest.raises(InvalidRequest) as refused, steps() as count:
        await take(message, model)
    assert refused.value.field == NAMED.get(".".join(path), ".".join(path))
    assert count[0] < MAX_STEPS


async def test_long_lists_in_several_messages_are_counted_together(model: TextModel) -> None:
    calls = [generation_pb2.ToolCall()] * 128
    messages = [generation_pb2.ChatMessage(role="assistant", tool_calls=calls)] * 900
    with pytest.raises(InvalidRequest, match=r"chat\.messages: .* 1000 tool calls .* got 115200"), steps() as count:
        await take(generation_pb2.GenerateRequest(chat=generation_pb2.Chat(messages=messages)), model)
    assert count[0] < MAX_STEPS


def test_every_list_was_found() -> None:
    found = {path[-1] for _, path in LISTS}
    assert {"names", "tools", "tool_calls", "choices", "logit_bias", "ids", "token_ids", "bytes_contents"} <= found
