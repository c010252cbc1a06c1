"""A prompt's KV through a codec, cut into sections as a transfer cuts it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kv_transfer.codecs.base import Codec, SectionShape
from kv_transfer.frames import KIND_K, KIND_V
from kv_transfer.manifest import FrameSpan
from kv_transfer.planning import FramePlanner
from pdcore.config import SchedulerConfig, TransferConfig
from pdcore.types import KvGeometry


@dataclass(frozen=True, slots=True)
class Coded:
    """What became of a prompt's KV.

    Attributes:
        kv: as it was given, but decoded.
        raw_bytes, payload_bytes: of all sections; frame headers are not counted.
        encode_s, decode_s: processor time of this thread within the codec.
    """

    kv: torch.Tensor
    raw_bytes: int
    payload_bytes: int
    encode_s: float
    decode_s: float


def through_codec(kv: torch.Tensor, geometry: KvGeometry, codec: Codec) -> Coded:
    """Encode and decode `kv`, [layers, 2, tokens, heads, dim] from position 0 on, in ``geometry.dtype``."""
    out = torch.empty_like(kv)
    source, target = kv.view(torch.uint8).numpy(), out.view(torch.uint8).numpy()
    payload_bytes, encode_s, decode_s = 0, 0.0, 0.0
    for span in _spans(geometry, kv.shape[2]):
        layers = slice(span.layer_start, span.layer_start + span.layer_count)
        tokens = slice(span.token_start, span.token_start + span.token_count)
        for kind in (KIND_K, KIND_V):
            shape = SectionShape(kind, geometry.dtype, *span, 0, geometry.num_kv_heads, geometry.head_dim)
            values = np.ascontiguousarray(source[layers, kind, tokens]).reshape(-1)
            started = time.thread_time()
            parts = codec.encode(values, shape)
            encode_s += time.thread_time() - started
            if parts is None:  # sent raw
                payload_bytes += values.size
                target[layers, kind, tokens] = source[layers, kind, tokens]
                continue
            payload = memoryview(b"".join(parts))
            payload_bytes += len(payload)
            decoded = np.empty_like(values)
            started = time.thread_time()
            codec.decode(payload, shape, decoded)
            decode_s += time.thread_time() - started
            target[layers, kind, tokens] = decoded.reshape(source[layers, kind, tokens].shape)
    return Coded(out, source.nbytes, payload_bytes, encode_s, decode_s)


def _spans(geometry: KvGeometry, tokens: int) -> Iterator[FrameSpan]:
    """The frames of a prompt with the default configuration: prefilled chunk by chunk, sent layer by layer."""
    config, chunk = TransferConfig(), SchedulerConfig().prefill_chunk_tokens
    planner = FramePlanner(
        geometry.num_layers,
        0,
        tokens,
        config.frame_tokens,
        config.frame_bytes,
        geometry.bytes_per_token // geometry.num_layers,
    )
    for end in range(chunk, tokens + chunk, chunk):
        planner.computed_to(end)
        while (span := planner.next_span()) is not None:
            planner.take(span)
            yield span
