"""Commands that need no cluster: help, configuration, and the demonstration's output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.cli.serve import where_to_call
from cluster.config_file import load_config
from cluster.demo import DemoRequest, check_disaggregated, demo_rounds, to_dict
from cluster.demo_view import LineView, PanelView, make_view
from cluster.timeline import Answer, timeline_tables
from pdcore.addresses import Address, parse_address
from pdcore.errors import PdserveError
from protos import generation_pb2, kv_pb2
from tests.support.processes import REPOSITORY

COMMANDS = [command.callback.__name__ for command in app.registered_commands if command.callback is not None]


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), prog_name="pdserve")
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    code, out, _ = invoke(command, "--help")
    assert code == 0
    assert "Examples:" in out
    assert f"pdserve {command}" in out


def test_help_of_the_whole_has_examples_of_commands_that_there_are() -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    assert "Examples:" in out
    shown = re.findall(r"(?m)^ *pdserve ([a-z]+)(?: .*)?$", out.partition("Examples:")[2].partition("Options")[0])
    assert len(shown) >= 4
    assert set(shown) <= set(COMMANDS)


def run_in_shell(script: str, shell: str = "bash", **environment: str) -> str:
    """What a script prints that calls the command."""
    done = subprocess.run(
        [shell, "-c", f"{script}\ntrue"],  # the last line keeps the shell from becoming the command
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **environment, "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_completion_in_bash(tmp_path: Path) -> None:
    shown = run_in_shell('"$PYTHON" -m cluster --show-completion')
    command = tmp_path / "pdserve"
    command.write_text('#!/bin/sh\nexec "$PYTHON" -m cluster "$@"\n')
    command.chmod(0o755)
    # What a shell does with it on <TAB>.
    script = """
        source /dev/stdin <<< "$SHOWN"
        for words in "pdserve gen" "pdserve chat --priority b"; do
          COMP_WORDS=($words) COMP_CWORD=$(( $(wc -w <<< "$words") - 1 ))
          _pdserve_completion pdserve
          echo "${COMPREPLY[@]}"
        done
    """
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert run_in_shell(script, SHOWN=shown, PATH=path).split() == ["generate", "batch"]


@pytest.mark.parametrize(
    ("shell", "script", "asked"),
    [
        ("zsh", ["#compdef pdserve", "compdef _pdserve_completion pdserve", "_PDSERVE_COMPLETE=complete_zsh"], {}),
        (
            "fish",
            ["complete --command pdserve", "_PDSERVE_COMPLETE=complete_fish"],
            {"_TYPER_COMPLETE_FISH_ACTION": "get-args"},
        ),
    ],
)
def test_completion_in_shells_that_may_not_be_here(shell: str, script: list[str], asked: dict[str, str]) -> None:
    """What they are given to source, and what that script then asks for."""
    given = run_in_shell('"$PYTHON" -m cluster', _PDSERVE_COMPLETE=f"source_{shell}")
    assert all(part in given for part in script), given
    for words, completed, other in (("gen", "generate", "status"), ("chat --priority b", "batch", "standard")):
        environment = {"_PDSERVE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": f"pdserve {words}", **asked}
        answer = run_in_shell('"$PYTHON" -m cluster', **environment)
        assert completed in answer
        assert other not in answer


def test_installing_completion_writes_to_the_home_of_whoever_asks(tmp_path: Path) -> None:
    told = run_in_shell('"$PYTHON" -m cluster --install-completion', HOME=str(tmp_path))
    assert "bash completion installed in" in told
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "_pdserve_completion" in written


def test_printed_configuration_is_a_configuration_file(tmp_path: Path) -> None:
    code, out, err = invoke("config", "--set", "decode.workers=2", "--set", "prefill.kv_memory=64MiB", "--explain")
    assert code == 0, err
    path = tmp_path / "cluster.yaml"
    path.write_text(out)
    config = load_config(path)
    assert (config.decode.workers, config.prefill.kv_memory) == (2, 64 << 20)


def test_serve_flags_reach_the_configuration_and_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: other\nrouter: {grpc_port: 1, max_queue: 7}\n")
    workers = ["--prefill", "2", "--decode", "3", "--aggregated", "1", "--model", "m", "--dtype", "float32"]
    addresses = ["--host", "0.0.0.0", "--insecure", "--grpc-port", "4", "--ray-address", "auto"]
    code, out, err = invoke("serve", "--config", str(path), *workers, *addresses, "--print-config")
    assert code == 0, err
    path.write_text(out)
    config = load_config(path)
    assert (config.prefill.workers, config.decode.workers, config.aggregated.workers) == (2, 3, 1)
    assert (config.model, config.dtype) == ("m", "float32")
    assert (config.router.host, config.router.grpc_port, config.router.max_queue) == ("0.0.0.0", 4, 7)
    assert config.ray.address == "auto"
    assert config.router.allow_insecure_listen
    assert config.ray.allow_insecure_listen


def test_aggregated_alone_means_nothing_else(tmp_path: Path) -> None:
    code, out, _ = invoke("serve", "--aggregated", "2", "--print-config")
    assert code == 0
    path = tmp_path / "cluster.yaml"
    path.write_text(out)
    config = load_config(path)
    assert (config.prefill.workers, config.decode.workers, config.aggregated.workers) == (0, 0, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dtype", "bf16"), ["dtype", "'bf16'", "'bfloat16'"]),
        (("--grpc-port", "70000"), ["router.grpc_port", "70000", "65535"]),
        (("--set", "router.max_qeue=1"), ["router.max_qeue", "did you mean router.max_queue?"]),
        (("--set", "router.max_queue"), ["KEY=VALUE"]),
        (("--config", "/nowhere.yaml"), ["--config", "/nowhere.yaml"]),
        (("--decode", "0"), ["decode.workers", "at least 1"]),
        (("--set", "transfer.calibration=/nowhere"), ["transfer.calibration", "no such file", "pdserve calibrate"]),
        (("--set", "router.chat_template=/nowhere"), ["router.chat_template", "No such file"]),
        (("--set", "router.default_max_tokens=-1"), ["router.default_max_tokens", "-1"]),
        (("--set", "transfer.credit_bytes=10TiB"), ["transfer.credit_bytes", "1073741824"]),
        (("--set", "router.kv_codec_by_class.batch=tc4"), ["kv_codec_by_class.batch", "tc4", "pdserve calibrate"]),
    ],
)
def test_serve_refuses_a_bad_configuration_at_once(arguments: tuple[str, ...], words: list[str]) -> None:
    code, _, err = invoke("serve", *arguments)
    assert code == 2
    assert all(word in err for word in words), err


def test_ready_names_what_clients_take() -> None:
    assert where_to_call(["h:1", "h:2"], ["h:3", "h:4"], tls=False) == "grpc=h:1,h:2 http=http://h:3,http://h:4"
    assert where_to_call(["h:1"], ["h:3"], tls=True) == "grpc=grpcs://h:1 http=https://h:3"
    assert where_to_call(["h:1"], [], tls=False) == "grpc=h:1"
    assert parse_address("grpcs://h:1") == Address("h:1", True)


def finished(name: str) -> Answer:
    answer = Answer(name)
    answer.add(generation_pb2.GenerateEvent(token_ids=[1], text="Hi"))
    answer.add(
        generation_pb2.GenerateEvent(
            end=generation_pb2.End(
                finish_reason=generation_pb2.FINISH_REASON_STOP,
                usage=generation_pb2.Usage(prompt_tokens=3, completion_tokens=1),
                timeline=generation_pb2.Timeline(
                    mode="disaggregated",
                    prefill_worker="prefill-0",
                    decode_worker="decode-0",
                    kv=kv_pb2.TransferStats(
                        blocks=1,
                        raw_bytes=3 << 20,
                        wire_bytes=2 << 20,
                        codec="c",
                        transport="t",
                        codec_reason="[c] is best",
                    ),
                ),
            )
        )
    )
    return answer


def test_demo_json_has_the_documented_keys() -> None:
    data: Any = json.loads(json.dumps(to_dict([finished("a"), finished("b")])))
    assert list(data) == ["requests"]
    assert len(data["requests"]) == 2
    keys = ["prompt_tokens", "completion_tokens", "text", "ttft_ms", "tpot_ms", "finish_reason"]
    keys += ["prefill_worker", "decode_worker", "kv"]
    assert list(data["requests"][0]) == keys
    kv_keys = ["blocks", "raw_bytes", "wire_bytes", "codec", "transport", "seconds", "codec_reason"]
    assert list(data["requests"][0]["kv"]) == kv_keys


def test_demo_fails_unless_every_request_was_disaggregated() -> None:
    good, local, silent, cancelled = (finished(name) for name in ("good", "local", "silent", "cancelled"))
    check_disaggregated([good, good])
    assert local.end is not None
    local.end.timeline.mode, local.end.timeline.reason = "local", "no prefill worker"
    assert silent.end is not None
    silent.end.timeline.ClearField("kv")
    assert cancelled.end is not None
    cancelled.end.finish_reason = generation_pb2.FINISH_REASON_CANCELLED
    with pytest.raises(PdserveError, match=r"'local' was not disaggregated.*no prefill worker"):
        check_disaggregated([good, local])
    with pytest.raises(PdserveError, match=r"'silent' was not disaggregated.* 0 bytes of KV"):
        check_disaggregated([silent])
    with pytest.raises(PdserveError, match="'cancelled' was not completed"):
        check_disaggregated([good, cancelled])


def test_timeline_has_a_column_for_each_request(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=120).print(*timeline_tables([finished("first"), finished("second")]))
    out = capsys.readouterr().out
    assert out.count("1.50") == 2
    assert "first: KV by c: [c] is best" in out
    assert "second: KV by c: [c] is best" in out
    assert "first" in out
    assert "second" in out


def test_timelines_of_many_samples_fit_a_terminal_and_name_the_transfer_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    samples = [replace(finished(f"sample {number}"), sample=number) for number in range(7)]
    for answer in samples:
        assert answer.end is not None
        answer.end.timeline.kv.codec, answer.end.timeline.kv.transport = "bexp-zstd", "collective"
    for table in timeline_tables(samples):
        Console(width=80).print(table)
    out = capsys.readouterr().out
    assert [out.replace("as sample 0", "").count(f"sample {number} ") for number in range(7)] == [1] * 7
    assert out.count("1.50") == 1
    assert out.count("as sample 0") == 6
    assert out.count("is best") == 1
    assert out.count(" bexp-zstd ") == 1
    assert out.count(" collective ") == 1


def test_demo_requests_run_two_at_once_and_one_of_them_is_long() -> None:
    rounds = demo_rounds()
    assert max(len(requests) for requests in rounds) == 2
    words = {request.name: len(request.message.split()) for requests in rounds for request in requests}
    assert words["document"] > 1500
    assert set(words) == {"chat", "document", "code"}


def test_lines_of_two_answers_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    view = LineView(Console(width=200), width=20)
    view.begin([DemoRequest("a", "Say one\ntwo three", 1), DemoRequest("b", "Say two", 1)])
    for piece_a, piece_b in (("one ", "[x"), ("two thr", "] = 1\n"), ("ee four five", "  return"), (" six", " x")):
        view.text("a", piece_a)
        view.text("b", piece_b)
    view.finish()
    lines = [line.split(" | ", 1) for line in capsys.readouterr().out.splitlines()]
    assert [text for name, text in lines if name.strip() == "a"] == [
        "> Say one [+ 2 words]",
        "one two three four",
        "five six",
    ]
    assert [text for name, text in lines if name.strip() == "b"] == ["> Say two", "[x] = 1", "  return x"]


def test_panels_show_both_answers(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=100, force_terminal=True)
    view = make_view(console)
    assert isinstance(view, PanelView)
    view.begin([DemoRequest("a", "x", 1), DemoRequest("b", "y", 1)])
    view.text("a", "left side")
    view.text("b", "right side")
    view.finish()
    last = capsys.readouterr().out
    assert "left side" in last
    assert "right side" in last
    assert isinstance(make_view(Console(force_terminal=False)), LineView)
