"""How the cores of one machine are shared out among workers: a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdcore.types import Role


@dataclass(frozen=True, slots=True)
class CorePlan:
    """The cores of one worker.

    Attributes:
        threads: compute threads of the engine; 0 leaves the choice to the machine that the worker lands on.
        engine: cores of the engine's threads; empty leaves them free.
        transfer: cores of the threads that pack and unpack KV; empty leaves them free.
    """

    threads: int
    engine: tuple[int, ...]
    transfer: tuple[int, ...]


def plan_cores(cores: Sequence[int] | None, counts: Mapping[Role, int]) -> dict[str, CorePlan]:
    """Share out `cores` among the workers of all pools.

    The prefill pool gets one half and those that decode the other, so that a long prompt cannot slow a running
    stream; transfers run on the prefill half for the same reason. A pool that is alone gets everything. Within its
    half each worker has cores of its own while there are enough, else the workers share the half.

    Args:
        cores: core numbers; None if the workers run on several machines, each of which then uses all it has.
        counts: workers of each pool.

    Returns:
        The plan of each worker, by worker id (``prefill-0``, ...).
    """
    if not cores:
        return {f"{role}-{i}": CorePlan(0, (), ()) for role in Role for i in range(counts[role])}
    prefill = [f"{Role.PREFILL}-{i}" for i in range(counts[Role.PREFILL])]
    serving = [f"{role}-{i}" for role in (Role.DECODE, Role.AGGREGATED) for i in range(counts[role])]
    if not prefill or not serving or len(cores) < 2:
        # One kind of work, or one core: nothing to keep apart.
        return {
            worker: CorePlan(share.threads, (), ()) for worker, share in _shares(cores, prefill + serving).items()
        }
    half = len(cores) // 2
    front, back = cores[: len(cores) - half], cores[len(cores) - half :]
    transfer = tuple(front)
    return {
        worker: CorePlan(share.threads, share.engine, transfer)
        for part, workers in ((front, prefill), (back, serving))
        for worker, share in _shares(part, workers).items()
    }


def _shares(cores: Sequence[int], workers: Sequence[str]) -> dict[str, CorePlan]:
    each = len(cores) // max(len(workers), 1)
    if each == 0:
        return {worker: CorePlan(1, tuple(cores), ()) for worker in workers}
    return {
        worker: CorePlan(each, tuple(cores[index * each : (index + 1) * each]), ())
        for index, worker in enumerate(workers)
    }
