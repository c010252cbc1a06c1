"""Whatever happens to a request, neither its prompt nor its answer is in a log, not even at DEBUG."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode_worker.worker import DecodeWorker
from engine.loader import load_runner
from pdcore.errors import InternalError, InvalidRequest, RequestError
from pdcore.types import Role, SamplingParams
from router.client import Sampling
from router.tokenizer import TextModel
from tests.support.null_cluster import NullCluster, pair
from tests.support.processes import worker_config
from tests.support.session_client import SessionClient
from tests.support.specs import spec_of
from tests.support.tiny_model import tiny_llama

MARKER = "Quetzalcoatlus"
IDS = [101, 103, 107, 109, 113]
SHOWN = ("101, 103, 107", "101 103 107", "prompt: 101", MARKER, MARKER.lower(), "Quetzal")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG)
    return caplog


def assert_silent(log: pytest.LogCaptureFixture) -> None:
    text = log.text + "".join(repr(record.__dict__) for record in log.records)
    assert len(log.records) > 3, "nothing was logged at all"
    assert [word for word in SHOWN if word in text] == []


async def test_the_router(model: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async with NullCluster(model, pair(), http_port=0, max_replays=0) as cluster:
        client, url = cluster.client, f"http://{cluster.router.http_address}/v1"
        await client.complete(MARKER, Sampling(max_tokens=3, stop=[MARKER]))
        await client.complete(IDS, Sampling(max_tokens=3))
        refused: list[tuple[Any, Sampling]] = [
            (MARKER, Sampling(temperature=9)),
            (MARKER, Sampling(regex=f"({MARKER}")),
            (MARKER, Sampling(json_schema=f'{{"type": "{MARKER}"}}')),
            (MARKER, Sampling(bad_words=[MARKER * 100])),
            (MARKER * 5000, Sampling()),
            ([*IDS, 10**6], Sampling()),
            ([{"role": MARKER, "content": MARKER}], Sampling()),
        ]
        for prompt, sampling in refused:
            with pytest.raises(InvalidRequest):
                await client.complete(prompt, sampling)
        async with httpx.AsyncClient() as http:
            body = {"model": "null", "prompt": MARKER, "max_tokens": 2}
            assert (await http.post(f"{url}/completions", json=body)).status_code == 200
            assert (await http.post(f"{url}/completions", json=body | {MARKER: 1, "n": MARKER})).status_code == 400
            half, headers = f'{{"prompt": "{MARKER}', {"content-type": "application/json"}
            reply = await http.post(f"{url}/completions", content=half, headers=headers)
            assert reply.status_code == 400

        # A bug of ours that says what it stumbled over, in a task and in a worker's answer.
        async def broken(self: TextModel, text: str, *rest: Any) -> list[int]:
            raise ValueError("cannot tokenize")

        with monkeypatch.context() as patch:
            patch.setattr(TextModel, "tokenize", broken)
            with pytest.raises(InternalError):
                await client.complete(MARKER, Sampling(max_tokens=3))
        for worker in cluster.workers.values():
            await worker.crash()
        with pytest.raises(RequestError):
            await client.complete(MARKER, Sampling(max_tokens=3), timeout_s=1.0)
    assert "cannot tokenize" in log.text
    assert_silent(log)


def test_a_worker(model: Path, log: pytest.LogCaptureFixture) -> None:
    """A request that runs, some that are refused, and steps that fail until the worker does."""
    config = replace(worker_config(model, Role.DECODE), dead_after_s=3.0)
    failing = False

    def runner_of(given: Any) -> Any:
        runner = load_runner(given.engine)
        run = runner.run

        def maybe(step: Any) -> Any:
            if failing:
                raise RuntimeError("the device is gone")
            return run(step)

        runner.run = maybe  # type: ignore[method-assign]
        return runner

    worker = DecodeWorker(config, runner_of)
    try:
        worker.start()
        with SessionClient(worker.address) as session:
            good = spec_of(IDS, max_tokens=3)
            session.generate(good)
            session.wait_finished(good.key.request_id)
            for bad in (
                spec_of([*IDS, 10**6]),
                spec_of(IDS * 1000),
                replace(spec_of(IDS), params=SamplingParams(max_tokens=10**6)),
            ):
                session.reserve(bad)
            failing = True
            for _ in range(50):  # some of them share a step
                session.generate(spec_of(IDS, max_tokens=3))
                if worker.failed.wait(0.1):
                    break
            assert worker.failed.is_set()
    finally:
        worker.stop()
    assert "the device is gone" in log.text
    assert_silent(log)


def test_it_would_be_found(log: pytest.LogCaptureFixture) -> None:
    for number in range(4):
        logging.getLogger("router").debug("prompt %d: %s", number, IDS)
    with pytest.raises(AssertionError, match="101"):
        assert_silent(log)
