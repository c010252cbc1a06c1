"""What structured output costs: compiling, the masks of a step, and taking a token, on one tokenizer.

    python -m benchmarks.structured [MODEL] [--json FILE]

Times are those of the processor, all threads together, so that they hold on a busy machine too. The masks of a batch
are computed as the engine does it, in one call that takes every core it gets. ``--engine`` adds whole decode steps of
the model by the clock, free and structured ones in turn.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from engine.engine import Engine
from engine.loader import load_runner
from engine.model_store import resolve_model
from engine.sequence import SequenceKind
from engine.structured import OutputGuards, OutputState
from engine.token_masks import keep_allowed
from pdcore.config import EngineConfig
from pdcore.grammar import GrammarCompiler
from pdcore.structured import StructuredOutput, StructureKind
from pdcore.types import RequestKey, RequestSpec, SamplingParams

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "city": {"type": "string"},
                "code": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "city"],
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
}
_GRAMMAR = 'start: term (("+" | "-" | "*") term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]+(\\.[0-9]+)?/\n'
OUTPUTS = {
    "json schema": StructuredOutput(StructureKind.JSON_SCHEMA, (json.dumps(_SCHEMA),)),
    "json object": StructuredOutput(StructureKind.JSON_OBJECT),
    "regex": StructuredOutput(StructureKind.REGEX, (r"[A-Z][a-z]+, [0-9]{1,2}\. (January|June|July) [0-9]{4}",)),
    "choice of 1000": StructuredOutput(StructureKind.CHOICE, tuple(f"item number {i}" for i in range(1000))),
    "grammar": StructuredOutput(StructureKind.GRAMMAR, (_GRAMMAR,)),
}
BATCHES = (1, 8, 32)


class _Walk:
    """Outputs that go on at random as their masks allow, and begin anew when they end."""

    def __init__(self, guards: OutputGuards, output: StructuredOutput, count: int, end: int) -> None:
        self._start: Callable[[], OutputState] = lambda: guards.start(
            output, SamplingParams(1 << 20, stop_token_ids=(end,)), ()
        )
        self._end = end
        self._choose = random.Random(0)
        self.states = [self._start() for _ in range(count)]

    def go_on(self, bits: np.ndarray) -> float:
        """Seconds that taking one token of each took."""
        seconds = 0.0
        for index, row in enumerate(bits):
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            token = int(self._choose.choice(allowed))
            started = time.process_time()
            self.states[index].take_sampled(token)
            seconds += time.process_time() - started
            if token == self._end or self.states[index].complete:
                self.states[index] = self._start()
        return seconds


def measure(folder: Path, steps: int, threads: int) -> dict[str, object]:
    """Times in microseconds unless they say otherwise; steps of the engine only if it gets `threads`."""
    torch.set_num_threads(1)  # several would wait for each other in a busy loop, and that counts
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    started = time.process_time()
    guards = OutputGuards.load(folder, vocab)
    assert guards is not None
    loaded = time.process_time() - started
    compiler = guards._compiler
    end = compiler.tokenizer.eos_token
    rows: list[dict[str, object]] = []
    for name, output in OUTPUTS.items():
        compiled = _median(lambda output=output: GrammarCompiler(compiler.tokenizer).matcher(output), 5)
        again = _median(lambda output=output: compiler.matcher(output), 50)
        row: dict[str, object] = {"output": name, "compile_us": compiled, "again_us": again}
        for count in BATCHES:
            walk, masks_s, take_s = _Walk(guards, output, count, end), [], []
            for _ in range(max(10, steps // count)):
                started = time.process_time()
                masks = guards.masks(walk.states)
                masks.wait()
                masks_s.append(time.process_time() - started)
                take_s.append(walk.go_on(masks.bits) / count)
            row[f"masks_{count}_us"] = 1e6 * statistics.median(masks_s)
            row[f"masks_{count}_p99_us"] = 1e6 * sorted(masks_s)[int(0.99 * len(masks_s))]
            row["take_us"] = 1e6 * statistics.median(take_s)
        rows.append(row)
    applied = {}
    for count in BATCHES:
        logits = torch.randn(count, vocab)
        bits = np.full((count, compiler.mask_words), 0x5555, np.uint32)
        fields = _Fields(np.arange(count, dtype=np.int32), bits)
        applied[count] = _median(lambda logits=logits, fields=fields: keep_allowed(logits, fields), 50)
    result = {"vocab_size": vocab, "load_ms": 1e3 * loaded, "outputs": rows, "apply_us": applied}
    if threads:
        result["engine_ms"] = engine_steps(folder, guards, end, threads)
    guards.close()
    return result


def engine_steps(folder: Path, guards: OutputGuards, end: int, threads: int) -> list[dict[str, object]]:
    """Milliseconds of decode steps of a batch, of which all outputs are free, or all are structured."""
    torch.set_num_threads(threads)
    config = EngineConfig(str(folder), "benchmark", num_blocks=512, threads=threads, prefix_cache=False)
    engine = Engine(load_runner(config), config, guards=guards)
    rows: list[dict[str, object]] = []
    for count in BATCHES:
        row: dict[str, object] = {"sequences": count}
        for name in ("free", "structured", "free again"):
            output = OUTPUTS["json schema"] if name == "structured" else None
            params = SamplingParams(48, temperature=0.8, stop_token_ids=(end,), structured_output=output)
            for index in range(count):
                key = RequestKey(f"{name}-{index}", count)
                spec = RequestSpec(key, tuple(range(100, 132)), replace(params, seed=index))
                engine.add(spec, SequenceKind.GENERATE)
            seconds = []
            while (plan := engine.schedule()) is not None:
                started = time.perf_counter()
                result = engine.apply(plan, engine.execute(plan))
                if plan.step_input.num_decodes == count:
                    seconds.append(time.perf_counter() - started)
                for key, error in result.rejected:
                    raise SystemExit(f"{key}: {error}")
            row[name] = 1e3 * statistics.median(seconds)
        rows.append(row)
    return rows


class _Fields:
    def __init__(self, mask_rows: np.ndarray, mask_bits: np.ndarray) -> None:
        self.mask_rows, self.mask_bits = mask_rows, mask_bits

    def await_masks(self) -> None:
        """They are there."""


def _median(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return 1e6 * statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=400, help="masks per output and batch size")
    parser.add_argument(
        "--engine", type=int, default=0, metavar="THREADS", help="decode steps too, on so many threads"
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    result = measure(resolve_model(arguments.model).path, arguments.steps, arguments.engine)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['vocab_size']} tokens; tokenizer taken apart in {result['load_ms']:.0f} ms. Microseconds:")
    names = ["compile", "again", "take", *(f"masks of {n} (p99)" for n in BATCHES)]
    print(f"{'':16}" + "".join(f"{name:>20}" for name in names))
    for row in result["outputs"]:  # type: ignore[attr-defined]
        cells = [f"{row[key]:.0f}" for key in ("compile_us", "again_us", "take_us")]
        cells += [f"{row[f'masks_{n}_us']:.0f} ({row[f'masks_{n}_p99_us']:.0f})" for n in BATCHES]
        print(f"{row['output']:16}" + "".join(f"{cell:>20}" for cell in cells))
    applied = ", ".join(f"{count} rows {us:.0f}" for count, us in result["apply_us"].items())  # type: ignore[attr-defined]
    print(f"applying masks to the logits: {applied}")
    for row in result.get("engine_ms", ()):  # type: ignore[attr-defined]
        cells = ", ".join(f"{name} {row[name]:.1f} ms" for name in ("free", "structured", "free again"))
        print(f"decode step of {row['sequences']}: {cells}")


if __name__ == "__main__":
    main()
