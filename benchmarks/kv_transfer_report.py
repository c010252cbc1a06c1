"""The figures of benchmarks/kv_transfer.py as a plot and as a table in docs/kv-transfer.md.

.venv/bin/pip install -c constraints.txt -e '.[bench]'
.venv/bin/python benchmarks/kv_transfer_report.py build/kv_transfer.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- made by benchmarks/kv_transfer_report.py: begin -->", "<!-- end -->"
TITLES = {
    "cold": "cold: prefill at 400 tokens/s hides the wire",
    "prefix": "prefix hit: nothing hides the wire",
    "8b-h200": "replayed at the pace of an 8B model on an H200",
}
LOSSLESS = ("raw", "zstd", "bexp3", "bexp-zstd")

Rows = Sequence[dict[str, Any]]


def best_lossless(rows: Rows, scenario: str, link: float) -> float:
    """Milliseconds of the best lossless codec on one link."""
    return min(
        row["ttft2_ms"]
        for row in rows
        if (row["scenario"], row["link_gbit"]) == (scenario, link) and row["codec"] in LOSSLESS
    )


def table(rows: Rows) -> str:
    """One line for each scenario and link, one column for each codec, and how far auto is from the best."""
    codecs = list(dict.fromkeys(row["codec"] for row in rows))
    lines = [
        "| scenario | Gbit/s | " + " | ".join(f"`{codec}`" for codec in codecs) + " | auto to the best |",
        "| --- | ---: |" + " ---: |" * (len(codecs) + 1),
    ]
    for scenario, link in dict.fromkeys((row["scenario"], row["link_gbit"]) for row in rows):
        times = {r["codec"]: r["ttft2_ms"] for r in rows if (r["scenario"], r["link_gbit"]) == (scenario, link)}
        best = best_lossless(rows, scenario, link)
        apart = times["auto"] - best
        cells = " | ".join(f"{times[codec]:.1f}" if codec in times else "-" for codec in codecs)
        lines.append(f"| {scenario} | {link:g} | {cells} | {apart:+.1f} ms, {100 * apart / best:+.1f}% |")
    return "\n".join(lines)


def plot(rows: Rows, path: Path) -> None:
    """A panel for each scenario: time to the decode side's first token over the link's speed."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "pdserve"  # the same figures make the same file
    from matplotlib import pyplot as plt

    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    figure, panels = plt.subplots(1, len(scenarios), figsize=(5 * len(scenarios), 4), squeeze=False)
    for panel, scenario in zip(panels[0], scenarios, strict=True):
        of_it = [row for row in rows if row["scenario"] == scenario]
        for codec in dict.fromkeys(row["codec"] for row in of_it):
            points = sorted((row["link_gbit"], row["ttft2_ms"]) for row in of_it if row["codec"] == codec)
            style = {"color": "black", "linestyle": "--", "linewidth": 2} if codec == "auto" else {"marker": "o"}
            panel.plot(*zip(*points, strict=True), label=codec, **style)
        links = sorted({row["link_gbit"] for row in of_it})
        panel.set(xscale="log", yscale="log", title=TITLES.get(scenario, scenario), xlabel="link, Gbit/s")
        panel.set_xticks(links, [f"{link:g}" for link in links])
        panel.minorticks_off()
        panel.grid(visible=True, alpha=0.3)
    panels[0][0].set_ylabel("to the decode side's first token, ms")
    panels[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+", help="what benchmarks/kv_transfer.py --json wrote")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "kv-transfer.md")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "kv-transfer.svg")
    args = parser.parse_args()
    rows = [row for path in args.json for row in json.loads(path.read_text())]
    plot(rows, args.plot)
    before, _, rest = args.document.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        print(f"{args.document} has no place for the table: it lacks {BEGIN!r} or {END!r}", file=sys.stderr)
        return 2
    args.document.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
