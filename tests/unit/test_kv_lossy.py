"""The codecs that change the numbers: exact formats, bounded errors, and nothing that a payload can break."""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.codecs.base import Codec, SectionShape
from kv_transfer.codecs.calibration import Calibration
from kv_transfer.codecs.registry import STANDARD, CodecRegistry
from kv_transfer.codecs.tc4 import Tc4Codec
from kv_transfer.conversion import TORCH_DTYPES
from kv_transfer.frames import KIND_K, KIND_V, FrameLimits, decode_header, wire_name
from kv_transfer.manifest import FrameSpan, TicketRef
from kv_transfer.packing import pack_frame, unpack_frame
from pdcore.errors import FrameError
from pdcore.types import KvGeometry, RequestKey
from tests.support.calibrations import random_calibration
from tests.support.kv_sections import decode, dimensions, encode, random_section, section_shape

TC4 = Tc4Codec(random_calibration(layers=3, heads=4, head_dim=16, width=32, step=0.05))
CODECS: dict[str, Codec] = {codec.name: codec for codec in (*STANDARD, TC4) if not codec.lossless}
COMBINATIONS = [(name, dtype) for name, codec in CODECS.items() for dtype in codec.dtypes]
KEPT = 4

shapes = st.builds(
    lambda kind, first, layers, start, count, group, dtype: section_shape(
        kind, dtype, layers=(first, layers), tokens=(start, count), heads=(2 * group, 2), head_dim=16
    ),
    st.sampled_from([KIND_K, KIND_V]),
    st.integers(0, 1),
    st.integers(1, 2),
    st.one_of(st.integers(0, 6), st.integers(0, 3000)),
    st.integers(1, 150),
    st.integers(0, 1),
    st.sampled_from(["bfloat16", "float16"]),
)


# --- golden vectors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "size", "checksum"),
    [
        ("q8", KIND_K, 18480, 1068812611),
        ("q8", KIND_V, 18480, 1068812611),
        ("fp8", KIND_K, 18480, 443781351),
        ("fp8", KIND_V, 18480, 443781351),
        ("k6v4", KIND_K, 16128, 1108002232),
        ("k6v4", KIND_V, 10816, 1663497568),
        ("k4v4", KIND_K, 11776, 1415483904),
        ("k4v4", KIND_V, 10816, 1663497568),
    ],
)
def test_golden_payload(name: str, kind: int, size: int, checksum: int) -> None:
    """Two layers of 70 tokens, 2 heads of 64: a change of these bytes is a new version of the codec."""
    words = [(0x3F80 + 37 * i * i) & 0x1FF | 0x3E00 | (i % 5 == 0) << 15 for i in range(2 * 70 * 2 * 64)]
    shape = SectionShape(kind, "bfloat16", 0, 2, 2, 70, 0, 2, 64)
    payload = CODECS[name].encode(np.array(words, np.uint16).view(np.uint8), shape)
    assert payload is not None
    data = b"".join(payload)
    assert (len(data), zlib.crc32(data)) == (size, checksum)


GOLDEN_TC4 = bytes.fromhex(
    "80bfa53f143ecd3ed03f1dbfb43e953ec03e353ff4bffd3e503eed3fd43f05be803e453f543ead3f50bf3d3f743ff53fc03ed5bf"
    "343fdd3ed03e0d3f94bf653e803fe53e943e8dbed03e5d3f343e553fc0be753e743ebd3e503f2dbe543fc53e803e853ed4be6d3f"
    "503e7d3ff43eb5bec03e153fb43f9d3ed0bf4d3f143f253f00000000ea00000028b52ffd60c000050700c6593316b025e98434db"
    "304992244992244992942364ef2d930f2d002d002b0023e215fa05e69ccc6a5d0b65c1557c604f2bdb56aa4aa8aa4ddfcc7aa4a6"
    "a93495f7bac5ac62d8897798616626147ec36f26737662c1c4889df86c316c928464ff3beb493d8037a3c3f37436cad8d818f698"
    "f245beb6b2b28903bf19dd8c8d32363acfc37b4c79dce20bfdef242149d18db83c034fb160628273329ff559b9b8d6fd2fa917f4"
    "0cfc06f126e8dee5a934bd16b7f0537eaa84aa2abaa389780cbeaed69339db6997b80aee95956dacce0a0500b48a9413e45877f9"
    "a0b81ccf9c16"
)


