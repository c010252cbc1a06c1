"""The runner's logits against transformers, on small random models, in every shape of batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import attention, loader, norm
from engine.native import attention as native_attention
from engine.native import linear
from engine.native import prefill as native_prefill
from engine.native.library import engine_library
from pdcore.types import SamplingParams
from tests.support.model_oracle import Oracle, greedy_equals, random_walk, runner_for, tokens_of
from tests.support.steps import ManualDriver, ManualSequence, Part
from tests.support.tiny_model import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "gqa": {},
    "mha": {"kv_heads": 4},
    "mqa": {"kv_heads": 1},
    "wide heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "untied": {"tie": False},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    # These go through our own linear layers, where there are any; float32 weights do not.
    "bfloat16 weights": {"dtype": "bfloat16"},
    "bfloat16 weights, biases, untied": {"dtype": "bfloat16", "attention_bias": True, "mlp_bias": True, "tie": False},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> Oracle:
    return Oracle(tiny)


@pytest.fixture
def no_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler, or a CPU that the kernels do not know."""
    for user in (linear, native_attention, native_prefill, norm):
        monkeypatch.setattr(user, "engine_library", lambda: None)


@pytest.mark.skipif(engine_library() is None, reason="no compiler, or a CPU without AVX2")
def test_native_code_is_used_where_it_can_be(tmp_path: Path) -> None:
    runner = runner_for(tiny_llama(tmp_path / "model", dtype="bfloat16"))
    assert all(layer.qkv.is_narrow and layer.out.is_narrow for layer in runner._network._layers)  # type: ignore[attr-defined]
    sequences = [ManualSequence(tokens_of(length, length)) for length in (5, 9, 20)]
    step = ManualDriver(runner).build([Part(sequences[0], 1), Part(sequences[1], 1), Part(sequences[2], 7)])
    shape = attention.HeadShape(4, 2, 16)
    plan = attention.plan_attention(step, runner.cache, shape, torch.float32)
    assert plan.kernel is not None
    assert plan.prefill_kernel is not None
    assert (plan.kernel.num_seqs, plan.prefill_kernel.num_tokens) == (2, 7)
    assert (plan.decodes, plan.prefills) == ((), ())
    # Not in other arithmetic, nor for scores that it does not know.
    for other, dtype in ((shape, torch.bfloat16), (replace(shape, softcap=5.0), torch.float32)):
        plan = attention.plan_attention(step, runner.cache, other, dtype)
        assert plan.kernel is plan.prefill_kernel is None
        assert plan.decodes
        assert plan.prefills


@pytest.mark.usefixtures("no_native_code")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_native_code(tmp_path: Path, dtype: str) -> None:
    path = tiny_llama(tmp_path / "model", dtype=dtype)
    runner = runner_for(path)
    assert not any(layer.qkv.is_narrow for layer in runner._network._layers)  # type: ignore[attr-defined]
    random_walk(ManualDriver(runner), Oracle(path), seed=3, max_seqs=16)
    greedy_equals(ManualDriver(runner), Oracle(path))


@pytest.mark.parametrize("name", VARIANTS)
def test_mixed_batches_equal_transformers(tmp_path: Path, name: str) -> None:
    path = tiny_llama(tmp_path / "model", layers=2, **VARIANTS[name])
    random_walk(ManualDriver(runner_for(path)), Oracle(path), seed=1)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("seed", range(3))
def test_random_steps_equal_transformers(tiny: Path, oracle: Oracle, block_size: int, seed: int) -> None:
    random_walk(ManualDriver(runner_for(tiny, block_size=block_size), seed), oracle, seed, max_seqs=16)


@pytest.mark.usefixtures("no_native_code")  # which knows no groups
@pytest.mark.parametrize("score_bytes", [1 << 8, 1 << 14, 1 << 18])
@pytest.mark.parametrize("kv_bytes", [1 << 12, 1 << 17])
def test_grouping_limits_do_not_change_results(
    tiny: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, score_bytes: int, kv_bytes: int
) -> None:
    monkeypatch.setattr(attention, "_SCORE_BYTES", score_bytes)
    monkeypatch.setattr(attention, "_DECODE_KV_BYTES", kv_bytes)
    random_walk(ManualDriver(runner_for(tiny)), oracle, seed=7)


