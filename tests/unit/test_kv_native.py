"""Native KV code: the same results as zlib and numpy at every level, and a build that survives what can go wrong."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.checksum import crc32
from kv_transfer.codecs.base import SectionShape
from kv_transfer.codecs.bexp3 import Bexp3Codec
from kv_transfer.codecs.bexp_zstd import BexpZstdCodec
from kv_transfer.codecs.word_split import join_words, split_words
from kv_transfer.native.library import (
    LEVELS,
    NativeKernels,
    available_levels,
    load_kernels,
    native_kernels,
    native_status,
    set_native,
)
from pdcore.errors import FrameError
from pdcore.native_build import NativeUnavailable, open_library

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "kv_transfer" / "native"


@pytest.fixture(scope="module", params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    if request.param not in available_levels():
        pytest.skip(f"this CPU has no {request.param}")
    return load_kernels(request.param)


# --- checksum -----------------------------------------------------------------------------------------------------


@given(data=st.binary(max_size=600), offset=st.integers(0, 17), value=st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_crc32_is_that_of_zlib(kernels: NativeKernels, data: bytes, offset: int, value: int) -> None:
    array = np.frombuffer(bytes(offset) + data, np.uint8)[offset:]
    assert kernels.crc32(array, value) == zlib.crc32(data, value)


@given(size=st.integers(0, 300_000), seed=st.integers(0, 99), cut=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_crc32_of_long_data_continues_from_any_cut(kernels: NativeKernels, size: int, seed: int, cut: float) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    middle = int(cut * size)
    expected = zlib.crc32(data.data)
    assert kernels.crc32(data, 0) == expected
    assert kernels.crc32(data[middle:], kernels.crc32(data[:middle], 0)) == expected
    assert crc32(data[middle:].data, crc32(data[:middle].data)) == expected


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("size", [0, 1, 16_383, 16_384, 20_001])
def test_crc32_takes_any_contiguous_buffer(native_switch: Callable[[bool], None], enabled: bool, size: int) -> None:
    native_switch(enabled)
    data = bytes(range(256)) * 80
    data = data[:size]
    for buffer in (data, bytearray(data), memoryview(data)):
        assert crc32(buffer) == zlib.crc32(data)
    words = np.frombuffer(data[: size // 4 * 4], "<u4")
    assert crc32(words.data) == zlib.crc32(words.tobytes())


# --- split and join -----------------------------------------------------------------------------------------------


def test_split_and_join_every_bit_pattern(kernels: NativeKernels) -> None:
    words = np.arange(65536, dtype="<u2")
    high, low = split_words(words.view(np.uint8), kernels)
    assert np.array_equal(high, (words >> 7 & 0xFF).astype(np.uint8))
    assert np.array_equal(low, (words >> 8 & 0x80 | words & 0x7F).astype(np.uint8))
    out = np.empty(131072, np.uint8)
    join_words(high, low, out, kernels)
    assert np.array_equal(out.view("<u2"), words)


@settings(deadline=None)
@given(count=st.integers(0, 300), offset=st.integers(0, 3), seed=st.integers(0, 99))
def test_split_and_join_any_length_at_any_address(kernels: NativeKernels, count: int, offset: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 256, 2 * count + offset, np.uint8)[offset:]
    high, low = split_words(values, kernels)
    by_numpy = split_words(values.copy(), None)
    assert np.array_equal(high, by_numpy[0])
    assert np.array_equal(low, by_numpy[1])
    around = np.full(2 * count + offset + 9, 0xA5, np.uint8)
    join_words(high, low, around[offset : offset + 2 * count], kernels)
    assert np.array_equal(around[offset : offset + 2 * count], values)
    assert np.all(around[:offset] == 0xA5)
    assert np.all(around[offset + 2 * count :] == 0xA5)
    by_numpy_again = np.empty(2 * count, np.uint8)
    join_words(*by_numpy, by_numpy_again, None)
    assert np.array_equal(by_numpy_again, values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 16, 100])
def test_bexp_zstd_payload_is_the_same_with_and_without(kernels: NativeKernels, dtype: str, tokens: int) -> None:
    shape = SectionShape(0, dtype, 0, 2, 0, tokens, 0, 3, 32)
    numbers = np.random.default_rng(tokens).normal(size=shape.elements).astype("<f4")
    words = numbers.astype("<f2") if dtype == "float16" else (numbers.view("<u4") >> 16).astype("<u2")
    values = words.view(np.uint8)
    native, plain = BexpZstdCodec(lambda: kernels), BexpZstdCodec(lambda: None)
    parts, expected = native.encode(values, shape), plain.encode(values, shape)
    assert parts is not None
    assert expected is not None
    payload = b"".join(parts)
    assert payload == b"".join(expected)
    for codec in (native, plain):
        out = np.empty_like(values)
        with pytest.raises(FrameError):
            codec.decode(memoryview(payload[:-1]), shape, out)
        codec.decode(memoryview(payload), shape, out)
        assert np.array_equal(out, values)


def test_codecs_serve_many_threads_at_once() -> None:
    shape = SectionShape(0, "bfloat16", 0, 1, 0, 80, 0, 2, 64)

    def round_trips(seed: int) -> bool:
        numbers = np.random.default_rng(seed).normal(size=shape.elements).astype("<f4")
        values = (numbers.view("<u4") >> 16).astype("<u2").view(np.uint8)
        out = np.empty_like(values)
        for codec in (BexpZstdCodec(), Bexp3Codec()):
            parts = codec.encode(values, shape)
            assert parts is not None
            out[:] = 0
            codec.decode(memoryview(b"".join(parts)), shape, out)
            if not np.array_equal(out, values):
                return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(round_trips, range(200)))


# --- which code runs ----------------------------------------------------------------------------------------------


@pytest.fixture
def native_switch() -> Iterator[Callable[[bool], None]]:
    yield set_native
    set_native(True)


def test_the_best_level_is_used_unless_switched_off(native_switch: Callable[[bool], None]) -> None:
    used = native_kernels()
    assert used is not None
    assert used.level == native_status() == available_levels()[-1]
    native_switch(False)
    assert native_kernels() is None
    assert native_status() == "off: switched off"


def test_a_level_that_this_cpu_lacks_is_refused() -> None:
    with pytest.raises(NativeUnavailable, match=r"this CPU has portable.*, not avx1024"):
        load_kernels("avx1024")


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_without_a_compiler_there_is_one_warning_and_numpy(tmp_path: Path) -> None:
    script = """
        import logging, zlib
        logging.basicConfig()
        from kv_transfer.checksum import crc32
        from kv_transfer.native.library import native_status
        data = bytes(range(256)) * 99
        assert crc32(data) == crc32(data) == zlib.crc32(data)
        print(native_status())
    """
    done = python(script, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "off: no C compiler\n"), done.stderr
    assert done.stderr.count("WARNING") == 1
    assert "without native code" in done.stderr


# --- the build ----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """The real compiler, in a hurry, with a record of what it was asked to link: ``compiled`` beside it."""
    return script_file(
        tmp_path / "quick-cc", f'[ "$1" = --version ] || echo >> {tmp_path}/compiled\nexec cc "$@" -O0'
    )


def script_file(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def compilations(compiler: Path) -> int:
    record = compiler.parent / "compiled"
    return len(record.read_text().splitlines()) if record.exists() else 0


def cached_file(cache: Path) -> Path:
    (path,) = cache.glob("pdkv-*/*")
    return path


def works(library: ctypes.CDLL) -> bool:
    return NativeKernels(library, "portable").crc32(np.arange(100, dtype=np.uint8), 0) == zlib.crc32(
        bytes(range(100))
    )


open_kv_library = functools.partial(open_library, "pdkv", SOURCES)


def test_built_once_and_again_when_damaged(tmp_path: Path, compiler: Path) -> None:
    cache = tmp_path / "cache"
    assert works(open_kv_library(cache, [str(compiler)]))
    assert works(open_kv_library(cache, [str(compiler)]))
    assert compilations(compiler) == 1
    whole = cached_file(cache).read_bytes()
    truncated, altered = whole[: len(whole) // 2], whole[:5000] + bytes([whole[5000] ^ 255]) + whole[5001:]
    for count, damaged in ((2, truncated), (3, altered)):
        # As a crash might leave it. Written elsewhere: the file that is in use must not change under its user.
        new = tmp_path / "damaged"
        new.write_bytes(damaged)
        new.replace(cached_file(cache))
        assert works(open_kv_library(cache, [str(compiler)]))
        assert compilations(compiler) == count
        assert len(cached_file(cache).read_bytes()) == len(whole)


def test_processes_that_build_at_the_same_time(tmp_path: Path, compiler: Path) -> None:
    script = f"""
        from pathlib import Path
        from pdcore.native_build import open_library
        library = open_library("pdkv", Path({str(SOURCES)!r}), Path({str(tmp_path / "cache")!r}), [{str(compiler)!r}])
        print(library.pdkv_levels() & 1)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    racers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [racer.communicate(timeout=90)[0] for racer in racers] == ["1\n"] * 2
    assert cached_file(tmp_path / "cache").name == "pdkv.so"


