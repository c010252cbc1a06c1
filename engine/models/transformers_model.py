"""Any causal language model of `transformers`, by its own modelling code, with K and V in the paged cache.

Only attention is ours: the modelling code calls `engine.models.transformers_attention` through transformers'
AttentionInterface. A step is one flat sequence of all tokens with their positions, so that each decoding sequence
feeds a single token. What cannot run so is refused when it is loaded.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from engine.attention import plan_attention
from engine.kv_cache import PagedKvCache
from engine.models.config import refuse_quantised
from engine.models.network import KvShape
from engine.models.packed_modules import pack_linears
from engine.models.transformers_attention import PAGED, PROBED, AttentionContext, PagedStep, Slot, register
from engine.models.transformers_probe import Recorder, check_paging, probe_tokens
from engine.step import StepInput, StepProgress
from pdcore.errors import ConfigError, ModelError, UnsupportedModel
from pdcore.types import KvGeometry

# Keys of a config.json that say nothing about a model's numbers.
_NOT_DESCRIPTIVE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class TransformersModel:
    """Weights and forward pass; an `engine.models.network.Network`.

    Attributes:
        architecture: name of its class. vocab_size: of the logits. max_len: positions are below this.
        kv_shape: of its K and V.
    """

    def __init__(
        self, folder: Path, raw: dict[str, Any], storage: torch.dtype, compute: torch.dtype, max_len: int | None
    ) -> None:
        """Load and check the model in `folder`, whose ``config.json`` is `raw`.

        Weights are rounded to `storage` dtype and kept in `compute` dtype.

        Args:
            max_len: positions are below this; None takes the model's own limit.

        Raises:
            UnsupportedModel: it cannot run this way; says why.
            ModelError: it cannot be read.
            ConfigError: `max_len` is more than the model can do, or missing where the model has no limit.
        """
        self._compute = compute
        register()
        config = _checked_config(folder, raw)
        self.max_len = _checked_length(config, max_len)
        _refuse_length_dependent_rope(config, self.max_len, folder)
        self._model: Any = _load(folder, storage).to(compute)
        self._slot = Slot(self._model)
        self.architecture = type(self._model).__name__
        self._keeps_rows = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        try:
            with torch.inference_mode():
                self._probe(int(config.num_hidden_layers))
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{folder}: {self.architecture} cannot run here: {error}") from error
        except Exception as error:  # whatever modelling code runs into that is not called as it expects
            raise UnsupportedModel(
                f"{folder}: {self.architecture} cannot run here: its code fails on a flat batch of tokens with their "
                f"positions: {error!r}"
            ) from error

    def forward(
        self,
        step: StepInput,
        token_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        *,
        cache: PagedKvCache,
        progress: StepProgress,
    ) -> torch.Tensor:
        """One step over T tokens; arguments and result as of `Network.forward`."""
        plans = {
            layer.window: plan_attention(step, cache, layer.shape, self._compute, layer.window)
            for layer in self._plan_layers
        }
        context = PagedStep(self._layers, plans, cache, progress)
        return self._call(token_ids, torch.from_numpy(step.positions), logit_rows, context).float()

    def _call(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Logits of `rows`."""
        wanted = {"logits_to_keep": rows} if self._keeps_rows else {}
        self._slot.context = context
        try:
            output = self._model(
                input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **wanted
            )
        finally:
            self._slot.context = None
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_rows else logits[rows]

    def _probe(self, num_layers: int) -> None:
        """Find out what the layers need, and check that the model does the same with paged attention as without."""
        recorder = Recorder(self.max_len)
        few = torch.arange(min(4, self.max_len))
        self._use(PROBED)
        logits = self._call(few, few, few[:1], recorder)
        self._layers = recorder.layers(num_layers)
        # Layers with the same window share a plan, which depends on the shape of K and V: alike in all of them.
        self._plan_layers = tuple({layer.window: layer for layer in reversed(self._layers)}.values())
        self.vocab_size = logits.shape[-1]
        shape = self._layers[0].shape
        self.kv_shape = KvShape(num_layers, shape.num_kv_heads, shape.head_dim)
        tokens = probe_tokens(self.max_len)
        expected = [self._own_logits(part) for part in tokens]
        pack_linears(self._model)  # before the comparison: who reads a weight by himself is found out
        check_paging(self._scratch_run, tokens, expected)

    def _scratch_run(self, step: StepInput) -> torch.Tensor:
        dtype = str(self._compute).removeprefix("torch.")
        geometry = KvGeometry("", *self.kv_shape, dtype, 8, len(step.block_tables))
        self._use(PAGED)
        token_ids, rows = torch.from_numpy(step.token_ids), torch.arange(len(step.token_ids))
        return self.forward(step, token_ids, rows, cache=PagedKvCache(geometry), progress=StepProgress())

    def _own_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        self._use("eager")
        logits: torch.Tensor = self._model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0]
        return logits

    def _use(self, attention: str) -> None:
        self._model.config._attn_implementation = attention


def transformers_digest(raw: dict[str, Any], fingerprint: str) -> str:
    """As `engine.loader.model_digest`, of a model that runs through transformers.

    Args:
        raw: contents of its ``config.json``. fingerprint: `WeightFiles.fingerprint`.
    """
    described = {
        key: value for key, value in raw.items() if key not in _NOT_DESCRIPTIVE and not key.endswith("_token_id")
    }
    text = json.dumps({"transformers": described}, sort_keys=True)
    return hashlib.sha256(f"{text}\n{fingerprint}".encode()).hexdigest()[:32]


def _checked_config(folder: Path, raw: dict[str, Any]) -> Any:
    """The `transformers.PreTrainedConfig` of a folder. Refuses what can be told from it."""
    refuse_quantised(raw, folder / "config.json")
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModel(f"{folder}: encoder-decoder models are not supported")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a config class runs into
        raise UnsupportedModel(f"{folder}: transformers cannot read this model's config: {error}") from error
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{folder}: encoder-decoder models are not supported")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{folder}: transformers has no causal language model of type {config.model_type!r}")
    if config.get_text_config() is not config:
        raise UnsupportedModel(f"{folder}: {config.model_type!r} is more than a text model, which is not supported")
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    named = raw.get("architectures") or [architecture.__name__]
    if architecture.__name__ not in named:
        raise UnsupportedModel(
            f"{folder}: this is a checkpoint of {', '.join(named)}, not of {architecture.__name__}"
        )
    if architecture._is_stateful:
        raise UnsupportedModel(
            f"{folder}: {architecture.__name__} keeps a state that is no K and V of attention; state-space and "
            "hybrid models are not supported"
        )
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if unknown:
        raise UnsupportedModel(f"{folder}: layers of type {', '.join(unknown)} are not supported")
    # Not every model that goes through the interface says so.
    if not (architecture._supports_attention_backend or architecture._can_set_attn_implementation()):
        raise UnsupportedModel(
            f"{folder}: the attention of {architecture.__name__} does not go through transformers' AttentionInterface"
        )
    return config


def _checked_length(config: Any, max_len: int | None) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        if max_len is None:
            raise ConfigError("engine.max_model_len", None, "a number, for this model's config names no limit")
        return max_len
    if max_len is not None and max_len > limit:
        raise ConfigError("engine.max_model_len", max_len, f"at most {limit}, the limit of this model")
    return max_len or limit


def _refuse_length_dependent_rope(config: Any, max_len: int, folder: Path) -> None:
    """KV is reused and moved, so that it may not depend on how long a sequence, or another in the batch, becomes.

    Dynamic scaling begins beyond the model's own limit, which `max_len` keeps.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        original = part.get("original_max_position_embeddings")
        if part.get("rope_type") == "longrope" and original is not None and max_len > original:
            raise UnsupportedModel(
                f"{folder}: its rotary embeddings (longrope) change for all positions once a sequence is longer than "
                f"{original} tokens; set max_model_len to at most that"
            )


def _load(folder: Path, storage: torch.dtype) -> Any:
    """A `transformers.PreTrainedModel`."""
    transformers_logging.disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    try:
        model, report = auto.from_pretrained(
            folder, dtype=storage, attn_implementation=PAGED, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # whatever a model class runs into
        raise ModelError(f"{folder}: transformers cannot load this model: {error}") from error
    for kind in ("missing_keys", "unexpected_keys"):
        names = sorted(report[kind])
        if names:
            raise ModelError(f"{folder}: {len(names)} {kind.replace('_', ' ')} in the weights, e.g. {names[0]}")
    model.eval()
    return model
