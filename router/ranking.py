"""Which of several workers that could take a request is the best: the routing policies, by name. Pure.

::

    cost             the lowest predicted cost, in milliseconds that the client waits
    least_loaded     the fewest queued prompt tokens, or the fewest requests where tokens are generated
    power_of_two     of two drawn at random, the less loaded one
    prefix_affinity  the longest cached beginning of the prompt, then the less loaded one
    round_robin      each in turn

`cost` predicts by what each worker has measured of its own steps (`pdcore.step_time`)::

    where the prompt is computed    steps for what is queued there
                                    + 1.25 * steps for what its prefix cache lacks (`WORK_PRICE`)
    where it only generates         transfer of what its prefix cache lacks
    where tokens are generated      `PRICED_TOKENS` steps as long as they will be with this request among them

and for a worker that runs it as a whole all but the transfer. A worker that has measured nothing yet is taken to be
like the mean of those that have. What a report says fades as it ages, towards the mean of all: a worker that was idle
some seconds ago is not a better guess than another.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pdcore.step_time import StepShape, StepTime
from router.snapshot import WorkerSnapshot

USES_PREFIXES = frozenset({"cost", "prefix_affinity"})
"""Policies to which it matters what is cached where."""
PRICED_TOKENS = 64
"""Output tokens by whose inter-token latency a worker is judged: how many there will be, nobody knows."""
STALE_S = 2.0
"""Age at which half of what a report says of queues is believed."""
WORK_PRICE = 0.25
"""Computing takes a worker from all others that wait: its time counts so much more than waiting. So siblings that
arrive together queue up behind the first one, and their common beginning is not computed on every worker."""
ALIKE = 0.1
"""Costs that exceed the lowest by less than this share are alike: predictions are no better, and turns spread what
is cached."""
_GUESS = StepTime(base_ms=1.0, token_ms=1.0)

Key = tuple[float | bool | str, ...]
Rank = Callable[[WorkerSnapshot], Key]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is ranked for.

    Attributes:
        prompt_tokens: to compute, or to have computed elsewhere.
        cached: tokens of the prompt's beginning that workers have, by worker; none for those that are not in it.
        avoid: workers that are taken only if there is no other.
        draw: a number that differs from request to request; breaks ties, and is what `power_of_two` draws by.
        transfer_ms: of one token's KV; 0 if it is not known.
    """

    prompt_tokens: int
    cached: Mapping[str, int] = field(default_factory=dict)
    avoid: frozenset[str] = frozenset()
    draw: int = 0
    transfer_ms: float = 0.0

    def lacking(self, worker_id: str) -> int:
        """Prompt tokens that the worker has to compute or to be sent: its last token always."""
        return max(1, self.prompt_tokens - self.cached.get(worker_id, 0))


def best_prefill(policy: str, wanted: Wanted, workers: Sequence[WorkerSnapshot]) -> WorkerSnapshot | None:
    """The worker that is to compute the prompt; None if there is none."""

    def cost(pool: _Pool, worker: WorkerSnapshot) -> float:
        return pool.prefill_ms(wanted, worker)

    return _best(policy, wanted, workers, cost, _prefill_load)


def best_decode(policy: str, wanted: Wanted, workers: Sequence[WorkerSnapshot]) -> WorkerSnapshot | None:
    """The worker that is to get the prompt's KV and to generate; None if there is none."""

    def cost(pool: _Pool, worker: WorkerSnapshot) -> float:
        return wanted.transfer_ms * wanted.lacking(worker.worker_id) + PRICED_TOKENS * pool.step_ms(wanted, worker)

    return _best(policy, wanted, workers, cost, _decode_load)


def best_whole(policy: str, wanted: Wanted, workers: Sequence[WorkerSnapshot]) -> WorkerSnapshot | None:
    """The worker that is to run the request as a whole; None if there is none."""

    def cost(pool: _Pool, worker: WorkerSnapshot) -> float:
        return pool.prefill_ms(wanted, worker) + PRICED_TOKENS * pool.step_ms(wanted, worker)

    return _best(policy, wanted, workers, cost, _whole_load)


