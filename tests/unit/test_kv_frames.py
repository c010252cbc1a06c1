"""The frame format: a golden vector that must never change, and what becomes of frames that were tampered with."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer.codecs.base import SectionShape
from kv_transfer.codecs.registry import STANDARD
from kv_transfer.conversion import TORCH_DTYPES
from kv_transfer.frames import HEADER_BYTES, LOSSLESS_CODECS, FrameHeader, FrameLimits, decode_header
from kv_transfer.manifest import FrameSpan, TicketRef, frames_digest
from kv_transfer.packing import pack_frame, unpack_frame
from pdcore.errors import FrameError
from pdcore.types import KvGeometry, RequestKey

SPAN = FrameSpan(1, 2, 5, 3)
LOSSLESS = tuple(name for name in STANDARD.names if name in LOSSLESS_CODECS)


def limits_of(dtype: str = "bfloat16", codecs: tuple[str, ...] = LOSSLESS) -> FrameLimits:
    geometry = KvGeometry("00ff", 4, 2, 8, dtype, 16, 64)
    return FrameLimits.for_ticket(
        ref=TicketRef(3, 9), key=RequestKey("req", 1), geometry=geometry, token_start=2, token_end=300, codecs=codecs
    )


def values_of(span: FrameSpan, dtype: str = "bfloat16", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (span.layer_count, 2, span.token_count, 2, 8)
    return torch.randn(shape, generator=generator).to(TORCH_DTYPES[dtype])


def plain_shape(elements: int) -> SectionShape:
    """One layer of one token of one head of so many dimensions, in bfloat16."""
    return SectionShape(0, "bfloat16", 0, 1, 0, 1, 0, 1, elements)


def decode(data: bytes, limits: FrameLimits) -> torch.Tensor:
    frame = memoryview(data)
    return unpack_frame(frame, decode_header(frame, limits))


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


# The header of the frame of `SPAN` in raw bfloat16 whose element i, counted through [layer, kind, token, head, dim],
# has the bits i. A change here is a change of the protocol: it needs a new version number, not a new vector.
GOLDEN_HEADER = bytes.fromhex(
    "50444b564652414d"  # magic "PDKVFRAM"
    "0200 0001"  # version 2, header bytes 256
    "5fcf8702"  # header checksum
    "80020000"  # frame bytes 640
    "0000 0200"  # flags, two sections
    "01 01 02 01"  # codec raw in version 1, bfloat16, canonical layout
    "03000000 0900000000000000 01000000"  # ticket 3, generation 9, attempt 1
    "0100 0200"  # two layers from 1
    "0000 0200 0800 0000"  # two heads from 0, of 8 dimensions; zero
    "05000000 03000000"  # three tokens from 5
    "80010000 80010000"  # raw bytes 384, payload bytes 384
    "c3f7bdf537c46724392c4428e47e04c1"  # SHA-256 of "req", first half
    "8909cde2f411a84e86e7a39c8a3916b7cda6a9d977778030b6f6a491401400bc"  # SHA-256 of "00ff"
    + "00" * 72  # calibration digest, codec parameters, reserved
    + "00 01 01 00 00010000 c0000000 c0000000 8252087e 8252087e 0000000000000000"  # K: raw, at 256, 192 bytes
    + "01 01 01 00 c0010000 c0000000 c0000000 850b48a7 850b48a7 0000000000000000"  # V: raw, at 448
)


def test_golden_vector() -> None:
    values = torch.arange(192, dtype=torch.int16).view(torch.bfloat16).reshape(2, 2, 3, 2, 8)
    packed = pack_frame(values, limits_of(), SPAN, STANDARD["raw"])
    assert packed.data[:HEADER_BYTES] == GOLDEN_HEADER
    # K of layer 1, K of layer 2, then V of both.
    assert struct.unpack("<192H", packed.data[256:]) == (
        *range(48),
        *range(96, 144),
        *range(48, 96),
        *range(144, 192),
    )
    assert zlib.crc32(GOLDEN_HEADER[:12] + bytes(4) + GOLDEN_HEADER[16:]) == 0x0287CF5F
    assert packed.checksums == (zlib.crc32(packed.data[256:448]), zlib.crc32(packed.data[448:]))
    assert packed.checksums == (0x7E085282, 0xA7480B85)
    assert frames_digest([packed.checksums, (1, 2)]) == zlib.crc32(struct.pack("<4I", *packed.checksums, 1, 2))


def test_golden_bexp_payload() -> None:
    """A payload that an independent implementation must decode: two elements, 1.0 and -2.5 in bfloat16."""
    elements = struct.pack("<2H", 0x3F80, 0xC020)
    low = bytes([0x00, 0xA0])  # sign and mantissa: 0|0000000, 1|0100000
    # A zstd frame with one raw block: magic, single segment with a content size of 2, last raw block of 2 bytes.
    high = bytes.fromhex("28b52ffd" "20" "02" "110000" "7f80")  # fmt: skip
    out = np.empty(4, np.uint8)
    STANDARD["bexp-zstd"].decode(memoryview(low + high), plain_shape(2), out)
    assert out.tobytes() == elements


@pytest.mark.parametrize(("codec", "dtype"), [(name, dtype) for name in LOSSLESS for dtype in STANDARD[name].dtypes])
@pytest.mark.parametrize("span", [SPAN, FrameSpan(0, 1, 2, 256), FrameSpan(3, 1, 299, 1), FrameSpan(0, 4, 17, 33)])
def test_round_trip(codec: str, dtype: str, span: FrameSpan) -> None:
    limits = limits_of(dtype)
    values = values_of(span, dtype)
    packed = pack_frame(values, limits, span, STANDARD[codec])
    assert len(packed.data) <= limits.frame_bound(span)
    header = decode_header(memoryview(packed.data), limits)
    assert (header.span, header.codec, header.checksums) == (span, codec, packed.checksums)
    assert all(section.offset % 64 == 0 for section in header.sections)
    assert same_bytes(decode(packed.data, limits), values)


def test_every_bit_pattern_survives() -> None:
    """NaNs with payloads, infinities, denormals and negative zeros come through as they are."""
    geometry = KvGeometry("d", 1, 16, 64, "bfloat16", 16, 64)
    for dtype in ("bfloat16", "float16"):
        limits = FrameLimits.for_ticket(
            ref=TicketRef(0, 1),
            key=RequestKey("r", 0),
            geometry=replace(geometry, dtype=dtype),
            token_start=0,
            token_end=64,
            codecs=("bexp-zstd",),
        )
        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(TORCH_DTYPES[dtype])
        values = torch.stack([bits, bits.flip(0)]).reshape(1, 2, 64, 16, 64)
        packed = pack_frame(values, limits, FrameSpan(0, 1, 0, 64), STANDARD["bexp-zstd"])
        assert same_bytes(decode(packed.data, limits), values)


def test_sections_fall_back_to_raw_one_by_one() -> None:
    limits = limits_of()
    span = FrameSpan(0, 1, 2, 256)
    noise = torch.randint(-(1 << 15), 1 << 15, (1, 2, 256, 2, 8), dtype=torch.int16).view(torch.bfloat16)
    noise[:, 1] = 1.0
    packed = pack_frame(noise, limits, span, STANDARD["bexp-zstd"])
    header = decode_header(memoryview(packed.data), limits)
    assert [section.codec for section in header.sections] == ["raw", "bexp-zstd"]
    assert same_bytes(decode(packed.data, limits), noise)


@pytest.mark.parametrize(
    "change",
    [
        {"ref": TicketRef(3, 10)},
        {"ref": TicketRef(4, 9)},
        {"key": RequestKey("req", 2)},
        {"key": RequestKey("other", 1)},
        {"model_tag": bytes(32)},
        {"dtype": "float16"},
        {"num_layers": 2},
        {"head_count": 1},
        {"head_start": 1},
        {"head_dim": 16},
        {"token_start": 6},
        {"token_end": 7},
        {"codecs": ("zstd",)},
    ],
)
def test_a_frame_must_fit_its_ticket(change: dict[str, object]) -> None:
    limits = limits_of()
    packed = pack_frame(values_of(SPAN), limits, SPAN, STANDARD["bexp-zstd"])
    with pytest.raises(FrameError) as caught:
        decode(packed.data, replace(limits, **change))  # type: ignore[arg-type]
    assert not caught.value.retryable


def seal(frame: bytearray) -> bytes:
    """Give a header the checksum of what it says now: a sender that lies, not a wire that errs."""
    frame[12:16] = bytes(4)
    frame[12:16] = struct.pack("<I", zlib.crc32(frame[:HEADER_BYTES]))
    return bytes(frame)


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (8, 1),  # version
        (11, 0),  # header bytes
        (20, 1),  # flags
        (22, 3),  # sections
        (24, 9),  # codec
        (25, 2),  # codec version
        (27, 2),  # layout
        (46, 0),  # layers
        (54, 1),  # zero
        (60, 0),  # tokens
        (64, 1),  # raw bytes
        (68, 1),  # payload bytes
        (120, 1),  # calibration digest
        (191, 1),  # reserved
        (192, 1),  # kind of the first section
        (195, 1),  # zero
        (196, 64),  # its offset
        (200, 1),  # its payload bytes
        (204, 1),  # its raw bytes
        (216, 1),  # reserved
    ],
)
def test_a_field_that_is_not_spoken_here_is_refused_for_good(offset: int, value: int) -> None:
    frame = bytearray(FRAMES["raw", "bfloat16"])
    assert frame[offset] != value
    frame[offset] = value
    with pytest.raises(FrameError) as caught:
        decode(seal(frame), limits_of())
    # A header length that cannot be is taken for damage; everything else is what the sender meant.
    assert caught.value.retryable == (offset == 11)


FRAMES = {
    (codec, dtype): pack_frame(values_of(SPAN, dtype), limits_of(dtype), SPAN, STANDARD[codec]).data
    for codec in LOSSLESS
    for dtype in STANDARD[codec].dtypes
}
# Payloads that do compress, so that the decompressors are reached: a few values only.
PLAIN = {
    (codec, dtype): pack_frame(values_of(SPAN, dtype).sign(), limits_of(dtype), SPAN, STANDARD[codec]).data
    for codec in LOSSLESS
    for dtype in STANDARD[codec].dtypes
}
MUTATIONS = st.lists(
    st.tuples(st.sampled_from(["set", "cut", "insert", "word"]), st.integers(0, 1023), st.integers(0, 0xFFFFFFFF)),
    min_size=1,
    max_size=4,
)


def mutate(frame: bytes, mutations: list[tuple[str, int, int]]) -> bytearray:
    data = bytearray(frame)
    for kind, position, value in mutations:
        place = position % max(1, len(data))
        match kind:
            case "set":
                data[place : place + 1] = bytes([value & 0xFF])
            case "word":
                data[place : place + 4] = struct.pack("<I", value)
            case "cut":
                del data[place : place + 1 + value % 64]
            case _:
                data[place:place] = bytes([value & 0xFF]) * (1 + position % 7)
    return data


def refused_or_equal(data: bytes, limits: FrameLimits, original: torch.Tensor) -> FrameHeader | None:
    """Decode: the frame is refused, or holds the original's bytes. Returns the header if it was accepted."""
    header = None
    values = None
    tracemalloc.start()
    try:
        header = decode_header(memoryview(data), limits)
        values = unpack_frame(memoryview(data), header)
    except FrameError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20, f"{peak} bytes were allocated for a frame of {len(data)}"
    if values is None:
        return None
    assert torch.equal(values.reshape(-1).view(torch.uint8), original.reshape(-1).view(torch.uint8))
    return header


