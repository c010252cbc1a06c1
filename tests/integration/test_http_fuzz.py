"""Whatever comes by HTTP: no 500, no hang, nothing left behind. By schemathesis, from the interface's description."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import pytest

from pdcore.types import Role
from protos import worker_pb2
from tests.support.null_cluster import COUNTED, NullCluster, tasks
from tests.support.null_worker import NullWorker, null_token
from tests.support.tool_model import tool_llama

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "response_headers_conformance,allow_header_conformance,unsupported_method"
)
RUN_S = 200.0
END, LENGTH = 257, 8


def short(request: worker_pb2.WorkerRequest, index: int) -> int:
    """The model's end after a few tokens: most of what is asked for says no length, and would get hundreds."""
    return END if index == LENGTH else null_token(request, index)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_llama(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("seed", [1])
async def test_the_http_interface_stands_fuzzing(
    model: Path, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [NullWorker("p0", Role.PREFILL, script=short), NullWorker("d0", Role.DECODE, script=short)]
    with caplog.at_level(logging.ERROR):
        async with NullCluster(model, workers, http_port=0, tenants=COUNTED) as cluster:
            before = tasks()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "schemathesis.cli", "run"),
                f"http://{cluster.router.http_address}/openapi.json",
                *("--checks", CHECKS, "--phases", "coverage,fuzzing", "--max-examples", "10"),
                *("--seed", str(seed), "--request-timeout", "15", "--continue-on-failure", "--warnings", "off"),
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                output, _ = await asyncio.wait_for(process.communicate(), RUN_S)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert process.returncode == 0, output.decode()[-8000:]
            await cluster.at_rest(before)
            assert cluster.dispatcher.admission.tenants, "tenants were counted"
            # It serves as if nothing had been.
            answer = await cluster.client.complete([3, 4, 5])
            assert answer.finish_reason == "stop"
            assert len(answer.token_ids) in (LENGTH, LENGTH + 1)
    assert not [record.getMessage() for record in caplog.records if record.name.startswith("router")]
