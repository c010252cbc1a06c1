"""The C attention of prompts as Python sees it."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from engine.native.attention import CACHE_TYPES
from engine.native.library import engine_library


class _Prefill(ctypes.Structure):
    """``struct prefill`` of prefill.c."""

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
        ("starts", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    ]


class PrefillKernel:
    """Attention of a step's prompts, any number of query tokens each: made once for a step, called for each layer.

    A token's result is the same bits however its prompt is cut into chunks, whatever sequences are beside it, and
    whatever the number of threads.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        tables: NDArray[np.int32],
        lengths: NDArray[np.int32],
        starts: NDArray[np.int32],
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
            starts: [sequences + 1], from 0 on; sequence s has rows ``starts[s]`` to ``starts[s + 1]`` of q and out.
            group: query heads for each KV head. num_blocks: of each plane of the cache.
            window: tokens that a query sees, its own included; None is all.
        """
        # Kept, for the structure holds their addresses only.
        self._tables = np.ascontiguousarray(tables, np.int32)
        self._lengths = np.ascontiguousarray(lengths, np.int32)
        self._starts = np.ascontiguousarray(starts, np.int32)
        self._attend = library.pdmm_prefill
        self._call = _Prefill(
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
            starts=self._starts.ctypes.data,
        )

    @property
    def num_tokens(self) -> int:
        """Rows of `q` and `out`."""
        return int(self._starts[-1])

    def __call__(self, layer: torch.Tensor, q: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        """One layer.

        Args:
            layer: its planes of the cache, contiguous, float32, bfloat16 or float16: K of each KV head, then V.
            q: float32 [tokens, heads * head_dim]; rows may lie apart. out: the same shape, contiguous; filled.
            scale: factor of the scores.
        """
        assert q.stride(1) == 1, q.stride()
        assert out.is_contiguous()
        assert q.shape == out.shape == (self.num_tokens, self._call.kv_heads * self._call.group * self._call.head_dim)
        call = self._call
        call.layer, call.type = layer.data_ptr(), CACHE_TYPES[layer.dtype]
        call.q, call.q_stride, call.out, call.scale = q.data_ptr(), q.stride(0), out.data_ptr(), scale
        if not self._attend(ctypes.addressof(call), torch.get_num_threads()):
            raise MemoryError("no memory for a stretch of one sequence")


def prefill_kernel(
    tables: NDArray[np.int32],
    lengths: NDArray[np.int32],
    starts: NDArray[np.int32],
    *,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    num_blocks: int,
    window: int | None = None,
) -> PrefillKernel | None:
    """The kernel for these sequences, arguments as for `PrefillKernel`; None if there is none here for such heads."""
    library = engine_library()
    if library is None or head_dim % 8 or block_size % 8 or not len(lengths):
        return None
    return PrefillKernel(
        library,
        tables,
        lengths,
        starts,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        window=window,
    )
