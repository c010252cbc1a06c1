"""The client commands against a scripted cluster over real gRPC: what they send, what they print, how they fail."""

from __future__ import annotations

import http.server
import io
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from rich.console import Console
from typer.core import TyperGroup
from typer.main import get_command

from cluster.cli.app import app
from cluster.cli.flag_names import _FLAGS
from cluster.cli.status import show
from pdcore.errors import Draining, InvalidRequest, Overloaded, UnknownModel
from protos import (
    admin_pb2,
    generation_pb2,
    generation_pb2_grpc,
    membership_pb2,
    routers_pb2,
    worker_pb2,
)
from tests.support.certificates import Authority
from tests.support.processes import REPOSITORY
from tests.support.scripted_cluster import END, Run, ScriptedCluster, scripted_cluster

Event = generation_pb2.GenerateEvent


@pytest.fixture
def cluster() -> Iterator[ScriptedCluster]:
    with scripted_cluster() as scripted:
        yield scripted


def test_generate_streams_the_text(cluster: ScriptedCluster) -> None:
    run = Run("generate", "Why?", "--address", cluster.address)
    assert (run.code, run.out, run.err) == (0, "Because so.\n", "")
    (request,) = cluster.requests
    assert request.request_id, "so that every error can name it"
    request.ClearField("request_id")
    assert request == generation_pb2.GenerateRequest(prompt="Why?", sampling=generation_pb2.Sampling())


def test_generate_goes_on_with_another_router(cluster: ScriptedCluster) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
        run = Run("generate", "Why?", "--address", f"{dead},{cluster.address}")
        assert (run.code, run.out) == (0, "Because so.\n")
        # Another that answers, and has nothing to offer.
        other = ScriptedCluster()
        other.events, other.error = [], (grpc.StatusCode.UNAVAILABLE, "draining")
        server = grpc.server(futures.ThreadPoolExecutor(1))
        generation_pb2_grpc.add_GenerationServicer_to_server(other, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            run = Run("generate", "Why?", "--address", f"127.0.0.1:{port},{cluster.address}")
            assert (run.code, run.out) == (0, "Because so.\n")
            assert len(other.requests) <= 1, "none if the second was faster to connect"
            run = Run("generate", "Why?", "--address", f"127.0.0.1:{port},{dead}")
            assert run.code == 75
            # Once something has come there is no other.
            other.events = [Event(token_ids=[7], text="Be")]
            asked = len(cluster.requests)
            run = Run("generate", "Why?", "--address", f"127.0.0.1:{port}")
            assert (run.code, run.out) == (75, "Be\n")
            assert len(cluster.requests) == asked
        finally:
            server.stop(0).wait(5)
    run = Run("generate", "Why?", "--address", f"{cluster.address},")
    assert run.code == 2
    assert "HOST:PORT" in run.err


def test_a_key_that_is_in_use_is_told(cluster: ScriptedCluster) -> None:
    cluster.events, cluster.error = [], (grpc.StatusCode.ALREADY_EXISTS, "the request 'r1' has this key")
    run = Run("generate", "Why?", "--address", cluster.address, "--idempotency-key", "k")
    assert run.code == 75
    assert "'r1'" in run.err
    assert "--idempotency-key" in run.err


def test_status_shows_the_router_that_answered(cluster: ScriptedCluster) -> None:
    run = Run("status", "--address", f"127.0.0.1:1,{cluster.address}")
    assert f" at {cluster.address}: serving" in run.out
    assert "127.0.0.1:1," not in run.out


def test_status_lists_several_routers(cluster: ScriptedCluster) -> None:
    for n, state in enumerate((routers_pb2.ROUTER_STATE_SERVING, routers_pb2.ROUTER_STATE_DRAINING)):
        router = routers_pb2.RouterDescription(router_id=f"r{n}", address=f"h:{n}", pid=40 + n)
        router.tls, router.http_address = n == 1, f"h:8{n}"
        cluster.status.routers.add(router=router, state=state)
    out = Run("status", "--address", cluster.address).out
    assert "router r0: serving at h:0 and http://h:80 (pid 40)" in out
    assert "router r1: draining at grpcs://h:1 and https://h:81 (pid 41)" in out


def test_generate_passes_every_flag_on(cluster: ScriptedCluster) -> None:
    flags = (
        "--max-tokens 9 --temperature 0.5 --top-k 3 --top-p 0.25 --min-p 0.125 --seed 18446744073709551615 --stop A "
        "--stop B --stop-token 4 --min-tokens 2 --ignore-eos --request-id r1 --model m --kv-codec q8 --cache-salt s "
        "--include-stop --keep-special --presence-penalty 0.5 --frequency-penalty -0.25 --repetition-penalty 1.5 "
        "--logit-bias 7=-2.5 --logit-bias 9=4 --allowed-token 1 --allowed-token 2 --bad-word x --logprobs 0 "
        "--prompt-logprobs 3 --priority batch --tenant t --idempotency-key k-1"
    )
    run = Run("generate", "Why?", "--address", cluster.address, *flags.split())
    assert run.code == 0, run.err
    assert cluster.requests[0] == generation_pb2.GenerateRequest(
        request_id="r1",
        priority=generation_pb2.PRIORITY_BATCH,
        tenant="t",
        idempotency_key="k-1",
        kv_codec="q8",
        cache_salt="s",
        model="m",
        prompt="Why?",
        sampling=generation_pb2.Sampling(
            max_tokens=9,
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            min_p=0.125,
            seed=2**64 - 1,
            stop=["A", "B"],
            stop_token_ids=[4],
            min_tokens=2,
            ignore_eos=True,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            presence_penalty=0.5,
            frequency_penalty=-0.25,
            repetition_penalty=1.5,
            logit_bias={7: -2.5, 9: 4.0},
            allowed_token_ids=[1, 2],
            bad_words=["x"],
            logprobs=0,
            prompt_logprobs=3,
        ),
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--json-object",), {"json_object": True}),
        (("--regex", "[a-z]+"), {"regex": "[a-z]+"}),
        (("--choice", "yes", "--choice", "no"), {"choice": worker_pb2.Choice(choices=["yes", "no"])}),
        (("--json-schema", "FILE"), {"json_schema": "of a file"}),
        (("--grammar", "FILE"), {"grammar": "of a file"}),
    ],
)
def test_generate_asks_for_a_form(
    flags: tuple[str, ...], expected: dict[str, object], cluster: ScriptedCluster, tmp_path: Path
) -> None:
    file = tmp_path / "form"
    file.write_text("of a file")
    run = Run("generate", "Why?", "--address", cluster.address, *(str(file) if f == "FILE" else f for f in flags))
    assert run.code == 0, run.err
    asked = cluster.requests[0].sampling.structured_output
    assert asked == worker_pb2.StructuredOutput(**expected)  # type: ignore[arg-type]


