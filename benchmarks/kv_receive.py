"""What a decode worker's steps feel of a KV cache that arrives meanwhile.

One process decodes with the real engine on one thread, pinned to the first core; its receive thread and everything
else of it may use the second one. A process on the second core sends recorded KV of the same model, packed before the
clock starts, over the real push stream, at a stated pace. Phases with and without arriving KV alternate.

Then, without an engine: how long the receiver holds Python's interpreter lock (GIL), seen by a thread on the first
core that does nothing but look at the clock, and what of a frame's time is Python's. Example::

    .venv/bin/python benchmarks/kv_receive.py --json build/kv_receive.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # before this folder, whose engine.py is not the package

from worker.openmp import share_cores  # noqa: E402

share_cores()

import grpc  # noqa: E402
import torch  # noqa: E402

from kv_transfer.codecs.registry import STANDARD  # noqa: E402
from kv_transfer.frames import FrameLimits  # noqa: E402
from kv_transfer.handshake import hello  # noqa: E402
from kv_transfer.manifest import FrameSpan, Manifest, TicketRef, frames_digest  # noqa: E402
from kv_transfer.messages import Committed, FrameAck, FrameNack, Piece, PushReply, TicketRefused, Welcome  # noqa: E402
from kv_transfer.packing import pack_frame  # noqa: E402
from kv_transfer.receiver import KvReceiver  # noqa: E402
from kv_transfer.site import local_offer  # noqa: E402
from kv_transfer.transports.grpc_push import GrpcPushLink  # noqa: E402
from pdcore.clock import MonotonicClock  # noqa: E402
from pdcore.config import EngineConfig, SchedulerConfig, TransferConfig  # noqa: E402
from pdcore.faults import FaultPoints  # noqa: E402
from pdcore.types import KvGeometry, KvTransferStats, RequestKey, RequestSpec, SamplingParams  # noqa: E402
from protos import kv_pb2_grpc  # noqa: E402
from worker.grpc_options import SERVER_OPTIONS  # noqa: E402

DECODE_CORE, TRANSFER_CORE = 0, 1
LAYERS_PER_FRAME = 2
FRAME_TOKENS = 256
GIL_LOOK_S = 50e-6


@dataclass
class Row:
    """Decode steps, in milliseconds. `without` and `during`: median, 99th percentile, maximum."""

    codec: str
    tokens_s: float
    steps_without: int
    without: tuple[float, float, float]
    steps_during: int
    during: tuple[float, float, float]
    transfer_s: float
    raw_mb_s: float


@dataclass
class GilRow:
    """The receiver alone. Times in microseconds; `cpu_us_per_frame` is of the receive thread, all of it.

    `python_us_per_frame`: what a frame without bulk takes: one token of one layer, raw.
    `waits_over_50us`: how often, per frame, another thread waited longer than that for the interpreter lock, and the
    median and the five longest of those waits; the time to wake that thread is in them.
    """

    codec: str
    frames: int
    frame_bytes: int
    cpu_us_per_frame: float
    python_us_per_frame: float
    waits_over_50us: float
    median_wait_us: float
    longest_waits_us: list[float]


def pack_all(  # noqa: PLR0917
    kv: torch.Tensor,
    geometry: KvGeometry,
    ref: TicketRef,
    key: RequestKey,
    codecs: tuple[str, ...],
    codec: str,
    tokens: int,
    layers: int,
    frame_tokens: int,
) -> tuple[list[tuple[FrameSpan, bytes]], Manifest]:
    """Recorded KV [layers, 2, tokens, heads, dim], repeated, as the frames and the manifest of a ticket."""
    limits = FrameLimits.for_ticket(
        ref=ref, key=key, geometry=geometry, token_start=0, token_end=tokens, codecs=codecs
    )
    frames: list[tuple[FrameSpan, bytes]] = []
    checksums = []
    for token in range(0, tokens, frame_tokens):
        for layer in range(0, geometry.num_layers, layers):
            span = FrameSpan(layer, layers, token, min(frame_tokens, tokens - token))
            rows = torch.arange(token, token + span.token_count) % kv.shape[2]
            values = kv[layer : layer + layers][:, :, rows].contiguous()
            packed = pack_frame(values, limits, span, STANDARD[codec])
            frames.append((span, packed.data))
            checksums.append(packed.checksums)
    return frames, Manifest(ref, key, tokens, len(frames), (1,), frames_digest(checksums))


# --- the sender's process ------------------------------------------------------------------------------------------


class Sender:
    """A push stream that sends ready-made frames and keeps the credit. `LinkListener` of its own link."""

    def __init__(self, address: str, geometry: KvGeometry, incarnation: str) -> None:
        self._changed = threading.Condition()
        self._credit = 0
        self._outcome = ""
        offer = local_offer("grpc", "", "cpu")
        greeting = hello("prefill-0", "prefill-a", incarnation, geometry, offer)
        self._link = GrpcPushLink(address, greeting, self, message_bytes=256 * 1024)

    def on_reply(self, reply: PushReply) -> None:
        with self._changed:
            match reply:
                case Welcome():
                    self._credit = reply.credit_bytes
                case FrameAck():
                    self._credit += reply.credit_bytes
                case Committed():
                    self._outcome = "committed"
                case FrameNack() | TicketRefused():
                    self._outcome = reply.reason
            self._changed.notify_all()

    def on_closed(self, reason: str, refused: bool) -> None:
        with self._changed:
            self._outcome = self._outcome or reason
            self._changed.notify_all()

    def send(self, frames: Sequence[bytes], manifest: Manifest, pace: Callable[[int], float]) -> None:
        """Send everything; `pace` gives the moment, on the performance counter, before which a frame must not go."""
        self._outcome = ""
        for index, frame in enumerate(frames):
            while (left := pace(index) - time.perf_counter()) > 0:
                time.sleep(left)
            with self._changed:
                if not self._changed.wait_for(lambda: self._credit >= len(frame) or self._outcome, 60.0):  # noqa: B023
                    raise SystemExit("no credit for a minute")
                self._credit -= len(frame)
            self._link.post_frame(manifest.ref, index, 0, frame)
        self._link.post_manifest(manifest, lambda: None)
        with self._changed:
            self._changed.wait_for(lambda: self._outcome, 60.0)
        if self._outcome != "committed":
            raise SystemExit(f"the transfer failed: {self._outcome}")


def serve_sender(args: argparse.Namespace) -> int:
    """Reads orders, one JSON object a line; answers ``ready`` when the frames are packed and ``done`` at the end."""
    from safetensors.torch import load_file

    os.sched_setaffinity(0, {TRANSFER_CORE})
    torch.set_num_threads(1)
    kv = load_file(args.kv)["kv"]
    sender: Sender | None = None
    for line in sys.stdin:
        order = json.loads(line)
        geometry = KvGeometry(**order["geometry"])
        ref, key = TicketRef(*order["ref"]), RequestKey(*order["key"])
        packed, manifest = pack_all(
            kv,
            geometry,
            ref,
            key,
            tuple(order["codecs"]),
            order["codec"],
            order["tokens"],
            order["layers"],
            order["frame_tokens"],
        )
        if sender is None:
            sender = Sender(order["address"], geometry, order["incarnation"])
        print("ready", flush=True)
        sys.stdin.readline()
        start, rate = time.perf_counter(), order["tokens_s"]

        def pace(index: int, start: float = start, rate: float = rate) -> float:
            span = packed[index][0]  # noqa: B023
            done = span.token_start + span.token_count * (span.layer_start + span.layer_count) / geometry.num_layers  # noqa: B023
            return start + done / rate if rate else start

        sender.send([frame for _, frame in packed], manifest, pace)
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
    return 0


# --- the receiver's process ----------------------------------------------------------------------------------------


class Host:
    """A `TicketHost` that takes everything and keeps nothing."""

    def on_commit(self, key: RequestKey, first_tokens: tuple[int, ...], stats: KvTransferStats) -> bool:
        return True

    def on_release(self, key: RequestKey, reason: str, failed: bool) -> None:
        raise SystemExit(f"ticket of {key} released: {reason}")


class Receiving:
    """A receiver on `store`, its server, and the sender's process."""

    def __init__(self, store, geometry: KvGeometry, kv: Path, blocks: list[int]) -> None:  # type: ignore[no-untyped-def]
        self.geometry = geometry
        self._blocks = blocks
        self._numbers = iter(range(1 << 30))
        config = TransferConfig(lease_s=120.0, cpu_affinity=(TRANSFER_CORE,))
        self.receiver = KvReceiver(
            worker_id="decode-0",
            incarnation="decode-a",
            store=store,
            config=config,
            host=Host(),
            clock=MonotonicClock(),
            faults=FaultPoints(),
        )
        self._server = grpc.server(ThreadPoolExecutor(4), options=SERVER_OPTIONS)
        kv_pb2_grpc.add_KvServicer_to_server(self.receiver.servicer(), self._server)
        self._address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--sender", "--kv", str(kv)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @contextmanager
    def arriving(
        self, codec: str, tokens: int, tokens_s: float, *, layers: int, frame_tokens: int
    ) -> Iterator[Callable[[], float | None]]:
        """KV of `tokens` tokens is on its way; yields a call that gives its seconds, None while it lasts."""
        key = RequestKey(f"r{next(self._numbers)}", 0)
        ticket = self.receiver.grant(key, "router", tokens, self._blocks, self._address)
        (endpoint,) = ticket.endpoints
        self._tell(
            {
                "geometry": asdict(self.geometry),
                "ref": (endpoint.ticket_id, endpoint.generation),
                "key": tuple(key),
                "tokens": tokens,
                "codecs": ticket.codecs,
                "codec": codec,
                "layers": layers,
                "frame_tokens": frame_tokens,
                "tokens_s": tokens_s,
                "address": self._address,
                "incarnation": "decode-a",
            }
        )
        assert self._hear() == "ready"
        answer: list[float] = []
        waiting = threading.Thread(target=lambda: answer.append(json.loads(self._hear())["seconds"]))
        self._tell({})
        waiting.start()
        yield lambda: answer[0] if answer else None
        waiting.join(120.0)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10.0)
        self.receiver.close()
        self._server.stop(None).wait()

    def _tell(self, order: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit("the sender's process has ended")
        return line


def steps_while(step: Callable[[], None], lasts: Callable[[int], bool]) -> list[float]:
    """Milliseconds of each step, for as long as `lasts` says of their number."""
    times: list[float] = []
    while lasts(len(times)):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def summary(times: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return round(statistics.median(ordered), 2), round(p99, 2), round(ordered[-1], 2)


def decode_rows(args: argparse.Namespace) -> list[Row]:
    """Decode steps with and without a cache that arrives."""
    from engine.engine import Engine
    from engine.loader import load_runner
    from engine.model_store import resolve_model
    from engine.sequence import SequenceKind

    torch.set_num_threads(1)
    blocks = args.tokens // 16 + 1
    config = EngineConfig(
        model_path=str(resolve_model(args.model).path),
        served_name="decode",
        dtype="bfloat16",
        num_blocks=blocks + 600,
        threads=1,
        prefix_cache=False,
        scheduler=SchedulerConfig(max_num_batched_tokens=512, prefill_chunk_tokens=512),
    )
    runner = load_runner(config)
    engine = Engine(runner, config)
    spec = RequestSpec(
        RequestKey("decode", 0),
        tuple(range(100, 100 + args.context)),
        SamplingParams(max_tokens=8000 - args.context, temperature=0.0),
        token_window=1 << 20,
    )
    engine.add(spec, SequenceKind.GENERATE)

    def step() -> None:
        plan = engine.schedule()
        assert plan is not None
        engine.apply(plan, engine.execute(plan))

    step()
    receiving = Receiving(runner.cache, runner.geometry, args.kv, list(range(600, 600 + blocks)))
    os.sched_setaffinity(0, {DECODE_CORE})  # this thread alone: the others keep what they have
    rows = []
    try:
        for codec in args.codecs:
            for tokens_s in args.tokens_s:
                quiet: list[float] = []
                busy: list[float] = []
                seconds: list[float] = []
                for _ in range(args.rounds):
                    with receiving.arriving(
                        codec, args.tokens, tokens_s, layers=LAYERS_PER_FRAME, frame_tokens=FRAME_TOKENS
                    ) as finished:
                        busy += steps_while(step, lambda count: finished() is None)
                        seconds.append(finished() or 0.0)
                    count = len(busy) - len(quiet)
                    quiet += steps_while(step, lambda done: done < count)  # noqa: B023
                raw = args.tokens * runner.geometry.bytes_per_token
                took = statistics.median(seconds)
                rows.append(
                    Row(
                        codec,
                        tokens_s,
                        len(quiet),
                        summary(quiet),
                        len(busy),
                        summary(busy),
                        round(took, 3),
                        round(raw / took / 1e6, 1),
                    )
                )
                print(rows[-1], flush=True)
    finally:
        receiving.close()
    return rows


class Inbox:
    """A `PushStream` without a wire: counts answers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames = 0
        self.outcome = ""

    def reply(self, reply: PushReply) -> None:
        with self._changed:
            match reply:
                case FrameAck():
                    self._frames += 1
                case Committed():
                    self.outcome = "committed"
                case FrameNack() | TicketRefused():
                    self.outcome = reply.reason
            self._changed.notify_all()

    def refuse(self, reason: str) -> None:
        self.outcome = reason

    def end(self) -> None:
        """There is no wire to end."""

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.outcome, 60.0)
        if self.outcome != "committed":
            raise SystemExit(f"the transfer failed: {self.outcome}")


class Looker:
    """A thread that does nothing but look at the clock, on the first core.

    It gives the interpreter lock away when another thread asks for it, and asks for it back at once: what it then
    waits for is how long the other one keeps it, and how long the kernel takes to wake it.
    """

    def __init__(self) -> None:
        self.waits: list[float] = []
        self._looking = True
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def stop(self) -> None:
        self._looking = False
        self._thread.join()

    def _look(self) -> None:
        os.sched_setaffinity(0, {DECODE_CORE})
        last = time.perf_counter()
        while self._looking:
            now = time.perf_counter()
            if now - last > GIL_LOOK_S:
                self.waits.append((now - last) * 1e6)
            last = now


def gil_rows(args: argparse.Namespace) -> list[GilRow]:
    """The receiver's hold on the interpreter. Frames lie in its process, so that nothing else wants its core."""
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    kv = load_file(args.kv)["kv"]
    sys.setswitchinterval(1e-5)
    bare = _alone(kv, "raw", 64, layers=1, frame_tokens=1, look=False)
    rows = []
    for codec in args.codecs:
        quiet = _alone(kv, codec, args.tokens, layers=LAYERS_PER_FRAME, frame_tokens=FRAME_TOKENS, look=False)
        watched = _alone(kv, codec, args.tokens, layers=LAYERS_PER_FRAME, frame_tokens=FRAME_TOKENS, look=True)
        ordered = sorted(watched.waits)
        rows.append(
            GilRow(
                codec,
                quiet.frames,
                quiet.raw_bytes // quiet.frames,
                round(quiet.cpu_s / quiet.frames * 1e6, 1),
                round(bare.cpu_s / bare.frames * 1e6, 1),
                round(len(ordered) / watched.frames, 3),
                round(statistics.median(ordered), 1) if ordered else 0.0,
                [round(wait, 1) for wait in ordered[-5:]],
            )
        )
        print(rows[-1], flush=True)
    sys.setswitchinterval(0.005)
    return rows


@dataclass
class Alone:
    """One transfer to a receiver that has its core to itself. `cpu_s`: of the receive thread."""

    frames: int
    raw_bytes: int
    cpu_s: float
    waits: list[float]


def _alone(kv: torch.Tensor, codec: str, tokens: int, *, layers: int, frame_tokens: int, look: bool) -> Alone:
    from engine.kv_cache import PagedKvCache

    num_layers, _, _, heads, dim = kv.shape
    geometry = KvGeometry("recorded", num_layers, heads, dim, "bfloat16", 16, tokens // 16 + 1)
    receiver = KvReceiver(
        worker_id="decode-0",
        incarnation="decode-a",
        store=PagedKvCache(geometry),
        config=TransferConfig(lease_s=120.0, cpu_affinity=(TRANSFER_CORE,), credit_bytes=1 << 34),
        host=Host(),
        clock=MonotonicClock(),
        faults=FaultPoints(),
    )
    key = RequestKey("r", 0)
    ticket = receiver.grant(key, "router", tokens, list(range(geometry.num_blocks)), "")
    (endpoint,) = ticket.endpoints
    ref = TicketRef(endpoint.ticket_id, endpoint.generation)
    frames, manifest = pack_all(kv, geometry, ref, key, ticket.codecs, codec, tokens, layers, frame_tokens)
    inbox = Inbox()
    listener = receiver.accept(inbox)
    listener.on_message(hello("prefill-0", "prefill-a", "decode-a", geometry, local_offer("grpc", "", "cpu")))
    (thread,) = (t for t in threading.enumerate() if t.name == "kv-receive-0")
    looker = Looker() if look else None
    before = _thread_seconds(thread)
    for index, (_, frame) in enumerate(frames):
        listener.on_message(Piece(ref, index, 0, 0, len(frame), frame))
    listener.on_message(manifest)
    inbox.wait()
    seconds = _thread_seconds(thread) - before
    if looker is not None:
        looker.stop()
    listener.on_closed("over")
    receiver.close()
    return Alone(len(frames), tokens * geometry.bytes_per_token, seconds, looker.waits if looker else [])


def _thread_seconds(thread: threading.Thread) -> float:
    """Processor time of a thread so far."""
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the cache that arrives (4096)")
    parser.add_argument("--context", type=int, default=512, help="context of the sequence that decodes (512)")
    parser.add_argument("--rounds", type=int, default=3, help="transfers for each line (3)")
    parser.add_argument(
        "--tokens-s", nargs="+", type=float, default=[500.0, 2000.0], help="paces of the sender; 0 is no pace"
    )
    parser.add_argument("--codecs", nargs="+", default=["raw", "bexp3", "bexp-zstd"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "architecture.md")
    parser.add_argument("--kv", type=Path, default=ROOT / "build" / "kv_transfer.safetensors", help="recorded KV")
    parser.add_argument("--sender", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sender:
        return serve_sender(args)
    if not {DECODE_CORE, TRANSFER_CORE} <= os.sched_getaffinity(0):
        print("this needs cores 0 and 1", file=sys.stderr)
        return 2
    from benchmarks.replay import record

    record(args.model, args.text.read_text(), 1024, args.kv)
    # First, before there is an engine with threads of its own.
    gil, decode = gil_rows(args), decode_rows(args)
    if args.json:
        rows = {"decode": [asdict(row) for row in decode], "gil": [asdict(row) for row in gil]}
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
