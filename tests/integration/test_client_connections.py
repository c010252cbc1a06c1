"""The Python client where connections come and go, or never come about: what it does, and what it says."""

from __future__ import annotations

import asyncio
import http.server
import socket
import threading
import time
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from pdcore.errors import Unavailable
from pdcore.security import ClientTls
from protos import generation_pb2_grpc
from router.client import AsyncClient, Client
from tests.support.certificates import Authority
from tests.support.scripted_cluster import ScriptedCluster


def serving(port: int = 0, credentials: grpc.ServerCredentials | None = None) -> tuple[grpc.Server, int]:
    """A router at this port, or at a free one, which is returned with it."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServicer_to_server(ScriptedCluster(), server)
    address = f"127.0.0.1:{port}"
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    server.start()
    return server, port


async def test_a_restarted_router_is_found_again_at_once() -> None:
    server, port = serving()
    address = f"127.0.0.1:{port}"
    with Client(address) as client:
        async with AsyncClient(address) as other:

            async def works() -> bool:
                try:
                    await asyncio.to_thread(client.model)
                    await other.model()
                except Unavailable:
                    return False
                return True

            assert await works()
            server.stop(0).wait(5)
            # gRPC's own waits would by then be of several seconds each: it would try again after 9 s.
            gone = time.monotonic()
            while time.monotonic() - gone < 6.0:
                assert not await works()
                await asyncio.sleep(0.1)
            server, _ = serving(port)
            back = time.monotonic()
            while not await works():
                assert time.monotonic() - back < 2.4
                await asyncio.sleep(0.05)
            server.stop(0).wait(5)


# -- what is said ---------------------------------------------------------------------------------------------------


async def said(address: str, tls: ClientTls | None = None) -> str:
    """What both clients say of a router with which there is no connection."""
    with Client(address, tls=tls) as client, pytest.raises(Unavailable) as caught:
        client.complete("x")
    assert caught.value.reason == "NO_CONNECTION"
    assert caught.value.request_id
    async with AsyncClient(address, tls=tls) as other:
        with pytest.raises(Unavailable) as again:
            await other.complete("x")
    assert str(again.value) == str(caught.value)
    return str(caught.value)


class SilentHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


async def test_why_there_is_no_connection(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert await said(address) == (
            f"no connection with {address}: nothing listens there; a router may be starting, or have ended"
        )
    assert await said("nowhere.invalid:1") == "no connection with nowhere.invalid:1: its name is not known"
    server, port = serving()
    try:
        assert "it speaks no TLS" in await said(f"https://127.0.0.1:{port}")
    finally:
        server.stop(0).wait(5)
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SilentHandler)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    try:
        assert "it does not speak gRPC" in await said(f"127.0.0.1:{web.server_port}")
    finally:
        web.shutdown()
        web.server_close()
        thread.join()


async def test_why_there_is_no_connection_with_one_that_has_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    mine, ours = authority.public(), authority.client()
    pair = (Path(mine.key_file).read_bytes(), Path(mine.cert_file).read_bytes())
    server, port = serving(0, grpc.ssl_server_credentials([pair]))
    address = f"127.0.0.1:{port}"
    try:
        with Client(address, tls=ClientTls(ours.ca_file)) as client:
            assert client.model().model.name == "tiny"
        assert "as one with TLS does when it is called in plain text" in await said(address)
        assert "an authority that is not trusted" in await said(f"https://{address}")
        assert "another name" in await said(address, ClientTls(ours.ca_file, server_name="else.where"))
    finally:
        server.stop(0).wait(5)
