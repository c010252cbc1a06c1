"""The Python client where connections come and go, or never come about: what it does, and what it says."""

from __future__ import annotations

import asyncio
import time
from concurrent import futures

import grpc

from pdcore.errors import Unavailable
from protos import generation_pb2_grpc
from router.client import AsyncClient, Client
from tests.support.scripted_cluster import ScriptedCluster


def serving(port: int = 0) -> tuple[grpc.Server, int]:
    """A router at this port, or at a free one, which is returned with it."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServicer_to_server(ScriptedCluster(), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
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
