"""The fake runner must notice what it is there to notice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.batch import Part, build_step
from engine.sequence import Sequence, SequenceKind
from engine.step import StepInput
from tests.support.engine_kit import request
from tests.support.fake_runner import FakeRunner, oracle


def first_step(runner: FakeRunner, blocks: list[int]) -> tuple[Sequence, StepInput]:
    spec = request("r", 20, 4, temperature=1.0, seed=7)
    sequence = Sequence(spec, SequenceKind.GENERATE, block_size=runner.geometry.block_size, now=0.0)
    sequence.take_blocks(blocks)
    return sequence, build_step(1, [Part(sequence, 20)], runner.geometry.block_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_token_is_the_oracles_and_depends_on_everything(dtype: str) -> None:
    runner = FakeRunner(dtype=dtype)
    sequence, step = first_step(runner, [5, 2])
    expected = oracle(runner, sequence.spec, 1)[0]
    assert runner.run(step).token_ids.tolist() == expected
    changed = {
        "seed": replace(step, seeds=step.seeds + np.uint64(1)),
        "position": replace(step, sample_positions=step.sample_positions + 1),
        "sample": replace(step, sample_index=step.sample_index + 1),
        "token": replace(step, token_ids=np.where(step.positions == 3, 0, step.token_ids)),
        "forbidden": replace(
            step, forbidden_rows=np.zeros(1, np.int32), forbidden_tokens=np.array(expected, np.int32)
        ),
    }
    for what, other in changed.items():
        assert runner.run(other).token_ids.tolist() != expected, what


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("position", [0, 15, 16, 18])
def test_a_corrupted_cache_shows_in_the_next_token(layer: int, position: int) -> None:
    runner = FakeRunner()
    sequence, step = first_step(runner, [5, 2])
    tokens = oracle(runner, sequence.spec, 2)[0]
    runner.run(step)
    sequence.num_computed = 20
    sequence.append(tokens[0])
    decode = build_step(2, [Part(sequence, 1)], 16)
    assert runner.run(decode).token_ids.tolist() == [tokens[1]]
    slot = int(runner.cache.slots([5, 2], position, 1))
    runner.cache.data[slot, layer, 1] += 1
    assert runner.run(decode).token_ids.tolist() != [tokens[1]]


def test_malformed_steps_are_refused() -> None:
    runner = FakeRunner()
    _, step = first_step(runner, [5, 2])
    for bad in (
        replace(step, slot_mapping=step.slot_mapping + 1),
        replace(step, positions=step.positions + 1),
        replace(step, num_decodes=1),
        replace(step, context_lens=step.context_lens + 1),
        replace(step, sample_rows=step.sample_rows - 1),
        replace(step, temperature=step.temperature.astype(np.float64)),
    ):
        with pytest.raises(AssertionError):
            runner.run(bad)


def test_gather_and_scatter_are_inverse_and_canonical() -> None:
    here, there = FakeRunner(block_size=16, layers=3), FakeRunner(block_size=8, layers=3)
    _, step = first_step(here, [5, 2])
    here.run(step)
    values = here.cache.gather(1, 2, [5, 2], 7, 11)
    assert values.shape == (2, 2, 11, 2, here.geometry.head_dim)
    assert values.is_contiguous()
    there.cache.scatter(1, [9, 3, 4], 7, values)
    assert torch.equal(there.cache.gather(1, 2, [9, 3, 4], 7, 11), values)
    assert torch.equal(there.cache.gather(0, 1, [9, 3, 4], 7, 11), torch.full((1, 2, 11, 2, 10), -1.0))


def test_progress_is_raised_layer_by_layer() -> None:
    runner = FakeRunner()
    _, step = first_step(runner, [5, 2])
    runner.run(step)
    assert runner.progress.layers_of(1) == 2
    assert runner.progress.layers_of(2) == 0
