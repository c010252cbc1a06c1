"""Grammars of outputs that call tools: what they allow is what the parsers read back."""

from __future__ import annotations

import json
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer

from pdcore.grammar import GrammarCompiler
from pdcore.structured import StructuredOutput, StructureKind
from router.tools.events import Answer
from router.tools.formats import FORMATS, ToolFormat
from router.tools.grammar import arguments_schema, calls_grammar
from router.tools.tool import Tool
from tests.support.structures import END, bpe_tokenizer, compiler_of

SET = Tool(
    "set",
    "Sets it.",
    {
        "type": "object",
        "properties": {"n": {"type": "integer", "description": "which"}, "description": {"type": "string"}},
        "required": ["n"],
    },
    strict=True,
)
GO = Tool("go_on")
TOOLS = (SET, GO)
SPELLED = [kind for kind in FORMATS.values() if kind.spelling is not None]


@cache
def tokenizer(special: bool) -> Tokenizer:
    """With every format's markers as tokens of their own, special or not."""
    made = Tokenizer.from_str(bpe_tokenizer().to_str())
    markers = sorted({marker for kind in FORMATS.values() for marker in kind.markers})
    made.add_tokens([AddedToken(marker, special=special, normalized=False) for marker in markers])
    return made


@cache
def compiler(special: bool) -> GrammarCompiler:
    return compiler_of(tokenizer(special))


def grammar(kind: ToolFormat, words: Tokenizer, *, several: bool = True, content: str | None = None) -> str:
    assert kind.spelling is not None
    tokens = {marker: token for marker in kind.markers if (token := words.token_to_id(marker)) is not None}
    return calls_grammar(kind.spelling, TOOLS, tokens, several=several, content=content)


def allows(source: str, text: str, words: Tokenizer, compiled: GrammarCompiler) -> bool:
    """Whether the output may be this text."""
    matcher = compiled.matcher(StructuredOutput(StructureKind.GRAMMAR, (source,)))
    taken = matcher.take(words.encode(text, add_special_tokens=False).ids)
    return taken and (matcher.complete or matcher.may_end)


def written(kind: ToolFormat, *calls: tuple[str, str]) -> str:
    spelling = kind.spelling
    assert spelling is not None
    pieces = [spelling.call.replace("$NAME", n).replace("$INDEX", "0").replace("$ARGS", a) for n, a in calls]
    return spelling.opening + spelling.between.join(pieces) + spelling.closing


@pytest.fixture(params=["special tokens", "tokens", "text"])
def words(request: pytest.FixtureRequest) -> tuple[Tokenizer, GrammarCompiler]:
    if request.param == "text":
        return bpe_tokenizer(), _plain()
    return tokenizer(request.param == "special tokens"), compiler(request.param == "special tokens")


@cache
def _plain() -> GrammarCompiler:
    return compiler_of(bpe_tokenizer())


def test_wanted_calls(words: tuple[Tokenizer, GrammarCompiler]) -> None:
    for kind in SPELLED:
        source = grammar(kind, words[0])
        one, two = ("set", '{"n": 1, "description": "x"}'), ("go_on", "{}")
        assert allows(source, written(kind, one), *words), kind.name
        assert allows(source, written(kind, one, two, one), *words), kind.name
        for wrong in (
            "",
            "no call",
            written(kind, ("other", "{}")),
            written(kind, ("set", '{"n": "1"}')),
            written(kind, ("set", "{}")),
            written(kind, ("set", '{"n": 1, "m": 2}')),
            written(kind, ("go_on", '{"x": 1}')),
            written(kind, one) + " and",
        ):
            assert not allows(source, wrong, *words), (kind.name, wrong)
        single = grammar(kind, words[0], several=False)
        assert allows(single, written(kind, two), *words), kind.name
        assert not allows(single, written(kind, one, two), *words), kind.name


