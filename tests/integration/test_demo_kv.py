"""What the lossless codecs save on KV of the demo model over a real text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from cluster.codec_quality.samples import evaluation_texts
from engine.engine import Engine
from engine.loader import load_runner
from engine.sequence import SequenceKind
from kv_transfer.codecs.base import Codec, SectionShape
from kv_transfer.codecs.bexp3 import Bexp3Codec
from kv_transfer.codecs.bexp_zstd import BexpZstdCodec
from kv_transfer.frames import KIND_K, KIND_V
from pdcore.config import EngineConfig, SchedulerConfig
from pdcore.types import RequestKey, RequestSpec, SamplingParams

pytestmark = pytest.mark.model

TOKENS = 768


@pytest.fixture(scope="module")
def kv(demo_model: Path) -> torch.Tensor:
    """bfloat16 [layers, 2, tokens, heads, dim]."""
    text = "\n\n".join(evaluation_texts().values())
    ids = AutoTokenizer.from_pretrained(demo_model)(text)["input_ids"][:TOKENS]
    config = EngineConfig(
        model_path=str(demo_model),
        served_name="demo",
        dtype="bfloat16",
        num_blocks=TOKENS // 16 + 2,
        threads=1,
        scheduler=SchedulerConfig(max_num_batched_tokens=512, prefill_chunk_tokens=512),
    )
    runner = load_runner(config)
    engine = Engine(runner, config)
    key = RequestKey("kv", 0)
    engine.add(RequestSpec(key, tuple(ids), SamplingParams(max_tokens=1, temperature=0.0)), SequenceKind.PREFILL)
    while (plan := engine.schedule()) is not None:
        engine.apply(plan, engine.execute(plan))
    blocks = engine.block_table(key)
    assert blocks is not None
    return runner.cache.gather(0, runner.geometry.num_layers, blocks, 0, TOKENS)


@pytest.mark.parametrize(
    ("codec", "tokens", "at_least"),
    [(BexpZstdCodec(), 256, 1.45), (Bexp3Codec(), 16, 1.37), (Bexp3Codec(), 64, 1.41)],
)
def test_ratio(kv: torch.Tensor, codec: Codec, tokens: int, at_least: float, tell: Callable[[str], None]) -> None:
    raw = payload = 0
    layers, _, _, heads, dim = kv.shape
    for layer in range(layers):
        for start in range(0, TOKENS, tokens):
            for kind in (KIND_K, KIND_V):
                part = kv[layer : layer + 1, kind, start : start + tokens].contiguous()
                section = part.view(torch.uint8).numpy().reshape(-1)
                shape = SectionShape(kind, "bfloat16", layer, 1, start, tokens, 0, heads, dim)
                encoded = codec.encode(section, shape)
                data = section.tobytes() if encoded is None else b"".join(encoded)
                raw += section.size
                payload += len(data)
                if encoded is not None:
                    out = np.empty_like(section)
                    codec.decode(memoryview(data), shape, out)
                    assert (out == section).all()
    tell(f"{codec.name}, sections of {tokens} tokens: {raw / payload:.4f}")
    assert raw / payload >= at_least
