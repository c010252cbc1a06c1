"""What a request of the Open Inference Protocol asks for, in the words of generation.proto.

The prompt is the BYTES tensor `text_input`; each of its elements is a request of its own. Everything else may be a
parameter, an input tensor, or a key of the JSON text in `sampling_parameters`, under the names that Triton's backends
for vLLM and TensorRT-LLM use. Nothing is given twice, and what is not known is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pdcore.errors import InvalidRequest
from pdcore.types import MAX_SAMPLES
from protos import generation_pb2
from protos.open_inference_pb2 import InferParameter, ModelInferRequest
from router.tensors import BYTES, MAX_ELEMENTS, Tensor, read_tensors

MAX_TEXTS = 64
TEXT_INPUT = "text_input"
TEXT_OUTPUT = "text_output"
MAX_PARAMETERS = 64
"""More than there are names for; outputs that are asked for are no more than these either."""
MAX_CHARS = 1 << 22
"""Of what is said of the texts, in all: what they have in common each one's request has a copy of."""
MAX_NESTED_CHARS = 1 << 18
"""Of the JSON in `sampling_parameters`, that of all texts together."""
SAMPLING_PARAMETERS = "sampling_parameters"

INPUTS: Mapping[str, str] = {
    TEXT_INPUT: BYTES,
    "stream": "BOOL",
    SAMPLING_PARAMETERS: BYTES,
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "seed": "UINT64",
    "stop": BYTES,
    "bad_words": BYTES,
    "n": "INT32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "repetition_penalty": "FP32",
}
"""Input tensors that the model is described by, and their datatypes; others of the names below are taken as well."""

OUTPUTS: Mapping[str, str] = {
    TEXT_OUTPUT: BYTES,
    "finish_reason": BYTES,
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}

_ALIASES = {  # of TensorRT-LLM's backend
    "random_seed": "seed",
    "stop_words": "stop",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
}
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    # What other servers have and this one has not: taken only where it changes nothing.
    "beam_width": (1,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "sequence_id": (0, ""),
    "sequence_start": (False,),
    "sequence_end": (False,),
}
_CLASSES = {
    1: generation_pb2.PRIORITY_INTERACTIVE,
    2: generation_pb2.PRIORITY_STANDARD,
    3: generation_pb2.PRIORITY_BATCH,
    "interactive": generation_pb2.PRIORITY_INTERACTIVE,
    "standard": generation_pb2.PRIORITY_STANDARD,
    "batch": generation_pb2.PRIORITY_BATCH,
}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request that has been understood.

    Attributes:
        requests: one for each text; without ids.
        samples: of each of them. batched: `text_input` has a dimension for the texts and one more.
        stream: as it is generated, and not at the end. echo: the output begins with the input.
        outputs: names of the tensors to answer with. raw: whether they go as raw contents.
        timeout_s: seconds that it may take; None without a bound.
    """

    requests: Sequence[generation_pb2.GenerateRequest]
    samples: int
    batched: bool
    stream: bool
    echo: bool
    outputs: Sequence[str]
    raw: bool
    timeout_s: float | None


def understand(message: ModelInferRequest) -> InferRequest:
    """Raises InvalidRequest. Ranges are checked with the request itself, by `router.validation`."""
    tensors = {tensor.name: tensor for tensor in read_tensors(message)}
    if len(tensors) != len(message.inputs):
        raise InvalidRequest("inputs", "must have different names")
    text_input = tensors.pop(TEXT_INPUT, None)
    if text_input is None:
        raise InvalidRequest("inputs", f"must have a tensor {TEXT_INPUT!r} of datatype BYTES")
    texts = _texts(text_input)
    common = _common(message)
    asked = [_Asked(common) for _ in texts]
    for name, tensor in tensors.items():
        rows = [_plain(name, tensor.datatype, row) for row in tensor.rows(len(texts))]
        for number, one in enumerate(asked):
            one.add(name, rows[number] if len(rows) > 1 else rows[0])
    nested = _Nested()
    for one in asked:
        one.unfold(nested)
    sizes = [one.size() for one in asked]
    size, chars = sum(size for size, _ in sizes), sum(chars for _, chars in sizes)
    if size > MAX_ELEMENTS:
        raise InvalidRequest("inputs", f"must have lists of at most {MAX_ELEMENTS} values together, got {size}")
    if chars > MAX_CHARS:
        raise InvalidRequest("inputs", f"must say at most {MAX_CHARS} characters of all texts together, got {chars}")
    requests = [one.request(message.model_name, text) for one, text in zip(asked, texts, strict=True)]
    first = asked[0]
    stream = first.flag("stream", False)
    excluded = first.flag("exclude_input_in_output", stream)
    if stream and not excluded:
        raise InvalidRequest("exclude_input_in_output", "must be true, or left out, where the answer is streamed")
    samples = {request.sampling.n or 1 for request in requests}
    for name in sorted(_FLAGS):
        if len({one.flag(name, False) for one in asked}) != 1:
            raise InvalidRequest(name, "must be the same for all texts of a request")
    if len(samples) != 1:
        raise InvalidRequest("n", "must be the same for all texts of a request")
    return InferRequest(
        requests=requests,
        samples=min(samples.pop(), MAX_SAMPLES),  # places are made for them before the core refuses more
        batched=len(text_input.shape) > 1,
        stream=stream,
        echo=not excluded,
        outputs=_outputs(message, first),
        raw=bool(message.raw_input_contents),
        timeout_s=first.timeout_s(),
    )


def _texts(tensor: Tensor) -> list[str]:
    if tensor.datatype != BYTES:
        raise InvalidRequest(TEXT_INPUT, f"must be of datatype BYTES, got {tensor.datatype}")
    if not 1 <= len(tensor.values) <= MAX_TEXTS or len(tensor.shape) > 2:
        raise InvalidRequest(TEXT_INPUT, f"must have 1 to {MAX_TEXTS} elements in 1 or 2 dimensions")
    if len(tensor.shape) == 2 and tensor.shape[1] != 1:
        raise InvalidRequest(TEXT_INPUT, f"must have one text in each row, got shape {list(tensor.shape)}")
    return [_text(TEXT_INPUT, value) for value in tensor.values]


def _text(name: str, value: object) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidRequest(name, "must be UTF-8") from None
    if not isinstance(value, str):
        raise InvalidRequest(name, f"must be a text, got {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(name, "must not have halves of characters") from None
    return value


def _plain(name: str, datatype: str, values: Sequence[Any]) -> Any:
    """A tensor's elements as JSON would have them: one as itself, several as a list."""
    plain = [_text(name, value) for value in values] if datatype == BYTES else list(values)
    return plain[0] if len(plain) == 1 else plain


