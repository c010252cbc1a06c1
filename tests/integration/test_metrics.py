"""What a router tells Prometheus, beside what its clients saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain

from pdcore.errors import InvalidRequest
from pdcore.types import PriorityClass, Role
from router.client import Sampling
from router.metrics import BUCKETS_S, Buckets
from tests.support.null_cluster import NullCluster, until
from tests.support.null_worker import NullWorker
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("metrics"))


class Scrape:
    """The samples of a scrape, by name; ``of`` sums those whose labels fit."""

    def __init__(self, text: str, parse: object = plain) -> None:
        self._samples = [sample for family in parse(text) for sample in family.samples]  # type: ignore[operator]

    def of(self, name: str, **labels: str) -> float:
        found = [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"{name} {labels} is not there"
        return sum(found)

    def quantile(self, name: str, share: float, labels: Mapping[str, str]) -> float:
        """The bound below which so many are, as Prometheus would say without interpolation."""
        count = self.of(f"{name}_count", **labels)
        bounds = [
            (float(s.labels["le"]), s.value)
            for s in self._samples
            if s.name == f"{name}_bucket" and labels.items() <= s.labels.items()
        ]
        return min(bound for bound, below in bounds if below >= share * count)


async def scrape(cluster: NullCluster, accept: str = "") -> Scrape:
    assert cluster.router.metrics is not None
    content_type, text = await cluster.router.metrics.render(accept)
    openly = "openmetrics" in accept
    assert content_type.startswith("application/openmetrics-text" if openly else "text/plain")
    return Scrape(text.decode(), open_metrics if openly else plain)


def test_a_bucket_holds_what_is_not_above_its_bound() -> None:
    buckets = Buckets()
    buckets.add(BUCKETS_S[0])
    buckets.add(BUCKETS_S[0] * 1.01, 3)
    buckets.add(1e9)
    bounds, total = buckets.cumulated()
    assert [count for _, count in bounds[:2]] == [1.0, 4.0]
    assert bounds[-2][1] == 4.0
    assert bounds[-1] == ("+Inf", 5.0)
    assert total == pytest.approx(BUCKETS_S[0] * 4.03 + 1e9)


async def test_latencies_are_those_that_clients_see(model: Path) -> None:
    workers = [NullWorker("p0", Role.PREFILL), NullWorker("d0", Role.DECODE, step_s=0.02)]
    async with NullCluster(model, workers) as cluster:
        first, gaps = [], []
        for number in range(5):
            sent = last = time.monotonic()
            got = 0
            async for event in cluster.client.generate([number + 1], Sampling(max_tokens=8), priority="interactive"):
                now = time.monotonic()
                if not got:
                    first.append(now - sent)
                elif event.token_ids:
                    gaps += [(now - last) / len(event.token_ids)] * len(event.token_ids)
                got += len(event.token_ids)
                last = now
        seen = await scrape(cluster)
        mine = {"class": "interactive"}
        assert seen.of("pdserve_time_to_first_token_seconds_count", **mine) == 5
        assert seen.of("pdserve_time_to_first_token_seconds_sum", **mine) <= sum(first)
        assert seen.of("pdserve_inter_token_latency_seconds_count", **mine) == len(gaps) == 5 * 7
        # The same tokens, timed at both ends of a connection.
        assert seen.of("pdserve_inter_token_latency_seconds_sum", **mine) == pytest.approx(sum(gaps), rel=0.3)
        assert seen.quantile("pdserve_inter_token_latency_seconds", 0.5, mine) >= 0.5 * sorted(gaps)[len(gaps) // 2]
        assert seen.of("pdserve_time_per_output_token_seconds_count", **mine) == 5
        assert seen.of("pdserve_request_latency_seconds_count", **mine) == 5
        assert seen.of("pdserve_time_to_first_token_seconds_count", **{"class": "batch"}) == 0


async def test_requests_are_counted_by_how_they_end(model: Path) -> None:
    workers = [NullWorker("p0", Role.PREFILL), NullWorker("d0", Role.DECODE, step_s=0.01)]
    async with NullCluster(model, workers) as cluster:
        await cluster.client.complete([3, 4, 5], Sampling(max_tokens=4))
        await cluster.client.samples([3, 4, 5], Sampling(max_tokens=2, n=3))
        with pytest.raises(InvalidRequest):
            await cluster.client.complete([3], Sampling(max_tokens=1, temperature=-1.0))
        stream = cluster.client.generate([7], Sampling(max_tokens=4000, ignore_eos=True))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await cluster.empty()
        await until(lambda: cluster.dispatcher.running == 0, "nothing runs")
        for accept in ("", "application/openmetrics-text; version=1.0.0"):
            seen = await scrape(cluster, accept)
            assert seen.of("pdserve_requests_total", end="length") == 4
            assert seen.of("pdserve_requests_total", end="cancelled") == 1
            assert seen.of("pdserve_requests_refused_total", error="invalid_request") == 1
            assert seen.of("pdserve_generated_tokens_total") >= 4 + 3 * 2
            assert seen.of("pdserve_prompt_tokens_total") == 3 + 3 + 1
            assert seen.of("pdserve_decisions_total") == 3
            assert seen.of("pdserve_decisions_total", mode="disaggregated", reason="prefill_pool_serves") == 3
            assert seen.of("pdserve_degraded") == 0
            assert seen.of("pdserve_worker_up", worker="d0", role="decode") == 1
            assert seen.of("pdserve_worker_total_blocks") > 0
            assert seen.of("pdserve_requests_waiting") == seen.of("pdserve_requests_running") == 0
            assert seen.of("pdserve_router_info", router_id="router-0") == 1
            assert seen.of("process_cpu_seconds_total") > 0


async def test_what_the_router_counts_is_under_its_name(model: Path) -> None:
    async with NullCluster(model, [NullWorker("d0", Role.DECODE)]) as cluster:
        await cluster.client.complete([3], Sampling(max_tokens=1))
        counters, admission = cluster.dispatcher.counters, cluster.dispatcher.admission
        counters.replays, counters.failed_transfers, counters.rebuilds, admission.rate_limited = 3, 4, 5, 6
        batch = admission.counters[PriorityClass.BATCH]
        batch.shed_full, batch.shed_late, batch.shed_waiting = 7, 8, 9
        seen = await scrape(cluster)
        assert seen.of("pdserve_decisions_total", mode="local", reason="prefill_pool_empty") == 1
        assert seen.of("pdserve_degraded") == 1
        counts = ("replays", "failed_transfers", "rebuilds", "rate_limited")
        assert [seen.of(f"pdserve_{name}_total") for name in counts] == [3, 4, 5, 6]
        why = {"class": "batch"}
        assert [seen.of("pdserve_shed_total", reason=r, **why) for r in ("full", "late", "waiting")] == [7, 8, 9]
        assert seen.of("pdserve_shed_total") == 24


async def test_nothing_that_a_client_makes_up_becomes_a_label(model: Path) -> None:
    async with NullCluster(model, [NullWorker("a0", Role.AGGREGATED)]) as cluster:
        for number in range(3):
            await cluster.client.complete([3], Sampling(max_tokens=1), request_id=f"id-{number}", tenant=f"t{number}")
        assert cluster.router.metrics is not None
        _, text = await cluster.router.metrics.render()
        assert b"id-0" not in text
        assert b't0"' not in text


async def test_a_scrape_keeps_nobody_waiting(model: Path) -> None:
    async with NullCluster(model, [NullWorker("a0", Role.AGGREGATED)]) as cluster:
        assert cluster.router.metrics is not None
        done = await asyncio.gather(*(cluster.router.metrics.render() for _ in range(8)))
        assert len({text.count(b"\n") for _, text in done}) == 1