def test_golden_payload_of_tc4() -> None:
    """V of 8 tokens from token 3 on, with directions and a step that leave nothing to rounding: token 3 as it was,
    the others in quarters. What an encoder writes may differ by the version of zstd; what is read may not."""
    calibration = Calibration(
        model_digest="golden",
        head_dim=16,
        mean=np.zeros((1, 2, 2, 32), np.float32),
        basis=np.broadcast_to(np.eye(32, dtype=np.float32), (1, 2, 2, 32, 32)).copy(),
        step=np.full((1, 2), 0.25, np.float32),
        inverse_frequencies=np.full(8, 0.5),
    )
    words = np.array(
        [(0x3F80 + 37 * i * i) & 0x1FF | 0x3E00 | (i % 5 == 0) << 15 for i in range(8 * 4 * 16)], np.uint16
    )
    values = (words.astype(np.uint32) << 16).view(np.float32)
    expected = np.concatenate([values[:64], np.rint(values[64:] / 0.25) * np.float32(0.25)])
    shape = SectionShape(KIND_V, "bfloat16", 0, 1, 3, 8, 0, 4, 16)
    codec = Tc4Codec(calibration)
    written = codec.encode(words.view(np.uint8), shape)
    assert written is not None
    for payload in (GOLDEN_TC4, b"".join(written)):
        out = np.empty(words.nbytes, np.uint8)
        codec.decode(memoryview(payload), shape, out)
        assert np.array_equal((out.view(np.uint16).astype(np.uint32) << 16).view(np.float32), expected)


# --- the formats, written once more without regard for speed --------------------------------------------------------


def bfloat16_up(number: float) -> tuple[int, float]:
    """Bits and value of the least bfloat16 >= `number` (a float32 >= 0)."""
    (raw,) = struct.unpack("<I", struct.pack("<f", number))
    upper = (raw + 0xFFFF) >> 16
    return upper, struct.unpack("<f", struct.pack("<I", upper << 16))[0]


def rows_payload(section: torch.Tensor, largest_code: int) -> tuple[bytes, list[torch.Tensor]]:
    """Scales of `q8` or `fp8`, and each row divided by its scale (by 1 where that is 0)."""
    scales, quotients = b"", []
    for row in section.float().reshape(-1, section.shape[-1]):
        raw, scale = bfloat16_up((row.abs().max() / torch.tensor(float(largest_code))).item())
        scales += struct.pack("<H", raw)
        quotients.append(row / (scale or 1.0))
    return scales, quotients


def grouped_payload(section: torch.Tensor, shape: SectionShape, code_bits: int) -> bytes:
    """`k6v4` or `k4v4` of one section."""
    levels = np.float32(2**code_bits - 1)
    kept = max(0, min(KEPT - shape.token_start, shape.token_count))
    rest = section[:, kept:].float().numpy()
    layers, tokens, heads, dims = rest.shape
    codes, lows, highs = np.zeros(rest.shape, np.uint8), [], []

    def one(where: tuple[object, ...]) -> None:
        low, high = rest[where].min(), rest[where].max()
        lows.append(low)
        highs.append(high)
        inverse = levels / (high - low) if high > low else np.float32(0)
        codes[where] = np.rint((rest[where] - low) * (inverse if np.isfinite(inverse) else np.float32(0)))

    if shape.kind == KIND_K:
        for layer, group, head, dim in itertools.product(
            range(layers), range(math.ceil(tokens / 64)), range(heads), range(dims)
        ):
            one((layer, slice(64 * group, 64 * group + 64), head, dim))
    else:
        for layer, token, head, group in itertools.product(
            range(layers), range(tokens), range(heads), range(math.ceil(dims / 64))
        ):
            one((layer, token, head, slice(64 * group, 64 * group + 64)))
    flat = codes.reshape(-1).tolist()
    payload = section[:, :kept].contiguous().view(torch.uint8).numpy().tobytes()
    for ends in (lows, highs):
        ends = torch.tensor(np.array(ends, np.float32)).to(section.dtype)
        payload += ends.view(torch.uint8).numpy().tobytes() if len(ends) else b""
    payload += bytes(flat[i] % 16 | (flat[i + 1] % 16) << 4 for i in range(0, len(flat), 2))
    if code_bits == 6:
        payload += bytes(sum((flat[i + j] >> 4) << (2 * j) for j in range(4)) for i in range(0, len(flat), 4))
    return payload


