"""The benchmarks of routers, with next to nothing to do: that they run, and come to figures."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest

from benchmarks import api, clients, router
from pdcore.types import PriorityClass
from router.metrics import CallMetrics


def test_both_faces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "api.json"
    api.main(["--requests=3", "--connections=2", "--output=8", "--rate=200", f"--json={figures}"])
    measured = json.loads(figures.read_text())
    assert set(measured["ttft_ms"]) == set(measured["streamed"]) == {"grpc", "http"}
    for face in ("grpc", "http"):
        assert measured["ttft_ms"][face]["median"] > 0
        assert 1 <= measured["streamed"][face]["tokens_per_message"] <= 8
    assert "http adds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("grpc_ms", "http_ms", "words"),
    [
        (6.8, 7.79, "adds 0.99 ms to the median, within 1 ms"),
        (6.8, 7.81, "adds 1.01 ms to the median, above 1 ms"),
        (6.8, 5.8, "adds -1.00 ms to the median, within 1 ms"),
        (6.8, 500.0, "adds 493.20 ms to the median, above 1 ms"),
    ],
)
def test_what_http_may_add(grpc_ms: float, http_ms: float, words: str) -> None:
    """Medians count, whatever the others are."""
    times = {"grpc": {"median": grpc_ms, "p99": 90.0}, "http": {"median": http_ms, "p99": 9.0}}
    assert api.verdict(times) == f"http {words}"


def test_a_first_token_counts_from_when_it_was_asked_for() -> None:
    answer = api.Answer(sent=7.0, came=[(7.5, b"HTTP/1.1 200 OK\r\n\r\n"), (8.0, b'data: {"'), (9.0, b"data: {")])
    assert answer.first_token_s() == 1.0
    assert answer.messages() == (2, 15)


@pytest.mark.parametrize(("slow", "fast"), [("http", "grpc"), ("grpc", "http")])
def test_a_face_that_is_slow_is_seen_to_be(
    slow: str, fast: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that comes by it is taken 0.2 s later."""
    client, name = {"http": (api.Answer, "data_received"), "grpc": (api.BareCalls, "_take")}[slow]
    take = getattr(client, name)

    def late(self: object, came: object) -> None:
        asyncio.get_running_loop().call_later(0.2, take, self, came)

    monkeypatch.setattr(client, name, late)
    monkeypatch.setattr(api, "WARM_UP", 1)
    figures = tmp_path / "api.json"
    api.main(["--requests=5", "--connections=1", "--output=1", f"--json={figures}"])
    ms = {face: times["median"] for face, times in json.loads(figures.read_text())["ttft_ms"].items()}
    assert 150 <= ms[slow] - ms[fast] <= 700


def test_relayed_tokens(tmp_path: Path) -> None:
    figures = tmp_path / "relay.json"
    router.main(["relay", "--streams=4", "--rate=200", "--seconds=1", f"--json={figures}"])
    measured = json.loads(figures.read_text())
    assert measured["messages"] <= measured["tokens"]
    assert measured["late"]["median"] > 0


OURS = clients.Numbers(requests=10, output_tokens=640, ttft_ms=50.0, itl_ms=20.0, latency_ms=800.0)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({}, ""),
        ({"requests": 9.0}, "requests"),
        ({"requests": 11.0}, "requests"),
        ({"output_tokens": 639.0}, "output_tokens"),
        ({"output_tokens": 641.0}, "output_tokens"),
        # Either side of 5 %, and of the way to the client.
        ({"itl_ms": 19.1}, ""),
        ({"itl_ms": 18.9}, "itl_ms"),
        ({"itl_ms": 20.9}, ""),
        ({"itl_ms": 21.1}, "itl_ms"),
        ({"ttft_ms": 47.6}, ""),
        ({"ttft_ms": 47.4}, "ttft_ms"),
        ({"ttft_ms": 82.4}, ""),
        ({"ttft_ms": 82.6}, "ttft_ms"),
        ({"latency_ms": 761.0}, ""),
        ({"latency_ms": 759.0}, "latency_ms"),
        ({"latency_ms": 869.0}, ""),
        ({"latency_ms": 871.0}, "latency_ms"),
        ({"ttft_ms": 5000.0}, "ttft_ms"),
        ({"latency_ms": 80_000.0}, "latency_ms"),
        ({"ttft_ms": math.nan}, "ttft_ms"),
    ],
)
def test_numbers_of_a_load_generator_agree_or_not(changed: dict[str, float], word: str) -> None:
    found = clients.disagreements(replace(OURS, **changed), OURS)
    assert [line.partition(":")[0] for line in found] == ([word] if word else [])


def test_a_router_that_counts_nothing_agrees_with_nobody() -> None:
    theirs = clients.Numbers(10, 640, 5000, 20, 80_000)
    found = clients.disagreements(theirs, clients.Numbers(10, 640, 0, 20, 0))
    assert [line.partition(":")[0] for line in found] == ["ttft_ms", "latency_ms"]


def scraped(metrics: CallMetrics) -> str:
    """As a router writes what it has counted."""
    return generate_latest(SimpleNamespace(collect=metrics.families)).decode()  # type: ignore[arg-type]


def test_the_routers_numbers_are_those_of_its_metrics() -> None:
    """Of what came between two looks; a metric that is not there, or stands still, is an error and no 0."""
    metrics = CallMetrics()
    fresh = scraped(metrics)

    def count(ttft_s: float, itl_s: float) -> None:
        for priority in (PriorityClass.INTERACTIVE, PriorityClass.BATCH):
            metrics.written(priority, ttft_s, 1, first=True)
            metrics.written(priority, 3 * itl_s, 3, first=False)
            metrics.latency[priority].add(ttft_s + 3 * itl_s)
            metrics.ends[priority.name, "length"] += 1
            metrics.tokens[priority.name] += 4

    count(9.0, 9.0)
    before = scraped(metrics)
    count(0.05, 0.02)
    after = scraped(metrics)
    numbers = clients.counted(clients.Scrape(before), clients.Scrape(after))
    assert astuple(numbers) == pytest.approx((2, 8, 50.0, 20.0, 110.0))
    first = clients.counted(clients.Scrape(fresh), clients.Scrape(before))
    assert astuple(first) == pytest.approx((2, 8, 9000.0, 9000.0, 36_000.0))
    for name in (
        "pdserve_requests",
        "pdserve_generated_tokens",
        "pdserve_time_to_first_token_seconds",
        "pdserve_inter_token_latency_seconds",
        "pdserve_request_latency_seconds",
    ):
        other = after.replace(name, "pdserve_another")
        with pytest.raises(SystemExit, match=f"no metric {name}"):
            clients.counted(clients.Scrape(before), clients.Scrape(other))
    with pytest.raises(SystemExit, match="has counted nothing"):
        clients.counted(clients.Scrape(after), clients.Scrape(after))
