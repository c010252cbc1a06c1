"""Which part of a sequence's KV goes into the next frame. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kv_transfer.manifest import FrameSpan

LEAST_TOKENS: Final = 64
"""Codecs that work by channel want as many tokens of it at a time."""


class Computing(NamedTuple):
    """Step `step_id` computes tokens ``[token_start, token_end)``."""

    token_start: int
    token_end: int
    step_id: int


@dataclass(slots=True)
class FramePlanner:
    """Cuts what becomes ready, chunk by chunk and layer by layer, into frames that tile it exactly.

    What is ready, and what of it has been taken into frames, is kept as watermarks::

        tokens   token_start ........ computed ........ chunk end ........ token_end
                 | every layer ready | layers [0, n)   | nothing ready   |
        planned[layer]: tokens below it are in a frame of that layer

    Attributes:
        num_layers, token_start, token_end: the rectangle to tile.
        frame_tokens: tokens per frame at most.
        group_bytes: raw bytes of a frame, about: layers are grouped until it has them, and tokens of one layer that
            has more are split, never into fewer than `LEAST_TOKENS`. May be changed between frames.
        layer_token_bytes: K and V of one token in one layer, in bytes.
    """

    num_layers: int
    token_start: int
    token_end: int
    frame_tokens: int
    group_bytes: int
    layer_token_bytes: int
    computed: int = 0
    chunks: tuple[Computing, ...] = ()
    chunk_layers: int = 0
    planned: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.computed = self.token_start
        self.planned = [self.token_start] * self.num_layers

    @property
    def exhausted(self) -> bool:
        """Every token of every layer is in a frame."""
        return min(self.planned) == self.token_end

    @property
    def watched_step(self) -> int | None:
        """The step whose layer progress would make more ready; None if there is none."""
        if not self.chunks or self.chunk_layers == self.num_layers or self.chunks[0].token_start > self.computed:
            return None
        return self.chunks[0].step_id

    @property
    def left_bytes(self) -> int:
        """Raw bytes that are in no frame yet."""
        return (self.num_layers * self.token_end - sum(self.planned)) * self.layer_token_bytes

    @property
    def ready_bytes(self) -> int:
        """Raw bytes that are ready and in no frame yet."""
        tokens = sum(max(0, end - planned) for end, planned in zip(self._ready(), self.planned, strict=True))
        return tokens * self.layer_token_bytes

    def computing(self, chunk: Computing) -> None:
        """A step computes `chunk`, now or soon; chunks are announced in order."""
        if chunk.token_end > self.computed:
            self.chunks = (*self.chunks, chunk._replace(token_end=min(chunk.token_end, self.token_end)))

    def layers_done(self, step_id: int, layers: int) -> None:
        """Layers ``[0, layers)`` of the oldest running chunk are ready, if `step_id` computes it."""
        if self.watched_step == step_id:
            self.chunk_layers = max(self.chunk_layers, min(layers, self.num_layers))

    def computed_to(self, token_end: int) -> None:
        """Every layer of tokens below `token_end` is ready."""
        self.computed = max(self.computed, min(token_end, self.token_end))
        running = tuple(chunk for chunk in self.chunks if chunk.token_end > self.computed)
        if running[:1] != self.chunks[:1]:
            self.chunk_layers = 0
        self.chunks = running

    def take(self, span: FrameSpan) -> None:
        """`span`, which `next_span` returned, is in a frame now."""
        for layer in range(span.layer_start, span.layer_start + span.layer_count):
            assert self.planned[layer] == span.token_start, (layer, span)
            self.planned[layer] = span.token_start + span.token_count

    def next_span(self) -> FrameSpan | None:
        """The next rectangle that is ready and worth a frame.

        Layers that lag behind come first. A group is cut short only where the layers above it are already ahead;
        otherwise it waits until it is full, or until the layers are all there.
        """
        if min(self.planned) >= self._chunk_end:
            return None
        ready = self._ready()
        candidates = sorted(
            (layer for layer, end in enumerate(ready) if end > self.planned[layer]),
            key=lambda layer: (self.planned[layer], layer),
        )
        for layer in candidates:
            span = self._group_at(layer, ready)
            if span is not None:
                return span
        return None

    @property
    def _chunk_end(self) -> int:
        # A reader of `chunk_layers` > 0 knows that the chunk joins `computed`: see `watched_step`.
        return self.chunks[0].token_end if self.chunk_layers else self.computed

    def _ready(self) -> list[int]:
        """For each layer, the token below which all are in the cache."""
        chunk_end = self._chunk_end
        return [chunk_end if layer < self.chunk_layers else self.computed for layer in range(self.num_layers)]

    def fit(self, group_bytes: int, most_bytes: int) -> None:
        """From now on frames have about `group_bytes`, and never more than `most_bytes` if a token's fit in that."""
        self.group_bytes = max(1, min(group_bytes, most_bytes))
        self.frame_tokens = max(1, min(self.frame_tokens, most_bytes // self.layer_token_bytes))

    @property
    def _most_tokens(self) -> int:
        fitting = self.group_bytes // self.layer_token_bytes // LEAST_TOKENS * LEAST_TOKENS
        return min(self.frame_tokens, max(LEAST_TOKENS, fitting))

    def _group_at(self, first: int, ready: list[int]) -> FrameSpan | None:
        start = self.planned[first]
        # What every layer has goes separately from what the running chunk adds: its end is the same for all of them.
        end = min(start + self._most_tokens, self.computed if start < self.computed else ready[first])
        wanted = max(1, self.group_bytes // ((end - start) * self.layer_token_bytes))
        last = first + 1
        while last < self.num_layers and last - first < wanted and self.planned[last] <= start:
            if self.planned[last] < start or ready[last] < end:
                return None  # that layer is still to come to this range: wait for it
            last += 1
        return FrameSpan(first, last - first, start, end - start)

    def copy(self) -> FramePlanner:
        """An independent planner in the same state."""
        twin = FramePlanner(
            self.num_layers,
            self.token_start,
            self.token_end,
            self.frame_tokens,
            self.group_bytes,
            self.layer_token_bytes,
        )
        twin.computed, twin.chunks, twin.chunk_layers = self.computed, self.chunks, self.chunk_layers
        twin.planned = list(self.planned)
        return twin

    def snapshot(self) -> tuple[object, ...]:
        """Hashable value of what changes."""
        return self.computed, self.chunks, self.chunk_layers, tuple(self.planned)
