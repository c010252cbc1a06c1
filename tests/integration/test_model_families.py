"""Native implementations of the Llama shape's kin against transformers, on small random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine import attention
from engine.models.mlp import SparseMlp
from pdcore.errors import ModelError, UnsupportedModel
from tests.support.model_oracle import Oracle, greedy_equals, random_walk, runner_for, tokens_of
from tests.support.steps import ManualDriver, ManualSequence, Part
from tests.support.tiny_families import VOCAB, tiny_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"sliding_window": 21}
SWITCHED = {"use_sliding_window": True, **WINDOW}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {"num_key_value_heads": 4}),
    "llama with yarn": ("llama", {"rope_parameters": {**YARN, "rope_theta": 500.0}}),
    "llama with dynamic scaling": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3 with windows": ("smollm3", {"no_rope_layers": [1, 0], **SWITCHED}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"head_dim": 24, **WINDOW}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows": ("qwen2", {"max_window_layers": 1, **SWITCHED}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 with windows": (
        "qwen3",
        {"attention_bias": True, "layer_types": ["sliding_attention", "full_attention"], **SWITCHED},
    ),
    "qwen3 moe": ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [1], **EXPERTS}),
    "qwen3 moe with a window": ("qwen3_moe", {"decoder_sparse_step": 2, "head_dim": 32, **EXPERTS, **SWITCHED}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral with a window": ("mixtral", {"num_local_experts": 4, **WINDOW}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_transformers(tmp_path: Path, name: str) -> None:
    """Batched, chunked, decoded, and from a prefix that another sequence computed."""
    model_type, config = FAMILIES[name]
    path = tiny_checkpoint(tmp_path, model_type, **config)
    oracle, driver = Oracle(path), ManualDriver(runner_for(path, model_impl="native"))
    random_walk(driver, oracle, seed=1, max_seqs=5)
    greedy_equals(driver, oracle, steps=4)

    first = ManualSequence(tokens_of(70, 9))
    driver.logits([Part(first, 70)])
    shared = ManualSequence(first.tokens[:48] + tokens_of(20, 8), computed=48, blocks=first.blocks[:3])
    (row,) = driver.logits([Part(shared, 20)])
    assert torch.allclose(row, oracle(shared.tokens)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [1, 5, 16, 17, 64])
@pytest.mark.parametrize("score_bytes", [1 << 8, 1 << 13])
def test_windows_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, score_bytes: int) -> None:
    """Smaller than a block, as large as one, and across many; with small tiles, so that long prompts have several.

    Without the kernels too, as in bfloat16 arithmetic.
    """
    monkeypatch.setattr(attention, "_SCORE_BYTES", score_bytes)
    if score_bytes == 1 << 13:
        for kernel in ("decode_kernel", "prefill_kernel"):
            monkeypatch.setattr(attention, kernel, lambda *_args, **_options: None)
    path = tiny_checkpoint(tmp_path, "mistral", sliding_window=window)
    for block_size in (8, 16):
        driver = ManualDriver(runner_for(path, block_size=block_size))
        random_walk(driver, Oracle(path), seed=window, max_seqs=6, max_len=120)


def test_blocks_before_the_window_are_not_read(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "mistral", **WINDOW)
    driver = ManualDriver(runner_for(path))
    sequence = ManualSequence(tokens_of(100, 3))
    driver.logits([Part(sequence, 99, sample=False)])
    geometry = driver.runner.geometry
    nothing = torch.full((geometry.num_layers, 2, 64, geometry.num_kv_heads, geometry.head_dim), torch.nan)
    driver.runner.cache.scatter(0, sequence.blocks, 0, nothing)
    (row,) = driver.logits([Part(sequence, 1)])  # the first 100 - 21 tokens are out of sight, 64 of them in blocks
    assert torch.allclose(row, Oracle(path)(sequence.tokens)[-1], atol=1e-4, rtol=0)


def test_a_window_that_no_sequence_outgrows_costs_nothing(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "mistral", sliding_window=512)
    assert runner_for(path)._network._windows == (None,)  # type: ignore[attr-defined]


def test_an_expert_works_once_for_all_of_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint(tmp_path, "mixtral", num_local_experts=4)
    runner = runner_for(path)
    sparse = [layer.mlp for layer in runner._network._layers]  # type: ignore[attr-defined]
    assert all(isinstance(mlp, SparseMlp) for mlp in sparse)
    calls: list[int] = []
    for mlp in sparse:
        mlp._experts = tuple(lambda x, expert=expert: (calls.append(len(x)), expert(x))[1] for expert in mlp._experts)
    sequence = ManualSequence(tokens_of(50, 1))
    ManualDriver(runner).logits([Part(sequence, 50)])
    assert len(calls) <= 2 * 4
    assert sum(calls) == 2 * 50 + 2 * 1  # two experts for each token; the last layer computes the sampled row alone


def test_weights_are_named_as_checkpoints_name_them(tmp_path: Path) -> None:
    """What the tests load is what the hub has: transformers fuses experts in memory only."""
    mixtral = load_file(tiny_checkpoint(tmp_path / "a", "mixtral", num_local_experts=4) / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in mixtral
    qwen = load_file(tiny_checkpoint(tmp_path / "b", "qwen3_moe", **EXPERTS) / "model.safetensors")
    assert "model.layers.0.mlp.experts.7.gate_proj.weight" in qwen


def test_a_missing_bias_or_norm_is_an_error(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen2")
    raw = json.loads((path / "config.json").read_text())
    for model_type, architecture, lacking in (
        ("mistral", "MistralForCausalLM", "do not belong .*bias"),
        ("qwen3", "Qwen3ForCausalLM", "lack .*q_norm"),
    ):
        changed = {**raw, "model_type": model_type, "architectures": [architecture], "head_dim": 16}
        changed.pop("layer_types", None)
        (path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelError, match=lacking):
            runner_for(path)


def test_native_is_refused_where_there_is_none(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "gemma", head_dim=16)
    with pytest.raises(UnsupportedModel, match="GemmaForCausalLM is not supported; supported: LlamaForCausalLM, "):
        runner_for(path, model_impl="native")
    assert runner_for(path).model.vocab_size == VOCAB
