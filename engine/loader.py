"""Loads a model from a Hugging Face folder into a runner: by a native implementation, or through transformers."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine.linear import compute_dtype
from engine.models.config import LlamaConfig, parse_config, read_raw_config
from engine.models.llama import LlamaModel
from engine.models.network import KvShape, Network
from engine.runner import CpuModelRunner
from engine.weights import WeightFiles
from pdcore.config import EngineConfig
from pdcore.errors import ConfigError, UnsupportedModel
from pdcore.types import KvGeometry, ModelInfo

logger = logging.getLogger(__name__)


def load_runner(config: EngineConfig) -> CpuModelRunner:
    """Read, check and pack the model of `config.model_path`, and allocate its KV pool.

    Sets no thread count: that is process-wide, and belongs to whoever owns the process.

    Raises:
        ModelError: the model cannot be read.
        UnsupportedModel: it can be read, but not run as `config.model_impl` asks; says why.
        ConfigError: `config` asks for more than the model can do.
    """
    folder = Path(config.model_path)
    raw = read_raw_config(folder)
    unsupported = None
    if config.model_impl != "transformers":
        try:
            architecture = parse_config(raw, folder / "config.json")
        except UnsupportedModel as error:
            if config.model_impl == "native":
                raise
            unsupported = error
        else:
            return _load_native(config, architecture)
    try:
        return _load_through_transformers(config, raw)
    except UnsupportedModel as error:
        reason = str(error) if unsupported is None else f"{error}. There is no native implementation: {unsupported}"
        raise UnsupportedModel(reason) from error


def _load_native(config: EngineConfig, architecture: LlamaConfig) -> CpuModelRunner:
    folder = Path(config.model_path)
    max_len = config.max_model_len or architecture.max_position
    if max_len > architecture.max_position:
        raise ConfigError(
            "engine.max_model_len", max_len, f"at most {architecture.max_position}, the limit of this model"
        )
    weights = WeightFiles(folder)
    storage: torch.dtype = getattr(torch, config.dtype)
    with torch.inference_mode():
        network = LlamaModel(architecture, weights, storage, compute_dtype(storage), max_len)
    model = ModelInfo(
        config.served_name, model_digest(architecture, weights), max_len, architecture.vocab_size, config.dtype
    )
    shape = KvShape(architecture.num_layers, architecture.num_kv_heads, architecture.head_dim)
    return _runner(config, network, model, shape)


def _load_through_transformers(config: EngineConfig, raw: dict[str, Any]) -> CpuModelRunner:
    # Imported here, for it takes seconds, and models with an implementation of their own do without.
    from engine.models.transformers_model import TransformersModel, transformers_digest

    folder = Path(config.model_path)
    digest = transformers_digest(raw, WeightFiles(folder).fingerprint())
    storage: torch.dtype = getattr(torch, config.dtype)
    network = TransformersModel(folder, raw, storage, compute_dtype(storage), config.max_model_len)
    logger.info("%s runs through transformers' own code, %s", config.served_name, network.architecture)
    model = ModelInfo(config.served_name, digest, network.max_len, network.vocab_size, config.dtype)
    return _runner(config, network, model, network.kv_shape)


def _runner(config: EngineConfig, network: Network, model: ModelInfo, shape: KvShape) -> CpuModelRunner:
    geometry = KvGeometry(
        model_digest=model.digest,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
    )
    return CpuModelRunner(network, model, geometry, config.scheduler.max_num_seqs)


def model_digest(architecture: LlamaConfig, weights: WeightFiles) -> str:
    """Hex digest of what decides a model's KV, but for the type it is computed in: architecture with rope parameters,
    and weights.

    It does not depend on where the files are, how they are split, or on anything of the machine.
    """
    described = json.dumps({"architecture": asdict(architecture)}, sort_keys=True)
    return hashlib.sha256(f"{described}\n{weights.fingerprint()}".encode()).hexdigest()[:32]