def test_generate_refuses_two_forms_and_files_that_are_not_there(cluster: ScriptedCluster) -> None:
    run = Run("generate", "Why?", "--address", cluster.address, "--regex", "a", "--json-object")
    assert run.code == 2
    assert "--json-object and --regex exclude each other" in run.err
    run = Run("generate", "Why?", "--address", cluster.address, "--json-schema", "/nowhere/s.json")
    assert run.code == 2
    assert run.err.endswith("--json-schema: cannot read /nowhere/s.json: No such file or directory\n")
    assert not cluster.requests


def test_generate_sends_zero_and_leaves_out_what_is_not_given(cluster: ScriptedCluster) -> None:
    Run("generate", "Why?", "--address", cluster.address, "--temperature", "0")
    sampling = cluster.requests[0].sampling
    assert sampling.HasField("temperature")
    assert not sampling.HasField("top_p")


# One newline at the end of a file is the file's, and not the prompt's.
FILES = [("Text", "Text"), ("Text\n", "Text"), ("Text\r\n", "Text"), ("\nText\n\n", "\nText\n"), ("Text ", "Text ")]


@pytest.mark.parametrize("argument", [(), ("-",)])
@pytest.mark.parametrize(("text", "prompt"), FILES)
def test_generate_reads_standard_input(
    cluster: ScriptedCluster, argument: tuple[str, ...], text: str, prompt: str
) -> None:
    assert Run("generate", *argument, "--address", cluster.address, stdin=text).code == 0
    assert cluster.requests[0].prompt == prompt


