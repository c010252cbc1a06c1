"""KV of preempted sequences in host memory, and the thread that copies it there and back.

Decisions are made elsewhere (`engine.preemption`); this module carries them out. A copy is begun and booked under the
engine's lock, and runs without it, beside the steps::

    engine:  swap_out            finish           swap_in              finish
                |                  |                 |                   |
    blocks:     SEQUENCE -> SWAP   free              SWAP (fresh)        SWAP -> SEQUENCE
    host:       room taken         KV held           KV held             free
    thread:     '---- gather ------'                 '---- scatter ------'

Blocks belong to the copy (`OwnerKind.SWAP`) until it has ended, whatever becomes of the sequence meanwhile: they are
freed once, in `finish`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from engine.blocks import BlockManager, Owner, OwnerKind
from engine.preemption import ASSUMED_COPY_BYTES_S, ASSUMED_PREFILL_TOKENS_S, PreemptionTerms, Rate
from engine.sequence import Sequence, SequenceState, SwapPhase
from engine.step import KvCache
from pdcore.config import PREEMPT_BY_RECOMPUTE, EngineConfig
from pdcore.errors import ConfigError, PdserveError
from pdcore.tracebacks import wordless
from pdcore.types import KvGeometry, RequestKey

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""About what is copied in one call: a copy that is not wanted any more ends at the next piece."""


class CopyCancelled(PdserveError):
    """The sequence was aborted, or the engine is being closed."""


@dataclass(slots=True)
class HostKv:
    """KV of a sequence in host memory. `pieces`: (first token, values as `KvCache.gather` returns them).

    `blocks`: blocks of host memory that are set aside for it.
    """

    blocks: int
    pieces: list[tuple[int, torch.Tensor]] = field(default_factory=list)


