"""What a request's tools mean for its output: the grammar that it has to follow, and how calls are read from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdcore.errors import InvalidRequest
from pdcore.structured import StructuredOutput, StructureKind
from router.tools.events import OnlyFirstCall, PlainText, ToolCallParser
from router.tools.formats import STAND_IN, ToolFormat
from router.tools.grammar import calls_grammar
from router.tools.tool import Choice, ToolUse

_FORMS = (StructureKind.JSON_SCHEMA, StructureKind.JSON_OBJECT)


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """Attributes:
    use: what the request says.
    readable: whether calls can be told from text: no if the model's format is not known.
    structure: the form of the output; None if it is free.
    own: `structure` was made here, so that what is wrong with it is wrong with the tools.
    parser: a new parser of one output. new_id: a new id for a call.
    """

    use: ToolUse
    readable: bool
    structure: StructuredOutput | None
    own: bool
    parser: Callable[[], ToolCallParser]
    new_id: Callable[[], str]


def plan_tools(
    use: ToolUse, kind: ToolFormat | None, tokens: Mapping[str, int], asked: StructuredOutput | None
) -> ToolPlan:
    """Plan an output.

    Args:
        kind: the model's format of calls; None if it is not known. tokens: of its markers that are tokens, the ids.
        asked: the form that the request wants the output to have.

    Raises:
        InvalidRequest: what is asked for cannot be had together.
    """
    new_id = (kind or STAND_IN).new_id
    if use.choice is Choice.NONE:
        return ToolPlan(use, True, asked, False, PlainText, new_id)
    content: str | None = ""
    if use.choice is Choice.REQUIRED:
        if asked is not None:
            raise InvalidRequest(asked.field, "cannot be had where the tool choice requires a call")
        content = None
        if kind is None or kind.spelling is None:
            kind = STAND_IN
    elif asked is not None:
        content = _answer_schema(asked)
    free = use.choice is Choice.AUTO and asked is None and not use.only and not any(t.strict for t in use.tools)
    structure = None if free else _structure(use, kind, tokens, content)

    def parser() -> ToolCallParser:
        if kind is None:
            return PlainText()
        return kind.parser(use.tools) if use.several else OnlyFirstCall(kind.parser(use.tools))

    return ToolPlan(use, kind is not None, structure, structure is not None, parser, new_id)


def _answer_schema(asked: StructuredOutput) -> str:
    if asked.kind not in _FORMS:
        raise InvalidRequest(asked.field, "cannot be had together with tools; json_schema and json_object can")
    return asked.sources[0] if asked.sources else '{"type": "object"}'


def _structure(
    use: ToolUse, kind: ToolFormat | None, tokens: Mapping[str, int], content: str | None
) -> StructuredOutput:
    spelling = None if kind is None else kind.spelling
    if spelling is None or (content and not spelling.trigger):
        if content:
            problem = "cannot be had while the model may also call tools, for this model's calls do not differ enough"
            raise InvalidRequest(
                "sampling.structured_output", f"{problem}: choose between the two by chat.tool_choice"
            )
        wanted = "to be strict" if not use.only else "a choice of some"
        name = "is not known (router.tool_call_parser)" if kind is None else f"is {kind.name}"
        problem = f"{wanted} needs a tool choice that requires a call here: the model's format of calls {name}"
        raise InvalidRequest("chat.tools", problem)
    try:
        source = calls_grammar(spelling, use.allowed, tokens, several=use.several, content=content)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("sampling.structured_output.json_schema", str(error)) from error
    return StructuredOutput(StructureKind.GRAMMAR, (source,))
