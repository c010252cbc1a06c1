"""Every program in examples/ runs as it is, against a router of its own process; and what README shows of grpcurl.

And buf, which asks for reflection in its version v1, where grpcurl asks for the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from protos import admin_pb2, admin_pb2_grpc
from router.client import Client, Sampling
from tests.support.certificates import Authority
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


def run(*command: str | Path, ok: bool = True, code: int | None = None, **environment: str) -> tuple[str, str]:
    """Standard output and standard error of a program that ends, with status 0 if `ok`, else `code` or another."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    right = (done.returncode == 0) is ok if code is None else done.returncode == code
    assert right, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def python(
    name: str, *arguments: str | Path, ok: bool = True, code: int | None = None, **environment: str
) -> tuple[str, str]:
    environment["PYTHONPATH"] = str(REPOSITORY)
    return run(sys.executable, EXAMPLES / "python" / name, *arguments, ok=ok, code=code, **environment)


def status(server: NullServer) -> admin_pb2.GetStatusReply:
    with grpc.insecure_channel(server.address) as channel:
        reply: admin_pb2.GetStatusReply = admin_pb2_grpc.AdminStub(channel).GetStatus(
            admin_pb2.GetStatusRequest(), timeout=30.0
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


def test_batch_says_in_a_line_which_file_is_no_good(tmp_path: Path) -> None:
    good, answers = EXAMPLES / "python" / "prompts.jsonl", tmp_path / "answers.jsonl"
    (tmp_path / "odd.jsonl").write_text('{"prompt": "x"}\n{"prompt": "x", "messages": []}\n')
    lines = {
        "number": ('{"prompt": 3}', '"prompt" must be a text'),
        "typo": (
            '{"prompt": "x", "max_token": 5}',
            "unknown key 'max_token'; allowed: id, prompt, messages, max_tokens",
        ),
        "many": ('{"prompt": "x", "max_tokens": "5"}', '"max_tokens" must be a whole number'),
        "truth": ('{"prompt": "x", "max_tokens": true}', '"max_tokens" must be a whole number'),
        "text": ('{"messages": "x"}', '"messages" must be a list of objects'),
        "said": ('{"messages": [{"role": "user", "content": 3}]}', "'content' of a message must be a text"),
        "roll": ('{"messages": [{"roll": "user"}]}', "unknown key 'roll' in a message; allowed: role, content"),
    }
    for name, (line, _) in lines.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{line}\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe4"}\n')
    for prompts, target, words in (
        (tmp_path / "none.jsonl", answers, "No such file or directory: '.*none.jsonl'"),
        (tmp_path, answers, "Is a directory"),
        (tmp_path / "latin.jsonl", answers, "latin.jsonl, line 1: .*utf-8"),
        (tmp_path / "odd.jsonl", answers, 'odd.jsonl, line 2: an object with either "prompt"'),
        *(
            (tmp_path / f"{name}.jsonl", answers, f"{name}.jsonl, line 1: {words}")
            for name, (_, words) in lines.items()
        ),
        (good, tmp_path, "Is a directory"),
        (good, tmp_path / "odd.jsonl", "odd.jsonl has something else than answers"),
    ):
        _, err = python("batch.py", prompts, target, "--address", "127.0.0.1:9", code=2)
        assert re.fullmatch(f".*{words}.*\n", err), err
    assert not answers.exists() or not answers.read_bytes()


def test_batch_of_the_sample_prompts(server: NullServer, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    out, _ = python("batch.py", EXAMPLES / "python" / "prompts.jsonl", answers, "--address", server.address)
    assert out == "3 prompts answered\n"
    assert [json.loads(line)["id"] for line in answers.read_text().splitlines()] == ["tale", "sky", "3"]
    out, _ = python("batch.py", EXAMPLES / "python" / "prompts.jsonl", answers, "--address", server.address)
    assert out == "all 3 were answered already\n"


def test_batch_answers_what_no_message_can_carry_by_an_error(server: NullServer, tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "\\ud800"}\n{"prompt": "x", "max_tokens": 99999999999}\n{"prompt": "x"}\n')
    assert python("batch.py", prompts, answers, "--address", server.address)[0] == "3 prompts answered\n"
    alone, many, good = (json.loads(line) for line in answers.read_text().splitlines())
    assert "surrogates" in alone["error"]
    assert "range" in many["error"]
    assert good["finish_reason"] == "length"


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


def test_programs_of_http_name_tls_where_there_is_no_connection(
    server: NullServer, closed_server: NullServer, let_in: dict[str, str]
) -> None:
    curl = EXAMPLES / "shell" / "curl.sh"
    # In plain text where there is TLS, and the other way round.
    plain = closed_server.url.replace("https://", "http://")
    tight = server.url.replace("http://", "https://")
    for err in (
        python("openai_client.py", plain, code=1)[1],
        run(curl, plain, code=1)[1],
    ):
        assert "https://" in err
        assert "PDSERVE_TLS_CA" in err
    for err in (
        python("openai_client.py", tight, code=1, PDSERVE_TLS_CA=let_in["PDSERVE_TLS_CA"])[1],
        run(curl, tight, code=1, PDSERVE_TLS_CA=let_in["PDSERVE_TLS_CA"])[1],
    ):
        assert "http://" in err
        assert "without" in err
    # Who is answered by an error has a connection.
    _, err = run(curl, closed_server.url, code=22, **(let_in | {"PDSERVE_API_KEY": ""}))
    assert "TLS" not in err


def test_grpcurl_that_is_not_there(server: NullServer) -> None:
    _, err = run(EXAMPLES / "shell" / "grpcurl.sh", server.address, code=2, GRPCURL="/nowhere/grpcurl")
    assert "get it from https://github.com/fullstorydev/grpcurl/releases" in err


def test_of_several_routers_the_first_is_called(server: NullServer, node: Path) -> None:
    """As READY lists them; programs of this project's client know them all."""
    urls, addresses = f"{server.url},http://127.0.0.1:9", f"{server.address},127.0.0.1:9"
    assert python("openai_client.py", urls)[0].startswith("served: null\n")
    assert "data: [DONE]" in run(EXAMPLES / "shell" / "curl.sh", urls)[0]
    assert run(EXAMPLES / "shell" / "grpcurl.sh", addresses, GRPCURL=str(grpcurl()))[0]
    command = ("node", node / "generate.mjs", "--root", REPOSITORY, "--max-tokens", "5", "--address")
    assert run(*command, addresses)[0]
    for listed in (addresses, f"127.0.0.1:9,{server.address}"):
        assert python("generate.py", listed)[0].startswith("served: null\n")


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


def test_node_says_how_it_is_called(node: Path, server: NullServer) -> None:
    for flag in ("--help", "-h"):
        out, err = run(*node_command(node, server, flag))
        assert out.startswith("Usage: node generate.mjs [PROMPT]")
        assert not err
    for arguments, words in (
        (("--max-token", "3"), "Unknown option '--max-token'"),
        (("--timeout",), "'--timeout <value>' argument missing"),
        (("Once", "upon"), "put it in quotes"),
    ):
        out, err = run(*node_command(node, server, *arguments), code=2)
        assert not out
        assert words in err
        assert "\nUsage: node generate.mjs" in err
        assert "    at " not in err, "no stack"


def test_node_reads_the_details_of_errors(node: Path, server: NullServer) -> None:
    _, err = run(*node_command(node, server, "x", "--temperature", "9"), ok=False)
    assert "INVALID_ARGUMENT: " in err
    assert "\n  sampling.temperature: must be" in err
    assert "\n  request " in err
    _, err = run(*node_command(node, server, "x", "--max-tokens", "4000", "--timeout", "0.5"), ok=False)
    assert "DEADLINE_EXCEEDED" in err
    eventually(lambda: busy(server) == 0, 10.0, "what was too slow has ended")


def test_node_says_when_to_come_again(node: Path, model: Path) -> None:
    with (
        NullServer(model, step_s=0.05, max_queue=1, max_running_per_worker=1) as server,
        Client(server.address) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        long = [threads.submit(client.complete, "x", Sampling(max_tokens=4000), request_id=name) for name in "ab"]
        eventually(lambda: busy(server) == 2, 20.0, "one runs, and one waits")
        _, err = run(*node_command(node, server, "x"), code=1)
        for name in "ab":
            client.cancel(name)
        assert [each.result().finish_reason for each in long] == ["cancelled", "cancelled"]
    assert "RESOURCE_EXHAUSTED: " in err
    (delay,) = re.findall(r"(?m)^  come again in (\S+) s$", err)
    assert 0 < float(delay) < 600


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


# -- buf ------------------------------------------------------------------------------------------------------------


def test_buf_calls_by_reflection_v1(server: NullServer) -> None:
    buf = node_modules(REPOSITORY / "tests" / "support" / "buf") / "node_modules" / ".bin" / "buf"
    curl = (buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", "grpc-v1")
    address = f"http://{server.address}"
    out, _ = run(*curl, "--list-methods", address)
    assert {"pdserve.v1.Generation/Generate", "inference.GRPCInferenceService/ModelInfer"} <= set(out.split())
    data = json.dumps({"prompt": "x", "sampling": {"max_tokens": 5}})
    out, _ = run(*curl, "--data", data, f"{address}/pdserve.v1.Generation/Generate")
    assert re.search(r'"completionTokens": *5\b', out), out
    data = json.dumps({"prompt": "x", "sampling": {"temperature": 9}})
    _, err = run(*curl, "--data", data, f"{address}/pdserve.v1.Generation/Generate", ok=False)
    told = json.loads(err[err.index("{") :])
    assert told["code"] == "invalid_argument"
    assert told["message"].startswith("sampling.temperature: ")
    assert "google.rpc.BadRequest" in [detail["type"] for detail in told["details"]]


# -- grpcurl and API keys --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def closed_server(
    model: Path, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NullServer]:
    """One that speaks TLS, and wants a certificate and a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(f"{hashlib.sha256(KEY.encode()).hexdigest()}: t\n")
    with NullServer(model, step_s=0.001, tls=authority.public(mutual=True), api_keys_file=str(keys)) as running:
        yield running


@pytest.fixture(scope="module")
def let_in(authority: Authority) -> dict[str, str]:
    """The environment of whoever may call it."""
    tls = authority.client()
    return {
        "PDSERVE_API_KEY": KEY,
        "PDSERVE_TLS_CA": tls.ca_file,
        "PDSERVE_TLS_CERT": tls.cert_file,
        "PDSERVE_TLS_KEY": tls.key_file,
        "GRPC_VERBOSITY": "NONE",
    }


def test_grpcurl_script(server: NullServer) -> None:
    out, _ = run(EXAMPLES / "shell" / "grpcurl.sh", server.address, GRPCURL=str(grpcurl()))
    assert re.search(r"(?m)^pdserve\.v1\.Generation$", out)
    assert "message GenerateRequest {" in out
    assert '"status": "SERVING"' in out
    assert out.count('"finish_reason": "FINISH_REASON_LENGTH"') == 2
    assert out.count('"completion_tokens": 16') == 2
    assert "Code: InvalidArgument" in out
    assert "sampling.temperature" in out


def test_python_says_who_calls(closed_server: NullServer, let_in: dict[str, str], tmp_path: Path) -> None:
    address, url = closed_server.address, closed_server.url
    assert python("generate.py", f"grpcs://{address}", **let_in)[0].startswith("served: null\n")
    assert "whole: " in python("generate_async.py", address, **let_in)[0]
    assert "\n[32 tokens]\n" in python("openai_client.py", url, **let_in)[0]
    # By flags, which win.
    key = tmp_path / "key"
    key.write_text(f"{KEY}\n")
    flags = [
        word for name in ("ca", "cert", "key") for word in (f"--tls-{name}", let_in[f"PDSERVE_TLS_{name.upper()}"])
    ]
    prompts, answers = EXAMPLES / "python" / "prompts.jsonl", tmp_path / "answers.jsonl"
    wrong = {name: "/nowhere" for name in let_in}
    command = ("batch.py", prompts, answers, "--address", address)
    assert python(*command, *flags, "--api-key-file", key, **wrong)[0] == "3 prompts answered\n"


def test_python_without_a_right_to_call(closed_server: NullServer, let_in: dict[str, str]) -> None:
    _, err = python("generate.py", closed_server.address, code=1, GRPC_VERBOSITY="NONE")
    assert err.endswith("If it has TLS, give --tls-ca\n")
    _, err = python("generate_async.py", closed_server.address, code=1, **(let_in | {"PDSERVE_API_KEY": "another"}))
    assert re.search(r"key.* \(request [0-9a-f]{16}\)\n$", err), "the router's, which has not read ours"
    for name in ("generate.py", "openai_client.py"):
        _, err = python(name, code=2, **(let_in | {"PDSERVE_TLS_CA": "/nowhere"}))
        assert err.count("\n") == 1, err
        assert "No such file" in err
    _, err = python("generate.py", "telnet://x:1", code=2)
    assert err.startswith("address: must be HOST:PORT or https://HOST:PORT")


def test_a_key_and_a_certificate_are_wanted_and_taken(
    closed_server: NullServer, node: Path, let_in: dict[str, str], tmp_path: Path
) -> None:
    no_key = let_in | {"PDSERVE_API_KEY": ""}
    no_certificate = let_in | {"PDSERVE_TLS_CERT": "", "PDSERVE_TLS_KEY": ""}
    script, tool = EXAMPLES / "shell" / "grpcurl.sh", str(grpcurl())
    run(script, closed_server.address, GRPCURL=tool, ok=False, **no_key)
    for address in (closed_server.address, f"grpcs://{closed_server.address}"):
        out, _ = run(script, address, GRPCURL=tool, **let_in)
        assert out.count('"completion_tokens": 16') == 2

    command = node_command(node, closed_server, "x", "--max-tokens", "5")
    _, err = run(*command, ok=False, **no_key)
    assert "UNAUTHENTICATED" in err
    assert "set PDSERVE_API_KEY" in err
    _, err = run(*command, "--timeout", "3", ok=False, PDSERVE_API_KEY=KEY)
    assert "--tls-ca names the authority" in err
    out, err = run(*command, **let_in)
    assert out
    assert "Warning" not in err, "an address is no name for TLS"
    another = let_in | {"PDSERVE_TLS_CA": Authority(tmp_path).ca_file}
    _, err = run(*command, "--timeout", "3", ok=False, **another)
    assert "--tls-ca names the authority" in err
    _, err = run(*command, code=2, **(let_in | {"PDSERVE_TLS_CA": "/nowhere"}))
    assert err.startswith("ENOENT: no such file"), err

    script = EXAMPLES / "shell" / "curl.sh"
    for environment in (no_key, no_certificate):
        run(script, closed_server.url, ok=False, **environment)
    out, _ = run(script, closed_server.url, **let_in)
    assert "data: [DONE]" in out


# -- README ---------------------------------------------------------------------------------------------------------


def shown(language: str, begins: str, server: NullServer) -> str:
    """The block of README that begins like this, with this server's addresses."""
    blocks = re.findall(rf"(?ms)^```{language}\n(.*?)^```$", (REPOSITORY / "README.md").read_text())
    (block,) = [block for block in blocks if block.startswith(begins)]
    assert "127.0.0.1" in block or "node" in block
    return block.replace("127.0.0.1:50051", server.address).replace("http://127.0.0.1:8000", server.url)


def test_the_command_as_readme_has_it(server: NullServer) -> None:
    blocks = re.findall(r"(?ms)^```bash\n(.*?)^```$", (REPOSITORY / "README.md").read_text())
    (block,) = [block for block in blocks if block.startswith(".venv/bin/pdserve generate")]
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [command[:2] for command in commands] == [
        [".venv/bin/pdserve", name] for name in ("generate", "chat", "status")
    ]
    told = []
    for _, *arguments in commands:
        script = shlex.join([sys.executable, "-m", "cluster", *arguments, "--address", server.address])
        told.append(run("bash", "-ec", f"printf 'Why?\\nAnd how?\\n' | {script}"))
    (answer, stats), (conversation, said), (state, _) = told
    assert answer
    assert "first token after" in stats
    assert conversation.count("\n") >= 2
    assert {line.partition(":")[0] for line in said.splitlines()} == {"cut off there"}
    assert "serving" in state


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
