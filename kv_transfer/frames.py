"""The binary frame: a self-describing piece of KV, independent of the transport that carries it.

A frame is a header, then one section for K and one for V, each starting at a multiple of 64 bytes from the frame's
start; the gaps are zero and nothing follows the last section::

    | fixed header 192 | section table 2 x 32 | K payload | 0..63 zeros | V payload |
    0                 192                    256        aligned to 64              frame_bytes

Everything is little endian; `docs/kv-protocol.md` lists the fields. This module reads and writes headers and nothing
else: payloads are the codecs' business. `decode_header` checks a header against what the receiver's ticket allows
before any memory is sized by it, and raises `FrameError` for anything that does not fit.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from kv_transfer.checksum import crc32
from kv_transfer.head_ranges import HeadRange, heads_of
from kv_transfer.manifest import FrameSpan, TicketRef
from pdcore.errors import FrameError
from pdcore.types import DTYPE_BYTES, KvGeometry, RequestKey

MAGIC: Final = b"PDKVFRAM"
VERSION: Final = 2
ALIGNMENT: Final = 64
MAX_FRAME_TOKENS: Final = 256
KIND_K: Final = 0
KIND_V: Final = 1
LAYOUT_CANONICAL: Final = 1  # a section is [layer, token, head, dim]

CODEC_IDS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "raw": 1,
        "zstd": 2,
        "bexp-zstd": 3,
        "bexp3": 4,
        "q8": 5,
        "q8-zstd": 6,
        "k6v4": 7,
        "k4v4": 8,
        "tc4": 9,
        "fp8": 10,
    }
)
CODEC_VERSIONS: Final[Mapping[str, int]] = MappingProxyType(dict.fromkeys(CODEC_IDS, 1))
LOSSLESS_CODECS: Final = frozenset({"raw", "zstd", "bexp-zstd", "bexp3"})
NO_TAG: Final = bytes(16)
DTYPE_IDS: Final[Mapping[str, int]] = MappingProxyType({"float32": 1, "bfloat16": 2, "float16": 3})

_CODEC_NAMES: Final = MappingProxyType({number: name for name, number in CODEC_IDS.items()})

# magic, version, header bytes | header crc | frame bytes, flags, sections, codec id, codec version, dtype, layout,
# ticket, generation, attempt, layers, heads, head dim, zero, tokens, raw bytes, payload bytes, request tag,
# model tag, calibration digest, codec parameters, zero
_LEAD: Final = struct.Struct("<8sHH")
_CRC: Final = struct.Struct("<I")
_REST: Final = struct.Struct("<IHHBBBBIQIHHHHHHIIII16s32s16s16s40s")
_SECTION: Final = struct.Struct("<BBBBIIIIIQ")

FIXED_BYTES: Final = _LEAD.size + _CRC.size + _REST.size
HEADER_BYTES: Final = FIXED_BYTES + 2 * _SECTION.size
_CRC_OFFSET: Final = _LEAD.size
assert FIXED_BYTES == 192
assert HEADER_BYTES == 256


@dataclass(frozen=True, slots=True)
class Section:
    """One entry of the section table.

    Attributes:
        kind: `KIND_K` or `KIND_V`.
        codec: name of the codec of this payload: the frame's, or ``raw`` where the frame's codec did not pay.
        offset: of the payload, bytes from the frame's start. payload_bytes: its length.
        raw_bytes: length once decoded.
        checksum: CRC-32 of the decoded bytes; 0 for a lossy codec, whose decoders may round differently.
        payload_checksum: CRC-32 of the payload.
    """

    kind: int
    codec: str
    offset: int
    payload_bytes: int
    raw_bytes: int
    checksum: int
    payload_checksum: int

    @property
    def binding(self) -> int:
        """The checksum that the manifest's digest covers: of the decoded bytes wherever they are the same for all."""
        return _binding(self.codec, self.checksum, self.payload_checksum)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A frame's header, decoded. `request_tag` and `model_tag` are as `request_tag()` and `model_tag()` give them.

    `codec` is the codec's plain name; `calibration` and `parameters` (16 bytes each) are for it to check.
    """

    ref: TicketRef
    attempt: int
    request_tag: bytes
    model_tag: bytes
    codec: str
    calibration: bytes
    parameters: bytes
    dtype: str
    span: FrameSpan
    head_start: int
    head_count: int
    head_dim: int
    sections: tuple[Section, ...]
    frame_bytes: int

    @property
    def checksums(self) -> tuple[int, ...]:
        """What the manifest's digest covers, section by section."""
        return tuple(section.binding for section in self.sections)


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What the holder of a ticket accepts; the sender of a frame fills it in the same way.

    Attributes:
        ref, key: the ticket and the request it was granted for.
        model_tag: of the model. num_layers, head_dim: its shape.
        dtype: of what travels, that of the sender's cache.
        head_start, head_count: the heads that travel, counted in the model.
        token_start, token_end: tokens that are expected, ``prefix_tokens`` and ``num_tokens`` of the ticket.
        codecs: acceptable codecs, a calibrated one as `wire_name` gives it; ``raw`` is always accepted as a
            section's fallback.
    """

    ref: TicketRef
    key: RequestKey
    model_tag: bytes
    dtype: str
    num_layers: int
    head_start: int
    head_count: int
    head_dim: int
    token_start: int
    token_end: int
    codecs: tuple[str, ...]

    @classmethod
    def for_ticket(
        cls,
        *,
        ref: TicketRef,
        key: RequestKey,
        geometry: KvGeometry,
        token_start: int,
        token_end: int,
        codecs: tuple[str, ...],
        heads: HeadRange | None = None,
    ) -> FrameLimits:
        """Limits of a ticket. `heads`: those that travel; all of `geometry` if None."""
        head_start, head_count = heads or heads_of(geometry)
        return cls(
            ref=ref,
            key=key,
            model_tag=model_tag(geometry.model_digest),
            dtype=geometry.dtype,
            num_layers=geometry.num_layers,
            head_start=head_start,
            head_count=head_count,
            head_dim=geometry.head_dim,
            token_start=token_start,
            token_end=token_end,
            codecs=codecs,
        )

    def narrowed(self, heads: HeadRange, dtype: str) -> FrameLimits:
        """What holds for a sender that brings these heads of the ticket, in its own type."""
        if (heads, dtype) == ((self.head_start, self.head_count), self.dtype):
            return self
        return replace(self, head_start=heads.start, head_count=heads.size, dtype=dtype)

    def section_bytes(self, span: FrameSpan, heads: int | None = None) -> int:
        """Decoded bytes of K (or V) of `span` for so many heads; all of the range if None."""
        count = self.head_count if heads is None else heads
        return span.layer_count * span.token_count * count * self.head_dim * DTYPE_BYTES[self.dtype]

    def frame_bound(self, span: FrameSpan) -> int:
        """Bytes that a frame of `span` has at most; exactly that if no section compresses."""
        section = self.section_bytes(span)
        return _align(HEADER_BYTES + section) + section

    @property
    def max_frame_bytes(self) -> int:
        """Bytes of the largest frame that this ticket could hold: all layers by `MAX_FRAME_TOKENS` tokens."""
        tokens = min(MAX_FRAME_TOKENS, self.token_end - self.token_start)
        return self.frame_bound(FrameSpan(0, self.num_layers, self.token_start, tokens))


def request_tag(request_id: str) -> bytes:
    """16 bytes that stand for a request id in a header: the start of its SHA-256."""
    return hashlib.sha256(request_id.encode()).digest()[:16]


def model_tag(model_digest: str) -> bytes:
    """32 bytes that stand for a model digest in a header: the SHA-256 of its text."""
    return hashlib.sha256(model_digest.encode()).digest()


def wire_name(codec: str, calibration: bytes) -> str:
    """How a codec is called in tickets and welcomes: a calibrated one with its calibration, so that names agree only
    where the two ends can read each other."""
    return codec if calibration == NO_TAG else f"{codec}:{calibration.hex()}"


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def misfit(problem: str) -> FrameError:
    """A `FrameError` that sending the same frame again cannot cure."""
    error = FrameError(problem)
    error.retryable = False
    return error


class PackedSection(NamedTuple):
    """What the header says of one payload. `codec`: the one used, a plain name; checksums as in `Section`."""

    codec: str
    payload_bytes: int
    checksum: int
    payload_checksum: int

    @property
    def binding(self) -> int:
        """As `Section.binding`."""
        return _binding(self.codec, self.checksum, self.payload_checksum)


def encode_header(
    limits: FrameLimits,
    span: FrameSpan,
    codec: str,
    sections: tuple[PackedSection, ...],
    *,
    calibration: bytes = NO_TAG,
    parameters: bytes = NO_TAG,
) -> bytes:
    """Header of a frame whose payloads are known.

    Args:
        limits: the ticket's.
        codec: plain name of the codec that was asked for; `calibration` and `parameters` are its.
        sections: of K, then of V.

    Returns:
        `HEADER_BYTES` bytes. `section_offsets` tells where the payloads go.
    """
    raw = limits.section_bytes(span)
    offsets = section_offsets(tuple(section.payload_bytes for section in sections))
    frame_bytes = offsets[-1] + sections[-1].payload_bytes
    rest = _REST.pack(
        frame_bytes,
        0,
        len(sections),
        CODEC_IDS[codec],
        CODEC_VERSIONS[codec],
        DTYPE_IDS[limits.dtype],
        LAYOUT_CANONICAL,
        limits.ref.ticket_id,
        limits.ref.generation,
        limits.key.attempt,
        span.layer_start,
        span.layer_count,
        limits.head_start,
        limits.head_count,
        limits.head_dim,
        0,
        span.token_start,
        span.token_count,
        raw * len(sections),
        sum(section.payload_bytes for section in sections),
        request_tag(limits.key.request_id),
        limits.model_tag,
        calibration,
        parameters,
        bytes(40),
    )
    table = b"".join(
        _SECTION.pack(
            kind,
            CODEC_IDS[section.codec],
            CODEC_VERSIONS[section.codec],
            0,
            offset,
            section.payload_bytes,
            raw,
            section.checksum,
            section.payload_checksum,
            0,
        )
        for kind, (section, offset) in enumerate(zip(sections, offsets, strict=True))
    )
    lead = _LEAD.pack(MAGIC, VERSION, HEADER_BYTES)
    crc = crc32(table, crc32(rest, crc32(bytes(_CRC.size), crc32(lead))))
    return lead + _CRC.pack(crc) + rest + table


def section_offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Where payloads of these sizes lie in a frame: each at the next multiple of `ALIGNMENT`."""
    offsets: list[int] = []
    position = HEADER_BYTES
    for size in sizes:
        offsets.append(_align(position))
        position = offsets[-1] + size
    return tuple(offsets)


