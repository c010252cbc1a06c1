"""How fast this process packs and unpacks KV: stated defaults, and a quick look at the start of a worker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from kv_transfer.codecs.base import Codec
from kv_transfer.codecs.registry import CodecRegistry
from kv_transfer.conversion import TORCH_DTYPES
from kv_transfer.frames import FrameLimits, decode_header, wire_name
from kv_transfer.manifest import FrameSpan, TicketRef
from kv_transfer.packing import pack_frame, unpack_frame
from pdcore.costs import CodecCost
from pdcore.types import DTYPE_BYTES, KvGeometry, RequestKey

# Raw to wire bytes on KV of real models and texts (bfloat16; the others by dtype below). Not what synthetic KV gives:
# a codec that is not used is not measured, and must not be ruled out for ever by a wrong guess.
_RATIOS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "raw": 1.0,
        "zstd": 1.27,
        "bexp-zstd": 1.47,
        "bexp3": 1.39,
        "q8": 1.94,
        "q8-zstd": 2.2,
        "k6v4": 2.8,
        "k4v4": 3.4,
        "tc4": 4.0,
        "fp8": 1.94,
    }
)
_OTHER_RATIOS: Final[Mapping[tuple[str, str], float]] = MappingProxyType(
    {("bexp-zstd", "float16"): 1.16, ("zstd", "float16"): 1.1, ("zstd", "float32"): 1.09}
)
# Bytes per second of one core: whole frames, checksums included.
_RATES: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "raw": (2.5e9, 2.5e9),
        "zstd": (0.3e9, 0.8e9),
        "bexp-zstd": (0.5e9, 1.0e9),
        "bexp3": (2e9, 2e9),
        "q8": (0.5e9, 0.8e9),
        "q8-zstd": (0.3e9, 0.6e9),
        "k6v4": (0.3e9, 0.4e9),
        "k4v4": (0.3e9, 0.4e9),
        "tc4": (0.1e9, 0.1e9),
        "fp8": (0.3e9, 0.5e9),
    }
)
_LOOKS = 3
_MORE_LOOKS = 20  # while they take no longer than `_LOOK_S` together: on a busy machine most of them are interrupted
_LOOK_S = 0.02
_FRAME_BYTES = 256 << 10


def assumed_costs(codecs: CodecRegistry, dtype: str) -> dict[str, CodecCost]:
    """What to expect of the codecs that can pack `dtype`, by plain name, before anything was measured."""
    costs = {}
    for codec in codecs:
        if dtype not in codec.dtypes:
            continue
        ratio = _OTHER_RATIOS.get((codec.name, dtype), _RATIOS[codec.name])
        if not codec.lossless:
            ratio *= DTYPE_BYTES[dtype] / DTYPE_BYTES["bfloat16"]
        costs[codec.name] = CodecCost(codec.name, ratio, *_RATES[codec.name], lossless=codec.lossless)
    return costs


def quick_costs(codecs: CodecRegistry, geometry: KvGeometry) -> dict[str, CodecCost]:
    """As `assumed_costs`, with the speeds that this process shows now; lossless codecs only are looked at.

    Takes about a tenth of a second: the best of some frames of synthetic KV.
    """
    costs = assumed_costs(codecs, geometry.dtype)
    values, span = _synthetic_frame(geometry)
    for codec in codecs:
        cost = costs.get(codec.name)
        if cost is not None and codec.lossless:
            encode_s, decode_s = _seconds(codec, codecs, values, span, geometry)
            raw_bytes = values.numel() * values.element_size()
            costs[codec.name] = replace(
                cost, encode_bytes_s=raw_bytes / encode_s, decode_bytes_s=raw_bytes / decode_s
            )
    return costs


def _synthetic_frame(geometry: KvGeometry) -> tuple[torch.Tensor, FrameSpan]:
    """Numbers whose channels differ in size, as those of KV do, [layers, 2, tokens, heads, head_dim]."""
    layer_token = 2 * geometry.num_kv_heads * geometry.head_dim
    tokens = max(1, min(128, _FRAME_BYTES // (layer_token * DTYPE_BYTES[geometry.dtype])))
    layers = max(1, min(geometry.num_layers, _FRAME_BYTES // (tokens * layer_token * DTYPE_BYTES[geometry.dtype])))
    draw = np.random.default_rng(7)
    shape = (layers, 2, tokens, geometry.num_kv_heads, geometry.head_dim)
    scales = np.exp(draw.normal(0.0, 0.7, (layers, 2, 1, *shape[3:])))
    values = torch.from_numpy((draw.normal(size=shape) * scales).astype(np.float32))
    return values.to(TORCH_DTYPES[geometry.dtype]), FrameSpan(0, layers, 0, tokens)


def _seconds(
    codec: Codec, codecs: CodecRegistry, values: torch.Tensor, span: FrameSpan, geometry: KvGeometry
) -> tuple[float, float]:
    """The least time to pack and to unpack the frame."""
    limits = FrameLimits.for_ticket(
        ref=TicketRef(0, 1),
        key=RequestKey("codec speed", 0),
        geometry=geometry,
        token_start=0,
        token_end=span.token_count,
        codecs=(wire_name(codec.name, codec.calibration),),
    )
    encode_s: list[float] = []
    decode_s: list[float] = []
    end = time.perf_counter() + _LOOK_S
    while len(encode_s) < _LOOKS or (len(encode_s) < _MORE_LOOKS and time.perf_counter() < end):
        started = time.perf_counter()
        frame = memoryview(pack_frame(values, limits, span, codec).data)
        packed = time.perf_counter()
        unpack_frame(frame, decode_header(frame, limits), codecs)
        encode_s.append(packed - started)
        decode_s.append(time.perf_counter() - packed)
    return min(encode_s), min(decode_s)