@pytest.mark.parametrize(("text", "prompt"), FILES)
def test_generate_reads_a_file(cluster: ScriptedCluster, tmp_path: Path, text: str, prompt: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(text.encode())
    assert Run("generate", "--file", str(file), "--address", cluster.address).code == 0
    assert cluster.requests[0].prompt == prompt
    assert Run("generate", "Text\n", "--address", cluster.address).code == 0
    assert cluster.requests[1].prompt == "Text\n", "an argument is taken as it is"


def test_generate_refuses_files_that_are_no_prompt(cluster: ScriptedCluster, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("From a file\n")
    for arguments, words in (
        (("--file", "/nowhere/p"), "--file: cannot read /nowhere/p: No such file or directory\n"),
        (("Why?", "--file", str(file)), "a prompt and --file exclude each other"),
    ):
        run = Run("generate", *arguments, "--address", cluster.address)
        assert run.code == 2
        assert words in run.err
    file.write_bytes(b"\xff")
    assert "it is not UTF-8" in Run("generate", "--file", str(file), "--address", cluster.address).err
    assert not cluster.requests


def test_generate_stats_go_to_standard_error(cluster: ScriptedCluster) -> None:
    run = Run("generate", "Why?", "--stats", "--address", cluster.address)
    assert run.out == "Because so.\n"
    assert (
        run.err
        == "first token after 12.2 ms, 222.2 tokens/s, 3 tokens; 0 of 5 prompt tokens cached; finish reason: stop\n"
    )
    cluster.events = [Event(sample=number, text="x", end=END) for number in range(2)]
    run = Run("generate", "Why?", "-n", "2", "--stats", "--address", cluster.address)
    assert [line.partition(":")[0] for line in run.err.splitlines()] == ["sample 0", "sample 1"]


def test_generate_says_that_an_answer_is_cut_off(cluster: ScriptedCluster) -> None:
    cluster.model.model.max_model_len = 40
    cut, full = generation_pb2.End(), generation_pb2.End()
    for end in (cut, full):
        end.CopyFrom(END)
        end.finish_reason = generation_pb2.FINISH_REASON_LENGTH
    full.usage.completion_tokens = 35
    cluster.answers = {"Cut": [Event(text="x", end=cut)], "Full": [Event(text="x", end=full)]}
    default = (
        "cut off there: the cluster gives this answer 3 tokens at most, as no --max-tokens is given (see router."
    )
    for question, flags, words in (
        ("Cut", (), default),
        ("Full", (), "cut off there: no room is left for more than the model's 40 tokens\n"),
        ("Cut", ("--json-object",), "it may not have the form that was asked for\n"),
        ("Cut", ("--max-tokens", "3", "--regex", "x*"), "cut off there: --max-tokens is reached; it may not have"),
        ("Cut", ("--max-tokens", "3"), ""),
        ("Cut", ("--max-tokens", "3", "--stats"), "finish reason: length\n"),
        ("Why?", ("--json-object",), ""),
        ("Cut", ("--json",), ""),
    ):
        run = Run("generate", question, "--address", cluster.address, *flags)
        assert run.code == 0
        assert words in run.err, (flags, run.err)
        assert words or not run.err, (flags, run.err)
    cluster.events = [Event(sample=number, text="x", end=cut) for number in range(2)]
    run = Run("generate", "Why?", "-n", "2", "--address", cluster.address)
    assert [line.partition(": the")[0] for line in run.err.splitlines()] == [
        f"sample {number}: cut off there" for number in range(2)
    ]


def test_generate_chat(cluster: ScriptedCluster) -> None:
    Run("generate", "Why?", "--chat", "--system", "Be brief.", "--address", cluster.address)
    messages = [(message.role, message.content) for message in cluster.requests[0].chat.messages]
    assert messages == [("system", "Be brief."), ("user", "Why?")]


def test_generate_token_ids(cluster: ScriptedCluster) -> None:
    Run("generate", " 504, 3575\n282 ", "--token-ids", "--address", cluster.address)
    assert list(cluster.requests[0].token_ids.ids) == [504, 3575, 282]


def test_generate_json(cluster: ScriptedCluster) -> None:
    run = Run("generate", "Why?", "--json", "--address", cluster.address)
    assert json.loads(run.out) == {
        "request_id": cluster.requests[0].request_id,
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "completion_tokens": 3,
        "text": "Because so.",
        "ttft_ms": 12.25,
        "tpot_ms": 4.5,
        "finish_reason": "stop",
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-1",
        "kv": {
            "blocks": 2,
            "raw_bytes": 4000,
            "wire_bytes": 2500,
            "codec": "bexp-zstd",
            "transport": "grpc",
            "seconds": 0.0125,
            "codec_reason": "asked for",
        },
        "token_ids": [7, 8, 9],
    }


def test_the_key_comes_from_a_file_or_the_environment_and_is_not_shown(
    cluster: ScriptedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "from-the-environment")
    path = tmp_path / "key"
    path.write_text("from-a-file\n")
    cluster.events = SCORED  # the command has tokens named, which is another call
    scored = ("generate", "Why?", "--logprobs", "1", "--address", cluster.address)
    assert Run(*scored).code == 0
    assert Run(*scored, "--api-key-file", str(path)).code == 0
    monkeypatch.delenv("PDSERVE_API_KEY")
    assert Run(*scored).code == 0
    calls = len(cluster.keys) // 3
    assert calls > 1
    expected = ["Bearer from-the-environment", "Bearer from-a-file", None]
    assert cluster.keys == [key for key in expected for _ in range(calls)]
    for text in ("", "two words", "\u00e4"):
        path.write_text(text)
        run = Run(*scored, "--api-key-file", str(path))
        assert run.code == 2
        assert "--api-key-file" in run.err
        assert "two words" not in run.err
    assert "--api-key-file: cannot read" in Run(*scored, "--api-key-file", str(tmp_path / "none")).err
    assert len(cluster.keys) == 3 * calls
    # An operator's, of whoever asks for the status.
    cluster.keys.clear()
    path.write_text("an-operator's\n")
    for more in ((), ("--steps",)):
        assert Run("status", "--json", *more, "--address", cluster.address, "--api-key-file", str(path)).code == 0
    assert cluster.keys == ["Bearer an-operator's"] * 2


SCORED = [
    Event(prompt_logprobs=worker_pb2.Logprobs(start=1, top=1, values=[-4.5], top_ids=[3], top_values=[-0.5])),
    Event(
        token_ids=[7, 8],
        text="Because ",
        logprobs=worker_pb2.Logprobs(
            top=2, values=[-0.25, -1.5], top_ids=[7, 5, 6, 8], top_values=[-0.25, -2.0, -1.0, -1.5]
        ),
    ),
    Event(
        token_ids=[9],
        text="so.",
        token_index=2,
        logprobs=worker_pb2.Logprobs(start=2, top=2, values=[-0.125], top_ids=[9, 5], top_values=[-0.125, -3.0]),
    ),
    Event(end=END),
]


def two_samples() -> list[Event]:
    logprobs = [
        worker_pb2.Logprobs(start=0, top=1, values=[-0.5], top_ids=[token], top_values=[-0.25]) for token in (7, 8)
    ]
    events = [
        Event(sample=number, token_ids=[7 + number], text=f"text {number}", logprobs=logprobs[number])
        for number in range(2)
    ]
    return [*events, Event(sample=1, end=END), Event(sample=0, end=END)]


def test_generate_samples_json_has_one_transfer(cluster: ScriptedCluster) -> None:
    cluster.events = two_samples()
    data = json.loads(Run("generate", "Why?", "-n", "2", "--json", "--address", cluster.address).out)
    assert list(data) == ["kv", "samples"]
    assert data["kv"]["wire_bytes"] == 2500
    assert [sample["sample"] for sample in data["samples"]] == [0, 1]
    assert [sample["token_ids"] for sample in data["samples"]] == [[7], [8]]
    assert [sample["logprobs"][0]["top"][0]["token_id"] for sample in data["samples"]] == [7, 8]
    assert not any("kv" in sample for sample in data["samples"])


def test_generate_tables_say_whose_they_are(cluster: ScriptedCluster) -> None:
    cluster.events = two_samples()
    run = Run("generate", "Why?", "-n", "2", "--logprobs", "1", "--timeline", "--address", cluster.address)
    assert run.out == "--- sample 1\ntext 1\n--- sample 0\ntext 0\n"
    assert "Log-probabilities of sample 0" in run.err
    assert "Log-probabilities of sample 1" in run.err
    assert "as sample 0" in run.err


def test_generate_logprobs_json(cluster: ScriptedCluster) -> None:
    cluster.events = SCORED
    data = json.loads(Run("generate", "Why?", "--json", "--logprobs", "2", "--address", cluster.address).out)
    assert [entry["position"] for entry in data["logprobs"]] == [0, 1, 2]
    assert data["logprobs"][1] == {
        "position": 1,
        "logprob": -1.5,
        "top": [{"token_id": 6, "logprob": -1.0}, {"token_id": 8, "logprob": -1.5}],
    }
    assert data["prompt_logprobs"] == [{"position": 1, "logprob": -4.5, "top": [{"token_id": 3, "logprob": -0.5}]}]


def test_generate_logprobs_as_tables_on_standard_error(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    cluster.events = SCORED
    run = Run("generate", "Why?", "--logprobs", "2", "--address", cluster.address)
    assert run.out == "Because so.\n"
    for words in ("Prompt log-probabilities", "-4.500", "'t7'", "-0.125", "'t5' -3.000"):
        assert words in run.err, words
    for flags in ((), ("--chat",)):
        run = Run("generate", "Why?", *flags, "--prompt-logprobs", "1", "--address", cluster.address)
        row = next(line for line in run.err.splitlines() if "-4.500" in line)
        assert [cell.strip() for cell in row.strip("\u2502").split("\u2502")] == [
            "1",
            "'t62'",
            "-4.500",
            "'t3' -0.500",
        ]
    run = Run("generate", "7 8", "--token-ids", "--prompt-logprobs", "1", "--address", cluster.address)
    assert "'t8'" in run.err


def test_generate_timeline_goes_to_standard_error(cluster: ScriptedCluster) -> None:
    run = Run("generate", "Why?", "--timeline", "--address", cluster.address)
    assert run.out == "Because so.\n"
    for cell in (
        "1.5 ms",
        "12.2 ms",
        "4.5 ms",
        "3.9 KiB",
        "2.4 KiB",
        "1.60",
        " bexp-zstd ",
        " grpc ",
        "decode-1",
        "asked for",
    ):
        assert cell in run.err, cell


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 2, "change the request"),
        (grpc.StatusCode.NOT_FOUND, 2, "--model"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 2, "change the request"),
        (grpc.StatusCode.UNAVAILABLE, 75, "pdserve status"),
        (grpc.StatusCode.UNAUTHENTICATED, 2, "--api-key-file"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 1, "--timeout"),
        (grpc.StatusCode.INTERNAL, 1, "log"),
    ],
)
def test_generate_error_says_what_happened_and_what_to_do(
    cluster: ScriptedCluster, status: grpc.StatusCode, code: int, advice: str
) -> None:
    cluster.events, cluster.error = [], (status, "sampling.top_p: the cluster's words")
    run = Run("generate", "Why?", "--address", cluster.address)
    assert run.code == code
    assert "sampling.top_p: the cluster's words" in run.err
    assert advice in run.err
    assert f"request {cluster.requests[0].request_id}" in run.err
    assert not run.out


