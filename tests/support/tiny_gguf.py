"""A small random Llama model as a GGUF file, written the way that conversion tools write them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from engine.models.rope import RopeConfig, inverse_frequencies

HEADS, KV_HEADS, HIDDEN, INNER, LAYERS = 4, 2, 64, 96, 2


def write_tiny_gguf(path: Path, *, seed: int = 0, llama3_rope: bool = False, architecture: str = "llama") -> Path:
    """Write the file, with F32, F16, Q8_0, Q4_0 and Q4_1 tensors and a byte-level tokenizer; returns `path`."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "ab", "<|bos|>", "<|eos|>", "<|turn|>"]
    tokens += [f"<|filler_{index}|>" for index in range(320 - len(tokens))]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([control if token.startswith("<|") else normal for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_eot_token_id(259)
    writer.add_pad_token_id(258)
    writer.add_chat_template("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")

    kinds = gguf.GGMLQuantizationType

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = kinds.F32) -> None:
        values = random.standard_normal(shape, dtype=np.float32) * (0.1 if len(shape) > 1 else 1.0)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    kv_rows = HIDDEN // HEADS * KV_HEADS
    add("token_embd.weight", len(tokens), HIDDEN, kind=kinds.Q8_0)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        add(prefix + "attn_norm.weight", HIDDEN)
        add(prefix + "ffn_norm.weight", HIDDEN)
        add(prefix + "attn_q.weight", HIDDEN, HIDDEN, kind=kinds.Q4_1)
        add(prefix + "attn_k.weight", kv_rows, HIDDEN, kind=kinds.Q4_0)
        add(prefix + "attn_v.weight", kv_rows, HIDDEN, kind=kinds.F16)
        add(prefix + "attn_output.weight", HIDDEN, HIDDEN, kind=kinds.Q8_0)
        add(prefix + "ffn_gate.weight", INNER, HIDDEN, kind=kinds.Q4_1)
        add(prefix + "ffn_up.weight", INNER, HIDDEN, kind=kinds.BF16)
        add(prefix + "ffn_down.weight", HIDDEN, INNER)
    if llama3_rope:
        plain = inverse_frequencies(RopeConfig("default", 10000.0), HIDDEN // HEADS)
        scaled = inverse_frequencies(RopeConfig("llama3", 10000.0, 8.0, 1.0, 4.0, 8192), HIDDEN // HEADS)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