def test_every_prompt_length_around_blocks(tiny: Path, oracle: Oracle) -> None:
    driver = ManualDriver(runner_for(tiny))
    prompts = [tokens_of(length, length) for length in range(1, 50)]
    sequences = [ManualSequence(list(prompt)) for prompt in prompts]
    logits = driver.logits([Part(s, len(s.tokens)) for s in sequences])
    for row, prompt in zip(logits, prompts, strict=True):
        assert torch.allclose(row, oracle(prompt)[-1], atol=1e-4, rtol=0)


def test_greedy_decoding_in_a_batch_equals_decoding_alone_and_transformers(tiny: Path, oracle: Oracle) -> None:
    greedy_equals(ManualDriver(runner_for(tiny)), oracle, lengths=(1, 7, 16, 33, 200), steps=12)


def test_token_from_slot_is_the_one_last_sampled_there(tiny: Path) -> None:
    prompts = [tokens_of(length, 50 + length) for length in (9, 3, 20)]
    plain = ManualDriver(runner_for(tiny)).generate(prompts, steps=5)
    driver = ManualDriver(runner_for(tiny))
    sequences = [ManualSequence(list(prompt), slot=slot) for slot, prompt in zip((5, 0, 63), prompts, strict=True)]
    driver.run([Part(sequence, len(sequence.tokens)) for sequence in sequences])
    for _ in range(4):
        driver.run([Part(sequence, 1, from_slot=True) for sequence in reversed(sequences)])
    assert [s.tokens[len(p) :] for s, p in zip(sequences, prompts, strict=True)] == plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_others_left_in_the_blocks_does_no_harm(tiny: Path, dtype: str) -> None:
    clean, dirty = ManualDriver(runner_for(tiny, dtype)), ManualDriver(runner_for(tiny, dtype))
    geometry = dirty.runner.geometry
    blocks = list(range(geometry.num_blocks))
    tokens = geometry.num_blocks * geometry.block_size
    shape = (geometry.num_layers, 2, tokens, geometry.num_kv_heads, geometry.head_dim)
    poison = torch.full(shape, torch.nan, dtype=getattr(torch, dtype))
    poison[:, :, ::2] = torch.inf
    dirty.runner.cache.scatter(0, blocks, 0, poison)
    prompts = [tokens_of(length, length) for length in (1, 5, 5, 6, 17, 40)]
    for driver in (clean, dirty):
        assert len(driver.generate(prompts, steps=3)) == len(prompts)
    results = [driver.generate(prompts, steps=20) for driver in (clean, dirty)]
    assert results[0] == results[1]


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_kv_moved_to_another_runner_continues_the_same(tiny: Path, block_size: int) -> None:
    source, target = ManualDriver(runner_for(tiny)), ManualDriver(runner_for(tiny, block_size=block_size), seed=3)
    prompt = tokens_of(45, 1)
    here, there = ManualSequence(list(prompt)), ManualSequence(list(prompt))
    source.run([Part(here, len(prompt))])
    target.build([Part(there, len(prompt))])  # takes blocks
    values = source.runner.cache.gather(0, 3, here.blocks, 0, len(prompt))
    for start, end in ((20, 45), (0, 20)):  # frames in any order, cut anywhere
        target.runner.cache.scatter(0, there.blocks, start, values[:1, :, start:end])
        target.runner.cache.scatter(1, there.blocks, start, values[1:, :, start:end])
    there.computed, there.tokens = len(prompt), list(here.tokens)
    for _ in range(5):
        assert source.run([Part(here, 1)]) == target.run([Part(there, 1)])


def test_progress_rises_only_when_the_layer_is_in_the_cache(tiny: Path) -> None:
    driver = ManualDriver(runner_for(tiny))
    runner = driver.runner
    sequence = ManualSequence(tokens_of(20, 0))
    seen: list[tuple[int, int, list[bool]]] = []

    class Recorder:
        """Stands in for `StepProgress`; at each rise it looks which layers hold the prompt."""

        step_id = 0
        done = 5

        @property
        def layers_done(self) -> int:
            return self.done

        @layers_done.setter
        def layers_done(self, done: int) -> None:
            self.done = done
            held = [bool((runner.cache.gather(n, 1, sequence.blocks, 0, 20) != 0).all()) for n in range(3)]
            seen.append((self.step_id, done, held))

    runner.progress = Recorder()  # type: ignore[assignment]
    driver.run([Part(sequence, 20)])
    expected = [(0, 0)] + [(1, done) for done in (1, 2, 3)]
    assert [entry[:2] for entry in seen] == expected
    assert [entry[2] for entry in seen] == [[n < done for n in range(3)] for _, done in expected]