@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**32), scale=st.sampled_from([1e-4, 1.0, 50.0]))
def test_q8_and_fp8_are_as_documented(shape: SectionShape, seed: int, scale: float) -> None:
    section = random_section(shape, seed, scale)
    section[0, 0, 0] = 0
    scales, quotients = rows_payload(section, 127)
    codes = torch.stack(quotients).round().to(torch.int8)
    assert encode(CODECS["q8"], section, shape) == scales + codes.numpy().tobytes()
    packed = encode(CODECS["q8-zstd"], section, shape)
    if packed is not None:
        assert packed[: len(scales)] == scales
        assert zstandard.ZstdDecompressor().decompress(packed[len(scales) :]) == codes.numpy().tobytes()
    scales, quotients = rows_payload(section, 448)
    codes = torch.stack(quotients).to(torch.float8_e4m3fn).view(torch.uint8)
    assert encode(CODECS["fp8"], section, shape) == scales + codes.numpy().tobytes()


@pytest.mark.parametrize("name", ["k6v4", "k4v4"])
@pytest.mark.parametrize("head_dim", [4, 64, 80, 128])
@settings(max_examples=12, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**32))
def test_groups_are_as_documented(name: str, head_dim: int, shape: SectionShape, seed: int) -> None:
    shape = shape._replace(head_dim=head_dim)
    section = random_section(shape, seed)
    section[0, :, 0, 1] = 3.0  # a channel without a range
    code_bits = 6 if name == "k6v4" and shape.kind == KIND_K else 4
    expected = grouped_payload(section, shape, code_bits)
    assert encode(CODECS[name], section, shape) == (expected if len(expected) < shape.raw_bytes else None)


def test_fp8_values_are_those_of_the_format() -> None:
    shape = section_shape(KIND_V, "float32", tokens=(0, 1), heads=(0, 1), head_dim=256)
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0
    found = decode(CODECS["fp8"], struct.pack("<H", 0x3F80) + codes.tobytes(), shape)
    assert torch.equal(found.reshape(-1), torch.from_numpy(codes).view(torch.float8_e4m3fn).float())


# --- errors ---------------------------------------------------------------------------------------------------------


def rounding(section: torch.Tensor) -> torch.Tensor:
    """What rounding to the dtype may add, element by element, for numbers up to twice as large."""
    return section.float().abs() * torch.finfo(section.dtype).eps * 2 + torch.finfo(section.dtype).tiny


def allowed_error(name: str, section: torch.Tensor, shape: SectionShape) -> torch.Tensor:
    """What each element may be off by."""
    numbers = section.float()
    largest = numbers.abs().amax(-1, keepdim=True)
    if name in ("q8", "q8-zstd"):
        return largest / 127 * 0.51 + rounding(section)
    if name == "fp8":
        return torch.maximum(numbers.abs() / 16 * 1.01, largest / 448 * 2**-10 * 1.01) + rounding(section)
    if name == "tc4":  # an error of half a step in every one of 32 directions
        return torch.full_like(numbers, 0.05 / 2 * 32**0.5) + rounding(section) * 4
    code_bits = 6 if name == "k6v4" and shape.kind == KIND_K else 4
    axis = 1 if shape.kind == KIND_K else 3
    spread = numbers.amax(axis, keepdim=True) - numbers.amin(axis, keepdim=True)
    return spread / (2**code_bits - 1) * 0.51 + rounding(section) + spread * 1e-6


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=25, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**32), scale=st.sampled_from([1e-3, 1.0, 20.0]))
def test_errors_are_bounded(name: str, shape: SectionShape, seed: int, scale: float) -> None:
    section = random_section(shape, seed, scale)
    payload = encode(CODECS[name], section, shape)
    if payload is None:
        return
    assert len(payload) < shape.raw_bytes
    error = (decode(CODECS[name], payload, shape).float() - section.float()).abs()
    assert (error <= allowed_error(name, section, shape)).all(), error.max()
    if name in ("k6v4", "k4v4", "tc4"):
        assert not error[:, : max(0, KEPT - shape.token_start)].any()


