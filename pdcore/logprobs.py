"""Log-probabilities of consecutive tokens, as they travel from a step to the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_LOGPROBS = 20
"""Likeliest tokens that can be asked for at each position."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities, for n consecutive tokens of a prompt or an output.

    Flat, so that a long prompt costs few objects: token i's likeliest are ``[i * top : (i + 1) * top]``.

    Attributes:
        start: position of the first token in the prompt, or in the output.
        top: likeliest tokens given for each.
        values: [n], of the tokens themselves.
        top_ids, top_values: [n * top], the likeliest at each position first.
    """

    start: int
    top: int
    values: tuple[float, ...]
    top_ids: tuple[int, ...] = ()
    top_values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.values)

    @property
    def well_formed(self) -> bool:
        """Whether the lengths agree."""
        return len(self.top_ids) == len(self.top_values) == len(self.values) * self.top

    def between(self, start: int, end: int) -> Logprobs:
        """Of the tokens at positions [start, end), which must be among these."""
        assert self.start <= start <= end <= self.end, (self.start, start, end, self.end)
        first, last = start - self.start, end - self.start
        flat = slice(first * self.top, last * self.top)
        return Logprobs(start, self.top, self.values[first:last], self.top_ids[flat], self.top_values[flat])


def joined(parts: Sequence[Logprobs]) -> Logprobs:
    """One of at least one part, each of which begins where the last one ends."""
    assert all(left.end == right.start for left, right in pairwise(parts)), parts
    return Logprobs(
        parts[0].start,
        parts[0].top,
        tuple(value for part in parts for value in part.values),
        tuple(token for part in parts for token in part.top_ids),
        tuple(value for part in parts for value in part.top_values),
    )