def _common(message: ModelInferRequest) -> dict[str, Any]:
    if len(message.parameters) > MAX_PARAMETERS:
        raise InvalidRequest("parameters", f"must be at most {MAX_PARAMETERS}, got {len(message.parameters)}")
    parameters = {}
    for name, parameter in message.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(f"parameters.{name[:64]}", "must have a value")
        parameters[name] = getattr(parameter, kind)
    return parameters


def _outputs(message: ModelInferRequest, asked: _Asked) -> list[str]:
    """What to answer with: the outputs that the request names, or the text and what it asks for by `return_...`."""
    if len(message.outputs) > MAX_PARAMETERS:
        raise InvalidRequest("outputs", f"must be at most {MAX_PARAMETERS}, got {len(message.outputs)}")
    names = [output.name for output in message.outputs]
    for output in message.outputs:
        if output.name not in OUTPUTS:
            raise InvalidRequest("outputs", f"must be among {', '.join(OUTPUTS)}, got {output.name[:64]!r}")
        unknown = next((name for name in output.parameters if name != "binary_data"), None)
        if unknown is not None:
            problem = f"{unknown[:64]!r} is not known here"
            raise InvalidRequest(f"outputs[{output.name}].parameters", problem)
    wanted = [name for name in OUTPUTS if asked.flag(f"return_{name}", False)]
    return list(dict.fromkeys([*names, *wanted])) if names else [TEXT_OUTPUT, *wanted]


class _Asked:
    """What is asked of one text, by name, each given once."""

    def __init__(self, common: Mapping[str, Any]) -> None:
        self._values: dict[str, Any] = {}
        for name, value in common.items():
            self.add(name, value)

    def add(self, name: str, value: Any) -> None:
        name = _ALIASES.get(name, name)
        if name in self._values:
            raise InvalidRequest(name[:64], "is given twice")
        self._values[name] = value

    def unfold(self, nested: _Nested) -> None:
        """Put what `sampling_parameters` has beside the rest."""
        text = self._values.pop(SAMPLING_PARAMETERS, None)
        if text is None:
            return
        for name, value in nested.read(_text(SAMPLING_PARAMETERS, text)).items():
            if value is not None:
                self.add(name, value)

    def size(self) -> tuple[int, int]:
        """Values in lists and objects, and characters."""
        lists = [value for value in self._values.values() if isinstance(value, list | dict)]
        texts = [value for value in self._values.values() if isinstance(value, str)]
        texts += [part for value in lists for part in value if isinstance(part, str)]
        return sum(map(len, lists)), sum(map(len, texts))

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            _refuse(name, "a boolean", value)
        return value

    def timeout_s(self) -> float | None:
        """From Triton's `timeout`, which is in microseconds; 0 is none."""
        value = _whole(0, 2**63)("timeout", self._values.get("timeout", 0))
        return value / 1e6 if value else None

    def request(self, model: str, text: str) -> generation_pb2.GenerateRequest:
        request = generation_pb2.GenerateRequest(model=model, prompt=text)
        for name, value in self._values.items():
            if name in _FLAGS:
                self.flag(name, False)
            elif name in _SAMPLING:
                _set(request.sampling, name, _SAMPLING[name](name, value))
            elif name in _TEXTS:
                setattr(request, name, _text(name, value))
            elif name == "priority":
                if value:  # 0 is the default
                    request.priority = _priority(value)
            elif name in _NEUTRAL:
                if value not in _NEUTRAL[name]:
                    _refuse(name, f"{_NEUTRAL[name][0]}, for there is no such thing here,", value)
            elif name != "timeout":
                raise InvalidRequest(name[:64], "is not known here")
        return request


