"""What scheduling does to users: one engine in one process, under each queue policy, and when a long prompt arrives.

    python benchmarks/engine.py --model smollm2-135m --threads 2 --json out.json

Two tables:

*gap*: 8 requests decode, then a long prompt arrives: the longest time between two tokens of a running request, what
is usual meanwhile, and when the prompt has its first token. *policies*: requests of mixed lengths, classes and
tenants arrive at random, faster than the engine serves them for a while; the same requests at the same times for each
policy.

With ``--cpu-clock`` and one thread all times, those of arrivals too, are the CPU time of this process: what others do
on the machine meanwhile changes little then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this file hides the package else

import numpy as np
import torch

from benchmarks.decoding import gaps_of, greedy_spec
from benchmarks.report import machine, milliseconds, print_table, write_json
from engine.engine import Engine, SequenceKind
from engine.loader import load_runner
from engine.model_store import resolve_model
from engine.step import ModelRunner
from pdcore.config import QUEUE_POLICIES, EngineConfig, QueueConfig, SchedulerConfig
from pdcore.types import PriorityClass, RequestSpec

BLOCK = 16


class CpuClock:
    """CPU time of this process, in seconds; waiting is skipped."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def now(self) -> float:
        return time.process_time() + self._skipped

    def sleep(self, seconds: float) -> None:
        self._skipped += seconds


class WallClock:
    """Real time."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


BenchmarkClock = CpuClock | WallClock


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes, in seconds from the start."""

    at: float
    spec: RequestSpec


@dataclass(frozen=True)
class PolicyRow:
    """Milliseconds, but for `tokens_per_s` (prompt and output) and `makespan_s`."""

    policy: str
    makespan_s: float
    tokens_per_s: float
    ttft_p50: float | None
    ttft_p99: float | None
    interactive_ttft_p50: float | None
    interactive_ttft_p99: float | None
    light_tenant_ttft_p50: float | None
    itl_p50: float | None
    itl_p99: float | None


@dataclass(frozen=True)
class GapRow:
    """Milliseconds. Gaps: from one token of a stream to its next, while the prompt is computed. `steps`: of it."""

    setting: str
    worst_gap: float | None
    p90_gap: float | None
    p50_gap: float | None
    prompt_ttft: float
    steps: int


def mixed_requests(count: int, interval_s: float, vocab: int, seed: int) -> list[Arrival]:
    """Three in ten are interactive and short, four standard, three batch and long. Tenant "heavy" sends most."""
    rng = np.random.default_rng(seed)
    arrivals, at = [], 0.0
    for i in range(count):
        priority = PriorityClass(int(rng.choice(3, p=[0.3, 0.4, 0.3])))
        typical, output = ((48, 16), (160, 24), (400, 40))[priority]
        length = int(np.clip(typical * rng.lognormal(0.0, 0.5), 8, 1024))
        tokens = int(np.clip(output * rng.lognormal(0.0, 0.3), 2, 96))
        tenant = str(rng.choice(["heavy", "light"], p=[0.8, 0.2]))
        spec = greedy_spec(f"r{i}", rng.integers(0, vocab, length), tokens, priority=priority, tenant=tenant)
        arrivals.append(Arrival(at, spec))
        at += float(rng.exponential(interval_s))
    return arrivals


@dataclass(frozen=True)
class Setup:
    """What all runs share."""

    runner: ModelRunner
    config: EngineConfig
    clock: BenchmarkClock


class Session:
    """An engine that is stepped here, and when each token of each request came."""

    def __init__(self, setup: Setup, scheduler: SchedulerConfig) -> None:
        self.clock = setup.clock
        self.engine = Engine(
            setup.runner, replace(setup.config, scheduler=scheduler, prefix_cache=False), setup.clock
        )
        self.times: dict[str, list[float]] = {}

    def step(self) -> bool:
        """One step; False if there was nothing to do."""
        plan = self.engine.schedule()
        if plan is None:
            return False
        result = self.engine.apply(plan, self.engine.execute(plan))
        now = self.clock.now()
        for token in result.tokens:
            self.times.setdefault(token.key.request_id, []).append(now)
        return True

    def run(self, arrivals: Sequence[Arrival]) -> float:
        """Until all requests have ended; returns when it began."""
        start = self.clock.now()
        waiting = list(arrivals)
        while waiting or self.engine.has_work():
            now = self.clock.now() - start
            while waiting and waiting[0].at <= now:
                self.engine.add(waiting.pop(0).spec, SequenceKind.GENERATE)
            if not self.step() and waiting:
                self.clock.sleep(max(0.0, waiting[0].at - (self.clock.now() - start)))
        return start


