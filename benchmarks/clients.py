"""A load generator of the field, unchanged, against the OpenAI endpoint; its numbers beside the router's own.

    make bench-clients                               in an environment of its own, build/bench-clients
    python -m benchmarks.clients --guidellm PATH     with a guidellm that is there already
    ... --target http://HOST:PORT                    against a cluster that runs

Without `--target` null workers generate, and the router is alone in its process: they compute nothing, so the numbers
are those of the interface. GuideLLM sends chats with synthetic prompts and streams the answers; what it has measured
is compared with what `/metrics` has counted meanwhile. Its times have the way to the client and its own event loop in
them, the router's have not. Ends with status 1 where the two disagree by more than that explains: counts must be the
same, times between tokens within 5 %; first tokens and whole answers at most 30 ms and 5 % later at the client, and
no more than 5 % earlier.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/engine.py hides the package else

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.router_load import text_tokens
from benchmarks.router_processes import router_child, workers_child
from engine.model_store import resolve_model

RUN_S = 600.0
SCRAPE_S = 10.0
ERROR = 0.05
"""Of means, as a share of the router's."""
WAY_MS = 30.0
"""From the router to where GuideLLM looks, and back: twice what eight streams were seen to need on two cores."""


@dataclass(frozen=True)
class Numbers:
    """Of the requests that ended well. Times are means, in milliseconds."""

    requests: float
    output_tokens: float
    ttft_ms: float
    itl_ms: float
    latency_ms: float


class Scrape:
    """What the router has counted so far. `text`: of its metrics."""

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self._families = {family.name for family in families}
        self._samples = [sample for family in families for sample in family.samples]

    @classmethod
    def of(cls, target: str) -> Scrape:
        with urllib.request.urlopen(f"{target}/metrics", timeout=SCRAPE_S) as reply:
            return cls(reply.read().decode())

    def total(self, family: str, suffix: str) -> float:
        """Over all labels; 0 for a counter that has not counted yet. SystemExit if there is no such metric."""
        if family not in self._families:
            raise SystemExit(f"the router has no metric {family}: it is another version than this benchmark")
        return float(sum(sample.value for sample in self._samples if sample.name == family + suffix))


def counted(before: Scrape, after: Scrape) -> Numbers:
    """What came between the two. SystemExit if a metric is not there, or has counted nothing."""

    def grown(family: str, suffix: str = "_total") -> float:
        if more := after.total(family, suffix) - before.total(family, suffix):
            return more
        raise SystemExit(f"the router's {family}{suffix} has counted nothing")

    def mean_ms(family: str) -> float:
        return 1000 * grown(family, "_sum") / grown(family, "_count")

    return Numbers(
        requests=grown("pdserve_requests"),
        output_tokens=grown("pdserve_generated_tokens"),
        ttft_ms=mean_ms("pdserve_time_to_first_token_seconds"),
        itl_ms=mean_ms("pdserve_inter_token_latency_seconds"),
        latency_ms=mean_ms("pdserve_request_latency_seconds"),
    )


def disagreements(theirs: Numbers, ours: Numbers) -> list[str]:
    """Where the load generator's numbers and the router's cannot both be right, in words.

    Counts are the same. Tokens of one stream all come by the same way, so the time between them is the same but for
    the two ends of each answer. Nothing reaches a client before it was written, nor much later.
    """
    found = []
    for name in ("requests", "output_tokens"):
        if getattr(theirs, name) != getattr(ours, name):
            found.append(f"{name}: {getattr(theirs, name):g} and {getattr(ours, name):g}")
    for name, way_ms in (("ttft_ms", WAY_MS), ("itl_ms", 0.0), ("latency_ms", WAY_MS)):
        client, router = getattr(theirs, name), getattr(ours, name)
        least, most = (1 - ERROR) * router, (1 + ERROR) * router + way_ms
        if not least <= client <= most:
            found.append(
                f"{name}: {client:.2f} at the client, {router:.2f} in the router, "
                f"which explains {least:.2f} to {most:.2f}"
            )
    return found


def guidellm(args: argparse.Namespace, target: str, tokenizer: Path) -> Numbers:
    """Run it; returns what it has measured."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(str(args.guidellm), "run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,target={target}"),
            *("--profile", f"kind=concurrent,streams={args.streams}"),
            *("--constraint", f"kind=max_requests,count={args.requests}"),
            *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={args.prompt},output_tokens={args.output}"),
            *("--output", f"kind=json,path={report}"),
        ]
        done = subprocess.run(command, capture_output=not args.verbose, text=True, timeout=RUN_S, check=False)
        if done.returncode != 0 or not report.exists():
            raise SystemExit(f"guidellm has failed:\n{done.stderr or ''}")
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    if totals["errored"]:
        raise SystemExit(f"{totals['errored']} of {totals['total']} requests of guidellm failed")

    def of(name: str, field: str = "mean") -> float:
        return float(metrics[name]["successful"][field])

    return Numbers(
        requests=totals["successful"],
        output_tokens=of("output_token_count", "total_sum"),
        ttft_ms=of("time_to_first_token_ms"),
        itl_ms=of("inter_token_latency_ms"),
        latency_ms=1000 * of("request_latency"),
    )


@contextmanager
def null_cluster(model_path: Path, step_s: float) -> Iterator[str]:
    """A router before null workers; the address of its HTTP interface."""
    with (
        workers_child(text_tokens(model_path), prefill=1, decode=1, step_s=step_s) as workers,
        router_child(model_path, workers.ready["membership"], http_port=0) as router,
    ):
        yield f"http://{router.ready['http_address']}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", type=Path, required=True, help="the command")
    parser.add_argument("--target", default="", help="http://HOST:PORT of a cluster; null workers otherwise")
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer it is")
    parser.add_argument("--streams", type=int, default=8, help="requests at once")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--step-ms", type=float, default=20.0, help="null workers' time between two tokens")
    parser.add_argument("--verbose", action="store_true", help="show what guidellm prints")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    model_path = resolve_model(args.model).path
    if args.target:
        target = args.target.rstrip("/")
        before = Scrape.of(target)
        theirs = guidellm(args, target, model_path)
        ours = counted(before, Scrape.of(target))
    else:
        with null_cluster(model_path, args.step_ms / 1000) as target:
            before = Scrape.of(target)
            theirs = guidellm(args, target, model_path)
            ours = counted(before, Scrape.of(target))
    print(f"{'':14}{'guidellm':>12}{'router':>12}")
    for name, value in asdict(theirs).items():
        print(f"{name:14}{value:12,.2f}{getattr(ours, name):12,.2f}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"guidellm": asdict(theirs), "router": asdict(ours)}, indent=2))
    if wrong := disagreements(theirs, ours):
        raise SystemExit("the numbers disagree: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