def test_a_cache_that_cannot_be_written_to(tmp_path: Path, compiler: Path) -> None:
    (tmp_path / "file").touch()
    assert works(open_kv_library(tmp_path / "file" / "cache", [str(compiler)]))


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    failing = script_file(tmp_path / "cc", '[ "$1" = --version ] && exit\necho pdkv.c: out of ideas >&2\nexit 3')
    with pytest.raises(NativeUnavailable, match=r"failed with status 3: pdkv\.c: out of ideas"):
        open_kv_library(tmp_path / "cache", [str(failing)])


def test_a_compiler_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    hanging = script_file(tmp_path / "cc", f'[ "$1" = --version ] && exit\nsleep 60 &\necho $! > {child}\nwait')
    with pytest.raises(NativeUnavailable, match=r"took more than 0\.5 s"):
        open_kv_library(tmp_path / "cache", [str(hanging)], timeout_s=0.5)
    deadline = time.monotonic() + 10
    while is_running(int(child.read_text())):
        assert time.monotonic() < deadline, "the compiler's child lives on"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_no_compiler(tmp_path: Path, compiler: Path) -> None:
    with pytest.raises(NativeUnavailable, match="no C compiler"):
        open_kv_library(tmp_path, [str(tmp_path / "none")])
    open_kv_library(tmp_path, [str(compiler)])
    assert works(open_kv_library(tmp_path, [str(tmp_path / "none")])), "it is there already"


def test_a_library_that_does_not_open_is_built_again(tmp_path: Path, compiler: Path) -> None:
    open_kv_library(tmp_path / "one", [str(compiler)])
    path = tmp_path / "other" / cached_file(tmp_path / "one").relative_to(tmp_path / "one")
    path.parent.mkdir(parents=True)
    junk = b"of another C library"
    path.write_bytes(junk + hashlib.sha256(junk).digest())
    with pytest.raises(NativeUnavailable, match="does not load"):
        open_kv_library(tmp_path / "other", [str(tmp_path / "none")])
    assert works(open_kv_library(tmp_path / "other", [str(compiler)]))
