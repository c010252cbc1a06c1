"""A cluster whose every hop is encrypted, both ends known to each other; and whoever else knocks."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.membership import MembershipServer
from pdcore.config import RouterConfig
from pdcore.config_json import to_json
from pdcore.errors import AlreadyRunning, ConfigError, Unavailable
from pdcore.grpc_log import quiet_grpc
from pdcore.security import INTERNAL_NAME, ClientTls, InternalSecurity
from pdcore.types import Role
from protos import kv_pb2_grpc, membership_pb2, membership_pb2_grpc, routers_pb2_grpc, worker_pb2_grpc
from router.client import AsyncClient, Client, Sampling
from security.internal import Internal
from security.secret import SECRET_METADATA
from tests.integration.test_router_flow import Gate
from tests.support.certificates import SECRET, Authority
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.null_worker import MODEL, NullWorker
from tests.support.processes import REPOSITORY
from tests.support.router_fleet import RouterFleet
from tests.support.tiny_model import tiny_llama

SERVING = membership_pb2.WORKER_STATE_SERVING
FOUR = Sampling(max_tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture
async def cluster(model: Path, authority: Authority) -> AsyncIterator[NullCluster]:
    security = authority.internal()
    async with NullCluster(
        model,
        pair(security=security),
        security=security,
        tls=authority.public(mutual=True),
        client_tls=authority.client(),
        http_port=0,
    ) as cluster:
        yield cluster


async def test_every_hop_encrypted_and_mutual(cluster: NullCluster, authority: Authority) -> None:
    answer = await cluster.client.complete("The tide", FOUR)
    assert len(answer.token_ids) == 4
    assert answer.end.timeline.mode == "disaggregated"
    assert cluster["p0"].sessions == cluster["d0"].sessions == 1

    def served() -> str:
        with Client(f"https://{cluster.router.address}", tls=authority.client()) as client:
            return client.model().model.name

    assert await asyncio.to_thread(served) == MODEL.name


async def test_who_is_not_let_in_at_the_public_end(
    cluster: NullCluster, authority: Authority, stranger: Authority
) -> None:
    address = cluster.router.address
    nobody = ClientTls(authority.ca_file)
    foreign = replace(stranger.client(), ca_file=authority.ca_file)
    distrustful = replace(authority.client(), ca_file=stranger.ca_file)
    misled = replace(authority.client(), server_name="pdserve.example")
    for tls in (None, nobody, foreign, distrustful, misled):
        async with AsyncClient(address, tls=tls) as client:
            with pytest.raises(Unavailable):
                await client.complete("x", FOUR, timeout_s=5.0)
    await cluster.client.complete("x", FOUR)


async def test_who_is_not_let_in_inside(cluster: NullCluster, authority: Authority, stranger: Authority) -> None:
    right = authority.internal()
    for security, code in (
        (replace(right, tls=None), grpc.StatusCode.UNAVAILABLE),
        (stranger.internal(), grpc.StatusCode.UNAVAILABLE),
        (replace(right, secret=""), grpc.StatusCode.UNAUTHENTICATED),
        (replace(right, secret="another secret, as long as the first"), grpc.StatusCode.UNAUTHENTICATED),
    ):
        internal = Internal(security)
        async with (
            internal.aio_channel(cluster["d0"].address, ()) as worker,
            internal.aio_channel(cluster.membership.address, ()) as controller,
        ):
            for method in (
                worker_pb2_grpc.WorkerStub(worker).Session,
                kv_pb2_grpc.KvStub(worker).Push,
                membership_pb2_grpc.MembershipStub(controller).Register,
                routers_pb2_grpc.RoutersStub(controller).Register,
            ):
                assert await method(metadata=internal.metadata).code() is code
    assert cluster["d0"].sessions == 1


async def test_routers_ask_the_controller_for_keys(model: Path, authority: Authority) -> None:
    """Their own calls: the list of routers, and claims, renewed and given back."""
    security = authority.internal()
    gate = Gate("token", index=1)
    worker = NullWorker("aggregated-0", Role.AGGREGATED, security=security, hook=gate)
    async with RouterFleet(model, [worker], security=security, claim_ttl_s=6.0) as fleet:
        (one, two), claims = fleet.clients, fleet.controller.routers.claims
        first = asyncio.ensure_future(one.complete("x", FOUR, idempotency_key="k", request_id="first"))
        await gate.reached.wait()
        (claim,) = claims._claims.values()
        given = claim.expires
        await until(lambda: claim.expires > given, "it is renewed")
        with pytest.raises(AlreadyRunning, match="'first' on router-0"):
            await two.complete("x", FOUR, idempotency_key="k")
        gate.opened.set()
        await first
        assert not claims.holders(0.0)


async def test_a_controller_is_not_to_be_reached_in_plain_text(authority: Authority) -> None:
    with pytest.raises(ConfigError, match=r"tls.internal.*ray.allow_insecure_listen: true"):
        await MembershipServer("0.0.0.0", security=InternalSecurity(secret=SECRET)).start()
    for security in (authority.internal(), InternalSecurity(secret=SECRET, allow_insecure_listen=True)):
        controller = MembershipServer("0.0.0.0", security=security)
        await controller.start()
        await controller.stop()


async def health(address: str, tls: ClientTls) -> int:
    """Status of the HTTP interface's answer. Raises httpx.TransportError."""
    context = ssl.create_default_context(cafile=tls.ca_file)
    if tls.cert_file:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    async with httpx.AsyncClient(verify=context) as client:
        return (await client.get(f"https://{address}/health")).status_code


