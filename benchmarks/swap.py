"""What running streams see of swaps: their time between tokens while others are swapped out and in beside them.

    python benchmarks/swap.py --model smollm2-135m --threads 2 --json out.json

One engine in one process, as on a decode worker: requests come by ticket, with their KV. 8 streams decode all the
time; that is what is measured. Three batch requests with long contexts decode beside them, and every few steps an
interactive visitor comes, whose KV does not fit beside all of these: so a batch request gives way, and comes back
when the visitor has gone. The same visitors come at the same steps each time:

*room for all*: the pool is large enough, and nobody gives way. *swap*: who gives way is copied to host memory, and
back. *recompute*: its KV is dropped, and computed again.

Were steps to wait for copies, the worst time between two tokens with swaps would be that without them and the longest
copy's on top. ``copying`` counts the gaps within which a copy was under way. Copies need a core: with as many threads
as there are cores, they take it from the steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/engine.py hides the package else

import numpy as np
import torch

from benchmarks.decoding import fill_cache, gaps_of, greedy_spec, start_decoding
from benchmarks.report import machine, milliseconds, print_table, write_json
from engine.engine import Engine
from engine.loader import load_runner
from engine.model_store import resolve_model
from engine.step import KvCache
from engine.swap import Copy, ThreadCopier
from pdcore.config import EngineConfig, SchedulerConfig
from pdcore.types import PriorityClass, RequestKey

BLOCK = 16
STREAMS = 8
BATCH = 3
WARM_UP = 5
ROOM, SWAP, RECOMPUTE = "room for all", "swap", "recompute"
MODES = (ROOM, SWAP, RECOMPUTE)


@dataclass(frozen=True)
class Row:
    """Milliseconds between two tokens of a stream, over all of them (`p50`, `p99`, `worst`), and over those within
    which a copy was under way (`copying` of them, with median and worst). `visitor_p50`: from asking for a ticket to
    the second token. Copies: how many each way, of how many MB in all, and what the longest took."""

    mode: str
    gaps: int
    p50: float | None
    p99: float | None
    worst: float | None
    copying: int
    copying_p50: float | None
    copying_worst: float | None
    visitor_p50: float | None
    out: int
    back: int
    copied_mb: int
    longest_copy: float | None
    recomputed_tokens: int


@dataclass(frozen=True)
class Load:
    """What all modes are given. `visitors` come one every `period` steps."""

    stream_context: int
    batch_context: int
    visitor_context: int
    visitors: int
    period: int

    @property
    def steps(self) -> int:
        return self.visitors * self.period

    @property
    def resident_blocks(self) -> int:
        """What streams and batch requests have when all steps are made, and a block of growth for each."""
        more = self.steps + WARM_UP + 1
        contexts = STREAMS * [self.stream_context] + BATCH * [self.batch_context]
        return sum(-(-(context + more) // BLOCK) + 1 for context in contexts)

    @property
    def visitor_blocks(self) -> int:
        """A visitor's, with its growth."""
        return -(-(self.visitor_context + self.period) // BLOCK) + 2


class Copies:
    """A copier that notes when copies ran; seconds of `time.perf_counter`."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        self.tokens = 0

    def make(
        self, cache: KvCache, done: Callable[[Copy], None], on_crash: Callable[[BaseException], None]
    ) -> ThreadCopier:
        def noted(copy: Copy) -> None:
            ended = time.perf_counter()
            self.spans.append((ended - copy.seconds, ended))
            self.tokens += copy.token_end - copy.token_start
            done(copy)

        return ThreadCopier(cache, noted, on_crash)

    def during(self, start: float, end: float) -> bool:
        return any(began < end and start < ended for began, ended in self.spans)


class Run:
    """One mode: an engine that is stepped here."""

    def __init__(self, engine: Engine, load: Load) -> None:
        self._engine = engine
        self._load = load
        self._rng = np.random.default_rng(0)
        self.times: dict[str, list[float]] = {}
        self.visits: list[float] = []

    def go(self) -> None:
        """All steps."""
        load = self._load
        for i in range(STREAMS):
            self._start(f"stream{i}", load.stream_context, 2 * load.steps, PriorityClass.STANDARD)
        for i in range(BATCH):
            self._start(f"batch{i}", load.batch_context, 2 * load.steps, PriorityClass.BATCH)
        for _ in range(WARM_UP):
            self._step()
        self.times.clear()
        visitor, asked = "", 0.0
        for step in range(load.steps):
            if step % load.period == 0:
                assert not visitor, f"{visitor} found no place within {load.period} steps"
                visitor, asked = f"visitor{step // load.period}", time.perf_counter()
            # A visitor is gone some steps before the next one comes, so that who gave way gets on.
            tokens = load.period // 3
            if visitor and self._start(visitor, load.visitor_context, tokens, PriorityClass.INTERACTIVE):
                self._step()
                self.visits.append(self.times[visitor][-1] - asked)
                visitor = ""
            else:
                self._step()
        for name in [*self.times]:
            self._engine.abort(RequestKey(name, 0))

    def _start(self, name: str, context: int, max_tokens: int, priority: PriorityClass) -> bool:
        prompt = self._rng.integers(0, self._engine.model.vocab_size, context)
        return start_decoding(self._engine, greedy_spec(name, prompt, max_tokens, priority=priority))

    def _step(self) -> None:
        plan = self._engine.schedule()
        assert plan is not None, "the streams always run"
        result = self._engine.apply(plan, self._engine.execute(plan))
        now = time.perf_counter()
        assert not result.rejected, result.rejected
        for token in result.tokens:
            self.times.setdefault(token.key.request_id, []).append(now)


def run_mode(mode: str, load: Load, make_engine: Callable[..., Engine]) -> Row:
    """Raises AssertionError if what the mode is about does not happen."""
    copies = Copies()
    engine = make_engine(mode, copies)
    run = Run(engine, load)
    run.go()
    after = engine.load()
    assert (after.swaps_out > 0) == (mode == SWAP), after
    assert (after.recomputed_tokens["preempt"] > 0) == (mode == RECOMPUTE), after
    assert engine.close()
    streams = [times for name, times in run.times.items() if name.startswith("stream")]
    gaps = gaps_of(streams)
    copying = [
        later - earlier for row in streams for earlier, later in pairwise(row) if copies.during(earlier, later)
    ]
    longest = max((end - start for start, end in copies.spans), default=None)
    return Row(
        mode,
        len(gaps),
        *milliseconds(gaps, 50, 99, 100),
        len(copying),
        *milliseconds(copying, 50, 100),
        *milliseconds(run.visits, 50),
        after.swaps_out,
        after.swaps_in,
        round(copies.tokens * engine.geometry.bytes_per_token / 1e6),
        None if longest is None else round(1e3 * longest, 1),
        after.recomputed_tokens["preempt"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="short name, Hugging Face folder or .gguf file")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--stream-context", type=int, default=512, help="tokens of each stream when it starts")
    parser.add_argument("--batch-context", type=int, default=2048, help="of each batch request")
    parser.add_argument("--visitor-context", type=int, default=2048, help="of each visitor")
    parser.add_argument("--visitors", type=int, default=12)
    parser.add_argument("--period", type=int, default=12, help="steps from one visitor to the next")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a step, where KV is computed again")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    resolved = resolve_model(args.model, progress=print)
    load = Load(args.stream_context, args.batch_context, args.visitor_context, args.visitors, args.period)
    room = load.resident_blocks + load.visitor_blocks
    scheduler = SchedulerConfig(args.chunk + 16, STREAMS + BATCH + 1, args.chunk)
    config = EngineConfig(
        str(resolved.path),
        resolved.served_name,
        dtype=args.dtype,
        num_blocks=room,
        scheduler=scheduler,
        prefix_cache=False,  # or part of what gives way would stay there
    )
    runner, start = load_runner(config), machine()
    fill_cache(runner)
    runners = {ROOM: runner}
    if args.modes != [ROOM]:
        small = replace(config, num_blocks=load.resident_blocks)
        runners[SWAP] = runners[RECOMPUTE] = load_runner(small)
        fill_cache(runners[SWAP])

    def make_engine(mode: str, copies: Copies) -> Engine:
        swaps = mode == SWAP
        settings = replace(config, swap_memory=2 << 30 if swaps else 0, preemption=SWAP if swaps else RECOMPUTE)
        return Engine(runners[mode], settings, max_reserved_fraction=1.0, prefer_swap=True, make_copier=copies.make)

    rows = [run_mode(mode, load, make_engine) for mode in args.modes]
    print_table(f"{resolved.served_name}, {args.dtype}, {args.threads} threads; milliseconds; {start}", rows)
    write_json(args.json, args, start, {"swap": rows})


if __name__ == "__main__":
    main()
