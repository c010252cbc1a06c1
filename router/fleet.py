"""The workers that a router may choose from, as columns of numbers: a thousand are looked at in some microseconds.

A row is a `WorkerSnapshot`; its place is the worker's number (`router.worker_sets`), by which the prefix index and
columns of cached tokens know it too. Rows change when a worker reports or is given something; a choice only reads.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from pdcore.step_time import StepTime
from pdcore.types import Role
from router.snapshot import WorkerSnapshot

STALE_S = 2.0
"""Age at which half of what a report says of queues is believed."""
REFRESH_S = 0.25
"""What fades with age, and what the workers have in common, is computed anew so often."""
GUESS = StepTime(base_ms=1.0, token_ms=1.0)
"""What steps take as long as no worker has measured any."""

Column = NDArray[np.float64]
Mask = NDArray[np.bool_]

_COLUMNS = 17


@dataclass(frozen=True, slots=True)
class _Common:
    """What the workers have in common.

    Attributes:
        stream: the usual step. prompt: the usual step of those that have measured steps as large as those of prompts;
            None if nobody has. queued: prompt tokens queued at a worker, by role.
    """

    stream: StepTime = GUESS
    prompt: StepTime | None = None
    queued: Mapping[Role, float] | None = None


class Fleet:
    """Columns of float64, of shape [numbers]; those not named here are of `WorkerSnapshot`, its `load` or `mine`.

    Attributes:
        number_of: numbers by worker id. prefill, decode, aggregated: masks of who is there, by role.
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
    prefill: Mask
    decode: Mask
    aggregated: Mask
    _table: Column
    _masks: Mask

    def __init__(self) -> None:
        self.number_of: dict[str, int] = {}
        self._rows: list[WorkerSnapshot | None] = []
        self._heard_at: list[float] = []
        self._common = _Common()
        self._settled_at = float("-inf")
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
    def measured(self) -> bool:
        """Some worker has measured steps as large as those of prompts are."""
        return self._common.prompt is not None

    @property
    def rows(self) -> list[WorkerSnapshot]:
        """Who is there, each as of its last change: ages are older by now."""
        return [row for row in self._rows if row is not None]

    def id_of(self, number: int) -> str:
        """Who has that row."""
        row = self._rows[number]
        assert row is not None, number
        return row.worker_id

    def mask_of(self, worker_ids: Collection[str]) -> Mask | None:
        """Rows of these workers; None if none of them is there."""
        numbers = [self.number_of[worker_id] for worker_id in worker_ids if worker_id in self.number_of]
        if not numbers:
            return None
        mask = np.zeros(len(self), np.bool_)
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
        self.reserve(number + 1)
        before, self._rows[number] = self._rows[number], worker
        self._heard_at[number] = now - worker.age_s
        self._write(number, worker, now)
        if before is None or before.role is not worker.role:
            self.number_of[worker.worker_id] = number
            self._mask(number, worker.role)
            self._settled_at = float("-inf")

    def remove(self, worker_id: str) -> None:
        """The worker is gone, or takes nothing new. Idempotent."""
        number = self.number_of.pop(worker_id, None)
        if number is not None:
            self._rows[number] = None
            self._table[:, number] = 1.0  # nothing is divided by 0
            self._mask(number, None)

    def settle(self, now: float) -> None:
        """Make true for `now` what depends on it, or on several rows: to be called before a choice."""
        if now - self._settled_at < REFRESH_S:
            return
        new = self._settled_at == float("-inf")
        self._settled_at = now
        workers = [worker for worker in self._rows if worker is not None]
        known = [worker.load.step_time for worker in workers if worker.load.step_time.known]
        reaching = [worker.load.step_time for worker in workers if _reaches(worker)]
        queued: dict[Role, list[int]] = {}
        for worker in workers:
            queued.setdefault(worker.role, []).append(worker.queued_prefill_tokens)
        self._common = _Common(
            _mean(known) if known else GUESS,
            _mean(reaching) if reaching else None,
            {role: fmean(tokens) for role, tokens in queued.items()},
        )
        for number, row in enumerate(self._rows):
            if row is not None and (new or now - self._heard_at[number] >= REFRESH_S or not _reaches(row)):
                self._write(number, row, now)

    def computing_ms(self, tokens: Column | float, attended: Column | float) -> Column:
        """How long each worker would compute so many prompt tokens, which attend to so many."""
        steps = np.ceil(tokens / self.max_num_batched_tokens)
        return np.asarray(
            self.prompt_base_ms * steps + self.prompt_token_ms * tokens + self.prompt_attended_ms * attended
        )

    def _write(self, number: int, worker: WorkerSnapshot, now: float) -> None:
        load, mine, common = worker.load, worker.mine, self._common
        requests, free_blocks, block_size = worker.requests, worker.free_blocks, worker.block_size
        batch, queued = worker.max_num_batched_tokens, worker.queued_prefill_tokens
        stream = load.step_time if load.step_time.known else common.stream
        base, token, attended = _scaled(stream)
        context = (load.total_blocks - free_blocks) * block_size
        stream_ms = base + token * (requests + 1) + attended * context
        prompt = base, token, attended
        if not _reaches(worker):
            # A decode worker has seen small steps only, which say little of large ones.
            least = _scaled(common.prompt or common.stream)
            prompt = max(base, least[0]), max(token, least[1]), max(attended, least[2])
        belief = 0.5 ** ((now - self._heard_at[number]) / STALE_S)
        usual = common.queued.get(worker.role, 0.0) if common.queued is not None else queued
        # What this router has sent there itself is no rumour.
        waits = max(mine.prefill_tokens, belief * queued + (1 - belief) * usual)
        self._table[:, number] = (
            block_size,
            worker.capacity_tokens,
            free_blocks,
            requests,
            queued,
            batch,
            prompt_limit(worker),
            room_tokens(worker, 0, 0),
            room_tokens(worker, load.yielding_requests, load.yielding_blocks),
            worker.decisions,
            zlib.crc32(worker.worker_id.encode()),
            prompt[0] * -(-waits // batch) + prompt[1] * waits,
            *prompt,
            stream_ms,
            attended,
        )

    def _resize(self, size: int) -> None:
        more = size - len(self)
        table, masks = np.ones((_COLUMNS, size)), np.zeros((3, size), np.bool_)
        if len(self):
            table[:, : len(self)], masks[:, : len(self)] = self._table, self._masks
        self._table, self._masks = table, masks
        self._rows += [None] * more
        self._heard_at += [0.0] * more
        (
            self.block_size,
            self.capacity_tokens,
            self.free_blocks,
            self.requests,
            self.queued_prefill_tokens,
            self.max_num_batched_tokens,
            self.prompt_limit,
            self.room_tokens,
            self.room_if_given_way,
            self.decisions,
            self.draws,
            self.queued_ms,
            self.prompt_base_ms,
            self.prompt_token_ms,
            self.prompt_attended_ms,
            self.stream_ms,
            self.stream_attended_ms,
        ) = table
        self.prefill, self.decode, self.aggregated = masks

    def _mask(self, number: int, role: Role | None) -> None:
        self._masks[:, number] = [role is Role.PREFILL, role is Role.DECODE, role is Role.AGGREGATED]


def prompt_limit(worker: WorkerSnapshot) -> float:
    """See `Fleet`."""
    queued, allowed = worker.queued_prefill_tokens, worker.max_queued_prefill_tokens
    return math.inf if queued <= allowed else min(worker.mine.longest_prefill, queued) - (queued - allowed)


def room_tokens(worker: WorkerSnapshot, requests: int, blocks: int) -> float:
    """See `Fleet`; so many requests give way, and so many blocks."""
    if worker.requests - requests >= worker.max_requests:
        return -math.inf
    return math.inf if worker.requests == 0 else (worker.free_blocks + blocks) * worker.block_size


def _reaches(worker: WorkerSnapshot) -> bool:
    model = worker.load.step_time
    return model.known and model.reach >= worker.max_num_batched_tokens


def _scaled(model: StepTime) -> tuple[float, float, float]:
    return model.base_ms * model.drift, model.token_ms * model.drift, model.attended_ms * model.drift


def _mean(models: Sequence[StepTime]) -> StepTime:
    base, token, attended = (fmean(values) for values in zip(*map(_scaled, models), strict=True))
    return StepTime(base_ms=base, token_ms=token, attended_ms=attended)
