"""Where the time of a decode step goes: the engine's parts, by the clock, at one or more batch sizes.

    python benchmarks/step_profile.py --model smollm2-135m --dtype bfloat16 --threads 2 --batch 32 --json out.json

A real engine decodes as a decode worker does: sequences come by ticket with `--context` tokens of (random) KV each,
no two alike. Probes are put around callables of the engine from outside; a part's time is its own, without that of
the parts that it calls. Steps with and without probes take turns, so that it can be seen what the probes cost. Of
each kind the slower half is left out, for the machine may have other work, and the rest averaged: so the parts add
up.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/engine.py hides the package else

import numpy as np
import torch

import engine.engine
import engine.models.llama
import engine.runner
from benchmarks.decoding import fill_cache, greedy_spec, start_decoding
from benchmarks.report import machine, print_table, write_json
from engine.engine import Engine
from engine.linear import Linear
from engine.loader import load_runner
from engine.model_store import resolve_model
from engine.step import ModelRunner
from pdcore.config import EngineConfig, SchedulerConfig
from pdcore.types import SamplingParams

BLOCK = 16
WARM_UP = 10

# Phase, part, and the callable whose own time it is. Models that run through transformers show fewer parts.
PARTS: tuple[tuple[str, str, Any, str], ...] = (
    ("schedule", "snapshot of the state", engine.engine, "take_snapshot"),
    ("schedule", "decision", engine.engine, "decide"),
    ("schedule", "arrays of the step", engine.engine, "build_step"),
    ("schedule", "blocks, records, the rest", Engine, "schedule"),
    ("forward", "linear layers", Linear, "__call__"),
    ("forward", "linear layers", Linear, "add_to"),
    ("forward", "attention: plan", engine.models.llama, "plan_attention"),
    ("forward", "attention: write KV", engine.models.llama, "write_kv"),
    ("forward", "attention", engine.models.llama, "attend"),
    ("forward", "norms, rotation, the rest", Engine, "execute"),
    ("sampling", "sampling", engine.runner, "read_out"),
    ("results", "tokens, cache, records", Engine, "apply"),
)
BOOKKEEPING = ("schedule", "results")


@dataclass(frozen=True)
class Row:
    """`ms` of a step at that batch size, and their share of all of it."""

    batch: int
    phase: str
    part: str
    ms: float
    share: float


class Probes:
    """Times of parts, each without the parts that it calls. While `active` is off, nothing is noted."""

    def __init__(self) -> None:
        self.active = False
        self.seconds: dict[tuple[str, str], float] = {}
        self._inner = [0.0]  # of each part that runs, from the outermost in: the time of the parts that it called

    def take(self) -> dict[tuple[str, str], float]:
        """Seconds by (phase, part) since the last time."""
        taken, self.seconds = self.seconds, {}
        return taken

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for phase, part, owner, name in PARTS:
                probed = self._around((phase, part), getattr(owner, name))
                stack.enter_context(patch.object(owner, name, probed))
            yield

    def _around(self, part: tuple[str, str], call: Callable[..., Any]) -> Callable[..., Any]:
        def probed(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return call(*args, **kwargs)
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                self.seconds[part] = self.seconds.get(part, 0.0) + took - self._inner.pop()
                self._inner[-1] += took

        return probed


def decode_step(session: Engine) -> float:
    """Seconds."""
    began = time.perf_counter()
    plan = session.schedule()
    assert plan is not None
    session.apply(plan, session.execute(plan))
    return time.perf_counter() - began


def faster_half(values: list[tuple[float, dict[tuple[str, str], float]]]) -> list[Any]:
    return sorted(values, key=lambda entry: entry[0])[: max(1, len(values) // 2)]


def profile(runner: ModelRunner, config: EngineConfig, batch: int, args: argparse.Namespace) -> list[Row]:
    """`args.steps` steps with probes, and as many without."""
    steps = args.steps
    rng = np.random.default_rng(0)
    # A target, so that the step-time model takes part in each decision.
    scheduler = SchedulerConfig(max(512, batch), batch, target_itl_ms=1000.0)
    engine_under_test = Engine(runner, replace(config, scheduler=scheduler), max_reserved_fraction=1.0)
    params = SamplingParams(2 * steps + WARM_UP + 2, temperature=args.temperature, top_p=args.top_p)
    for i in range(batch):
        spec = greedy_spec(f"s{i}", rng.integers(0, runner.model.vocab_size, args.context), 0, params=params)
        assert start_decoding(engine_under_test, spec), "the pool is too small"
    probes, plain, probed = Probes(), [], []
    with probes.installed():
        for i in range(2 * steps + WARM_UP):
            probes.active = i % 2 == 1
            seconds = decode_step(engine_under_test)
            entry = (seconds, probes.take())
            if i >= WARM_UP:
                (probed if probes.active else plain).append(entry)
    plain, probed = faster_half(plain), faster_half(probed)
    total = sum(seconds for seconds, _ in probed)
    sums: dict[tuple[str, str], float] = {(phase, part): 0.0 for phase, part, *_ in PARTS}
    for _, parts in probed:
        for part, seconds in parts.items():
            sums[part] += seconds
    found = {part: seconds for part, seconds in sums.items() if seconds}
    found["all", "the whole step"] = total
    found["all", "scheduling and bookkeeping"] = sum(s for (phase, _), s in sums.items() if phase in BOOKKEEPING)
    found["all", "the step without probes"] = sum(seconds for seconds, _ in plain) / len(plain) * len(probed)
    return [
        Row(batch, phase, part, round(1e3 * seconds / len(probed), 3), round(seconds / total, 4))
        for (phase, part), seconds in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="short name, Hugging Face folder or .gguf file")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="*", default=[32])
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence when it starts")
    parser.add_argument("--steps", type=int, default=40, help="with probes; as many are made without")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    resolved = resolve_model(args.model, progress=print)
    per_sequence = -(-(args.context + 2 * args.steps + WARM_UP + 2) // BLOCK) + 2
    config = EngineConfig(
        str(resolved.path), resolved.served_name, dtype=args.dtype, num_blocks=per_sequence * max(args.batch)
    )
    config = replace(config, scheduler=SchedulerConfig(max(512, *args.batch), max(args.batch)))
    runner, start = load_runner(config), machine()
    fill_cache(runner)
    rows: list[Row] = []
    for batch in args.batch:
        rows += (found := profile(runner, config, batch, args))
        print_table(f"{resolved.served_name}, {args.dtype}, {args.threads} threads; {start}", found)
    write_json(args.json, args, start, {"step_profile": rows})


if __name__ == "__main__":
    main()
