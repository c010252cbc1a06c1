"""A cluster of real processes under load, killed, frozen, restarted and cut off at random, for as long as one likes.

What `tests/integration/test_chaos.py` does for half a minute; docs/chaos.md tells what is done and what must hold.
The model is small and random, so tokens per second say only how much of the load got through, second by second.
Leaves logs in ``--folder``; the exit status is 1 if there was a problem.

    python benchmarks/chaos.py --minutes 10 --seed 1 --json build/chaos.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/engine.py hides the package else

from rich.console import Console
from rich.table import Table

from worker.openmp import share_cores

if TYPE_CHECKING:
    from tests.support.chaos import Report


def print_report(console: Console, report: Report) -> None:
    table = Table(title=f"requests by what their client does and how they ended, {report.seconds:.0f} s")
    outcomes = sorted(report.outcomes)
    for column in ("client", *outcomes):
        table.add_column(column, justify="left" if column == "client" else "right")
    for manner, counts in sorted(report.by_manner.items()):
        table.add_row(manner, *(str(counts[outcome]) for outcome in outcomes))
    table.add_row("all", *(str(report.outcomes[outcome]) for outcome in outcomes))
    console.print(table)

    rates = report.tokens_per_s or [0]
    rows: dict[str, object] = {
        "disturbances": shown(report.disturbances),
        "faults of KV messages": shown(report.message_faults),
        "restarts of workers": shown(report.restarts),
        "replays": report.replays,
        "failed transfers": report.failed_transfers,
        "of these rebuilt on the decode side": report.rebuilds,
        "tokens delivered": report.tokens,
        "tokens in a second, median and lowest decile": f"{statistics.median(rates):.0f}, {lowest_decile(rates):.0f}",
        "worst time between two events of a stream": f"{report.worst_gap_s:.1f} s",
        "divergences at near-ties": report.near_ties,
        **{f"size of {name}": size for name, size in report.sizes.items()},
    }
    table = Table(title="what happened", show_header=False)
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    if report.problems:
        console.print(str(report.plan), markup=False)
    for problem in report.problems:
        console.print(f"PROBLEM {problem}", markup=False)


def shown(counts: Counter[str] | dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def lowest_decile(rates: list[int]) -> float:
    return float(sorted(rates)[len(rates) // 10])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of load and disturbances")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--every", type=float, default=2.0, help="mean seconds between two disturbances")
    parser.add_argument("--folder", type=Path, help="for logs; a new one under the temporary folder if not given")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()

    share_cores()  # before torch comes: the workers compute beside this process on the same cores
    from tests.support.chaos import ChaosRun, chaos_configs
    from tests.support.chaos_plan import make_plan
    from tests.support.tiny_model import tiny_llama

    console = Console()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="pdserve-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_llama(folder / "model")
    plan = make_plan(
        options.seed,
        seconds=60 * options.minutes,
        rate=options.rate,
        workers=[config.worker_id for config in chaos_configs(model)],
        every_s=options.every,
    )
    console.print(f"seed {plan.seed}: {len(plan.requests)} requests, {len(plan.disturbances)} disturbances; {folder}")
    began = time.monotonic()

    def progress(line: str) -> None:
        console.print(f"{time.monotonic() - began:6.0f} s  {line}", markup=False, highlight=False)

    report = ChaosRun(plan, model, folder / "run", progress).run()
    print_report(console, report)
    if options.json is not None:
        figures = {each.name: getattr(report, each.name) for each in fields(report) if each.name != "plan"}
        options.json.write_text(json.dumps({"seed": plan.seed, "rate": plan.rate, **figures}, indent=2))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
