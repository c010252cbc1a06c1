"""The C attention of decoding sequences as Python sees it."""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine.native.library import engine_library

CACHE_TYPES: Final = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class _Attention(ctypes.Structure):
    """``struct attention`` of attention.c."""

    _fields_ = [
        ("layer", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("plane", ctypes.c_size_t),
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_size_t),
        ("tables", ctypes.c_void_p),
        ("table_width", ctypes.c_size_t),
        ("lengths", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    ]


class DecodeKernel:
    """Attention of a step's decoding sequences, one query token each: made once for a step, called for each layer.

    A sequence's result is the same bits whatever sequences are beside it, and whatever the number of threads.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        tables: NDArray[np.int32],
        lengths: NDArray[np.int32],
        *,
        kv_heads: int,
        group: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
        window: int | None,
    ) -> None:
        """
        Args:
            tables: [sequences, width]; block ids. lengths: [sequences]; tokens in the cache, this step's included.
            group: query heads for each KV head. num_blocks: of each plane of the cache.
            window: tokens that a query sees, its own included; None is all.
        """
        # Kept, for the structure holds their addresses only.
        self._tables = np.ascontiguousarray(tables, np.int32)
        self._lengths = np.ascontiguousarray(lengths, np.int32)
        self._attend = library.pdmm_attend
        self._call = _Attention(
            kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            block_size=block_size,
            window=window or 0,
            num_seqs=len(lengths),
            plane=num_blocks * block_size,
            tables=self._tables.ctypes.data,
            table_width=self._tables.shape[1],
            lengths=self._lengths.ctypes.data,
        )

    @property
    def num_seqs(self) -> int:
        """Sequences, and rows of `q` and `out`."""
        return len(self._lengths)

    def __call__(self, layer: torch.Tensor, q: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        """One layer.

        Args:
            layer: its planes of the cache, contiguous, float32, bfloat16 or float16: K of each KV head, then V.
            q: float32 [sequences, heads * head_dim]; rows may lie apart. out: the same shape, contiguous; filled.
            scale: factor of the scores.
        """
        assert q.stride(1) == 1, q.stride()
        assert out.is_contiguous()
        assert (
            q.shape == out.shape == (len(self._lengths), self._call.kv_heads * self._call.group * self._call.head_dim)
        )
        call = self._call
        call.layer, call.type = layer.data_ptr(), CACHE_TYPES[layer.dtype]
        call.q, call.q_stride, call.out, call.scale = q.data_ptr(), q.stride(0), out.data_ptr(), scale
        if not self._attend(ctypes.addressof(call), torch.get_num_threads()):
            raise MemoryError("no memory for the scores of one sequence")


def decode_kernel(
    tables: NDArray[np.int32],
    lengths: NDArray[np.int32],
    *,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    num_blocks: int,
    window: int | None = None,
) -> DecodeKernel | None:
    """The kernel for these sequences, arguments as for `DecodeKernel`; None if there is none here for such heads."""
    library = engine_library()
    if library is None or head_dim % 8 or block_size % 4 or not len(lengths):
        return None
    return DecodeKernel(
        library,
        tables,
        lengths,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        window=window,
    )