def test_text_or_calls_that_fit(words: tuple[Tokenizer, GrammarCompiler]) -> None:
    for kind in SPELLED:
        source = grammar(kind, words[0], content="")
        one = written(kind, ("set", '{"n": 1}'), ("go_on", "{}"))
        assert allows(source, one, *words), kind.name
        assert allows(source, "Any text, <b>really</b> [at all]\n{}", *words), kind.name
        assert not allows(source, written(kind, ("set", '{"n": "1"}')), *words), kind.name
        if kind.spelling is not None and kind.spelling.trigger:
            assert allows(source, f"Now.\n{one}", *words), kind.name
            assert not allows(source, f"Now.\n{written(kind, ('other', '{}'))}", *words), kind.name


def test_an_answer_of_a_form_or_calls(words: tuple[Tokenizer, GrammarCompiler]) -> None:
    schema = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
    for kind in SPELLED:
        if kind.spelling is None or not kind.spelling.trigger:
            continue  # there calls look like an answer
        source = grammar(kind, words[0], content=schema)
        assert allows(source, '{"name": "set"}', *words), kind.name
        assert allows(source, written(kind, ("set", '{"n": 1}')), *words), kind.name
        assert not allows(source, '{"name": 1}', *words), kind.name
        assert not allows(source, "text", *words), kind.name


def test_outputs_of_a_grammar_are_read_back() -> None:
    for kind in SPELLED:
        answer, parser = Answer(), kind.parser(TOOLS)
        answer.add(parser.feed(written(kind, ("set", '{"n": 1}'), ("go_on", "{}"))) + parser.finish())
        assert [(call.name, call.arguments) for call in answer.calls] == [("set", '{"n": 1}'), ("go_on", "{}")]


def test_schemas_lose_their_notes_and_nothing_else() -> None:
    schema = {
        "title": "T",
        "type": "object",
        "description": "d",
        "properties": {
            "title": {"type": "string", "title": "x", "default": "y"},
            "pick": {"enum": [{"title": 1}], "examples": []},
            "list": {"type": "array", "items": {"$ref": "#/$defs/description"}},
            "either": {"anyOf": [{"type": "null", "description": "z"}, {"const": {"description": 1}}]},
        },
        "$defs": {"description": {"type": "integer", "description": "an integer"}},
        "additionalProperties": {"type": "string", "title": "t"},
    }
    assert json.loads(arguments_schema(Tool("f", None, schema))) == {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "pick": {"enum": [{"title": 1}]},
            "list": {"type": "array", "items": {"$ref": "#/$defs/description"}},
            "either": {"anyOf": [{"type": "null"}, {"const": {"description": 1}}]},
        },
        "$defs": {"description": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
        "x-guidance": {"lenient": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"},
    }
    assert json.loads(arguments_schema(Tool("f", strict=True))) == {
        "type": "object",
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"},
    }


def test_what_the_library_does_not_know_is_refused_only_where_a_tool_is_strict() -> None:
    kind = FORMATS["hermes"]
    assert kind.spelling is not None
    for strict in (True, False):
        tool = Tool(
            "f", None, {"type": "object", "properties": {"x": {"uniqueItems": True, "type": "array"}}}, strict
        )
        source = calls_grammar(kind.spelling, [tool], {}, several=True, content=None)
        output = StructuredOutput(StructureKind.GRAMMAR, (source,))
        if strict:
            with pytest.raises(Exception, match="uniqueItems"):
                _plain().matcher(output)
        else:
            _plain().matcher(output)


def test_the_end_token_ends_text(words: tuple[Tokenizer, GrammarCompiler]) -> None:
    matcher = words[1].matcher(
        StructuredOutput(StructureKind.GRAMMAR, (grammar(FORMATS["hermes"], words[0], content=""),))
    )
    assert matcher.take(words[0].encode("Hello", add_special_tokens=False).ids)
    assert matcher.allows(words[0].token_to_id(END))
