"""Calls in model output: every format, however the text is cut, and whatever is wrong with it."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.tools.events import Answer, Call, CallArguments, CallBegin, Content, Event, OnlyFirstCall, PlainText
from router.tools.formats import FORMATS, format_for
from router.tools.json_calls import DeepSeekMarks
from router.tools.tool import Tool

WEATHER = Tool(
    "get_weather",
    "The weather in a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["C", "F"]},
            "exact": {"type": ["boolean", "null"]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    },
)
CLOCK = Tool("clock", parameters={"type": "object", "properties": {}})
TOOLS = (WEATHER, CLOCK)
DS = DeepSeekMarks.FRAME, DeepSeekMarks.CALL, DeepSeekMarks.SEPARATOR, DeepSeekMarks.CALL_END, DeepSeekMarks.FRAME_END
KIMI = "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({place % (len(text) + 1) for place in cuts})
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def events(name: str, pieces: list[str], tools: tuple[Tool, ...] = TOOLS) -> list[Event]:
    parser = FORMATS[name].parser(tools)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def parse(name: str, text: str) -> Answer:
    answer = Answer()
    answer.add(events(name, [text]))
    return answer


def calls(answer: Answer) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


# ruff: noqa: E501  # outputs as they are

# format, output, content, calls
GOOD: list[tuple[str, str, str, list[tuple[str, object]]]] = [
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln {1} \\"x\\"", "days": 2}}\n'
        "</tool_call>",
        "Let me look.",
        [("get_weather", {"city": 'Köln {1} "x"', "days": 2})],
    ),
    (
        "hermes",
        '<tool_call>{"name":"a","arguments":{"x":[1,{"y":2}]}}</tool_call>\n<tool_call>\n{"name": "clock"}\n</tool_call>',
        "",
        [("a", {"x": [1, {"y": 2}]}), ("clock", {})],
    ),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "a"}</tool_call> done', "done", [("a", {"x": 1})]),
    ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}', "", [("a", {"x": 1})]),
    ("hermes", '<tool_call>{"name": "a", "arguments": null}</tool_call>', "", [("a", {})]),
    ("hermes", '<tool_call>\n{"name": "a", "arguments": {}}\n\n</tool_call>\n\n', "", [("a", {})]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1}\n</tool_call>', "", [("a", {"x": 1})]),
    ("hermes", '<tool_call>[{"name": "a", "arguments": {}}, {"name": "b"}]</tool_call>', "", [("a", {}), ("b", {})]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "\\"}"}}</tool_call>', "", [("a", {"x": '"}'})]),
    ("granite", '<|tool_call|>[{"name": "a", "arguments": {"x": "]"}}]', "", [("a", {"x": "]"})]),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Bonn"}}',
        "",
        [("get_weather", {"city": "Bonn"})],
    ),
    (
        "llama3_json",
        '\n{"type": "function", "name": "clock", "parameters": {}}; {"name": "get_weather", "parameters": {"days": 1}}',
        "",
        [("clock", {}), ("get_weather", {"days": 1})],
    ),
    ("llama3_json", '<|python_tag|>{"name": "any", "parameters": {"x": null}}', "", [("any", {"x": None})]),
    ("llama3_json", 'So:\n<|python_tag|>{"name": "clock", "parameters": {}}', "So:", [("clock", {})]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}, "id": "123456789"}, {"name": "b", "arguments": {}}]',
        "",
        [("a", {"x": 1}), ("b", {})],
    ),
    ("mistral", 'ok [TOOL_CALLS][{"name": "a", "arguments": {}}]', "ok", [("a", {})]),
    (
        "mistral_v11",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Rom"}[TOOL_CALLS]clock[CALL_ID]abc[ARGS]{}',
        "",
        [("get_weather", {"city": "Rom"}), ("clock", {})],
    ),
    ("mistral_v11", '[TOOL_CALLS]clock{"x": 1}', "", [("clock", {"x": 1})]),
    (
        "pythonic",
        "[get_weather(city='Bonn, \"(x)\\'', days=-3, exact=true, tags=[\"a\", 'b'], note=None), clock()]",
        "",
        [
            ("get_weather", {"city": "Bonn, \"(x)'", "days": -3, "exact": True, "tags": ["a", "b"], "note": None}),
            ("clock", {}),
        ],
    ),
    ("pythonic", '<|python_start|>[clock(a={"x": (1, 2)})]<|python_end|>', "", [("clock", {"a": {"x": [1, 2]}})]),
    ("pythonic", 'Hm. <|python_tag|>[clock(a="""x"y""", b="")]', "Hm.", [("clock", {"a": 'x"y', "b": ""})]),
    (
        "qwen3_coder",
        'Now.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n<York> "x"\n</parameter>\n<parameter=days>\n'
        "3\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n<parameter=note>\nnull\n</parameter>\n"
        "<parameter=tags>\n['a', \"b\"]\n</parameter>\n<parameter=units>\nC\n</parameter>\n<parameter=more>\n1\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        "Now.",
        [
            (
                "get_weather",
                {
                    "city": 'New\n<York> "x"',
                    "days": 3,
                    "exact": True,
                    "note": None,
                    "tags": ["a", "b"],
                    "units": "C",
                    "more": "1",
                },
            ),
            ("clock", {}),
        ],
    ),
    (
        "qwen3_coder",
        "<function=get_weather><parameter=days>many</parameter></function>",
        "",
        [("get_weather", {"days": "many"})],
    ),
    (
        "deepseek_v3",
        f'{DS[0]}{DS[1]}function{DS[2]}a\n```json\n{{"x": 1}}\n```{DS[3]}\n{DS[1]}function{DS[2]}b\n```json\n{{}}\n```'
        f"{DS[3]}{DS[4]}",
        "",
        [("a", {"x": 1}), ("b", {})],
    ),
    (
        "deepseek_v31",
        f'Well{DS[0]}{DS[1]}a{DS[2]}{{"x": 1}}{DS[3]}{DS[1]}b{DS[2]}{{}}{DS[3]}{DS[4]}',
        "Well",
        [("a", {"x": 1}), ("b", {})],
    ),
    (
        "kimi_k2",
        f'{KIMI[0]}{KIMI[1]}functions.a:0{KIMI[2]}{{"x": 1}}{KIMI[3]}{KIMI[1]}functions.b:1{KIMI[2]}{{}}{KIMI[3]}'
        "<|tool_calls_section_end|>",
        "",
        [("a", {"x": 1}), ("b", {})],
    ),
]