class _Pool:
    """What is needed of all workers to judge one of them."""

    def __init__(self, workers: Sequence[WorkerSnapshot]) -> None:
        known = [worker.load.step_time for worker in workers if worker.load.step_time.known]
        self._usual = _mean(known) if known else _GUESS
        self._queued = fmean(worker.queued_prefill_tokens for worker in workers)

    def prefill_ms(self, wanted: Wanted, worker: WorkerSnapshot) -> float:
        """Until the prompt is computed there."""
        belief = 0.5 ** (worker.age_s / STALE_S)
        # What this router has sent there itself is no rumour.
        queued = worker.queued_prefill_tokens
        queued = max(worker.mine.prefill_tokens, belief * queued + (1 - belief) * self._queued)
        lacking = wanted.lacking(worker.worker_id)
        attended = lacking * (wanted.prompt_tokens - lacking) + lacking * lacking // 2
        return self._ms(worker, queued, 0) + (1 + WORK_PRICE) * self._ms(worker, lacking, attended)

    def step_ms(self, wanted: Wanted, worker: WorkerSnapshot) -> float:
        """A step that generates one token of each request there, this one among them."""
        context = (worker.load.total_blocks - worker.free_blocks) * worker.block_size + wanted.prompt_tokens
        return self._model(worker).predict_ms(StepShape(worker.requests + 1, context))

    def _ms(self, worker: WorkerSnapshot, tokens: float, attended: int) -> float:
        model = self._model(worker)
        steps = -(-tokens // worker.max_num_batched_tokens)
        return model.drift * (model.base_ms * steps + model.token_ms * tokens + model.attended_ms * attended)

    def _model(self, worker: WorkerSnapshot) -> StepTime:
        model = worker.load.step_time
        return model if model.known else self._usual


def _best(
    policy: str,
    wanted: Wanted,
    workers: Sequence[WorkerSnapshot],
    cost: Callable[[_Pool, WorkerSnapshot], float],
    load: Rank,
) -> WorkerSnapshot | None:
    if not workers:
        return None
    if policy == "power_of_two":
        # Both from those that need not be avoided, if there are two.
        chosen = [w for w in workers if w.worker_id not in wanted.avoid]
        chosen = chosen if len(chosen) > 1 else list(workers)
        workers = random.Random(wanted.draw).sample(chosen, min(2, len(chosen)))
    ranks: dict[str, Rank] = {
        "least_loaded": load,
        "power_of_two": load,
        "prefix_affinity": lambda w: (-wanted.cached.get(w.worker_id, 0), *load(w)),
        "round_robin": lambda w: (w.decisions,),
    }
    if policy == "cost":
        pool = _Pool(workers)
        costs = {w.worker_id: cost(pool, w) for w in workers}
        # Of those that need not be avoided, if there are such.
        least = min((worker_id in wanted.avoid, cost) for worker_id, cost in costs.items())[1]
        ranks["cost"] = lambda w: (max(costs[w.worker_id], (1 + ALIKE) * least), *load(w))
    rank = ranks[policy]
    return min(workers, key=lambda w: (w.worker_id in wanted.avoid, *rank(w), _tie(wanted.draw, w)))


def _tie(draw: int, worker: WorkerSnapshot) -> Key:
    return worker.decisions, zlib.crc32(worker.worker_id.encode(), draw & 0xFFFFFFFF)


def _prefill_load(worker: WorkerSnapshot) -> Key:
    return worker.queued_prefill_tokens, worker.requests


def _decode_load(worker: WorkerSnapshot) -> Key:
    return worker.requests, -worker.free_blocks


def _whole_load(worker: WorkerSnapshot) -> Key:
    return worker.requests, worker.queued_prefill_tokens, -worker.free_blocks


def _mean(models: Sequence[StepTime]) -> StepTime:
    return StepTime(
        base_ms=fmean(model.base_ms * model.drift for model in models),
        token_ms=fmean(model.token_ms * model.drift for model in models),
        attended_ms=fmean(model.attended_ms * model.drift for model in models),
    )