def test_an_error_names_flags(cluster: ScriptedCluster) -> None:
    cluster.events = []
    bad_regex = "regex parse error:\n    a(\n     ^\nerror: unclosed group"
    for error, words in (
        (
            InvalidRequest("sampling.temperature", "must be in [0, 2], got 9"),
            "--temperature: must be in [0, 2], got 9 (",
        ),
        (
            InvalidRequest("sampling.top_p", "must be 1", [("sampling.stop[1]", "is long"), ("chat", "is odd")]),
            "--top-p: must be 1; --stop number 2: is long; chat: is odd (",
        ),
        (InvalidRequest("sampling.structured_output.json_schema", "is no JSON"), "--json-schema: is no JSON ("),
        (InvalidRequest("sampling.stop_token_ids", "must be few"), "--stop-token: must be few ("),
        (InvalidRequest("sampling.structured_output.regex", bad_regex), f"--regex: {bad_regex}\n("),
    ):
        cluster.error = error
        run = Run("generate", "Why?", "--address", cluster.address)
        assert run.code == 2
        assert run.err.startswith(f"error: {words}"), run.err


def test_every_flag_of_a_field_is_one_of_the_command() -> None:
    command = get_command(app)
    assert isinstance(command, TyperGroup)
    known = {flag for option in command.commands["generate"].params for flag in option.opts}
    assert set(_FLAGS.values()) <= known


