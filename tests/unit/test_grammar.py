"""Grammars and masks: what is compiled, what is refused, and that no mask leads out of its grammar."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.structured import OutputGuards
from pdcore.errors import InvalidRequest
from pdcore.grammar import CACHED_GRAMMARS
from pdcore.structured import StructuredOutput, StructureKind
from pdcore.types import SamplingParams
from tests.support.structures import (
    END,
    EXAMPLES,
    Automaton,
    Node,
    bpe_tokenizer,
    choice,
    compiler_of,
    guards_of,
    piece_tokenizer,
    regex,
    tokens_in,
)

TOKENIZERS = {"byte-level BPE": (bpe_tokenizer, END), "pieces": (piece_tokenizer, "</s>")}


def params(tokenizer: Tokenizer, end: str, **values: object) -> SamplingParams:
    return SamplingParams(max_tokens=1000, stop_token_ids=(tokenizer.token_to_id(end),), **values)  # type: ignore[arg-type]


def walk(
    guards: OutputGuards, output: StructuredOutput, sampling: SamplingParams, choose: random.Random, limit: int = 400
) -> tuple[list[int], bool]:
    """Choose among what the masks allow, the end token if it is there after a while; (tokens, whether it ended)."""
    state = guards.start(output, sampling, ())
    (end,) = sampling.stop_token_ids
    tokens: list[int] = []
    for _ in range(limit):
        masks = guards.masks([state])
        masks.wait()
        assert state.failure is None, state.failure
        allowed = tokens_in(masks.bits[0])
        token = end if end in allowed and (len(tokens) > 20 or choose.random() < 0.5) else choose.choice(allowed)
        assert state.allows(token)
        if token == end:
            return tokens, True
        tokens.append(token)
        assert state.take_sampled(token)
        if state.complete:
            return tokens, True
    return tokens, False


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_the_masks_allow_has_the_form(name: str, kind: str) -> None:
    make, end = TOKENIZERS[kind]
    tokenizer, example = make(), EXAMPLES[name]
    guards = guards_of(tokenizer, end)
    ended = 0
    for seed in range(12):
        tokens, done = walk(guards, example.output, params(tokenizer, end), random.Random(seed))
        if done:
            text = guards._compiler.tokenizer.decode_bytes(tokens).decode()
            assert example.fits(text), text
            ended += 1
    assert ended == 12 if not example.unbounded else ended > 0
    guards.close()


RE_CHARS = 8
"""Python's `re` tries every way to match nested repetitions; beyond so many characters the automaton judges alone."""

