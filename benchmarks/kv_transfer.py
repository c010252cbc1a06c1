"""Time to the first token on the decode side over links of given speeds, by codec.

Loopback hides what compression gains, so prefill and decode worker run in two network namespaces joined by a link
that ``tc`` holds to a rate (root needed). The workers are real, but for their model: KV recorded from a real one is
put into the prefill worker's cache at a stated pace. Three scenarios:

* ``cold``: the pace of the demo model on this machine, so that compute hides much of the wire;
* ``prefix``: the prefill worker has the prompt in its prefix cache, so that nothing hides the wire;
* ``8b-h200``: a replayed sender at the pace of an 8B model on an H200. The KV is the demo model's, not an 8B's.

Runs of all codecs are interleaved; medians are printed. Example::

    sudo .venv/bin/python benchmarks/kv_transfer.py --json build/kv_transfer.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # before this folder, whose engine.py is not the package

from worker.openmp import share_cores  # noqa: E402

share_cores()

from benchmarks.shaped_link import HOSTS, LinkUnavailable, ShapedLink  # noqa: E402
from pdcore.config import EngineConfig, SchedulerConfig, TransferConfig, WorkerConfig  # noqa: E402
from pdcore.config_json import from_json, to_json  # noqa: E402
from pdcore.types import RequestKey, RequestSpec, Role, SamplingParams  # noqa: E402

COLD_LINKS = (0.05, 0.1, 0.25, 1.0)
FAST_LINKS = (1.0, 5.0, 10.0)
LOSSLESS = ("raw", "bexp3", "bexp-zstd")
DECODE_STEP_S = 0.005
NEVER_SLOW = 1e9  # tokens/s of a scenario in which nothing but the last token is computed


@dataclass(frozen=True)
class Scenario:
    """What hides the wire, and the links to try. `pace`: tokens per second of prefill."""

    name: str
    pace: float
    links: tuple[float, ...]
    prefix_hit: bool = False


@dataclass
class Row:
    """One line of the result; times are medians in milliseconds.

    `ttft2_ms`: request sent to the decode side's first own token. `exposed_ms`: what of it lies behind the prefill
    worker's first token, one decode step aside.
    """

    scenario: str
    transport: str
    codec: str
    link_gbit: float
    tokens: int
    prefix_hit: bool
    ttft2_ms: float
    exposed_ms: float
    wire_bytes: int
    runs: int


class Pair:
    """A prefill worker on one end of the link, a decode worker on the other, and a session with each."""

    def __init__(self, prefill, decode) -> None:  # type: ignore[no-untyped-def]
        self.prefill = prefill
        self.decode = decode
        self._numbers = itertools.count()

    def request(self, prompt: Sequence[int], codec: str) -> tuple[float, float, int, str]:
        """Run one prompt: (seconds to the decode side's token, those behind the prefill's, wire bytes, transport)."""
        key = RequestKey(f"r{next(self._numbers)}", 0)
        params = SamplingParams(max_tokens=2, temperature=0.0)
        spec = RequestSpec(key, tuple(prompt), params, kv_codec=codec)
        start = time.perf_counter()
        reply = self.decode.reserve(spec)
        if reply.WhichOneof("result") != "granted":
            raise SystemExit(f"the decode worker refused: {reply.refused.message}")
        self.prefill.prefill(spec, reply.granted)
        name = key.request_id
        # Told by events, in whichever order they come: who waits for the second must not be late for the first.
        self.prefill.wait(
            lambda: 0 in self.prefill.tokens_of(name) or self.prefill.failure_of(name), 300.0, "prefill"
        )
        first = time.perf_counter()
        self.decode.wait(lambda: 1 in self.decode.tokens_of(name) or self.decode.failure_of(name), 300.0, "decode")
        second = time.perf_counter()
        for session in (self.prefill, self.decode):
            if failure := session.failure_of(name):
                raise SystemExit(f"{name} failed: {failure.message}")
        stats = next(n.kv_received for n in self.decode.notices if n.request_id == name and n.HasField("kv_received"))
        for session in (self.prefill, self.decode):
            session.tokens.clear()
            session.notices.clear()
        return second - start, max(0.0, second - first - DECODE_STEP_S), stats.wire_bytes, stats.transport


def on_core(side: int) -> list[str]:
    """The start of a command that runs on one core, its own: two hosts do not take each other's."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[side])] if len(cores) > 1 and shutil.which("taskset") else []


