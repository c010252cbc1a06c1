"""What a step of the engine hands to the worker: the plan before the forward pass, the news after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.sequence import Sequence
from engine.step import StepInput
from pdcore.errors import PdserveError
from pdcore.logprobs import Logprobs
from pdcore.types import FinishReason, RequestKey


class Chunk(NamedTuple):
    """Tokens [token_start, token_end) of a sequence, computed by one step.

    `is_prompt`: they are tokens that the request came with (prompt or delivered), whose KV a decode worker wants.
    `block_ids`: the whole block table.
    """

    key: RequestKey
    token_start: int
    token_end: int
    is_prompt: bool
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step that is decided and not yet applied. Without chunks it only carries news; nothing is computed."""

    step_id: int
    step_input: StepInput
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class TokenOut:
    """A token to report, of the request or sample `key`. `index` counts generated tokens, delivered ones included;
    `finish` is set on the last. `logprobs`: of this token, if they were asked for and it was sampled here."""

    key: RequestKey
    index: int
    token_id: int
    finish: FinishReason | None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens, which one step has computed."""

    key: RequestKey
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class PrefillStats:
    """A sequence whose prompt was computed here and that has its first new token.

    Attributes:
        key: who it is.
        queued_s: seconds from `add` to its first step. compute_s: from there to the token.
        chunks: steps that it took.
        cached_tokens: prompt tokens that the prefix cache had, so that they were not computed.
    """

    key: RequestKey
    queued_s: float
    compute_s: float
    chunks: int
    cached_tokens: int

    @classmethod
    def of(cls, sequence: Sequence, now: float) -> PrefillStats:
        """Of a sequence that gets its first new token now."""
        queued_s, compute_s = sequence.started_at - sequence.queued_at, now - sequence.started_at
        return cls(sequence.key, queued_s, compute_s, sequence.chunks, sequence.cached_tokens)


@dataclass(frozen=True, slots=True)
class StepResult:
    """News of one step: tokens in the order in which they are to be reported, sequences that ended by an error (the
    engine holds nothing of them but what a send session still owns), prompts that are done, and log-probabilities of
    prompt tokens, which are to be reported before the tokens. `forked`: trunks that have become their branches (see
    `RequestSpec`), whose first tokens are among `tokens`; nothing follows of a trunk but the end of its send."""

    step_id: int
    tokens: tuple[TokenOut, ...]
    rejected: tuple[tuple[RequestKey, PdserveError], ...]
    prefilled: tuple[PrefillStats, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    forked: tuple[RequestKey, ...] = ()