@dataclass(slots=True)
class Copy:
    """One copy between the paged cache and host memory, run by a `Copier`.

    Attributes:
        out: to host memory, else back.
        block_ids: the sequence's whole block table. token_start, token_end: what of it is copied.
        host: where it goes to, or comes from.
        cancelled: its result is not wanted any more; set from other threads while it runs.
        seconds: what it took. error: why it failed, None if it has not.
    """

    key: RequestKey
    out: bool
    block_ids: tuple[int, ...]
    token_start: int
    token_end: int
    host: HostKv
    cancelled: bool = False
    seconds: float = 0.0
    error: Exception | None = None

    def run(self, cache: KvCache, stopping: Callable[[], bool] = lambda: False) -> None:
        """Copy, and note how long it took or how it failed. Raises nothing."""
        started = time.perf_counter()
        try:
            (self._gather if self.out else self._scatter)(cache, stopping)
        except Exception as error:  # noqa: BLE001 - whatever it is, the sequence is computed again instead
            self.error = error
        self.seconds = time.perf_counter() - started

    def _gather(self, cache: KvCache, stopping: Callable[[], bool]) -> None:
        geometry = cache.geometry
        size = geometry.block_size
        step = max(size, PIECE_BYTES // geometry.bytes_per_token // size * size)
        for start in range(self.token_start, self.token_end, step):
            self._check(stopping)
            count = min(step, self.token_end - start)
            self.host.pieces.append((start, cache.gather(0, geometry.num_layers, self.block_ids, start, count)))

    def _scatter(self, cache: KvCache, stopping: Callable[[], bool]) -> None:
        for start, values in self.host.pieces:
            self._check(stopping)
            begin = max(start, self.token_start)
            if begin < start + values.shape[2]:
                cache.scatter(0, self.block_ids, begin, values[:, :, begin - start :])

    def _check(self, stopping: Callable[[], bool]) -> None:
        if self.cancelled or stopping():
            raise CopyCancelled


class Copier(Protocol):
    """Runs copies, in the order in which they come, and calls `done` of the engine with each when it has ended."""

    def submit(self, copy: Copy) -> None:
        """Take a copy. Called under the engine's lock: must neither block nor call `done`."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End what runs at its next piece, and what waits at once; True if all has ended within `timeout_s`.
        Idempotent."""
        ...


class ThreadCopier:
    """A `Copier` with one thread of its own. The cache's gather and scatter leave the GIL to the step meanwhile.

    Args:
        done: called for each copy, also for failed and cancelled ones.
        on_crash: called with what `done` raised; no more copies are run then.
    """

    def __init__(
        self, cache: KvCache, done: Callable[[Copy], None], on_crash: Callable[[BaseException], None]
    ) -> None:
        self._cache = cache
        self._done = done
        self._on_crash = on_crash
        self._copies: SimpleQueue[Copy | None] = SimpleQueue()
        self._stopping = threading.Event()
        # Started here, not at the first copy: a thread gets the cores of the one that starts it, and the engine's
        # own are to be left to the engine.
        self._thread = threading.Thread(target=self._run, name="kv-swap", daemon=True)
        self._thread.start()

    def submit(self, copy: Copy) -> None:
        self._copies.put(copy)

    def close(self, timeout_s: float = 10.0) -> bool:
        self._stopping.set()
        self._copies.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (copy := self._copies.get()) is not None:
                copy.run(self._cache, self._stopping.is_set)
                if copy.error is not None and not isinstance(copy.error, CopyCancelled):
                    logger.error("request %s: a swap has failed", copy.key.request_id, exc_info=wordless(copy.error))
                self._done(copy)
                del copy  # or its host memory would be kept until the next one comes
        except BaseException as error:
            logger.exception("the swap thread has failed", exc_info=wordless(error))
            self._on_crash(error)


def front_left_behind(sequence: Sequence, blocks: BlockManager) -> int:
    """Blocks from the front that are not copied, since others use them and it may take them from the prefix cache
    when it comes back.

    None of a sequence whose KV came through a lossy codec: what the cache has is not what it had.
    """
    return min(blocks.shared_front(Owner.sequence(sequence.key)), sequence.may_hit) if sequence.exact else 0


class SwapSpace:
    """The host memory of one engine: what is there, and what is on its way. Protected by the engine's lock.

    Attributes:
        capacity: blocks of host memory. used: those set aside, for copies under way too.
        outs, ins: copies that have ended well, in either direction.
        out_speed, in_speed: bytes per second of such copies. prefill_speed: tokens per second of steps with prefills.
    """

    def __init__(
        self,
        blocks: BlockManager,
        geometry: KvGeometry,
        config: EngineConfig,
        *,
        recompute_weight: float,
        make_copier: Callable[[], Copier],
    ) -> None:
        """Raises ConfigError if `config.swap_memory` does not hold one block."""
        self.capacity = _capacity(config, geometry)
        self.used = 0
        self.outs = 0
        self.ins = 0
        self.out_speed = Rate(ASSUMED_COPY_BYTES_S)
        self.in_speed = Rate(ASSUMED_COPY_BYTES_S)
        self.prefill_speed = Rate(ASSUMED_PREFILL_TOKENS_S)
        self._mode = config.preemption
        self._recompute_weight = recompute_weight
        self._bytes_per_token = geometry.bytes_per_token
        self._blocks = blocks
        self._copier = make_copier() if self.capacity else None
        self._held: dict[RequestKey, HostKv] = {}
        self._copies: dict[RequestKey, Copy] = {}

    def terms(self) -> PreemptionTerms:
        """What decides between swap and recompute, as measured so far."""
        return PreemptionTerms(
            mode=self._mode if self.capacity else PREEMPT_BY_RECOMPUTE,
            bytes_per_token=self._bytes_per_token,
            out_bytes_s=self.out_speed.per_second,
            in_bytes_s=self.in_speed.per_second,
            prefill_tokens_s=self.prefill_speed.per_second,
            recompute_weight=self._recompute_weight,
        )

    @property
    def room(self) -> int:
        """Blocks of host memory that are free."""
        return self.capacity - self.used

    @property
    def used_bytes(self) -> int:
        return self.used * self._blocks.block_size * self._bytes_per_token

    def swap_out(self, sequence: Sequence) -> bool:
        """Begin to copy a sequence's KV to host memory; False if there is no room for it (or nothing to copy)."""
        key, size = sequence.key, self._blocks.block_size
        first = front_left_behind(sequence, self._blocks)
        host = HostKv(self._blocks.blocks_for(sequence.num_computed - first * size))
        if not 0 < host.blocks <= self.room:
            return False
        table = sequence.block_ids
        self._held[key] = host
        self.used += host.blocks
        self._blocks.transfer(Owner.sequence(key), Owner.swap(key))
        sequence.swap_out(first)
        self._submit(Copy(key, True, table, first * size, sequence.num_computed, host))
        return True

    def swap_in(self, sequence: Sequence) -> None:
        """Begin to copy a sequence's KV back, behind what its `Owner.swap` shares with the prefix cache already."""
        owner, cached = Owner.swap(sequence.key), sequence.hits
        assert len(self._blocks.blocks_of(owner)) == cached, owner
        assert sequence.host_from <= cached, (sequence.key, sequence.host_from, cached)
        start = cached * self._blocks.block_size
        assert start < sequence.num_computed, (sequence.key, start, sequence.num_computed)
        whole = min(self._blocks.blocks_for(sequence.num_tokens + 1), sequence.max_blocks)
        self._blocks.allocate(owner, whole - cached)
        table = tuple(self._blocks.blocks_of(owner))
        sequence.swap_in()
        self._submit(Copy(sequence.key, False, table, start, sequence.num_computed, self._held[sequence.key]))

    def finish(self, copy: Copy, sequence: Sequence | None) -> bool:
        """Book the end of a copy; `sequence` is None if it was aborted. True if its KV is in its blocks again."""
        assert self._copies.pop(copy.key) is copy, copy.key
        ok = copy.error is None and not copy.cancelled
        if ok:
            speed = self.out_speed if copy.out else self.in_speed
            speed.add((copy.token_end - copy.token_start) * self._bytes_per_token, copy.seconds)
        owner = Owner.swap(copy.key)
        if sequence is None or not ok:
            self._blocks.release(owner)
            self._forget(copy.key)
            if sequence is not None:
                sequence.preempt()
            return False
        if copy.out:
            self.outs += 1
            self._blocks.release(owner)
            sequence.swapped_out()
            return False
        self.ins += 1
        self._forget(copy.key)
        self._blocks.transfer(owner, Owner.sequence(copy.key))
        sequence.swapped_in(copy.block_ids, copy.token_start // self._blocks.block_size)
        return True

    def drop(self, key: RequestKey) -> None:
        """The sequence's KV in host memory is not wanted any more. Idempotent."""
        copy = self._copies.get(key)
        if copy is not None:
            copy.cancelled = True  # its blocks are in use until it has ended
        elif key in self._held:
            self._forget(key)

    def close(self, timeout_s: float) -> bool:
        """End the copies under way; True if none runs any more."""
        return self._copier is None or self._copier.close(timeout_s)

    def _submit(self, copy: Copy) -> None:
        assert self._copier is not None, "there is no host memory"
        self._copies[copy.key] = copy
        self._copier.submit(copy)

    def _forget(self, key: RequestKey) -> None:
        self.used -= self._held.pop(key).blocks

    def check_integrity(self, sequences: Mapping[RequestKey, Sequence]) -> None:
        """Assert that sequences, copies and blocks agree."""
        assert 0 <= self.used == sum(host.blocks for host in self._held.values()) <= self.capacity
        swapped = {key for key, sequence in sequences.items() if sequence.state is SequenceState.SWAPPED}
        assert self._held.keys() == swapped | self._copies.keys(), "host memory that nobody owns, or KV without any"
        assert {owner.id for owner in self._blocks.owners(OwnerKind.SWAP)} == self._copies.keys()
        for key, copy in self._copies.items():
            blocks = self._blocks.blocks_of(Owner.swap(key))
            assert copy.block_ids == tuple(blocks), f"{key}: a copy whose blocks are others'"
            first = copy.token_start // self._blocks.block_size
            written = () if copy.out else blocks[first:]
            assert all(map(self._blocks.is_private, written)), f"{key}: would copy into a block that others use"
            assert copy.cancelled == (key not in sequences), f"{key}: a copy for nobody"
        for key in swapped:
            sequence, under_way = sequences[key], self._copies.get(key)
            phase = SwapPhase.HOST if under_way is None else SwapPhase.OUT if under_way.out else SwapPhase.IN
            assert sequence.phase is phase, (key, sequence.phase, phase)


def _capacity(config: EngineConfig, geometry: KvGeometry) -> int:
    """Blocks of KV that the configured host memory holds."""
    block_bytes = geometry.bytes_per_token * geometry.block_size
    blocks = config.swap_memory // block_bytes
    if config.swap_memory and not blocks:
        raise ConfigError("engine.swap_memory", config.swap_memory, f"0, or at least one block: {block_bytes} bytes")
    return blocks
