"""The router's C library: built on first use, opened once (`pdcore.native_build`)."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

from pdcore.native_build import NativeUnavailable, open_library
from router.fleet import COLUMNS

logger = logging.getLogger(__name__)


@functools.cache
def routing_library() -> ctypes.PyDLL | None:
    """None, and a word in the log, if it cannot be had. The first call may take as long as compiling does."""
    try:
        opened = open_library("pdrt", Path(__file__).parent)
    except NativeUnavailable as error:
        logger.warning("the router chooses workers without native code, several times slower: %s", error)
        return None
    # Its calls take microseconds: giving the interpreter up for one would cost more than it saves.
    library = ctypes.PyDLL(opened._name, handle=opened._handle)
    _declare(library.pdrt_columns, "", ctypes.c_char_p)
    columns = library.pdrt_columns().decode().split()
    assert columns == list(COLUMNS), "routing.c knows other columns than the fleet has"
    _declare(library.pdrt_survey, "p", ctypes.c_uint64)
    _declare(library.pdrt_prefill, "pu", None)
    _declare(library.pdrt_decode, "pupzdd", None)
    _declare(library.pdrt_whole, "pu", None)
    _declare(library.pdrt_spread, "pzzppz", None)
    return library


def _declare(function: Any, arguments: str, result: Any) -> None:
    kinds = {"p": ctypes.c_void_p, "z": ctypes.c_size_t, "u": ctypes.c_uint64, "d": ctypes.c_double}
    function.argtypes = [kinds[argument] for argument in arguments]
    function.restype = result