def decode_header(frame: memoryview, limits: FrameLimits) -> FrameHeader:
    """Read and check the header of a complete frame.

    Args:
        frame: the whole frame, as bytes (format ``B``).
        limits: what the frame must fit.

    Raises:
        FrameError: anything is wrong. `retryable` is True if the bytes look damaged on the way (length, magic or a
            checksum), False if they are what the sender meant and do not fit here.
    """
    if len(frame) < HEADER_BYTES:
        raise FrameError(f"a frame of {len(frame)} bytes is shorter than its header of {HEADER_BYTES}")
    magic, version, header_bytes = _LEAD.unpack_from(frame, 0)
    if magic != MAGIC:
        raise FrameError("not a KV frame: wrong magic")
    if not FIXED_BYTES <= header_bytes <= len(frame):
        raise FrameError(f"header length {header_bytes} is outside [{FIXED_BYTES}, {len(frame)}]")
    (crc,) = _CRC.unpack_from(frame, _CRC_OFFSET)
    after = _CRC_OFFSET + _CRC.size
    found = crc32(frame[after:header_bytes], crc32(bytes(_CRC.size), crc32(frame[:_CRC_OFFSET])))
    if crc != found:
        raise FrameError("header checksum mismatch")
    # From here on the header is what the sender wrote: what does not fit now never will.
    if version != VERSION:
        raise misfit(f"frame version {version} is not spoken here; ours is {VERSION}")
    if header_bytes != HEADER_BYTES:
        raise misfit(f"header length of version {VERSION} is {HEADER_BYTES}, not {header_bytes}")
    return _check_fields(frame, limits)