def test_an_error_says_when_to_come_again_and_what_is_served(cluster: ScriptedCluster) -> None:
    cluster.events, cluster.error = [], Overloaded("the queue is full", 2.4)
    run = Run("generate", "Why?", "--address", cluster.address, "--request-id", "mine")
    assert run.code == 75
    assert "the queue is full" in run.err
    assert "request mine" in run.err
    assert "try again in 3 s" in run.err
    cluster.error = UnknownModel("gpt", ["tiny"])
    run = Run("generate", "Why?", "--address", cluster.address)
    assert run.code == 2
    assert "'gpt' is not served here; served: tiny" in run.err
    assert "leave --model out" in run.err


def test_generate_json_prints_nothing_of_a_failed_request(cluster: ScriptedCluster) -> None:
    cluster.events, cluster.error = cluster.events[:1], (grpc.StatusCode.UNAVAILABLE, "gone")
    run = Run("generate", "Why?", "--json", "--address", cluster.address)
    assert (run.code, run.out) == (75, "")


def test_generate_does_not_take_half_an_answer_for_a_whole_one(cluster: ScriptedCluster) -> None:
    cluster.events = cluster.events[:2]
    run = Run("generate", "Why?", "--address", cluster.address)
    assert run.code == 1
    assert "before the answer was complete" in run.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--system", "x"), "--system needs --chat"),
        (("--chat", "--token-ids"), "exclude each other"),
        (("--token-ids",), "'Why?' is not allowed"),
        (("--max-tokens", "-1"), "--max-tokens: -1 is not allowed"),
        (("--seed", str(2**64)), "--seed: "),
        (("--stop-token", "-7"), "--stop-token: [-7] is not allowed"),
        (("--logit-bias", "7"), "--logit-bias: '7' is not allowed"),
        (("--logit-bias", "-7=1"), "--logit-bias: '-7=1' is not allowed"),
        (("--logit-bias", "x=1"), "--logit-bias: 'x=1' is not allowed"),
        (("--allowed-token", "-7"), "--allowed-token: [-7] is not allowed"),
        (("--bad-word", "\udcff"), "--bad-word is not valid UTF-8"),
        (("--logprobs", "-1"), "--logprobs: -1 is not allowed"),
        (("--request-id", "\udcff"), "--request-id is not valid UTF-8"),
        (("--stop", "\udcff"), "--stop is not valid UTF-8"),
    ],
)
def test_generate_refuses_bad_flags_without_asking_the_cluster(
    cluster: ScriptedCluster, flags: tuple[str, ...], words: str
) -> None:
    run = Run("generate", "Why?", "--address", cluster.address, *flags)
    assert run.code == 2
    assert words in run.err
    assert not cluster.requests


@pytest.mark.parametrize("command", [("generate", "Why?"), ("status",)])
def test_nobody_there(command: tuple[str, ...]) -> None:
    with socket.socket() as taken:  # bound, and nobody listens: the port stays free of others
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = Run(*command, "--address", address)
    assert run.code == 1
    assert f"no connection with {address}: nothing listens there" in run.err
    assert "`pdserve serve`" in run.err


