"""Every program in examples/ runs as it is, against a router of its own process; and what README shows of grpcurl."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos import admin_pb2, admin_pb2_grpc
from router.client import Client, Sampling
from tests.support.null_server import NullServer
from tests.support.processes import REPOSITORY, eventually
from tests.support.tiny_model import tiny_llama
from tests.support.tools import grpcurl, node_modules

EXAMPLES = REPOSITORY / "examples"
KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[NullServer]:
    with NullServer(model, step_s=0.002) as running:
        yield running


def run(*command: str | Path, ok: bool = True, **environment: str) -> tuple[str, str]:
    """Standard output and standard error of a program that ends."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) is ok, (done.returncode, done.stdout, done.stderr)
    return done.stdout, done.stderr


def python(name: str, *arguments: str | Path, ok: bool = True) -> tuple[str, str]:
    return run(sys.executable, EXAMPLES / "python" / name, *arguments, ok=ok, PYTHONPATH=str(REPOSITORY))


def status(server: NullServer) -> admin_pb2.GetStatusReply:
    with grpc.insecure_channel(server.address) as channel:
        reply: admin_pb2.GetStatusReply = admin_pb2_grpc.AdminStub(channel).GetStatus(
            admin_pb2.GetStatusRequest(), timeout=10.0
        )
    return reply


def busy(server: NullServer) -> int:
    """Requests that run or wait in the router."""
    reply = status(server)
    return reply.running_requests + reply.queued_requests


def shed(server: NullServer) -> int:
    """Requests that were sent away since the queue was full."""
    return sum(each.shed_full for each in status(server).classes)


# -- Python ---------------------------------------------------------------------------------------------------------


def test_generate(server: NullServer) -> None:
    out, _ = python("generate.py", server.address)
    assert out.startswith("served: null\n")
    assert re.search(r"\[[0-9a-f]{32}: 32 tokens, first after \d+ ms\]", out)
    assert out.count("prompt tokens were cached") == 2
    assert re.search(r"refused as it should be: sampling.temperature must be .* \(request [0-9a-f]{32}\)", out)


def test_generate_where_nobody_is(server: NullServer) -> None:
    _, err = python("generate.py", "127.0.0.1:9", ok=False)
    assert "is a cluster running there? `pdserve serve` starts one" in err


def test_generate_async(server: NullServer) -> None:
    out, _ = python("generate_async.py", server.address)
    assert re.search(r"(?m)^whole: ['\"].", out)
    assert re.search(r"(?m)^beginning: ['\"].", out)
    assert re.search(r"(?m)^hurried: not within half a second", out)
    eventually(lambda: busy(server) == 0, 10.0, "what was left has ended")


def test_batch_keeps_the_order_waits_for_room_and_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    count = 90
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = [json.dumps({"id": f"n{i}", "prompt": "x" * (i % 7 + 1), "max_tokens": i % 5 + 1}) for i in range(count)]
    lines[5] = json.dumps({"id": "n5", "prompt": ""})
    lines[6] = json.dumps({"id": "n6", "messages": [{"role": "user", "content": "y"}], "max_tokens": 2})
    prompts.write_text("\n".join(lines) + "\n")
    # Far less room than the program asks for: most prompts are sent away at first.
    with NullServer(model, step_s=0.001, max_queue=4, max_running_per_worker=2) as server:
        arguments = (prompts, answers, "--address", server.address, "--concurrency", "10")
        out, _ = python("batch.py", *arguments)
        assert out == f"{count} prompts answered\n"
        whole = answers.read_bytes()
        found = [json.loads(line) for line in whole.splitlines()]
        assert [entry["id"] for entry in found] == [f"n{i}" for i in range(count)]
        assert "prompt: " in found[5]["error"]
        assert found[5]["request_id"]
        for i, entry in enumerate(found):
            if i not in (5, 6):
                assert entry["completion_tokens"] == i % 5 + 1
                assert entry["finish_reason"] == "length"
        assert shed(server) > 0, "there was no room at times"
        # As after a crash: some answers, and a half.
        keep = whole.index(b'{"id": "n23"')
        answers.write_bytes(whole[: keep + 20])
        out, _ = python("batch.py", *arguments)
        assert out == f"{count - 23} prompts answered\n"
        again = [json.loads(line) for line in answers.read_bytes().splitlines()]
        ids = ("request_id",)
        assert [{k: v for k, v in entry.items() if k not in ids} for entry in again] == [
            {k: v for k, v in entry.items() if k not in ids} for entry in found
        ], "null workers answer a prompt alike each time"
        # Answers of other prompts are not overwritten.
        prompts.write_text("\n".join(lines[1:]) + "\n")
        _, err = python("batch.py", *arguments, ok=False)
        assert "is of other prompts" in err
        assert len(answers.read_bytes().splitlines()) == count
    answers.unlink()
    _, err = python("batch.py", prompts, answers, "--address", server.address, "--patience", "0.5", ok=False)
    assert "run the same command again" in err


