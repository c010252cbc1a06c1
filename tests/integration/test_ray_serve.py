"""A whole cluster on a Ray of its own, through the command line: serve, generate, a worker's death, drain.
Every hop of it is encrypted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import grpc
import psutil
import pytest

from pdcore.security import ClientTls, InternalSecurity, InternalTls
from protos import admin_pb2, admin_pb2_grpc, worker_pb2_grpc
from router.client import Client, Sampling
from security.client import client_channels
from security.internal import Internal
from tests.support.certificates import Authority
from tests.support.processes import REPOSITORY, eventually
from tests.support.serve_process import ServeProcess
from tests.support.tiny_model import tiny_llama

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> ClientTls:
    return ClientTls(authority.ca_file)


@pytest.fixture(scope="module")
def inside(authority: Authority) -> InternalTls:
    return authority.internal_tls()


@pytest.fixture
def served(
    tmp_path: Path, authority: Authority, inside: InternalTls, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServeProcess]:
    monkeypatch.setenv("PDSERVE_TLS_CA", authority.ca_file)  # for the commands that are its clients
    model = tiny_llama(tmp_path / "tiny")
    ends = {"public": asdict(authority.public()), "internal": asdict(inside)}
    files = [f"tls.{end}.{key}={value}" for end, keys in ends.items() for key, value in keys.items() if value]
    process = ServeProcess(
        "--model", str(model), "--dtype", "float32", "--grpc-port", "0", "--http-port", "0",
        "--ray-address", "local",
        "--routers", "2", "--set", "prefill.num_blocks=256", "--set", "decode.num_blocks=256",
        *(word for file in files for word in ("--set", file)),
    )  # fmt: skip
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop()


def client(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cluster", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    return out


FIXED = ("--temperature", "0", "--ignore-eos", "--json", "--max-tokens")


def generate(address: str, tokens: int) -> dict[str, object]:
    command = client("generate", "The tide", "--address", address, *FIXED, str(tokens))
    data: dict[str, object] = json.loads(finish(command))
    return data


def tokens(addresses: str, count: int, tls: ClientTls) -> list[int]:
    """Of the same request as `generate`'s, without a process for it."""
    with Client(addresses.split(","), tls=tls) as one:
        answer = one.complete("The tide", Sampling(temperature=0, ignore_eos=True, max_tokens=count), timeout_s=60.0)
    return list(answer.token_ids)


