"""The benchmarks of routers, with next to nothing to do: that they run, and come to figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import api, clients, router


def test_both_faces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "api.json"
    api.main(["--requests=3", "--connections=2", "--output=8", "--rate=200", f"--json={figures}"])
    measured = json.loads(figures.read_text())
    assert set(measured["ttft_ms"]) == set(measured["streamed"]) == {"grpc", "http"}
    for face in ("grpc", "http"):
        assert measured["ttft_ms"][face]["median"] > 0
        assert 1 <= measured["streamed"][face]["tokens_per_message"] <= 8
    assert "http adds" in capsys.readouterr().out


def test_relayed_tokens(tmp_path: Path) -> None:
    figures = tmp_path / "relay.json"
    router.main(["relay", "--streams=4", "--rate=200", "--seconds=1", f"--json={figures}"])
    measured = json.loads(figures.read_text())
    assert measured["messages"] <= measured["tokens"]
    assert measured["late"]["median"] > 0


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({}, ""),
        ({"ttft_ms": 80.0, "latency_ms": 900.0}, ""),  # the way to the client, and its own loop
        ({"requests": 9.0}, "requests"),
        ({"output_tokens": 639.0}, "output_tokens"),
        ({"itl_ms": 22.0}, "itl_ms"),
        ({"ttft_ms": 40.0}, "ttft_ms"),
        ({"latency_ms": 600.0}, "latency_ms"),
    ],
)
def test_numbers_of_a_load_generator_agree_or_not(changed: dict[str, float], word: str) -> None:
    ours = clients.Numbers(requests=10, output_tokens=640, ttft_ms=50.0, itl_ms=20.0, latency_ms=800.0)
    theirs = clients.Numbers(**{**vars_of(ours), **changed})
    found = clients.disagreements(theirs, ours)
    assert [line.partition(":")[0] for line in found] == ([word] if word else [])


def vars_of(numbers: clients.Numbers) -> dict[str, float]:
    return {name: getattr(numbers, name) for name in clients.Numbers.__dataclass_fields__}
