"""Real workers whose hops are encrypted: KV and registrations go over TLS, and no stranger is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.membership import MembershipServer
from decode_worker.worker import DecodeWorker
from kv_transfer.negotiation import Negotiation, Offer, negotiate
from kv_transfer.transports.catalog import available_transports
from pdcore.config import TransferConfig
from pdcore.errors import PdserveError
from pdcore.security import INTERNAL_NAME, InternalSecurity
from pdcore.types import Role
from prefill_worker.worker import PrefillWorker
from protos import (
    kv_pb2_grpc,
    membership_pb2,
    membership_pb2_grpc,
    routers_pb2,
    routers_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from security.credentials import NAME_OVERRIDE, channel_credentials
from security.files import Pem
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
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def security(authority: Authority) -> InternalSecurity:
    return authority.internal()


Pair = tuple[PrefillWorker, DecodeWorker]


@contextmanager
def running(
    model: Path, security: InternalSecurity, transfer: TransferConfig, controller: str = ""
) -> Iterator[Pair]:
    with ExitStack() as stack:
        made = []
        for role, kind in ((Role.PREFILL, PrefillWorker), (Role.DECODE, DecodeWorker)):
            config = worker_config(model, role, prefix_cache=False, controller=controller, transfer=transfer)
            worker = kind(replace(config, security=security))
            stack.callback(worker.stop)
            worker.start()
            made.append(worker)
        yield made[0], made[1]  # type: ignore[misc]


@pytest.fixture(scope="module")
def workers(model: Path, security: InternalSecurity) -> Iterator[Pair]:
    with running(model, security, TransferConfig(transport="grpc", codec="raw")) as made:
        yield made


def transfer_kv(workers: Pair, security: InternalSecurity) -> tuple[set[str], set[str]]:
    """Let a request go from one to the other; returns the transports that each says it may use."""
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
        assert p.welcome is not None
        assert d.welcome is not None
        return set(p.welcome.transports), set(d.welcome.transports)


def test_kv_travels_encrypted(workers: Pair, security: InternalSecurity) -> None:
    assert transfer_kv(workers, security) == ({"grpc"}, {"grpc"})


@pytest.mark.parametrize("plaintext", [False, True])
def test_what_is_not_encrypted_carries_no_kv_unless_it_may(
    model: Path, security: InternalSecurity, plaintext: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that a pair could use, which the router is told of, and which its ends agree upon."""
    agreed: list[tuple[bool, bool, tuple[str, ...]]] = []

    def spy(sender: Offer, receiver: Offer) -> Negotiation:
        outcome = negotiate(sender, receiver)
        agreed.append((sender.site.tls, receiver.site.tls, outcome.transports))
        return outcome

    monkeypatch.setattr("kv_transfer.receiver.negotiate", spy)
    loop = LoopThread()
    controller = MembershipServer("127.0.0.1", security=security)
    loop.run(controller.start())
    try:
        transfer = TransferConfig(transport="auto", allow_plaintext_kv=plaintext)
        with running(model, security, transfer, controller.address) as pair:
            available = set(available_transports())
            assert "collective" in available, "or nothing is left out here"
            allowed = available if plaintext else available & {"grpc", "shm"}
            assert transfer_kv(pair, security) == (allowed, allowed)
            ((sender, receiver, transports),) = agreed
            assert (sender, receiver) == (not plaintext, not plaintext)
            assert set(transports) <= {"grpc", "shm"}, "no group between CPUs either way"
            # Both came to the controller over TLS.
            registered = {member.worker.worker_id for member in controller.members().members}
            assert registered == {"prefill-0", "decode-0"}
    finally:
        loop.run(controller.stop())
        loop.close()


def test_strangers_are_not_served(workers: Pair, security: InternalSecurity) -> None:
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


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    """Of a call that answers at all, whether by one message or by the first of a stream: OK."""
    try:
        reply = call()
        if isinstance(reply, Iterator):
            next(reply, None)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_who_trusts_the_cluster_and_knows_its_secret_needs_a_certificate_of_it(
    workers: Pair, authority: Authority, security: InternalSecurity, tmp_path: Path
) -> None:
    """The other strangers refuse the cluster themselves, as they trust others; these leave it to the cluster."""
    _, decode = workers
    trusted = Path(authority.ca_file).read_bytes()
    own, foreign = (
        (Path(cert).read_bytes(), Path(key).read_bytes())
        for cert, key in (
            authority.issue("another", INTERNAL_NAME),
            Authority(tmp_path).issue("foreign", INTERNAL_NAME),
        )
    )
    loop = LoopThread()
    controller = MembershipServer("127.0.0.1", security=security)
    loop.run(controller.start())
    given = {"metadata": Internal(security).metadata, "timeout": 10}
    called = (
        (decode.address, worker_pb2_grpc.WorkerStub, "GetSteps", worker_pb2.GetStepsRequest()),
        (decode.address, worker_pb2_grpc.WorkerStub, "Session", iter(())),
        (decode.address, kv_pb2_grpc.KvStub, "Push", iter(())),
        (controller.address, membership_pb2_grpc.MembershipStub, "Register", iter(())),
        (controller.address, membership_pb2_grpc.MembershipStub, "Watch", membership_pb2.WatchRequest()),
        (controller.address, routers_pb2_grpc.RoutersStub, "Register", iter(())),
        (controller.address, routers_pb2_grpc.RoutersStub, "Claim", routers_pb2.ClaimRequest()),
        (controller.address, routers_pb2_grpc.RoutersStub, "Renew", routers_pb2.RenewClaimsRequest()),
        (controller.address, routers_pb2_grpc.RoutersStub, "Release", routers_pb2.ReleaseClaimRequest()),
    )
    try:
        for shown, welcome in (
            (Pem(authorities=trusted), False),
            (Pem(*foreign, trusted), False),
            (Pem(*own, trusted), True),
        ):
            for address, stub, method, argument in called:
                credentials = channel_credentials(shown)
                with grpc.secure_channel(address, credentials, ((NAME_OVERRIDE, INTERNAL_NAME),)) as channel:
                    code = code_of(partial(getattr(stub(channel), method), argument, **given))
                assert (code is not grpc.StatusCode.UNAVAILABLE) == welcome, (address, stub, method, code)
    finally:
        loop.run(controller.stop())
        loop.close()


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