def _check_fields(frame: memoryview, limits: FrameLimits) -> FrameHeader:
    (
        frame_bytes,
        flags,
        section_count,
        codec_id,
        codec_version,
        dtype_id,
        layout,
        ticket_id,
        generation,
        attempt,
        layer_start,
        layer_count,
        head_start,
        head_count,
        head_dim,
        zero,
        token_start,
        token_count,
        raw_bytes,
        payload_bytes,
        request,
        model,
        calibration,
        parameters,
        reserved,
    ) = _REST.unpack_from(frame, _CRC_OFFSET + _CRC.size)
    _expect("frame length", frame_bytes, len(frame))
    _expect("ticket", (ticket_id, generation), tuple(limits.ref))
    _expect("attempt", attempt, limits.key.attempt)
    _expect("request", request, request_tag(limits.key.request_id))
    _expect("model digest", model, limits.model_tag)
    _expect("dtype", dtype_id, DTYPE_IDS[limits.dtype])
    _expect("layout", layout, LAYOUT_CANONICAL)
    _expect("heads", (head_start, head_count), (limits.head_start, limits.head_count))
    _expect("head dim", head_dim, limits.head_dim)
    _expect("section count", section_count, 2)
    _expect("flags and reserved fields", (flags, zero), (0, 0))
    if any(reserved):
        raise misfit("reserved fields are not zero")
    codec = _codec(codec_id, codec_version, calibration, limits.codecs)
    span = FrameSpan(layer_start, layer_count, token_start, token_count)
    if layer_count < 1 or layer_start + layer_count > limits.num_layers:
        raise misfit(f"layers {layer_start}+{layer_count} are outside [0, {limits.num_layers})")
    if not 1 <= token_count <= MAX_FRAME_TOKENS:
        raise misfit(f"{token_count} tokens in a frame; allowed: 1 to {MAX_FRAME_TOKENS}")
    if token_start < limits.token_start or token_start + token_count > limits.token_end:
        raise misfit(
            f"tokens {token_start}+{token_count} are outside [{limits.token_start}, {limits.token_end}) of the ticket"
        )
    sections = _read_sections(frame, limits.section_bytes(span, head_count), codec)
    _expect("raw length", raw_bytes, sum(section.raw_bytes for section in sections))
    _expect("payload length", payload_bytes, sum(section.payload_bytes for section in sections))
    return FrameHeader(
        ref=TicketRef(ticket_id, generation),
        attempt=attempt,
        request_tag=request,
        model_tag=model,
        codec=codec,
        calibration=calibration,
        parameters=parameters,
        dtype=limits.dtype,
        span=span,
        head_start=head_start,
        head_count=head_count,
        head_dim=head_dim,
        sections=sections,
        frame_bytes=frame_bytes,
    )