def listening(family: list[psutil.Process]) -> set[str]:
    """Addresses on which these processes take connections."""
    return {
        connection.laddr.ip
        for process in family
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def ray_folders(family: list[psutil.Process]) -> set[Path]:
    """Where Ray keeps its logs and sockets, as its own processes have been told."""
    words = " ".join(word for process in family for word in process.cmdline())
    return {Path(tempfile.gettempdir(), name) for name in re.findall(r"pdserve-ray-\w+", words)}


def test_cluster_serves_survives_a_death_and_drains(
    served: ServeProcess, inside: InternalTls, tls: ClientTls
) -> None:
    def status(addresses: str, router: int = 0) -> admin_pb2.GetStatusReply:
        (channel,) = client_channels(addresses.split(",")[router], tls, ())
        with channel:
            reply: admin_pb2.GetStatusReply = admin_pb2_grpc.AdminStub(channel).GetStatus(
                admin_pb2.GetStatusRequest(), timeout=30.0
            )
        return reply

    def workers(address: str) -> dict[str, admin_pb2.WorkerStatus]:
        return {item.worker.worker_id: item for item in status(address).workers}

    address = served.address
    assert all(each.startswith("grpcs://") for each in address.split(","))
    first = generate(address, 20)
    assert first["completion_tokens"] == 20
    assert (first["prefill_worker"], first["decode_worker"]) == ("prefill-0", "decode-0")
    assert first["kv"]["raw_bytes"] > 0

    # The workers are Ray actors in processes of their own.
    before = workers(address)
    assert set(before) == {"prefill-0", "decode-0"}
    pids = {item.worker.pid for item in before.values()}
    assert len(pids) == 2
    assert pids <= {process.pid for process in served.family()}

    # Both routers know each other and both workers, and give the same answer.
    one, other = address.split(",")
    names = {router.router.router_id for router in status(address, 1).routers}
    assert names == {"pdserve-router-0", "pdserve-router-1"}
    assert tokens(other, 20, tls) == tokens(one, 20, tls) == first["token_ids"]

    # Nobody outside this machine is to reach a Ray of our own: it lets everybody in.
    assert all(host.removeprefix("::ffff:").startswith("127.") for host in listening(served.family()))

    # Nor does anybody on it get a worker to work for him: its port is encrypted, and the secret that it wants is this
    # cluster's.
    for theirs, code in ((None, grpc.StatusCode.UNAVAILABLE), (inside, grpc.StatusCode.UNAUTHENTICATED)):
        internal = Internal(InternalSecurity(tls=theirs))
        with (
            internal.channel(before["decode-0"].worker.address, ()) as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            next(worker_pb2_grpc.WorkerStub(channel).Session(iter(()), timeout=10))
        assert refused.value.code() is code

    # Who comes to a router in plain text is no line at the terminal either.
    with grpc.insecure_channel(one.removeprefix("grpcs://")) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)

    # Ray starts a dead one again under its name, and it joins the cluster again; what it was doing goes on there.
    whole = tokens(address, 400, tls)
    cut = client("generate", "The tide", "--address", address, *FIXED, "400")
    eventually(lambda: workers(address)["decode-0"].load.running, 30, "the request to decode")
    os.kill(before["decode-0"].worker.pid, signal.SIGKILL)
    served.wait_for(r"decode-0 has died", 30)
    served.wait_for(r"decode-0 is back", 60)
    eventually(lambda: "decode-0" in workers(address), 30, "the new worker in the router's list")
    eventually(lambda: workers(address)["decode-0"].connected, 30, "the router's session with the new worker")
    after = workers(address)
    assert after["decode-0"].worker.incarnation != before["decode-0"].worker.incarnation
    assert after["prefill-0"].worker.incarnation == before["prefill-0"].worker.incarnation
    assert json.loads(finish(cut))["token_ids"] == whole
    assert tokens(address, 20, tls) == first["token_ids"]

    # A router that dies is started again on its port; the other one serves meanwhile.
    (dead,) = (router.router.pid for router in status(one).routers if router.router.router_id == "pdserve-router-1")
    os.kill(dead, signal.SIGKILL)
    assert generate(f"{other},{one}", 20)["token_ids"] == first["token_ids"]
    served.wait_for(r"router-1 is back", 60)

    # What runs at SIGTERM may finish; nothing new is taken; nothing is left behind.
    family = served.family()
    folders = ray_folders(family)
    assert folders
    running = client(
        "generate", "The tide", "--address", address, "--ignore-eos", "--max-tokens", "1200", "--json",
        "--request-id", "last",
    )  # fmt: skip
    # On whichever router answered first.
    eventually(lambda: any(status(address, n).running_requests for n in (0, 1)), 30, "the request to run")
    served.signal_group(signal.SIGTERM)
    served.wait_for("draining", 10)
    late = client("generate", "The tide", "--address", address)
    late.communicate(timeout=60)
    assert late.returncode in (1, 75)  # refused, or already gone
    assert json.loads(finish(running))["completion_tokens"] == 1200
    assert served.wait() == 0
    assert served.said.rstrip().endswith("stopped")
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    assert "andshake" not in served.output
    # What is said after READY has its time, but for what programs look for; what others log is not among it.
    starting, ready, news = re.split(r"(?m)^(READY grpc=.*\n)", served.said)
    assert not re.search(r"(?m)^\d\d:", starting), served.said
    assert ready
    events = [line for line in news.splitlines() if not line.startswith(("drained (", "stopped"))]
    assert all(re.match(r"\d\d:\d\d:\d\d \w", line) for line in events), news
    assert re.search(r"(?m)^\d\d:\d\d:\d\d decode-0 has died", news)
    assert re.search(r"(?m)^drained \(\d", news)
    logged = served.output.replace("\r", "")
    assert re.search(r"(?m)^\(DecodeActor pid=\d+\) ", logged), logged
    assert "A worker died" in logged
    assert "\x1b" not in logged
    assert "[repeated" not in logged
    assert not [folder for folder in folders if folder.exists()]


def test_a_worker_that_cannot_start_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"no calibration")
    process = ServeProcess(
        "--model", str(tiny_llama(tmp_path / "tiny")), "--grpc-port", "0", "--http-port", "0",
        "--ray-address", "local", "--set", "prefill.num_blocks=64", "--set", "decode.num_blocks=64",
        "--set", f"transfer.calibration={broken}",
    )  # fmt: skip
    try:
        assert process.wait() == 2, process.output
    finally:
        process.stop()
    (error,) = (line for line in process.output.splitlines() if "error" in line.lower())
    assert error.startswith(f"error: transfer.calibration: '{broken}' is not allowed; allowed: a file made")
    assert "Traceback" not in process.output
    assert "SIGABRT" not in process.output


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_during_the_start_kills_all_of_it(tmp_path: Path, signum: signal.Signals) -> None:
    process = ServeProcess(
        "--model", str(tiny_llama(tmp_path / "tiny")), "--grpc-port", "0", "--http-port", "0",
        "--ray-address", "local", "--set", "prefill.num_blocks=64", "--set", "decode.num_blocks=64",
    )  # fmt: skip
    family: list[psutil.Process] = []
    try:
        process.wait_for("Ray is up", 60)
        family = process.family()
        assert len(family) > 3
        process.signal(signum)
        process.wait_for("ending what was started", 2)
        family = process.family() or family
        process.signal(signum)
        assert process.wait(3.0) == 130
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not alive
    finally:
        process.stop()
        for left in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
    assert process.said.rstrip().endswith("told again to end: killed")
    assert "Traceback" not in process.output


