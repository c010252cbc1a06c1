"""Structured output in the engine: where each output stands in its grammar, and which tokens may be sampled next.

A step's masks are computed by a thread of their own while its forward pass runs: the tokens before the one to be
sampled are known when the step is built. The sampler waits for them after the last layer. Within that thread all
outputs of the step are one call of the library, which goes through them in parallel and without the interpreter lock.

An output's state is made from its tokens alone: a decode worker that gets a prompt's KV, and any worker that runs a
request again, takes the tokens that there are and goes on. A preempted sequence keeps its state, as it keeps its
tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcore.errors import InvalidRequest, ModelError
from pdcore.structured import StructuredOutput
from pdcore.types import SamplingParams

if TYPE_CHECKING:  # the engine works without the library, and then without structured output
    from pdcore.grammar import GrammarCompiler, Matcher

logger = logging.getLogger(__name__)

_EVERY_TOKEN = np.uint32(0xFFFFFFFF)
_REPLAY_SLICE = 64
"""Tokens taken at once on a replay: the interpreter lock is held meanwhile."""


class OutputState:
    """One output on its way through its grammar. Used by one thread at a time.

    Stop tokens are no part of the output: they are allowed where the grammar may end, and where it has the token
    itself. With `min_tokens` the former only once so many tokens are there, unless nothing else may come.

    Attributes:
        complete: nothing may follow; the output ends here without a stop token.
        failure: why it cannot go on; None as long as it can.
    """

    __slots__ = ("_generated", "_matcher", "_min_tokens", "_output", "_stop_tokens", "complete", "failure")

    def __init__(self, matcher: Matcher, output: StructuredOutput, params: SamplingParams) -> None:
        self._matcher = matcher
        self._output = output
        self._stop_tokens = params.stop_token_ids
        self._min_tokens = params.min_tokens
        self._generated = 0
        self.complete = False
        self.failure: InvalidRequest | None = None

    @property
    def matcher(self) -> Matcher:
        return self._matcher

    def take(self, tokens: Sequence[int]) -> bool:
        """Take the tokens that come next; False, with `failure`, if the grammar has no room for them."""
        for start in range(0, len(tokens), _REPLAY_SLICE):
            if not self._matcher.take(tokens[start : start + _REPLAY_SLICE]):
                return self._fail(self._matcher.failure or "has no room for the token that was sampled")
        self._generated += len(tokens)
        self.complete = self._matcher.complete
        return True

    def take_sampled(self, token: int) -> bool:
        """`take` for the token that has been sampled; a stop token ends the output and is not taken."""
        if self.failure is not None:
            return False
        return token in self._stop_tokens or self.take([token])

    def allows(self, token: int) -> bool:
        """Whether `token` may come next, as text or as the end."""
        return self._matcher.allows(token) or (token in self._stop_tokens and self._matcher.may_end)

    def finish_mask(self, row: NDArray[np.uint32]) -> None:
        """Add the stop tokens to the library's mask of this output, which has no end tokens any more."""
        problem = self._matcher.failure
        if problem is not None:
            self._fail(problem)
        elif self._matcher.may_end and (self._generated >= self._min_tokens or not row.any()):
            for token in self._stop_tokens:
                row[token >> 5] |= np.uint32(1 << (token & 31))
        if self.failure is None and not row.any():
            self._fail("allows nothing here that this model's tokens can make")
        if self.failure is not None:
            row[:] = _EVERY_TOKEN  # the engine ends the request, whatever is sampled

    def _fail(self, problem: str) -> bool:
        if self.failure is None:
            self.failure = InvalidRequest(self._output.field, " ".join(problem.split()))
        return False


class StepMasks(NamedTuple):
    """Masks of a step under way.

    Attributes:
        bits: uint32 [M, W]; bit ``t % 32`` of word ``t // 32`` says that token t may be sampled.
        wait: blocks until `bits` is complete.
    """

    bits: NDArray[np.uint32]
    wait: Callable[[], None]


NO_MASKS = StepMasks(np.zeros((0, 0), np.uint32), lambda: None)


class OutputGuards:
    """Makes the states of structured outputs, and the masks of steps. `start` may be called from any thread."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        """`vocab_size`: rows of the model's output; the tokenizer has as many tokens at least."""
        self._compiler = compiler
        tokenizer = compiler.tokenizer
        assert tokenizer.vocab_size >= vocab_size, (tokenizer.vocab_size, vocab_size)
        # What the library's masks are cut to. Whether an end token may come is for `OutputState.finish_mask` to say.
        text = np.arange(32 * compiler.mask_words) < vocab_size
        text[list(tokenizer.eos_tokens)] = False
        self._text_tokens = np.packbits(text, bitorder="little").view(np.uint32)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="masks")

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> OutputGuards | None:
        """For the model of a Hugging Face folder; None, with a line in the log, if its tokenizer cannot be used, or
        the library is not installed."""
        try:
            from pdcore.grammar import GrammarCompiler, load_tokenizer

            tokenizer = load_tokenizer(_tokenizer_json(folder), vocab_size, _end_token(folder))
        except (ImportError, OSError, ValueError, ModelError) as error:
            logger.warning("no structured output: %s", error)
            return None
        return cls(GrammarCompiler(tokenizer), vocab_size)

    def check(self, output: StructuredOutput) -> None:
        """Compile, so that `start` finds it done. Raises InvalidRequest; may take some ten milliseconds."""
        self._compiler.matcher(output)

    def start(self, output: StructuredOutput, params: SamplingParams, generated: Sequence[int]) -> OutputState:
        """The state of an output of which `generated` is there.

        Raises InvalidRequest: the description is wrong, or `generated` does not fit it.
        """
        state = OutputState(self._compiler.matcher(output), output, params)
        if generated and not state.take(generated):
            assert state.failure is not None
            raise InvalidRequest("delivered", f"does not fit {state.failure}")
        if state.complete:
            raise InvalidRequest("delivered", f"completes {output.field}: nothing is left to generate")
        return state

    def masks(self, states: Sequence[OutputState]) -> StepMasks:
        """Begin to compute the masks of these outputs. None of the states may be used before `wait` has returned."""
        bits = np.empty((len(states), len(self._text_tokens)), np.uint32)
        job = self._pool.submit(self._fill, list(states), bits)
        return StepMasks(bits, job.result)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._pool.shutdown(wait=True)

    def _fill(self, states: list[OutputState], bits: NDArray[np.uint32]) -> None:
        self._compiler.fill_rows([state.matcher for state in states], bits.ctypes.data)
        bits &= self._text_tokens
        for state, row in zip(states, bits, strict=True):
            state.finish_mask(row)


def _tokenizer_json(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if path.exists():
        return path.read_text(encoding="utf-8")
    from transformers import AutoTokenizer  # late: only old folders need it

    return str(AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer.to_str())


def _end_token(folder: Path) -> int | None:
    """One of the model's end tokens; which of them a request ends by is the request's business."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    return None
