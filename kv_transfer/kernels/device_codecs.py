"""Codecs whose sections and payloads are both on a device, so that only compressed bytes leave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Final, NamedTuple

import torch

from kv_transfer.codecs.base import SectionShape
from kv_transfer.kernels.backends import Backend

_ALIGNMENT: Final = 16


class _Facts(NamedTuple):
    """Where a codec is done: a module with the functions `encode` and `decode`, or the one named ``..._triton``."""

    module: str
    lossless: bool
    dtypes: tuple[str, ...]
    options: Mapping[str, int]


_CODECS: Final = {
    "bexp3": _Facts("bexp3", True, ("bfloat16",), {}),
    "q8": _Facts("q8", False, ("bfloat16", "float16", "float32"), {}),
    "k6v4": _Facts("grouped", False, ("bfloat16", "float16"), {"key_bits": 6, "value_bits": 4}),
    "k4v4": _Facts("grouped", False, ("bfloat16", "float16"), {"key_bits": 4, "value_bits": 4}),
}


class DeviceCodec:
    """A codec of `kv_transfer.codecs` for sections on a device: its payloads are the same, byte for byte.

    Stateless: safe to use from any number of threads at once. Work is queued on the device's current stream.

    Args:
        name: ``bexp3``, ``q8``, ``k6v4`` or ``k4v4``.
        backend: ``triton``: the section is on a GPU. ``torch``: anywhere; the reference, slower.

    Raises:
        ValueError: there is no such codec.
    """

    def __init__(self, name: str, backend: Backend) -> None:
        if name not in _CODECS:
            raise ValueError(f"no device codec {name}; there are {', '.join(_CODECS)}")
        facts = _CODECS[name]
        self.name = name
        self.backend = backend
        self.lossless = facts.lossless
        self.dtypes = facts.dtypes
        module = import_module(f"kv_transfer.kernels.{facts.module}{'_triton' if backend == 'triton' else ''}")
        self._encode: Callable[[torch.Tensor, SectionShape], torch.Tensor | None] = partial(
            module.encode, **facts.options
        )
        self._decode: Callable[[torch.Tensor, SectionShape, torch.Tensor], None] = partial(
            module.decode, **facts.options
        )

    def encode(self, values: torch.Tensor, shape: SectionShape) -> torch.Tensor | None:
        """Compress a section. Waits for the device once.

        Args:
            values: `shape`'s elements, contiguous, of any number of dimensions.

        Returns:
            The payload, uint8 [n] on the same device; it may be a view of a larger tensor. None if it would not be
            smaller than the section, or the codec cannot carry a value of it: the section is then sent raw.

        Raises:
            ValueError: `values` is not of `shape`, or of a dtype that the codec does not take.
        """
        self._check(values, shape)
        return self._encode(values, shape)

    def decode(self, payload: torch.Tensor, shape: SectionShape, out: torch.Tensor) -> None:
        """Decompress a payload. Waits for the device once.

        Args:
            payload: uint8 [n], contiguous. It comes from a peer: any content is safe.
            out: as `values` of `encode`, on the payload's device. Its content is undefined after an error.

        Raises:
            ValueError: as for `encode`.
            FrameError: the payload is malformed.
        """
        self._check(out, shape)
        if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
            raise ValueError(f"a payload must be contiguous uint8 [n], got {payload.dtype} {list(payload.shape)}")
        if payload.device != out.device:
            raise ValueError(f"the payload is on {payload.device}, its section on {out.device}")
        if payload.data_ptr() % _ALIGNMENT or payload.storage_offset() % _ALIGNMENT:
            payload = payload.clone()  # its parts are read as wider types
        self._decode(payload, shape, out)

    def _check(self, values: torch.Tensor, shape: SectionShape) -> None:
        if shape.dtype not in self.dtypes:
            raise ValueError(f"{self.name} takes {', '.join(self.dtypes)}, not {shape.dtype}")
        dtype = getattr(torch, shape.dtype)
        if values.dtype != dtype or values.numel() != shape.elements or not values.is_contiguous():
            raise ValueError(
                f"a section must be a contiguous tensor of {shape.elements} elements {dtype}, got "
                f"{'contiguous' if values.is_contiguous() else 'strided'} {values.dtype} {list(values.shape)}"
            )