@pytest.mark.parametrize("codec", LOSSLESS)
def test_every_flipped_bit_is_noticed(codec: str) -> None:
    """In the header, the gap and the payloads alike; only a zstd payload has bits that mean nothing."""
    dtype = {"bexp-zstd": "float16", "bexp3": "bfloat16"}.get(codec, "float32")
    frame, limits = PLAIN[codec, dtype], limits_of(dtype)
    header = decode_header(memoryview(frame), limits)
    original = decode(frame, limits)
    payload = {at for s in header.sections for at in range(s.offset, s.offset + s.payload_bytes) if s.codec != "raw"}
    for position in range(len(frame)):
        for bit in range(8):
            damaged = bytearray(frame)
            damaged[position] ^= 1 << bit
            try:
                values = decode(bytes(damaged), limits)
            except FrameError:
                continue
            assert position in payload, f"bit {bit} of byte {position} went unnoticed"
            assert same_bytes(values, original)


@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(FRAMES)), st.booleans(), MUTATIONS)
def test_fuzz_a_wire_that_errs(
    which: tuple[str, str], compressible: bool, mutations: list[tuple[str, int, int]]
) -> None:
    """Whatever happens to the bytes, the frame is refused, or what comes out is what went in."""
    _, dtype = which
    original = values_of(SPAN, dtype).sign() if compressible else values_of(SPAN, dtype)
    frame = (PLAIN if compressible else FRAMES)[which]
    limits = limits_of(dtype)
    accepted = refused_or_equal(bytes(mutate(frame, mutations)), limits, original)
    # Where the KV goes matters as much as what it is.
    assert accepted is None or accepted == decode_header(memoryview(frame), limits)


