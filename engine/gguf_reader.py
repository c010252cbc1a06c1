"""Reads GGUF files of Llama-family models as Hugging Face configuration and tensors.

The container format is parsed here, with every length checked against the file, so that a truncated or foreign file
gives an error that names it. The quantisation formats themselves are left to the `gguf` package.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pdcore.errors import ModelError

if TYPE_CHECKING:
    import torch

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # per-frequency divisors: how GGUF writes llama3 rope scaling
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place in the file. `shape` is in row-major order (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # from the start of the file
    num_bytes: int


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name, data by memory map. A context manager."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError` naming the file if it is no GGUF, is cut short, or holds unknown types."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise ModelError(f"{path}: cannot read this GGUF file: {error}") from error
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file. Arrays handed out by `dequantised` stay valid: they are copies."""
        self._map.close()

    def dequantised(self, name: str) -> NDArray[np.float32]:
        """The tensor `name` in float32, in its row-major shape."""
        gguf = _gguf_package(self.path)
        tensor = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        try:
            values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(tensor.type_id))
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: tensor {name}: {error}") from error
        # A copy, for otherwise a view of float32 data would keep the map from closing.
        return np.array(values, dtype=np.float32, copy=True).reshape(tensor.shape)

    def _parse(self) -> None:
        self._cursor = 0
        if self._map[:4] != _MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file (it starts with {bytes(self._map[:4])!r})")
        self._cursor = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported; supported: 2, 3 (little-endian)")
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_fields):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}; it must be a whole number from 1")
        start = -(-self._cursor // alignment) * alignment
        for name, shape, type_id, offset in infos:
            num_bytes = self._byte_size(name, shape, type_id)
            if start + offset + num_bytes > len(self._map):
                raise self._truncated(f"tensor {name} ends at byte {start + offset + num_bytes}")
            self.tensors[name] = GgufTensor(name, shape, type_id, start + offset, num_bytes)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ModelError(f"{self.path}: tensor {name} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _byte_size(self, name: str, shape: tuple[int, ...], type_id: int) -> int:
        gguf = _gguf_package(self.path)
        try:
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{self.path}: tensor {name} has the unknown type {type_id}") from error
        if shape[-1] % block:
            raise ModelError(f"{self.path}: tensor {name}: rows of {shape[-1]} do not divide into blocks of {block}")
        return math.prod(shape) // int(block) * int(block_bytes)

    def _take(self, num_bytes: int) -> bytes:
        end = self._cursor + num_bytes
        if end > len(self._map):
            raise self._truncated(f"its header needs byte {end}")
        data = self._map[self._cursor : end]
        self._cursor = end
        return data

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", errors="replace")

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            item_type, count = self._scalar("I"), self._scalar("Q")
            if item_type in _SCALARS:
                code = _SCALARS[item_type]
                return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))
            if item_type == _STRING:
                return [self._string() for _ in range(count)]
        if type_id in _SCALARS:
            return self._scalar(_SCALARS[type_id])
        raise ModelError(f"{self.path}: metadata of the unknown type {type_id} at byte {self._cursor}")

    def _truncated(self, why: str) -> ModelError:
        return ModelError(f"{self.path}: this GGUF file is truncated: {why}, but it has {len(self._map)} bytes")


def _gguf_package(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ModelError(f"{path}: reading GGUF files needs the package gguf; run: pip install gguf") from error
    return gguf


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The contents of ``config.json`` for a Llama-family GGUF file.

    Raises `ModelError` for another architecture, for experts, and for rope scaling that has no counterpart.
    """
    meta = file.metadata
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{file.path}: architecture {architecture!r} is not supported; supported: 'llama'")
    if meta.get("llama.expert_count", 0):
        raise ModelError(f"{file.path}: mixture-of-experts models are not supported")

    def need(key: str) -> Any:
        if key not in meta:
            raise ModelError(f"{file.path}: the metadata lacks {key}")
        return meta[key]

    heads, hidden = need("llama.attention.head_count"), need("llama.embedding_length")
    if not isinstance(heads, int) or heads < 1:
        raise ModelError(f"{file.path}: llama.attention.head_count is {heads!r}; it must be a whole number from 1")
    head_dim = meta.get("llama.attention.key_length", hidden // heads)
    if meta.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path}: partial rotary embeddings are not supported")
    vocab = meta.get("llama.vocab_size") or len(need("tokenizer.ggml.tokens"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": need("llama.feed_forward_length"),
        "num_hidden_layers": need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "max_position_embeddings": need("llama.context_length"),
        "rms_norm_eps": need("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "torch_dtype": "bfloat16",
        **{f"{kind}_token_id": meta[key] for kind, key in _special_ids(meta)},
    }
    scaling = _rope_scaling(file, float(config["rope_theta"]), int(head_dim))
    return config if scaling is None else {**config, "rope_scaling": scaling}


def end_token_ids(file: GgufFile) -> list[int]:
    """Tokens that end a turn, as the file names them; the end-of-sequence token first."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return list(dict.fromkeys(int(file.metadata[key]) for key in keys if key in file.metadata))


def hf_tensors(file: GgufFile, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its Hugging Face name, dequantised and rounded to bfloat16, one at a time.

    Raises `ModelError` for a tensor that this model family does not have.
    """
    import torch  # seconds: whoever only looks for a model, or reads what a file says, does without

    for source in file.tensors:
        if source == _ROPE_FACTORS:
            continue
        values = file.dequantised(source)
        match = _LAYER_TENSOR.fullmatch(source)
        if match and match[2] in _LAYER_NAMES:
            if match[2] == "attn_q":
                values = _undo_pairing(values, config["num_attention_heads"])
            elif match[2] == "attn_k":
                values = _undo_pairing(values, config["num_key_value_heads"])
            name = f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
        elif source in _GLOBAL_NAMES:
            name = _GLOBAL_NAMES[source]
        else:
            raise ModelError(f"{file.path}: tensor {source} does not belong to a Llama model")
        yield name, torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


def _undo_pairing(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF keeps the two members of a rotated pair next to each other; Hugging Face keeps them half a head apart."""
    paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _special_ids(meta: dict[str, Any]) -> list[tuple[str, str]]:
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding"}
    pairs = [(kind, f"tokenizer.ggml.{word}_token_id") for kind, word in kinds.items()]
    return [(kind, key) for kind, key in pairs if key in meta]


def _rope_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        factor = file.metadata.get("llama.rope.scaling.factor")
        if not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise ModelError(
                f"{file.path}: linear rope scaling needs a positive llama.rope.scaling.factor, not {factor!r}"
            )
        return {"rope_type": "linear", "factor": float(factor)}
    if kind != "none":
        raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; supported: none, linear, llama3")
    if _ROPE_FACTORS not in file.tensors:
        return None
    # The file keeps only the divisors. llama3 models all use these three settings; check that they give the divisors.
    divisors = file.dequantised(_ROPE_FACTORS).astype(np.float64)
    from engine.models.rope import RopeConfig, inverse_frequencies

    rope = RopeConfig("llama3", theta, float(divisors.max()), 1.0, 4.0, 8192)
    plain = RopeConfig("default", theta)
    expected = (inverse_frequencies(plain, head_dim) / inverse_frequencies(rope, head_dim)).numpy()
    if expected.shape != divisors.shape or not np.allclose(expected, divisors, rtol=1e-4):
        raise ModelError(f"{file.path}: its rope frequency factors are not those of llama3 scaling")
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }
