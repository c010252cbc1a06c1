"""Small random checkpoints of any model that `transformers` knows, written as it writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 512


def tiny_checkpoint(path: Path, model_type: str, *, seed: int = 0, **config: Any) -> Path:
    """Write a random causal language model into `path`; returns `path`. There is no tokenizer.

    Args:
        model_type: as in ``config.json``. seed: of the weights; equal arguments give equal files.
        config: over a base of 2 layers, 4 heads on 2 KV heads of 16 numbers, hidden size 64 and `VOCAB` tokens.
    """
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **config,
    }
    made = CONFIG_MAPPING[model_type](**{key: value for key, value in settings.items() if value is not ...})
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    _randomise(model, seed)
    model.save_pretrained(path)
    return path


def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Scales that keep activations near unit size and logits spread out, so that greedy choices are not near-ties."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed" in name or "wte" in name or "wpe" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(parameter.mean() + 0.1 * noise)  # norms stay near one, biases near zero
            else:
                parameter.copy_(1.5 * parameter.shape[-1] ** -0.5 * noise)