def test_the_next_start_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    flags = ("--model", str(tiny_llama(tmp_path / "tiny")), "--grpc-port", "0", "--http-port", "0")
    processes: list[ServeProcess] = []
    families: list[psutil.Process] = []

    def start() -> set[Path]:
        """The folder of a new one, once its Ray is up."""
        process = ServeProcess(*flags, "--ray-address", "local")
        processes.append(process)
        process.wait_for("Ray is up", 60)
        families.extend(process.family())
        return ray_folders(process.family())

    try:
        killed = start()
        processes[0].signal(signal.SIGKILL)
        processes[0].wait(10.0)
        assert all(folder.exists() for folder in killed)
        living = start()
        assert not any(folder.exists() for folder in killed)
        processes[1].signal(signal.SIGTERM)
        assert processes[1].wait() == 130
        assert not any(folder.exists() for folder in living)
    finally:
        for process in processes:
            process.stop()
        for left in families:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def test_one_signal_during_the_start_ends_it_in_order(tmp_path: Path) -> None:
    process = ServeProcess(
        "--model", str(tiny_llama(tmp_path / "tiny")), "--grpc-port", "0", "--http-port", "0",
        "--ray-address", "local", "--set", "prefill.num_blocks=64", "--set", "decode.num_blocks=64",
    )  # fmt: skip
    try:
        process.wait_for("starting a local Ray", 60)
        eventually(lambda: ray_folders(process.family()), 60, "Ray's processes")
        folders = ray_folders(process.family())
        process.signal(signal.SIGINT)
        process.wait_for("ending what was started", 10)
        assert process.wait() == 130
    finally:
        process.stop()
    assert process.said.rstrip().endswith("stopped")
    assert "Traceback" not in process.output
    assert not [folder for folder in folders if folder.exists()]
