"""Structured outputs of every kind with what they allow, tokenizers for them, and an oracle for regexes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.structured import OutputGuards
from pdcore.grammar import GrammarCompiler, load_tokenizer
from pdcore.structured import StructuredOutput, StructureKind

END = "<|end|>"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
        "seen": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "tags", "seen"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PATTERN = r"(red|green|blue)-[0-9]{2,4}( [a-f]+){1,2}"
CHOICES = ("yes", "no", "not sure", "nobody knows")
LARK = """
start: sum
sum: term (OPERATOR term){1,2}
term: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,2}/
OPERATOR: "+" | "-"
"""
GBNF = """
root ::= greeting (", " name){1,2} "."
greeting ::= "hello" | "good day"
name ::= [A-C] [a-c]{1,3}
"""


@dataclass(frozen=True)
class Example:
    """A structured output, and whether a text has its form. `unbounded`: its texts may be of any length."""

    output: StructuredOutput
    fits: Callable[[str], bool]
    unbounded: bool = False


def _fits_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def _fits_sum(text: str) -> bool:
    assert re.fullmatch(r"[0-9+()-]+", text)
    eval(text)  # what it may be has just been said
    return "+" in text or "-" in text


EXAMPLES = {
    "json schema": Example(StructuredOutput(StructureKind.JSON_SCHEMA, (json.dumps(SCHEMA),)), _fits_schema),
    "json object": Example(
        StructuredOutput(StructureKind.JSON_OBJECT), lambda text: isinstance(json.loads(text), dict), unbounded=True
    ),
    "regex": Example(
        StructuredOutput(StructureKind.REGEX, (PATTERN,)),
        lambda text: re.fullmatch(PATTERN, text) is not None,
        unbounded=True,
    ),
    "choice": Example(StructuredOutput(StructureKind.CHOICE, CHOICES), CHOICES.__contains__),
    "lark": Example(StructuredOutput(StructureKind.GRAMMAR, (LARK,)), _fits_sum, unbounded=True),
    "gbnf": Example(
        StructuredOutput(StructureKind.GRAMMAR, (GBNF,)),
        lambda text: re.fullmatch(r"(hello|good day)(, [A-C][a-c]{1,3}){1,2}\.", text) is not None,
    ),
}


def regex(pattern: str) -> StructuredOutput:
    return StructuredOutput(StructureKind.REGEX, (pattern,))


def choice(*choices: str) -> StructuredOutput:
    return StructuredOutput(StructureKind.CHOICE, choices)


@cache
def bpe_tokenizer(vocab_size: int = 1000) -> Tokenizer:
    """Byte-level BPE with merges, trained on texts of this repository; the last id is `END`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    root = Path(__file__).parents[2]
    tokenizer.train([str(root / "docs" / "architecture.md"), str(root / "protos" / "generation.proto")], trainer)
    tokenizer.add_special_tokens([END])
    return tokenizer


@cache
def piece_tokenizer() -> Tokenizer:
    """Of the kind that SentencePiece makes: a mark for spaces, and single bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ("red", "green", "blue", "hello", "good", "day", "yes", "no", "not", "sure", "true", "false", "null")
    pieces += ["▁", *(chr(code) for code in range(33, 127)), *words, *(f"▁{word}" for word in words)]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(index)) for index, piece in enumerate(pieces)], 0, True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def compiler_of(tokenizer: Tokenizer, end: str = END, vocab_size: int | None = None) -> GrammarCompiler:
    size = vocab_size or tokenizer.get_vocab_size()
    return GrammarCompiler(load_tokenizer(tokenizer.to_str(), size, tokenizer.token_to_id(end)))


def guards_of(tokenizer: Tokenizer, end: str = END, vocab_size: int | None = None) -> OutputGuards:
    return OutputGuards(compiler_of(tokenizer, end, vocab_size), vocab_size or tokenizer.get_vocab_size())


def tokens_in(row: np.ndarray) -> list[int]:
    """Ids of the tokens that a row of a mask allows."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


# -- an oracle: regular expressions as automata ------------------------------------------------------------------

Node = tuple  # ("chars", frozenset of characters) | ("cat", a, b) | ("or", a, b) | ("star", a)


class Automaton:
    """Glushkov's: a state for every place of a character in the expression, and one before them all. Every state can
    still come to a match, so that a text can be continued to one exactly if it leads to any state.

    Attributes:
        start: states before the first character. pattern: the expression as Python writes it.
    """

    def __init__(self, node: Node) -> None:
        self._characters: list[frozenset[str]] = [frozenset()]
        self._follow: list[set[int]] = [set()]
        empty, first, last = self._add(node)
        self._follow[0] |= first
        self._last = last | ({0} if empty else set())
        self.start = frozenset({0})
        self.pattern = _pattern(node)

    def after(self, states: frozenset[int], text: str) -> frozenset[int]:
        for character in text:
            following = set().union(*(self._follow[state] for state in states))
            states = frozenset(state for state in following if character in self._characters[state])
        return states

    def matches(self, states: frozenset[int]) -> bool:
        return not self._last.isdisjoint(states)

    def may_go_on(self, states: frozenset[int]) -> bool:
        return any(self._follow[state] for state in states)

    def _add(self, node: Node) -> tuple[bool, set[int], set[int]]:
        """(whether it matches the empty text, states of its first characters, of its last ones)."""
        match node:
            case ("chars", allowed):
                self._characters.append(allowed)
                self._follow.append(set())
                place = {len(self._follow) - 1}
                return False, place, place
            case ("star", inner):
                _, first, last = self._add(inner)
                self._join(last, first)
                return True, first, last
            case ("or", left, right):
                (empty, first, last), (other_empty, other_first, other_last) = self._add(left), self._add(right)
                return empty or other_empty, first | other_first, last | other_last
            case (_, left, right):
                (empty, first, last), (other_empty, other_first, other_last) = self._add(left), self._add(right)
                self._join(last, other_first)
                return (
                    empty and other_empty,
                    first | other_first if empty else first,
                    last | other_last if other_empty else other_last,
                )
        raise AssertionError(node)

    def _join(self, last: set[int], first: set[int]) -> None:
        for state in last:
            self._follow[state] |= first


def _pattern(node: Node) -> str:
    match node:
        case ("chars", allowed):
            return "[" + "".join(re.escape(character) for character in sorted(allowed)) + "]"
        case ("star", inner):
            return f"(?:{_pattern(inner)})*"
        case ("or", left, right):
            return f"(?:{_pattern(left)}|{_pattern(right)})"
        case (_, left, right):
            return _pattern(left) + _pattern(right)
    raise AssertionError(node)
