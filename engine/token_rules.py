"""What a request's parameters, and its tokens so far, do to the logits of its next token. Pure.

Each sequence keeps flat arrays that change by one entry with each token; a step joins those of its samples into one
set of (row, token) pairs, which the sampler applies at once. All of it follows from parameters and tokens alone, so a
sequence that is preempted, replayed or moved to another worker has the same rules when it is built again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdcore.types import SamplingParams

_ANY = -1  # in a bad word's prefix: whatever stands there
_NOTHING = -2  # in a tail: before the first token


class Pairs(NamedTuple):
    """Pairs (index into the R samples of a step, token), each once: two int32 arrays of one length."""

    rows: NDArray[np.int32]
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Changes to the logits of the R samples of a step, in the order of the fields.

    Attributes:
        biased: pairs to whose logits `bias`, float32 [len(biased)], is added.
        seen: pairs that penalties concern. `seen_counts`: int32 [len(seen)], how often each was generated; 0 if it
            stands in the prompt only.
        repetition, frequency, presence: float32 [R], of each row; 1, 0, 0 where they are off.
        allowed: in a row that occurs here only these tokens may be sampled.
        banned: pairs that may not be sampled.
    """

    biased: Pairs
    bias: NDArray[np.float32]
    seen: Pairs
    seen_counts: NDArray[np.int32]
    repetition: NDArray[np.float32]
    frequency: NDArray[np.float32]
    presence: NDArray[np.float32]
    allowed: Pairs
    banned: Pairs


class TokenCounts:
    """The distinct tokens of a sequence and how often each was generated: ``[:size]`` of the two arrays.

    ::

        tokens  |  7 | 12 | 40 |  3 | unused
        counts  |  0 |  2 |  0 |  1 | unused      0: in the prompt only
    """

    __slots__ = ("_places", "counts", "size", "tokens")

    def __init__(self, prompt: NDArray[np.int64], output: NDArray[np.int64], capacity: int) -> None:
        """`prompt` tokens count as seen, `output` tokens as generated; room for `capacity` distinct ones in all."""
        distinct, places = np.unique(np.concatenate((prompt, output)), return_inverse=True)
        self.size = len(distinct)
        self.tokens: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.tokens[: self.size] = distinct
        self.counts: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.counts[: self.size] = np.bincount(places[len(prompt) :], minlength=self.size)
        self._places = dict(zip(distinct.tolist(), range(self.size), strict=True))

    def add(self, token: int) -> None:
        """`token` was generated."""
        place = self._places.setdefault(token, self.size)
        if place == self.size:
            self.tokens[place] = token
            self.size += 1
        self.counts[place] += 1


class BadWords:
    """Token sequences that must not be completed.

    Prefixes stand right-aligned in one array, so that one comparison with the last tokens finds all that match::

        words (5) (8 9) (1 2 3)         prefixes  any any         last 5
                                                  any   8              9
                                                    1   2              3
    """

    __slots__ = ("_last", "_prefixes")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        width = max(map(len, words)) - 1
        self._last = np.array([word[-1] for word in words], np.int32)
        self._prefixes = np.full((len(words), width), _ANY, np.int64)
        for row, word in zip(self._prefixes, words, strict=True):
            row[width - len(word) + 1 :] = word[:-1]

    def completing(self, tokens: NDArray[np.int64]) -> NDArray[np.int32]:
        """Tokens that would complete a word behind `tokens`, each once."""
        width = self._prefixes.shape[1]
        tail = np.full(width, _NOTHING, np.int64)
        near = tokens[max(0, len(tokens) - width) :]
        tail[width - len(near) :] = near
        matches = ((self._prefixes == tail) | (self._prefixes == _ANY)).all(-1)
        return np.unique(self._last[matches])


class SequenceRules:
    """One sequence's part of `LogitRules`; its arrays as described there, `counts` None where no penalty is on."""

    __slots__ = ("allowed", "bad_words", "bias", "bias_tokens", "counts", "params")

    def __init__(
        self, params: SamplingParams, prompt: NDArray[np.int64], output: NDArray[np.int64], capacity: int
    ) -> None:
        """`output`: tokens after the prompt that are known. `capacity`: tokens that the sequence can come to have."""
        self.params = params
        self.bias_tokens = np.array([token for token, _ in params.logit_bias], np.int32)
        self.bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        self.allowed = np.array(sorted(set(params.allowed_token_ids)), np.int32)
        self.bad_words = BadWords(params.bad_words) if params.bad_words else None
        self.counts: TokenCounts | None = None
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            # Only the repetition penalty cares for the prompt.
            seen = prompt if params.repetition_penalty != 1 else prompt[:0]
            self.counts = TokenCounts(seen, output, capacity)

    @classmethod
    def of(
        cls, params: SamplingParams, prompt: NDArray[np.int64], output: NDArray[np.int64], capacity: int
    ) -> SequenceRules | None:
        """None if the parameters leave the logits alone; arguments as for the constructor."""
        penalties = (params.repetition_penalty - 1, params.presence_penalty, params.frequency_penalty)
        if not any((*penalties, params.logit_bias, params.allowed_token_ids, params.bad_words)):
            return None
        return cls(params, prompt, output, capacity)

    def add(self, token: int) -> None:
        """`token` was generated."""
        if self.counts is not None:
            self.counts.add(token)


class Ruled(NamedTuple):
    """Sample `row` of a step belongs to a sequence with these rules; `tokens`: all that it knows so far."""

    row: int
    rules: SequenceRules
    tokens: NDArray[np.int64]


def join_rules(ruled: Sequence[Ruled], num_samples: int) -> LogitRules | None:
    """The rules of a step of `num_samples` samples; None if there are none."""
    if not ruled:
        return None
    repetition = np.ones(num_samples, np.float32)
    frequency, presence = np.zeros((2, num_samples), np.float32)
    for row, rules, _ in ruled:
        params = rules.params
        repetition[row], frequency[row] = params.repetition_penalty, params.frequency_penalty
        presence[row] = params.presence_penalty
    counts = [(row, rules.counts) for row, rules, _ in ruled if rules.counts is not None]
    return LogitRules(
        biased=_pairs(ruled, lambda entry: entry.rules.bias_tokens),
        bias=np.concatenate([entry.rules.bias for entry in ruled]),
        seen=_joined([(row, part.tokens[: part.size]) for row, part in counts]),
        seen_counts=np.concatenate([np.empty(0, np.int32), *(part.counts[: part.size] for _, part in counts)]),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
        allowed=_pairs(ruled, lambda entry: entry.rules.allowed),
        banned=_pairs(ruled, _banned),
    )


def _banned(entry: Ruled) -> NDArray[np.int32]:
    words = entry.rules.bad_words
    return np.empty(0, np.int32) if words is None else words.completing(entry.tokens)


def _pairs(ruled: Sequence[Ruled], tokens_of: Callable[[Ruled], NDArray[np.int32]]) -> Pairs:
    return _joined([(entry.row, tokens_of(entry)) for entry in ruled])


def _joined(parts: Sequence[tuple[int, NDArray[np.int32]]]) -> Pairs:
    rows = np.array([row for row, _ in parts], np.int32)
    counts = np.array([len(tokens) for _, tokens in parts], np.int64)
    return Pairs(np.repeat(rows, counts), np.concatenate([np.empty(0, np.int32), *(tokens for _, tokens in parts)]))