@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(FRAMES)), st.booleans(), MUTATIONS)
def test_fuzz_a_sender_that_lies(
    which: tuple[str, str], compressible: bool, mutations: list[tuple[str, int, int]]
) -> None:
    """The header checksum is right whatever the header says: the fields themselves must hold."""
    _, dtype = which
    original = values_of(SPAN, dtype).sign() if compressible else values_of(SPAN, dtype)
    frame = mutate((PLAIN if compressible else FRAMES)[which], mutations)
    if len(frame) >= HEADER_BYTES:
        refused_or_equal(seal(frame), limits_of(dtype), original)


@pytest.mark.parametrize("codec", ["zstd", "bexp-zstd"])
def test_a_zstd_bomb_is_not_inflated(codec: str) -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
    payload = bytes(96) + bomb if codec == "bexp-zstd" else bomb
    out = np.empty(192, np.uint8)
    tracemalloc.start()
    with pytest.raises(FrameError, match="announced"):
        STANDARD[codec].decode(memoryview(payload), plain_shape(96), out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("codec", ["zstd", "bexp-zstd"])
def test_a_zstd_frame_of_unknown_size_is_refused(codec: str) -> None:
    count = 96 if codec == "bexp-zstd" else 192
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(count))
    payload = bytes(96) + unsized if codec == "bexp-zstd" else unsized
    with pytest.raises(FrameError):
        STANDARD[codec].decode(memoryview(payload), plain_shape(96), np.empty(192, np.uint8))
