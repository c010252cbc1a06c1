"""Pieces of frames to frames, with memory that the sender's credit bounds. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.frames import HEADER_BYTES
from kv_transfer.manifest import TicketRef
from kv_transfer.messages import Piece
from pdcore.errors import FrameError


@dataclass(frozen=True, slots=True)
class AssembledFrame:
    """A whole frame.

    Attributes:
        ref, frame_index: what the pieces said it is.
        total: its length in bytes.
        data: its bytes; None if no ticket wanted it, so that nothing was kept.
        first_byte_at: clock reading when its first piece came, or when it was announced.
        shared: the sender can still write to `data`: what is read twice may differ.
    """

    ref: TicketRef
    frame_index: int
    total: int
    data: memoryview | None
    first_byte_at: float
    shared: bool = False


class FrameAssembler:
    """Puts the pieces of one stream together. Used by one thread.

    Args:
        room_for: how many bytes a frame of this ticket may have; 0 if nobody wants it. Asked at a frame's first
            piece, before its memory is taken.
        credit_left: how many bytes the sender may still have under way.
    """

    def __init__(self, room_for: Callable[[TicketRef], int], credit_left: Callable[[], int]) -> None:
        self._room_for = room_for
        self._credit_left = credit_left
        self._first: Piece | None = None
        self._first_at = 0.0
        self._kept: bytearray | None = None
        self._received = 0

    def add(self, piece: Piece, now: float) -> AssembledFrame | None:
        """Take the next piece; returns the frame that it completes.

        Raises:
            FrameError: the sender breaks the protocol (pieces out of order, more bytes than announced, more than its
                credit). The stream is of no use any more.
        """
        if self._first is None:
            return self._begin(piece, now)
        first = self._first
        if (piece.ref, piece.frame_index, piece.total) != (first.ref, first.frame_index, first.total):
            raise FrameError(f"frame {piece.frame_index} begins before frame {first.frame_index} is complete")
        return self._append(first, piece)

    def _begin(self, piece: Piece, now: float) -> AssembledFrame | None:
        if piece.offset != 0:
            raise FrameError(f"frame {piece.frame_index} begins at byte {piece.offset}")
        if piece.total < HEADER_BYTES:
            raise FrameError(f"a frame of {piece.total} bytes is shorter than its header of {HEADER_BYTES}")
        if piece.total > self._credit_left():
            raise FrameError(f"a frame of {piece.total} bytes with credit for {self._credit_left()}")
        wanted = piece.total <= self._room_for(piece.ref)
        if len(piece.data) == piece.total:
            data = memoryview(piece.data) if wanted else None
            return AssembledFrame(piece.ref, piece.frame_index, piece.total, data, now)
        self._first, self._first_at, self._received = piece, now, 0
        self._kept = bytearray(piece.total) if wanted else None
        return self._append(piece, piece)

    def _append(self, first: Piece, piece: Piece) -> AssembledFrame | None:
        end = self._received + len(piece.data)
        if piece.offset != self._received or not piece.data or end > first.total:
            raise FrameError(
                f"bytes [{piece.offset}, {piece.offset + len(piece.data)}) of frame {piece.frame_index}, which has "
                f"{first.total} and of which {self._received} have come"
            )
        if self._kept is not None:
            self._kept[self._received : end] = piece.data
        self._received = end
        if end < first.total:
            return None
        data = None if self._kept is None else memoryview(self._kept)
        self._first, self._kept = None, None
        return AssembledFrame(first.ref, first.frame_index, first.total, data, self._first_at)
