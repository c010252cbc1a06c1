"""The codec bexp3: numpy and native code at every level against an encoder written from the format's description."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_transfer.codecs.base import SectionShape
from kv_transfer.codecs.bexp3 import GROUP_TOKENS, Bexp3Codec
from kv_transfer.native.library import LEVELS, available_levels, load_kernels
from pdcore.errors import FrameError

NUMPY = Bexp3Codec(lambda: None)


@pytest.fixture(scope="module", params=LEVELS)
def native(request: pytest.FixtureRequest) -> Bexp3Codec:
    if request.param not in available_levels():
        pytest.skip(f"this CPU has no {request.param}")
    kernels = load_kernels(request.param)
    return Bexp3Codec(lambda: kernels)


def section(layers: int, tokens: int, heads: int, dim: int) -> SectionShape:
    return SectionShape(
        kind=0,
        dtype="bfloat16",
        layer_start=0,
        layer_count=layers,
        token_start=0,
        token_count=tokens,
        head_start=0,
        head_count=heads,
        head_dim=dim,
    )


def kv_like(shape: SectionShape, seed: int, spread: float = 1.0, specials: float = 0.01) -> NDArray[np.uint8]:
    """Values whose scale is their channel's, as in a KV cache; a few are zero or of any bit pattern.

    Args:
        spread: standard deviation of the exponents within a channel. specials: share of odd values.
    """
    random = np.random.default_rng(seed)
    size = (shape.layer_count, shape.token_count, shape.head_count * shape.head_dim)
    scale = random.normal(0, 3, size[-1])
    values = random.normal(size=size) * np.exp2(scale + random.normal(0, spread, size))
    words = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    odd = random.random(size) < specials
    words[odd] = random.integers(0, 65536, int(odd.sum())) * random.integers(0, 2, int(odd.sum()))
    return words.reshape(-1).view(np.uint8)


def payload_by_the_book(values: NDArray[np.uint8], shape: SectionShape) -> bytes:
    """One element at a time."""
    channels = shape.head_count * shape.head_dim
    words = [int(word) for word in values.view("<u2")]
    exponent = [word >> 7 & 0xFF for word in words]
    counts, maxima, escapes = bytearray(), bytearray(), bytearray()
    codes: list[int] = []
    for layer in range(shape.layer_count):
        for first in range(0, shape.token_count, GROUP_TOKENS):
            last = min(first + GROUP_TOKENS, shape.token_count)
            start = (layer * shape.token_count + first) * channels
            stop = (layer * shape.token_count + last) * channels
            largest = [max(exponent[start + channel : stop : channels]) for channel in range(channels)]
            escaped = 0
            for element in range(start, stop):
                distance = largest[(element - start) % channels] - exponent[element]
                codes.append(min(distance, 7))
                if distance > 6:
                    escaped += 1
                    escapes.append(exponent[element])
            counts += struct.pack("<I", escaped)
            maxima += bytes(largest)
    low = bytes(word >> 8 & 0x80 | word & 0x7F for word in words)
    planes = bytearray()
    for bit in range(3):
        plane = bytearray(-(-len(codes) // 8))
        for element, code in enumerate(codes):
            plane[element // 8] |= (code >> bit & 1) << element % 8
        planes += plane
    return bytes(counts + maxima + low + planes + escapes)


def before_a_wall(data: bytes | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy of `data` that ends where memory ends: to touch the byte behind it kills the process."""
    size = len(data)
    pages = -(-size // mmap.PAGESIZE) + 1
    memory = np.frombuffer(mmap.mmap(-1, pages * mmap.PAGESIZE), np.uint8)
    wall = memory.ctypes.data + (pages - 1) * mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(wall), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = memory[(pages - 1) * mmap.PAGESIZE - size :][:size]
    copy[:] = np.frombuffer(data, np.uint8)
    return copy


def encoded(codec: Bexp3Codec, values: NDArray[np.uint8], shape: SectionShape) -> bytes | None:
    parts = codec.encode(before_a_wall(values), shape)
    return None if parts is None else b"".join(parts)


def decoded(codec: Bexp3Codec, payload: bytes, shape: SectionShape) -> bytes | None:
    """None if refused. Nothing around the output may be written to."""
    out = before_a_wall(np.full(shape.raw_bytes, 0x5A, np.uint8))
    before = out.base[: out.ctypes.data - out.base.ctypes.data]  # type: ignore[union-attr, index]
    try:
        codec.decode(before_a_wall(payload).data, shape, out)
    except FrameError:
        return None
    finally:
        assert not np.any(before)
    return out.tobytes()


shapes = st.builds(
    section,
    layers=st.integers(1, 3),
    tokens=st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 130])),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 3, 8, 16, 24, 40]),
)


@given(shape=shapes, seed=st.integers(0, 1000), spread=st.sampled_from([0.0, 1.0, 4.0]))
@settings(max_examples=60, deadline=None)
def test_payload_is_as_described(native: Bexp3Codec, shape: SectionShape, seed: int, spread: float) -> None:
    values = kv_like(shape, seed, spread)
    expected: bytes | None = payload_by_the_book(values, shape)
    assert expected is not None
    if len(expected) >= shape.raw_bytes:
        expected = None
    assert encoded(NUMPY, values, shape) == expected
    assert encoded(native, values, shape) == expected
    if expected is not None:
        assert decoded(NUMPY, expected, shape) == values.tobytes()
        assert decoded(native, expected, shape) == values.tobytes()


