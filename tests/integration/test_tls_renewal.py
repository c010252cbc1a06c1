"""Other authorities of clients, while a router runs: who was let in by the old ones is not any more."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pdcore.errors import Unavailable
from pdcore.security import ClientTls
from router.client import AsyncClient, Sampling
from tests.integration.test_tls import health
from tests.support.certificates import Authority
from tests.support.null_cluster import NullCluster, pair
from tests.support.tiny_model import tiny_llama

FOUR = Sampling(max_tokens=4)
LOOKED_S = 1.1
"""Files are looked at once a second."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


async def test_another_authority_of_clients_counts_from_the_next_connection_on(model: Path, tmp_path: Path) -> None:
    """Over gRPC and HTTP: whoever has a certificate of the old one is out, and of the new one in."""
    server, old, new = (Authority(tmp_path / name) for name in ("server", "old", "new"))
    clients = tmp_path / "clients.crt"
    shutil.copy(old.ca_file, clients)
    public = replace(server.public(), client_ca_file=str(clients))
    before, after = (replace(authority.client(), ca_file=server.ca_file) for authority in (old, new))

    async def let_in(tls: ClientTls) -> list[bool]:
        """By gRPC, and by HTTP."""
        found = [True, True]
        async with AsyncClient(cluster.router.address, tls=tls) as client:
            try:
                await client.complete("x", FOUR, timeout_s=5.0)
            except Unavailable:
                found[0] = False
        try:
            await health(cluster.router.http_address, tls)
        except httpx.TransportError:
            found[1] = False
        return found

    async with NullCluster(model, pair(), tls=public, client_tls=before, http_port=0) as cluster:
        assert [await let_in(tls) for tls in (before, after)] == [[True, True], [False, False]]
        shutil.copy(new.ca_file, clients)
        await asyncio.sleep(LOOKED_S)
        nobody = ClientTls(server.ca_file)
        assert [await let_in(tls) for tls in (before, after, nobody)] == [
            [False, False],
            [True, True],
            [False, False],
        ]


def say_hello(
    address: str, context: ssl.SSLContext, hello: bytes, session: ssl.SSLSession | None = None
) -> ssl.SSLSession | None:
    """The session of a connection on which the server answered `hello`; None if it did not, or closed it.

    Args:
        session: to resume, of the same context. AssertionError if a server that answers begins another one.
    """
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=10.0) as plain,
            context.wrap_socket(plain, server_hostname=host, session=session) as encrypted,
        ):
            encrypted.sendall(hello)
            if not encrypted.recv(4096):
                return None
            assert encrypted.session_reused == (session is not None)
            return encrypted.session
    except (ssl.SSLError, ConnectionError):
        return None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_no_session_outlives_the_authority_under_which_it_began(
    model: Path, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """Whoever resumes a session shows no certificate: the one that it showed at first must still be good."""
    server, old, new = (Authority(tmp_path / name) for name in ("server", "old", "new"))
    clients = tmp_path / "clients.crt"
    shutil.copy(old.ca_file, clients)
    public = replace(server.public(), client_ca_file=str(clients))
    mine = replace(old.client(), ca_file=server.ca_file)
    async with NullCluster(model, pair(), tls=public, client_tls=mine, http_port=0) as cluster:
        faces = []
        for address, protocol, hello in (
            (cluster.router.address, "h2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))),
            (cluster.router.http_address, "http/1.1", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"),
        ):
            context = ssl.create_default_context(cafile=mine.ca_file)
            context.maximum_version = version
            context.load_cert_chain(mine.cert_file, mine.key_file)
            context.set_alpn_protocols([protocol])
            begun = await asyncio.to_thread(say_hello, address, context, hello)
            assert begun is not None
            resumed = await asyncio.to_thread(say_hello, address, context, hello, begun)
            assert resumed is not None
            faces.append((address, context, hello, resumed))
        shutil.copy(new.ca_file, clients)
        await asyncio.sleep(LOOKED_S)
        for face in faces:
            assert await asyncio.to_thread(say_hello, *face) is None
