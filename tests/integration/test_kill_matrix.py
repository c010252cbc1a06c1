"""Kill a decode worker, a prefill worker or the client at every named protocol step, then at random moments.

The survivors' free blocks return to the baseline within a lease, and the request ends exactly once: with the tokens
of the undisturbed run, or with an error that says why. Workers run in fp32, so tokens can be compared.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pdcore.config import SchedulerConfig, TransferConfig
from pdcore.faults import FAULT_POINTS, FaultPlan
from pdcore.types import Role
from tests.support.generate import Outcome, generate
from tests.support.local_cluster import LocalCluster
from tests.support.processes import REPOSITORY, eventually, worker_config
from tests.support.tiny_model import tiny_llama

LEASE_S = 4.0
MAX_TOKENS = 40
PROMPT = [(7 * i) % 250 + 1 for i in range(150)]
STALL_S = 0.5


class Traps:
    """Fault plans at every point, each disarmed while its file exists."""

    def __init__(self, folder: Path, action: str) -> None:
        folder.mkdir()
        self._files = {point: folder / point for point in FAULT_POINTS}
        self.plans = tuple(
            FaultPlan(point, action=action, seconds=STALL_S, once_file=str(file))  # type: ignore[arg-type]
            for point, file in self._files.items()
        )
        for point in FAULT_POINTS:
            self.disarm(point)

    def arm(self, point: str) -> None:
        self._files[point].unlink()

    def disarm(self, point: str) -> None:
        self._files[point].touch()

    def sprung(self, point: str) -> bool:
        return self._files[point].exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def _cluster(model: Path, folder: Path, traps: Traps) -> LocalCluster:
    options = {
        "prefix_cache": False,  # the same prompt must take the whole way, every time
        "faults": traps.plans,
        "scheduler": SchedulerConfig(max_num_batched_tokens=64, prefill_chunk_tokens=64),
        "transfer": TransferConfig(lease_s=LEASE_S, frame_tokens=32, frame_bytes=16384, send_timeout_s=3.0),
    }
    configs = [worker_config(model, role, i, **options) for role in (Role.PREFILL, Role.DECODE) for i in range(2)]
    return LocalCluster(model, folder, configs, forked=True)


@pytest.fixture(scope="module")
def killing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, Traps]]:
    folder = tmp_path_factory.mktemp("killing")
    traps = Traps(folder / "traps", "kill")
    with _cluster(model, folder, traps) as cluster:
        yield cluster, traps


@pytest.fixture(scope="module")
def stalling(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, Traps]]:
    folder = tmp_path_factory.mktemp("stalling")
    traps = Traps(folder / "traps", "stall")
    with _cluster(model, folder, traps) as cluster:
        yield cluster, traps


def _expected(cluster: LocalCluster) -> list[int]:
    outcome = generate(cluster.address, PROMPT, MAX_TOKENS)
    assert outcome.end is not None, outcome
    assert len(outcome.tokens) == MAX_TOKENS
    return outcome.tokens


def _in_background(cluster: LocalCluster) -> tuple[threading.Thread, list[Outcome]]:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(generate(cluster.address, PROMPT, MAX_TOKENS)))
    thread.start()
    return thread, outcomes


def _check(thread: threading.Thread, outcomes: list[Outcome], expected: list[int]) -> None:
    thread.join(60.0)
    assert len(outcomes) == 1, "the request has not ended"
    outcome = outcomes[0]
    assert outcome.error is None, (outcome.error, outcome.details)
    assert outcome.tokens == expected


def _restart_the_dead(cluster: LocalCluster) -> None:
    dead = [worker for worker in cluster.workers.values() if not worker.running]
    for worker in dead:
        worker.stop()
        worker.begin()
    for worker in dead:
        worker.wait_ready()
    cluster.wait_connected()


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_a_worker_dies_at(point: str, killing: tuple[LocalCluster, Traps]) -> None:
    cluster, traps = killing
    expected = _expected(cluster)
    traps.arm(point)
    thread, outcomes = _in_background(cluster)
    eventually(lambda: traps.sprung(point), 20.0, f"{point} is reached")
    eventually(lambda: any(not w.running for w in cluster.workers.values()), 10.0, "a worker died of it")
    _check(thread, outcomes, expected)
    cluster.assert_baseline(LEASE_S + 2.0)
    _restart_the_dead(cluster)


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_the_client_dies_at(point: str, stalling: tuple[LocalCluster, Traps]) -> None:
    cluster, traps = stalling
    traps.arm(point)
    client = subprocess.Popen(
        [sys.executable, "-m", "tests.support.generate", cluster.address, ",".join(map(str, PROMPT)), "400"],
        cwd=REPOSITORY,
    )
    eventually(lambda: traps.sprung(point), 20.0, f"{point} is reached")
    client.kill()
    client.wait(10.0)
    cluster.assert_baseline(LEASE_S + 2.0)
    assert _expected(cluster)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_worker_dies_at_random_moments(role: Role, killing: tuple[LocalCluster, Traps]) -> None:
    cluster, _ = killing
    expected = _expected(cluster)
    generator = random.Random(20261129)
    for _ in range(5):
        pairs = [_in_background(cluster) for _ in range(4)]
        time.sleep(generator.uniform(0.0, 0.4))
        generator.choice(cluster.of_role(role)).kill()
        for thread, outcomes in pairs:
            _check(thread, outcomes, expected)
        cluster.assert_baseline(LEASE_S + 2.0)
        _restart_the_dead(cluster)


def test_the_client_dies_at_random_moments(killing: tuple[LocalCluster, Traps]) -> None:
    cluster, _ = killing
    generator = random.Random(7)
    from protos import generation_pb2_grpc
    from tests.support.generate import request_of

    for _ in range(10):
        with grpc.insecure_channel(cluster.address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            streams = [stub.Generate(request_of(PROMPT, 400), timeout=60.0) for _ in range(3)]
            time.sleep(generator.uniform(0.0, 0.3))
            for stream in streams:
                stream.cancel()
        cluster.assert_baseline(LEASE_S + 2.0)
