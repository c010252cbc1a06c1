"""Real workers whose hops are encrypted: KV goes over TLS, and nobody without the secret is served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.membership import MembershipServer
from decode_worker.worker import DecodeWorker
from pdcore.config import TransferConfig
from pdcore.errors import PdserveError
from pdcore.security import InternalSecurity
from pdcore.types import Role
from prefill_worker.worker import PrefillWorker
from protos import kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from security.internal import Internal
from tests.support.certificates import SECRET, Authority
from tests.support.local_cluster import LoopThread
from tests.support.processes import worker_config
from tests.support.session_client import SessionClient
from tests.support.specs import prompt_of, spec_of
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> InternalSecurity:
    return Authority(tmp_path_factory.mktemp("authority")).internal()


@pytest.fixture(scope="module")
def workers(model: Path, security: InternalSecurity) -> Iterator[tuple[PrefillWorker, DecodeWorker]]:
    with ExitStack() as stack:
        made = []
        for role, kind in ((Role.PREFILL, PrefillWorker), (Role.DECODE, DecodeWorker)):
            config = worker_config(model, role, prefix_cache=False)
            transfer = replace(config.transfer, transport="grpc", codec="raw")
            worker = kind(replace(config, security=security, transfer=transfer))
            stack.callback(worker.stop)
            worker.start()
            made.append(worker)
        yield made[0], made[1]  # type: ignore[misc]


def test_kv_travels_encrypted(workers: tuple[PrefillWorker, DecodeWorker], security: InternalSecurity) -> None:
    prefill, decode = workers
    internal = Internal(security)
    with (
        SessionClient(prefill.address, "r", internal=internal) as p,
        SessionClient(decode.address, "r", internal=internal) as d,
    ):
        two, one = spec_of(prompt_of(50)), spec_of(prompt_of(50))
        reply = d.reserve(two)
        p.prefill(two, reply.granted)
        d.generate(one)
        assert d.wait_finished(two.key.request_id) == d.wait_finished(one.key.request_id)
        (stats,) = [notice.kv_received for notice in d.notices if notice.HasField("kv_received")]
        assert stats.raw_bytes > 0
        welcome = d.welcome
        assert welcome is not None
        assert list(welcome.transports) == ["grpc"]


def test_strangers_are_not_served(workers: tuple[PrefillWorker, DecodeWorker], security: InternalSecurity) -> None:
    _, decode = workers
    steps = worker_pb2.GetStepsRequest()
    for stranger, code in (
        (replace(security, tls=None), grpc.StatusCode.UNAVAILABLE),
        (replace(security, secret=""), grpc.StatusCode.UNAUTHENTICATED),
        (replace(security, secret=SECRET[::-1]), grpc.StatusCode.UNAUTHENTICATED),
    ):
        internal = Internal(stranger)
        with internal.channel(decode.address, ()) as channel:
            stub, kv = worker_pb2_grpc.WorkerStub(channel), kv_pb2_grpc.KvStub(channel)
            given = {"metadata": internal.metadata, "timeout": 10}
            for call in (
                partial(stub.GetSteps, steps, **given),
                lambda stub=stub, given=given: next(stub.Session(iter(()), **given)),
                lambda kv=kv, given=given: next(kv.Push(iter(()), **given)),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                assert refused.value.code() is code
            if code is grpc.StatusCode.UNAUTHENTICATED:  # as Kubernetes asks, which has no secret
                told = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), **given)
                assert told.status == health_pb2.HealthCheckResponse.SERVING


def test_a_worker_without_the_secret_cannot_join(model: Path) -> None:
    loop = LoopThread()
    controller = MembershipServer("127.0.0.1", security=InternalSecurity(secret=SECRET))
    loop.run(controller.start())
    config = worker_config(model, Role.DECODE)
    rogue = DecodeWorker(replace(config, controller=controller.address, transfer=TransferConfig()))
    try:
        with pytest.raises(PdserveError, match="the controller refused this worker: the cluster's secret is missing"):
            rogue.start()
        assert not controller.members().members
    finally:
        rogue.stop()
        loop.run(controller.stop())
        loop.close()