def test_step_without_samples_fills_the_cache(tiny: Path, oracle: Oracle) -> None:
    driver = ManualDriver(runner_for(tiny))
    sequence = ManualSequence(tokens_of(30, 4))
    assert driver.run([Part(sequence, 29, sample=False)]) == []
    assert driver.runner.progress.layers_done == 3
    assert torch.allclose(driver.logits([Part(sequence, 1)])[0], oracle(sequence.tokens)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("arithmetic", [torch.bfloat16, torch.float32])
def test_bf16_is_as_near_to_fp32_as_that_of_transformers(
    tiny: Path, oracle: Oracle, arithmetic: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teacher-forced, prefill and decode: the mean error may be 1.5 times theirs, the largest twice theirs.

    Both ways of calculating are run on every CPU, the slow one too.
    """
    monkeypatch.setattr(loader, "compute_dtype", lambda _dtype: arithmetic)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16, local_files_only=True).eval()
    driver = ManualDriver(runner_for(tiny, "bfloat16"))
    ours, theirs = [], []
    for seed in range(6):
        sequence = ManualSequence(tokens_of(60, seed))
        expected = oracle(sequence.tokens)[40:]
        with torch.inference_mode():
            theirs.append((model(torch.tensor([sequence.tokens])).logits[0, 40:].float() - expected).abs())
        driver.logits([Part(sequence, 40, sample=False)])
        rows = torch.cat([driver.logits([Part(sequence, 1)]) for _ in range(20)])
        ours.append((rows - expected).abs())
    errors, yardstick = torch.stack(ours), torch.stack(theirs)
    assert errors.mean() < 1.5 * yardstick.mean()
    assert errors.max() < 2 * yardstick.max()
    assert driver.runner.cache.gather(0, 1, [0], 0, 1).dtype == torch.bfloat16


@pytest.mark.usefixtures("no_native_code")  # which keeps no scores
def test_scores_of_a_long_prompt_stay_within_bounds(tiny: Path) -> None:
    runner = runner_for(tiny, num_blocks=600)
    driver = ManualDriver(runner)
    sequence = ManualSequence(tokens_of(8192, 0))
    step = driver.build([Part(sequence, 8192)])
    heads = attention.HeadShape(4, 2, 16)
    (group,) = attention.plan_attention(step, runner.cache, heads, torch.float32).prefills
    score_bytes = [heads.num_heads * tile.queries * tile.keys * 4 for tile in group.tiles]
    assert max(score_bytes) < 2 * attention._SCORE_BYTES
    assert sum(tile.queries for tile in group.tiles) == 8192


def test_sampled_tokens_do_not_depend_on_the_batch(tiny: Path) -> None:
    params = [
        SamplingParams(8, temperature=t, top_p=p, seed=s) for t, p, s in ((1.0, 1.0, 1), (0.7, 0.9, 2), (0, 1, 3))
    ]
    prompts = [tokens_of(length, length) for length in (12, 30, 4)]

    def generate(chosen: list[int]) -> list[list[int]]:
        driver = ManualDriver(runner_for(tiny))
        sequences = [ManualSequence(list(prompts[i]), params[i], slot) for slot, i in enumerate(chosen)]
        driver.run([Part(sequence, len(sequence.tokens)) for sequence in sequences])
        for _ in range(7):
            driver.run([Part(sequence, 1) for sequence in sequences])
        return [sequence.tokens[len(prompts[i]) :] for sequence, i in zip(sequences, chosen, strict=True)]

    together = generate([0, 1, 2])
    assert generate([2, 0]) == [together[2], together[0]]
    assert [generate([i])[0] for i in range(3)] == together
    assert np.unique([str(tokens) for tokens in together]).size == 3
