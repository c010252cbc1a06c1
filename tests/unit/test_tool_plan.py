"""What a request's tools mean for its output."""

from __future__ import annotations

import pytest

from pdcore.errors import InvalidRequest
from pdcore.structured import StructuredOutput, StructureKind
from router.tools.events import Answer, Call
from router.tools.formats import FORMATS
from router.tools.plan import ToolPlan, plan_tools
from router.tools.tool import Choice, Tool, ToolUse

F, G, STRICT = Tool("f"), Tool("g"), Tool("s", strict=True)
OBJECT = StructuredOutput(StructureKind.JSON_OBJECT)
SCHEMA = StructuredOutput(StructureKind.JSON_SCHEMA, ('{"type": "object"}',))
TWO_CALLS = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'


def plan(use: ToolUse, name: str | None = "hermes", asked: StructuredOutput | None = None) -> ToolPlan:
    return plan_tools(use, None if name is None else FORMATS[name], {}, asked)


def read(made: ToolPlan, text: str) -> Answer:
    answer, parser = Answer(), made.parser()
    answer.add(parser.feed(text) + parser.finish())
    return answer


def test_free_choice_leaves_the_output_free() -> None:
    for name in FORMATS:
        made = plan(ToolUse((F, G)), name)
        assert (made.structure, made.own, made.readable) == (None, False, True)
    made = plan(ToolUse((F, G)))
    assert [call.name for call in read(made, TWO_CALLS).calls] == ["f", "g"]
    assert read(made, "text") == Answer("text")


def test_one_call_at_a_time() -> None:
    assert read(plan(ToolUse((F, G), several=False)), TWO_CALLS) == Answer("", [Call("f", "{}")])


def test_no_calls() -> None:
    made = plan(ToolUse((F, STRICT), Choice.NONE), asked=OBJECT)
    assert (made.structure, made.own) == (OBJECT, False)
    assert read(made, TWO_CALLS) == Answer(TWO_CALLS)


def test_calls_are_wanted_in_the_models_format_or_as_json() -> None:
    for name, shown in (("hermes", "<tool_call>"), ("pythonic", "parameters"), (None, "parameters")):
        made = plan(ToolUse((F, G), Choice.REQUIRED), name)
        assert made.own
        assert made.readable
        assert made.structure is not None
        assert made.structure.kind is StructureKind.GRAMMAR
        assert shown in made.structure.sources[0]
        text = '<tool_call>{"name": "f"}</tool_call>' if name == "hermes" else '{"name": "f", "parameters": {}}'
        assert read(made, text) == Answer("", [Call("f", "{}")])
    with pytest.raises(InvalidRequest, match="requires a call"):
        plan(ToolUse((F,), Choice.REQUIRED), asked=OBJECT)


def test_an_answer_of_a_form_or_calls() -> None:
    for asked in (OBJECT, SCHEMA):
        made = plan(ToolUse((F,)), asked=asked)
        assert made.structure is not None
        assert "content | calls" in made.structure.sources[0]
        for name in ("llama3_json", "pythonic", None):
            with pytest.raises(InvalidRequest, match="do not differ enough"):
                plan(ToolUse((F,)), name, asked)
    with pytest.raises(InvalidRequest, match="json_schema: Expecting"):
        plan(ToolUse((F,)), asked=StructuredOutput(StructureKind.JSON_SCHEMA, ("{",)))


@pytest.mark.parametrize("use", [ToolUse((F, STRICT)), ToolUse((F, G), only=("g",))])
def test_what_text_would_not_keep_to_needs_a_grammar(use: ToolUse) -> None:
    made = plan(use)
    assert made.structure is not None
    assert "TEXT" in made.structure.sources[0]
    for name in ("qwen3_coder", None):
        with pytest.raises(InvalidRequest, match="a tool choice that requires a call") as caught:
            plan(use, name)
        assert caught.value.field == "chat.tools"


def test_an_unknown_format_is_not_read() -> None:
    made = plan(ToolUse((F,)), None)
    assert not made.readable
    assert read(made, TWO_CALLS) == Answer(TWO_CALLS)
