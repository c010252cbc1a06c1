"""The workers that a router may choose from, as columns of numbers: a thousand are looked at in some microseconds.

A row is a `WorkerSnapshot`; its place is the worker's number (`router.worker_sets`), by which the prefix index and
columns of cached tokens know it too. Rows change when a worker reports or is given something; a choice only reads.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdcore.step_time import StepTime
from pdcore.types import PriorityClass, Role
from router.snapshot import WorkerSnapshot

if TYPE_CHECKING:
    from router.native.candidates import Workspace

STALE_S = 2.0
"""Age at which half of what a report says of queues is believed."""
REFRESH_S = 0.25
"""What fades with age, and what the workers have in common, is computed anew so often."""
GUESS = StepTime(base_ms=1.0, token_ms=1.0)
"""What steps take as long as no worker has measured any."""

Column = NDArray[np.float64]
Mask = NDArray[np.bool_]

COLUMNS = (
    "block_size",
    "capacity_tokens",
    "free_blocks",
    "requests",
    "queued_prefill_tokens",
    "max_num_batched_tokens",
    "prompt_limit",
    "room_tokens",
    "room_if_given_way",
    "decisions",
    "draws",
    "queued_ms",
    "prompt_base_ms",
    "prompt_token_ms",
    "prompt_attended_ms",
    "stream_ms",
    "stream_attended_ms",
)
"""Of the table, in their order: see `Fleet`."""

_PLACES, _HEARD_AT, _SENT_TOKENS, _CONTEXT, _REACHES, _KNOWN, _BASE, _TOKEN, _ATTENDED, _MINE = range(
    len(COLUMNS), len(COLUMNS) + 10
)
"""Columns behind them: places for more requests. Then those of which settling makes others anew: when the last report
was heard, prompt tokens sent and not known to be computed, tokens in the cache; whether steps were measured, also as
large as those of prompts; and the worker's own step-time model, drift included. Then this router's requests there, a
column for each class."""
_ALL = _MINE + len(PriorityClass)
_ROW = struct.Struct(f"{_ALL}d")

_ROLES = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)

Step = tuple[float, float, float]
"""What a step takes, and each token of it, and each token attended to, in milliseconds."""


class Fleet:
    """Columns of float64, of shape [numbers]; those not named here are of `WorkerSnapshot`, its `load` or `mine`.

    Attributes:
        number_of: numbers by worker id. prefill, decode, aggregated: masks of who is there, by role.
        computing: mask of workers where prompts are computed: the prefill pool beside a decode pool, and aggregated
            ones; without these whoever there is. generating: of those on which tokens are generated: prefill workers
            only if there is nobody else.
        prefillers, decode_workers, aggregated_workers: how many there are of each role. decoders: how many should
            decode, which are the last two.
        measured: some worker has measured steps as large as those of prompts are.
        draws: a number that stands for the worker's id.
        prompt_limit: prompt tokens to compute that the worker takes now, at most. All prompts on it but the longest
            stay within `max_queued_prefill_tokens`: so an idle worker takes a prompt of any length, a second long one
            waits in the router, and short ones need not wait behind a long one, since the worker's scheduler lets
            them pass.
        room_tokens: tokens that the worker has blocks for, and a place; it may be asked for any number if it is idle,
            for it knows best. room_if_given_way: the same if its batch requests give up what they can.
        queued_ms: until what is queued there is computed, as far as the last report is still believed.
        prompt_base_ms, prompt_token_ms, prompt_attended_ms: what a step of a prompt is expected to take there, and
            each token, and each token attended to (`pdcore.step_time`).
        stream_ms: what a step will take that generates a token of each request there and of one more, without what
            that one attends to. stream_attended_ms: the latter, for each token.
        places: requests that it may hold beside those it has; negative if it has more than it may.
    """

    block_size: Column
    capacity_tokens: Column
    free_blocks: Column
    requests: Column
    queued_prefill_tokens: Column
    max_num_batched_tokens: Column
    prompt_limit: Column
    room_tokens: Column
    room_if_given_way: Column
    decisions: Column
    draws: Column
    queued_ms: Column
    prompt_base_ms: Column
    prompt_token_ms: Column
    prompt_attended_ms: Column
    stream_ms: Column
    stream_attended_ms: Column
    places: Column
    prefill: Mask
    decode: Mask
    aggregated: Mask
    computing: Mask
    generating: Mask
    _table: Column
    _masks: Mask

    def __init__(self) -> None:
        self.number_of: dict[str, int] = {}
        self._rows: list[WorkerSnapshot | None] = []
        self._draws: list[int] = []
        self.prefillers = self.decode_workers = self.aggregated_workers = self.decoders = 0
        self.measured = False
        # What the workers have in common: the usual step, that of those that have measured steps as large as those of
        # prompts (None if nobody has), and the prompt tokens queued at a worker, by role (None if there is none).
        self._stream = _scaled(GUESS)
        self._prompt: Step | None = None
        self._queued: list[float | None] = [None] * len(_ROLES)
        self._settled_at = float("-inf")
        self.workspace: Workspace | None = None  # native code's, for columns of this length
        self._row = memoryview(bytearray(_ROW.size)).cast("d")  # as it is written
        self._resize(0)

    @classmethod
    def of(cls, workers: Sequence[WorkerSnapshot], now: float = 0.0) -> Fleet:
        """These workers, numbered in their order. `now`: when their ages were taken."""
        fleet = cls()
        for number, worker in enumerate(workers):
            fleet.put(number, worker, now)
        fleet.settle(now)
        return fleet

    def __len__(self) -> int:
        """Length of every column."""
        return len(self._rows)

    @property
    def empty(self) -> bool:
        """Nobody is there."""
        return not self.number_of

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the columns, float64 in the order of `COLUMNS`, and of the masks, uint8: prefill, decode, aggregated.
        For native code; good until a row is put."""
        return self._addresses

    @property
    def known(self) -> Mask:
        """Of workers that have measured their steps."""
        return np.asarray(self._table[_KNOWN] > 0)

    @property
    def own_models(self) -> Column:
        """Step-time models as each worker has fitted its own, drift included: of shape [3, numbers], what a step
        takes, each token of it, and each token attended to. They say nothing of workers that are not `known`."""
        return self._table[_BASE : _ATTENDED + 1]

    def own_model(self, number: int) -> Step | None:
        """The same of one worker; None if it has not measured enough."""
        item = self._table.item
        if not item(_KNOWN, number):
            return None
        return item(_BASE, number), item(_TOKEN, number), item(_ATTENDED, number)

    def mine(self, priority: PriorityClass) -> Column:
        """This router's requests of that class on each worker."""
        column: Column = self._table[_MINE + priority]
        return column

    @property
    def rows(self) -> list[WorkerSnapshot]:
        """Who is there, each as of its last change: ages are older by now."""
        return [row for row in self._rows if row is not None]

    def id_of(self, number: int) -> str:
        """Who has that row."""
        row = self._rows[number]
        assert row is not None, number
        return row.worker_id

    def mask_of(self, worker_ids: Collection[str], rows: Mask | None = None) -> Mask | None:
        """Rows of these workers, and those of `rows`; None if none of these workers is there, and no `rows`."""
        numbers = [self.number_of[worker_id] for worker_id in worker_ids if worker_id in self.number_of]
        if not numbers:
            return rows
        mask = np.zeros(len(self), np.bool_) if rows is None else rows.copy()
        mask[numbers] = True
        return mask

    def column(self, values: Mapping[str, float]) -> Column:
        """Values by worker id as a column; 0 for the others."""
        column = np.zeros(len(self))
        for worker_id, value in values.items():
            if worker_id in self.number_of:
                column[self.number_of[worker_id]] = value
        return column

    # -- rows ----------------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> None:
        """Make columns at least so long."""
        if size > len(self):
            self._resize(size)

    def put(self, number: int, worker: WorkerSnapshot, now: float) -> None:
        """The worker has that number, or something of it has changed."""
        if number >= len(self._rows):
            self._resize(number + 1)
        before, self._rows[number] = self._rows[number], worker
        if before is None or before.role is not worker.role or before.worker_id != worker.worker_id:
            self._leave(number, before)
            self.number_of[worker.worker_id] = number
            self._masks[:, number] = [worker.role is role for role in _ROLES]
            self._count_roles()
            self._draws[number] = zlib.crc32(worker.worker_id.encode())
            self._settled_at = float("-inf")
        self._write(number, worker, now)

    def remove(self, worker_id: str) -> None:
        """The worker is gone, or takes nothing new. Idempotent."""
        number = self.number_of.get(worker_id)
        if number is not None:
            self._leave(number, self._rows[number])
            self._rows[number] = None
            self._table[:, number] = 1.0  # nothing is divided by 0
            self._table[_KNOWN, number] = 0.0
            self._masks[:, number] = False
            self._count_roles()

    def _leave(self, number: int, worker: WorkerSnapshot | None) -> None:
        if worker is not None:
            del self.number_of[worker.worker_id]

    def _count_roles(self) -> None:
        self.prefillers, self.decode_workers, self.aggregated_workers = self._masks.sum(axis=1).tolist()
        self.decoders = self.decode_workers + self.aggregated_workers
        self.generating = self.decode | self.aggregated if self.decoders else self.prefill
        if self.prefillers and self.decode_workers:
            self.computing = self.prefill | self.aggregated
        else:
            self.computing = self.aggregated if self.aggregated_workers else self.prefill | self.decode

    def settle(self, now: float) -> None:
        """Make true for `now` what depends on it, or on several rows: to be called before a choice."""
        if now - self._settled_at < REFRESH_S:
            return
        self._settled_at = now
        table, there = self._table, self._masks.any(axis=0)
        models = table[_BASE:_MINE]
        known, reaches = there & (table[_KNOWN] > 0), there & (table[_REACHES] > 0)
        self._stream = _means(models[:, known]) or _scaled(GUESS)
        self._prompt = _means(models[:, reaches])
        self.measured = self._prompt is not None
        usual = np.zeros(len(self))
        for role, mask in enumerate(self._masks):
            queued = self.queued_prefill_tokens[mask].tolist()
            if queued:
                mean = self._queued[role] = math.fsum(queued) / len(queued)
                usual[mask] = mean
        # The same as `_write` makes of a row.
        own = np.where(known, models, np.array(self._stream)[:, None])
        base, token, attended = own
        least = np.array(self._prompt or self._stream)[:, None]
        prompt = np.where(reaches, own, np.maximum(own, least))
        belief = 0.5 ** ((now - table[_HEARD_AT]) / STALE_S)
        waits = np.maximum(table[_SENT_TOKENS], belief * self.queued_prefill_tokens + (1 - belief) * usual)
        queued_ms = prompt[0] * np.ceil(waits / self.max_num_batched_tokens) + prompt[1] * waits
        stream_ms = base + token * (self.requests + 1) + attended * table[_CONTEXT]
        made = (
            (self.queued_ms, queued_ms),
            (self.prompt_base_ms, prompt[0]),
            (self.prompt_token_ms, prompt[1]),
            (self.prompt_attended_ms, prompt[2]),
            (self.stream_ms, stream_ms),
            (self.stream_attended_ms, attended),
        )
        for column, values in made:
            np.copyto(column, values, where=there)

    def computing_ms(self, tokens: Column | float, attended: Column | float) -> Column:
        """How long each worker would compute so many prompt tokens, which attend to so many."""
        steps = np.ceil(tokens / self.max_num_batched_tokens)
        return np.asarray(
            self.prompt_base_ms * steps + self.prompt_token_ms * tokens + self.prompt_attended_ms * attended
        )

    def _write(self, number: int, worker: WorkerSnapshot, now: float) -> None:
        load, mine, batch, block_size = worker.load, worker.mine, worker.max_num_batched_tokens, worker.block_size
        requests, free_blocks, queued = worker.requests, worker.free_blocks, worker.queued_prefill_tokens
        sent, places = mine.prefill_tokens, worker.max_requests
        model = load.step_time
        known = model.known
        reaches = known and model.reach >= batch
        own = _scaled(model)
        base, token, attended = prompt_base, prompt_token, prompt_attended = own if known else self._stream
        if not reaches:
            # A decode worker has seen small steps only, which say little of large ones.
            least_base, least_token, least_attended = self._prompt or self._stream
            prompt_base = base if base > least_base else least_base
            prompt_token = token if token > least_token else least_token
            prompt_attended = attended if attended > least_attended else least_attended
        context = (load.total_blocks - free_blocks) * block_size
        belief = 0.5 ** (worker.age_s / STALE_S)
        usual = self._queued[_ROLES.index(worker.role)]
        # What this router has sent there itself is no rumour.
        waits = max(sent, belief * queued + (1 - belief) * (queued if usual is None else usual))
        room = room_if_given_way = _room(requests, requests, places, free_blocks, block_size)
        if load.yielding_requests or load.yielding_blocks:
            staying, blocks = requests - load.yielding_requests, free_blocks + load.yielding_blocks
            room_if_given_way = _room(requests, staying, places, blocks, block_size)
        _ROW.pack_into(
            self._row,
            0,
            block_size,
            load.total_blocks * block_size,
            free_blocks,
            requests,
            queued,
            batch,
            _prompt_limit(queued, worker.max_queued_prefill_tokens, mine.longest_prefill),
            room,
            room_if_given_way,
            worker.decisions,
            self._draws[number],
            prompt_base * -(-waits // batch) + prompt_token * waits,
            prompt_base,
            prompt_token,
            prompt_attended,
            base + token * (requests + 1) + attended * context,
            attended,
            places - requests,
            now - worker.age_s,
            sent,
            context,
            reaches,
            known,
            *own,
            *mine.by_class,
        )
        self._cells[number :: len(self._rows)] = self._row

    def _resize(self, size: int) -> None:
        more = size - len(self)
        table, masks = np.ones((_ALL, size)), np.zeros((3, size), np.bool_)
        table[_KNOWN] = 0.0
        if len(self):
            table[:, : len(self)], masks[:, : len(self)] = self._table, self._masks
        self._table, self._masks, self.workspace = table, masks, None
        self._cells = table.reshape(-1).data  # takes a row in a third of the time that numpy does
        self._addresses = table.ctypes.data, masks.ctypes.data
        self._rows += [None] * more
        self._draws += [0] * more
        for name, column in zip(COLUMNS, table, strict=False):
            setattr(self, name, column)
        self.places = table[_PLACES]
        self.prefill, self.decode, self.aggregated = masks
        self._count_roles()


def prompt_limit(worker: WorkerSnapshot) -> float:
    """See `Fleet`."""
    return _prompt_limit(worker.queued_prefill_tokens, worker.max_queued_prefill_tokens, worker.mine.longest_prefill)


def _prompt_limit(queued: int, allowed: int, longest: int) -> float:
    return math.inf if queued <= allowed else min(longest, queued) - (queued - allowed)


def room_tokens(worker: WorkerSnapshot, requests: int, blocks: int) -> float:
    """See `Fleet`; so many requests give way, and so many blocks."""
    return _room(
        worker.requests,
        worker.requests - requests,
        worker.max_requests,
        worker.free_blocks + blocks,
        worker.block_size,
    )


def _room(requests: int, staying: int, places: int, blocks: int, block_size: int) -> float:
    if staying >= places:
        return -math.inf
    return math.inf if requests == 0 else blocks * block_size


def _scaled(model: StepTime) -> Step:
    return model.base_ms * model.drift, model.token_ms * model.drift, model.attended_ms * model.drift


def _means(models: Column) -> Step | None:
    """Of each row of [3, models], whatever their order; None of no models."""
    count = models.shape[1]
    if not count:
        return None
    base, token, attended = (math.fsum(row) / count for row in models.tolist())
    return base, token, attended
