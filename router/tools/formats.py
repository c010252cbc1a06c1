"""The formats of tool calls that are known: how each is read, written and recognised."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdcore.config import TOOL_CALL_PARSERS
from router.tools.events import ToolCallParser
from router.tools.json_calls import DeepSeekMarks, DelimitedCalls, JsonCalls, KimiCalls, MistralCalls, deepseek
from router.tools.pythonic import MARKERS as PYTHON_MARKERS
from router.tools.pythonic import PythonicCalls
from router.tools.tool import Tool
from router.tools.xml_calls import XmlCalls


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    return secrets.token_hex(5)[:9]  # its chat templates want nine letters and digits


@dataclass(frozen=True, slots=True)
class Spelling:
    """How calls are written, for grammars: ``opening call between call closing``.

    ``$NAME``, ``$ARGS`` and ``$INDEX`` in `call` stand for the name, the arguments as JSON, and a number.

    Attributes:
        trigger: with what calls begin, wherever that is; empty where they begin with a brace or a bracket, and the
            output with them.
    """

    call: str
    opening: str = ""
    between: str = ""
    closing: str = ""
    trigger: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        markers: words that have to be seen even if they are special tokens.
        parser: a new parser of one output, for these tools.
        says: whether a chat template speaks of this format.
        spelling: None where a grammar has no words for it; calls that are wanted are written in that of
            `STAND_IN` then.
        new_id: a new id for a call.
    """

    name: str
    markers: tuple[str, ...]
    parser: Callable[[Sequence[Tool]], ToolCallParser]
    says: Callable[[str], bool]
    spelling: Spelling | None
    new_id: Callable[[], str] = _openai_id


def _says(*words: str) -> Callable[[str], bool]:
    return lambda template: all(word in template for word in words)


def _names(tools: Sequence[Tool]) -> list[str]:
    return [tool.name for tool in tools]


def _deepseek(_: Sequence[Tool]) -> DelimitedCalls:
    return deepseek()


_DS = DeepSeekMarks
_DEEPSEEK_MARKERS = (_DS.FRAME, _DS.FRAME_END, _DS.CALL, _DS.SEPARATOR, _DS.CALL_END)
_KIMI_MARKERS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)

# The more particular ones first: the first one that a template speaks of is taken.
_FORMATS = (
    ToolFormat(
        "qwen3_coder",
        ("<tool_call>", "</tool_call>"),
        lambda tools: XmlCalls({tool.name: tool.parameters for tool in tools}),
        _says("<function=", "<parameter="),
        None,
    ),
    ToolFormat(
        "deepseek_v3",
        _DEEPSEEK_MARKERS,
        _deepseek,
        _says(_DS.FRAME, "```json"),
        Spelling(
            call=f"{_DS.CALL}function{_DS.SEPARATOR}$NAME\n```json\n$ARGS\n```{_DS.CALL_END}",
            opening=_DS.FRAME,
            between="\n",
            closing=_DS.FRAME_END,
            trigger=_DS.FRAME,
        ),
    ),
    ToolFormat(
        "deepseek_v31",
        _DEEPSEEK_MARKERS,
        _deepseek,
        _says(_DS.FRAME),
        Spelling(
            call=f"{_DS.CALL}$NAME{_DS.SEPARATOR}$ARGS{_DS.CALL_END}",
            opening=_DS.FRAME,
            closing=_DS.FRAME_END,
            trigger=_DS.FRAME,
        ),
    ),
    ToolFormat(
        "kimi_k2",
        _KIMI_MARKERS,
        lambda _: KimiCalls(),
        _says("<|tool_calls_section_begin|>"),
        Spelling(
            call="<|tool_call_begin|>functions.$NAME:$INDEX<|tool_call_argument_begin|>$ARGS<|tool_call_end|>",
            opening="<|tool_calls_section_begin|>",
            closing="<|tool_calls_section_end|>",
            trigger="<|tool_calls_section_begin|>",
        ),
    ),
    ToolFormat(
        "mistral_v11",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        lambda _: MistralCalls(),
        _says("[TOOL_CALLS]", "[ARGS]"),
        Spelling(call="[TOOL_CALLS]$NAME[ARGS]$ARGS", trigger="[TOOL_CALLS]"),
        _mistral_id,
    ),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        lambda _: MistralCalls(),
        _says("[TOOL_CALLS]"),
        Spelling(
            call='{"name": "$NAME", "arguments": $ARGS}',
            opening="[TOOL_CALLS] [",
            between=", ",
            closing="]",
            trigger="[TOOL_CALLS]",
        ),
        _mistral_id,
    ),
    ToolFormat(
        "granite",
        ("<|tool_call|>", "<|/tool_call|>"),
        lambda _: JsonCalls(("<|tool_call|>",), ("<|/tool_call|>",)),
        _says("<|tool_call|>"),
        Spelling(
            call='{"name": "$NAME", "arguments": $ARGS}',
            opening="<|tool_call|>[",
            between=", ",
            closing="]",
            trigger="<|tool_call|>",
        ),
    ),
    ToolFormat(
        "hermes",
        ("<tool_call>", "</tool_call>"),
        lambda _: JsonCalls(("<tool_call>",), ("</tool_call>",)),
        _says("<tool_call>"),
        Spelling(
            call='<tool_call>\n{"name": "$NAME", "arguments": $ARGS}\n</tool_call>',
            between="\n",
            trigger="<tool_call>",
        ),
    ),
    ToolFormat(
        "pythonic",
        (*PYTHON_MARKERS, "<|python_end|>"),
        lambda tools: PythonicCalls(_names(tools)),
        lambda template: re.search(r"\[\s*func_?(tion_)?name_?1?\(", template) is not None,
        None,
    ),
    ToolFormat(
        "llama3_json",
        (*PYTHON_MARKERS, "<|python_end|>"),
        lambda tools: JsonCalls(PYTHON_MARKERS, ("<|python_end|>",), separators=(";",), bare=_names(tools)),
        lambda template: '"parameters": ' in template or "<|python_tag|>" in template,
        Spelling(call='{"name": "$NAME", "parameters": $ARGS}', between="; "),
    ),
)
FORMATS = {kind.name: kind for kind in _FORMATS}
STAND_IN = FORMATS["llama3_json"]
"""In which calls are written that a grammar forces on a model whose own format no grammar has words for."""
assert set(FORMATS) == set(TOOL_CALL_PARSERS) - {"auto"}


def format_for(asked: str, template: str | None) -> ToolFormat | None:
    """The format of that name; for ``auto`` the one that the chat template speaks of, None if it is not known."""
    if asked != "auto":
        return FORMATS[asked]
    return next((kind for kind in _FORMATS if template is not None and kind.says(template)), None)
