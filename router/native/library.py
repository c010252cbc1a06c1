"""The router's C library: built on first use, opened once (`pdcore.native_build`)."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pdcore.native_build import NativeUnavailable, open_library
from router.fleet import COLUMNS

logger = logging.getLogger(__name__)

_addressof, _from_buffer = ctypes.addressof, ctypes.c_char.from_buffer


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
    _declare(library.pdrt_look, "p", ctypes.c_uint64)
    _declare(library.pdrt_prefill, "pu", None)
    _declare(library.pdrt_decode, "puld", None)
    _declare(library.pdrt_whole, "pu", None)
    _declare(library.pdrt_spread, "pzzppz", None)
    _declare(library.pdrt_holders_new, "uu", ctypes.c_void_p)
    _declare(library.pdrt_holders_free, "p", None)
    _declare(library.pdrt_holders_names, "p", ctypes.c_size_t)
    _declare(library.pdrt_holders_change, "pzpzi", ctypes.c_size_t)
    _declare(library.pdrt_holders_dump, "ppp", None)
    _declare(library.pdrt_holders_match, "ppzpdpzpp", ctypes.c_ssize_t)
    _declare(library.pdrt_tree_new, "uu", ctypes.c_void_p)
    _declare(library.pdrt_tree_free, "p", None)
    _declare(library.pdrt_tree_enter, "pwpz", ctypes.c_void_p)
    _declare(library.pdrt_tree_join, "wp", ctypes.c_int)
    _declare(library.pdrt_tree_leave, "pwp", None)
    _declare(library.pdrt_tree_match, "ppzpzdpzpp", ctypes.c_size_t)
    _declare(library.pdrt_tree_intact, "p", ctypes.c_int)
    return library


def address(array: NDArray[Any] | None) -> int:
    """Of a writeable array's first item, for a function in C; the fastest way by far. 0 of none, or of nothing."""
    return 0 if array is None or not len(array) else _addressof(_from_buffer(array))  # type: ignore[arg-type]


def _declare(function: Any, arguments: str, result: Any) -> None:
    kinds = {
        "p": ctypes.c_void_p,
        "z": ctypes.c_size_t,
        "u": ctypes.c_uint64,
        "w": ctypes.c_uint32,
        "l": ctypes.c_int64,
        "i": ctypes.c_int,
        "d": ctypes.c_double,
    }
    function.argtypes = [kinds[argument] for argument in arguments]
    function.restype = result
