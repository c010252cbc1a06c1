"""Every field of every request of OpenAI's interface: where it arrives. And what the log has of those refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.integration.test_openai import Cluster
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    async with Cluster(model) as running:
        yield running


async def test_a_request_that_is_refused_is_in_the_log_by_its_id(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="router")
    base = f"http://{cluster.router.http_address}"
    async with httpx.AsyncClient(base_url=base) as client:
        for number, (path, body, reason) in enumerate(
            (
                ("/v1/completions", {"prompt": "my secret", "top_p": 0}, "INVALID_REQUEST"),
                ("/v1/completions", {"prompt": "my secret", "my secret": 1}, "INVALID_REQUEST"),
                ("/v1/responses", {"input": "my secret", "model": "gpt"}, "UNKNOWN_MODEL"),
                ("/v1/my secret", {}, "NOT_FOUND"),
            )
        ):
            response = await client.post(path, json=body, headers={"x-request-id": f"refused-{number}"})
            assert response.status_code >= 400
            assert f"request refused-{number} fails: {reason}" in caplog.text
    assert "secret" not in caplog.text.replace("/v1/my%20secret", "")
