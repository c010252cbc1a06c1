"""What `pdserve serve` says while it drains: how many requests still run on its routers, and how long they have."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from cluster import controller as cluster_controller
from cluster.config import ClusterConfig
from cluster.controller import ClusterController
from cluster.routers import HostedRouter, RouterProcesses, Routers
from pdcore.types import Role
from router.client import AsyncClient, Sampling
from tests.support.null_cluster import until
from tests.support.null_worker import NullWorker
from tests.support.router_fleet import RouterFleet
from tests.support.tiny_model import tiny_llama


@pytest.mark.parametrize("hosted", [True, False], ids=["hosted", "in processes"])
async def test_draining_says_what_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosted: bool) -> None:
    monkeypatch.setattr(cluster_controller, "_DRAIN_NEWS_S", 0.3)
    ended = asyncio.Event()

    async def hold(point: str, key: object, index: int) -> None:
        if point == "token" and index == 4:
            await ended.wait()

    worker = NullWorker("aggregated-0", Role.AGGREGATED, hook=hold)
    lines: list[str] = []
    async with RouterFleet(tiny_llama(tmp_path / "tiny"), [worker], count=0) as fleet:
        members = fleet.controller.routers
        routers: Routers = HostedRouter(fleet.router_config(0))
        if not hosted:
            configs = [fleet.router_config(number) for number in range(2)]
            routers = RouterProcesses(configs, lines.append, listed=members.listed, died=members.died)
        controller = ClusterController(ClusterConfig(drain_timeout_s=60.0), lines.append)
        controller._routers, controller._membership = routers, fleet.controller
        try:
            await routers.start()
            await until(lambda: worker.sessions == len(routers.addresses), "sessions of all routers")
            async with AsyncClient(routers.addresses) as client:  # by turns
                answers = [
                    asyncio.ensure_future(client.complete([n], Sampling(max_tokens=8), request_id=f"r{n}"))
                    for n in range(3)
                ]
                await until(lambda: len(worker.held) == 3, "they run")
                draining = asyncio.create_task(controller.drain())
                await until(lambda: any("running," in line for line in lines), "what runs is said")
                ended.set()
                await asyncio.gather(*answers)
            assert await draining
            said = len(lines)
            await asyncio.sleep(0.5)
            assert len(lines) == said, "not after the end"
        finally:
            await routers.stop()
    told = [line for line in lines if line.startswith("draining: ")]
    assert told[0] == "draining: running requests get 60 s"
    match = re.fullmatch(r"draining: 3 running, (\d+) s left", told[1])
    assert match, lines
    assert 40 <= int(match[1]) <= 60
    assert lines[-1].startswith("drained (")