def test_why_there_is_no_connection() -> None:
    class Server(http.server.HTTPServer):
        def handle_error(self, *_: object) -> None:  # whoever connects goes away at once
            pass

    with Server(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        try:
            at = f"127.0.0.1:{other.server_port}"
            run = Run("generate", "Why?", "--address", at)
            assert run.code == 1
            assert f"no connection with {at}: it does not speak gRPC" in run.err
            assert "printed behind grpc=" in run.err
        finally:
            other.shutdown()
    run = Run("generate", "Why?", "--address", "nohost.invalid,127.0.0.1:1")
    assert run.code == 1
    assert (
        "no connection with nohost.invalid:50051: its name is not known; no connection with 127.0.0.1:1: " in run.err
    )
    assert "; check --address; one that drains takes no new connections" in run.err


def test_a_router_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.cli.client.CONNECT_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        run = Run("status", "--address", address)
    assert run.code == 1
    assert f"no connection with {address}: no answer within 0.3 s; check --address" in run.err


def test_a_router_that_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.cli.client.CONNECT_S", 0.3)
    cluster = ScriptedCluster()
    cluster.events, cluster.error, cluster.endless = [], Draining("the router is draining"), "endless"
    server = grpc.server(futures.ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServicer_to_server(cluster, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with futures.ThreadPoolExecutor(1) as threads:
        try:
            # It refuses.
            run = Run("generate", "Why?", "--address", address)
            assert run.code == 75
            assert "the router is draining (unavailable" in run.err
            assert "this router is ending: try again in a moment" in run.err
            # It listens no longer, and ends what it has begun.
            with grpc.insecure_channel(address) as channel:
                call = generation_pb2_grpc.GenerationStub(channel).Generate(
                    generation_pb2.GenerateRequest(prompt="endless")
                )
                running = threads.submit(lambda: list(call))
                while len(cluster.requests) < 2:
                    time.sleep(0.01)
                server.stop(20)
                run = Run("generate", "Why?", "--address", address)
                assert run.code == 1
                assert "one that drains takes no new connections" in run.err
                assert not running.done()
                call.cancel()
                assert isinstance(running.exception(10), grpc.RpcError)
        finally:
            server.stop(0).wait(5)


def test_an_address_without_a_port_and_one_with_too_much() -> None:
    run = Run("generate", "Why?", "--address", "127.8.8.8")  # this machine, where nothing listens
    assert run.code == 1
    assert "no connection with 127.8.8.8:50051: " in run.err
    run = Run("generate", "Why?", "--address", "grpc=127.0.0.1:50051")
    assert run.code == 2
    assert "--address: must be HOST:PORT, without grpc= before it" in run.err


def test_files_are_named_by_where_they_are_from(
    cluster: ScriptedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.cli.client.CONNECT_S", 0.3)
    command = ("generate", "Why?", "--address")
    for address in (cluster.address, f"grpcs://{cluster.address}"):
        monkeypatch.setenv("PDSERVE_TLS_CA", "/none.pem")
        run = Run(*command, address)
        assert run.code == 2
        assert run.err.startswith("error: $PDSERVE_TLS_CA: cannot read /none.pem: No such file"), run.err
        run = Run(*command, address, "--tls-ca", "/other.pem")
        assert run.err.startswith("error: --tls-ca: cannot read /other.pem: No such file"), run.err
        # The right files, for somebody who has no TLS.
        mine = Authority(tmp_path).client().ca_file
        scheme = " and grpcs:// in the address" if "://" in address else ""
        monkeypatch.setenv("PDSERVE_TLS_CA", mine)
        run = Run(*command, address)
        assert run.code == 1
        assert run.err.endswith(f"call it in plain text, without $PDSERVE_TLS_CA{scheme}\n"), run.err
        monkeypatch.delenv("PDSERVE_TLS_CA")
        run = Run(*command, address, "--tls-ca", mine)
        assert run.err.endswith(f"call it in plain text, without --tls-ca{scheme}\n"), run.err
    assert Run(*command, cluster.address, "--tls-cert", mine).err == "error: --tls-cert needs --tls-key\n"
    assert Run(*command, cluster.address, "--tls-key", mine).err == "error: --tls-key needs --tls-cert\n"


def test_a_call_whose_time_is_up(cluster: ScriptedCluster) -> None:
    cluster.endless = "Why?"
    for events in (cluster.events[:1], []):
        cluster.events = events
        run = Run("generate", "Why?", "--address", cluster.address, "--timeout", "0.2")
        assert run.code == 1
        assert run.err.startswith("error: the time was up before the answer was complete (deadline exceeded, from ")
        assert "give more --timeout" in run.err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_router_that_is_killed_in_the_middle(command: str, tmp_path: Path) -> None:
    """A whole one in a process of its own: what is cut off is the connection."""
    code = (
        "import time, grpc; from tests.support.scripted_cluster import *\n"
        "cluster = ScriptedCluster(); cluster.endless = 'Why?'; server = grpc.server(futures.ThreadPoolExecutor(4))\n"
        "generation_pb2_grpc.add_GenerationServicer_to_server(cluster, server)\n"
        "print(server.add_insecure_port('127.0.0.1:0'), flush=True); server.start(); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as router:
        assert router.stdout is not None
        address = f"127.0.0.1:{router.stdout.readline().strip()}"
        timer = threading.Timer(1.0, router.kill)
        timer.start()
        try:
            if command == "chat":
                run = Run("chat", "--address", address, stdin="Why?\n")
            else:
                run = Run("generate", "Why?", "--address", address)
        finally:
            timer.join()
            router.kill()
    assert run.code == 75
    assert "error: the router closed the connection, or has ended (unavailable, from " in run.err
    assert "Because so." in run.out
    assert "Socket closed" not in run.err


def test_something_else_there(cluster: ScriptedCluster) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        run = Run("generate", "Why?", "--address", f"127.0.0.1:{port}")
    finally:
        server.stop(0).wait(5)
    assert run.code == 1
    assert "something else than pdserve" in run.err


def a_status() -> admin_pb2.GetStatusReply:
    reply = admin_pb2.GetStatusReply(
        router_id="blue-router",
        uptime_s=61,
        model=worker_pb2.ModelDescription(name="tiny", max_model_len=2048, dtype="float32"),
        queued_requests=2,
        running_requests=3,
    )
    reply.workers.add(
        worker=membership_pb2.WorkerDescription(
            worker_id="decode-0",
            role=worker_pb2.WORKER_ROLE_DECODE,
            address="192.168.117.204:54321",
            pid=1234567,
            native_code="avx512",
            transports=["shm", "grpc"],
        ),
        state=membership_pb2.WORKER_STATE_SERVING,
        connected=True,
        load=worker_pb2.Load(running=3, total_blocks=100, free_blocks=58, open_tickets=1, step_ms=12.34),
    )
    reply.workers.add(
        worker=membership_pb2.WorkerDescription(
            worker_id="prefill-0",
            role=worker_pb2.WORKER_ROLE_PREFILL,
            native_code="off: no C compiler (cc) was found",
            transports=["shm", "grpc"],
        ),
        problem="no route",
    )
    return reply


def test_status_shows_pools_workers_and_load(cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    cluster.status = a_status()
    run = Run("status", "--address", cluster.address)
    assert run.code == 0, run.err
    for words in ("blue-router", "tiny", "3 running, 2 queued", "42/100", "12.3 ms", "prefill-0: no route", "avx512"):
        assert words in run.out, words
    assert "prefill-0: no native code: no C compiler (cc) was found" in run.out
    assert "KV transports: shm, grpc" in run.out


def test_status_says_what_became_of_each_class() -> None:
    reply = a_status()
    reply.classes.add(name="interactive", waiting=1, max_queue=9, admitted=7, shed_late=2, shed_waiting=1, finished=5)
    reply.classes[0].late = 2
    reply.classes.add(name="standard", max_queue=9, ttft_ms=5000.0)
    assert not any("limits" in line for line in shown_at(100, reply))
    reply.rate_limited_requests = 4
    lines = shown_at(100, reply)
    expected = "1 of 9 waiting, 7 admitted, 3 shed (2 too late, 1 given up), 5 finished (2 late)"
    assert f"interactive: {expected}" in lines
    assert not any(line.startswith("standard") for line in lines), "nobody came"
    assert "over their tenants' limits: 4" in lines


def test_status_says_what_transfers_came_to() -> None:
    reply = a_status()
    assert not any("KV sent" in line or "KV packed" in line or "KV trouble" in line for line in shown_at(80, reply))
    events = reply.workers[1].load.transfer_events
    for name, count in {
        "shm_frames": 3, "shm_bytes": 2_500_000, "grpc_frames": 0, "grpc_bytes": 0, "shm_opened": 1,
        "codec_bexp3_raw_bytes": 2_000_000, "codec_bexp3_wire_bytes": 1_400_000,
        "codec_raw_raw_bytes": 1_100_000, "codec_raw_wire_bytes": 1_100_000,
        "frames_retried": 2, "lanes_failed": 0, "frames_moved": 0,
    }.items():  # fmt: skip
        events[name] = count
    reply.workers[0].load.transfer_events["tickets_failed"] = 1
    lines = shown_at(80, reply)
    assert "prefill-0: KV sent: 2.5 MB by shm" in lines
    assert "prefill-0: KV packed: bexp3 1.4 MB of 2.0 MB, raw 1.1 MB of 1.1 MB" in lines
    assert "prefill-0: KV trouble: 2 frames sent again" in lines
    assert "decode-0: KV trouble: 1 transfers that did not arrive" in lines


def test_status_says_which_ways_requests_took_and_what_is_missing() -> None:
    reply = a_status()
    assert not any("routes:" in line or "degraded" in line for line in shown_at(80, reply))
    reply.degraded = "no prefill worker serves: decode workers run requests as a whole"
    reply.decisions.add(mode="disaggregated", reason="cheaper_by_prediction", count=30)
    reply.decisions.add(mode="local", reason="short_prompt", count=10)
    shown = " ".join(shown_at(80, reply))
    assert "degraded: no prefill worker serves: decode workers run requests as a whole" in shown
    assert "routes: 75% disaggregated (cheaper_by_prediction), 25% local (short_prompt)" in shown


def test_status_says_whose_circuit_is_not_closed_and_why() -> None:
    reply = a_status()
    reply.workers[0].circuit = admin_pb2.CIRCUIT_STATE_CLOSED
    reply.workers[0].last_failure = "an old one"
    assert not any("circuit" in line for line in shown_at(80, reply))
    reply.workers[0].circuit = admin_pb2.CIRCUIT_STATE_OPEN
    reply.workers[1].circuit = admin_pb2.CIRCUIT_STATE_HALF_OPEN
    reply.workers[1].last_failure = "out of memory"
    shown = shown_at(80, reply)
    name, other = (worker.worker.worker_id for worker in reply.workers[:2])
    assert f"{name}: circuit open: it gets what nobody else could take; the last failure: an old one" in shown
    assert f"{other}: circuit half open: the next request tries it; the last failure: out of memory" in shown


def shown_at(width: int, reply: admin_pb2.GetStatusReply) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    show(reply, "127.0.0.1:50051", console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_status_is_readable_at_80_columns() -> None:
    reply = a_status()
    for index in range(12):
        worker = reply.workers.add(connected=True, state=membership_pb2.WORKER_STATE_SERVING)
        worker.CopyFrom(reply.workers[0])
        worker.worker.worker_id = f"aggregated-{index}"
        worker.worker.role = worker_pb2.WORKER_ROLE_AGGREGATED
        worker.load.total_blocks, worker.load.free_blocks, worker.load.step_ms = 12345, 45, 1234.5
        worker.load.cached_blocks, worker.load.queued_prefill_tokens = 12345, 123456
    for width in (80, 100):
        lines = shown_at(width, reply)
        tables = [
            line for line in lines if line and not line.startswith(("blue-router", "requests", "prefill-0:", "KV tr"))
        ]
        assert max(map(len, tables)) <= width
        # One line per worker and table: no cell is folded, none is cut off.
        for worker in reply.workers:
            assert sum(line.split()[:1] == [worker.worker.worker_id] for line in tables) == 2
        assert not any("\u2026" in line for line in lines)
    words = set(" ".join(shown_at(80, reply)).split())
    assert words >= {"worker", "pool", "state", "address", "native", "code"}
    assert words >= {"run", "wait", "pause", "queued", "tokens", "KV", "blocks", "used", "transfers", "step"}
    assert words >= {"192.168.117.204:54321", "12300/12345", "aggregated-11", "1234.5", "123456", "avx512"}
    assert set(" ".join(shown_at(100, reply)).split()) >= {"pid", "1234567", "prefix", "cache"}


def some_steps() -> admin_pb2.GetClusterStepsReply:
    reply = admin_pb2.GetClusterStepsReply()
    decode = reply.workers.add(worker_id="decode-0", role=worker_pb2.WORKER_ROLE_DECODE)
    decode.steps.add(
        step=1234567, age_s=3599.96, tokens=8192, decodes=128, prefills=17, bound_by="memory", running=145,
        waiting_interactive=11, waiting_standard=222, waiting_batch=333, free_blocks=12345, preempted=12,
        predicted_ms=987.65, ms=1234.56,
    )  # fmt: skip
    decode.steps.add(step=1234568, tokens=3, decodes=3, running=3, ms=21.5)
    reply.workers.add(worker_id="prefill-0", problem="no route")
    return reply


def test_last_steps_as_a_table_that_fits_80_columns(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cluster.steps = some_steps()
    run = Run("status", "--steps", "--last", "7", "--address", cluster.address)
    assert run.code == 0, run.err
    assert cluster.asked_steps == 7
    lines = run.out.splitlines()
    first, second = (next(line for line in lines if line.split()[:1] == [step]) for step in ("1234567", "1234568"))
    assert first.split()[2:] == ["8192", "128", "17", "memory", "145", "11/222/333", "12345", "12", "1234.6", "987.6"]
    assert second.split()[-2:] == ["21.5", "-"]
    assert max(map(len, lines)) <= 80
    assert "no route" in run.out


def test_last_without_steps_is_refused(cluster: ScriptedCluster) -> None:
    run = Run("status", "--last", "5", "--address", cluster.address)
    assert run.code == 2
    assert "--last needs --steps" in run.err
    assert not cluster.keys, "nobody is asked"


def test_last_steps_as_json(cluster: ScriptedCluster) -> None:
    cluster.steps = some_steps()
    data = json.loads(Run("status", "--steps", "--json", "--address", cluster.address).out)
    assert cluster.asked_steps == 20
    assert data["workers"][0]["steps"][0]["bound_by"] == "memory"
    assert data["workers"][0]["steps"][0]["predicted_ms"] == 987.65
    assert data["workers"][1]["problem"] == "no route"


def test_status_json(cluster: ScriptedCluster) -> None:
    cluster.status = a_status()
    data = json.loads(Run("status", "--json", "--address", cluster.address).out)
    assert data["running_requests"] == 3
    assert data["failed_requests"] == "0"  # 64-bit numbers are strings in protobuf's JSON
    assert [worker["worker"]["worker_id"] for worker in data["workers"]] == ["decode-0", "prefill-0"]
    assert data["workers"][0]["load"]["free_blocks"] == 58
