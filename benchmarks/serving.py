"""A whole cluster from the outside: seconds to ready, memory of each process, and what a request waits for.

Starts ``pdserve serve`` on a Ray of its own, runs requests of several prompt lengths one at a time and then eight at
once, prints tables and writes them with ``--json FILE``. The time from the first token (sampled by the prefill worker
when its last chunk is done) to the second (the decode worker's first step) is what the transfer leaves exposed, plus
one decode step.

    python benchmarks/serving.py --dtype bfloat16 --json build/serving.json
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from router.client import Client, Completion, Sampling

READY_S = 180.0
REPOSITORY = Path(__file__).resolve().parents[1]


def start(dtype: str, model: str) -> tuple[subprocess.Popen[str], str, float]:
    """Start a cluster; returns its process, the router's address and the seconds until it was ready."""
    began = time.monotonic()
    command = [sys.executable, "-m", "cluster", "serve", "--grpc-port", "0", "--http-port", "-1"]
    command += ["--dtype", dtype, "--model", model]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("READY "):
            fields = dict(field.split("=", 1) for field in line.split()[1:])
            return process, fields["grpc"], time.monotonic() - began
        if time.monotonic() - began > READY_S:
            break
    process.kill()
    raise SystemExit("the cluster did not become ready")


def memory(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Proportional memory (PSS, MiB: shared pages counted by share) of the cluster's processes."""
    rows = []
    for child in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        try:
            name, info = " ".join(child.cmdline()[:2]) or child.name(), child.memory_full_info()
        except psutil.Error:
            continue
        label = "serve (membership, router)" if child.pid == process.pid else name.rsplit("/", 1)[-1][:40]
        rows.append({"process": label, "pss_mib": round(info.pss / 2**20), "rss_mib": round(info.rss / 2**20)})
    return sorted(rows, key=lambda row: -row["pss_mib"])


def run(client: Client, length: int, offset: int, new_tokens: int) -> Completion:
    prompt = [(offset + 977 * length + 7 * i) % 40000 + 300 for i in range(length)]  # alike in no prefix
    return client.complete(prompt, Sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=True), timeout_s=300.0)


def summarise(length: int, concurrent: int, done: list[Completion]) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return round(statistics.median(values), 1)

    timelines = [completion.end.timeline for completion in done]
    return {
        "prompt_tokens": length,
        "concurrent": concurrent,
        "requests": len(done),
        "ttft_ms": median([t.ttft_ms for t in timelines]),
        "prefill_ms": median([t.prefill_ms for t in timelines]),
        "first_to_second_ms": median([t.second_token_ms for t in timelines]),
        "tpot_ms": median([t.tpot_ms for t in timelines]),
        "kv_ms": median([1e3 * t.kv.seconds for t in timelines]),
        "kv_raw_bytes": timelines[0].kv.raw_bytes,
        "kv_wire_bytes": timelines[0].kv.wire_bytes,
    }


def print_table(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--lengths", default="16,128,512,2048", help="prompt lengths in tokens, with commas between")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()

    console = Console()
    process, address, ready_s = start(options.dtype, options.model)
    try:
        with Client(address) as client, ThreadPoolExecutor(8) as pool:
            run(client, 64, 1, 4)  # warm up
            rows = []
            for length in map(int, options.lengths.split(",")):
                alone = [run(client, length, i, options.new_tokens) for i in range(options.repeats)]
                rows.append(summarise(length, 1, alone))
                jobs = [pool.submit(run, client, length, 100 + i, options.new_tokens) for i in range(8)]
                rows.append(summarise(length, 8, [job.result() for job in jobs]))
            processes = memory(process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    console.print(f"ready {ready_s:.1f} s after the start, with a converted model")
    print_table(console, "memory", processes)
    print_table(console, "requests (medians)", rows)
    if options.json is not None:
        options.json.write_text(json.dumps({"ready_s": ready_s, "processes": processes, "requests": rows}, indent=2))


if __name__ == "__main__":
    main()
