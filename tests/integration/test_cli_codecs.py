"""``pdserve codecs`` and ``pdserve calibrate`` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.cli.app import app
from cluster.codec_quality.model_runs import model_geometry
from kv_transfer.codecs.calibration import load_calibration
from kv_transfer.frames import LOSSLESS_CODECS
from tests.support.tiny_model import tiny_llama


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="pdserve", env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pdserve" / "calibrations"


@pytest.mark.parametrize("command", ["codecs", "calibrate"])
def test_help_has_examples(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert f"pdserve {command}" in result.stdout


def test_every_codec_is_measured_and_tc4_calibrated_on_the_way(model: Path, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "codecs.json"
    result = invoke("codecs", "--model", str(model), "--prompts", "2", "--tokens", "8", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if str(tmp_path) not in line)
    assert "2 prompts" in result.stdout
    lines = json.loads(path.read_text())
    keys = {"codec", "lossless", "ratio", "encode_gb_s", "decode_gb_s", "kl", "top1", "exact_match"}
    assert all(keys <= line.keys() for line in lines)
    by_name = {line["codec"]: line for line in lines}
    assert {"control", "raw", "bexp-zstd", "q8", "q8-zstd", "k6v4", "k4v4", "tc4", "fp8"} <= by_name.keys()
    for name, line in by_name.items():
        assert line["lossless"] == (name in LOSSLESS_CODECS)
        if line["lossless"]:
            assert (line["kl"], line["exact_match"]) == (0, 1)
        assert name in result.stdout
    assert "tc4 is not calibrated for this model yet; that comes first" in result.stdout
    assert "reading KV: 0 of 32" in result.stderr
    assert "probing layers: 0 of " in result.stderr
    (kept,) = cache.iterdir()
    assert load_calibration(kept, model_geometry(model, "bfloat16")).heads_per_group == 2
    few = ("--prompts", "1", "--tokens", "4")
    again = invoke("codecs", "--model", str(model), *few, "--codecs", "tc4, raw")
    assert again.exit_code == 0, again.output
    assert kept.name in again.stdout
    assert "k6v4" not in again.stdout
    assert list(cache.iterdir()) == [kept]
    (cache / "tc4-other-model.safetensors").write_bytes(b"")
    other = invoke("codecs", "--model", str(tiny_llama(tmp_path / "other", seed=1)), *few, "--codecs", "tc4")
    assert other.exit_code == 0, other.output
    assert f"(2 in {cache} are of other models)" in other.stdout


def test_calibrating_on_given_texts(model: Path, cache: Path, tmp_path: Path) -> None:
    texts = []
    for number, source in enumerate((__file__, pytest.__file__)):
        text = tmp_path / f"{number}.txt"
        text.write_text(Path(source).read_text())
        texts += ["--texts", str(text)]
    out = tmp_path / "mine.safetensors"
    result = invoke("calibrate", "--model", str(model), "--dtype", "float16", *texts, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == str(out)
    assert not cache.exists()
    load_calibration(out, model_geometry(model, "float16"))
    other = tiny_llama(tmp_path / "other", seed=1)
    wrong = invoke("codecs", "--model", str(other), "--calibration", str(out))
    assert wrong.exit_code == 2
    assert "--calibration" in wrong.stderr
    right = ("--calibration", str(out), "--dtype", "float16", "--codecs", "tc4", "--prompts", "1", "--tokens", "4")
    assert invoke("codecs", "--model", str(model), *right).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("codecs", "--codecs", "q9"), 2, ["--codecs", "'q9'", "k6v4"]),
        (("codecs", "--dtype", "float32"), 2, ["--dtype", "float16"]),
        (("codecs", "--model", "/nowhere"), 1, ["/nowhere"]),
        (("codecs", "--tokens", "1000000", "--codecs", "raw"), 1, ["--tokens"]),
        (("codecs", "--codecs", "raw,"), 2, ["--codecs", "''"]),
        (("codecs", "--calibration", "/nowhere"), 2, ["--calibration", "pdserve calibrate", "no such file"]),
        (("codecs", "--calibration", "/"), 2, ["--calibration", "folder"]),
        (("codecs", "--json", "/"), 2, ["--json", "folder"]),
        (("codecs", "--breakeven", "--json", "{model}/config.json/x"), 2, ["--json", "config.json is not a folder"]),
        (("codecs", "--breakeven", "--codecs", "bexp3,q8"), 2, ["--codecs", "'q8'", "bexp-zstd"]),
        (("codecs", "--breakeven", "--prompts", "3"), 2, ["--prompts", "--breakeven"]),
        (("codecs", "--link-gbit", "3"), 2, ["--link-gbit", "--breakeven"]),
        (("calibrate", "--out", "/"), 2, ["--out", "folder"]),
        (("calibrate", "--dtype", "int8"), 2, ["--dtype", "bfloat16"]),
        (("calibrate", "--texts", "/nowhere"), 2, ["--texts", "/nowhere"]),
        (("calibrate", "--texts", "{model}/config.json"), 1, ["give at least"]),
    ],
)
def test_what_is_wrong_is_said(model: Path, arguments: tuple[str, ...], code: int, words: list[str]) -> None:
    given = [argument.replace("{model}", str(model)) for argument in arguments]
    if "--model" not in given:
        given += ["--model", str(model)]
    result = invoke(*given)
    assert result.exit_code == code, result.output
    assert all(word in result.stderr for word in words), result.stderr


def test_a_codec_that_cannot_pack_the_type_is_refused_or_named(model: Path) -> None:
    asked = invoke("codecs", "--model", str(model), "--dtype", "float16", "--codecs", "raw,bexp3")
    assert asked.exit_code == 2
    assert "bexp3 cannot pack float16" in asked.output
    rest = invoke("codecs", "--model", str(model), "--dtype", "float16", "--prompts", "1", "--tokens", "4")
    assert rest.exit_code == 0, rest.output
    assert "left out, since they cannot pack float16: bexp3" in rest.output
