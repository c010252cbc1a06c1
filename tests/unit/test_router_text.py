"""Incremental text and stop strings, against decoding everything at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pdcore.errors import ConfigError, InvalidRequest, ModelError
from router.chat_template import Arguments, ChatTemplate, Conversation
from router.text import StopMatcher, StopWords, TextStream, WindowDetokenizer
from router.tokenizer import GenerationDefaults, Special, TextModel
from router.tools.formats import format_for
from tests.support.tiny_model import BOS, CHAT_TEMPLATE, tiny_llama
from tests.support.tool_model import tool_llama

TEXTS = st.text(st.sampled_from("ab é日😀\n\u0301"), max_size=30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def sentencepiece_like() -> Tokenizer:
    """Characters as tokens, a mark for spaces, bytes for everything else: the other common kind of tokenizer."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for token in "▁ab":
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """Pieces of words with a mark for spaces, and nothing for bytes."""
    vocab = {"<unk>": 0} | {token: index for index, token in enumerate(["▁", "a", "b", "▁a", "ab", "▁ab"], start=1)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def run(stream: TextStream, token_ids: list[int]) -> list[str]:
    return [stream.push(token_id) for token_id in token_ids] + [stream.finish()]


@given(st.lists(st.integers(0, 511), max_size=60))
@settings(deadline=None)
def test_byte_level_text_equals_decoding_at_once(model: TextModel, token_ids: list[int]) -> None:
    assert "".join(run(model.stream(), token_ids)) == model._decode(token_ids)


@given(TEXTS)
@settings(deadline=None)
def test_no_piece_has_half_a_character(model: TextModel, text: str) -> None:
    pieces = run(model.stream(), model._tokenizer.encode(text).ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 511), max_size=120))
@settings(deadline=None)
def test_the_window_agrees_on_byte_level_tokens(model: TextModel, token_ids: list[int]) -> None:
    """Valid text is exact; of invalid bytes the window may show another number of replacement characters."""
    detokenizer = WindowDetokenizer(model._decode)
    text = "".join(detokenizer.push(token_id) for token_id in token_ids) + detokenizer.flush()
    assert text.replace("\ufffd", "") == model._decode(token_ids).replace("\ufffd", "")


@given(st.lists(TEXTS, max_size=6).map("".join))
@settings(deadline=None)
def test_byte_fallback_text_equals_decoding_at_once(sentencepiece_like: Tokenizer, text: str) -> None:
    model = TextModel(sentencepiece_like, None, (), GenerationDefaults())
    token_ids = sentencepiece_like.encode(text).ids
    pieces = run(model.stream(), token_ids)
    assert "".join(pieces) == sentencepiece_like.decode(token_ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.text("ab ", max_size=60))
@settings(deadline=None)
def test_the_window_agrees_on_other_tokenizers(words: Tokenizer, text: str) -> None:
    model = TextModel(words, None, (), GenerationDefaults())
    assert isinstance(model.detokenizer(), WindowDetokenizer)
    token_ids = words.encode(text).ids
    assert "".join(run(model.stream(), token_ids)) == words.decode(token_ids)