# Small alphabets, so that alternatives overlap and tokens of several characters straddle them.
_chars = st.frozensets(st.sampled_from("etoni .-"), min_size=1, max_size=4).map(lambda chars: ("chars", chars))
_nodes = st.recursive(
    _chars,
    lambda inner: st.one_of(
        st.tuples(st.just("cat"), inner, inner),
        st.tuples(st.just("or"), inner, inner),
        st.tuples(st.just("star"), inner),
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(node=_nodes, seed=st.integers(0, 1 << 30))
def test_no_mask_leads_out_of_a_regular_expression(node: Node, seed: int) -> None:
    """Every token of every mask on a random walk, against an automaton; text and end against `re`."""
    tokenizer, automaton = bpe_tokenizer(), Automaton(node)
    end, text_of = tokenizer.token_to_id(END), GUARDS._compiler.tokenizer.decode_str
    pattern = re.compile(automaton.pattern)
    state = GUARDS.start(regex(automaton.pattern), params(tokenizer, END), ())
    choose, text, reached = random.Random(seed), "", automaton.start
    for _ in range(12):
        masks = GUARDS.masks([state])
        masks.wait()
        allowed = tokens_in(masks.bits[0])
        assert state.failure is None, state.failure
        assert (end in allowed) == automaton.matches(reached)
        if len(text) <= RE_CHARS:
            assert (end in allowed) == (pattern.fullmatch(text) is not None)
        texts = {token: text_of([token]) for token in allowed if token != end}
        assert texts or end in allowed
        for following in texts.values():
            assert automaton.after(reached, following), (automaton.pattern, text, following)
        if not texts:
            return
        token = choose.choice(list(texts))
        reached, text = automaton.after(reached, texts[token]), text + texts[token]
        assert state.take_sampled(token)
        if state.complete:
            assert automaton.matches(reached)
            assert not automaton.may_go_on(reached)
            return


GUARDS = guards_of(bpe_tokenizer())


class TestTheEnd:
    """Stop tokens: allowed exactly where the output may end."""

    def allowed(self, output: StructuredOutput, text: str, **values: object) -> tuple[set[str], bool]:
        """(what may follow `text`, whether it may end there)."""
        tokenizer = bpe_tokenizer()
        state = GUARDS.start(output, params(tokenizer, END, **values), tokenizer.encode(text).ids)
        masks = GUARDS.masks([state])
        masks.wait()
        tokens = set(tokens_in(masks.bits[0]))
        end = tokenizer.token_to_id(END)
        return {tokenizer.decode([token]) for token in tokens - {end}}, end in tokens

    def test_only_where_the_grammar_may_end(self) -> None:
        output = regex("ab?c*")
        assert self.allowed(output, "")[1] is False
        assert self.allowed(output, "a")[1] is True
        assert self.allowed(output, "abcc") == ({"c", "cc"} & self.allowed(output, "abcc")[0], True)

    def test_min_tokens_wins_while_something_else_may_come(self) -> None:
        assert self.allowed(regex("a+"), "a", min_tokens=5)[1] is False
        assert self.allowed(regex("a+"), "a", min_tokens=1)[1] is True

    def test_a_stop_token_that_is_text_is_allowed_as_text(self) -> None:
        tokenizer = bpe_tokenizer()
        comma = tokenizer.token_to_id(",")
        sampling = SamplingParams(max_tokens=9, stop_token_ids=(comma,))
        state = GUARDS.start(regex("a,b"), sampling, tokenizer.encode("a").ids)
        masks = GUARDS.masks([state])
        masks.wait()
        assert comma in tokens_in(masks.bits[0])
        assert state.take_sampled(comma)
        assert not state.complete

    def test_complete_as_soon_as_nothing_may_follow(self) -> None:
        tokenizer = bpe_tokenizer()
        state = GUARDS.start(choice("no", "nobody"), params(tokenizer, END), ())
        (token,) = tokenizer.encode("no").ids
        assert state.take_sampled(token)
        assert not state.complete
        for token in tokenizer.encode("body").ids:
            assert state.take_sampled(token)
        assert state.complete

    def test_a_token_that_the_grammar_has_no_room_for_is_a_failure(self) -> None:
        tokenizer = bpe_tokenizer()
        state = GUARDS.start(regex("[0-9]+"), params(tokenizer, END), ())
        assert not state.allows(tokenizer.token_to_id("x"))
        assert state.failure is None, "asking changes nothing"
        assert not state.take_sampled(tokenizer.token_to_id("x"))
        assert state.failure is not None
        assert state.failure.field == "sampling.structured_output.regex"

    def test_what_no_token_can_say_is_a_failure_in_time(self) -> None:
        """A model whose output is narrower than its tokenizer's vocabulary: `b` cannot be said."""
        tokenizer = bpe_tokenizer()
        limit = tokenizer.token_to_id("b")
        guards = guards_of(tokenizer, vocab_size=limit)
        state = guards.start(regex("ab"), SamplingParams(9), ())
        assert state.take_sampled(tokenizer.token_to_id("a"))
        masks = guards.masks([state])
        masks.wait()
        assert state.failure is not None
        assert masks.bits.all(), "the sampler needs something to choose from"
        guards.close()


class TestReplay:
    @pytest.mark.parametrize("name", EXAMPLES)
    def test_a_state_made_from_tokens_is_the_state_that_took_them(self, name: str) -> None:
        tokenizer, output = bpe_tokenizer(), EXAMPLES[name].output
        sampling = params(tokenizer, END)
        tokens, _ = walk(GUARDS, output, sampling, random.Random(5), limit=60)
        state = GUARDS.start(output, sampling, ())
        for count, token in enumerate(tokens):
            other = GUARDS.start(output, sampling, tokens[:count])
            masks = GUARDS.masks([state, other])
            masks.wait()
            assert (masks.bits[0] == masks.bits[1]).all()
            assert state.take_sampled(token)

    def test_tokens_that_do_not_fit_are_refused(self) -> None:
        tokenizer = bpe_tokenizer()
        with pytest.raises(InvalidRequest, match=r"delivered: does not fit sampling\.structured_output\.regex"):
            GUARDS.start(regex("[0-9]+"), params(tokenizer, END), tokenizer.encode("1x").ids)
        with pytest.raises(InvalidRequest, match="nothing is left to generate"):
            GUARDS.start(choice("yes"), params(tokenizer, END), tokenizer.encode("yes").ids)


def grammar(text: str) -> StructuredOutput:
    return StructuredOutput(StructureKind.GRAMMAR, (text,))


def schema(value: object) -> StructuredOutput:
    return StructuredOutput(StructureKind.JSON_SCHEMA, (value if isinstance(value, str) else json.dumps(value),))


BAD = {
    "no json": (schema("{"), "json_schema", "EOF|expected|parse"),
    "no schema": (schema({"type": "thing"}), "json_schema", "thing"),
    "remote reference": (schema({"$ref": "https://example.com/a.json"}), "json_schema", "example.com|ref"),
    "unsupported": (schema({"type": "object", "if": {}, "then": {}}), "json_schema", "if"),
    "impossible schema": (schema({"allOf": [{"type": "string"}, {"type": "number"}]}), "json_schema", "."),
    "empty schema": (schema(" "), "json_schema", "must not be empty"),
    "open bracket": (regex("(a"), "regex", "unclosed|group"),
    "look-ahead": (regex("(?=a)b"), "regex", "look"),
    "back reference": (regex(r"(a)\1"), "regex", "."),
    "empty regex": (regex(""), "regex", "must not be empty"),
    "empty output": (regex("()"), "regex", "empty output"),
    "long regex": (regex("a" * 8193), "regex", "at most 8192 bytes, got 8193"),
    "no choices": (choice(), "choice", "1 to 4096 strings, got 0"),
    "many choices": (choice(*map(str, range(4097))), "choice", "got 4097"),
    "empty choice": (choice("a", ""), r"choice[1]", "must not be empty"),
    "long choice": (choice("x" * 65537), "choice", "at most 65536 bytes"),
    "no start": (grammar('a: "x"'), "grammar", "."),
    "unknown rule": (grammar("start: a b\na: /x/"), "grammar", "b"),
    "unknown gbnf rule": (grammar('root ::= "a" other'), "grammar", "'other' not found"),
    "endless grammar": (grammar('start: start "a"'), "grammar", "."),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_ones_are_refused_and_the_field_is_named(name: str) -> None:
    output, field, problem = BAD[name]
    with pytest.raises(InvalidRequest, match=f"(?i){problem}") as caught:
        GUARDS.check(output)
    assert caught.value.field == f"sampling.structured_output.{field}"
    assert len(caught.value.problem) < 500


def test_what_points_at_a_place_keeps_its_lines() -> None:
    with pytest.raises(InvalidRequest) as caught:
        GUARDS.check(regex("(a"))
    lines = caught.value.problem.splitlines()
    pointed = next(number for number, line in enumerate(lines) if line.strip() == "^")
    assert lines[pointed - 1][lines[pointed].index("^")] == "(", lines


def test_compiled_grammars_are_kept_and_bounded() -> None:
    compiler = compiler_of(bpe_tokenizer())
    compiler.matcher(regex("first"))
    kept = compiler._cache[regex("first").digest]
    compiler.matcher(regex("first"))
    assert compiler._cache[regex("first").digest] is kept
    for index in range(CACHED_GRAMMARS):
        compiler.matcher(regex(f"other-{index}"))
    assert len(compiler._cache) == CACHED_GRAMMARS
    assert regex("first").digest not in compiler._cache
    for index in range(40):
        compiler.matcher(choice(f"{index}", "x" * 60_000))
    assert compiler._bytes == sum(size for _, size in compiler._cache.values()) <= 1 << 20


def test_matchers_of_one_grammar_know_nothing_of_each_other() -> None:
    tokenizer, sampling = bpe_tokenizer(), params(bpe_tokenizer(), END)
    one, other = (GUARDS.start(choice("yes", "no"), sampling, ()) for _ in range(2))
    (yes,), (no,) = tokenizer.encode("yes").ids[:1], tokenizer.encode("no").ids[:1]
    assert one.take_sampled(yes)
    assert other.allows(no)


def test_many_outputs_of_one_step_get_each_their_own_mask() -> None:
    tokenizer, sampling = bpe_tokenizer(), params(bpe_tokenizer(), END)
    outputs = [regex(f"{letter}x+") for letter in "abcdefgh"]
    states = [GUARDS.start(output, sampling, ()) for output in outputs]
    masks = GUARDS.masks(states)
    masks.wait()
    for letter, row in zip("abcdefgh", masks.bits, strict=True):
        assert {tokenizer.decode([token])[0] for token in tokens_in(row)} == {letter}
    assert masks.bits.dtype == np.uint32
