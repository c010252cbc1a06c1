"""Speed of the engine's model runner beside transformers': prefill of prompts, and decode at several batch sizes.

    python benchmarks/engine_vs_transformers.py --model smollm2-135m --dtype bfloat16 --threads 2 --json out.json

transformers (its eager attention, unless told otherwise) does the same work in the same process, its steps
interleaved with ours, so that a change of the machine's load meets both. ``--alone`` leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from engine.loader import load_runner
from engine.model_store import resolve_model
from engine.runner import CpuModelRunner
from engine.step import StepInput
from pdcore.config import EngineConfig

BLOCK = 16


@dataclass(frozen=True)
class Row:
    """One measurement. Times are medians, in milliseconds per step (decode) or per prompt (prefill)."""

    work: str
    tokens: int
    ms: float
    tokens_per_s: float
    reference_ms: float | None
    speedup: float | None


def uniform_step(step_id: int, token_ids: np.ndarray, before: int, tables: np.ndarray) -> StepInput:
    """Each sequence computes its `token_ids` [S, Q] after `before` tokens, in blocks `tables` [S, B]; greedy."""
    seqs, queries = token_ids.shape
    positions = np.arange(before, before + queries)
    slots = tables[:, positions // BLOCK] * BLOCK + positions % BLOCK
    return StepInput(
        step_id=step_id,
        num_decodes=seqs if queries == 1 else 0,
        token_ids=token_ids.reshape(-1).astype(np.int64),
        token_slots=np.full(seqs * queries, -1, np.int32),
        positions=np.tile(positions, seqs).astype(np.int64),
        slot_mapping=slots.reshape(-1).astype(np.int64),
        query_start=np.arange(0, (seqs + 1) * queries, queries, dtype=np.int32),
        context_lens=np.full(seqs, before + queries, np.int32),
        block_tables=tables.astype(np.int32),
        sample_rows=np.arange(queries - 1, seqs * queries, queries, dtype=np.int32),
        sample_slots=np.arange(seqs, dtype=np.int32),
        temperature=np.zeros(seqs, np.float32),
        top_p=np.ones(seqs, np.float32),
        min_p=np.zeros(seqs, np.float32),
        top_k=np.zeros(seqs, np.int32),
        seeds=np.zeros(seqs, np.uint64),
        sample_index=np.zeros(seqs, np.int32),
        sample_positions=np.full(seqs, before + queries, np.int64),
        forbidden_rows=np.zeros(0, np.int32),
        forbidden_tokens=np.zeros(0, np.int32),
    )


class Ours:
    """The engine's runner."""

    def __init__(self, runner: CpuModelRunner, chunk: int) -> None:
        self._runner, self._chunk = runner, chunk
        self._step_id = 0

    def _run(self, token_ids: np.ndarray, before: int, tables: np.ndarray) -> np.ndarray:
        self._step_id += 1
        return self._runner.run(uniform_step(self._step_id, token_ids, before, tables)).token_ids

    def prefill(self, prompt: np.ndarray) -> None:
        tables = np.arange(-(-len(prompt) // BLOCK))[None]
        for start in range(0, len(prompt), self._chunk):
            self._run(prompt[None, start : start + self._chunk], start, tables)

    def prefill_many(self, prompts: np.ndarray) -> None:
        """`prompts` [batch, tokens], as many whole ones in a step as a chunk has tokens for."""
        batch, length = prompts.shape
        per_seq = -(-length // BLOCK)
        tables = np.arange(per_seq * batch).reshape(batch, per_seq)
        together = max(1, self._chunk // length)
        for first in range(0, batch, together):
            rows = slice(first, first + together)
            self._run(prompts[rows], 0, tables[rows])

    def decoder(self, prompt: np.ndarray, batch: int, steps: int) -> Callable[[], None]:
        """A function that runs one decode step of `batch` sequences, all with `prompt` as context."""
        per_seq = -(-(len(prompt) + steps) // BLOCK)
        # Interleaved block tables, as after some time of serving: no sequence's blocks are adjacent.
        tables = np.arange(per_seq * batch).reshape(per_seq, batch).T.copy()
        self._run(prompt[None], 0, tables[:1])
        cache, geometry = self._runner.cache, self._runner.geometry
        values = cache.gather(0, geometry.num_layers, tables[0].tolist(), 0, len(prompt))
        for row in tables[1:]:
            cache.scatter(0, row.tolist(), 0, values)
        state: dict[str, Any] = {"tokens": np.full((batch, 1), prompt[-1]), "length": len(prompt)}

        def step() -> None:
            state["tokens"] = self._run(state["tokens"], state["length"], tables)[:, None]
            state["length"] += 1

        return step


class Reference:
    """transformers with its own KV cache."""

    def __init__(self, path: Path, dtype: str, attention: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation=attention, local_files_only=True
        )

    @torch.inference_mode()
    def prefill(self, prompts: np.ndarray) -> Any:
        """`prompts` [tokens] or [batch, tokens]; returns their cache."""
        ids = torch.from_numpy(np.atleast_2d(prompts))
        return self._model(ids, use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def decoder(self, prompt: np.ndarray, batch: int) -> Callable[[], None]:
        cache = self.prefill(prompt)
        cache.batch_repeat_interleave(batch)
        state = {"tokens": torch.full((batch, 1), int(prompt[-1]))}

        @torch.inference_mode()
        def step() -> None:
            logits = self._model(state["tokens"], past_key_values=cache, use_cache=True).logits
            state["tokens"] = logits[:, -1:].argmax(-1)

        return step


def measure(
    ours: Callable[[], None], reference: Callable[[], None] | None, repeats: int
) -> tuple[float, float | None]:
    """Median milliseconds of each, run alternately, after one warm-up of each."""
    times: dict[int, list[float]] = {0: [], 1: []}
    for repeat in range(repeats + 1):
        for which, call in enumerate((ours, reference)):
            if call is not None:
                started = time.perf_counter()
                call()
                if repeat:
                    times[which].append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1]) if reference else None


def row(work: str, tokens: int, ms: float, reference_ms: float | None) -> Row:
    speedup = round(reference_ms / ms, 2) if reference_ms else None
    rounded = round(reference_ms, 2) if reference_ms else None
    return Row(work, tokens, round(ms, 2), round(tokens / ms * 1e3, 1), rounded, speedup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="short name, Hugging Face folder or .gguf file")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of a single prompt; 0 skips it")
    parser.add_argument("--prompts", type=int, default=8, help="prompts at once, 512 tokens each; 0 skips them")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens per step")
    parser.add_argument("--context", type=int, default=512, help="tokens in the cache when decoding starts")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=8, help="measured decode steps; a third of it for prefill")
    parser.add_argument("--alone", action="store_true", help="without transformers")
    parser.add_argument("--reference-attention", default="eager", choices=["eager", "sdpa"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    resolved = resolve_model(args.model, progress=print)
    longest = max(
        [
            args.prefill,
            512 * args.prompts,
            *[(args.context + args.repeats + 2 + BLOCK) * batch for batch in args.batch],
        ]
    )
    blocks = -(-longest // BLOCK) + max(args.batch, default=0)
    config = EngineConfig(str(resolved.path), resolved.served_name, dtype=args.dtype, num_blocks=blocks)
    started = time.perf_counter()
    runner = load_runner(config)
    load_s = time.perf_counter() - started
    ours = Ours(runner, args.chunk)
    reference = Reference(resolved.path, args.dtype, args.reference_attention) if not args.alone else None
    tokens = np.random.default_rng(0).integers(0, runner.model.vocab_size, max(args.prefill, args.context))

    rows: list[Row] = []

    def done(work: str, count: int, times: tuple[float, float | None]) -> None:
        rows.append(entry := row(work, count, *times))
        versus = f"{entry.reference_ms:>18.1f}{entry.speedup:>10.2f}" if entry.reference_ms else ""
        print(f"{entry.work:<24}{entry.ms:>10.1f}{entry.tokens_per_s:>12.1f}{versus}", flush=True)

    print(f"{resolved.served_name}, {args.dtype}, {args.threads} threads, loaded in {load_s:.1f} s")
    print(f"{'work':<24}{'ms':>10}{'tokens/s':>12}{'transformers ms':>18}{'speedup':>10}", flush=True)
    if args.prefill:
        prompt = tokens[: args.prefill]
        other = (lambda: reference.prefill(prompt) and None) if reference else None
        times = measure(lambda: ours.prefill(prompt), other, max(args.repeats // 3, 1))
        done(f"prefill 1x{args.prefill}", args.prefill, times)
    if args.prompts:
        prompts = np.random.default_rng(1).integers(0, runner.model.vocab_size, (args.prompts, 512))
        other = (lambda: reference.prefill(prompts) and None) if reference else None
        times = measure(lambda: ours.prefill_many(prompts), other, max(args.repeats // 3, 1))
        done(f"prefill {args.prompts}x512", 512 * args.prompts, times)
    for batch in args.batch:
        prompt = tokens[: args.context]
        other = reference.decoder(prompt, batch) if reference else None
        times = measure(ours.decoder(prompt, batch, args.repeats + 1), other, args.repeats)
        done(f"decode batch {batch} at {args.context}", batch, times)
    if args.json:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        load = {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
        data = {"settings": settings, "machine": load, "load_s": load_s, "rows": [asdict(entry) for entry in rows]}
        args.json.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