def test_the_window_stays_small_whatever_comes(model: TextModel) -> None:
    """Cost per token is bounded, for text and for bytes that never become a character."""
    for token_id in (model._tokenizer.token_to_id("a"), 200):
        longest = 0

        def decode(ids: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return model._decode(ids)

        detokenizer = WindowDetokenizer(decode)
        for _ in range(500):
            detokenizer.push(token_id)
        assert longest <= 2 * WindowDetokenizer.MAX_WINDOW + 1


def test_special_tokens_have_no_text(model: TextModel) -> None:
    a = model._tokenizer.token_to_id("a")
    assert "".join(run(model.stream(), [256, a, 257, a])) == "aa"


def naive_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first stop string to be complete, of several the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.text("abc", max_size=40),
    st.lists(st.integers(1, 5), max_size=40),
)
def test_stop_strings_equal_the_naive_search_however_the_text_is_cut(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    expected, stopped = naive_stop(text, stops)
    matcher = StopMatcher(StopWords(stops))
    shown, rest, matched = "", text, False
    while rest and not matched:
        size = cuts.pop() if cuts else 1
        piece, rest = rest[:size], rest[size:]
        scan = matcher.feed(piece)
        shown, matched = shown + scan.text, scan.matched
        # Never shown and then taken back, and never held back without need.
        assert expected.startswith(shown)
        if not matched:
            seen = text[: len(text) - len(rest)]
            held = seen[len(shown) :]
            assert held == "" or any(stop.startswith(held) for stop in stops)
    assert matched == stopped
    assert shown + ("" if matched else matcher.flush()) == expected


class Pieces:
    """A detokeniser whose tokens are pieces of a text."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return ""


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("abcc", max_size=5), max_size=12),
)
def test_pieces_without_the_beginning_of_a_stop_string_are_no_exception(stops: list[str], pieces: list[str]) -> None:
    expected, stopped = naive_stop("".join(pieces), stops)
    stream = TextStream(Pieces(pieces), StopWords(stops))
    shown = ""
    for token_id in range(len(pieces)):
        shown += stream.push(token_id)
        if stream.stopped:
            break
    assert stream.stopped == stopped
    assert shown + stream.finish() == expected


def test_a_stop_string_over_several_tokens(model: TextModel) -> None:
    stream = model.stream(("END",))
    ids = model._tokenizer.encode("say EN EENDx").ids
    pieces = []
    for token_id in ids:
        pieces.append(stream.push(token_id))
        if stream.stopped:
            break
    assert "".join(pieces) == "say EN E"
    assert pieces[4:7] == ["", "", "EN "]  # E and N wait until the space decides
    assert stream.finish() == ""


def test_what_was_held_back_is_shown_at_the_end(model: TextModel) -> None:
    assert run(model.stream(("xyz",)), model._tokenizer.encode("axy").ids) == ["a", "", "", "xy"]


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.text("abc", max_size=40),
    st.lists(st.integers(1, 5), max_size=40),
)
def test_an_included_stop_string_is_the_end_and_nothing_waits(stops: list[str], text: str, cuts: list[int]) -> None:
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text[: ends[0]] if ends else text
    matcher = StopMatcher(StopWords(stops), inclusive=True)
    shown, rest, matched = "", text, False
    while rest and not matched:
        size = cuts.pop() if cuts else 1
        piece, rest = rest[:size], rest[size:]
        scan = matcher.feed(piece)
        shown, matched = shown + scan.text, scan.matched
        assert matched or len(shown) == len(text) - len(rest)
    assert (shown, matched) == (expected, bool(ends))


def test_stop_strings_wait_for_the_least_number_of_tokens(model: TextModel) -> None:
    ids = model._tokenizer.encode("abXcdXe").ids
    stream = model.stream(("bX", "X"), min_tokens=3)
    shown = []
    for token_id in ids:
        shown.append(stream.push(token_id))
        if stream.stopped:
            break
    assert "".join(shown) == "abXcd"
    assert len(shown) == 6


def test_a_stop_tokens_text_is_shown_if_asked_for(model: TextModel) -> None:
    a = model._tokenizer.encode("a").ids[0]
    for include, skip, expected in ((False, False, "a"), (True, True, "a"), (True, False, "a<|eos|>")):
        stream = model.stream(include_stop=include, special=Special.HIDDEN if skip else Special.SHOWN)
        assert stream.push(a) + stream.push(257, hidden=True) + stream.finish() == expected
    assert (lambda s: s.push(a) + s.push(a, hidden=True))(model.stream(include_stop=True)) == "aa"


def test_special_tokens_are_shown_if_asked_for(
    model: TextModel, sentencepiece_like: Tokenizer, words: Tokenizer
) -> None:
    a = model._tokenizer.encode("a").ids[0]
    assert "".join(run(model.stream(special=Special.SHOWN), [256, a, 257, a])) == "<|bos|>a<|eos|>a"
    assert "".join(run(model.stream(), [256, a, 257, a])) == "aa"  # asked one way, then the other
    for plain in (sentencepiece_like, words):
        tokenizer = Tokenizer.from_str(plain.to_str())
        tokenizer.add_special_tokens(["<s>"])
        special = tokenizer.token_to_id("<s>")
        other = TextModel(tokenizer, None, (), GenerationDefaults())
        ids = [special, *tokenizer.encode("ab ab").ids, special]
        assert "".join(run(other.stream(special=Special.SHOWN), ids)) == tokenizer.decode(
            ids, skip_special_tokens=False
        )
        assert "".join(run(other.stream(), ids)) == tokenizer.decode(ids)


def test_marks_of_tool_calls_are_shown_though_special(tmp_path: Path, words: Tokenizer) -> None:
    model = TextModel.load(tool_llama(tmp_path))
    ids = [256, *model._tokenizer.encode("a<tool_call>{é}</tool_call>").ids, 257]
    assert {510, 511} < set(ids)
    assert "".join(run(model.stream(special=Special.TOOLS), ids)) == "a<tool_call>{é}</tool_call>"
    assert "".join(run(model.stream(), ids)) == "a{é}"
    tokenizer = Tokenizer.from_str(words.to_str())
    tokenizer.add_special_tokens(["<s>", "<tool_call>"])
    other = TextModel(tokenizer, None, (), GenerationDefaults(), format_for("hermes", None))
    ids = tokenizer.encode("<s>ab<tool_call>ab<s>").ids
    assert "".join(run(other.stream(special=Special.TOOLS), ids)).replace(" ", "") == "ab<tool_call>ab"
    assert "".join(run(other.stream(), ids)) == tokenizer.decode(ids)


def test_an_unfinished_character_is_shown_at_the_end(model: TextModel) -> None:
    ids = model._tokenizer.encode("é").ids[:1]
    assert run(model.stream(), ids) == ["", "\ufffd"]


def test_a_stop_string_that_the_end_completes(model: TextModel) -> None:
    stream = model.stream(("a\ufffd",))
    ids = model._tokenizer.encode("baé").ids[:-1]
    assert "".join(run(stream, ids)) == "b"
    assert stream.stopped


# -- models and templates -------------------------------------------------------------------------------------------

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRICKY = (
    "{{ bos_token }}\n  {%- set ns = namespace(n=0) %}\n{%- for m in messages %}\n"
    "  {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
    "  {%- set ns.n = ns.n + 1 %}\n"
    "{{ m.content | trim | tojson }}{% generation %}{{ m['role'] | upper }}{% endgeneration %}\n"
    "{%- endfor %}{{ ns.n }}"
)


@pytest.mark.parametrize("source", [CHATML, TRICKY])
def test_templates_render_as_transformers_does(source: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tiny_llama(tmp_path)
    (folder / "chat_template.jinja").write_text(source)
    reference = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": ' <b>"hi"</b> é\n'},
        {"role": "assistant", "content": "yes"},
    ]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (
        ChatTemplate(source, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}).render(Conversation(tuple(messages)))
        == expected
    )


async def test_tokenizes_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tiny_llama(tmp_path)
    reference = AutoTokenizer.from_pretrained(folder)
    model = TextModel.load(folder)
    messages = [{"role": "user", "content": "hé 日本"}]
    assert await model.tokenize("hé <|eos|> 日本", 64) == reference("hé <|eos|> 日本")["input_ids"]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert await model.tokenize_chat(Conversation(tuple(messages)), 64) == expected
    assert model.end_token_ids == (257,)


async def test_half_a_character_in_a_chat_is_the_client_s_mistake(tmp_path: Path) -> None:
    """JSON in a chat (arguments of calls, schemas of tools) can spell it, and no tokenizer takes it."""
    model = TextModel.load(tiny_llama(tmp_path))
    half = json.loads('"\\ud800"')
    with pytest.raises(InvalidRequest, match="chat: must not have halves of characters"):
        await model.tokenize_chat(Conversation(({"role": "user", "content": half},)), 64)


TOOL = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}


def test_tools_and_their_calls_render_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tool_llama(tmp_path)
    reference = AutoTokenizer.from_pretrained(folder)
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": Arguments({"x": "é", "y": [1]})}}
    messages = (
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "c"},
    )
    template = ChatTemplate((folder / "chat_template.jinja").read_text(), {})
    for thinking in ({}, {"enable_thinking": False}):
        expected = reference.apply_chat_template(
            list(messages), tools=[TOOL], tokenize=False, add_generation_prompt=True, **thinking
        )
        assert template.render(Conversation(messages, (TOOL,), thinking)) == expected
    assert '{"name": "f", "arguments": {"x": "é", "y": [1]}}' in expected
    assert expected.endswith("<assistant>!")


def test_arguments_are_an_object_or_json_text() -> None:
    messages = ({"role": "assistant", "content": None, "arguments": Arguments({"x": "é"})},)
    text = """{% set a = messages[0].arguments %}{{ a | tojson }} {{ a }} {{ "x" + a + "y" }} {{ a ~ "" }} {{ a.x }}
{%- for key, value in a | items %} {{ key }}={{ value }}{% endfor %}"""
    json_text = '{"x": "é"}'
    expected = f"{json_text} {json_text} x{json_text}y {json_text} é x=é"
    assert ChatTemplate(text, {}).render(Conversation(messages)) == expected


def test_a_final_message_is_continued() -> None:
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b a "})
    assert (
        ChatTemplate(CHAT_TEMPLATE, {}).render(Conversation(messages, continue_final=True))
        == "<user>a\n<assistant>b a "
    )
    for source in ("{{ messages[0].content }}", "{{ messages[1].content }}{{ messages[1].content }}"):
        with pytest.raises(InvalidRequest, match="does not end with the last message") as caught:
            ChatTemplate(source, {}).render(Conversation(messages, continue_final=True))
        assert caught.value.field == "chat.continue_final_message"


def test_what_templates_look_at() -> None:
    plain, tools = ChatTemplate(CHATML, {}), ChatTemplate("{% if x %}{% set tools = y %}{% endif %}{{ tools }}", {})
    assert (plain.uses_tools, tools.uses_tools) == (False, True)
    assert not ChatTemplate("{% set tools = [] %}tools", {}).uses_tools
    assert ChatTemplate("{{ message['content'] is none }}", {}).wants_none
    assert not plain.wants_none
    assert ChatTemplate("{{ role == 'developer' }}", {}).knows_developers


def test_a_template_that_refuses() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render(Conversation(({"role": "user", "content": "x"},)))


def test_a_template_cannot_reach_out() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(InvalidRequest):
        template.render(Conversation(({"role": "user", "content": "x"},)))


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        TextModel.load(tmp_path)


def test_generation_defaults(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [257, 5, 257], "temperature": 0.6, "top_p": 0.9, "top_k": -3, "max_new_tokens": 99}'
    )
    model = TextModel.load(folder)
    assert model.end_token_ids == (257, 5)
    assert (model.defaults.temperature, model.defaults.top_p, model.defaults.max_tokens) == (0.6, 0.9, 99)
    assert model.defaults.top_k is None  # not usable
    assert model.defaults.repetition_penalty is None
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    model = TextModel.load(folder)
    assert model.defaults.temperature == 0.0
    assert model.end_token_ids == (257,)  # from config.json


def test_generation_settings_that_are_not_honoured_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_llama(tmp_path)
    (folder / "generation_config.json").write_text('{"typical_p": 1.0, "num_beams": 1, "min_new_tokens": null}')
    TextModel.load(folder).close()
    assert not caplog.records
    (folder / "generation_config.json").write_text('{"typical_p": 0.9, "suppress_tokens": [3], "num_beams": 1}')
    TextModel.load(folder).close()
    assert "suppress_tokens, typical_p is not supported; ignored" in caplog.text


def test_a_template_of_the_configuration(tmp_path: Path) -> None:
    folder, file = tiny_llama(tmp_path / "tiny"), tmp_path / "other.jinja"
    file.write_text("{{ bos_token }}{{ tools }}!")
    for source in (str(file), file.read_text()):
        template = TextModel.load(folder, chat_template=source).chat_template
        assert template is not None
        assert template.render(Conversation(messages=())) == f"{BOS}None!"
        assert template.uses_tools
    (tmp_path / "long.jinja").write_bytes(b"x" * (1 << 20) + b"x")
    (tmp_path / "latin.jinja").write_bytes(b"\xe4")
    for source, words in (
        (
            str(tmp_path / "none.jinja"),
            "none.jinja' is not allowed; allowed: a file with a Jinja template.*No such file",
        ),
        (str(tmp_path), "Is a directory"),
        (str(tmp_path / "long.jinja"), "more than 1048576 bytes"),
        (str(tmp_path / "latin.jinja"), "not UTF-8"),
        ("{% for message in messages %}" + "x" * 99, "that compiles .*endfor"),
    ):
        with pytest.raises(ConfigError, match=words) as refusal:
            TextModel.load(folder, chat_template=source)
        assert refusal.value.key == "router.chat_template"
        assert "x" * 99 not in str(refusal.value)


def test_templates_by_name(tmp_path: Path) -> None:
    """Some tokenizers have several; the one called ``default`` is for chats. Without it there is none."""
    folder = tiny_llama(tmp_path)
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for name, has_template in (("default", True), ("rag", False)):
        path.write_text(json.dumps({**config, "chat_template": [{"name": name, "template": "x"}]}))
        assert TextModel.load(folder).has_chat_template is has_template
