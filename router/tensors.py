"""Tensors of the Open Inference Protocol: names, shapes and elements, raw or as typed lists."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdcore.errors import InvalidRequest
from protos.open_inference_pb2 import InferTensorContents, ModelInferRequest, ModelInferResponse

BYTES = "BYTES"
MAX_ELEMENTS = 1 << 18
"""Of a request's tensors together: taking them apart must not keep the router's other clients waiting."""
MAX_TENSORS = 64
"""More than there are names for."""
MAX_DIMENSIONS = 8
"""Of a tensor, so that the number of its elements is one that can be computed and shown."""

_LENGTH = struct.Struct("<I")

# Datatype: format of an element, and the list that it is in where tensors are not raw.
_TYPES = {
    "BOOL": ("?", "bool_contents"),
    "INT8": ("b", "int_contents"),
    "INT16": ("h", "int_contents"),
    "INT32": ("i", "int_contents"),
    "INT64": ("q", "int64_contents"),
    "UINT8": ("B", "uint_contents"),
    "UINT16": ("H", "uint_contents"),
    "UINT32": ("I", "uint_contents"),
    "UINT64": ("Q", "uint64_contents"),
    "FP32": ("f", "fp32_contents"),
    "FP64": ("d", "fp64_contents"),
    BYTES: ("", "bytes_contents"),
}

Element = bytes | bool | int | float


@dataclass(frozen=True, slots=True)
class Tensor:
    """`values`: as many as `shape` says, the last dimension first; bytes where `datatype` is BYTES."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Element]

    def rows(self, count: int) -> list[Sequence[Element]]:
        """What of it belongs to each of `count` inputs, if it has a row for each; else all of it, once, for all."""
        if count > 1 and self.shape and self.shape[0] == count:
            size = len(self.values) // count
            return [self.values[size * row : size * (row + 1)] for row in range(count)]
        return [self.values]


def read_tensors(request: ModelInferRequest) -> list[Tensor]:
    """The inputs of a request. Raises InvalidRequest; nothing larger than the message is made."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        problem = f"must be one for each of the {len(request.inputs)} inputs, or none, got {len(raw)}"
        raise InvalidRequest("raw_input_contents", problem)
    if len(request.inputs) > MAX_TENSORS:
        raise InvalidRequest("inputs", f"must be at most {MAX_TENSORS}, got {len(request.inputs)}")
    count = sum(_count(entry) for entry in request.inputs)
    if count > MAX_ELEMENTS:
        raise InvalidRequest("inputs", f"must be of at most {MAX_ELEMENTS} elements together, got {count}")
    return [_tensor(entry, raw[number] if raw else None) for number, entry in enumerate(request.inputs)]


def _count(entry: ModelInferRequest.InferInputTensor) -> int:
    """Elements of a tensor, by its shape."""
    field = f"inputs[{entry.name[:64]}].shape"
    if len(entry.shape) > MAX_DIMENSIONS:
        raise InvalidRequest(field, f"must have at most {MAX_DIMENSIONS} dimensions, got {len(entry.shape)}")
    if any(size < 0 for size in entry.shape):
        raise InvalidRequest(field, f"must not be negative, got {list(entry.shape)}")
    return math.prod(entry.shape)


def _tensor(entry: ModelInferRequest.InferInputTensor, raw: bytes | None) -> Tensor:
    field = f"inputs[{entry.name[:64]}]"
    if entry.datatype not in _TYPES:
        raise InvalidRequest(f"{field}.datatype", f"must be one of {', '.join(_TYPES)}, got {entry.datatype[:32]!r}")
    unsupported = next((name for name in entry.parameters if name != "binary_data_size"), None)
    if unsupported is not None:  # the first says it: there may be as many as a message has room for
        problem = f"{unsupported[:64]!r} is not known here: contents come in the message, not by shared memory"
        raise InvalidRequest(f"{field}.parameters", problem)
    count = _count(entry)
    if raw is not None and entry.HasField("contents"):
        raise InvalidRequest(f"{field}.contents", "must not be set where raw_input_contents are")
    values = _listed(entry, field) if raw is None else _unpacked(entry.datatype, raw, count, field)
    if len(values) != count:
        problem = f"must have {count} elements by its shape {list(entry.shape)}, got {len(values)}"
        raise InvalidRequest(field, problem)
    return Tensor(entry.name, entry.datatype, tuple(entry.shape), values)


def _listed(entry: ModelInferRequest.InferInputTensor, field: str) -> Sequence[Element]:
    expected = _TYPES[entry.datatype][1]
    for descriptor, _ in entry.contents.ListFields():
        if descriptor.name != expected:
            problem = f"must be {expected} for datatype {entry.datatype}, got {descriptor.name}"
            raise InvalidRequest(f"{field}.contents", problem)
    values: Sequence[Element] = getattr(entry.contents, expected)
    return values


def _unpacked(datatype: str, raw: bytes, count: int, field: str) -> Sequence[Element]:
    if datatype == BYTES:
        return list(_strings(raw, count, field))
    element = struct.Struct("<" + _TYPES[datatype][0])
    if len(raw) != count * element.size:
        problem = f"must have {count} elements of {element.size} bytes, got {len(raw)} bytes"
        raise InvalidRequest(field, problem)
    return [value for (value,) in element.iter_unpack(raw)]


def _strings(raw: bytes, count: int, field: str) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        if not count:
            raise InvalidRequest(field, "has more elements than its shape says")
        count -= 1
        if at + _LENGTH.size > len(raw):
            raise InvalidRequest(field, "ends within the length of an element")
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if at + length > len(raw):
            raise InvalidRequest(field, f"has an element of {length} bytes where {len(raw) - at} are left")
        yield raw[at : at + length]
        at += length


def add_output(response: ModelInferResponse, tensor: Tensor, *, raw: bool) -> None:
    """Put a tensor into a response, raw or as a list. All tensors of a response go the same way."""
    output = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    form, listed = _TYPES[tensor.datatype]
    if not raw:
        output.contents.CopyFrom(InferTensorContents(**{listed: tensor.values}))  # type: ignore[arg-type]
    elif tensor.datatype == BYTES:
        parts = (part for value in tensor.values for part in (_LENGTH.pack(len(value)), value))  # type: ignore[arg-type]
        response.raw_output_contents.append(b"".join(parts))  # type: ignore[arg-type]
    else:
        response.raw_output_contents.append(struct.pack(f"<{len(tensor.values)}{form}", *tensor.values))
