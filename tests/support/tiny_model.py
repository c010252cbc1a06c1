"""A small random Llama checkpoint with its own tokenizer, written as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, EOS = "<|bos|>", "<|eos|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def tiny_llama(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 3,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    max_len: int = 2048,
    dtype: str = "float32",
    tie: bool = True,
    **config_extra: object,
) -> Path:
    """Write a random Llama checkpoint and a byte-level tokenizer into `path`; returns `path`.

    Args:
        seed: of the weights; equal arguments give equal files.
        hidden: model width; head dim is ``hidden // heads`` unless `config_extra` has ``head_dim``.
        vocab: at least 258: 256 bytes, ``<|bos|>`` (id 256), ``<|eos|>`` (257), fillers after that.
        max_len: ``max_position_embeddings``.
        dtype: dtype of the stored weights.
        tie: whether the output head is the embedding.
        config_extra: more keys for ``config.json``; ``attention_bias``, ``mlp_bias`` and ``head_dim``
            change the weights.
    """
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": dtype,
        **config_extra,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": 257}))
    save_file(_weights(config, seed, getattr(torch, dtype)), path / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(vocab, max_len).save_pretrained(path)
    return path


def _weights(config: dict[str, object], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, inner, head_dim = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    q_out, kv_out = size["num_attention_heads"] * head_dim, size["num_key_value_heads"] * head_dim

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    # Scales that keep activations near unit size and logits spread out, so that greedy choices are not near-ties.
    tensors = {
        "model.embed_tokens.weight": normal(size["vocab_size"], hidden, scale=0.5),
        "model.norm.weight": 1 + normal(hidden, scale=0.1),
    }
    if not size["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(size["vocab_size"], hidden, scale=0.5)
    projections = [
        ("self_attn.q_proj", q_out, hidden, size["attention_bias"]),
        ("self_attn.k_proj", kv_out, hidden, size["attention_bias"]),
        ("self_attn.v_proj", kv_out, hidden, size["attention_bias"]),
        ("self_attn.o_proj", hidden, q_out, size["attention_bias"]),
        ("mlp.gate_proj", inner, hidden, size["mlp_bias"]),
        ("mlp.up_proj", inner, hidden, size["mlp_bias"]),
        ("mlp.down_proj", hidden, inner, size["mlp_bias"]),
    ]
    for layer in range(size["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows, columns, bias in projections:
            tensors[f"{prefix}{name}.weight"] = normal(rows, columns, scale=1.5 * columns**-0.5)
            if bias:
                tensors[f"{prefix}{name}.bias"] = normal(rows, scale=0.1)
        tensors[prefix + "input_layernorm.weight"] = 1 + normal(hidden, scale=0.1)
        tensors[prefix + "post_attention_layernorm.weight"] = 1 + normal(hidden, scale=0.1)
    return tensors


def _tokenizer(vocab: int, max_len: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: every byte is a token, so any text round-trips."""
    if vocab < 258:
        raise ValueError(f"vocab must be at least 258, got {vocab}")
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), BOS, EOS]
    tokens += [f"<|filler_{index}|>" for index in range(vocab - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
