"""The command where its standard streams are closed, full, or no UTF-8: in processes, through a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.processes import REPOSITORY
from tests.support.scripted_cluster import END, Event, ScriptedCluster, scripted_cluster

TEXT = "caf\u00e9 \u2192 \U0001f600 end"
NOT_UTF8 = b"caf\xe9\n"
C_LOCALE = {"LC_ALL": "C"}
"""Python makes UTF-8 of it, and takes any bytes."""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LATIN = {"PYTHONIOENCODING": "latin-1"}


@pytest.fixture
def cluster() -> Iterator[ScriptedCluster]:
    with scripted_cluster() as scripted:
        scripted.events = [Event(text=piece, token_ids=[7]) for piece in TEXT.partition(" ")]
        scripted.events.append(Event(end=END))
        yield scripted


class Shell:
    """One finished run of ``pdserve ARGUMENTS``, where the arguments may redirect; bytes of it."""

    def __init__(
        self, arguments: str, cluster: ScriptedCluster | None = None, stdin: bytes = b"", **environment: str
    ) -> None:
        # The shell is not to become the command: it would lack the streams, too.
        script = f'"$PYTHON" -m cluster {arguments}; exit $?'
        kept = {name: value for name, value in os.environ.items() if name not in ("LANG", "LC_ALL")}
        address = {} if cluster is None else {"AT": f"--address={cluster.address}"}
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=REPOSITORY, input=stdin, capture_output=True, timeout=60, check=False,
            env={**kept, "PYTHON": sys.executable, **address, **environment},
        )  # fmt: skip
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr.decode()
        assert "Traceback" not in self.err, self.err


@pytest.mark.parametrize(
    ("command", "locale"),
    [
        ("generate", C_LOCALE),
        ("generate -", {"PYTHONIOENCODING": "utf-8"}),
        ("generate --chat", ASCII),
        ("chat", C_LOCALE),
        ("chat", {"PYTHONIOENCODING": "utf-8"}),
        ("generate --file /dev/stdin", C_LOCALE),
    ],
)
def test_input_that_is_not_utf8_is_refused(cluster: ScriptedCluster, command: str, locale: dict[str, str]) -> None:
    run = Shell(f"{command} $AT", cluster, NOT_UTF8, **locale)
    assert run.code == 2
    assert run.err.startswith("error: ")
    assert "UTF-8" in run.err
    assert not cluster.requests


@pytest.mark.parametrize(
    ("command", "locale"),
    [
        ("generate", LATIN),
        ("generate --timeline --logprobs 1", ASCII),
        ("generate -n 2", LATIN),
        ("chat", ASCII),
    ],
)
def test_an_output_that_lacks_characters_has_escapes_for_them(
    cluster: ScriptedCluster, command: str, locale: dict[str, str]
) -> None:
    if "-n 2" in command:
        cluster.events = [Event(sample=sample, text=TEXT, end=END) for sample in range(2)]
    run = Shell(f"{command} $AT", cluster, b"Why?\n", **locale)
    assert run.code == 0, run.err
    assert (b"caf\xe9" if locale is LATIN else rb"caf\xe9") + rb" \u2192 \U0001f600 end" in run.out


@pytest.mark.parametrize(
    ("command", "code", "out"),
    [
        ("generate Why? $AT <&-", 0, TEXT),
        ("generate Why? $AT >&-", 0, ""),
        ("generate Why? $AT --json >&-", 0, ""),
        ("generate Why? $AT --stats --timeline 2>&-", 0, TEXT),
        ("generate Why? $AT <&- >&- 2>&-", 0, ""),
        ("generate Why? $AT -n x 2>&-", 2, ""),
        ("generate Why? $AT --chat --token-ids 2>&-", 2, ""),
        ("chat $AT >&-", 0, ""),
        ("chat $AT <&-", 0, ""),
        ("status $AT >&-", 0, ""),
    ],
)
def test_closed_streams_are_as_if_nobody_read_or_wrote(
    cluster: ScriptedCluster, command: str, code: int, out: str
) -> None:
    run = Shell(command, cluster, b"Why?\n")
    assert (run.code, run.out.decode().removesuffix("\n")) == (code, out), run.err
    if code == 0 and "status" not in command and command != "chat $AT <&-":
        assert len(cluster.requests) == 1


def test_no_input_is_an_empty_prompt(cluster: ScriptedCluster) -> None:
    assert Shell("generate $AT <&-", cluster).code == 0
    assert cluster.requests[0].prompt == "", "which the cluster refuses, as it does that of </dev/null"


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [
        ("--help", "1"),
        ("generate --help", ""),
        ("--version", ""),
        ("config", "1"),
        ("generate Why? $AT", "1"),
        ("generate Why? $AT --json", ""),
        ("status $AT", ""),
        ("chat $AT", ""),
    ],
)
def test_an_output_that_cannot_be_written_is_told_in_a_line(
    cluster: ScriptedCluster, command: str, unbuffered: str
) -> None:
    run = Shell(f"{command} >/dev/full", cluster, b"Why?\n", PYTHONUNBUFFERED=unbuffered)
    assert (run.code, run.err) == (1, "error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])  # where a failure leaves something in a buffer, and where not
def test_nobody_is_told_where_nobody_reads(cluster: ScriptedCluster, unbuffered: str) -> None:
    run = Shell("generate Why? $AT | true; exit ${PIPESTATUS[0]}", cluster, PYTHONUNBUFFERED=unbuffered)
    assert (run.code in (0, 1), run.err) == (True, ""), "0 if it was the faster one"
    assert Shell("config >/dev/full 2>&1", PYTHONUNBUFFERED=unbuffered).code == 1
    assert Shell("generate -n x 2>/dev/full", PYTHONUNBUFFERED=unbuffered).code == 1


def test_an_address_that_nobody_can_look_up() -> None:
    for address, words in (
        (f"{'a' * 64}:1", "a host's name as HOST"),
        (f"dns:{'a' * 64}:1", "its name is not known"),
    ):
        run = Shell(f"status --address {address}")
        assert run.code in (1, 2)
        assert words in run.err


@pytest.mark.parametrize("gone", [">/dev/full", "| true"])
def test_a_cluster_goes_on_where_nobody_can_be_told_of_its_state(gone: str) -> None:
    code = (
        "import sys; from cluster.cli.serve import _Terminal; terminal = _Terminal(sys.stdout); "
        "terminal.say('x' * 9999); terminal.say('y'); print('on', file=sys.stderr)"
    )
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; \"$PYTHON\" -c \"$CODE\" {gone}"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHON": sys.executable, "CODE": code},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "on\n")
