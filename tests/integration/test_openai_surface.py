"""What the outside may do to a router's HTTP port: bad requests, slow ones, slow readers; and what a stop does."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from pdcore.types import Role
from router.openai import connection
from tests.integration.test_router_flow import Gate
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.null_worker import NullWorker
from tests.support.tiny_model import tiny_llama

LIMIT = 1 << 20
ONE = b'{"prompt":"x","max_tokens":1}'
CLOSE = b"connection: close\r\n"


pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy.:DeprecationWarning")


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """What routers run on."""
    return uvloop.EventLoopPolicy()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[NullCluster]:
    async with NullCluster(model, pair(), http_port=0, max_message_bytes=LIMIT) as running:
        yield running


def post(body: bytes, headers: bytes = CLOSE, path: bytes = b"/v1/completions") -> bytes:
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n"
    return head % (path, headers, len(body)) + body


async def ask(cluster: NullCluster, data: bytes, timeout_s: float = 20.0) -> bytes:
    """All that comes back until the router closes the connection."""
    host, port = cluster.router.http_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    got = b""
    try:
        async with asyncio.timeout(timeout_s):
            writer.write(data)
            while piece := await reader.read(1 << 16):
                got += piece
    except ConnectionError:
        pass  # what was sent behind its answer is not wanted
    finally:
        writer.close()
    return got


def answer(got: bytes) -> tuple[int, dict[str, object]]:
    """Status and error of the last response."""
    head, _, body = got.rpartition(b"\r\n\r\n")
    return int(head.rpartition(b"HTTP/1.1 ")[2][:3]), json.loads(body).get("error", {})


async def test_bodies_that_are_no_requests(cluster: NullCluster) -> None:
    for body in (
        b"",
        b"{",
        b"[]",
        b'{"prompt":NaN}',
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","temperature":1e999}',
        b'{"prompt":"x","seed":%s}' % (b"9" * 40),
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\xff"}',
        b'{"prompt":' + b"[" * 100_000,
        b'{"prompt":"x","metadata":%s1%s}' % (b'{"a":' * 300, b"}" * 300),
        b'{"prompt":"x","logit_bias":{"1":1e300}}',
        b'{"prompt":"x","a\\u0000{b}":1}',
        b'{"prompt":[true]}',
        b'{"prompt":[[]]}',
        b'{"prompt":"x","request_id":"\\u00e9"}',
    ):
        status, error = answer(await ask(cluster, post(body)))
        assert status == 400, body[:80]
        assert error["type"] == "invalid_request_error"
    assert not any(worker.commands for worker in cluster.workers.values())


async def test_heads_that_are_no_requests(cluster: NullCluster) -> None:
    for data, wanted in (
        (b"\x00\x01garbage\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.0\r\naccept: application/openmetrics-text; version=a.b\r\n\r\n", 200),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 600_000, 431),  # no end in sight
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x-a: aaaaaaaaa\r\n" * 4000 + b"\r\n", 431),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
        (b"HEAD /v1/completions HTTP/1.0\r\n\r\n", 405),
        (b"OPTIONS * HTTP/1.0\r\n\r\n", 404),
        (b"GET /v1/models/%ff%00 HTTP/1.0\r\n\r\n", 404),
        (post(ONE).replace(b"application/json", b"text/plain"), 415),
        (post(ONE, CLOSE + b"x-request-id: no good\r\n"), 400),
        (post(ONE, CLOSE + b"idempotency-key: \xe9\r\n"), 400),
    ):
        got = await ask(cluster, data)
        assert got.startswith(b"HTTP/1.1 %d " % wanted), (data[:60], got[:200])
        assert re.search(rb"(?i)\r\nx-request-id: [0-9a-z-]{16}", got), got[:200]  # also where nothing could be read


async def test_a_large_body_is_refused_before_it_is_read(cluster: NullCluster) -> None:
    declared = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    chunk = b"%x\r\n%s\r\n" % (1 << 16, b"x" * (1 << 16))
    for data in (
        post(b"x" * (2 * LIMIT)),  # one that reads nothing before it has sent all
        declared + b"transfer-encoding: chunked\r\n\r\n" + 2 * (LIMIT >> 16) * chunk + b"0\r\n\r\n",
    ):
        status, error = answer(await ask(cluster, data))
        assert (status, error["code"]) == (413, "request_too_large")
    # One that waits to be told.
    expecting = declared + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % (100 * LIMIT)
    host, port = cluster.router.http_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(expecting)
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()
    # Just below the limit it is read, and refused for what it says.
    body = b'{"prompt":"%s"}' % (b"x" * (LIMIT - 20))
    status, error = answer(await ask(cluster, post(body)))
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")


async def test_requests_in_forms_that_clients_send(cluster: NullCluster) -> None:
    upgrade = b"connection: Upgrade, HTTP2-Settings, close\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    pieces = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (10, ONE[:10], len(ONE) - 10, ONE[10:])
    chunked = post(b"", CLOSE + b"transfer-encoding: chunked\r\n").replace(b"content-length: 0\r\n", b"") + pieces
    for data, responses in (
        (post(ONE), 1),
        (post(ONE, upgrade), 1),  # Java's client, without TLS
        (post(ONE, CLOSE + b"expect: 100-continue\r\n"), 2),
        (post(ONE, b"") + b"\r\n" + post(ONE), 2),
        (chunked, 1),
        (post(ONE, b"").replace(b"HTTP/1.1", b"HTTP/1.0"), 1),
    ):
        got = await ask(cluster, data)
        assert got.count(b"HTTP/1.1 ") == responses, (data, got)
        assert answer(got)[0] == 200
    asks = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    several = await ask(cluster, 400 * asks + b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert several.count(b"HTTP/1.1 200 ") == 401  # one inside the other they went too deep
    upgraded = await ask(cluster, post(ONE, upgrade.replace(b", close", b"")) + post(ONE))
    assert upgraded.count(b"HTTP/1.1 200 ") == 2


async def test_who_sends_nothing_does_not_stay(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    monkeypatch.setattr("router.openai.exchange.BODY_S", 0.3)
    async with NullCluster(model, pair(), http_port=0) as cluster:
        half = post(ONE, b"")[:-5]
        for data in (b"", b"GET /health HT", half):
            got = await ask(cluster, data)
            assert got.startswith(b"HTTP/1.1 408 "), data
            assert b"\r\nx-request-id: " in got
        # Between requests a connection may be idle for longer.
        async with httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as client:
            for _ in range(2):
                response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
                assert response.status_code == 200
                await asyncio.sleep(0.5)
            (kept,) = client._transport._pool.connections  # type: ignore[attr-defined]
            assert kept.is_idle()


async def test_a_stream_outlives_what_is_sent_behind_its_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    gate = Gate("token", index=1)
    workers = pair()
    workers[1].hook = gate
    async with NullCluster(model, workers, http_port=0) as cluster:
        asking = asyncio.ensure_future(ask(cluster, post(b'{"prompt":"x","max_tokens":3}') + b"\r\n"))
        await gate.reached.wait()
        await asyncio.sleep(0.5)
        gate.opened.set()
        assert answer(await asking)[0] == 200


async def test_a_client_that_reads_nothing_is_cut_off_and_waits_alone(model: Path) -> None:
    workers = [NullWorker("a0", Role.AGGREGATED, num_blocks=40_000)]
    options = {"http_port": 0, "client_stall_timeout_s": 1.0, "token_window": 16}
    async with NullCluster(model, workers, **options) as cluster:
        host, port = cluster.router.http_address.rsplit(":", 1)
        mute = socket.socket()
        mute.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        mute.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(mute, (host, int(port)))
        body = b'{"prompt":"hello","max_tokens":4000,"n":4,"stream":true,"request_id":"mute"}'
        await loop.sock_sendall(mute, post(body))
        job = workers[0].held

        def all_pause() -> bool:
            return len(job) == 4 and all(one.window <= 0 for one in job.values())

        await until(all_pause, "its samples have used up their windows")
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            other = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 100})
        assert other.json()["usage"]["completion_tokens"] == 100
        await cluster.empty()
        got = b""
        try:
            while piece := await loop.sock_recv(mute, 1 << 16):
                got += piece
        except ConnectionResetError:
            pass
        assert got.startswith(b"HTTP/1.1 200 ")
        assert b"[DONE]" not in got
        assert not got.endswith(b"0\r\n\r\n"), "it was cut off, and the client can tell"
        mute.close()


async def test_more_connections_than_allowed_are_refused(model: Path) -> None:
    async with NullCluster(model, pair(), http_port=0, max_connections=2) as cluster:
        base = f"http://{cluster.router.http_address}"
        async with httpx.AsyncClient(base_url=base) as first, httpx.AsyncClient(base_url=base) as second:
            for client in (first, second):
                assert (await client.get("/version")).status_code == 200
            status, error = answer(await ask(cluster, b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"))
            assert (status, error["code"]) == (503, "too_many_connections")
            assert (await first.get("/version")).status_code == 200  # who is in is not bothered
        async with asyncio.timeout(20.0):
            while not (await ask(cluster, b"GET /version HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 "):
                await asyncio.sleep(0.02)  # until the two are gone


async def test_a_stop_ends_what_runs_and_listens_no_more(model: Path) -> None:
    gate = Gate("token", index=1)
    workers = pair()
    workers[1].hook = gate
    async with NullCluster(model, workers, http_port=0) as cluster:
        host, port = cluster.router.http_address.rsplit(":", 1)
        idle = await asyncio.open_connection(host, int(port))
        stream = asyncio.ensure_future(ask(cluster, post(b'{"prompt":"x","max_tokens":9,"stream":true}')))
        whole = asyncio.ensure_future(ask(cluster, post(b'{"prompt":"x","max_tokens":9}')))
        await until(lambda: cluster.dispatcher.running == 2, "both run")
        await gate.reached.wait()
        await cluster.router.stop()
        events = (await stream).split(b"data: ")
        assert json.loads(events[-1].partition(b"\n")[0])["error"]["type"] == "server_error"
        status, error = answer(await whole)
        assert (status, error["type"]) == (503, "server_error")
        assert await idle[0].read() == b""
        idle[1].close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))


async def test_health_follows_the_workers_and_the_drain(model: Path) -> None:
    async with NullCluster(model, pair(), http_port=0) as cluster:
        client = httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}", timeout=20.0)
        async with client:
            assert (await client.get("/health")).json() == {"status": "serving"}
            assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 4096
            cluster.membership.set([])
            await until(lambda: not cluster.dispatcher.pool.route_possible, "no worker is left")
            sick = await client.get("/health")
            assert (sick.status_code, sick.json()) == (503, {"status": "not serving"})
            assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] is None
            refused = await client.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")


async def test_health_tells_of_a_drain(model: Path) -> None:
    gate = Gate("token", index=1)
    workers = pair()
    workers[1].hook = gate
    async with NullCluster(model, workers, http_port=0) as cluster:
        client = httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}", timeout=20.0)
        async with client:
            asking = asyncio.ensure_future(ask(cluster, post(b'{"prompt":"x","max_tokens":3}')))
            await gate.reached.wait()
            assert (await client.get("/health")).status_code == 200
            draining = asyncio.ensure_future(cluster.router.drain(20.0))
            await until(lambda: cluster.dispatcher.draining, "it drains")
            sick = await client.get("/health")
            assert (sick.status_code, sick.json()) == (503, {"status": "not serving"})
            assert sick.headers["connection"] == "close"
            gate.opened.set()
            assert answer(await asking)[0] == 200
            assert await draining


PUBLIC = {"/health", "/version", "/metrics", "/openapi.json"}


async def test_every_path_but_the_public_ones_needs_a_key(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({hashlib.sha256(b"sk-1").hexdigest(): "acme"}))
    async with NullCluster(model, pair(), http_port=0, api_keys_file=str(keys)) as cluster:
        assert cluster.router._http is not None
        app = cluster.router._http.app
        routes = [(r.path, method) for r in app.routes if isinstance(r, Route) for method in r.methods or ()]
        assert {path for path, _ in routes} > PUBLIC
        async with httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as client:
            for route, method in routes:
                path = route.replace("{model:path}", "null")
                for headers, known in (
                    ({}, False),
                    ({"authorization": "Bearer sk-2"}, False),
                    ({"authorization": "Bearer sk-1"}, True),
                ):
                    response = await client.request(
                        method, path, headers=headers, json={} if method == "POST" else None
                    )
                    refused = response.status_code == 401
                    assert refused == (not known and route not in PUBLIC), (method, path, headers)
                    assert not refused or response.json()["error"]["code"] == "invalid_api_key"


async def test_a_bug_is_told_without_details(
    cluster: NullCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("router.calls.validate", broken)
    got = await ask(cluster, post(ONE, CLOSE + b"x-request-id: buggy\r\n"))
    status, error = answer(got)
    assert (status, error["code"]) == (500, "internal_error")
    assert "buggy" in str(error["message"])
    assert b"x-request-id: buggy" in got
    assert b"secret" not in got
    assert caplog.text.count("Traceback") == 1


async def test_metrics_are_there_for_prometheus(cluster: NullCluster) -> None:
    async with httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as client:
        await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(response.text) for sample in family.samples]
    assert sum(s.value for s in samples if s.name == "pdserve_generated_tokens_total") == 3