def run_policy(policy: str, setup: Setup, arrivals: Sequence[Arrival]) -> PolicyRow:
    scheduler = SchedulerConfig(
        max_num_batched_tokens=256,
        max_num_seqs=8,
        prefill_chunk_tokens=256,
        max_partial_prefills=4,
        long_prefill_tokens=512,
        queue=QueueConfig(policy),
    )
    session = Session(setup, scheduler)
    start = session.run(arrivals)
    end = max(times[-1] for times in session.times.values())
    ttft = {a.spec.key.request_id: session.times[a.spec.key.request_id][0] - start - a.at for a in arrivals}
    tokens = sum(len(a.spec.prompt) for a in arrivals) + sum(map(len, session.times.values()))

    def of(choose: object) -> list[float]:
        return [ttft[a.spec.key.request_id] for a in arrivals if choose in (a.spec.priority, a.spec.tenant)]

    row = PolicyRow(
        policy,
        round(end - start, 1),
        round(tokens / (end - start), 1),
        *milliseconds(ttft.values(), 50, 99),
        *milliseconds(of(PriorityClass.INTERACTIVE), 50, 99),
        *milliseconds(of("light"), 50),
        *milliseconds(gaps_of(session.times.values()), 50, 99),
    )
    print(row, file=sys.stderr, flush=True)
    return row


def run_gap(setting: str, setup: Setup, scheduler: SchedulerConfig, prompt_tokens: int) -> GapRow:
    """8 requests decode; then a prompt of that many tokens comes."""
    rng = np.random.default_rng(0)
    vocab = setup.runner.model.vocab_size
    session = Session(setup, scheduler)
    # What the model of step times knows when this begins: some prompts and decodes, as on a worker that has served.
    for i in range(8):
        spec = greedy_spec(f"d{i}", rng.integers(0, vocab, 128), min(4096, session.engine.max_model_len - 128))
        session.engine.add(spec, SequenceKind.GENERATE)
        session.step()
    for _ in range(12):
        session.step()
    warm = {name: len(times) for name, times in session.times.items()}
    session.engine.add(greedy_spec("long", rng.integers(0, vocab, prompt_tokens), 1), SequenceKind.GENERATE)
    began, steps = session.clock.now(), 0
    while "long" not in session.times:
        session.step()
        steps += 1
    gaps = gaps_of(times[warm[name] - 1 :] for name, times in session.times.items() if name in warm)
    ttft = round(1e3 * (session.times["long"][0] - began), 1)
    row = GapRow(setting, *milliseconds(gaps, 100, 90, 50), ttft, steps)
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="short name, Hugging Face folder or .gguf file")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=40, help="of the policies' table; 0 leaves it out")
    parser.add_argument("--interval-ms", type=float, default=120.0, help="mean time between two arrivals")
    parser.add_argument("--policies", nargs="*", default=list(QUEUE_POLICIES), choices=QUEUE_POLICIES)
    parser.add_argument("--long-prompt", type=int, default=4096, help="tokens; 0 leaves the gap's table out")
    parser.add_argument("--target-itl-ms", type=float, nargs="*", default=[200.0, 400.0], help="of the gap's table")
    parser.add_argument("--cpu-clock", action="store_true", help="count CPU time; needs --threads 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    if args.cpu_clock and args.threads != 1:
        parser.error("--cpu-clock counts the time of all threads: give --threads 1")
    torch.set_num_threads(args.threads)
    resolved = resolve_model(args.model, progress=print)
    tokens = max(args.long_prompt + 8 * 1024, 8 * 1200)
    config = EngineConfig(str(resolved.path), resolved.served_name, dtype=args.dtype, num_blocks=tokens // BLOCK)
    setup = Setup(load_runner(config), config, CpuClock() if args.cpu_clock else WallClock())
    longest = setup.runner.model.max_model_len
    if args.long_prompt >= longest:
        parser.error(f"--long-prompt: {args.long_prompt} does not fit the model's context of {longest} tokens")
    start, tables = machine(), dict[str, Sequence[object]]()
    clock = "CPU" if args.cpu_clock else "wall"
    print(f"{resolved.served_name}, {args.dtype}, {args.threads} threads, {clock} time; {start}")

    if args.long_prompt:
        whole = args.long_prompt + 64
        settings = {
            "unchunked": SchedulerConfig(whole, 16, whole),
            "chunk 512": SchedulerConfig(512 + 16, 16, 512),
            "chunk 128": SchedulerConfig(128 + 16, 16, 128),
        }
        for target in args.target_itl_ms:
            settings[f"target {target:g} ms"] = SchedulerConfig(512 + 16, 16, 512, target_itl_ms=target)
        tables["gap"] = [run_gap(name, setup, scheduler, args.long_prompt) for name, scheduler in settings.items()]
        print_table(f"A prompt of {args.long_prompt} tokens arrives among 8 decodes (ms)", tables["gap"])
    if args.requests:
        arrivals = mixed_requests(args.requests, args.interval_ms / 1e3, setup.runner.model.vocab_size, args.seed)
        tables["policies"] = [run_policy(policy, setup, arrivals) for policy in args.policies]
        title = f"{args.requests} requests of mixed lengths, one each {args.interval_ms:g} ms (ms)"
        print_table(title, tables["policies"])
    write_json(args.json, args, start, tables)


if __name__ == "__main__":
    main()
