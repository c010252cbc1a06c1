"""Models that run through transformers' own modelling code, with their K and V in our blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loader import load_runner
from engine.models.transformers_model import TransformersModel
from pdcore.config import EngineConfig, SchedulerConfig
from pdcore.errors import ConfigError, ModelError, UnsupportedModel
from pdcore.types import Role
from tests.support.generate import generate
from tests.support.local_cluster import LocalCluster
from tests.support.model_oracle import Oracle, greedy_equals, random_walk, runner_for, tokens_of
from tests.support.processes import worker_config
from tests.support.reference import divergences
from tests.support.steps import ManualDriver, ManualSequence, Part
from tests.support.tiny_families import VOCAB, tiny_checkpoint
from tests.support.tiny_model import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 24}),
    "gemma 2: soft caps, windows, scale": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 21, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 40},
    ),
    "gemma 3: windows, two rotations": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 21, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi: partial rotation, parallel blocks": ("phi", {}),
    "phi 3: one weight for q, k and v": ("phi3", {"sliding_window": 21}),
    "gpt-neox": ("gpt_neox", {"num_key_value_heads": ...}),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "olmo 2": ("olmo2", {}),
    "cohere: rotated pairs, scaled logits": ("cohere", {"logit_scale": 0.3}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "gpt-2: learned positions": (
        "gpt2",
        {"num_key_value_heads": ..., "intermediate_size": ..., "max_position_embeddings": 512},
    ),
    "olmoe: experts": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_itself_without_paging(tmp_path: Path, name: str) -> None:
    """Batched, chunked, decoded."""
    model_type, config = MODELS[name]
    path = tiny_checkpoint(tmp_path, model_type, **config)
    oracle, driver = Oracle(path), ManualDriver(runner_for(path))
    assert isinstance(driver.runner._network, TransformersModel)
    random_walk(driver, oracle, seed=1, max_seqs=5)
    greedy_equals(driver, oracle, steps=4)


@pytest.mark.parametrize("model_type", ["gemma2", "phi", "gpt_neox", "olmo"])
def test_kv_lives_in_our_blocks_and_a_decode_feeds_one_token_of_each_sequence(
    tmp_path: Path, model_type: str
) -> None:
    path = tiny_checkpoint(tmp_path, model_type, num_key_value_heads=4, head_dim=16)
    runner = runner_for(path)
    model = runner._network._model  # type: ignore[attr-defined]
    fed: list[tuple[int, ...]] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _module, inputs: fed.append(inputs[0].shape))
    driver = ManualDriver(runner)
    sequences = [ManualSequence(tokens_of(length, length)) for length in (40, 9, 21)]
    driver.run([Part(sequence, len(sequence.tokens)) for sequence in sequences])
    for _ in range(3):
        driver.run([Part(sequence, 1) for sequence in sequences])
    assert fed == [(1, 70), (1, 3), (1, 3), (1, 3)]

    # What is in the blocks is what transformers itself keeps as K and V.
    for sequence in sequences:
        with torch.inference_mode():
            kept = Oracle(path).model(torch.tensor([sequence.tokens[:-1]]), use_cache=True).past_key_values
        held = runner.cache.gather(0, 2, sequence.blocks, 0, sequence.computed)
        for layer in range(2):
            keys, values = kept.layers[layer].keys[0], kept.layers[layer].values[0]
            assert torch.allclose(held[layer, 0].transpose(0, 1), keys, atol=1e-4)
            assert torch.allclose(held[layer, 1].transpose(0, 1), values, atol=1e-4)

    # And nothing else is remembered: with the blocks replaced by those of another prompt, its tokens follow.
    other = ManualSequence(tokens_of(40, 5))
    driver.run([Part(other, 40)])
    shown, hidden = sequences[0], runner.cache.gather(0, 2, other.blocks, 0, 40)
    runner.cache.scatter(0, shown.blocks, 0, hidden)
    expected = Oracle(path)(other.tokens)[-1]
    (row,) = driver.logits([Part(ManualSequence(list(other.tokens), computed=40, blocks=shown.blocks), 1)])
    assert torch.allclose(row, expected, atol=1e-4, rtol=0)


def test_progress_rises_as_layers_come_into_the_cache(tmp_path: Path) -> None:
    runner = runner_for(tiny_checkpoint(tmp_path, "gemma", head_dim=16, num_hidden_layers=3))
    driver = ManualDriver(runner)
    sequence = ManualSequence(tokens_of(20, 0))
    seen: list[tuple[int, list[bool]]] = []

    class Recorder:
        """Stands in for `StepProgress`; at each rise it looks which layers hold the prompt."""

        step_id = 0

        @property
        def layers_done(self) -> int:
            return seen[-1][0]

        @layers_done.setter
        def layers_done(self, done: int) -> None:
            held = [bool((runner.cache.gather(n, 1, sequence.blocks, 0, 20) != 0).all()) for n in range(3)]
            seen.append((done, held))

    runner.progress = Recorder()  # type: ignore[assignment]
    driver.run([Part(sequence, 20, sample=False)])
    assert seen == [(done, [n < done for n in range(3)]) for done in range(4)]


def test_a_model_is_served_by_two_pools(tmp_path: Path) -> None:
    """The prompt travels chunk by chunk as it is computed; the second request begins with the KV of the first."""
    path = tiny_llama(tmp_path / "model")  # for its tokenizer
    tiny_checkpoint(path, "gemma2", head_dim=16, sliding_window=21, attn_logit_softcapping=2.0)
    scheduler = SchedulerConfig(max_num_batched_tokens=64, prefill_chunk_tokens=64, local_prefill_tokens=0)
    configs = [worker_config(path, role, scheduler=scheduler) for role in (Role.PREFILL, Role.DECODE)]
    with LocalCluster(path, tmp_path, configs, forked=True) as cluster:
        for prompt in (tokens_of(150, 1), tokens_of(150, 1)[:100] + tokens_of(50, 2)):
            outcome = generate(cluster.address, prompt, 20)
            assert outcome.end is not None, outcome
            assert (outcome.end.timeline.mode, len(outcome.tokens)) == ("disaggregated", 20)
            assert all(near.margin < 1e-3 for near in divergences(Oracle(path).model, prompt, outcome.tokens))
        assert outcome.end.usage.cached_tokens == 96
        cluster.assert_baseline(10.0)


def test_a_native_model_can_be_forced_through_transformers(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path)
    native, forced = runner_for(path), runner_for(path, model_impl="transformers")
    assert isinstance(forced._network, TransformersModel)
    assert not isinstance(native._network, TransformersModel)
    prompts = [tokens_of(length, length) for length in (5, 30)]
    assert ManualDriver(forced).generate(prompts, 6) == ManualDriver(native).generate(prompts, 6)
    assert forced.model.digest != native.model.digest
    assert (forced.model.max_model_len, forced.model.vocab_size) == (2048, VOCAB)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(tmp_path: Path, dtype: str) -> None:
    """Weights and cache have the dtype; the logits stay near those of float32."""
    path = tiny_checkpoint(tmp_path, "gemma2", head_dim=16)
    driver = ManualDriver(runner_for(path, dtype=dtype))
    assert driver.runner.cache.dtype is getattr(torch, dtype)
    sequence = ManualSequence(tokens_of(30, 1))
    driver.logits([Part(sequence, 29, sample=False)])
    (row,) = driver.logits([Part(sequence, 1)])
    expected = Oracle(path)(sequence.tokens)[-1]
    assert (row - expected).norm() < 0.1 * expected.norm()


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "state space": ("mamba", {"num_attention_heads": ..., "num_key_value_heads": ...}, "state-space and hybrid"),
    "hybrid by layer types": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"]},
        "layers of type conv",
    ),
    "attention of its own": (
        "bloom",
        {"num_key_value_heads": ..., "intermediate_size": ..., "max_position_embeddings": ...},
        "does not go through transformers' AttentionInterface",
    ),
    "attention sinks": (
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 4},
        "options that are not implemented: s_aux",
    ),
    "rotation that depends on the length": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
            },
        },
        "longer than 64 tokens; set max_model_len",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    model_type, config, reason = REFUSED[name]
    path = tiny_checkpoint(tmp_path, model_type, **config)
    with pytest.raises(UnsupportedModel, match=reason):
        runner_for(path)


def test_encoder_decoder_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true, "d_model": 8}')
    tiny_weights(tmp_path)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        runner_for(tmp_path)


def test_unknown_and_unfit_models_are_refused(tmp_path: Path) -> None:
    tiny_weights(tmp_path)
    for config, reason in (
        ('{"model_type": "of my own"}', "There is no native implementation: .*'of my own' is not supported"),
        ('{"model_type": "vit"}', "no causal language model of type 'vit'"),
        ('{"model_type": "gemma", "architectures": ["GemmaForTokenClassification"]}', "not of GemmaForCausalLM"),
        ('{"model_type": "gemma3"}', "more than a text model"),
    ):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(UnsupportedModel, match=reason):
            runner_for(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gemma", "quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(ModelError, match="awq"):
        runner_for(tmp_path)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "gemma", head_dim=16)
    tiny_weights(path)
    with pytest.raises(ModelError, match="missing keys"):
        runner_for(path)


def test_length_limits(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "gemma", head_dim=16)
    assert load_runner(EngineConfig(str(path), "tiny", num_blocks=4, max_model_len=100)).model.max_model_len == 100
    with pytest.raises(ConfigError, match="at most 512"):
        load_runner(EngineConfig(str(path), "tiny", num_blocks=4, max_model_len=513))


def test_a_model_that_mixes_tokens_outside_of_attention_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batched end to end, the last token of one sequence would leak into the first of the next."""
    from transformers.models.gemma.modeling_gemma import GemmaMLP

    plain = GemmaMLP.forward
    monkeypatch.setattr(GemmaMLP, "forward", lambda self, x: plain(self, x) + x.roll(1, -2))
    path = tiny_checkpoint(tmp_path, "gemma", head_dim=16)
    with pytest.raises(UnsupportedModel, match="more with a sequence than attention"):
        runner_for(path)


def tiny_weights(folder: Path) -> None:
    """A weight file with one tensor that belongs to no model."""
    from safetensors.torch import save_file

    save_file({"odd": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
