"""What a finished transfer claims to be, and the bookkeeping that proves it.

A frame covers a rectangle of (layer, token); the frames of one ticket must tile the rectangle
``[0, num_layers) x [prefix_tokens, num_tokens)`` exactly. `Coverage` checks the tiling, `frames_digest` binds the
contents of the frames to the manifest.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pdcore.types import RequestKey

MAX_REASON_CHARS = 256


class TicketRef(NamedTuple):
    """Names one use of a ticket slot. A reference with another generation is stale."""

    ticket_id: int
    generation: int


class FrameSpan(NamedTuple):
    """The part of a sequence's KV that one frame carries, K and V alike.

    Layers ``[layer_start, layer_start + layer_count)``, tokens ``[token_start, token_start + token_count)``, the
    latter counted from the start of the sequence.
    """

    layer_start: int
    layer_count: int
    token_start: int
    token_count: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The sender's closing statement about one ticket.

    Attributes:
        ref: the ticket. key: the request and attempt it was sent for.
        num_tokens: tokens of KV that the decode worker holds once committed, prefix included.
        num_frames: frames sent; their indices are ``0..num_frames - 1``.
        first_tokens: token ids sampled by the prefill worker, one for each sample of the request.
        digest: `frames_digest` of the frames.
        codec_reason: for people: why the sender chose its codec; at most `MAX_REASON_CHARS` characters.
    """

    ref: TicketRef
    key: RequestKey
    num_tokens: int
    num_frames: int
    first_tokens: tuple[int, ...]
    digest: int
    codec_reason: str = ""


def frames_digest(checksums: Iterable[tuple[int, ...]]) -> int:
    """CRC-32 over the frames' section checksums.

    Args:
        checksums: for each frame in index order, the CRC-32 of each section's decoded bytes in section order.

    Returns:
        CRC-32 of those numbers written as little-endian uint32, one after the other.
    """
    crc = 0
    for frame in checksums:
        crc = zlib.crc32(struct.pack(f"<{len(frame)}I", *frame), crc)
    return crc


class Coverage:
    """Which (layer, token) pairs of a ticket are covered by frames so far.

    One bit set of tokens for each layer, so that a check costs a few integer operations whatever the frames' shapes::

        bit 0 of a layer's set is token `token_start`; a full layer is ``2 ** num_tokens - 1``
    """

    __slots__ = ("_full", "_layers", "_start")

    def __init__(self, num_layers: int, token_start: int, token_end: int) -> None:
        assert num_layers >= 1, num_layers
        assert token_end > token_start, (token_start, token_end)
        self._start = token_start
        self._full = (1 << (token_end - token_start)) - 1
        self._layers = [0] * num_layers

    def add(self, span: FrameSpan) -> bool:
        """Mark `span` as covered. Returns False, changing nothing, if it overlaps what is covered or lies outside."""
        layers = range(span.layer_start, span.layer_start + span.layer_count)
        if span.layer_start < 0 or span.layer_count < 1 or layers.stop > len(self._layers):
            return False
        if span.token_start < self._start or span.token_count < 1:
            return False
        mask = ((1 << span.token_count) - 1) << (span.token_start - self._start)
        if mask > self._full or any(self._layers[layer] & mask for layer in layers):
            return False
        for layer in layers:
            self._layers[layer] |= mask
        return True

    @property
    def complete(self) -> bool:
        """Every layer covers every token."""
        return all(layer == self._full for layer in self._layers)

    def copy(self) -> Coverage:
        twin = object.__new__(Coverage)
        twin._start, twin._full, twin._layers = self._start, self._full, list(self._layers)
        return twin

    def snapshot(self) -> tuple[int, ...]:
        """Hashable value: the token set of each layer."""
        return tuple(self._layers)
