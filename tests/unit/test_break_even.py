"""The break-even report: its numbers are those of the cost model, its words fit a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.break_even import break_even, show, to_dict
from cluster.cli.app import app
from kv_transfer.codec_speed import assumed_costs
from kv_transfer.codecs.registry import STANDARD
from pdcore.costs import CodecCost, TransferSnapshot, choose_codec
from pdcore.types import KvGeometry

GEOMETRY = KvGeometry("", 30, 3, 64, "bfloat16", 1, 1)
COSTS = {
    "raw": CodecCost("raw", 1.0, 3e9, 3e9),
    "bexp3": CodecCost("bexp3", 1.4, 2e9, 2.5e9),
    "bexp-zstd": CodecCost("bexp-zstd", 1.5, 0.5e9, 1e9),
    "zstd": CodecCost("zstd", 1.0, 0.1e9, 0.1e9),
    "q8": CodecCost("q8", 2.0, 9e9, 9e9, lossless=False),
}


def report(**options: object) -> object:
    return break_even(GEOMETRY, COSTS, frame_bytes=256 << 10, **options)  # type: ignore[arg-type]


def test_as_data() -> None:
    data = to_dict(report(links_gbit=[0.1, 100.0], token_counts=[1000, 50]))  # type: ignore[arg-type]
    assert json.loads(json.dumps(data)) == data
    assert (data["bytes_per_token"], data["dtype"], data["rebuild"]) == (23_040, "bfloat16", [])
    codecs = {line["codec"]: line for line in data["codecs"]}  # type: ignore[attr-defined]
    assert set(codecs) == {"raw", "bexp3", "bexp-zstd", "zstd"}  # what changes numbers is no choice of auto's
    assert codecs["bexp3"]["break_even_gbit"] == pytest.approx(16, rel=0.02)  # 2 GB/s, the slower of its two ends
    assert codecs["bexp-zstd"]["break_even_gbit"] == pytest.approx(4, rel=0.02)
    assert codecs["zstd"]["break_even_gbit"] == codecs["raw"]["break_even_gbit"] == 0
    choices = data["choices"]
    assert [(c["link_gbit"], c["tokens"], c["codec"]) for c in choices] == [  # type: ignore[attr-defined]
        (0.1, 1000, "bexp-zstd"),
        (0.1, 50, "bexp-zstd"),
        (100.0, 1000, "raw"),
        (100.0, 50, "raw"),
    ]
    costs = tuple(cost for cost in COSTS.values() if cost.lossless)
    for line in choices:  # type: ignore[attr-defined]
        transfer = TransferSnapshot(line["tokens"] * 23_040, 256 << 10, line["link_gbit"] * 125e6, costs)
        assert line["exposed_ms"][line["codec"]] == pytest.approx(1000 * choose_codec(transfer).exposed_s, rel=1e-3)


def test_a_prefill_adds_what_is_better_computed_again() -> None:
    data = to_dict(report(prefill_tokens_s=2000.0, token_counts=[1000]))  # type: ignore[arg-type]
    (line,) = data["rebuild"]  # type: ignore[misc]
    # At 2000 tokens/s the 23 MB of 1000 tokens are computed in 0.5 s: what the wire needs at 34 MB/s compressed 1.5x.
    assert line["tokens"] == 1000
    assert line["break_even_gbit"] == pytest.approx(8 * 0.02304 / 0.55 / 1.5, rel=0.05)


def test_for_people_in_80_columns() -> None:
    console = Console(width=80, file=io.StringIO())
    show(report(prefill_tokens_s=900.0), console)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    out = console.file.getvalue()
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    for words in ("KV of 23,040 bytes per token (bfloat16)", "never", "16 Gbit/s", "8,192 tokens", "computed again"):
        assert words in out
    assert sum("bexp-zstd" in line for line in lines) >= 2
    # One line per link: no cell is folded.
    assert sum(line.endswith(("raw", "%")) and "Gbit/s" in line for line in lines) == 8


@pytest.fixture
def model(tmp_path: Path) -> str:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return str(tmp_path)


def pdserve(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), prog_name="pdserve")
    return result.exit_code, result.stdout, result.stderr


def test_the_command(model: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "breakeven.json"
    code, out, err = pdserve("codecs", "--breakeven", "--model", model, "--link-gbit", "1", "--json", str(path))
    assert code == 0, err
    assert "KV of 256 bytes per token (bfloat16)" in out
    data = json.loads(path.read_text())
    assert data["bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert {line["link_gbit"] for line in data["choices"]} == {1.0}
    costs = assumed_costs(STANDARD, "bfloat16")
    assert {line["codec"]: line["ratio"] for line in data["codecs"]} == {
        name: cost.ratio for name, cost in costs.items() if cost.lossless
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--breakeven", "--dtype", "int8"), "--dtype: 'int8'"),
        (("--breakeven", "--link-gbit", "0"), "--link-gbit: 0"),
        (("--breakeven", "--prefill-tokens-s", "inf"), "--prefill-tokens-s: inf"),
        (("--link-gbit", "1"), "need --breakeven"),
    ],
)
def test_bad_flags_are_refused(model: str, flags: tuple[str, ...], words: str) -> None:
    code, out, err = pdserve("codecs", "--model", model, *flags)
    assert (code, out) == (2, "")
    assert words in err
