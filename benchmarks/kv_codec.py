"""Ratio and speed of every codec on KV of a real model, on one core, with native code and without.

    python -m benchmarks.kv_codec --model smollm2-135m --text README.md --save build/kv.safetensors
    python -m benchmarks.kv_codec --kv build/kv.safetensors --json build/kv_codec.json

KV comes from a prefill of `--text` by the model, or from a file: a safetensors file with one tensor ``kv``, or a .npy
file (uint16 is read as bfloat16), of shape [layer, 2, token, head, dim]. Speeds are decoded bytes over the median CPU
time of a pass over all of it, in GB/s per core: of the codec alone, and of whole frames with checksums, header. CPU
time, since nothing here waits, and other work on the machine should not count. Codecs take turns within a round, each
with native code and with numpy and zlib in its place.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/engine.py hides the package else

import numpy as np
import torch

from kv_transfer.codecs.base import Codec, SectionShape
from kv_transfer.codecs.registry import STANDARD
from kv_transfer.frames import FrameLimits, decode_header, wire_name
from kv_transfer.manifest import FrameSpan, TicketRef
from kv_transfer.native.library import native_status, set_native
from kv_transfer.packing import pack_frame, unpack_frame
from pdcore.types import KvGeometry, RequestKey


@dataclass(frozen=True)
class CodecResult:
    """One line of the table. Speeds in GB/s (10^9 decoded bytes per second); `native` as `native_status` has it."""

    codec: str
    native: str
    ratio: float
    encode_gb_s: float
    decode_gb_s: float
    frame_encode_gb_s: float
    frame_decode_gb_s: float


def kv_from_file(path: Path) -> torch.Tensor:
    """KV tensor [layer, 2, token, head, dim] of a .npy or safetensors file."""
    if path.suffix == ".npy":
        values = np.load(path)
        if values.dtype == np.uint16:
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)
    from safetensors.torch import load_file

    return load_file(path)["kv"]


def kv_from_model(model: str, text: Path, max_tokens: int, threads: int) -> torch.Tensor:
    """Prefill the start of a text and read its KV out of the cache."""
    from transformers import AutoTokenizer

    from engine.engine import Engine
    from engine.loader import load_runner
    from engine.model_store import resolve_model
    from engine.sequence import SequenceKind
    from pdcore.config import EngineConfig
    from pdcore.types import RequestSpec, SamplingParams

    torch.set_num_threads(threads)
    resolved = resolve_model(model)
    runner = load_runner(EngineConfig(str(resolved.path), resolved.served_name, num_blocks=max_tokens // 16 + 8))
    tokens = AutoTokenizer.from_pretrained(resolved.path)(text.read_text())["input_ids"][:max_tokens]
    key = RequestKey("benchmark", 0)
    engine = Engine(runner, EngineConfig(str(resolved.path), resolved.served_name))
    engine.add(RequestSpec(key, tuple(tokens), SamplingParams(max_tokens=1)), SequenceKind.PREFILL)
    blocks: tuple[int, ...] = ()
    while (plan := engine.schedule()) is not None:
        blocks = plan.chunks[0].block_ids
        engine.apply(plan, engine.execute(plan))
    torch.set_num_threads(1)
    return runner.cache.gather(0, runner.geometry.num_layers, blocks, 0, len(tokens))


class CodecRun:
    """One codec over all sections and frames of a KV tensor."""

    def __init__(self, codec: Codec, native: bool, kv: torch.Tensor, dtype: str, frame_tokens: int) -> None:
        layers, _, tokens, heads, dim = kv.shape
        geometry = KvGeometry("benchmark", layers, heads, dim, dtype, 16, tokens)
        self.codec = codec
        self.native = native
        self.dtype = dtype
        self.limits = FrameLimits.for_ticket(
            ref=TicketRef(0, 1),
            key=RequestKey("benchmark", 0),
            geometry=geometry,
            token_start=0,
            token_end=tokens,
            codecs=(wire_name(codec.name, codec.calibration),),
        )
        self.spans = [
            FrameSpan(layer, 1, start, min(frame_tokens, tokens - start))
            for layer in range(layers)
            for start in range(0, tokens, frame_tokens)
        ]
        self.frames = [kv[s.layer_start, :, s.token_start : s.token_start + s.token_count][None] for s in self.spans]
        self.frames = [frame.contiguous() for frame in self.frames]
        self.raw_bytes = sum(frame.numel() * frame.element_size() for frame in self.frames)
        self.payload_bytes = 0
        self.seconds: dict[str, list[float]] = {"encode": [], "decode": [], "pack": [], "unpack": []}

    def round(self) -> None:
        """One timed pass each way, alone and as frames; what comes out of a lossless codec is what went in.

        Frame by frame, as a transfer does it: memory is used again at once, not taken fresh for every frame.
        """
        set_native(self.native)
        spent = dict.fromkeys(self.seconds, 0.0)
        self.payload_bytes = 0
        for frame, span in zip(self.frames, self.spans, strict=True):
            for kind, section in enumerate(frame.view(torch.uint8).numpy().reshape(2, -1)):
                heads, dim = self.limits.head_count, self.limits.head_dim
                self._section(section, SectionShape(kind, self.dtype, *span, 0, heads, dim), spent)
            start = time.thread_time()
            packed = pack_frame(frame, self.limits, span, self.codec)
            between = time.thread_time()
            view = memoryview(packed.data)
            unpack_frame(view, decode_header(view, self.limits))
            spent["pack"] += between - start
            spent["unpack"] += time.thread_time() - between
        for name, seconds in spent.items():
            self.seconds[name].append(seconds)

    def _section(self, section: np.ndarray, shape: SectionShape, spent: dict[str, float]) -> None:
        start = time.thread_time()
        parts = self.codec.encode(section, shape)
        spent["encode"] += time.thread_time() - start
        codec = self.codec if parts is not None else STANDARD["raw"]
        payload = memoryview(b"".join(parts) if parts is not None else section.tobytes())
        self.payload_bytes += len(payload)
        out = np.zeros_like(section)
        start = time.thread_time()
        codec.decode(payload, shape, out)
        spent["decode"] += time.thread_time() - start
        assert not codec.lossless or np.array_equal(out, section)

    def result(self) -> CodecResult:
        set_native(self.native)
        speed = {name: self.raw_bytes / statistics.median(times) / 1e9 for name, times in self.seconds.items()}
        return CodecResult(
            codec=self.codec.name,
            native=native_status(),
            ratio=self.raw_bytes / self.payload_bytes,
            encode_gb_s=speed["encode"],
            decode_gb_s=speed["decode"],
            frame_encode_gb_s=speed["pack"],
            frame_decode_gb_s=speed["unpack"],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--kv", type=Path, help="file with KV")
    source.add_argument("--model", help="model to take KV from")
    parser.add_argument("--text", type=Path, default=Path("README.md"), help="text that the model prefills")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of it at most")
    parser.add_argument("--threads", type=int, default=2, help="threads of the prefill")
    parser.add_argument("--save", type=Path, help="keep the model's KV in this safetensors file")
    parser.add_argument("--frame-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kv = kv_from_file(args.kv) if args.kv else kv_from_model(args.model, args.text, args.tokens, args.threads)
    torch.set_num_threads(1)
    if args.save:
        from safetensors.torch import save_file

        save_file({"kv": kv.contiguous()}, args.save)
    dtype = str(kv.dtype).removeprefix("torch.")
    codecs = [codec for codec in STANDARD if dtype in codec.dtypes and codec.lossless]
    runs = [CodecRun(codec, native, kv, dtype, args.frame_tokens) for codec in codecs for native in (True, False)]
    for _ in range(args.rounds):
        for run in runs:
            run.round()
    results = [run.result() for run in runs]
    print(f"KV {tuple(kv.shape)} {dtype}, {runs[0].raw_bytes / 1e6:.1f} MB, frames of {args.frame_tokens} tokens")
    print(f"{'codec':12} {'native':20} {'ratio':>6} {'encode':>8} {'decode':>8} {'pack':>8} {'unpack':>8}   GB/s")
    for line in results:
        print(
            f"{line.codec:12} {line.native:20} {line.ratio:6.3f} {line.encode_gb_s:8.2f} {line.decode_gb_s:8.2f} "
            f"{line.frame_encode_gb_s:8.2f} {line.frame_decode_gb_s:8.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(line) for line in results], indent=2))


if __name__ == "__main__":
    main()
