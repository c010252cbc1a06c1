"""Requests of the Open Inference Protocol: tensors, raw and typed, and what they ask for."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.errors import InvalidRequest
from pdcore.types import MAX_SAMPLES
from protos import generation_pb2
from protos.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from router.open_inference_request import INPUTS, MAX_TEXTS, parameter, understand
from router.tensors import Tensor, add_output, read_tensors


def packed(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def asking(*texts: str, tensors: dict[str, Tensor] | None = None, **parameters: Any) -> ModelInferRequest:
    """A request with raw contents."""
    message = ModelInferRequest(model_name="m")
    message.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    message.raw_input_contents.append(packed(*(text.encode() for text in texts)))
    response = ModelInferResponse()
    for name, tensor in (tensors or {}).items():
        message.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        add_output(response, tensor, raw=True)
    message.raw_input_contents.extend(response.raw_output_contents)
    for name, value in parameters.items():
        if isinstance(value, float):
            message.parameters[name].double_param = value
        else:
            message.parameters[name].CopyFrom(parameter(value))
    return message


def of(name: str, datatype: str, *values: Any, shape: tuple[int, ...] | None = None) -> dict[str, Tensor]:
    return {name: Tensor(name, datatype, (len(values),) if shape is None else shape, values)}


# -- tensors --------------------------------------------------------------------------------------------------------

VALUES = {
    "BOOL": st.booleans(),
    "INT8": st.integers(-(2**7), 2**7 - 1),
    "INT32": st.integers(-(2**31), 2**31 - 1),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "UINT16": st.integers(0, 2**16 - 1),
    "UINT32": st.integers(0, 2**32 - 1),
    "UINT64": st.integers(0, 2**64 - 1),
    "FP32": st.floats(width=32, allow_nan=False),
    "FP64": st.floats(allow_nan=False),
    "BYTES": st.binary(max_size=20),
}


@given(datatype=st.sampled_from(sorted(VALUES)), raw=st.booleans(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_tensor_comes_back_as_it_was(datatype: str, raw: bool, data: st.DataObject) -> None:
    values = data.draw(st.lists(VALUES[datatype], max_size=12))
    response = ModelInferResponse()
    add_output(response, Tensor("t", datatype, (len(values), 1), values), raw=raw)
    (output,) = response.outputs
    message = ModelInferRequest(raw_input_contents=response.raw_output_contents)
    message.inputs.add(name="t", datatype=datatype, shape=output.shape).contents.CopyFrom(output.contents)
    if raw:
        message.inputs[0].ClearField("contents")
    (tensor,) = read_tensors(message)
    assert (tensor.datatype, tensor.shape, list(tensor.values)) == (datatype, (len(values), 1), values)


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "words"),
    [
        ("BYTES", [1], b"\x05\x00\x00\x00ab", "an element of 5 bytes where 2 are left"),
        ("BYTES", [1], b"\xff\xff\xff\xff", "4294967295 bytes where 0 are left"),
        ("BYTES", [1], b"\x01\x00", "within the length"),
        ("BYTES", [2], packed(b"one"), "2 elements by its shape"),
        ("BYTES", [2**62, 2**62], packed(b"one"), "at most 262144 elements"),
        ("INT32", [2**10], b"\x01\x00\x00\x00", "1024 elements of 4 bytes, got 4 bytes"),
        ("BYTES", [1], packed(b"one", b"two"), "more elements than its shape"),
        ("BYTES", [2**18 + 1], b"", "at most 262144 elements"),
        ("BYTES", [2**62] * 300, b"", "at most 8 dimensions, got 300"),  # a number that takes long, and has no text
        ("INT32", [-1], b"\x01\x00\x00\x00", "must not be negative"),
        ("FP16", [1], b"\x00\x00", "datatype"),
    ],
)
def test_a_tensor_that_is_not_what_it_says(datatype: str, shape: list[int], raw: bytes, words: str) -> None:
    message = ModelInferRequest(raw_input_contents=[raw])
    message.inputs.add(name="t", datatype=datatype, shape=shape)
    with pytest.raises(InvalidRequest, match=words):
        read_tensors(message)


def test_how_much_there_is_of_tensors_is_bounded() -> None:
    message = asking("a", tensors=of("stop", "BYTES", b"", shape=(1,)))
    message.inputs[1].shape[:] = [2**18]
    with pytest.raises(InvalidRequest, match="262144 elements together, got 262145"):
        read_tensors(message)
    many = ModelInferRequest()
    for number in range(65):
        many.inputs.add(name=str(number), datatype="BOOL", shape=[0])
    with pytest.raises(InvalidRequest, match="at most 64, got 65"):
        read_tensors(many)


def test_contents_are_given_in_one_way() -> None:
    message = asking("a")
    message.inputs[0].contents.bytes_contents.append(b"a")
    with pytest.raises(InvalidRequest, match="must not be set where raw"):
        understand(message)
    del message.raw_input_contents[:]
    assert not understand(message).raw
    message.inputs[0].contents.int_contents.append(1)
    with pytest.raises(InvalidRequest, match="must be bytes_contents for datatype BYTES"):
        understand(message)
    message = asking("a", tensors=of("max_tokens", "INT32", 3))
    del message.raw_input_contents[1:]
    with pytest.raises(InvalidRequest, match="one for each of the 2 inputs"):
        understand(message)
    message = asking("a")
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(InvalidRequest, match="not by shared memory"):
        understand(message)


# -- what is asked for ----------------------------------------------------------------------------------------------

WANTED = generation_pb2.Sampling(
    max_tokens=7, temperature=0.5, top_k=3, seed=2**63, stop=["a", "b"], stop_token_ids=[5], ignore_eos=True, n=2
)
AS_JSON = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_k": 3,
    "seed": 2**63,
    "stop": ["a", "b"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "n": 2,
    "min_p": None,
}


def test_the_same_in_three_ways() -> None:
    plain = {name: value for name, value in AS_JSON.items() if isinstance(value, bool | int | float)} | {"seed": 5}
    nested = understand(asking("x", sampling_parameters=json.dumps(AS_JSON)))
    assert nested.requests[0].sampling == WANTED
    by_tensors = understand(
        asking(
            "x",
            tensors=of("max_tokens", "INT32", 7)
            | of("temperature", "FP32", 0.5)
            | of("top_k", "INT64", 3)
            | of("random_seed", "UINT64", 2**63)
            | of("stop_words", "BYTES", b"a", b"b")
            | of("stop_token_ids", "INT32", 5)
            | of("ignore_eos", "BOOL", True)
            | of("num_return_sequences", "UINT32", 2),
        )
    )
    assert by_tensors.requests[0].sampling == WANTED
    by_parameters = understand(asking("x", **plain, stop="a")).requests[0].sampling
    assert (by_parameters.max_tokens, by_parameters.stop, by_parameters.seed) == (7, ["a"], 5)
    assert nested.requests[0].prompt == "x"
    assert (nested.samples, nested.echo, nested.stream, nested.outputs) == (2, True, False, ["text_output"])


def test_defaults_stay_unset() -> None:
    (request,) = understand(asking("x")).requests
    assert request == generation_pb2.GenerateRequest(model="m", prompt="x")
    assert understand(asking("x", top_k=-1)).requests[0].sampling.top_k == 0
    assert understand(asking("x", priority=0, timeout=0)).timeout_s is None
    asked = understand(asking("x", priority=1, timeout=1_500_000, tenant="t"))
    assert (asked.timeout_s, asked.requests[0].tenant) == (1.5, "t")
    assert asked.requests[0].priority == generation_pb2.PRIORITY_INTERACTIVE
    bias = understand(asking("x", sampling_parameters='{"logit_bias": {"7": -1.5}}')).requests[0].sampling.logit_bias
    assert dict(bias) == {7: -1.5}


@pytest.mark.parametrize(("words", "value"), [("0.5", 0.5), ("2", 2.0), ("-0.25", -0.25)])
def test_a_fraction_may_come_in_words(words: str, value: float) -> None:
    """KServe's parameters are whole numbers, booleans and texts."""
    assert understand(asking("x", presence_penalty=words)).requests[0].sampling.presence_penalty == value