def config_of(role: Role, host: str, args: argparse.Namespace) -> WorkerConfig:
    """A worker of the measurement; `args`: ``tokens``, ``calibration``, ``transport``."""
    blocks = 4 * (args.tokens // 16 + 2)
    engine = EngineConfig(
        model_path="",
        served_name="replay",
        num_blocks=blocks,
        threads=1,
        prefix_cache=role is Role.PREFILL,  # the decode side must be sent everything, every time
        scheduler=SchedulerConfig(max_num_batched_tokens=512, prefill_chunk_tokens=512),
    )
    transfer = TransferConfig(
        codec="auto",
        calibration=str(args.calibration or ""),
        transport=args.transport,
        interface=host,
        lease_s=120.0,
        send_timeout_s=60.0,
    )
    return WorkerConfig(worker_id=f"{role.value}-0", role=role, engine=engine, transfer=transfer, host=host)


@contextmanager
def running(config: WorkerConfig, kv: Path, pace: float, folder: Path, prefix: list[str]) -> Iterator[str]:
    """A worker process that replays `kv`; yields its address."""
    path = folder / f"{config.worker_id}.json"
    path.write_text(to_json(config))
    command = [
        *prefix,
        sys.executable,
        str(Path(__file__).resolve()),
        "--worker",
        str(path),
        "--kv",
        str(kv),
        "--pace",
        str(pace),
    ]
    with (folder / f"{config.worker_id}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("READY "):
            raise SystemExit(f"{config.worker_id} did not start:\n{(folder / f'{config.worker_id}.log').read_text()}")
        yield json.loads(line.removeprefix("READY "))["address"]
    finally:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)


@contextmanager
def pair_on(link: ShapedLink, scenario: Scenario, args: argparse.Namespace, folder: Path) -> Iterator[Pair]:
    """Both workers of a scenario."""
    from tests.support.session_client import SessionClient

    with ExitStack() as stack:
        addresses = [
            stack.enter_context(
                running(
                    config_of(role, HOSTS[side], args),
                    args.kv,
                    scenario.pace,
                    folder,
                    link.command(side, *on_core(side)),
                )
            )
            for side, role in enumerate((Role.PREFILL, Role.DECODE))
        ]
        yield Pair(*(stack.enter_context(SessionClient(address, "benchmark")) for address in addresses))


def measure(link: ShapedLink, scenario: Scenario, args: argparse.Namespace, folder: Path) -> list[Row]:
    """All links and codecs of one scenario."""
    rows: list[Row] = []
    numbers = random.Random(1)
    repeated = [numbers.randrange(1 << 15) for _ in range(args.tokens)]
    with pair_on(link, scenario, args, folder) as pair:
        for gbit in scenario.links:
            link.set_rate(gbit)
            times: dict[str, list[tuple[float, float, int, str]]] = {codec: [] for codec in args.codecs}
            for round_number in range(-args.warm_up, args.runs):
                for codec in args.codecs:
                    prompt = repeated
                    if not scenario.prefix_hit:
                        prompt = [numbers.randrange(1 << 15) for _ in range(args.tokens)]
                    outcome = pair.request(prompt, "" if codec == "auto" else codec)
                    if round_number >= 0:
                        times[codec].append(outcome)
            for codec, samples in times.items():
                *columns, transports = zip(*samples, strict=True)
                ttft2, exposed, wire = (statistics.median(column) for column in columns)
                rows.append(
                    Row(
                        scenario.name,
                        "+".join(sorted(set(transports))),  # more than one if a lane was given up on the way
                        codec,
                        gbit,
                        args.tokens,
                        scenario.prefix_hit,
                        round(ttft2 * 1e3, 2),
                        round(exposed * 1e3, 2),
                        int(wire),
                        len(samples),
                    )
                )
            _show(rows[-len(times) :])
    return rows


def _show(rows: Sequence[Row]) -> None:
    best = min((row.ttft2_ms for row in rows if row.codec in LOSSLESS), default=0.0)
    for row in rows:
        note = ""
        if row.codec == "auto":
            note = (
                f"  {row.ttft2_ms - best:+.1f} ms, {100 * (row.ttft2_ms / best - 1):+.1f}% to the best lossless one"
            )
        print(
            f"{row.scenario:8} {row.link_gbit:5g} Gbit/s  {row.transport} {row.codec:10} "
            f"to decode's token {row.ttft2_ms:9.1f} ms, exposed {row.exposed_ms:8.1f} ms, "
            f"{row.wire_bytes / 1e6:7.2f} MB{note}",
            flush=True,
        )


def drive(args: argparse.Namespace) -> None:
    """Runs on the prefill side's end of the link, as a router beside the prefill pool does."""
    link = ShapedLink(args.link_of)
    scenarios = [
        Scenario("cold", args.cold_pace, COLD_LINKS),
        Scenario("prefix", NEVER_SLOW, FAST_LINKS, prefix_hit=True),
        Scenario("8b-h200", args.fast_pace, FAST_LINKS),
    ]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for scenario in scenarios:
            if scenario.name in args.scenarios:
                links = tuple(gbit for gbit in scenario.links if not args.links or gbit in args.links)
                rows += measure(link, replace(scenario, links=links), args, Path(name))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def serve_worker(args: argparse.Namespace) -> int:
    """One worker process of the measurement."""
    from safetensors.torch import load_file

    from benchmarks.replay import ReplayRunner
    from decode_worker.worker import DecodeWorker
    from prefill_worker.worker import PrefillWorker
    from worker.process import run

    def make(config: WorkerConfig):  # type: ignore[no-untyped-def]
        runner = ReplayRunner(
            load_file(args.kv)["kv"],
            config.engine.num_blocks,
            args.pace,
            DECODE_STEP_S,
            digest=_digest(config.transfer.calibration),
        )
        kind = PrefillWorker if config.role is Role.PREFILL else DecodeWorker
        return kind(config, make_runner=lambda _: runner)

    from_json(WorkerConfig, Path(args.worker).read_text())
    return run([args.worker], make)


def _digest(calibration: str) -> str:
    """Of the model that a calibration was made for; without one it is nobody's."""
    if not calibration:
        return "replay"
    from safetensors import safe_open

    with safe_open(calibration, "numpy") as file:
        return str(file.metadata()["model_digest"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--tokens", type=int, default=512, help="prompt length (512)")
    parser.add_argument("--runs", type=int, default=15, help="timed runs of each codec, interleaved (15)")
    parser.add_argument("--warm-up", type=int, default=2, help="untimed runs before them (2)")
    parser.add_argument("--codecs", nargs="+", default=[*LOSSLESS, "auto"], help="codecs to compare")
    parser.add_argument("--transport", default="grpc", choices=("grpc", "collective"), help="grpc or collective")
    parser.add_argument("--calibration", type=Path, help="made by `pdserve calibrate`, for the codec tc4")
    parser.add_argument("--scenarios", nargs="+", default=["cold", "prefix", "8b-h200"])
    parser.add_argument("--links", nargs="+", type=float, default=[], help="only these of a scenario's links, Gbit/s")
    parser.add_argument("--model", default="smollm2-135m", help="model whose KV is recorded")
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "architecture.md")
    parser.add_argument(
        "--kv", type=Path, default=ROOT / "build" / "kv_transfer.safetensors", help="where it is kept"
    )
    parser.add_argument("--cold-pace", type=float, default=400.0, help="tokens/s of the cold scenario (400)")
    parser.add_argument("--fast-pace", type=float, default=20000.0, help="tokens/s of the 8b-h200 scenario (20000)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--pace", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--link-of", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return serve_worker(args)
    if args.link_of:
        drive(args)
        return 0
    from benchmarks.replay import record

    record(args.model, args.text.read_text(), min(args.tokens, 1024), args.kv)
    try:
        with ShapedLink() as link:
            command = [sys.executable, __file__, *sys.argv[1:], "--link-of", str(link.owner)]
            return subprocess.run(link.command(0, *command), check=False).returncode
    except LinkUnavailable as error:
        print(f"cannot shape a link here: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
