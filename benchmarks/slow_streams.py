"""What clients that read nothing cost those that read: the pace of a few fast streams, alone and beside slow ones.

    python -m benchmarks.slow_streams --slow 1000 --fast 10 --tokens 400 --json build/slow_streams.json

The workers are null workers: they make a token a step for each request that has credit, and compute nothing. So this
is the router's own cost, over real gRPC, with router, workers and clients on one event loop. The rounds alternate,
alone and beside the slow streams, on the same router; what is told is the median over rounds of the fast streams'
tokens per second, and of the process' CPU time per fast token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/engine.py hides the package else

import grpc

from pdcore.types import Role
from protos import generation_pb2_grpc
from router.client import Sampling, build_request
from tests.support.null_cluster import NullCluster, until
from tests.support.null_worker import NullWorker
from tests.support.tiny_model import tiny_llama

SLOW_OPTIONS = (("grpc.http2.lookahead_bytes", 128), ("grpc.http2.bdp_probe", 0))
_OPEN_AT_ONCE = 100


@dataclass(frozen=True)
class Pace:
    """Tokens of all fast streams together per second, and CPU microseconds of the process for each of them."""

    tokens_s: float
    cpu_us_per_token: float


@dataclass(frozen=True)
class Result:
    """What `--json` gets. `ratio`: of the paces, beside to alone. `slow_tokens`: delivered to one of the slow streams
    at most, window included."""

    slow: int
    fast: int
    tokens: int
    rounds: int
    alone: Pace
    beside: Pace
    ratio: float
    slow_tokens: int


async def pace(cluster: NullCluster, fast: int, tokens: int) -> Pace:
    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(cluster.client.complete([n, n], Sampling(max_tokens=tokens)) for n in range(fast)))
    total = fast * tokens
    return Pace(total / (time.perf_counter() - started), 1e6 * (time.process_time() - cpu) / total)


async def measure(options: argparse.Namespace, model: Path) -> Result:
    """Run the rounds."""
    workers = [
        NullWorker(f"d{n}", Role.AGGREGATED, num_blocks=100_000, heartbeat_s=0.5, step_s=options.step_ms / 1000)
        for n in range(2)
    ]
    settings = {"max_running_per_worker": options.slow + options.fast, "max_queue": options.slow + options.fast}
    alone: list[Pace] = []
    beside: list[Pace] = []
    most = 0
    async with NullCluster(model, workers, heartbeat_s=0.5, **settings) as cluster:
        await pace(cluster, options.fast, options.tokens)  # warm
        for _ in range(options.rounds):
            alone.append(await pace(cluster, options.fast, options.tokens))
            async with grpc.aio.insecure_channel(cluster.router.address, options=SLOW_OPTIONS) as channel:
                stub = generation_pb2_grpc.GenerationStub(channel)
                calls = []
                for first in range(0, options.slow, _OPEN_AT_ONCE):
                    for n in range(first, min(options.slow, first + _OPEN_AT_ONCE)):
                        sampling = Sampling(max_tokens=3000)
                        calls.append(stub.Generate(build_request([n % 90, n // 90], sampling)))
                    count = len(calls)
                    await until(lambda count=count: paused(cluster, count), "the slow streams have paused", 120.0)
                beside.append(await pace(cluster, options.fast, options.tokens))
                most = max(len(active.tracker.delivered) for active in cluster.dispatcher._active.values())
                for call in calls:
                    call.cancel()
            await cluster.empty()
    best, worst = _median(alone), _median(beside)
    return Result(
        options.slow,
        options.fast,
        options.tokens,
        options.rounds,
        best,
        worst,
        worst.tokens_s / best.tokens_s,
        most,
    )


def paused(cluster: NullCluster, count: int) -> bool:
    """Whether so many requests are on the workers, all without credit."""
    held = [job for worker in cluster.workers.values() for job in worker.held.values()]
    return len(held) == count and all(job.window <= 0 for job in held)


def _median(paces: list[Pace]) -> Pace:
    return Pace(median(p.tokens_s for p in paces), median(p.cpu_us_per_token for p in paces))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=int, default=1000, help="streams that nobody reads")
    parser.add_argument("--fast", type=int, default=10, help="streams that are read")
    parser.add_argument("--tokens", type=int, default=400, help="of each fast stream, a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=10.0, help="of the null workers; 0: as fast as they can")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(options, tiny_llama(Path(folder))))
    for name, seen in (("alone", result.alone), (f"beside {result.slow} slow streams", result.beside)):
        print(f"{name}: {seen.tokens_s:,.0f} tokens/s, {seen.cpu_us_per_token:.0f} us of CPU a token")
    print(f"ratio of the paces: {result.ratio:.2f}; a slow stream got {result.slow_tokens} tokens at most")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(asdict(result), indent=2) + "\n")


if __name__ == "__main__":
    main()
