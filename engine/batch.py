"""Flattening a step: from the sequences that take part to the arrays that a model runner takes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from engine.scoring import ScoredSpan, join_spans
from engine.sequence import Sequence
from engine.step import StepInput
from engine.structured import NO_MASKS, OutputState, StepMasks
from engine.token_rules import Ruled, join_rules


class Part(NamedTuple):
    """`num_tokens` tokens of `sequence`, from its first uncomputed one on."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the part ends at the last known token, so that the next one is sampled."""
        return self.num_tokens == self.sequence.remaining

    @property
    def scored(self) -> ScoredSpan | None:
        """The prompt tokens whose log-probabilities are to be reported and come from this part; None if there are
        none: position p's come from the token before it."""
        sequence = self.sequence
        if sequence.num_scored >= sequence.num_prompt:
            return None
        start = max(sequence.num_computed + 1, sequence.num_scored)
        end = min(sequence.num_computed + self.num_tokens + 1, sequence.num_prompt)
        if start >= end:
            return None
        return ScoredSpan(sequence.key, start, end, sequence.spec.params.prompt_logprobs or 0)


def build_step(
    step_id: int, parts: Seq[Part], block_size: int, make_masks: Callable[[Seq[OutputState]], StepMasks] | None = None
) -> StepInput:
    """Lay the parts out as flat arrays; parts of one token must come first.

    Python runs once per sequence, numpy does the tokens. `make_masks` begins to compute the masks of structured
    outputs; needed if there are any.
    """
    num_seqs = len(parts)
    sequences = [part.sequence for part in parts]
    starts = np.array([sequence.num_computed for sequence in sequences], np.int64)
    counts = np.array([part.num_tokens for part in parts], np.int64)
    num_decodes = int(np.count_nonzero(counts == 1))
    assert (counts[:num_decodes] == 1).all(), counts

    query_start = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    num_tokens = int(query_start[-1])
    row_of = np.repeat(np.arange(num_seqs), counts)
    positions = np.arange(num_tokens) - np.repeat(query_start[:-1] - starts, counts)

    token_ids = np.empty(num_tokens, np.int64)
    width = max((sequence.num_blocks for sequence in sequences), default=0)
    block_tables = np.zeros((num_seqs, width), np.int32)
    row = 0
    for table, (sequence, count) in zip(block_tables, parts, strict=True):
        done = sequence.num_computed
        token_ids[row : row + count] = sequence.buffer[done : done + count]
        table[: sequence.num_blocks] = sequence.table[: sequence.num_blocks]
        row += count
    blocks = block_tables[row_of, positions // block_size].astype(np.int64)

    draws = [(i, draw) for i, part in enumerate(parts) if part.samples for draw in range(len(part.sequence.samples))]
    sampled = [i for i, _ in draws]
    sampling = [sequences[i] for i in sampled]
    params = [sequence.spec.params for sequence in sampling]
    floats = np.array([(p.temperature, p.top_p, p.min_p) for p in params], np.float32).reshape(-1, 3).T.copy()
    outputs = [sequences[i].outputs[draw] for i, draw in draws]
    forbidden = [
        (r, token)
        for r, sequence in enumerate(sampling)
        if sequence.generated < params[r].min_tokens and outputs[r] is None  # else its mask sees to it
        for token in sequence.stop_tokens
    ]
    structured = [(r, output) for r, output in enumerate(outputs) if output is not None]
    masks = NO_MASKS
    if structured:
        assert make_masks is not None
        masks = make_masks([output for _, output in structured])
    ruled = [
        Ruled(r, sequence.rules, sequence.buffer[: sequence.num_tokens])
        for r, sequence in enumerate(sampling)
        if sequence.rules is not None
    ]
    logprobs = None
    if any(p.logprobs is not None for p in params):
        logprobs = np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32)
    scored = [
        (span, int(query_start[i]) - part.sequence.num_computed - 1, part.sequence.buffer)
        for i, part in enumerate(parts)
        if (span := part.scored) is not None
    ]
    return StepInput(
        step_id=step_id,
        num_decodes=num_decodes,
        token_ids=token_ids,
        token_slots=np.full(num_tokens, -1, np.int32),  # every token is on the host when a step is built
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_start=query_start,
        context_lens=(starts + counts).astype(np.int32),
        block_tables=block_tables,
        sample_rows=query_start[1:][sampled] - 1,
        sample_slots=np.arange(len(sampled), dtype=np.int32),
        temperature=floats[0],
        top_p=floats[1],
        min_p=floats[2],
        top_k=np.array([p.top_k for p in params], np.int32),
        seeds=np.array([p.seed for p in params], np.uint64),
        sample_index=np.array([sequences[i].sample_number(draw) for i, draw in draws], np.int32),
        sample_positions=np.array([sequence.num_tokens for sequence in sampling], np.int64),
        forbidden_rows=np.array([r for r, _ in forbidden], np.int32),
        forbidden_tokens=np.array([token for _, token in forbidden], np.int32),
        mask_rows=np.array([r for r, _ in structured], np.int32),
        mask_bits=masks.bits,
        await_masks=masks.wait,
        rules=join_rules(ruled, len(sampled)),
        logprobs=logprobs,
        scores=join_spans(scored),
    )
