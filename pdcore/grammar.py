"""Structured outputs compiled to matchers, by llguidance: the one place that knows how the library is told.

A matcher is the state of one output: it says which tokens may follow, and takes the one that does. Compiling needs a
tokenizer, since the vocabulary decides which tokens a grammar allows.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pdcore.errors import InvalidRequest, ModelError
from pdcore.structured import StructuredOutput, StructureKind

if TYPE_CHECKING:  # there only for those who check types
    from llguidance._lib import JsonCompileOptions

CACHED_GRAMMARS = 64
"""Compiled grammars that are kept, the last used ones."""
CACHED_BYTES = 1 << 20
"""Their sources together, in bytes: what a compiled grammar takes goes by its source."""

# What one output may cost, besides time (see `router.grammar_check`). Beyond it a request is refused, or ended if it
# comes to that later. Measured in docs/structured-output.md.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # of compiling
    max_grammar_size=50_000,
    step_lexer_fuel=100_000,  # of one token, as the next two
    step_max_items=10_000,
    max_items_in_row=500,  # for ambiguous grammars, whose cost grows with what has been generated
    max_lexer_states=20_000,  # memory of one output: 1 to 2 KB each
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_JSON_DEFAULTS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"}
"""Bounded white space: a small model goes on with it for ever where it may."""
_MAX_PROBLEM_CHARS = 400


def load_tokenizer(tokenizer_json: str, vocab_size: int, end_token_id: int | None) -> LLTokenizer:
    """The vocabulary of a served model, as the library wants it.

    Args:
        tokenizer_json: content of a ``tokenizer.json``.
        vocab_size: rows of the model's output; the tokenizer may know fewer tokens, or more.
        end_token_id: any of the model's end tokens; None lets the library look for one.

    Raises:
        ModelError: the tokenizer is of a kind that the library cannot take apart into bytes.
    """
    try:
        known = LLTokenizer(tokenizer_json, eos_token=end_token_id)
        if known.vocab_size >= vocab_size:
            return known
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=end_token_id)
    except ValueError as error:
        raise ModelError(f"structured output cannot use this tokenizer: {error}") from error


class Matcher:
    """Where one output stands in its grammar. Used by one thread at a time."""

    __slots__ = ("library",)

    def __init__(self, library: LLMatcher) -> None:
        self.library = library

    def take(self, tokens: Sequence[int]) -> bool:
        """Take the tokens that come next; False, with `failure`, if the grammar has no room for them."""
        return self.library.consume_tokens(list(tokens))

    def allows(self, token: int) -> bool:
        """Whether the grammar has room for `token`; changes nothing."""
        return self.library.validate_tokens([token]) == 1

    @property
    def complete(self) -> bool:
        """Nothing may follow."""
        return self.library.is_stopped() and not self.library.is_error()

    @property
    def may_end(self) -> bool:
        """The output may end here, and may go on."""
        return not self.library.is_stopped() and self.library.is_accepting()

    @property
    def failure(self) -> str | None:
        """Why it cannot go on, other than that it is complete; None if nothing is wrong."""
        if self.library.stop_reason() == "NoExtensionBias":
            return "allows nothing here that this model's tokens can make"
        return _words(self.library.get_error()) if self.library.is_error() else None


class GrammarCompiler:
    """Compiles structured outputs for one tokenizer, and keeps the last ones. Thread-safe; compiling lets the
    interpreter run meanwhile.

    Attributes:
        tokenizer: given to every matcher.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, tuple[Matcher, int]] = OrderedDict()
        self._bytes = 0
        self._executor = LLExecutor()
        self._end_bits = sum(1 << token for token in tokenizer.eos_tokens)

    @property
    def mask_words(self) -> int:
        """32-bit words of a token mask."""
        return -(-self.tokenizer.vocab_size // 32)

    def fill_rows(self, matchers: Sequence[Matcher], address: int) -> None:
        """Write the mask of each matcher, `mask_words` little-endian words, one behind the other from `address` on.

        Runs on all cores that there are, without the interpreter lock. A matcher that is complete or has failed
        gets the mask of the end tokens.
        """
        entries = [(matcher.library, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(entries, address, 4 * self.mask_words, len(entries))

    def matcher(self, output: StructuredOutput) -> Matcher:
        """A new matcher at the beginning of the output.

        Raises:
            InvalidRequest: the description is wrong, unsupported or too costly; it names the field and says why.
        """
        digest = output.digest
        with self._lock:
            found = self._cache.get(digest)
            if found is not None:
                self._cache.move_to_end(digest)
        if found is None:
            found = self._compile(output), sum(map(len, output.sources))
            self._keep(digest, *found)
        return Matcher(found[0].library.deep_copy())

    def _compile(self, output: StructuredOutput) -> Matcher:
        output.check_size()
        matcher = LLMatcher(self.tokenizer, _library_grammar(output), log_level=0, limits=_LIMITS)
        problem = Matcher(matcher).failure
        if problem is not None:
            raise _invalid(output, problem)
        # Nothing but the first mask shows that a grammar allows no output at all.
        first = matcher.deep_copy()
        mask = int.from_bytes(first.compute_bitmask(), "little")
        problem = Matcher(first).failure
        if problem is not None:
            raise _invalid(output, problem)
        if mask & ~self._end_bits == 0:
            raise _invalid(output, "allows nothing but an empty output")
        return Matcher(matcher)

    def _keep(self, digest: bytes, matcher: Matcher, size: int) -> None:
        with self._lock:
            if digest in self._cache:  # compiled twice at once
                return
            self._cache[digest] = matcher, size
            self._bytes += size
            while len(self._cache) > 1 and (len(self._cache) > CACHED_GRAMMARS or self._bytes > CACHED_BYTES):
                _, (_, oldest) = self._cache.popitem(last=False)
                self._bytes -= oldest


def _library_grammar(output: StructuredOutput) -> str:
    """The description in the library's own terms. Raises InvalidRequest for what cannot even be read."""
    match output.kind:
        case StructureKind.JSON_OBJECT:
            return _json_grammar(output, '{"type": "object"}')
        case StructureKind.JSON_SCHEMA:
            return _json_grammar(output, output.sources[0])
        case StructureKind.REGEX:
            return LLMatcher.grammar_from_regex(output.sources[0])
        case StructureKind.CHOICE:
            # One terminal, for it becomes one automaton: as many rules would each be followed on their own.
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(output.sources))
            return f"start: CHOICE\nCHOICE: {choices}\n"
        case StructureKind.GRAMMAR:
            try:
                return any_to_lark(output.sources[0])
            except Exception as error:  # the converter raises bare Exception
                raise _invalid(output, str(error)) from error


def _json_grammar(output: StructuredOutput, schema: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=None if _says_space(schema) else _JSON_DEFAULTS)
    except ValueError as error:
        raise _invalid(output, str(error)) from error


def _says_space(schema: str) -> bool:
    """Whether the schema itself says if there may be white space; a pattern by default would win over that."""
    try:
        options = json.loads(schema)["x-guidance"]
    except (ValueError, TypeError, KeyError, RecursionError):  # what is no schema is for the library to refuse
        return False
    return isinstance(options, dict) and "whitespace_flexible" in options


def _invalid(output: StructuredOutput, problem: str) -> InvalidRequest:
    return InvalidRequest(output.field, _words(problem))


def _words(problem: str) -> str:
    """The library's words, bounded in length. They keep their lines: some point at a place in the one above."""
    lines = problem.replace("<non-verbose/>", "").splitlines()
    words = "\n".join(line.rstrip() for line in lines if line.strip())
    return words if len(words) <= _MAX_PROBLEM_CHARS else f"{words[:_MAX_PROBLEM_CHARS]}..."