@pytest.mark.parametrize(
    ("name", "text", "content", "expected"), GOOD, ids=[f"{g[0]}-{i}" for i, g in enumerate(GOOD)]
)
def test_every_format_is_read_and_equal_character_by_character(
    name: str, text: str, content: str, expected: list[tuple[str, object]]
) -> None:
    answer = parse(name, text)
    assert (answer.content, calls(answer)) == (content, expected)
    slow = Answer()
    slow.add(events(name, list(text)))
    assert slow == answer


# What is no call, and stays as it was written.
TEXTS = [
    ("hermes", "Just <b>text</b>, <tool_ and more.\n"),
    ("hermes", "<tool_call>nothing</tool_call>"),
    ("hermes", "a \n<tool_call>"),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "what": 1}'),
    ("hermes", '<tool_call>{"name": "a"'),
    ("hermes", f'<tool_call>{{"name": "{"a" * 300}", "arguments": {{}}}}'),
    ("hermes", "ends with <tool_cal"),
    ("llama3_json", '{"name": "Bob", "parameters": {"x": 1}}'),
    ("llama3_json", '{"name": "clock", "age": 4}'),
    ("llama3_json", ' {"city": "Bonn"}'),
    ("llama3_json", '<|python_tag|>print("x")'),
    ("llama3_json", "[1, 2]"),
    ("mistral", "[TOOL_CALLS] no"),
    ("mistral", "[TOOL_CALLS]clock"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[other(a=1)]"),
    ("pythonic", "[clock(1)]"),
    ("pythonic", "[clock(a=f(1))]"),
    ("pythonic", "[clock(a={1: 2})]"),
    ("pythonic", "[clock(a='x"),
    ("pythonic", "[clock(" + "[" * 5000 + "]" * 5000 + ")]"),
    ("pythonic", "[clock(a=" + "1" * 5000 + ")]"),
    ("pythonic", "[clock(a=1e999)]"),
    ("pythonic", "A list: [clock()]"),
    ("qwen3_coder", "<tool_call>\n{}\n</tool_call>"),
    ("qwen3_coder", "<function=a b>"),
    ("deepseek_v3", f"{DS[0]} no"),
    ("deepseek_v31", f"{DS[1]}a{DS[2]}nothing"),
    ("kimi_k2", f"{KIMI[0]}{KIMI[1]}{'x' * 300}{KIMI[2]}{{}}"),
]


