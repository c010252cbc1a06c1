"""The kernels of KV transfer on a GPU: against the codecs for host memory, the torch references, and the clock."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kv_transfer.codecs.base import Codec, SectionShape
from kv_transfer.codecs.bexp3 import Bexp3Codec
from kv_transfer.codecs.grouped import GroupedCodec
from kv_transfer.codecs.q8 import Q8Codec
from kv_transfer.kernels.backends import Backend
from kv_transfer.kernels.device_codecs import DeviceCodec
from kv_transfer.kernels.paged import PagedLayers, WireRange, gather, scatter
from pdcore.errors import FrameError

HOST_CODECS: dict[str, Codec] = {
    "bexp3": Bexp3Codec(),
    "q8": Q8Codec(),
    "k6v4": GroupedCodec("k6v4", key_bits=6, value_bits=4),
    "k4v4": GroupedCodec("k4v4", key_bits=4, value_bits=4),
}


def section(layers: int, tokens: int, heads: int, dim: int, dtype: str = "bfloat16", kind: int = 0) -> SectionShape:
    return SectionShape(
        kind=kind,
        dtype=dtype,
        layer_start=0,
        layer_count=layers,
        token_start=0,
        token_count=tokens,
        head_start=0,
        head_count=heads,
        head_dim=dim,
    )


SHAPES = [
    section(1, 1, 1, 128),
    section(2, 63, 1, 128),
    section(1, 65, 8, 128),
    section(4, 256, 8, 128),
    section(4, 256, 8, 128, kind=1),
    section(3, 130, 3, 64),
    section(3, 130, 3, 64, kind=1),
    section(2, 77, 5, 80),
    section(2, 77, 5, 80, kind=1),
    section(2, 77, 3, 5),
    section(2, 100, 2, 128, "float16"),
    section(2, 100, 2, 128, "float16", kind=1),
    section(2, 100, 2, 96, "float32"),
    section(16, 1024, 8, 128),
]
FRAME = section(4, 256, 8, 128)
LONG_PROMPT = section(32, 4096, 8, 128)
REPEATS = 20


def kv_like(shape: SectionShape, device: torch.device) -> torch.Tensor:
    """Values with a scale for each channel, as KV has them, some outliers, a channel and a token that do not vary."""
    random = torch.Generator(device).manual_seed(shape.elements)
    size = (shape.layer_count, shape.token_count, shape.head_count, shape.head_dim)
    scale = torch.randn((size[0], 1, *size[2:]), generator=random, device=device).exp()
    values = torch.randn(size, generator=random, device=device) * scale
    chance = torch.rand(size, generator=random, device=device)
    values = torch.where(chance < 0.01, values * 300, values)
    values = torch.where(chance > 0.98, 0.0, values)
    values[..., 0] = 1.5
    values[:, -1] = 0
    return values.to(getattr(torch, shape.dtype))


def host_bytes(values: torch.Tensor) -> np.ndarray:
    return values.cpu().contiguous().view(-1).view(torch.uint8).numpy()


def cases() -> list[tuple[str, SectionShape]]:
    return [(name, shape) for name, codec in HOST_CODECS.items() for shape in SHAPES if shape.dtype in codec.dtypes]


@pytest.mark.parametrize(("name", "shape"), cases(), ids=lambda value: value if isinstance(value, str) else None)
def test_payloads_are_those_of_the_host_and_of_the_reference(
    device: torch.device, name: str, shape: SectionShape
) -> None:
    values = kv_like(shape, device)
    on_gpu, reference, on_host = DeviceCodec(name, "triton"), DeviceCodec(name, "torch"), HOST_CODECS[name]
    payload, of_reference = on_gpu.encode(values, shape), reference.encode(values, shape)
    expected = on_host.encode(host_bytes(values), shape)
    if expected is None:
        assert payload is None
        assert of_reference is None
        return
    assert payload is not None
    assert of_reference is not None
    assert torch.equal(payload, of_reference)
    assert payload.cpu().numpy().tobytes() == b"".join(expected)

    decoded, by_reference = torch.empty_like(values), torch.empty_like(values)
    by_host = np.empty(shape.raw_bytes, np.uint8)
    moved = torch.empty(payload.numel() + 3, dtype=torch.uint8, device=device)[3:]
    on_gpu.decode(moved.copy_(payload), shape, decoded)  # from anywhere in memory
    reference.decode(payload, shape, by_reference)
    on_host.decode(memoryview(payload.cpu().numpy()), shape, by_host)
    assert np.array_equal(host_bytes(decoded), by_host)
    assert np.array_equal(host_bytes(by_reference), by_host)
    if on_gpu.lossless:
        assert np.array_equal(by_host, host_bytes(values))


def test_bexp3_carries_every_bit_pattern(device: torch.device) -> None:
    shape = section(2, 128, 8, 64)
    patterns = torch.arange(shape.elements, device=device, dtype=torch.int32) * 40503  # odd: all 65536 come
    random = patterns.to(torch.int16).view(torch.bfloat16)
    codec = DeviceCodec("bexp3", "triton")
    assert codec.encode(random, shape) is None  # most exponents escape: nothing is gained
    # A payload of it decodes all the same.
    everything = np.concatenate([np.frombuffer(part, np.uint8) for part in bexp3_parts(random, shape)])
    out = torch.empty_like(random)
    codec.decode(torch.from_numpy(everything).to(device), shape, out)
    assert torch.equal(out.view(torch.int16), random.view(torch.int16))


def bexp3_parts(values: torch.Tensor, shape: SectionShape) -> list[bytes]:
    """The payload of a section with two whole groups of tokens in each layer, longer than the section or not."""
    words = host_bytes(values).view("<u2").reshape(-1, 64, shape.head_count * shape.head_dim)
    exponents = (words >> 7).astype(np.uint8)
    maxima = exponents.max(1, keepdims=True)
    codes = np.minimum(maxima - exponents, 7)
    planes = [np.packbits(codes.reshape(-1) >> plane & 1, bitorder="little").tobytes() for plane in range(3)]
    counts = (codes == 7).sum((1, 2)).astype("<u4")
    low = ((words >> 8) & 0x80 | words & 0x7F).astype(np.uint8)
    return [counts.tobytes(), maxima.tobytes(), low.tobytes(), *planes, exponents[codes == 7].tobytes()]


@pytest.mark.parametrize("name", HOST_CODECS)
def test_random_bytes_are_refused(device: torch.device, name: str) -> None:
    """Whatever a peer sends, no access leaves its memory: one that did would make later calls fail."""
    shape = FRAME
    payload = DeviceCodec(name, "torch").encode(kv_like(shape, device), shape)
    assert payload is not None
    random = torch.Generator(device).manual_seed(1)
    out = torch.empty(shape.elements, dtype=torch.bfloat16, device=device)
    for size in (payload.numel(), payload.numel() + 1, 0):
        noise = torch.randint(0, 256, (size,), generator=random, device=device, dtype=torch.int32).to(torch.uint8)
        with pytest.raises(FrameError):
            DeviceCodec(name, "triton").decode(noise, shape, out)
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", HOST_CODECS)
def test_encoding_waits_for_the_device_once(device: torch.device, name: str) -> None:
    values, codec = kv_like(FRAME, device), DeviceCodec(name, "triton")
    codec.encode(values, FRAME)  # compiles
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            codec.encode(values, FRAME)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([warning for warning in seen if "called a synchronizing" in str(warning.message)]) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("block_size", "dim"), [(16, 128), (64, 64), (8, 80)])
def test_gather_and_scatter_equal_the_reference(
    device: torch.device, dtype: torch.dtype, block_size: int, dim: int
) -> None:
    memory = torch.randn((3, 2, 40, 8, block_size, dim), device=device).to(dtype)
    cache = PagedLayers(list(memory.clone()))
    order = torch.randperm(40).tolist()
    table = cache.block_table(order)
    for part in (WireRange(0, 3, 0, 40 * block_size, 0, 8), WireRange(1, 2, 5, 7 * block_size + 3, 3, 4)):
        wire, expected = cache.empty_wire(part), cache.empty_wire(part)
        gather(cache, table, part, wire, "triton")
        gather(cache, table, part, expected, "torch")
        assert torch.equal(wire, expected)
        target, other = PagedLayers(list(-memory)), PagedLayers(list(-memory))
        scatter(target, table, part, wire, "triton")
        scatter(other, table, part, wire, "torch")
        assert all(map(torch.equal, target.layers, other.layers))


@pytest.mark.parametrize("shape", [FRAME, LONG_PROMPT], ids=["frame", "long prompt"])
@pytest.mark.parametrize("name", HOST_CODECS)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_codec_speed(
    device: torch.device, capsys: pytest.CaptureFixture[str], name: str, shape: SectionShape, backend: Backend
) -> None:
    """A frame's figures are mostly those of launches and of the wait, a long prompt's those of the memory."""
    values, codec = kv_like(shape, device), DeviceCodec(name, backend)
    payload = codec.encode(values, shape)
    assert payload is not None
    out = torch.empty_like(values)
    encode = gigabytes_per_s(lambda: codec.encode(values, shape), shape.raw_bytes)
    decode = gigabytes_per_s(lambda: codec.decode(payload, shape, out), shape.raw_bytes)
    ratio = shape.raw_bytes / payload.numel()
    with capsys.disabled():
        print(
            f"\n{name} {backend}, K section of {shape.raw_bytes >> 20} MiB: encode {encode:.1f} GB/s, "
            f"decode {decode:.1f} GB/s of decoded bytes, ratio {ratio:.3f}"
        )


@pytest.mark.parametrize("shape", [FRAME, LONG_PROMPT], ids=["frame", "long prompt"])
def test_copy_speed(device: torch.device, capsys: pytest.CaptureFixture[str], shape: SectionShape) -> None:
    block_size = 16
    blocks = -(-shape.token_count // block_size)
    size = (shape.layer_count, 2, blocks, shape.head_count, block_size, shape.head_dim)
    cache = PagedLayers(list(torch.zeros(size, dtype=torch.bfloat16, device=device)))
    table = cache.block_table(torch.randperm(blocks).tolist())
    part = WireRange(0, shape.layer_count, 0, shape.token_count, 0, shape.head_count)
    wire = cache.empty_wire(part)
    gathering = gigabytes_per_s(lambda: gather(cache, table, part, wire), 2 * shape.raw_bytes)
    scattering = gigabytes_per_s(lambda: scatter(cache, table, part, wire), 2 * shape.raw_bytes)
    with capsys.disabled():
        print(
            f"\nK and V of {shape.raw_bytes >> 19} MiB, blocks of {block_size}: gather {gathering:.1f} GB/s, "
            f"scatter {scattering:.1f} GB/s of copied bytes"
        )


def gigabytes_per_s(work: Callable[[], object], size: int) -> float:
    """`size` bytes by the median time of a call, launches and waits included."""
    times = []
    for _ in range(REPEATS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return size / statistics.median(times[3:]) / 1e6