def test_each_text_may_have_its_own() -> None:
    asked = understand(
        asking("a", "b", tensors=of("max_tokens", "INT32", 3, 4) | of("temperature", "FP32", 0.0), top_k=5)
    )
    assert [request.prompt for request in asked.requests] == ["a", "b"]
    assert [request.sampling.max_tokens for request in asked.requests] == [3, 4]
    assert {request.sampling.top_k for request in asked.requests} == {5}
    streamed = understand(asking("a", "b", tensors=of("stream", "BOOL", True)))
    assert (streamed.stream, streamed.echo) == (True, False)


JSONS = [b"{}" + b" " * (1 << 17), b" " * (1 << 17) + b"{}"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (ModelInferRequest(), "must have a tensor 'text_input'"),
        (asking("a", max_tokens=1, sampling_parameters='{"max_tokens": 1}'), "max_tokens: is given twice"),
        (asking("a", seed=1, random_seed=1), "seed: is given twice"),
        (asking("a", max_tokens="many"), "max_tokens: must be a whole number"),
        (asking("a", max_tokens=True), "must be a whole number"),
        (asking("a", max_tokens=-1), "at least 0"),
        (asking("a", max_tokens=2**32), "below"),
        (asking("a", max_tokens=1.5), "must be a whole number"),
        (asking("a", max_tokens=float("inf")), "must be a whole number"),
        (asking("a", seed=-1), "at least 0"),
        *((asking("a", temperature=text), "must be a number") for text in ("hot", "", "nan", "1e400", "٣", 50 * "1")),
        (asking("a", stream=1), "stream: must be a boolean"),
        (asking("a", stream=True, exclude_input_in_output=False), "must be true, or left out"),
        (asking("a", beam_width=2), "beam_width: must be 1"),
        (asking("a", sequence_id=5), "sequence_id"),
        (asking("a", guided_json="{}"), "guided_json: is not known here"),
        (asking("a", priority=9), "priority"),
        (asking("a", timeout=-1), "timeout"),
        (asking("a", sampling_parameters="[1]"), "must be a JSON object"),
        (asking("a", sampling_parameters=" " * 2**18 + "{}"), "at most 262144 characters"),
        (asking("a", sampling_parameters="{" * 100_000), "must be a JSON object"),
        (asking("a", sampling_parameters='{"max_tokens": ' + "9" * 5000 + "}"), "must be a JSON object"),
        (asking("a", sampling_parameters='{"temperature": 1' + "0" * 400 + "}"), "usual size"),
        (asking("a", sampling_parameters='{"stop": ["\\ud800"]}'), "halves of characters"),
        (asking("a", sampling_parameters='{"stop": [1]}'), "must be a text"),
        (asking("a", sampling_parameters='{"\\ud800": 1}'), "is not known here"),
        # What 64 texts have in common is not taken apart 64 times.
        (asking(*64 * "a", sampling_parameters=f'{{"stop_token_ids": {[1] * 5000}}}'), "262144 values together"),
        (asking(*64 * "a", tensors=of("stop_token_ids", "UINT32", *5000 * [1])), "262144 values together"),
        (asking(*64 * "a", tenant="t" * 70_000), "4194304 characters of all texts"),
        (asking("a", "b", tensors=of("sampling_parameters", "BYTES", *JSONS)), "at most 262144 characters"),
        (asking("a", **{f"a{number}": 1 for number in range(65)}), "parameters: must be at most 64, got 65"),
        (asking("a", sampling_parameters=json.dumps({f"a{number}": 1 for number in range(65)})), "64 names, got 65"),
        (
            ModelInferRequest(
                inputs=asking("a").inputs,
                raw_input_contents=asking("a").raw_input_contents,
                outputs=65 * [ModelInferRequest.InferRequestedOutputTensor(name="text_output")],
            ),
            "outputs: must be at most 64",
        ),
        (asking("a", sampling_parameters='{"logit_bias": {"x": 1}}'), "token ids as keys"),
        (asking("a", sampling_parameters='{"logit_bias": [1]}'), "numbers by token id"),
        (asking("a", "b", tensors=of("n", "INT32", 1, 2)), "n: must be the same"),
        (asking("a", "b", tensors=of("stream", "BOOL", True, False)), "stream: must be the same"),
        (asking("a", tensors=of("max_tokens", "INT32", 1, 2)), "must be a whole number"),
        (asking(), "1 to 64 elements"),
        (asking(*("a" for _ in range(MAX_TEXTS + 1))), "1 to 64 elements"),
    ],
)
def test_what_cannot_be_is_refused(message: ModelInferRequest, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        understand(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(
    nested=st.dictionaries(
        st.sampled_from([*INPUTS, "stop_token_ids", "logit_bias", "priority", "x"]), JSON, max_size=4
    ),
    raw=st.binary(max_size=12),
    shape=st.lists(st.integers(-1, 4), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_nothing_but_a_refusal_comes_of_nonsense(nested: dict[str, Any], raw: bytes, shape: list[int]) -> None:
    message = asking("a", sampling_parameters=json.dumps(nested))
    message.inputs.add(name="stop_words", datatype="BYTES", shape=shape)
    message.raw_input_contents.append(raw)
    with suppress(InvalidRequest):
        assert understand(message).requests[0].prompt == "a"


def test_no_room_is_made_for_samples_that_are_refused() -> None:
    asked = understand(asking("x", n=2**31 - 1))
    assert (asked.samples, asked.requests[0].sampling.n) == (MAX_SAMPLES, 2**31 - 1)