@pytest.mark.parametrize(("name", "text"), TEXTS, ids=[f"{t[0]}-{i}" for i, t in enumerate(TEXTS)])
def test_what_is_no_call_stays_content(name: str, text: str) -> None:
    assert parse(name, text) == Answer(text)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "un', Answer("", [Call("a", '{"x": "un')])),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": }}</tool_call>', Answer("", [Call("a", '{"x": }')])),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}} oh</tool_call>', Answer("oh</tool_call>", [Call("a", "{}")])),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "\\', Answer("", [Call("a", '{"x": "\\')])),
        ("pythonic", "[clock(), clock(x]", Answer(", clock(x]", [Call("clock", "{}")])),
        ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}}, 5]', Answer(", 5]", [Call("a", "{}")])),
        ("qwen3_coder", "<function=clock><parameter=a>1", Answer("", [Call("clock", '{"a": "1')])),
        ("qwen3_coder", "<function=get_weather><parameter=days>1", Answer("", [Call("get_weather", '{"days": 1')])),
        ("qwen3_coder", "<function=clock> hm", Answer("hm", [Call("clock", "{}")])),
    ],
)  # fmt: skip
def test_a_call_that_breaks_off_keeps_what_there_is(name: str, text: str, expected: Answer) -> None:
    assert parse(name, text) == expected


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    parser = FORMATS["hermes"].parser(TOOLS)
    assert parser.feed("Hello") == [Content("Hello")]
    assert parser.feed(" <tool") == []  # white space before a call is not the reader's
    assert parser.feed("x") == [Content(" <toolx")]
    assert parser.feed('<tool_call>{"name": "clo') == []
    assert parser.feed('ck", "arguments": ') == []
    assert parser.feed('{"a"') == [CallBegin(0, "clock"), CallArguments(0, '{"a"')]
    assert parser.feed(": 1") == [CallArguments(0, ": 1")]
    assert parser.feed("}}</tool_") == [CallArguments(0, "}")]
    assert parser.feed("call>") == parser.finish() == []
    coder = FORMATS["qwen3_coder"].parser(TOOLS)
    assert coder.feed("<function=get_weather>") == [CallBegin(0, "get_weather"), CallArguments(0, "{")]
    assert coder.feed("<parameter=city>\nBo") == [CallArguments(0, '"city": "Bo')]
    assert coder.feed("nn\n</par") == [CallArguments(0, "nn")]
    assert coder.feed("ameter></function>") == [CallArguments(0, '"}')]


def test_kimi_names_its_calls() -> None:
    answer = parse("kimi_k2", f"{KIMI[0]}{KIMI[1]}functions.a:7{KIMI[2]}{{}}{KIMI[3]}")
    assert answer.calls == [Call("a", "{}", "functions.a:7")]


def test_only_the_first_call() -> None:
    text = 'Hi <tool_call>{"name": "a"}</tool_call> and <tool_call>{"name": "b"}</tool_call> bye'
    answer, parser = Answer(), OnlyFirstCall(FORMATS["hermes"].parser(TOOLS))
    for character in text:
        answer.add(parser.feed(character))
    answer.add(parser.finish())
    assert answer == Answer("Hi", [Call("a", "{}")])


