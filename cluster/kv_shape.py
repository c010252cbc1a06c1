"""The shape of a model's KV, from its folder alone: what memory is planned by before there is a worker."""

from __future__ import annotations

import json
from pathlib import Path

from pdcore.errors import ModelError
from pdcore.types import KvGeometry


def kv_bytes_per_token(model_path: Path, dtype: str) -> int:
    """Bytes of K and V that one token takes over all layers; errors as for `kv_shape`."""
    return kv_shape(model_path, dtype).bytes_per_token


def kv_shape(model_path: Path, dtype: str) -> KvGeometry:
    """The shape of a model's KV, from the model folder's ``config.json``; neither digest nor blocks are known.

    Raises:
        ModelError: the file cannot be read or lacks the shape.
    """
    try:
        shape = json.loads((model_path / "config.json").read_text())
        if isinstance(shape, dict) and "num_attention_heads" not in shape:
            shape = _shape_by_transformers(model_path)
        heads = shape["num_attention_heads"]
        return KvGeometry(
            model_digest="",
            num_layers=shape["num_hidden_layers"],
            num_kv_heads=shape.get("num_key_value_heads") or heads,
            head_dim=shape.get("head_dim") or shape["hidden_size"] // heads,
            dtype=dtype,
            block_size=1,
            num_blocks=1,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{model_path / 'config.json'} does not give the model's shape: {error!r}") from error


def _shape_by_transformers(model_path: Path) -> dict[str, int]:
    """Of a model whose config has names of its own for these things, e.g. ``n_head``."""
    from transformers import AutoConfig  # here, for it takes seconds and few models need it

    config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    return {key: value for key in keys if (value := getattr(config, key, None)) is not None}
