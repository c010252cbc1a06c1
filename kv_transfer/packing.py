"""KV tensors to frames and back: the codecs' and the header's parts put together."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kv_transfer.codecs.base import Buffer, Codec
from kv_transfer.codecs.registry import CODECS
from kv_transfer.frames import (
    HEADER_BYTES,
    FrameHeader,
    FrameLimits,
    Section,
    encode_header,
    section_offsets,
)
from kv_transfer.manifest import FrameSpan
from pdcore.errors import FrameError

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class PackedFrame:
    """A frame ready for the wire. `checksums` are its sections', for the manifest."""

    data: bytes
    checksums: tuple[int, ...]


def pack_frame(values: torch.Tensor, limits: FrameLimits, span: FrameSpan, codec: Codec) -> PackedFrame:
    """Encode what `KvStore.gather` returned.

    Args:
        values: contiguous CPU tensor [layer_count, 2, token_count, heads, head_dim] of ``limits.dtype``.
        limits: the ticket's. span: what `values` covers. codec: used where it pays, raw elsewhere.
    """
    raw_bytes = limits.section_bytes(span)
    sections = _section_bytes(values)
    assert all(section.size == raw_bytes for section in sections), (values.shape, span)
    parts: list[list[Buffer]] = []
    table: list[tuple[str, int, int]] = []
    for section in sections:
        encoded = codec.encode(section, limits.dtype)
        used = codec.name if encoded is not None else "raw"
        payload: list[Buffer] = list(encoded) if encoded is not None else [section.data]
        parts.append(payload)
        table.append((used, sum(len(part) for part in payload), zlib.crc32(section.data)))
    chunks: list[Buffer] = [encode_header(limits, span, codec.name, tuple(table))]
    position = HEADER_BYTES
    for payload, (_, size, _), offset in zip(parts, table, section_offsets(tuple(t[1] for t in table)), strict=True):
        chunks.append(bytes(offset - position))
        chunks.extend(payload)
        position = offset + size
    return PackedFrame(b"".join(chunks), tuple(checksum for _, _, checksum in table))


def unpack_frame(frame: memoryview, header: FrameHeader) -> torch.Tensor:
    """Decode and verify the payloads of a frame whose header `decode_header` accepted.

    Returns:
        Contiguous tensor [layer_count, 2, token_count, heads, head_dim], as `KvStore.scatter` takes it.

    Raises:
        FrameError: a payload does not decode, or its decoded bytes do not have the announced checksum.
    """
    span = header.span
    # One layer: K and V lie behind each other as the result wants them. Several: they interleave, one more copy.
    # numpy, not torch: a torch copy would start a thread pool of its own beside the engine's.
    planes = np.empty((2, span.layer_count, header.sections[0].raw_bytes // span.layer_count), np.uint8)
    for section in header.sections:
        _decode_section(frame, section, header.dtype, planes[section.kind].reshape(-1))
    values = torch.from_numpy(np.ascontiguousarray(planes.swapaxes(0, 1)).reshape(-1)).view(
        TORCH_DTYPES[header.dtype]
    )
    return values.view(span.layer_count, 2, span.token_count, header.head_count, header.head_dim)


def _decode_section(frame: memoryview, section: Section, dtype: str, out: NDArray[np.uint8]) -> None:
    payload = frame[section.offset : section.offset + section.payload_bytes]
    CODECS[section.codec].decode(payload, dtype, out)
    if zlib.crc32(out.data) != section.checksum:
        raise FrameError(f"checksum mismatch in section {'KV'[section.kind]} ({section.codec})")


def _section_bytes(values: torch.Tensor) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """K and V of `values`, each as contiguous bytes in (layer, token, head, dim) order."""
    planes = values.view(torch.uint8).numpy()
    k, v = (np.ascontiguousarray(planes[:, kind]).reshape(-1) for kind in (0, 1))
    return k, v
