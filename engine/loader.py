"""Loads a model from a Hugging Face folder into a runner."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch

from engine.linear import compute_dtype
from engine.models.config import LlamaConfig, read_config
from engine.models.llama import LlamaModel
from engine.runner import CpuModelRunner
from engine.weights import WeightFiles
from pdcore.config import EngineConfig
from pdcore.errors import ConfigError
from pdcore.types import KvGeometry, ModelInfo


def load_runner(config: EngineConfig) -> CpuModelRunner:
    """Read, check and pack the model of `config.model_path`, and allocate its KV pool.

    Sets no thread count: that is process-wide, and belongs to whoever owns the process.

    Raises:
        ModelError: the model cannot be read, or is not of a supported kind.
        ConfigError: `config` asks for more than the model can do.
    """
    folder = Path(config.model_path)
    architecture = read_config(folder)
    max_len = config.max_model_len or architecture.max_position
    if max_len > architecture.max_position:
        raise ConfigError(
            "engine.max_model_len", max_len, f"at most {architecture.max_position}, the limit of this model"
        )
    weights = WeightFiles(folder)
    storage: torch.dtype = getattr(torch, config.dtype)
    digest = model_digest(architecture, weights)
    with torch.inference_mode():
        network = LlamaModel(architecture, weights, storage, compute_dtype(storage), max_len)
    model = ModelInfo(config.served_name, digest, max_len, architecture.vocab_size, config.dtype)
    geometry = KvGeometry(
        model_digest=digest,
        num_layers=architecture.num_layers,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
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