def test_plain_text_has_no_calls() -> None:
    answer = Answer()
    answer.add(PlainText().feed("<tool_call>{}") + PlainText().feed("") + PlainText().finish())
    assert answer == Answer("<tool_call>{}")


FRAGMENTS = [
    *sorted({marker for kind in FORMATS.values() for marker in kind.markers}),
    *("[", "]", "{", "}", "(", ")", '"', "'", "\\", ":", ",", ";", " ", "\n", "=", "1", "null", "é", "x"),
    *('"name"', '"arguments"', '"parameters"', '"clock"', "clock", "get_weather", "function", "```json\n", "\n```"),
    *('{"name": "clock", "arguments": {', '{"name": "clock"', "<function=", "<parameter=", "</parameter>", "</function>"),
    *("functions.clock:0", "<tool", "_call>", "[TOOL", "_CALLS]", "city>", "clock>", '"""'),
]  # fmt: skip
OUTPUTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(string.printable, max_size=3), max_size=14).map("".join)


@given(text=OUTPUTS, cuts=st.lists(st.integers(0, 400), max_size=12))
@settings(max_examples=150, deadline=None)
@example(text='<tool_call>{"name": "clock", "arguments": {"\\"', cuts=list(range(60)))
def test_any_cut_says_the_same(text: str, cuts: list[int]) -> None:
    for name in FORMATS:
        whole, pieces, characters = Answer(), Answer(), Answer()
        whole.add(events(name, [text]))
        for said in events(name, cut(text, cuts)):
            if isinstance(said, Content):
                assert text[said.start :].startswith(said.text)
        pieces.add(events(name, cut(text, cuts)))
        characters.add(events(name, list(text)))
        assert pieces == characters == whole, name
        if not whole.calls:
            assert whole.content == text


OBJECTS: list[object] = [
    {},
    {"x": None, "y": [True, {"z": "}]"}]},
    {"a": 'one " and \\', "b": "\n</tool_call>\u20ac"},
    {"deep": {"deep": {"deep": [[[]]]}}, "n": -1.5e3},
]


@given(
    wanted=st.lists(
        st.tuples(st.sampled_from(["clock", "get_weather"]), st.sampled_from(OBJECTS)), min_size=1, max_size=3
    )
)
@settings(max_examples=60, deadline=None)
def test_what_a_grammar_would_write_is_read_back(wanted: list[tuple[str, object]]) -> None:
    for kind in FORMATS.values():
        spelling = kind.spelling
        if spelling is None:
            continue
        written = spelling.between.join(
            spelling.call.replace("$NAME", name).replace("$INDEX", str(index)).replace("$ARGS", json.dumps(value))
            for index, (name, value) in enumerate(wanted)
        )
        answer = parse(kind.name, spelling.opening + written + spelling.closing)
        assert (answer.content, calls(answer)) == ("", wanted), kind.name


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("Return <tool_call>\\n{\"name\": <function-name>, ...}\\n</tool_call>", "hermes"),
        ("<tool_call>\\n<function=example>\\n<parameter=x>", "qwen3_coder"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral_v11"),
        ('Respond in the format {"name": function name, "parameters": dictionary}. {{- \'"parameters": \' }}', "llama3_json"),
        ("[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]", "pythonic"),
        ("<|tool_call|>[{}]", "granite"),
        (f"{DS[0]} ```json", "deepseek_v3"),
        (DS[0], "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
    ],
)  # fmt: skip
def test_a_template_tells_the_format(template: str, name: str) -> None:
    found = format_for("auto", template)
    assert found is not None
    assert found.name == name
    assert format_for("hermes", template) is FORMATS["hermes"]


def test_an_unknown_format() -> None:
    assert format_for("auto", "{{ tools }}") is None
    assert format_for("auto", None) is None


def test_ids_are_as_templates_want_them() -> None:
    first, second = (FORMATS["mistral"].new_id() for _ in range(2))
    assert first != second
    assert len(first) == 9
    assert first.isalnum()
    assert FORMATS["hermes"].new_id().startswith("call_")