def test_batch_of_the_sample_prompts(server: NullServer, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    out, _ = python("batch.py", EXAMPLES / "python" / "prompts.jsonl", answers, "--address", server.address)
    assert out == "3 prompts answered\n"
    assert [json.loads(line)["id"] for line in answers.read_text().splitlines()] == ["tale", "sky", "3"]


# -- OpenAI's interface ---------------------------------------------------------------------------------------------


def test_openai_client(server: NullServer) -> None:
    out, _ = python("openai_client.py", server.url)
    assert out.startswith("served: null\n")
    assert "\n[32 tokens]\n" in out
    assert "[length, " in out
    assert re.search(r"refused as it should be: .*temperature.* \(request \S+\)", out)


def test_curl(server: NullServer) -> None:
    out, _ = run(EXAMPLES / "shell" / "curl.sh", server.url)
    assert '"object":"list"' in out.replace(" ", "")
    assert '"finish_reason":"length"' in out.replace(" ", "")
    assert out.count("data: {") >= 3
    assert "data: [DONE]" in out
    assert re.search(r"(?m)^HTTP/1.1 400 ", out)
    assert re.search(r"(?mi)^x-request-id: \S+", out)


# -- Node -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node() -> Path:
    return node_modules(EXAMPLES / "node")


def node_command(node: Path, server: NullServer, *arguments: str) -> list[str]:
    return ["node", str(node / "generate.mjs"), "--root", str(REPOSITORY), "--address", server.address, *arguments]


def test_node_streams(node: Path, server: NullServer) -> None:
    out, err = run(*node_command(node, server, "Once upon a time", "--max-tokens", "40", "--temperature", "0"))
    with Client(server.address) as client:
        expected = client.complete("Once upon a time", Sampling(max_tokens=40)).text
    assert out == expected
    assert re.search(r"^request \S+\n\n40 tokens, the first after \d+\.\d{3} s\n$", err)
    out, _ = run(*node_command(node, server, "--chat", "Why?", "--max-tokens", "5"))
    assert out


def test_node_reads_the_details_of_errors(node: Path, server: NullServer) -> None:
    _, err = run(*node_command(node, server, "x", "--temperature", "9"), ok=False)
    assert "INVALID_ARGUMENT: " in err
    assert "\n  sampling.temperature: must be" in err
    assert "\n  request " in err
    _, err = run(*node_command(node, server, "x", "--max-tokens", "4000", "--timeout", "0.5"), ok=False)
    assert "DEADLINE_EXCEEDED" in err
    eventually(lambda: busy(server) == 0, 10.0, "what was too slow has ended")


def test_node_leaves_and_is_interrupted(node: Path, server: NullServer) -> None:
    out, err = run(*node_command(node, server, "x", "--max-tokens", "4000", "--enough", "30"))
    assert len(out) >= 30
    assert "that was enough" in err
    eventually(lambda: busy(server) == 0, 10.0, "what was left has ended")
    process = subprocess.Popen(
        node_command(node, server, "x", "--max-tokens", "4000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1), "it streams"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
        assert process.returncode == 130, told
        assert b"cancelled" in told
    finally:
        process.kill()
        process.wait(10)
    eventually(lambda: busy(server) == 0, 10.0, "what was interrupted has ended")


# -- grpcurl and API keys --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def closed_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NullServer]:
    """One that wants a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(f"{hashlib.sha256(KEY.encode()).hexdigest()}: t\n")
    with NullServer(model, api_keys_file=str(keys)) as running:
        yield running


def test_grpcurl_script(server: NullServer) -> None:
    out, _ = run(EXAMPLES / "shell" / "grpcurl.sh", server.address, GRPCURL=str(grpcurl()))
    assert re.search(r"(?m)^pdserve\.v1\.Generation$", out)
    assert "message GenerateRequest {" in out
    assert '"status": "SERVING"' in out
    assert out.count('"finish_reason": "FINISH_REASON_LENGTH"') == 2
    assert out.count('"completion_tokens": 16') == 2
    assert "Code: InvalidArgument" in out
    assert "sampling.temperature" in out


def test_a_key_is_wanted_and_taken(closed_server: NullServer, node: Path) -> None:
    script, tool = EXAMPLES / "shell" / "grpcurl.sh", str(grpcurl())
    run(script, closed_server.address, GRPCURL=tool, ok=False, PDSERVE_API_KEY="")
    out, _ = run(script, closed_server.address, GRPCURL=tool, PDSERVE_API_KEY=KEY)
    assert out.count('"completion_tokens": 16') == 2
    command = node_command(node, closed_server, "x", "--max-tokens", "5")
    _, err = run(*command, ok=False, PDSERVE_API_KEY="")
    assert "UNAUTHENTICATED" in err
    assert "set PDSERVE_API_KEY" in err
    assert run(*command, PDSERVE_API_KEY=KEY)[0]
    script = EXAMPLES / "shell" / "curl.sh"
    run(script, closed_server.url, ok=False, PDSERVE_API_KEY="")
    out, _ = run(script, closed_server.url, PDSERVE_API_KEY=KEY)
    assert "data: [DONE]" in out


# -- README ---------------------------------------------------------------------------------------------------------


def shown(language: str, begins: str, server: NullServer) -> str:
    """The block of README that begins like this, with this server's addresses."""
    blocks = re.findall(rf"(?ms)^```{language}\n(.*?)^```$", (REPOSITORY / "README.md").read_text())
    (block,) = [block for block in blocks if block.startswith(begins)]
    assert "127.0.0.1" in block or "node" in block
    return block.replace("127.0.0.1:50051", server.address).replace("http://127.0.0.1:8000", server.url)


def test_grpcurl_as_readme_has_it(server: NullServer, tmp_path: Path) -> None:
    (tmp_path / "grpcurl").symlink_to(grpcurl())
    path = f"{tmp_path}:{os.environ['PATH']}"
    out, _ = run("bash", "-ec", shown("bash", "grpcurl", server), PATH=path)
    assert '"completion_tokens": 32' in out


def test_python_as_readme_has_it(server: NullServer) -> None:
    out, _ = run(sys.executable, "-c", shown("python", "from router.client", server), PYTHONPATH=str(REPOSITORY))
    assert len(out) >= 64


def test_curl_as_readme_has_it(server: NullServer) -> None:
    out, _ = run("bash", "-ec", shown("bash", "curl", server))
    assert json.loads(out)["usage"]["completion_tokens"] == 32


def test_node_as_readme_has_it(node: Path, server: NullServer) -> None:
    go, install, command = shown("bash", "cd examples/node", server).strip().split(" && ")
    assert (go, install) == ("cd examples/node", "npm ci"), "which `node` has done, elsewhere"
    command += f" --root {REPOSITORY} --address {server.address}"
    out, _ = run("bash", "-ec", f"cd {node}; {command}")
    assert len(out) >= 32