@pytest.mark.parametrize(("name", "dtype"), COMBINATIONS)
def test_the_largest_numbers_stay_finite(name: str, dtype: str) -> None:
    for kind, exponent in itertools.product((KIND_K, KIND_V), range(-12, 1)):
        shape = section_shape(kind, dtype, tokens=(5, 64))
        largest = torch.finfo(TORCH_DTYPES[dtype]).max * 2.0**exponent
        section = torch.sign(random_section(shape, 3)) * torch.full(dimensions(shape), largest)
        payload = encode(CODECS[name], section.to(TORCH_DTYPES[dtype]), shape)
        if payload is not None:
            assert decode(CODECS[name], payload, shape).isfinite().all()


@pytest.mark.parametrize(("name", "dtype"), COMBINATIONS)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_sent_raw(name: str, dtype: str, number: float) -> None:
    for kind, at in itertools.product((KIND_K, KIND_V), (4, 40, 63)):
        shape = section_shape(kind, dtype, tokens=(0, 64))
        section = random_section(shape, 1)
        section[0, at, 1, 3] = number
        assert encode(CODECS[name], section, shape) is None


# To a codec that subtracts a mean, zero is nothing special.
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, dtype in COMBINATIONS if name != "tc4"])
def test_zeros_stay_zeros(name: str, dtype: str) -> None:
    for kind in (KIND_K, KIND_V):
        shape = section_shape(kind, dtype, tokens=(0, 70))
        section = torch.zeros(dimensions(shape), dtype=TORCH_DTYPES[dtype])
        payload = encode(CODECS[name], section, shape)
        assert payload is not None
        assert not decode(CODECS[name], payload, shape).any()


# --- how a transfer is cut ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("kind", [KIND_K, KIND_V])
@pytest.mark.parametrize("cuts", [(17,), (1, 2, 3, 4, 5), (64, 128), (100, 163, 164), tuple(range(7, 200, 7))])
def test_quality_does_not_depend_on_cuts(name: str, kind: int, cuts: tuple[int, ...]) -> None:
    whole = section_shape(kind, tokens=(0, 200))
    section = random_section(whole, 11)
    payload = encode(CODECS[name], section, whole)
    assert payload is not None
    at_once = decode(CODECS[name], payload, whole).float()
    pieces = []
    for start, end in itertools.pairwise((0, *cuts, 200)):
        shape = whole._replace(token_start=start, token_count=end - start)
        part = section[:, start:end]
        packed = encode(CODECS[name], part, shape)
        pieces.append(part if packed is None else decode(CODECS[name], packed, shape))
    cut_error = (torch.cat(pieces, 1).float() - section.float()).square().mean()
    whole_error = (at_once - section.float()).square().mean()
    assert cut_error <= 1.1 * whole_error
    if (name, kind) not in (("k6v4", KIND_K), ("k4v4", KIND_K)):
        assert all(piece.isfinite().all() for piece in pieces)


@pytest.mark.parametrize("name", CODECS)
def test_every_thread_gets_the_same(name: str) -> None:
    shapes_of = [section_shape(number % 2, tokens=(7 * number, 40 + number)) for number in range(24)]
    sections = [random_section(shape, seed) for seed, shape in enumerate(shapes_of)]

    def there_and_back(number: int) -> tuple[bytes | None, torch.Tensor | None]:
        payload = encode(CODECS[name], sections[number], shapes_of[number])
        return payload, None if payload is None else decode(CODECS[name], payload, shapes_of[number])

    alone = [there_and_back(number) for number in range(24)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(there_and_back, range(24)))
    for (payload, section), (other, found) in zip(alone, together, strict=True):
        assert payload == other
        assert (section is None and found is None) or torch.equal(section, found)  # type: ignore[arg-type]


