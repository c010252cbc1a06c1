"""Device codecs and paged gather/scatter: the torch references here, the Triton kernels in Triton's interpreter.

The interpreter is chosen for a whole process, before Triton is imported. So every test of this file runs twice: with
the references in this process, and with the kernels in one that `test_the_kernels_in_the_interpreter` starts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_transfer.codecs.base import Codec, SectionShape
from kv_transfer.codecs.bexp3 import Bexp3Codec
from kv_transfer.codecs.floats import LARGEST
from kv_transfer.codecs.grouped import GroupedCodec
from kv_transfer.codecs.q8 import Q8Codec
from kv_transfer.kernels.backends import Backend, backend_for
from kv_transfer.kernels.device_codecs import DeviceCodec
from kv_transfer.kernels.paged import PagedLayers, WireRange, gather, scatter
from pdcore.errors import FrameError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKEND: Backend = "triton" if INTERPRETED else "torch"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# No deadline: an interpreted kernel takes what it takes.
examples = settings(max_examples=16 if INTERPRETED else 100, deadline=None, derandomize=INTERPRETED)

if not INTERPRETED:

    @pytest.mark.timeout(600)
    def test_the_kernels_in_the_interpreter() -> None:
        pytest.importorskip("triton")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--timeout=500", "-p", "no:cacheprovider", __file__],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=550,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        passed = re.search(r"(\d+) passed", done.stdout)
        assert passed is not None, done.stdout
        assert int(passed[1]) > 10, done.stdout

    def test_the_references_need_no_triton() -> None:
        script = (
            "import sys; sys.modules['triton'] = None\n"
            "import torch\n"
            "from kv_transfer.codecs.base import SectionShape\n"
            "from kv_transfer.kernels import paged\n"
            "from kv_transfer.kernels.backends import backend_for\n"
            "from kv_transfer.kernels.device_codecs import DeviceCodec\n"
            "values = torch.ones(1, 64, 2, 16, dtype=torch.bfloat16)\n"
            "shape = SectionShape(0, 'bfloat16', 0, 1, 0, 64, 0, 2, 16)\n"
            "for name in ('bexp3', 'q8', 'k6v4', 'k4v4'):\n"
            "    assert DeviceCodec(name, backend_for(values.device)).encode(values, shape) is not None\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def section(layers: int, tokens: int, heads: int, dim: int, dtype: str = "bfloat16") -> SectionShape:
    return SectionShape(
        kind=0,
        dtype=dtype,
        layer_start=0,
        layer_count=layers,
        token_start=0,
        token_count=tokens,
        head_start=0,
        head_count=heads,
        head_dim=dim,
    )


def kv_like(rng: np.random.Generator, shape: SectionShape) -> torch.Tensor:
    """Values with a scale for each channel, as KV has them, and some outliers and zeros."""
    size = (shape.layer_count, shape.token_count, shape.head_count, shape.head_dim)
    scale = np.exp2(rng.normal(0, 2, (shape.layer_count, 1, shape.head_count, shape.head_dim)))
    values = rng.normal(0, 1, size) * scale
    values[rng.random(size) < 0.02] *= 300
    values[rng.random(size) < 0.02] = 0
    values[rng.random(size) < 0.01] *= 1e-4
    return torch.from_numpy(values.astype(np.float32)).to(DTYPES[shape.dtype]) + 0  # no negative zeros


def any_bits(rng: np.random.Generator, shape: SectionShape) -> torch.Tensor:
    """Every pattern is as likely as any other, NaNs included."""
    raw = rng.integers(0, 256, shape.raw_bytes, dtype=np.uint8)
    return torch.from_numpy(raw).view(DTYPES[shape.dtype])


def as_payload(data: bytes | NDArray[np.uint8], misalign: int = 0) -> torch.Tensor:
    """As it comes out of a frame: within other memory, anywhere."""
    memory = np.zeros(len(data) + misalign, np.uint8)
    memory[misalign:] = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    return torch.from_numpy(memory)[misalign:]


def bits_of(values: torch.Tensor) -> NDArray[np.uint8]:
    flat = values.contiguous().view(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


# bexp3


def bexp3_by_the_book(values: torch.Tensor, shape: SectionShape) -> bytes:
    """The payload, straight from its definition."""
    channels = shape.head_count * shape.head_dim
    words = bits_of(values).view("<u2").reshape(shape.layer_count, shape.token_count, channels)
    counts, maxima, codes, escapes = [], [], [], []
    for layer in words:
        for start in range(0, shape.token_count, 64):
            exponents = (layer[start : start + 64].astype(int) >> 7) & 0xFF
            maximum = exponents.max(0)
            maxima.append(bytes(maximum.tolist()))
            distance = (maximum - exponents).reshape(-1)
            counts.append(int((distance > 6).sum()))
            escapes.append(bytes(exponents.reshape(-1)[distance > 6].tolist()))
            codes.extend(min(int(d), 7) for d in distance)
    low = ((words >> 8) & 0x80) | (words & 0x7F)
    planes = bytearray(3 * -(-len(codes) // 8))
    for plane in range(3):
        for i, code in enumerate(codes):
            planes[plane * len(planes) // 3 + i // 8] |= (code >> plane & 1) << i % 8
    return b"".join(
        [
            *(count.to_bytes(4, "little") for count in counts),
            *maxima,
            low.astype(np.uint8).tobytes(),
            planes,
            *escapes,
        ]
    )


dims = st.one_of(st.sampled_from([8, 24, 64, 80]), st.integers(1, 20))
bexp3_shapes = st.builds(section, st.integers(1, 2), st.integers(1, 140), st.integers(1, 2), dims)


@examples
@given(bexp3_shapes, st.integers(0, 2**32 - 1), st.sampled_from([kv_like, any_bits]), st.integers(0, 3))
def test_bexp3_is_what_its_definition_says(shape: SectionShape, seed: int, make, misalign: int) -> None:
    codec = DeviceCodec("bexp3", BACKEND)
    values = make(np.random.default_rng(seed), shape)
    expected = bexp3_by_the_book(values, shape)
    payload = codec.encode(values, shape)
    if len(expected) >= shape.raw_bytes:
        assert payload is None
    else:
        assert payload is not None
        assert payload.numpy().tobytes() == expected
    # What need not be sent can be read all the same.
    out = torch.empty_like(values)
    codec.decode(as_payload(expected, misalign), shape, out)
    assert np.array_equal(bits_of(out), bits_of(values))


@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (1, 80), (1, 5)])
def test_bexp3_without_escapes_and_with_nothing_else(heads: int, dim: int) -> None:
    codec = DeviceCodec("bexp3", BACKEND)
    shape = section(2, 65, heads, dim)
    same = torch.full((shape.elements,), -1.5, dtype=torch.bfloat16)
    payload = codec.encode(same, shape)
    assert payload is not None
    assert payload.numpy().tobytes() == bexp3_by_the_book(same, shape)

    # In each group one token of large values and the rest of small ones: the rest escapes.
    values = torch.full((2, 65, heads, dim), 1e-3, dtype=torch.bfloat16)
    values[:, ::64] = 1e3
    payload = codec.encode(values, shape)
    assert payload is None
    out = torch.empty_like(values)
    codec.decode(as_payload(bexp3_by_the_book(values, shape)), shape, out)
    assert torch.equal(out, values)


@examples
@given(bexp3_shapes, st.integers(0, 2**32 - 1), st.data())
def test_a_damaged_bexp3_payload_is_refused_or_decodes_to_something(
    shape: SectionShape, seed: int, data: st.DataObject
) -> None:
    codec = DeviceCodec("bexp3", BACKEND)
    values = kv_like(np.random.default_rng(seed), shape)
    payload = bytearray(bexp3_by_the_book(values, shape))
    out = torch.empty_like(values)
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    expected_counts = damaged_counts(bytes(payload), shape)
    try:
        codec.decode(as_payload(bytes(payload)), shape, out)
    except FrameError:
        assert expected_counts is None
    else:
        assert expected_counts is not None


def damaged_counts(payload: bytes, shape: SectionShape) -> list[int] | None:
    """Escapes of each tile if the payload is well formed, None if not."""
    channels = shape.head_count * shape.head_dim
    lengths = [min(64, shape.token_count - start) for start in range(0, shape.token_count, 64)] * shape.layer_count
    plane_at = 4 * len(lengths) + len(lengths) * channels + shape.elements
    size = -(-shape.elements // 8)
    planes = [int.from_bytes(payload[plane_at + p * size : plane_at + (p + 1) * size], "little") for p in range(3)]
    if any(plane >> shape.elements for plane in planes):
        return None
    escaped = planes[0] & planes[1] & planes[2]
    counts, at = [], 0
    for tokens in lengths:
        counts.append((escaped >> at & (1 << tokens * channels) - 1).bit_count())
        at += tokens * channels
    stated = np.frombuffer(payload[: 4 * len(lengths)], "<u4").tolist()
    fits = len(payload) == plane_at + 3 * size + sum(counts)
    return counts if fits and stated == counts else None


@pytest.mark.parametrize("dim", [16, 5])
def test_bexp3_payloads_of_a_wrong_length_are_refused(dim: int) -> None:
    codec = DeviceCodec("bexp3", BACKEND)
    shape = section(1, 70, 2, dim)
    values = kv_like(np.random.default_rng(1), shape)
    payload = bexp3_by_the_book(values, shape)
    out = torch.empty_like(values)
    for wrong in (b"", payload[:10], payload[:-1], payload + b"\0", payload + bytes(4 * shape.raw_bytes)):
        with pytest.raises(FrameError):
            codec.decode(as_payload(wrong), shape, out)


# q8


def q8_by_the_book(values: torch.Tensor, shape: SectionShape) -> bytes:
    rows = values.to(torch.float32).view(-1, shape.head_dim).numpy()
    scales, codes = [], []
    for row in rows:
        step = np.float32(np.abs(row).max()) / np.float32(127)
        bits = int(step.view(np.uint32))
        scale_bits = (bits >> 16) + (bits & 0xFFFF != 0)
        scale = np.uint32(scale_bits << 16).view(np.float32)
        scales.append(scale_bits)
        quotients = row / scale if scale_bits else np.zeros_like(row)
        codes.append(np.clip(np.rint(quotients), -127, 127).astype(np.int8))
    return np.array(scales, "<u2").tobytes() + np.concatenate(codes).tobytes()


def q8_decoded_by_the_book(payload: bytes, shape: SectionShape) -> torch.Tensor:
    rows = shape.elements // shape.head_dim
    scales = (np.frombuffer(payload, "<u2", rows).astype(np.uint32) << 16).view(np.float32)
    codes = np.frombuffer(payload, np.int8, offset=2 * rows).reshape(rows, shape.head_dim)
    with np.errstate(over="ignore"):
        return torch.from_numpy(codes.astype(np.float32) * scales[:, None]).to(DTYPES[shape.dtype])


def finite(rng: np.random.Generator, shape: SectionShape) -> torch.Tensor:
    """Any bits but those of infinities, NaNs and what is near to them; subnormals and zeros of both signs too."""
    values = any_bits(rng, shape)
    return torch.where(values.abs() <= LARGEST[shape.dtype], values, torch.zeros_like(values))


def tiny(rng: np.random.Generator, shape: SectionShape) -> torch.Tensor:
    """Around the smallest that there is, where scales become subnormal and then zero."""
    smallest = 2.0**-24 if shape.dtype == "float16" else 2.0**-133 if shape.dtype == "bfloat16" else 2.0**-149
    size = (shape.layer_count, shape.token_count, shape.head_count, shape.head_dim)
    values = rng.integers(-200, 200, size) * rng.integers(0, 2, (*size[:3], 1)) * smallest
    return torch.from_numpy(values).to(DTYPES[shape.dtype])


q8_shapes = st.builds(
    section, st.integers(1, 2), st.integers(1, 40), st.integers(1, 3), dims, st.sampled_from([*DTYPES])
)


@examples
@given(q8_shapes, st.integers(0, 2**32 - 1), st.sampled_from([kv_like, finite, tiny]), st.integers(0, 3))
def test_q8_is_what_its_definition_says(shape: SectionShape, seed: int, make, misalign: int) -> None:
    codec = DeviceCodec("q8", BACKEND)
    values = make(np.random.default_rng(seed), shape)
    expected = q8_by_the_book(values, shape)
    payload = codec.encode(values, shape)
    if len(expected) >= shape.raw_bytes:
        assert payload is None
    else:
        assert payload is not None
        assert payload.numpy().tobytes() == expected
    out = torch.empty_like(values)
    codec.decode(as_payload(expected, misalign), shape, out)
    assert np.array_equal(bits_of(out), bits_of(q8_decoded_by_the_book(expected, shape)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), "largest"])
def test_q8_does_not_take_what_would_not_come_back_finite(dtype: str, value: float | str) -> None:
    codec = DeviceCodec("q8", BACKEND)
    shape = section(1, 30, 2, 80, dtype)
    values = kv_like(np.random.default_rng(3), shape)
    assert codec.encode(values, shape) is not None
    values[0, 29, 1, 77] = torch.finfo(values.dtype).max if value == "largest" else value
    assert codec.encode(values, shape) is None


@pytest.mark.parametrize("scale", [0x7F80, 0xFF80, 0x7FC0])
def test_q8_scales_that_are_not_finite_are_refused(scale: int) -> None:
    shape = section(2, 3, 2, 16)
    payload = bytearray(q8_by_the_book(kv_like(np.random.default_rng(5), shape), shape))
    payload[22:24] = scale.to_bytes(2, "little")
    with pytest.raises(FrameError, match="finite"):
        DeviceCodec("q8", BACKEND).decode(as_payload(bytes(payload)), shape, torch.empty(192, dtype=torch.bfloat16))


def test_q8_payloads_of_a_wrong_length_are_refused() -> None:
    shape = section(1, 3, 2, 16)
    out = torch.empty(shape.elements, dtype=torch.bfloat16)
    for size in (0, 1, 107, 109):
        with pytest.raises(FrameError, match="q8"):
            DeviceCodec("q8", BACKEND).decode(torch.zeros(size, dtype=torch.uint8), shape, out)


# k6v4 and k4v4


def grouped_by_the_book(values: torch.Tensor, shape: SectionShape, bits: int) -> tuple[bytes, torch.Tensor]:
    """The payload, straight from its definition, and what it decodes to."""
    size = (shape.layer_count, shape.token_count, shape.head_count, shape.head_dim)
    section = values.view(size)
    kept = min(max(4 - shape.token_start, 0), shape.token_count)
    rest = section[:, kept:].float().numpy()
    levels = np.float32(2**bits - 1)
    codes = np.zeros(rest.shape, int)
    decoded = np.zeros(rest.shape, np.float32)
    lows, highs = [], []
    for index in group_indices(rest.shape, along=1 if shape.kind == 0 else 3):
        low, high = (bound(rest[index]) + np.float32(0) for bound in (np.min, np.max))
        lows.append(low)
        highs.append(high)
        with np.errstate(divide="ignore", over="ignore"):
            step = levels / (high - low)
        if np.isfinite(step):
            codes[index] = np.rint((rest[index] - low) * step)
        decoded[index] = codes[index].astype(np.float32) * ((high - low) / levels) + low
    dtype = values.dtype
    flat = codes.reshape(-1)
    payload = [
        bits_of(section[:, :kept]),
        *(bits_of(torch.tensor(np.array(bounds, np.float32)).to(dtype)) for bounds in (lows, highs)),
        (flat[0::2] % 16 + flat[1::2] % 16 * 16).astype(np.uint8),
    ]
    if bits == 6:
        upper = flat.reshape(-1, 4) // 16
        payload.append((upper * [1, 4, 16, 64]).sum(1).astype(np.uint8))
    whole = torch.cat([section[:, :kept], torch.from_numpy(decoded).to(dtype)], 1)
    return b"".join(part.tobytes() for part in payload), whole


def group_indices(size: tuple[int, ...], along: int) -> Iterator[tuple[int | slice, ...]]:
    """In the order of their ranges: (layer, group, head, dim) for groups of tokens, (layer, token, head, group)."""
    counts = [-(-count // 64) if axis == along else count for axis, count in enumerate(size)]
    for index in np.ndindex(*counts):
        yield tuple(slice(64 * i, 64 * i + 64) if axis == along else i for axis, i in enumerate(index))


def even(rng: np.random.Generator, shape: SectionShape) -> torch.Tensor:
    """Groups without a range, and quotients that lie in the middle between two codes."""
    size = (shape.layer_count, shape.token_count, shape.head_count, shape.head_dim)
    values = rng.integers(0, 31, size) * rng.integers(0, 2, (size[0], 1, size[2], 1)) * 2.0 ** rng.integers(-30, 10)
    return torch.from_numpy(values.astype(np.float32)).to(DTYPES[shape.dtype])


grouped_shapes = st.builds(
    SectionShape,
    kind=st.integers(0, 1),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    layer_start=st.just(0),
    layer_count=st.integers(1, 2),
    token_start=st.sampled_from([0, 0, 1, 3, 4, 100]),
    token_count=st.integers(1, 140),
    head_start=st.just(0),
    head_count=st.integers(1, 2),
    head_dim=st.sampled_from([4, 12, 64, 80]),
)
moderate = st.sampled_from([kv_like, tiny, even])


@examples
@given(grouped_shapes, st.sampled_from(["k6v4", "k4v4"]), st.integers(0, 2**32 - 1), moderate, st.integers(0, 3))
def test_k6v4_is_what_its_definition_says(shape: SectionShape, name: str, seed: int, make, misalign: int) -> None:
    codec = DeviceCodec(name, BACKEND)
    values = make(np.random.default_rng(seed), shape)
    expected, decoded = grouped_by_the_book(values, shape, 6 if (name, shape.kind) == ("k6v4", 0) else 4)
    payload = codec.encode(values, shape)
    if len(expected) >= shape.raw_bytes:
        assert payload is None
    else:
        assert payload is not None
        assert payload.numpy().tobytes() == expected
    out = torch.empty_like(values)
    codec.decode(as_payload(expected, misalign), shape, out)
    assert np.array_equal(bits_of(out), bits_of(decoded))


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1.7e38, -1.7e38])
def test_k6v4_does_not_take_what_has_no_range(kind: int, value: float) -> None:
    codec = DeviceCodec("k6v4", BACKEND)
    shape = section(1, 30, 2, 80)._replace(kind=kind)
    values = kv_like(np.random.default_rng(3), shape)
    values[0, 3, 0, 0] = value  # that token is kept as it is
    assert codec.encode(values, shape) is not None
    values[0, 29, 1, 77] = value
    assert codec.encode(values, shape) is None


def test_k6v4_leaves_odd_head_dims_alone() -> None:
    codec = DeviceCodec("k6v4", BACKEND)
    shape = section(1, 100, 2, 6)
    values = torch.ones(shape.elements, dtype=torch.bfloat16)
    assert codec.encode(values, shape) is None
    with pytest.raises(FrameError):
        codec.decode(torch.zeros(1000, dtype=torch.uint8), shape, values)


@pytest.mark.parametrize("kind", [0, 1])
def test_damaged_k6v4_payloads_are_refused(kind: int) -> None:
    codec = DeviceCodec("k6v4", BACKEND)
    shape = section(1, 70, 1, 64)._replace(kind=kind)
    values = kv_like(np.random.default_rng(7), shape)
    payload, decoded = grouped_by_the_book(values, shape, 6 if kind == 0 else 4)
    out = torch.empty_like(values)
    for wrong in (b"", payload[:-1], payload + b"\0"):
        with pytest.raises(FrameError):
            codec.decode(as_payload(wrong), shape, out)
    kept, groups = 4 * 64 * 2, 2 * 64 if kind == 0 else 66
    for group, low, high in ((0, 0x7F80, 0x7F80), (5, 0x7FC0, 0), (groups - 1, 0, 0x7FC0), (7, 0x3F80, 0x3F00)):
        damaged = bytearray(payload)
        for at, word in ((kept + 2 * group, low), (kept + 2 * (groups + group), high)):
            damaged[at : at + 2] = word.to_bytes(2, "little")
        with pytest.raises(FrameError, match="range"):
            codec.decode(as_payload(bytes(damaged)), shape, out)
    codec.decode(as_payload(payload), shape, out)
    assert torch.equal(out, decoded)


# All of them, against the codecs for host memory

HOST_CODECS: dict[str, Codec] = {
    "bexp3": Bexp3Codec(),
    "q8": Q8Codec(),
    "k6v4": GroupedCodec("k6v4", key_bits=6, value_bits=4),
    "k4v4": GroupedCodec("k4v4", key_bits=4, value_bits=4),
}


@examples
@given(st.sampled_from([*HOST_CODECS]), grouped_shapes, st.integers(0, 2**32 - 1))
def test_payloads_are_those_of_the_host(name: str, shape: SectionShape, seed: int) -> None:
    codec, on_host = DeviceCodec(name, BACKEND), HOST_CODECS[name]
    assert (codec.lossless, codec.dtypes) == (on_host.lossless, on_host.dtypes)
    assume(shape.dtype in codec.dtypes)
    values = kv_like(np.random.default_rng(seed), shape)
    payload, expected = codec.encode(values, shape), on_host.encode(bits_of(values), shape)
    if expected is None:
        assert payload is None
        return
    assert payload is not None
    assert payload.numpy().tobytes() == b"".join(expected)
    out, by_host = torch.empty_like(values), np.empty(shape.raw_bytes, np.uint8)
    codec.decode(payload, shape, out)
    on_host.decode(memoryview(payload.numpy()), shape, by_host)
    assert np.array_equal(bits_of(out), by_host)


# What a caller gets wrong


@pytest.mark.parametrize("name", ["bexp3", "q8", "k6v4"])
def test_sections_and_payloads_are_checked(name: str) -> None:
    codec = DeviceCodec(name, BACKEND)
    shape = section(1, 4, 2, 16)
    values = torch.zeros(shape.elements, dtype=torch.bfloat16)
    payload = torch.zeros(300, dtype=torch.uint8)
    for wrong in (values[:-1], values.half(), torch.zeros(2 * shape.elements, dtype=torch.bfloat16)[::2]):
        with pytest.raises(ValueError, match="a section must be"):
            codec.encode(wrong, shape)
        with pytest.raises(ValueError, match="a section must be"):
            codec.decode(payload, shape, wrong)
    for wrong in (payload.char(), payload.view(3, 100), payload[::2]):
        with pytest.raises(ValueError, match="a payload must be"):
            codec.decode(wrong, shape, values)
    with pytest.raises(ValueError, match="meta"):
        codec.decode(payload.to("meta"), shape, values)
    unknown = shape._replace(dtype="float8")
    with pytest.raises(ValueError, match="float8"):
        codec.encode(values, unknown)


def test_a_codec_without_a_device_form_is_refused() -> None:
    with pytest.raises(ValueError, match="zstd"):
        DeviceCodec("zstd", BACKEND)


def test_a_machine_without_a_gpu_uses_the_references() -> None:
    assert backend_for(torch.device("cpu")) == "torch"


# Gather and scatter


@st.composite
def paged_cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], WireRange]:
    """A cache of random bits [layers, 2, blocks, heads, block_size, dim], a sequence's blocks, a part of it."""
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    block_size = draw(st.sampled_from([1, 8, 16, 32, 5]))
    dim = draw(st.sampled_from([8, 64, 80, 3]))
    blocks = draw(st.permutations(range(draw(st.integers(1, 5)))))
    table = blocks[: draw(st.integers(1, len(blocks)))]
    dtype = draw(st.sampled_from([*DTYPES.values()]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    cache = torch.from_numpy(
        rng.integers(0, 256, (layers, 2, len(blocks), heads, block_size, dim, 4), dtype=np.uint8)
    )
    cache = cache.view(dtype)[..., 0].contiguous()
    starts_counts: list[int] = []
    for limit in (layers, len(table) * block_size, heads):
        start = draw(st.integers(0, limit - 1))
        starts_counts += [start, draw(st.integers(1, limit - start))]
    return cache, table, WireRange(*starts_counts)


def wire_by_the_book(cache: torch.Tensor, table: list[int], part: WireRange) -> NDArray[np.uint8]:
    """Bits of the wire tensor in order, element by element."""
    size = cache.shape[4]
    return bits_of(
        torch.stack(
            [
                cache[layer, kind, table[token // size], head, token % size]
                for layer in range(part.layer_start, part.layer_start + part.layer_count)
                for kind in (0, 1)
                for token in range(part.token_start, part.token_start + part.token_count)
                for head in range(part.head_start, part.head_start + part.head_count)
            ]
        )
    )


@examples
@given(paged_cases())
def test_gather_and_scatter_copy_exactly_the_range(case: tuple[torch.Tensor, list[int], WireRange]) -> None:
    memory, blocks, part = case
    cache = PagedLayers([layer.clone() for layer in memory])
    table = cache.block_table(blocks)
    wire = cache.empty_wire(part)
    gather(cache, table, part, wire, BACKEND)
    assert np.array_equal(bits_of(wire), wire_by_the_book(memory, blocks, part))
    assert all(wire[:, kind].is_contiguous() for kind in (0, 1))
    assert torch.equal(torch.stack(cache.layers).view(torch.uint8), memory.view(torch.uint8))

    # Into a cache of other content: the range becomes the wire's, all else stays.
    target = PagedLayers([(layer.view(torch.uint8) ^ 0xFF).view(layer.dtype) for layer in memory])
    inverted = torch.stack(target.layers)
    plain = torch.empty(wire.shape, dtype=wire.dtype)
    plain.copy_(wire)
    scatter(target, target.block_table(blocks), part, plain, BACKEND)
    written = torch.stack(target.layers)
    assert np.array_equal(wire_by_the_book(written, blocks, part), bits_of(wire))
    changed = (written.view(torch.uint8) != inverted.view(torch.uint8)).sum().item()
    assert changed == wire.numel() * wire.element_size()


def test_ranges_tables_and_wire_tensors_are_checked() -> None:
    cache = PagedLayers([torch.zeros(2, 4, 2, 8, 16) for _ in range(2)])
    table = cache.block_table([3, 1])
    whole = WireRange(0, 2, 0, 16, 0, 2)
    wire = cache.empty_wire(whole)
    for wrong, message in (
        (whole._replace(layer_start=1), "layers 1..3"),
        (whole._replace(token_count=17), "tokens 0..17"),
        (whole._replace(token_start=-1), "tokens -1..15"),
        (whole._replace(head_count=0), "heads 0..0"),
    ):
        for copy in (gather, scatter):
            with pytest.raises(ValueError, match=message):
                copy(cache, table, wrong, wire, BACKEND)
    for wrong_wire in (wire.half(), wire[:1], wire.transpose(2, 3).contiguous().transpose(2, 3)):
        with pytest.raises(ValueError, match="wire tensor"):
            gather(cache, table, whole, wrong_wire, BACKEND)
    with pytest.raises(ValueError, match="int32"):
        gather(cache, table.long(), whole, wire, BACKEND)
    for blocks in ([4], [-1]):
        with pytest.raises(ValueError, match=r"0\.\.3"):
            cache.block_table(blocks)
    with pytest.raises(ValueError, match="alike"):
        PagedLayers([torch.zeros(2, 4, 2, 8, 16), torch.zeros(2, 4, 2, 8, 8)])
    with pytest.raises(ValueError, match="contiguous"):
        PagedLayers([torch.zeros(2, 4, 2, 16, 8).transpose(3, 4)])


if INTERPRETED:

    def test_a_block_outside_the_cache_is_not_followed() -> None:
        cache = PagedLayers([torch.zeros(2, 3, 1, 8, 16)])
        table = torch.tensor([0, 1 << 30, -(1 << 30)], dtype=torch.int32)
        part = WireRange(0, 1, 0, 24, 0, 1)
        wire = torch.ones(1, 2, 24, 1, 16)
        scatter(cache, table, part, wire, BACKEND)
        assert cache.layers[0].sum() == 2 * 8 * 16