def _read_sections(frame: memoryview, expected_raw: int, codec: str) -> tuple[Section, ...]:
    """The section table, every entry where and as large as the format says; the gaps checked to be zero."""
    sections: list[Section] = []
    end = HEADER_BYTES
    for kind in (KIND_K, KIND_V):
        found_kind, codec_id, codec_version, zero, offset, size, raw, checksum, payload_crc, reserved = (
            _SECTION.unpack_from(frame, FIXED_BYTES + kind * _SECTION.size)
        )
        _expect("section kind", found_kind, kind)
        _expect("reserved section fields", (zero, reserved), (0, 0))
        used = _plain_codec(codec_id, codec_version)
        if used not in (codec, "raw"):
            raise misfit(f"a section in codec {used} within a frame in {codec}")
        if checksum and used not in LOSSLESS_CODECS:
            raise misfit(f"codec {used} is lossy: its decoded bytes have no checksum")
        _expect("raw length of a section", raw, expected_raw)
        if not 1 <= size <= raw or (used == "raw" and size != raw):
            raise misfit(f"a {used} payload of {size} bytes for {raw} decoded ones")
        _expect("section offset", offset, _align(end))
        if any(frame[end:offset]):
            raise FrameError("the gap between sections is not zero")
        sections.append(Section(kind, used, offset, size, raw, checksum, payload_crc))
        end = offset + size
    _expect("end of the last section", end, len(frame))
    return tuple(sections)


def _binding(codec: str, checksum: int, payload_checksum: int) -> int:
    return checksum if codec in LOSSLESS_CODECS else payload_checksum


def _plain_codec(codec_id: int, version: int) -> str:
    name = _CODEC_NAMES.get(codec_id)
    if name is None:
        raise misfit(f"codec {codec_id} is not known here; known: {', '.join(CODEC_IDS)}")
    if version != CODEC_VERSIONS[name]:
        raise misfit(f"version {version} of codec {name} is not spoken here; ours is {CODEC_VERSIONS[name]}")
    return name


def _codec(codec_id: int, version: int, calibration: bytes, accepted: tuple[str, ...]) -> str:
    name = _plain_codec(codec_id, version)
    wanted = wire_name(name, calibration)
    if wanted not in (*accepted, "raw"):
        raise misfit(f"codec {wanted} is not accepted; accepted: {', '.join(accepted)}")
    return name


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise misfit(f"{what} is {_show(found)}, expected {_show(expected)}")


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