async def test_http(cluster: NullCluster, authority: Authority, stranger: Authority) -> None:
    address, mine = cluster.router.http_address, authority.client()
    assert await health(address, mine) == 200
    for tls in (
        ClientTls(mine.ca_file),
        replace(stranger.client(), ca_file=mine.ca_file),
        replace(mine, ca_file=stranger.ca_file),
    ):
        with pytest.raises(httpx.TransportError):
            await health(address, tls)
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"http://{address}/health")


async def pdserve(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments), prog_name="pdserve")
    return result.exit_code, result.stdout, result.stderr


async def test_the_command_line(
    cluster: NullCluster, authority: Authority, stranger: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, mine, theirs = cluster.router.address, authority.client(), stranger.client()
    who = ["--tls-cert", mine.cert_file, "--tls-key", mine.key_file]
    flags = ["--address", address, "--tls-ca", mine.ca_file]
    code, out, err = await pdserve("generate", "x", "--max-tokens", "4", *flags, *who)
    assert code == 0, err
    assert out.strip()
    code, out, err = await pdserve("status", "--json", *flags, *who)
    assert code == 0, err
    assert json.loads(out)["tls"] is True
    code, out, err = await pdserve("status", *flags, *who)
    assert code == 0, err
    assert f"\nHTTP at https://{cluster.router.http_address}\n" in out

    monkeypatch.setattr("cluster.cli.client.CONNECT_S", 0.3)
    for arguments, expected, words in (
        (
            ["--address", address],
            1,
            "it speaks TLS, and was called in plain text; give the file of its",
        ),
        ([*flags[:2], "--tls-ca", theirs.ca_file], 1, "that it is from by --tls-ca FILE"),
        ([*flags, *who, "--tls-name", "other.example"], 1, "its certificate is not trusted: Hostname mismatch"),
        ([*flags, *who, "--tls-name", "other.example"], 1, "by --tls-name NAME"),
        (flags, 1, "as if it wanted a certificate of ours; give one that it knows by --tls-cert FILE"),
        ([*flags, "--tls-cert", theirs.cert_file, "--tls-key", theirs.key_file], 1, "another certificate of ours"),
        ([*flags, "--tls-cert", mine.cert_file], 2, "--tls-key"),
        ([*flags, "--tls-cert", mine.cert_file, "--tls-key", theirs.key_file], 2, "--tls-key: "),
        (["--address", f"http://{address}", "--tls-ca", mine.ca_file], 2, "https://HOST:PORT"),
    ):
        code, _, err = await pdserve("status", *arguments)
        assert code == expected, err
        assert words in " ".join(err.split()), err


async def test_a_command_speaks_for_grpc(cluster: NullCluster, stranger: Authority) -> None:
    """Its own lines in the log would come first, and say less."""
    command = ("-m", "cluster", "status", "--address", cluster.router.address, "--tls-ca", stranger.ca_file)
    environment = {name: value for name, value in os.environ.items() if name not in ("GRPC_VERBOSITY", "GRPC_TRACE")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=environment, stderr=asyncio.subprocess.PIPE, cwd=REPOSITORY
    )
    _, told = await asyncio.wait_for(process.communicate(), 60.0)
    assert process.returncode == 1
    assert told.startswith(b"error: no connection with "), told
    assert b"its certificate is not trusted: " in told


async def test_a_router_is_quiet_about_callers_in_plain_text(
    tmp_path: Path, model: Path, authority: Authority
) -> None:
    """gRPC's core would write a line for each of them."""
    config = RouterConfig("r", str(model), "tiny", "127.0.0.1:1", grpc_port=0, http_port=-1, tls=authority.public())
    path = tmp_path / "router.json"
    path.write_text(to_json(config))
    environment = {name: value for name, value in os.environ.items() if name not in ("GRPC_VERBOSITY", "GRPC_TRACE")}
    told = {}
    for name, more in (("quiet", {}), ("heard", {"GRPC_VERBOSITY": "DEBUG"})):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", str(path)), env=environment | more, cwd=REPOSITORY,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            ready = await asyncio.wait_for(process.stdout.readline(), 60.0)
            address = json.loads(ready.removeprefix(b"READY "))["address"]
            for _ in range(3):
                async with grpc.aio.insecure_channel(address) as channel:
                    call = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
                    assert await call.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            process.terminate()
            _, told[name] = await asyncio.wait_for(process.communicate(), 30.0)
    assert b"Handshake failed" not in told["quiet"], told["quiet"]
    assert b"Handshake failed" in told["heard"]


def test_who_wants_to_hear_grpc_does() -> None:
    for before, after in (
        ({}, "NONE"),
        ({"GRPC_VERBOSITY": "DEBUG"}, "DEBUG"),
        ({"GRPC_TRACE": "http"}, None),
    ):
        environment = dict(before)
        quiet_grpc(environment)
        assert environment.get("GRPC_VERBOSITY") == after


async def test_a_rogue_worker_is_refused() -> None:
    """With the secret alone, as where the network is trusted: no member, and no list of them."""
    controller = MembershipServer("127.0.0.1", security=InternalSecurity(secret=SECRET))
    await controller.start()
    rogue = await NullWorker("d0", Role.DECODE).start()
    right = (SECRET_METADATA, SECRET)
    try:
        async with grpc.aio.insecure_channel(controller.address) as channel:
            stub = membership_pb2_grpc.MembershipStub(channel)
            for metadata in ((), ((SECRET_METADATA, SECRET + "x"),), (right, right)):
                call = stub.Register(metadata=metadata)
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "secret_file" in await call.details()
                watch = stub.Watch(membership_pb2.WatchRequest(), metadata=metadata)
                assert await watch.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not controller.members().members
            call = stub.Register(metadata=(right,))
            await call.write(membership_pb2.Registration(worker=rogue.description, state=SERVING))
            await until(lambda: bool(controller.members().members), "the worker with the secret is a member")
            call.cancel()
    finally:
        await rogue.stop()
        await controller.stop()


async def test_renewed_certificates_are_used_without_a_restart(model: Path, tmp_path: Path) -> None:
    """A cluster goes over to another authority, and none of its processes is started again."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    security, public = old.internal(), old.public()
    assert security.tls is not None
    async with NullCluster(model, pair(security=security), security=security, tls=public, http_port=0) as cluster:
        Path(old.ca_file).write_bytes(Path(old.ca_file).read_bytes() + Path(new.ca_file).read_bytes())
        for tls, issued in (
            (public, new.issue("outer", "127.0.0.1")),
            (security.tls, new.issue("inner", INTERNAL_NAME)),
        ):
            shutil.copy(issued[0], tls.cert_file)
            shutil.copy(issued[1], tls.key_file)
        await asyncio.sleep(1.1)  # files are looked at once a second
        assert await health(cluster.router.http_address, ClientTls(new.ca_file)) == 200
        async with AsyncClient(cluster.router.address, tls=ClientTls(new.ca_file)) as client:
            await client.complete("x", FOUR)
            # The router opens a session with a worker that has nothing but the new certificate.
            await cluster["d0"].stop()
            await cluster.replace(NullWorker("d0", Role.DECODE, security=security))
            await cluster.connected()
            await client.complete("x", FOUR)
