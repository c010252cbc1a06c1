"""A worker is stopped in the middle of a request, taken for dead, and wakes up: nothing that it does then counts.

It is stopped at named protocol steps (SIGSTOP to itself) and the request goes on elsewhere. As soon as the router has
given the worker up it is continued, while the replay is running: its late tokens, failures, frames, manifests and
commits change nothing. Its old session is over and what it held is free; it comes back with a new one. Workers run in
fp32, so tokens can be compared.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import grpc
import psutil
import pytest

from pdcore.config import SchedulerConfig, TransferConfig
from pdcore.faults import FaultPlan
from pdcore.types import Role
from protos import admin_pb2, admin_pb2_grpc
from tests.support.generate import Outcome, generate
from tests.support.local_cluster import LocalCluster
from tests.support.processes import WorkerProcess, eventually, worker_config
from tests.support.tiny_model import tiny_llama

LEASE_S = 3.0
MAX_TOKENS = 120
ROUTER = {"heartbeat_s": 0.25, "dead_after_s": 1.5, "max_replays": 10}
"""Soon taken for dead; on a busy machine that may happen to a worker that was not stopped, too."""
PROMPT = [(7 * i) % 250 + 1 for i in range(150)]
POINTS = (
    "prefill.after_chunk",  # P: frames are under way
    "prefill.before_manifest",  # P: the first token is with the client, the manifest will come late
    "decode.before_commit",  # D: it will start to decode when it wakes
    "decode.after_report",  # D: tokens are on their way to the router
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model = tiny_llama(tmp_path_factory.mktemp("model"))
    folder = tmp_path_factory.mktemp("stopping")
    for point in POINTS:
        (folder / point).touch()  # disarmed
    options = {
        "prefix_cache": False,  # the same prompt must take the whole way, every time
        "faults": tuple(FaultPlan(point, action="stop", once_file=str(folder / point)) for point in POINTS),
        "scheduler": SchedulerConfig(max_num_batched_tokens=64, prefill_chunk_tokens=64),
        "transfer": TransferConfig(lease_s=LEASE_S, frame_tokens=32, frame_bytes=16384, send_timeout_s=3.0),
    }
    configs = [worker_config(model, role, i, **options) for role in (Role.PREFILL, Role.DECODE) for i in range(2)]
    with LocalCluster(model, folder, configs, forked=True, **ROUTER) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(cluster: LocalCluster) -> list[int]:
    outcome = generate(cluster.address, PROMPT, MAX_TOKENS)
    assert outcome.error is None, outcome
    assert len(outcome.tokens) == MAX_TOKENS
    return outcome.tokens


def _stopped(cluster: LocalCluster) -> list[WorkerProcess]:
    return [w for w in cluster.workers.values() if psutil.Process(w.pid).status() == psutil.STATUS_STOPPED]


def _status(cluster: LocalCluster) -> dict[str, admin_pb2.WorkerStatus]:
    with grpc.insecure_channel(cluster.address) as channel:
        status = admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=30.0)
    return {worker.worker.worker_id: worker for worker in status.workers}


@pytest.mark.parametrize("point", POINTS)
def test_a_stopped_worker_that_wakes_changes_nothing(point: str, cluster: LocalCluster, expected: list[int]) -> None:
    outcomes: list[Outcome] = []
    (cluster.folder / point).unlink()
    thread = threading.Thread(target=lambda: outcomes.append(generate(cluster.address, PROMPT, MAX_TOKENS)))
    thread.start()
    (worker,) = eventually(lambda: _stopped(cluster), 20.0, f"{point} is reached")
    name, incarnation = worker.config.worker_id, worker.incarnation
    eventually(lambda: not _status(cluster)[name].connected, 20.0, "the router gives it up")
    worker.signal(signal.SIGCONT)
    thread.join(60.0)
    assert len(outcomes) == 1, "the request has not ended"
    (outcome,) = outcomes
    assert outcome.error is None, (outcome.error, outcome.details)
    assert outcome.tokens == expected
    assert outcome.end is not None
    assert outcome.end.timeline.replays >= 1
    # It has let go of everything, and serves again as what it was, in a new session.
    cluster.wait_connected()
    assert _status(cluster)[name].worker.incarnation == incarnation
    cluster.assert_baseline(LEASE_S + 2.0)
    assert generate(cluster.address, PROMPT, MAX_TOKENS).tokens == expected
