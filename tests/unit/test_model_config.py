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
from engine.models.config import LlamaConfig as LlamaArchitecture
from engine.models.config import parse_config
from engine.models.rope import rope_tables
from pdcore.config import EngineConfig
from pdcore.errors import ConfigError, ModelError, UnsupportedModel
from pdcore.hashing import block_hashes, chain_root
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


MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
            "GemmaForCausalLM is not supported; supported",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised weights \(gptq\)"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope scaling 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "rope scaling 'yarn' are malformed"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "lacks factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"vocab_size": None}, "vocab_size must be an integer"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window must be an integer >= 1"),
        ({**MISTRAL, "layer_types": ["full_attention"] * 2}, "layer_types is not supported for 'mistral'"),
        ({**QWEN2, "layer_types": ["full_attention"]}, "layer_types must list all 2 layers"),
        ({**QWEN2, "layer_types": ["linear_attention"] * 2}, "layers of type linear_attention"),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 2}, "asks for a sliding window, but none is set"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "9 experts for each token, of 8"),
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
        {"rope_theta": 500.0, "rope_scaling": YARN},
        {"rope_theta": 500.0, "rope_scaling": {**YARN, "beta_fast": 4, "beta_slow": 2, "attention_factor": 0.8}},
        {"rope_theta": 500.0, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
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


def test_an_adapter_is_a_model_of_its_own(tmp_path: Path) -> None:
    """Merged into the weights it changes the digest, and with it the names of all blocks; else it is refused."""
    base = load_runner(engine_config(tiny_llama(tmp_path))).model.digest
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    query = tensors["model.layers.1.self_attn.q_proj.weight"]
    query += 1e-3 * torch.randn(query.shape[0], 1) @ torch.randn(1, query.shape[1])
    save_file(tensors, weights)
    merged = load_runner(engine_config(tmp_path)).model.digest
    names = [block_hashes(chain_root(digest), range(16), 16)[0] for digest in (base, merged)]
    assert names[0] != names[1]
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="merge it"):
        load_runner(engine_config(tmp_path))


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


WINDOWED = {"use_sliding_window": True, "sliding_window": 7}


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"sliding_window": 7}, (None, None)),  # transformers' Llama knows no windows
        (MISTRAL, (4096, 4096)),
        ({**MISTRAL, "sliding_window": None}, (None, None)),
        (MIXTRAL, (None, None)),
        ({**MIXTRAL, "sliding_window": 7}, (7, 7)),
        ({**QWEN2, "sliding_window": 7}, (None, None)),  # not switched on
        ({**QWEN2, **WINDOWED, "max_window_layers": 1}, (None, 7)),
        ({**QWEN2, **WINDOWED, "max_window_layers": 0}, (7, 7)),
        ({**QWEN2, **WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}, (7, None)),
        ({**QWEN3_MOE, **WINDOWED}, (7, 7)),
        ({**SMOLLM3, **WINDOWED, "no_rope_layers": [0, 1]}, (7, None)),
    ],
)
def test_windows_by_family(change: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse_config({**BASE, **change}, Path("config.json")).windows == windows


def test_what_configs_leave_unsaid() -> None:
    def parsed(change: dict[str, Any]) -> LlamaArchitecture:
        return parse_config({**BASE, **change}, Path("config.json"))

    smollm3 = parsed({**SMOLLM3, "num_hidden_layers": 5})
    assert (smollm3.tied_embeddings, smollm3.rope.theta) == (True, 2e6)
    assert smollm3.rope_layers == (True, True, True, False, True)
    assert parsed(MIXTRAL).norm_eps == 1e-5
    qwen2 = parsed(QWEN2)
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    moe = parsed({**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}).moe
    assert moe is not None
    assert moe.layers == (False, True, False, False)
    assert (moe.num_experts, moe.experts_per_token, moe.norm_weights) == (128, 8, False)


def test_yarn_lengthens_what_a_sequence_may_be() -> None:
    config = parse_config({**BASE, "max_position_embeddings": 128, "rope_scaling": YARN}, Path("config.json"))
    assert config.max_position == 512