# --- tc4 ------------------------------------------------------------------------------------------------------------


def test_tc4_spreads_the_error_evenly() -> None:
    for kind in (KIND_K, KIND_V):
        shape = section_shape(kind, layers=(1, 2), tokens=(100, 256), heads=(0, 4))
        section = random_section(shape, 2)
        payload = encode(TC4, section, shape)
        assert payload is not None
        error = decode(TC4, payload, shape).float() - section.float()
        rounded = random_section(shape, 2).float().square().mean() * 2**-17  # of bfloat16 itself, about
        assert 0.8 * 0.05**2 / 12 < error.square().mean() < 1.2 * (0.05**2 / 12 + rounded)


def test_tc4_works_on_any_whole_groups_of_heads() -> None:
    whole = section_shape(KIND_K, layers=(0, 3), tokens=(9, 80), heads=(0, 4))
    section = random_section(whole, 4)
    payload = encode(TC4, section, whole)
    assert payload is not None
    at_once = decode(TC4, payload, whole)
    for start in (0, 2):
        shape = whole._replace(head_start=start, head_count=2)
        part = encode(TC4, section[:, :, start : start + 2], shape)
        assert part is not None
        assert torch.equal(decode(TC4, part, shape), at_once[:, :, start : start + 2])


def test_tc4_escapes_what_does_not_fit_a_byte() -> None:
    shape = section_shape(KIND_V, tokens=(50, 60))
    section = random_section(shape, 6)
    section[0, 10] *= 100
    section[0, 20, 1, 3] = -3000
    payload = encode(TC4, section, shape)
    assert payload is not None
    assert struct.unpack_from("<I", payload)[0] > 2
    error = (decode(TC4, payload, shape).float() - section.float()).abs()
    assert (error <= 0.05 / 2 * 32**0.5 + section.float().abs().amax((2, 3), keepdim=True) * 2**-7).all()


@pytest.mark.parametrize(
    "change",
    [
        {"head_start": 1},
        {"head_count": 1},
        {"head_start": 4},
        {"layer_start": 3},
        {"layer_count": 4},
        {"head_dim": 8, "head_count": 4},
    ],
)
def test_tc4_leaves_alone_what_it_was_not_made_for(change: dict[str, int]) -> None:
    shape = section_shape(KIND_K)
    payload = encode(TC4, random_section(shape, 1), shape)
    assert payload is not None
    other = shape._replace(**change)
    assert encode(TC4, random_section(other, 1), other) is None
    with pytest.raises(FrameError):
        decode(TC4, payload, other)


# --- damaged and hostile payloads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from([KIND_K, KIND_V]),
    tokens=st.sampled_from([(0, 3), (0, 40), (3, 2), (17, 33), (0, 150)]),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
def test_damaged_payloads_are_refused_or_decode_to_numbers(
    name: str, data: st.DataObject, kind: int, tokens: tuple[int, int], dtype: str
) -> None:
    shape = section_shape(kind, dtype, tokens=tokens)
    payload = bytearray(encode(CODECS[name], random_section(shape, 5), shape) or b"\x01" * 40)
    change = data.draw(st.sampled_from(["flip", "cut", "grow", "random"]))
    if change == "flip":
        for _ in range(data.draw(st.integers(1, 8))):
            payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    elif change == "cut":
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    elif change == "grow":
        payload += data.draw(st.binary(min_size=1, max_size=40))
    else:
        payload = bytearray(data.draw(st.binary(max_size=400)))
    try:
        decode(CODECS[name], bytes(payload), shape)
    except FrameError:
        return
    # A length that does not follow from the shape is never accepted.
    if name != "q8-zstd" and change in ("cut", "grow"):
        pytest.fail("accepted")


@pytest.mark.parametrize("bound", [2**31, 2**32 - 1, 10**6])
def test_tc4_does_not_believe_counts(bound: int) -> None:
    shape = section_shape(KIND_V, tokens=(9, 40))
    payload = encode(TC4, random_section(shape, 1, 0.1), shape)
    assert payload is not None
    assert struct.unpack_from("<I", payload)[0] == 0  # so that a stream's length follows
    for offset in (0, 4):
        with pytest.raises(FrameError):
            decode(TC4, payload[:offset] + struct.pack("<I", bound) + payload[offset + 4 :], shape)


