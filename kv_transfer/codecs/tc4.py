"""`tc4`: transform coding by what is known of the model; about four bits per element of a 16-bit cache.

The keys and values of a layer lie close to a few directions, the same for every text; keys do so before their
rotation by position, which is undone first. Coefficients along those directions are rounded to multiples of one step
per layer and kind, which spreads the error evenly, and coded by their frequencies: where the variance is small,
nearly all are zero. The first tokens of a sequence are kept as they are (`sinks`).

::

    rest    = [layer, token, group, width] of the tokens that are not kept, float32; K rotated back by its positions
    y       = (rest - mean) @ basis, per layer and group                           see `Calibration`
    q       = y / step, rounded to nearest, ties to even
    codes   = q as int8, -128 where |q| > 127; in order [direction, group, layer, token]
    payload = | kept tokens, in section order                                                       |
              | u32 escapes | that many int32: q where the code is -128, in the order of the codes  |
              | u32 length of each stream | streams: zstd frames of equal parts of the codes        |
    rest'   = (q * step) @ basis transposed + mean, K rotated by its positions; rounded to the dtype

There are four streams, each of a quarter of the directions, if there are at least `_SPLIT_CODES` codes; else one.

A section is sent raw if it has an element that is not finite or far outside of what the calibration saw, if its heads
are not whole groups, or if it is not of the model's layers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_transfer.codecs.base import Buffer, SectionShape, codec_parameters
from kv_transfer.codecs.bounded_zstd import FrameCompressor, decompress
from kv_transfer.codecs.calibration import Calibration
from kv_transfer.codecs.floats import bits, round_into, to_float32
from kv_transfer.codecs.sinks import SINK_TOKENS, by_token, kept_tokens
from kv_transfer.frames import KIND_K
from pdcore.errors import FrameError

_SPLIT_CODES: Final = 8192
_ESCAPE: Final = -128
_LARGEST_CODE: Final = 1 << 21
# Adding it leaves a float32 whose last bits are the number rounded to nearest, ties to even.
_ROUNDER: Final = np.float32(3 << 22)
_ROUNDER_BITS: Final = np.int32(_ROUNDER.view(np.int32))
_U32: Final = struct.Struct("<I")
# Magnitudes up to this are encoded: what rounding in a rotated basis adds to them still fits the dtype.
_LARGEST: Final = MappingProxyType({"bfloat16": 1e30, "float16": 3e4})
_REMEMBERED: Final = 8  # token ranges
# What pays is zstd's entropy coder, not its search for repeats.
_STREAM: Final = FrameCompressor(min_match=7, hash_log=6)


class Tc4Codec:
    """Transform coding with a model's calibration."""

    name = "tc4"
    version = 1
    lossless = False
    parameters = codec_parameters(sinks=SINK_TOKENS)
    dtypes: tuple[str, ...] = ("bfloat16", "float16")

    def __init__(self, calibration: Calibration) -> None:
        assert calibration.problem() is None, calibration.problem()
        self.calibration = calibration.digest()[:16]
        self._model = calibration
        self._inverse = calibration.basis.swapaxes(-1, -2)
        # The layers of a chunk come one after the other, all with the same tokens.
        self._turns = lru_cache(_REMEMBERED)(
            lambda start, count, heads: key_turns(start, count, heads, calibration.inverse_frequencies)
        )

    def encode(self, values: NDArray[np.uint8], shape: SectionShape) -> Sequence[Buffer] | None:
        if not self._covers(shape):
            return None
        section = by_token(bits(values, shape.dtype), shape)
        kept = kept_tokens(shape)
        numbers = to_float32(np.ascontiguousarray(section[:, kept:]), shape.dtype)
        if not np.all(np.abs(numbers) <= _LARGEST[shape.dtype]):  # NaN fails every comparison
            return None
        if shape.kind == KIND_K:
            numbers = self._rotated(numbers, shape, kept, back=True)
        quotients = self._coefficients(numbers, shape)
        if not np.all(np.abs(quotients) <= _LARGEST_CODE):
            return None
        quotients += _ROUNDER
        rounded = quotients.view(np.int32)
        rounded -= _ROUNDER_BITS
        codes = rounded.astype(np.int8)
        escaped = np.abs(rounded) > 127
        codes[escaped] = _ESCAPE
        # [layer, token, group, direction] -> [direction, group, layer, token]
        order = (3, 2, 0, 1)
        escapes = rounded.transpose(order)[escaped.transpose(order)].astype("<i4") if escaped.any() else None
        flat = np.ascontiguousarray(codes.transpose(order)).reshape(-1).view(np.uint8)
        streams = [_STREAM.compress(part) for part in np.split(flat, _stream_count(flat.size))] if flat.size else []
        parts: list[Buffer] = []
        if kept:
            parts.append(np.ascontiguousarray(section[:, :kept]).reshape(-1).view(np.uint8).data)
        parts.append(_U32.pack(0 if escapes is None else escapes.size))
        if escapes is not None:
            parts.append(escapes.view(np.uint8).data)
        parts += [_U32.pack(len(stream)) for stream in streams]
        parts += streams
        return parts if sum(len(part) for part in parts) < values.size else None

    def decode(self, payload: memoryview, shape: SectionShape, out: NDArray[np.uint8]) -> None:
        if not self._covers(shape):
            raise FrameError(f"a tc4 payload for {shape}, which its calibration does not cover")
        section = by_token(bits(out, shape.dtype), shape)
        kept = kept_tokens(shape)
        reader = _Reader(payload)
        raw = np.frombuffer(reader.take(section[:, :kept].nbytes), "<u2")
        section[:, :kept] = raw.reshape(shape.layer_count, kept, section.shape[2])
        numbers = self._read_quotients(reader, shape, kept)
        rest = self._from_coefficients(numbers, shape)
        if shape.kind == KIND_K:
            rest = self._rotated(rest, shape, kept, back=False)
        round_into(rest, shape.dtype, section[:, kept:])

    def _covers(self, shape: SectionShape) -> bool:
        model = self._model
        layers, _, groups, _ = model.mean.shape
        return (
            shape.head_dim == model.head_dim
            and shape.layer_start + shape.layer_count <= layers
            and shape.head_start % model.heads_per_group == 0
            and shape.head_count % model.heads_per_group == 0
            and shape.head_start + shape.head_count <= groups * model.heads_per_group
        )

    def _groups(self, shape: SectionShape) -> slice:
        """The groups of heads that a section has."""
        size = self._model.heads_per_group
        return slice(shape.head_start // size, (shape.head_start + shape.head_count) // size)

    def _coefficients(self, numbers: NDArray[np.float32], shape: SectionShape) -> NDArray[np.float32]:
        """[layers, tokens, C] -> coefficients in steps, [layers, tokens, groups, W]."""
        model, width, groups = self._model, self._model.width, self._groups(shape)
        grouped = numbers.reshape(*numbers.shape[:2], groups.stop - groups.start, width)
        out = np.empty(grouped.shape, np.float32)
        for row, layer in enumerate(range(shape.layer_start, shape.layer_start + shape.layer_count)):
            centred = grouped[row] - model.mean[layer, shape.kind, groups]
            out[row] = _transformed(centred, model.basis[layer, shape.kind, groups])
            out[row] /= model.step[layer, shape.kind]
        return out

    def _from_coefficients(self, quotients: NDArray[np.float32], shape: SectionShape) -> NDArray[np.float32]:
        """The inverse, [layers, tokens, groups, W] -> [layers, tokens, C]. Uses `quotients` up."""
        model, groups = self._model, self._groups(shape)
        for row, layer in enumerate(range(shape.layer_start, shape.layer_start + shape.layer_count)):
            quotients[row] *= model.step[layer, shape.kind]
            quotients[row] = _transformed(quotients[row], self._inverse[layer, shape.kind, groups])
            quotients[row] += model.mean[layer, shape.kind, groups]
        return quotients.reshape(*quotients.shape[:2], shape.head_count * shape.head_dim)

    def _read_quotients(self, reader: _Reader, shape: SectionShape, kept: int) -> NDArray[np.float32]:
        """What is left of a payload: [layers, tokens, groups, W], whole numbers."""
        width = self._model.width
        groups = shape.head_count * shape.head_dim // width
        tokens = shape.token_count - kept
        size = shape.layer_count * tokens * groups * width
        escapes = np.frombuffer(reader.take(4 * reader.u32()), "<i4")
        count = _stream_count(size) if size else 0
        lengths = [reader.u32() for _ in range(count)]
        parts = [decompress(reader.take(length), size // count) for length in lengths]
        reader.expect_end()
        codes = (np.concatenate(parts) if parts else np.empty(0, np.uint8)).view(np.int8)
        numbers = codes.astype(np.float32)
        escaped = codes == _ESCAPE
        if np.count_nonzero(escaped) != escapes.size:
            raise FrameError(f"a tc4 payload with {escapes.size} escapes for {np.count_nonzero(escaped)} codes")
        if escapes.size:
            if not np.all((np.abs(escapes) > 127) & (np.abs(escapes) <= _LARGEST_CODE)):
                raise FrameError("a tc4 payload with an escape that needs none, or is too large")
            numbers[escaped] = escapes
        by_direction = numbers.reshape(width, groups, shape.layer_count, tokens)
        return np.ascontiguousarray(by_direction.transpose(2, 3, 1, 0))

    def _rotated(
        self, numbers: NDArray[np.float32], shape: SectionShape, kept: int, *, back: bool
    ) -> NDArray[np.float32]:
        """Keys [layers, tokens, C] rotated by their positions, or back."""
        heads = numbers.reshape(*numbers.shape[:2], shape.head_count, shape.head_dim)
        turns = self._turns(shape.token_start + kept, shape.token_count - kept, shape.head_count)
        return rotate_keys(heads, turns, back=back).reshape(numbers.shape)


class KeyTurns(NamedTuple):
    """The angles by which keys are rotated: cos and sin, each float32 [tokens, heads, head_dim / 2]."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


def key_turns(token_start: int, token_count: int, heads: int, frequencies: NDArray[np.float64]) -> KeyTurns:
    """Angles of `token_count` tokens from position `token_start` on, the same for every head."""
    angles = np.arange(token_start, token_start + token_count)[:, None, None] * frequencies
    shape = (token_count, heads, len(frequencies))
    cos, sin = (np.broadcast_to(turn(angles).astype(np.float32), shape) for turn in (np.cos, np.sin))
    return KeyTurns(np.ascontiguousarray(cos), np.ascontiguousarray(sin))


def rotate_keys(keys: NDArray[np.float32], turns: KeyTurns, *, back: bool = False) -> NDArray[np.float32]:
    """Rotate keys [..., tokens, heads, dim], or back; dims i and i + dim / 2 are pair i."""
    half = keys.shape[-1] // 2
    # Contiguous, since numpy is several times slower over pieces as short as half a head.
    first, second = keys[..., :half].copy(), keys[..., half:].copy()
    far = first * turns.sin
    near = second * turns.sin
    first *= turns.cos
    second *= turns.cos
    out = np.empty_like(keys)
    out[..., :half] = np.add(first, near, out=near) if back else np.subtract(first, near, out=near)
    out[..., half:] = np.subtract(second, far, out=far) if back else np.add(second, far, out=far)
    return out


class _Reader:
    """Takes a payload apart from its start; asking for more than is left raises `FrameError`."""

    def __init__(self, payload: memoryview) -> None:
        self._left = payload

    def take(self, count: int) -> memoryview:
        if count > len(self._left):
            raise FrameError(f"a tc4 payload ends {count - len(self._left)} bytes too early")
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def u32(self) -> int:
        (number,) = _U32.unpack(self.take(_U32.size))
        return int(number)

    def expect_end(self) -> None:
        if self._left:
            raise FrameError(f"{len(self._left)} bytes follow a tc4 payload")


def _stream_count(codes: int) -> int:
    return 4 if codes >= _SPLIT_CODES else 1


def _transformed(rows: NDArray[np.float32], matrices: NDArray[np.float32]) -> NDArray[np.float32]:
    """[tokens, groups, W] @ [groups, W, W]."""
    product: NDArray[np.float32] = np.matmul(rows.swapaxes(0, 1), matrices)
    return product.swapaxes(0, 1)
