"""The transports side by side on one host: what a transfer over each of them carries.

A prefill and a decode worker for each transport, all on this machine and all in one run: rounds go from transport to
transport, so that a change of the machine's load meets them all. The workers are real but for their model (see
`kv_transfer.py`): KV recorded from a real one lies in the prefill worker's prefix cache, and nothing hides the
transfer. What is printed contains all of it: reading the cache, encoding, sending, checking, decoding, writing.
Example::

    .venv/bin/python benchmarks/kv_transports.py --json build/kv_transports.json

A transport that cannot be used here is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # before this folder, whose engine.py is not the package

from benchmarks.kv_transfer import NEVER_SLOW, Pair, config_of, on_core, running  # noqa: E402
from pdcore.types import Role  # noqa: E402

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Row:
    """One transport and codec. Times are medians in milliseconds; `gb_s`: raw KV over the exposed time."""

    transport: str
    codec: str
    tokens: int
    raw_bytes: int
    wire_bytes: int
    ttft2_ms: float
    exposed_ms: float
    gb_s: float
    runs: int


def measure(args: argparse.Namespace, folder: Path) -> list[Row]:
    """All transports and codecs, interleaved."""
    from safetensors.torch import load_file

    from kv_transfer.transports.catalog import available_transports
    from tests.support.session_client import SessionClient

    available = available_transports()
    for transport in args.transports:
        if transport not in available:
            print(f"{transport} is left out: it is not installed here")
    transports = [transport for transport in args.transports if transport in available]
    kv = load_file(args.kv)["kv"]
    raw_bytes = kv.nbytes // kv.shape[2] * args.tokens
    numbers = random.Random(1)
    prompt = [numbers.randrange(1 << 15) for _ in range(args.tokens)]
    with ExitStack() as stack:
        pairs: dict[str, Pair] = {}
        for transport in transports:
            here = argparse.Namespace(**{**vars(args), "transport": transport, "calibration": None})
            at = folder / transport
            at.mkdir()
            sessions = []
            for side, role in enumerate((Role.PREFILL, Role.DECODE)):
                config = config_of(role, LOOPBACK, here)
                address = stack.enter_context(running(config, args.kv, NEVER_SLOW, at, on_core(side)))
                sessions.append(stack.enter_context(SessionClient(address, "benchmark")))
            pairs[transport] = Pair(*sessions)
        samples: dict[tuple[str, str], list[tuple[float, float, int, str]]] = {
            (transport, codec): [] for transport in transports for codec in args.codecs
        }
        for number in range(-args.warm_up, args.runs):
            for (transport, codec), found in samples.items():
                outcome = pairs[transport].request(prompt, codec)
                if number >= 0:
                    found.append(outcome)
    rows = []
    for (transport, codec), found in samples.items():
        *columns, used = zip(*found, strict=True)
        ttft2, exposed, wire = (statistics.median(column) for column in columns)
        if set(used) != {transport}:
            print(f"{transport} gave way to {', '.join(sorted(set(used) - {transport}))} in some runs: left out")
            continue
        rows.append(
            Row(
                transport,
                codec,
                args.tokens,
                raw_bytes,
                int(wire),
                round(1e3 * ttft2, 2),
                round(1e3 * exposed, 2),
                round(raw_bytes / exposed / 1e9, 3),
                len(found),
            )
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--transports", nargs="+", default=["shm", "grpc", "collective", "nixl"])
    parser.add_argument("--codecs", nargs="+", default=["raw", "bexp3"])
    parser.add_argument("--tokens", type=int, default=2048, help="prompt length (2048)")
    parser.add_argument("--runs", type=int, default=15, help="timed runs of each, interleaved (15)")
    parser.add_argument("--warm-up", type=int, default=2, help="untimed runs before them (2)")
    parser.add_argument("--model", default="smollm2-135m", help="model whose KV is recorded")
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "architecture.md")
    parser.add_argument(
        "--kv", type=Path, default=ROOT / "build" / "kv_transfer.safetensors", help="where it is kept"
    )
    args = parser.parse_args()
    from benchmarks.replay import record

    record(args.model, args.text.read_text(), 512, args.kv)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    for row in rows:
        print(
            f"{row.transport:10} {row.codec:6} {row.tokens} tokens, {row.raw_bytes / 1e6:.1f} MB raw, "
            f"{row.wire_bytes / 1e6:.1f} sent: exposed {row.exposed_ms:7.1f} ms, {row.gb_s:.2f} GB/s of raw KV"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
