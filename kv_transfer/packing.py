"""KV tensors to frames and back: the codecs' and the header's parts put together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kv_transfer.checksum import crc32
from kv_transfer.codecs.base import Buffer, Codec, SectionShape
from kv_transfer.codecs.registry import STANDARD, CodecRegistry
from kv_transfer.conversion import TORCH_DTYPES
from kv_transfer.frames import (
    HEADER_BYTES,
    FrameHeader,
    FrameLimits,
    PackedSection,
    Section,
    encode_header,
    misfit,
    section_offsets,
)
from kv_transfer.manifest import FrameSpan
from pdcore.errors import FrameError


@dataclass(frozen=True, slots=True)
class PackedFrame:
    """A frame ready for the wire. `checksums` are its sections', as the manifest's digest covers them."""

    data: bytes
    checksums: tuple[int, ...]


def pack_frame(values: torch.Tensor, limits: FrameLimits, span: FrameSpan, codec: Codec) -> PackedFrame:
    """Encode what `KvStore.gather` returned.

    Args:
        values: contiguous CPU tensor [layer_count, 2, token_count, heads, head_dim] of ``limits.dtype``.
        limits: the ticket's. span: what `values` covers. codec: used where it pays, raw elsewhere.
    """
    raw_bytes = limits.section_bytes(span)
    parts: list[list[Buffer]] = []
    table: list[PackedSection] = []
    for kind, section in enumerate(_section_bytes(values)):
        assert section.size == raw_bytes, (values.shape, span)
        payload, entry = _pack_section(section, _shape(kind, limits, span), codec)
        parts.append(payload)
        table.append(entry)
    header = encode_header(
        limits, span, codec.name, tuple(table), calibration=codec.calibration, parameters=codec.parameters
    )
    chunks: list[Buffer] = [header]
    position = HEADER_BYTES
    for payload, entry, offset in zip(
        parts, table, section_offsets(tuple(e.payload_bytes for e in table)), strict=True
    ):
        chunks.append(bytes(offset - position))
        chunks.extend(payload)
        position = offset + entry.payload_bytes
    return PackedFrame(b"".join(chunks), tuple(e.binding for e in table))


def _pack_section(
    section: NDArray[np.uint8], shape: SectionShape, codec: Codec
) -> tuple[list[Buffer], PackedSection]:
    """The payload of one section and its entry in the table."""
    encoded = codec.encode(section, shape)
    if encoded is None:
        checksum = crc32(section.data)
        return [section.data], PackedSection("raw", section.size, checksum, checksum)
    payload = list(encoded)
    payload_checksum = 0
    for part in payload:
        payload_checksum = crc32(part, payload_checksum)
    size = sum(len(part) for part in payload)
    return payload, PackedSection(codec.name, size, crc32(section.data) if codec.lossless else 0, payload_checksum)


def unpack_frame(frame: memoryview, header: FrameHeader, codecs: CodecRegistry = STANDARD) -> torch.Tensor:
    """Decode and verify the payloads of a frame whose header `decode_header` accepted.

    Returns:
        Contiguous tensor [layer_count, 2, token_count, heads, head_dim], as `KvStore.scatter` takes it.

    Raises:
        FrameError: a payload does not decode, or it or its decoded bytes do not have the announced checksum, or the
            codec's parameters are not those spoken here.
    """
    span = header.span
    codec = codecs.find(header.codec, header.calibration)
    if codec is None or codec.parameters != header.parameters:
        raise misfit(f"codec {header.codec} with parameters {header.parameters.hex()} is not spoken here")
    # One layer: K and V lie behind each other as the result wants them. Several: they interleave, one more copy.
    # numpy, not torch: a torch copy would start a thread pool of its own beside the engine's.
    planes = np.empty((2, span.layer_count, header.sections[0].raw_bytes // span.layer_count), np.uint8)
    for section in header.sections:
        used = codec if section.codec == codec.name else codecs["raw"]
        shape = SectionShape(section.kind, header.dtype, *span, header.head_start, header.head_count, header.head_dim)
        _unpack_section(frame, section, shape, used, planes[section.kind].reshape(-1))
    values = torch.from_numpy(np.ascontiguousarray(planes.swapaxes(0, 1)).reshape(-1)).view(
        TORCH_DTYPES[header.dtype]
    )
    return values.view(span.layer_count, 2, span.token_count, header.head_count, header.head_dim)


def _unpack_section(
    frame: memoryview, section: Section, shape: SectionShape, codec: Codec, out: NDArray[np.uint8]
) -> None:
    payload = frame[section.offset : section.offset + section.payload_bytes]
    where = f"section {'KV'[section.kind]} ({section.codec})"
    if crc32(payload) != section.payload_checksum:
        raise FrameError(f"checksum mismatch in the payload of {where}")
    codec.decode(payload, shape, out)
    if codec.name == "raw":
        # The decoded bytes are the payload's: to look at them once more would find nothing new.
        if section.checksum != section.payload_checksum:
            raise FrameError(f"two checksums of the same bytes in {where}")
    elif codec.lossless and crc32(out.data) != section.checksum:
        raise FrameError(f"checksum mismatch in {where}")


def _shape(kind: int, limits: FrameLimits, span: FrameSpan) -> SectionShape:
    return SectionShape(kind, limits.dtype, *span, limits.head_start, limits.head_count, limits.head_dim)


def _section_bytes(values: torch.Tensor) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """K and V of `values`, each as contiguous bytes in (layer, token, head, dim) order."""
    planes = values.view(torch.uint8).numpy()
    k, v = (np.ascontiguousarray(planes[:, kind]).reshape(-1) for kind in (0, 1))
    return k, v