class _Nested:
    """Reads the JSON of `sampling_parameters`: what several texts have in common once."""

    def __init__(self) -> None:
        self._read: dict[str, dict[str, Any]] = {}
        self._chars = 0

    def read(self, text: str) -> dict[str, Any]:
        """Raises InvalidRequest."""
        found = self._read.get(text)
        if found is None:
            self._chars += len(text)
            if self._chars > MAX_NESTED_CHARS:
                problem = f"must have at most {MAX_NESTED_CHARS} characters, got {self._chars}"
                raise InvalidRequest(SAMPLING_PARAMETERS, problem)
            found = self._read[text] = self._parsed(text)
        return found

    def _parsed(self, text: str) -> dict[str, Any]:
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise InvalidRequest(SAMPLING_PARAMETERS, "must be a JSON object")
        if len(values) > MAX_PARAMETERS:
            problem = f"must have at most {MAX_PARAMETERS} names, got {len(values)}"
            raise InvalidRequest(SAMPLING_PARAMETERS, problem)
        return values


def _priority(value: object) -> generation_pb2.Priority.ValueType:
    if isinstance(value, bool) or not isinstance(value, int | str) or value not in _CLASSES:
        _refuse("priority", "1 (interactive), 2 (standard), 3 (batch) or one of these names", value)
    return _CLASSES[value]


def _set(sampling: generation_pb2.Sampling, name: str, value: Any) -> None:
    if isinstance(value, list):
        getattr(sampling, name).extend(value)
    elif isinstance(value, dict):
        getattr(sampling, name).update(value)
    else:
        setattr(sampling, name, value)


def _refuse(name: str, allowed: str, value: object) -> NoReturn:
    raise InvalidRequest(name[:64], f"must be {allowed}, got {_shown(value)}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


Read = Callable[[str, Any], Any]


def _whole(least: int, below: int) -> Read:
    def read(name: str, value: Any) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            _refuse(name, "a whole number", value)
        if not least <= value < below:
            _refuse(name, f"at least {least} and below {below}", value)
        return int(value)

    return read


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(name, "a number", value)
    try:
        return float(value)
    except OverflowError:
        _refuse(name, "a number of usual size", value)


def _fraction(name: str, value: Any) -> float:
    """A number, or one in words: the parameters of the protocol proper know whole numbers only."""
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        return _number(name, float(value))
    return _number(name, value)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(name, "a boolean", value)
    return value


def _list_of(read: Read) -> Read:
    def read_all(name: str, value: Any) -> list[Any]:
        return [read(name, each) for each in (value if isinstance(value, list) else [value])]

    return read_all


def _top_k(name: str, value: Any) -> int:
    return 0 if value == -1 else _U32(name, value)  # -1 is vLLM's word for off


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    def pairs(bias: dict[str, Any]) -> Iterator[tuple[int, float]]:
        for key, each in bias.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                _refuse(name, "an object with token ids as keys", key)
            yield _U32(name, int(key)), _number(name, each)

    if not isinstance(value, dict):
        _refuse(name, "an object of numbers by token id", value)
    return dict(pairs(value))


_U32 = _whole(0, 2**32)
_DECIMAL = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?")

_SAMPLING: Mapping[str, Read] = {
    "max_tokens": _U32,
    "min_tokens": _U32,
    "temperature": _fraction,
    "top_k": _top_k,
    "top_p": _fraction,
    "min_p": _fraction,
    "seed": _whole(0, 2**64),
    "n": _U32,
    "stop": _list_of(_text),
    "bad_words": _list_of(_text),
    "stop_token_ids": _list_of(_U32),
    "allowed_token_ids": _list_of(_U32),
    "ignore_eos": _boolean,
    "presence_penalty": _fraction,
    "frequency_penalty": _fraction,
    "repetition_penalty": _fraction,
    "logit_bias": _logit_bias,
    "include_stop_str_in_output": _boolean,
    "skip_special_tokens": _boolean,
}
"""Of `Sampling` in generation.proto, under the same names."""

_TEXTS = frozenset({"tenant", "kv_codec", "cache_salt", "idempotency_key"})
"""Of `GenerateRequest`, under the same names."""

_FLAGS = frozenset(
    {
        "stream",
        "exclude_input_in_output",
        # Whether the answer ends with a response of its own: here the last one that has something says so.
        "triton_enable_empty_final_response",
        *(f"return_{name}" for name in OUTPUTS if name != TEXT_OUTPUT),
    }
)

Parameter = bool | int | str


def parameter(value: Parameter) -> InferParameter:
    """A value as a parameter of a response."""
    if isinstance(value, bool):
        return InferParameter(bool_param=value)
    return InferParameter(int64_param=value) if isinstance(value, int) else InferParameter(string_param=value)
