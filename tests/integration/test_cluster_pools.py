"""What keeps the workers alive, and the actor shells, without a Ray."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from ray.exceptions import RaySystemError

from cluster import pools
from cluster.config import ClusterConfig
from cluster.config_file import load_config
from cluster.pools import WorkerPools
from cluster.ray_session import RaySession
from decode_worker.actor import DecodeActor
from pdcore.errors import ConfigError, PdserveError
from prefill_worker.actor import PrefillActor
from worker.hosted import HostedInfo


class ScriptedWorker:
    """A worker that dies once; `ready` and then each `create` go as told (None: well)."""

    worker_id = "decode-0"

    def __init__(self, ready: Sequence[Exception | None], create: Sequence[Exception | None]) -> None:
        self._ready, self._create = list(ready), list(create)
        self._died = False
        self.dies = True
        self.stops = 0
        self.kills: list[bool] = []
        self.killed = asyncio.Event()

    def create(self) -> None:
        error = self._create.pop(0)
        if error is not None:
            raise error

    async def ready(self, timeout_s: float) -> HostedInfo:
        error = self._ready.pop(0)
        if error is not None:
            raise error
        return HostedInfo(self.worker_id, "incarnation", "127.0.0.1:1", 17)

    async def watch(self) -> str:
        if self._died or not self.dies:
            await self.killed.wait()
            self.killed.clear()
        self._died = True
        return "killed"

    def kill(self, *, restart: bool) -> None:
        self.kills.append(restart)
        self.killed.set()

    async def drain(self, timeout_s: float) -> bool:
        await asyncio.sleep(timeout_s)  # nobody answers
        return False

    async def stop(self) -> None:
        self.stops += 1


async def kept(
    worker: ScriptedWorker, last: str, monkeypatch: pytest.MonkeyPatch, registered: Callable[[str], bool] = bool
) -> list[str]:
    """Start the worker, let it die, and return what is reported, up to the line with `last` in it."""
    monkeypatch.setattr(pools, "_FIRST_BACKOFF_S", 0.01)
    config = ClusterConfig()
    lines: list[str] = []
    seen = asyncio.Event()

    def report(line: str) -> None:
        lines.append(line)
        if last in line:
            seen.set()

    cluster = WorkerPools([], config, RaySession(True, True, "127.0.0.1", {}, None), report, registered)
    cluster.workers = [worker]  # type: ignore[list-item]
    await cluster.start(10.0)
    try:
        async with asyncio.timeout(20.0):
            await seen.wait()
    finally:
        await cluster.stop()
    return lines


async def test_worker_comes_back_though_its_name_is_taken_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ConfigError("name", "pdserve", "a name that no cluster in this Ray has yet")
    worker = ScriptedWorker(
        ready=[None, PdserveError("gone for good"), TimeoutError(), None],
        create=[None, taken, RaySystemError("the GCS is away"), None, None],
    )
    lines = await kept(worker, "is back", monkeypatch)
    problems = [line.rpartition("s: ")[2] for line in lines if "is not back" in line]
    assert problems[0] == "gone for good"
    assert "a name that no cluster" in problems[1]
    assert "the GCS is away" in problems[2]
    assert problems[3] == "not ready after 120 s"
    assert lines[-1] == "decode-0 is back at 127.0.0.1:1 (pid 17)"
    assert worker.stops == 5  # after each failure, so that nothing of the last try is left, and at the end


async def test_a_bug_in_a_start_is_no_reason_to_start_it_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ScriptedWorker(ready=[None, KeyError("a bug"), None], create=[None, None])
    lines = await kept(worker, "is back", monkeypatch)
    assert "'a bug'" in lines[-2]


async def test_failed_keeper_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ScriptedWorker(ready=[None], create=[None])

    async def failing() -> str:
        raise KeyError("a bug")

    monkeypatch.setattr(worker, "watch", failing)
    lines = await kept(worker, "watched no longer", monkeypatch)
    assert "decode-0" in lines[-1]
    assert "a bug" in lines[-1]


async def test_a_worker_that_hangs_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_LOOK_S", 0.01)
    monkeypatch.setattr(pools, "_HUNG_AFTER", 0.01)
    worker = ScriptedWorker(ready=[None, None], create=[None])
    worker.dies = False
    lines = await kept(worker, "is back", monkeypatch, registered=lambda _: bool(worker.kills))
    assert worker.kills == [True]
    assert "decode-0 has been silent" in lines[-3]


async def test_a_drain_does_not_wait_for_a_worker_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ScriptedWorker(ready=[None], create=[None])
    worker.dies = False
    session = RaySession(True, True, "127.0.0.1", {}, None)
    cluster = WorkerPools([], ClusterConfig(), session, lambda line: None, lambda worker_id: False)
    cluster.workers = [worker]  # type: ignore[list-item]
    await cluster.start(10.0)
    async with asyncio.timeout(5.0):
        assert await cluster.drain(30.0), "its requests are elsewhere"
    assert worker.kills == [False]
    await cluster.stop()


@pytest.mark.parametrize("logs", [True, False])
def test_a_ray_that_does_not_come_up_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logs: bool
) -> None:
    """Ray says so by a bare Exception."""

    def slow(*, _temp_dir: str, **_: object) -> None:
        if logs:
            Path(_temp_dir, "raylet.out").write_text("")
        raise Exception("The current node timed out during startup.")

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("cluster.ray_session.ray.init", slow)
    monkeypatch.setattr("cluster.ray_session.ray.shutdown", lambda: None)
    config = load_config(None, {"ray.address": "local"})
    try:
        with pytest.raises(PdserveError, match="cannot start a local Ray: The current node timed out") as told:
            RaySession.open(config, log_to_driver=False)
        assert [f"Ray's logs are in {folder}" in str(told.value) for folder in tmp_path.iterdir()] == [True] * logs
        assert "second try" in str(told.value)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # `open` has a thread to itself, outside of tests


@pytest.mark.parametrize("shell", [PrefillActor, DecodeActor])
def test_actor_that_could_not_start_shuts_down_quietly(shell) -> None:  # type: ignore[no-untyped-def]
    plain = shell.__ray_metadata__.modified_class
    object.__new__(plain).__ray_shutdown__()
