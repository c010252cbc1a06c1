"""A worker that takes as long as a cost model says: simulated, but behind the real interfaces and over real gRPC.

One engine loop per worker. A step takes ``base_ms + token_ms * tokens`` of wall time, in which nothing is computed;
in it are one token of each sequence that decodes, up to `max_num_seqs`, and prompts in order of arrival, up to
`max_num_batched_tokens` together with those. What it reports of itself is what an engine would: queued prompt tokens,
who waits, and a step-time model fitted to the steps as they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from pdcore.step_time import StepShape, StepTimeModel
from pdcore.types import RequestKey, Role
from protos import worker_pb2
from protos.convert import step_time_to_proto
from tests.support.null_worker import NullWorker


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a step, in milliseconds, and what is in it at most."""

    base_ms: float
    token_ms: float
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 32


@dataclass(eq=False, slots=True)
class _Prompt:
    tokens: int
    done: asyncio.Future[None]


class CostWorker(NullWorker):
    """See above. `steps`: made so far."""

    def __init__(self, worker_id: str, role: Role, costs: Costs, **options: object) -> None:
        super().__init__(worker_id, role, hook=self._at_point, max_num_seqs=costs.max_num_seqs, **options)  # type: ignore[arg-type]
        self.max_num_batched_tokens = costs.max_num_batched_tokens
        self.steps = 0
        self._costs = costs
        self._times = StepTimeModel()
        self._prompts: list[_Prompt] = []
        self._decodes: list[asyncio.Future[None]] = []
        self._computed: set[RequestKey] = set()
        self._work = asyncio.Event()
        self._engine: asyncio.Task[None] | None = None

    async def start(self) -> CostWorker:
        await super().start()
        self._engine = asyncio.create_task(self._run(), name=f"{self.worker_id}-engine")
        return self

    async def crash(self) -> None:
        if self._engine is not None:
            self._engine.cancel()
            await asyncio.gather(self._engine, return_exceptions=True)
        await super().crash()

    stop = crash

    async def _at_point(self, point: str, key: RequestKey, index: int) -> None:
        """What a request waits for at each of the null worker's points."""
        job = self.held.get(key)
        if job is None:
            return
        if point == "commit":
            self._computed.add(key)
        elif point == "prefill":
            await self._prompt(job.tokens - 1)
        elif point == "token" and key not in self._computed:
            self._computed.add(key)
            try:
                await self._prompt(job.tokens - 1)
            except asyncio.CancelledError:
                self._computed.discard(key)
                raise
        elif point == "token" and index > len(job.request.delivered):  # the first was sampled with the prompt
            future = asyncio.get_running_loop().create_future()
            self._decodes.append(future)
            self._work.set()
            await future

    def _release(self, job) -> None:  # type: ignore[no-untyped-def]
        self._computed.discard(job.key)
        super()._release(job)

    async def _prompt(self, tokens: int) -> None:
        prompt = _Prompt(tokens, asyncio.get_running_loop().create_future())
        self._prompts.append(prompt)
        self._work.set()
        await prompt.done

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            # Those that were given a token come back for the next one.
            await asyncio.sleep(0.0005)
            self._prompts = [prompt for prompt in self._prompts if not prompt.done.done()]
            self._decodes = [future for future in self._decodes if not future.done()]
            if not self._prompts and not self._decodes:
                self._work.clear()
                await self._work.wait()
                due = loop.time()
                continue
            decodes = self._decodes[: self._costs.max_num_seqs]
            shares = list(self._shares(self._costs.max_num_batched_tokens - len(decodes)))
            tokens = len(decodes) + sum(share for _, share in shares)
            began = loop.time()
            # By the clock that ought to be: what this loop does between two steps, and a machine that wakes it late,
            # are made up for by the next step, as far as that takes.
            seconds = (self._costs.base_ms + self._costs.token_ms * tokens) / 1000
            due = max(due, began - seconds) + seconds
            await asyncio.sleep(max(0.0, due - began))
            self.steps += 1
            self._times.observe(StepShape(tokens, 0), 1000 * (loop.time() - began))
            for prompt, share in shares:
                prompt.tokens -= share
                if not prompt.tokens and not prompt.done.done():
                    prompt.done.set_result(None)
            for future in decodes:
                if not future.done():
                    future.set_result(None)

    def _shares(self, budget: int) -> Iterator[tuple[_Prompt, int]]:
        for prompt in self._prompts:
            share = min(budget, prompt.tokens)
            if share <= 0:
                return
            budget -= share
            yield prompt, share

    def _load(self) -> worker_pb2.Load:
        load = super()._load()
        waiting = [prompt for prompt in self._prompts if not prompt.done.done()]
        load.queued_prefill_tokens = sum(prompt.tokens for prompt in waiting)
        load.step_time.CopyFrom(step_time_to_proto(self._times.fitted))
        return load