@pytest.mark.parametrize("channels", [(1, 64), (3, 64), (8, 128), (1, 96), (5, 40), (1, 8), (2, 31), (1, 1)])
@pytest.mark.parametrize("tokens", [1, 16, 64, 100, 256])
def test_native_and_numpy_agree_on_sections_of_real_size(
    native: Bexp3Codec, channels: tuple[int, int], tokens: int
) -> None:
    for seed, (layers, spread) in enumerate(itertools.product((1, 4), (0.5, 3.0))):
        shape = section(layers, tokens, *channels)
        values = kv_like(shape, seed, spread)
        payload = encoded(NUMPY, values, shape)
        assert encoded(native, values, shape) == payload
        if payload is not None:
            assert decoded(NUMPY, payload, shape) == decoded(native, payload, shape) == values.tobytes()


def test_every_bit_pattern_survives(native: Bexp3Codec) -> None:
    shape = section(1, 65536 // 64, 1, 64)
    # Sorted by exponent: each channel of a tile sees few of them.
    words = np.arange(65536, dtype="<u2")
    values = words[np.argsort(words >> 7 & 0xFF, kind="stable")].view(np.uint8)
    for codec in (NUMPY, native):
        payload = encoded(codec, values, shape)
        assert payload is not None
        assert decoded(codec, payload, shape) == values.tobytes()


def test_values_at_odd_addresses(native: Bexp3Codec) -> None:
    shape = section(2, 70, 2, 40)
    values = kv_like(shape, 1)
    shifted = np.empty(values.size + 1, np.uint8)[1:]
    shifted[:] = values
    payload = encoded(NUMPY, values, shape)
    assert payload is not None
    assert encoded(native, shifted, shape) == encoded(NUMPY, shifted, shape) == payload
    assert decoded(native, memoryview(b"x" + payload)[1:].tobytes(), shape) == values.tobytes()


def test_noise_is_not_worth_it(native: Bexp3Codec) -> None:
    shape = section(1, 64, 1, 64)
    noise = np.random.default_rng(0).integers(0, 256, shape.raw_bytes, np.uint8)
    assert NUMPY.encode(noise, shape) is None
    assert native.encode(noise, shape) is None


def test_golden_payload(native: Bexp3Codec) -> None:
    shape = section(1, 2, 1, 8)
    words = [0x3F80, 0xBF81, 0x4000, 0x0000, 0x3D00, 0x7F80, 0x3C80, 0x3FFF]  # exponents 7f 7f 80 00 7a ff 79 7f
    words += [0x3F80, 0x3F81, 0x3F00, 0x3E80, 0x3D00, 0xFFC0, 0x3F80, 0x3C00]  # exponents 7f 7f 7e 7d 7a ff 7f 78
    golden = bytes.fromhex(
        "02000000"  # two escapes
        "7f7f807d7aff7f7f"  # maxima; so the codes are 0 0 0 7 0 0 6 0 and 0 0 2 0 0 0 0 7
        "008100000000007f 0001000000c00000"  # low plane
        "0880 4884 4880"  # planes
        "0078"  # exponents of the escaped
    )
    values = np.array(words, "<u2").view(np.uint8)
    for codec in (NUMPY, native):
        assert decoded(codec, golden, shape) == values.tobytes()
    assert payload_by_the_book(values, shape) == golden


@given(
    shape=shapes,
    seed=st.integers(0, 1000),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=4),
    length=st.one_of(st.just(0), st.integers(-40, 40), st.integers(-10_000, -1)),
)
@settings(max_examples=200, deadline=None)
def test_damaged_payloads_are_refused_or_decode_alike(
    native: Bexp3Codec, shape: SectionShape, seed: int, edits: list[tuple[float, int]], length: int
) -> None:
    """What a checksum lets pass must still be harmless: an error, or the same bytes from both implementations."""
    values = kv_like(shape, seed)
    payload = bytearray(encoded(NUMPY, values, shape) or payload_by_the_book(values, shape))
    for place, flip in edits:
        payload[int(place * len(payload))] ^= flip
    damaged = bytes(payload[:length] if length < 0 else payload + bytes(length))
    result = decoded(NUMPY, damaged, shape)
    assert decoded(native, damaged, shape) == result
    if length:
        assert result is None


@given(payload=st.binary(max_size=400), shape=shapes)
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_refused_or_decode_alike(native: Bexp3Codec, payload: bytes, shape: SectionShape) -> None:
    assert decoded(native, payload, shape) == decoded(NUMPY, payload, shape)


def test_what_a_decoder_must_check(native: Bexp3Codec) -> None:
    shape = section(1, 65, 1, 3)  # two tiles, five pad bits
    payload = payload_by_the_book(kv_like(shape, 3, 3.0), shape)
    first, second = struct.unpack_from("<2I", payload)
    assert first > 0
    planes = 8 + 2 * 3 + shape.elements
    padded = bytearray(payload)
    padded[planes + 24] |= 0x80
    moved = struct.pack("<2I", first - 1, second + 1) + payload[8:]
    huge = struct.pack("<2I", 2**32 - 1, 2**32 - 1) + payload[8:]
    for codec in (NUMPY, native):
        for damaged, message in (
            (payload + b"\0", "its length"),
            (payload[:-1], "its length"),
            (b"", "its length"),
            (huge, "its length"),
            (moved, "its escapes"),
            (bytes(padded), "its padding"),
        ):
            with pytest.raises(FrameError, match=message):
                codec.decode(memoryview(damaged), shape, np.empty(shape.raw_bytes, np.uint8))
