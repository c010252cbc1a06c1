"""Whose log-probabilities a step computes, and how its arrays come back to the requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.step import RowLogprobs, ScoreInput
from pdcore.logprobs import Logprobs
from pdcore.types import RequestKey


class ScoredSpan(NamedTuple):
    """Prompt positions [start, end) of a sequence, and how many likeliest tokens are wanted of each."""

    key: RequestKey
    start: int
    end: int
    top: int


def join_spans(spans: Sequence[tuple[ScoredSpan, int, NDArray[np.int64]]]) -> ScoreInput | None:
    """The rows that a step scores; None if there are none.

    Args:
        spans: each with what is added to a position to get the step's token row that predicts it, and with the
            sequence's tokens.
    """
    if not spans:
        return None
    positions = [np.arange(span.start, span.end) for span, _, _ in spans]
    rows = np.concatenate([where + offset for where, (_, offset, _) in zip(positions, spans, strict=True)])
    targets = np.concatenate([tokens[span.start : span.end] for span, _, tokens in spans])
    return ScoreInput(rows.astype(np.int32), targets, max(span.top for span, _, _ in spans))


def of_spans(spans: Iterable[ScoredSpan], rows: RowLogprobs | None) -> Iterator[tuple[RequestKey, Logprobs]]:
    """What each span is to report; `rows` are those of the joined spans."""
    row = 0
    for span in spans:
        assert rows is not None, "the step had rows to score"
        count = span.end - span.start
        yield span.key, _logprobs(rows, row, row + count, span.start, span.top)
        row += count


def of_sample(rows: RowLogprobs, row: int, index: int, top: int) -> Logprobs:
    """What token `index` of an output is to report, which is row `row`."""
    return _logprobs(rows, row, row + 1, index, top)


def _logprobs(rows: RowLogprobs, first: int, end: int, start: int, top: int) -> Logprobs:
    top = min(top, rows.top_ids.shape[1])
    return Logprobs(
        start,
        top,
        tuple(rows.values[first:end].tolist()),
        tuple(rows.top_ids[first:end, :top].ravel().tolist()),
        tuple(rows.top_values[first:end, :top].ravel().tolist()),
    )
