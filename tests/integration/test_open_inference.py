"""The Open Inference Protocol, as Triton's and KServe's own clients speak it, and what they cannot be made to say."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdcore.errors import Unavailable
from pdcore.types import Role
from protos import open_inference_pb2 as pb
from protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from router.client import Sampling
from tests.integration.test_router_flow import Gate
from tests.support.certificates import Authority
from tests.support.null_cluster import NullCluster, pair, until
from tests.support.null_worker import NullWorker
from tests.support.processes import REPOSITORY
from tests.support.tiny_model import tiny_llama
from tests.support.tools import kserve


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


async def ran(module: str, *arguments: str, path: str = "") -> Any:
    """What a client makes of it, in a process of its own. `path`: of its packages, before the others."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"tests.support.{module}", *arguments),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 60.0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-3000:]
    return json.loads(out)


async def triton(cluster: NullCluster, scenario: str) -> Any:
    return await ran("triton_client", cluster.router.address, scenario)


async def text_of(cluster: NullCluster, prompt: str, count: int) -> str:
    return (await cluster.client.complete(prompt, Sampling(max_tokens=count))).text


async def test_what_a_client_asks_first(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        told = await triton(cluster, "server")
        assert (told["live"], told["ready"], told["model_ready"]) == (True, True, [True, False, False])
        assert told["server"]["name"] == "pdserve"
        assert (told["model"]["name"], told["model"]["versions"]) == ("null", ["1"])
        inputs = {entry["name"]: (entry["datatype"], entry["shape"]) for entry in told["model"]["inputs"]}
        assert inputs["text_input"] == ("BYTES", ["-1"])
        assert {entry["name"] for entry in told["model"]["outputs"]} >= {"text_output", "finish_reason"}
        config = told["config"]["config"]
        assert config["model_transaction_policy"] == {"decoupled": True}
        assert config["input"][0] == {"name": "text_input", "data_type": "TYPE_STRING", "dims": ["-1"]}
        assert all(entry["optional"] for entry in config["input"][1:])
        assert told["index"]["models"] == [{"name": "null", "version": "1", "state": "READY"}]
        assert told["unknown"][0] == "StatusCode.NOT_FOUND"
        assert told["statistics"][0] == "StatusCode.UNIMPLEMENTED"


async def test_whole_answers(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        told = await triton(cluster, "infer")
        hello, you = await text_of(cluster, "hello", 5), await text_of(cluster, "you", 3)
        # Without a word about it the input comes first, as from Triton's backends.
        assert told["plain"]["text_output"] == ["hello" + hello]
        assert (told["plain"]["id"], told["plain"]["request_id"], told["plain"]["shape"]) == ("mine", "mine", [1])
        assert told["plain"]["model"] == ["null", "1"]
        vllm = told["vllm"]
        assert (vllm["text_output"], vllm["finish_reason"]) == ([hello], ["length"])
        prompt_tokens = len(await cluster.client.tokenize("hello"))
        assert (vllm["num_input_tokens"], vllm["num_output_tokens"]) == ([prompt_tokens], [5])
        assert (told["trt"]["text_output"], told["trt"]["shape"]) == ([hello, you], [2, 1])
        assert told["trt"]["num_output_tokens"] == [5, 3]
        samples = [answer.text for prompt in "ab" for answer in await _samples(cluster, prompt)]
        assert told["samples"]["text_output"] == samples
        invalid = "StatusCode.INVALID_ARGUMENT"
        for name in ("bad", "unknown_parameter", "unknown_output", "beams", "streamed"):
            assert told[name][0] == invalid, (name, told[name])
        assert "sampling.temperature" in told["bad"][1]
        assert "sampling.top_p" in told["bad"][1]
        assert "beam_me" in told["unknown_parameter"][1]
        assert told["unknown_model"][0] == "StatusCode.NOT_FOUND"
        assert told["late"][0] == "StatusCode.DEADLINE_EXCEEDED"
        await cluster.empty()


async def _samples(cluster: NullCluster, prompt: str) -> Any:
    return await cluster.client.samples(prompt, Sampling(max_tokens=2, n=2))


async def test_several_answers_on_one_stream(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        told = await triton(cluster, "stream")
        for name in ("one", "two"):
            parts = told["answers"][name]
            assert "".join(part["text_output"][0] for part in parts) == await text_of(cluster, name, 20)
            assert [part["triton_final_response"] for part in parts] == [False] * (len(parts) - 1) + [True]
            assert [part["finish_reason"] for part in parts] == [["None"]] * (len(parts) - 1) + [["length"]]
            assert {part["request_id"] for part in parts} == {name}
        (whole,) = told["answers"]["whole"]
        assert whole["text_output"] == ["whole" + await text_of(cluster, "whole", 3)]
        assert whole["triton_final_response"]
        both = "".join(part["text_output"][0] for part in told["answers"]["1"])
        assert sorted(both) == sorted(2 * await text_of(cluster, "same", 4))
        assert len({part["request_id"] for part in told["answers"]["1"]}) == 2
        (error,) = told["errors"]
        assert "prompt: must not be empty" in error
        assert "bad" in error
        assert told["by_status"][0] == "StatusCode.INVALID_ARGUMENT"
        await cluster.empty()


async def test_the_asynchronous_client(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster:
        told = await triton(cluster, "aio")
        assert told["one"]["text_output"] == ["hello" + await text_of(cluster, "hello", 5)]
        assert told["texts"] == {name: await text_of(cluster, name, 20) for name in ("one", "two")}


async def test_leaving_a_stream_frees_its_requests(model: Path) -> None:
    async with NullCluster(model, pair(step_s=0.005)) as cluster:
        assert (await triton(cluster, "cancel"))["seen"] == ["left-1", "left-2"]
        await cluster.empty()
        await until(lambda: cluster.dispatcher.running == 0, "the router forgot them")
        assert [cluster["d0"].commands["abort", name] for name in ("left-1", "left-2")] == [1, 1]


async def test_keys_come_as_metadata(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{hashlib.sha256(b'right').hexdigest()}: acme\n")
    async with NullCluster(model, pair(), api_keys_file=str(keys)) as cluster:
        told = await triton(cluster, "keys")
        assert told["live"], "probes need no key"
        assert told["without"][0] == "StatusCode.UNAUTHENTICATED"
        assert told["with"]["text_output"][0].startswith("x")


@pytest.mark.timeout(400)  # it may have to be fetched
async def test_kserve_s_client(model: Path, authority: Authority, tmp_path: Path) -> None:
    """Without workers, with them, and with TLS, certificates and API keys, in one run of the client."""
    path = str(await asyncio.to_thread(kserve))
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{hashlib.sha256(b'right').hexdigest()}: acme\n")
    mine = authority.client()
    async with (
        NullCluster(model, []) as empty,
        NullCluster(model, pair()) as cluster,
        NullCluster(
            model, pair(), tls=authority.public(mutual=True), client_tls=mine, api_keys_file=str(keys)
        ) as tight,
    ):
        addresses = [each.router.address for each in (empty, cluster, tight)]
        told = await ran("kserve_client", *addresses, mine.ca_file, mine.cert_file, mine.key_file, path=path)
        unready, plain, secured = told["unready"], told["everything"], told["secured"]
        hello, you = await text_of(cluster, "hello", 5), await text_of(cluster, "you", 3)
        assert told["documented"] == await text_of(cluster, "Once upon a time", 32)
        assert (plain["live"], plain["ready"], plain["model_ready"]) == (True, True, [True, False])
        assert plain["typed"]["text_output"] == ["BYTES", [1], ["hello" + hello]]
        assert [plain["typed"][name] for name in ("id", "request_id", "model")] == ["mine", "mine", ["null", "1"]]
        assert plain["raw"]["text_output"] == ["BYTES", [2], ["hello" + hello, "you" + you]]
        assert plain["tensors"] | {"id": "", "request_id": ""} == {
            "id": "",
            "request_id": "",
            "model": ["null", "1"],
            "text_output": ["BYTES", [1], [hello]],
            "num_output_tokens": ["UINT32", [1], [5]],
            "finish_reason": ["BYTES", [1], ["length"]],
        }
        code, words, request_id = plain["bad"]
        assert (code, request_id) == ("INVALID_ARGUMENT", "theirs")
        assert "top_p: must be a number, got 'much'" in words
        assert plain["unknown"][0] == "NOT_FOUND"
        assert plain["number"][:2] == ["INVALID_ARGUMENT", "text_input: must be of datatype BYTES, got INT32"]
        assert plain["late"][0] == "DEADLINE_EXCEEDED"
        await cluster.empty()
        assert [unready[name] for name in ("live", "ready", "model_ready")] == [True, False, False]
        assert unready["infer"][:2] == ["UNAVAILABLE", "no worker is connected"]
        assert secured["live"]
        assert (secured["without"][0], secured["nobody"][0]) == ("UNAUTHENTICATED", "UNAVAILABLE")
        assert secured["with"]["text_output"][2][0].startswith("hello")


async def test_the_example_of_the_documentation(model: Path, tmp_path: Path) -> None:
    blocks = (REPOSITORY / "docs" / "grpc.md").read_text().split("```python\n")
    (script,) = [block.split("```")[0] for block in blocks if "tritonclient" in block.split("```")[0]]
    async with NullCluster(model, pair()) as cluster:
        script = script.replace("127.0.0.1:50051", cluster.router.address).replace("smollm2-135m", "null")
        path = tmp_path / "example.py"
        path.write_text(script)
        process = await asyncio.create_subprocess_exec(sys.executable, str(path), stdout=subprocess.PIPE)
        out, _ = await asyncio.wait_for(process.communicate(), 60.0)
        assert (process.returncode, out.decode()) == (0, await text_of(cluster, "Once upon a time", 32))


# -- what that client does not do ----------------------------------------------------------------------------------


def request(text: str, **parameters: int | bool) -> pb.ModelInferRequest:
    """With typed contents instead of raw ones, as KServe's clients may."""
    message = pb.ModelInferRequest(model_name="null")
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    for name, value in parameters.items():
        kind = "bool_param" if isinstance(value, bool) else "int64_param"
        setattr(message.parameters[name], kind, value)
    return message


async def test_typed_contents_are_answered_with_typed_contents(model: Path) -> None:
    async with NullCluster(model, pair()) as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        answer = await stub.ModelInfer(
            request("hi", max_tokens=3, exclude_input_in_output=True, return_num_output_tokens=True)
        )
        assert not answer.raw_output_contents
        by_name = {output.name: output.contents for output in answer.outputs}
        assert list(by_name["text_output"].bytes_contents) == [(await text_of(cluster, "hi", 3)).encode()]
        assert list(by_name["num_output_tokens"].uint_contents) == [3]


async def test_a_reader_that_stops_reading_pauses_its_request(model: Path) -> None:
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with (
        NullCluster(model, pair(), token_window=8) as cluster,
        grpc.aio.insecure_channel(cluster.router.address, options=options) as channel,
    ):
        call = GRPCInferenceServiceStub(channel).ModelStreamInfer()
        message = request("slow", max_tokens=3000, stream=True)
        message.id = "slow"
        await call.write(message)
        assert (await call.read()).infer_response.id == "slow"
        decode, credit = cluster["d0"], -1
        while credit != decode.commands["credit", "slow"] or not decode.held:
            credit = decode.commands["credit", "slow"]
            await asyncio.sleep(0.3)
        assert all(job.window <= 0 for job in decode.held.values())
        call.cancel()
        await cluster.empty()


async def test_a_drain_ends_idle_streams_and_lets_busy_ones_finish(model: Path) -> None:
    async with (
        NullCluster(model, [NullWorker("a0", Role.AGGREGATED)]) as cluster,
        grpc.aio.insecure_channel(cluster.router.address) as channel,
    ):
        gate = cluster["a0"].hook = Gate("token", index=2)
        stub = GRPCInferenceServiceStub(channel)
        idle, busy = stub.ModelStreamInfer(), stub.ModelStreamInfer()
        await busy.write(request("x", max_tokens=6, stream=True))
        await idle.wait_for_connection()
        await gate.reached.wait()
        draining = asyncio.ensure_future(cluster.router.drain(30.0))
        assert await idle.code() is grpc.StatusCode.UNAVAILABLE
        gate.opened.set()
        while not (await busy.read()).infer_response.parameters["triton_final_response"].bool_param:
            pass
        assert await busy.code() is grpc.StatusCode.UNAVAILABLE
        assert await draining is True


async def test_junk_on_a_stream_is_the_client_s_mistake(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with NullCluster(model, pair()) as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        await call.write(b"\xff\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "Traceback" not in caplog.text


async def test_a_bad_name_on_a_stream_is_told_and_the_others_go_on(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a character, which JSON can spell and no message can hold, ended the stream with UNKNOWN."""
    async with NullCluster(model, pair()) as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        call = GRPCInferenceServiceStub(channel).ModelStreamInfer()
        bad = request("a")
        bad.parameters["sampling_parameters"].string_param = '{"\\ud800": 1}'
        await call.write(bad)
        assert "?: is not known here" in (await call.read()).error_message
        await call.write(request("a", max_tokens=2))
        assert (await call.read()).infer_response.outputs
        call.cancel()
        assert "Traceback" not in caplog.text


async def test_an_error_beside_a_write_that_waits_for_its_reader_is_told(model: Path) -> None:
    """The write was cut off half-way, the one of the error was one too many, and the stream ended without a word."""
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with (
        NullCluster(model, pair()) as cluster,
        grpc.aio.insecure_channel(cluster.router.address, options=options) as channel,
    ):
        call = GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=30.0)
        message = request("a", max_tokens=3000, stream=True)
        message.id = "slow"
        text = message.inputs[0]
        text.shape[:] = [2]
        text.contents.bytes_contents.append(b"b")
        gate = cluster["d0"].hook = Gate(
            "token", index=5, only="slow/1"
        )  # it will have nothing to tell but its error
        await call.write(message)
        await gate.reached.wait()
        decode, credit = cluster["d0"], -1
        while credit != decode.commands["credit", "slow/0"] or credit < 1:
            credit = decode.commands["credit", "slow/0"]
            await asyncio.sleep(0.3)
        cluster.dispatcher.abandon("slow/1", Unavailable("given up", None))
        await asyncio.sleep(0)
        answer = await call.read()
        while not answer.error_message:
            answer = await call.read()
        assert answer.error_message.startswith("given up")
        await call.write(request("a", max_tokens=2))
        assert (await call.read()).infer_response.outputs
        call.cancel()
        await cluster.empty()


_DESCRIBE = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
found = {}
def walk(messages):
    for message in messages:
        for field in message.fields:
            of = field.message_type or field.enum_type
            found[f"{message.full_name}.{field.name}"] = [field.number, field.type, of and of.full_name]
        walk(message.nested_types)
for file in (module.DESCRIPTOR, *module.DESCRIPTOR.dependencies):
    walk(file.message_types_by_name.values())
    for enum in file.enum_types_by_name.values():
        found |= {value.name: value.number for value in enum.values}
for method in module.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
    types = [method.input_type.full_name, method.output_type.full_name]
    found["/" + method.name] = [*types, method.client_streaming, method.server_streaming]
print(json.dumps(found))
"""


def described(module: str) -> dict[str, Any]:
    """Fields and methods (with ``/`` before them) of a module of stubs."""
    command = [sys.executable, "-c", _DESCRIBE, module]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def test_names_and_numbers_are_triton_s_and_what_is_not_here_says_so(model: Path) -> None:
    ours, theirs = described("protos.open_inference_pb2"), described("tritonclient.grpc.service_pb2")
    assert {name: theirs.get(name) for name in ours} == ours
    assert len(ours) > 80
    absent = sorted(name for name in theirs.keys() - ours.keys() if name.startswith("/"))
    assert {"/ModelStatistics", "/RepositoryModelLoad", "/RepositoryModelUnload", "/LogSettings"} <= set(absent)
    async with NullCluster(model, []) as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        for name in absent:
            method = f"/inference.GRPCInferenceService{name}"
            with pytest.raises(grpc.aio.AioRpcError, match=f"there is no method '{method}' here") as refused:
                await channel.unary_unary(method)(b"")
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
