"""Attention of a prompt in one layer: the engine's, beside torch's scaled_dot_product_attention.

    python benchmarks/prefill_attention.py --threads 2 --json out.json

The engine's reads keys and values from the blocks of the paged cache, and computes as it does for a model of that
type: where the CPU has no 16-bit arithmetic, bfloat16 is widened to float32 on the way. torch's gets them as whole
tensors, once with ``enable_gqa`` and once with the KV heads repeated for their query heads; the faster of the two
counts. All take turns in one process, and their results are compared. Head shapes of SmolLM2-135M unless told
otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/engine.py hides the package else

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.engine_vs_transformers import BLOCK, uniform_step
from benchmarks.report import machine, print_table, write_json
from engine.attention import HeadShape, attend, plan_attention, write_kv
from engine.kv_cache import PagedKvCache
from engine.linear import compute_dtype
from pdcore.types import KvGeometry

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-3}


@dataclass(frozen=True)
class Row:
    """Medians in milliseconds. `arithmetic`: the type that the engine computes in. `ratio`: torch's time, the better
    of the two, over the engine's."""

    dtype: str
    arithmetic: str
    tokens: int
    engine_ms: float
    torch_gqa_ms: float
    torch_repeated_ms: float
    ratio: float


def engine_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: HeadShape
) -> Callable[[], torch.Tensor]:
    """The engine's attention of one prompt, with K and V in scattered blocks of a paged cache of the type of `k`.

    All [tokens, heads, head_dim]; the function returns [tokens, num_heads * head_dim].
    """
    tokens, dtype = len(q), compute_dtype(k.dtype)
    blocks = -(-tokens // BLOCK)
    geometry = KvGeometry(
        "random", 1, shape.num_kv_heads, shape.head_dim, str(k.dtype).removeprefix("torch."), BLOCK, blocks
    )
    cache = PagedKvCache(geometry)
    tables = np.random.default_rng(0).permutation(blocks)[None]
    step = uniform_step(1, np.zeros((1, tokens), np.int64), 0, tables)
    write_kv(plan_attention(step, cache, shape, dtype), cache, 0, torch.cat((k, v), 1).reshape(tokens, -1))
    queries = q.reshape(tokens, -1).to(dtype)
    return lambda: attend(plan_attention(step, cache, shape, dtype), cache, 0, queries, shape)


def torch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: HeadShape, *, repeated: bool
) -> Callable[[], torch.Tensor]:
    """torch's, of the same; [1, num_heads, tokens, head_dim]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (q, k, v))
    if not repeated:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def call() -> torch.Tensor:
        each = (x.repeat_interleave(shape.group, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, *each, is_causal=True)

    return call


def medians(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Milliseconds of each, run in turn, after one that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for found, call in zip(times, calls, strict=True):
            started = time.perf_counter()
            call()
            if repeat:
                found.append(1e3 * (time.perf_counter() - started))
    return [round(statistics.median(found), 2) for found in times]


def measure(dtype: str, tokens: int, shape: HeadShape, repeats: int) -> Row:
    """Raises AssertionError if the results differ by more than the type explains."""
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(tokens, heads, shape.head_dim, generator=generator).to(kind)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    ours = engine_attention(q, k, v, shape)
    torchs = [torch_attention(q, k, v, shape, repeated=repeated) for repeated in (False, True)]
    expected = torchs[0]()[0].transpose(0, 1).reshape(tokens, -1).float()
    difference = float((ours().float() - expected).abs().max())
    assert difference < TOLERANCE[dtype], f"the results differ by {difference}"
    times = medians([ours, *torchs], repeats)
    arithmetic = str(compute_dtype(kind)).removeprefix("torch.")
    return Row(dtype, arithmetic, tokens, *times, round(min(times[1:]) / times[0], 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048, 4096])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"], choices=list(TOLERANCE))
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    shape, start = HeadShape(args.heads, args.kv_heads, args.head_dim), machine()
    print(f"{args.heads} heads of {args.head_dim}, {args.kv_heads} of K and V, {args.threads} threads; {start}")
    with torch.inference_mode():
        rows = [measure(dtype, tokens, shape, args.repeats) for dtype in args.dtypes for tokens in args.tokens]
    print_table("Attention of one prompt in one layer", rows)
    write_json(args.json, args, start, {"prefill_attention": rows})


if __name__ == "__main__":
    main()