@pytest.mark.parametrize("escape", [0, 127, -128 + 1, -(2**31), 2**31 - 1, 2**22])
def test_tc4_refuses_escapes_that_no_encoder_writes(escape: int) -> None:
    shape = section_shape(KIND_V, tokens=(9, 40))
    section = random_section(shape, 1)
    section[0, 5, 0, 0] = 3000
    payload = encode(TC4, section, shape)
    assert payload is not None
    assert struct.unpack_from("<I", payload)[0] > 0
    with pytest.raises(FrameError):
        decode(TC4, payload[:4] + struct.pack("<i", escape) + payload[8:], shape)


@pytest.mark.parametrize("name", ["q8", "q8-zstd", "fp8"])
@pytest.mark.parametrize("scale", [0x7F80, 0xFF80, 0x7FC0, 0xBF80, 0x7F7F])
def test_scales_that_are_not_numbers_are_refused(name: str, scale: int) -> None:
    shape = section_shape(KIND_K)
    payload = encode(CODECS[name], random_section(shape, 1), shape)
    assert payload is not None
    with pytest.raises(FrameError):
        decode(CODECS[name], struct.pack("<H", scale) + payload[2:], shape)


@pytest.mark.parametrize("low_and_high", [(0x7F80, 0x7F80), (0x3F80, 0x3F00), (0x7FC0, 0x3F80), (0xFF7F, 0x7F7F)])
def test_ranges_that_are_none_are_refused(low_and_high: tuple[int, int]) -> None:
    shape = section_shape(KIND_K, tokens=(4, 64))
    payload = encode(CODECS["k6v4"], random_section(shape, 1), shape)
    assert payload is not None
    ranges = 2 * shape.head_count * shape.head_dim
    low, high = (struct.pack("<H", number) for number in low_and_high)
    with pytest.raises(FrameError):
        decode(CODECS["k6v4"], low + payload[2:ranges] + high + payload[ranges + 2 :], shape)


@pytest.mark.parametrize("name", ["k6v4", "k4v4"])
def test_heads_that_would_share_bytes_are_sent_raw(name: str) -> None:
    shape = section_shape(KIND_V, tokens=(4, 64), heads=(0, 4), head_dim=6)
    assert encode(CODECS[name], random_section(shape, 1), shape) is None
    with pytest.raises(FrameError):
        decode(CODECS[name], bytes(shape.raw_bytes // 4), shape)


# --- whole frames ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), COMBINATIONS)
def test_frames_carry_them(name: str, dtype: str) -> None:
    codec = CODECS[name]
    geometry = KvGeometry("model", 3, 4, 16, dtype, 16, 64)
    limits = FrameLimits.for_ticket(
        ref=TicketRef(1, 2),
        key=RequestKey("r", 0),
        geometry=geometry,
        token_start=0,
        token_end=90,
        codecs=(wire_name(codec.name, codec.calibration),),
    )
    span = FrameSpan(1, 2, 0, 90)
    kinds = [section_shape(kind, dtype, layers=(1, 2), tokens=(0, 90), heads=(0, 4)) for kind in (KIND_K, KIND_V)]
    sections = [random_section(shape, seed) for seed, shape in enumerate(kinds)]
    packed = pack_frame(torch.stack(sections, 1), limits, span, codec)
    frame = memoryview(packed.data)
    header = decode_header(frame, limits)
    assert header.calibration == codec.calibration
    assert {section.codec for section in header.sections} == {name}
    registry = CodecRegistry((*STANDARD, TC4))
    found = unpack_frame(frame, header, registry)
    for kind, (section, shape) in enumerate(zip(sections, kinds, strict=True)):
        payload = encode(codec, section, shape)
        assert payload is not None
        assert torch.equal(found[:, kind], decode(codec, payload, shape))
    if name == "tc4":
        with pytest.raises(FrameError):  # a receiver without the calibration
            unpack_frame(frame, header, STANDARD)
