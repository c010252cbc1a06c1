"""Every kernel as a Hopper GPU would get it, compiled without one: it fits the registers and spills none.

The codecs run as on a GPU, on tensors in host memory, but a launch only compiles. So what is compiled here, in
types, alignments and options, is what is launched there; what comes of the calls means nothing.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kv_transfer.codecs.base import SectionShape
from kv_transfer.kernels.device_codecs import DeviceCodec
from kv_transfer.kernels.paged import PagedLayers, WireRange, gather, scatter
from pdcore.errors import FrameError

triton = pytest.importorskip("triton")

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INEXACT = re.compile(r"\.ftz|\.approx|div\.full|\bfma\.")
"""What makes other numbers than the definitions': subnormals lost, divisions not as IEEE rounds them, fused sums."""
WIDE = re.compile(r"(?:ld|st)\.global[.\w]*\.v4\.b32")


class Compiled(NamedTuple):
    ptx: str
    cubin: bytes


class Sm90:
    """What Triton's launcher asks its driver before it compiles."""

    def get_current_device(self) -> str:
        return "sm_90"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, list[Compiled]]]:
    """What the test's launches compile, by the kernel's name."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels: dict[str, list[Compiled]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        version = Compiled(kernel.asm["ptx"], kernel.asm["cubin"])
        versions = kernels.setdefault(self.fn.__name__, [])
        if version not in versions:
            versions.append(version)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "_active", Sm90())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    return kernels


def section(dtype: str = "bfloat16", *, kind: int = 0, heads: int = 8, dim: int = 128) -> SectionShape:
    return SectionShape(kind, dtype, 0, 4, 0, 256, 0, heads, dim)


def run_codec(name: str, shape: SectionShape, payload_bytes: int) -> None:
    codec = DeviceCodec(name, "triton")
    values = torch.zeros(shape.elements, dtype=getattr(torch, shape.dtype))
    codec.encode(values, shape)
    with suppress(FrameError):
        codec.decode(torch.zeros(payload_bytes, dtype=torch.uint8), shape, values)


def check(compiled: dict[str, list[Compiled]], tmp_path: Path, names: set[str], most_registers: int) -> None:
    assert set(compiled) == names
    for name, versions in compiled.items():
        for kernel in versions:
            cubin, ptx = tmp_path / "kernel.cubin", tmp_path / "kernel.ptx"
            cubin.write_bytes(kernel.cubin)
            ptx.write_text(kernel.ptx)
            usage = output_of([TOOLS / "cuobjdump", "--dump-resource-usage", cubin])
            numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
            assert numbers["STACK"] == numbers["LOCAL"] == 0, (name, usage)
            assert numbers["REG"] <= most_registers, (name, usage)
            log = output_of([TOOLS / "ptxas-blackwell", "-v", "-arch=sm_90a", "-o", "/dev/null", ptx])
            assert "0 bytes spill stores, 0 bytes spill loads" in log, (name, log)


def output_of(command: list[Any]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (1, 80)], ids=["aligned", "bytewise"])
def test_bexp3(compiled: dict[str, list[Compiled]], tmp_path: Path, heads: int, dim: int) -> None:
    from kv_transfer.codecs.bexp3 import Layout

    shape = section(heads=heads, dim=dim)
    run_codec("bexp3", shape, Layout.of(shape).escapes + 5)
    check(compiled, tmp_path, {"_split", "_count_escapes", "_collect_escapes", "_join"}, 128)
    assert WIDE.search(compiled["_split"][0].ptx)
    assert WIDE.search(compiled["_join"][0].ptx)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_q8(compiled: dict[str, list[Compiled]], tmp_path: Path, dtype: str) -> None:
    from kv_transfer.kernels.q8 import payload_bytes

    shape = section(dtype)
    run_codec("q8", shape, payload_bytes(shape))
    check(compiled, tmp_path, {"_quantise", "_dequantise"}, 128)
    (quantise,) = compiled["_quantise"]
    assert "div.rn.f32" in quantise.ptx
    assert not INEXACT.search(quantise.ptx)
    assert WIDE.search(quantise.ptx)


@pytest.mark.parametrize(("kind", "dtype"), [(0, "bfloat16"), (1, "float16")], ids=["K", "V"])
def test_k6v4(compiled: dict[str, list[Compiled]], tmp_path: Path, kind: int, dtype: str) -> None:
    from kv_transfer.codecs.grouped import grouped_layout

    shape = section(dtype, kind=kind)
    run_codec("k6v4", shape, grouped_layout(shape, 6 if kind == 0 else 4).payload)
    check(compiled, tmp_path, {"_pack", "_unpack"}, 128)
    for name in ("_pack", "_unpack"):
        (kernel,) = compiled[name]
        assert "div.rn.f32" in kernel.ptx
        assert not INEXACT.search(kernel.ptx)
        assert WIDE.search(kernel.ptx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_paged_copies(compiled: dict[str, list[Compiled]], tmp_path: Path, dtype: torch.dtype) -> None:
    cache = PagedLayers([torch.zeros(2, 32, 8, 16, 128, dtype=dtype) for _ in range(2)])
    part = WireRange(0, 2, 5, 200, 1, 4)
    table, wire = cache.block_table(range(20)), cache.empty_wire(part)
    gather(cache, table, part, wire, "triton")
    scatter(cache, table, part, wire, "triton")
    check(compiled, tmp_path, {"_gather", "_scatter"}, 64)
    for name in ("_gather", "_scatter"):
        assert {access[:2] for access in WIDE.findall(compiled[name][0].ptx)} == {"ld", "st"}
