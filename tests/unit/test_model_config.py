"""What the loader accepts and refuses, and what a model's digest stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.loader import load_runner
from engine.models.config import parse_config
from engine.models.rope import rope_tables
from pdcore.config import EngineConfig
from pdcore.errors import ConfigError, ModelError
from tests.support.tiny_model import tiny_llama

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
            "Qwen3ForCausalLM is not supported; supported",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised weights \(gptq\)"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"vocab_size": None}, "vocab_size must be an integer"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
    ],
)
def test_unsupported_configs_are_refused_with_the_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config({**BASE, **change}, Path("m/config.json"))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": LLAMA3},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 500.0, **LLAMA3}},
    ],
)
def test_rope_tables_equal_those_of_transformers(rope: dict[str, Any]) -> None:
    config = parse_config({**BASE, **rope}, Path("config.json"))
    cos, sin = rope_tables(config.rope, config.head_dim, 512, torch.float32)
    reference = LlamaRotaryEmbedding(LlamaConfig(**{**BASE, **rope}))
    expected_cos, expected_sin = reference(torch.zeros(1), torch.arange(512)[None])
    assert torch.allclose(cos, expected_cos[0], atol=1e-5)
    half = config.head_dim // 2
    assert torch.allclose(sin[:, half:], expected_sin[0, :, half:], atol=1e-5)
    assert torch.equal(sin[:, :half], -sin[:, half:])


def engine_config(path: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(str(path), "tiny", **{"dtype": "float32", "num_blocks": 4, **changes})


def test_digest_tells_models_apart(tmp_path: Path) -> None:
    base = load_runner(engine_config(tiny_llama(tmp_path / "a"))).model.digest
    again = load_runner(engine_config(tiny_llama(tmp_path / "elsewhere"), num_blocks=9, block_size=32)).model.digest
    assert base == again
    others = [
        engine_config(tiny_llama(tmp_path / "seed", seed=1)),
        engine_config(tiny_llama(tmp_path / "rope", rope_theta=99.0)),
        engine_config(tiny_llama(tmp_path / "eps", rms_norm_eps=1e-6)),
    ]
    digests = [load_runner(config).model.digest for config in others]
    assert len({base, *digests}) == 4
    # The type is the geometry's: KV of one model may be converted.
    narrow = load_runner(engine_config(tmp_path / "a", dtype="bfloat16"))
    assert (narrow.model.digest, narrow.geometry.dtype) == (base, "bfloat16")


def test_model_info_and_geometry(tmp_path: Path) -> None:
    runner = load_runner(engine_config(tiny_llama(tmp_path, max_len=300), max_model_len=200, num_blocks=7))
    assert (runner.model.name, runner.model.max_model_len, runner.model.vocab_size) == ("tiny", 200, 512)
    geometry = runner.geometry
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.num_blocks) == (3, 2, 16, 7)
    assert geometry.model_digest == runner.model.digest
    assert load_runner(engine_config(tmp_path)).model.max_model_len == 300
    with pytest.raises(ConfigError, match="at most 300"):
        load_runner(engine_config(tmp_path, max_model_len=301))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    missing = "model.layers.1.mlp.up_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, weights)
    with pytest.raises(ModelError, match=f"lack {missing}"):
        load_runner(engine_config(tmp_path))
    save_file({**tensors, missing: tensors[missing][:-1].clone()}, weights)
    with pytest.raises(ModelError, match=r"up_proj.weight has shape \[127, 64\]"):
        load_runner(engine_config(tmp_path))
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, weights)
    with pytest.raises(ModelError, match=r"do not belong .*q_norm"):
        load_runner(engine_config(tmp_path))
    save_file({**tensors, missing: tensors[missing].to(torch.int8)}, weights)
    with pytest.raises(ModelError, match="only floating-point"):
        load_runner(engine_config(tmp_path))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot read"):
        load_runner(engine_config(tmp_path))
    weights.unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load_runner(engine_config(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="not a JSON object"):
        load_runner(engine_config(tmp_path))


def test_a_tied_copy_of_the_head_is_ignored(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    load_runner(engine_config(tmp_path))


def test_config_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    LlamaConfig(**BASE, rope_parameters={"rope_type": "default", "rope_theta": 123.0}).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    config = parse_config({**raw, "architectures": ["LlamaForCausalLM"]}, tmp_path / "config.json")
    assert (config.rope.theta, config.num_kv_heads, config.head_dim) == (123.0, 4, 16)
