"""``pdserve chat``, from a pipe and from a terminal, against a scripted cluster."""

from __future__ import annotations

import json
import os
import pty
import readline
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cluster.cli.chat_input import Turns
from pdcore.errors import Overloaded
from protos import generation_pb2
from tests.support.processes import REPOSITORY
from tests.support.scripted_cluster import END, Event, Run, ScriptedCluster, scripted_cluster


@pytest.fixture
def cluster() -> Iterator[ScriptedCluster]:
    with scripted_cluster() as scripted:
        for question in ("one", "two", "three"):
            scripted.answers[question] = [Event(text=f"{question}"), Event(text="!", end=END)]
        yield scripted


def chat(cluster: ScriptedCluster, *turns: str, flags: tuple[str, ...] = ()) -> Run:
    return Run("chat", "--address", cluster.address, *flags, stdin="".join(turn + "\n" for turn in turns))


def messages(request: generation_pb2.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


# -- turns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "turns"),
    [
        (["a", "", "b"], ["a", "", "b"]),
        (["a\\", "b\\", "c", "d"], ["a\nb\nc", "d"]),
        (["a\\"], ["a"]),
        (['"""', "a", "", "b\\", '"""', "c"], ["a\n\nb\\", "c"]),
        (['"""a', 'b"""', "c"], ["a\nb", "c"]),
        (['"""a"""', "b"], ["a", "b"]),
        (['"""a', "b"], ["a\nb"]),
        (['a"""b'], ['a"""b']),
        (['"""', '"""'], [""]),
        # What has line breaks was pasted.
        (['"""A docstring."""\n\nimport os', "b"], ['"""A docstring."""\n\nimport os', "b"]),
        (["cc \\\n  -o a \\", "b"], ["cc \\\n  -o a \\", "b"]),
        (["/etc/hosts:\n127.0.0.1", "// c\nint x;"], ["//etc/hosts:\n127.0.0.1", "/// c\nint x;"]),
        (['"""\na\n"""', "b"], ["a", "b"]),
    ],
)
def test_lines_become_turns(lines: list[str], turns: list[str]) -> None:
    left = iter(lines)
    source, found = Turns(lambda _: next(left, None)), []
    while (turn := source.next()) is not None:
        found.append(turn)
    assert found == turns


# -- from a pipe ----------------------------------------------------------------------------------------------------


def test_every_line_is_a_turn_and_the_conversation_is_kept(cluster: ScriptedCluster) -> None:
    flags = "--system Brief. --max-tokens 9 --temperature 0 --top-p 0.5 --seed 3 --stop S --priority batch --tenant t"
    run = chat(cluster, "one", "", "two", flags=(*flags.split(), "--cache-salt", "c", "--model", "tiny"))
    assert (run.code, run.out, run.err) == (0, "one!\ntwo!\n", "")
    first, second = cluster.requests
    assert messages(first) == [("system", "Brief."), ("user", "one")]
    assert messages(second) == [*messages(first), ("assistant", "one!"), ("user", "two")]
    assert first.request_id != second.request_id
    expected = generation_pb2.GenerateRequest(
        request_id=first.request_id,
        model="tiny",
        tenant="t",
        cache_salt="c",
        priority=generation_pb2.PRIORITY_BATCH,
        chat=first.chat,
        sampling=generation_pb2.Sampling(max_tokens=9, temperature=0.0, top_p=0.5, seed=3, stop=["S"]),
    )
    assert first == expected


def test_commands(cluster: ScriptedCluster, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    turns = [
        "/system Brief.",
        "one",
        "/reset",
        "two",
        f"/save {path}",
        "/system",
        "//three",
        "/stats",
        "three",
        "/quit",
    ]
    run = chat(cluster, "/help", *turns, "one")
    assert run.code == 0, run.err
    assert run.out == "one!\ntwo!\nBecause so.\nthree!\n", "and nothing after /quit"
    saved = [("system", "Brief."), ("user", "two"), ("assistant", "two!")]
    assert [(entry["role"], entry["content"]) for entry in json.loads(path.read_text())] == saved
    assert messages(cluster.requests[2]) == [*saved[1:], ("user", "/three")]
    for words in ("/save FILE", "the conversation is forgotten", f"written to {path}", "stats are on"):
        assert words in run.err
    assert run.err.count("first token after 12.2 ms, 222.2 tokens/s") == 1


def test_stats_of_every_answer(cluster: ScriptedCluster) -> None:
    run = chat(cluster, "one", "two", "/stats", "three", flags=("--stats",))
    assert run.err.count("0 of 5 prompt tokens cached") == 2


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ("/nonsense", "/help lists what is"),
        ("/reset now", "/reset takes nothing"),
        ("/save", "/save needs a file"),
        ("/save /nowhere/x", "/nowhere/x cannot be written: No such file"),
        ("/save README.md", "README.md cannot be written: File exists"),
        ("/save ~nosuchuser/x", "~nosuchuser/x cannot be written: Could not determine home directory"),
        ("/save a\0b", "cannot be written: embedded null byte"),
    ],
)
def test_a_bad_command_ends_a_pipe(
    cluster: ScriptedCluster, turn: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    run = chat(cluster, turn, "one")
    assert run.code in (1, 2)
    assert words in run.err
    assert not cluster.requests


def test_a_failure_ends_a_pipe_and_says_what_to_do(cluster: ScriptedCluster) -> None:
    cluster.error = Overloaded("the queue is full", 1.0)
    run = chat(cluster, "one", "two")
    assert run.code == 75
    assert f"request {cluster.requests[0].request_id}" in run.err
    assert "try again in 1 s" in run.err
    assert len(cluster.requests) == 1


def test_what_cannot_work_is_told_before_anything_is_asked(cluster: ScriptedCluster) -> None:
    run = chat(cluster, "one", flags=("--model", "gpt"))
    assert run.code == 2
    assert "served: tiny" in run.err
    assert "--seed: " in chat(cluster, "one", flags=("--seed", str(2**64))).err
    assert "--system is not valid UTF-8" in chat(cluster, "one", flags=("--system", "\udcff")).err
    cluster.model.has_chat_template = False
    run = chat(cluster, "one")
    assert run.code == 1
    assert "`pdserve generate`" in run.err
    assert not cluster.requests


def test_the_key_goes_with_every_call(cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "k")
    assert chat(cluster, "one").code == 0
    assert cluster.keys == ["Bearer k"] * 2


# -- at a terminal --------------------------------------------------------------------------------------------------


class Terminal:
    """The command at a terminal of its own. `stdout`: a file descriptor for its standard output to go to instead."""

    def __init__(self, *arguments: str, kind: str = "dumb", stdout: int | None = None) -> None:
        self._ours, theirs = pty.openpty()
        self.seen = ""
        self._read = 0
        self.process = subprocess.Popen(
            # Tests may run in the background of a shell, where SIGINT is ignored, and children inherit that.
            ["env", "--default-signal=INT,HUP", sys.executable, "-m", "cluster", *arguments],
            stdin=theirs, stdout=theirs if stdout is None else stdout, stderr=theirs, cwd=REPOSITORY,
            start_new_session=True, env={**os.environ, "TERM": kind},
        )  # fmt: skip
        os.close(theirs)

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Until it is shown, after what was waited for before."""
        deadline = time.monotonic() + timeout_s
        while (at := self.seen.find(text, self._read)) < 0:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no {text!r} in:\n{self.seen}")
            if select.select([self._ours], [], [], 1.0)[0]:
                try:
                    self.seen += os.read(self._ours, 4096).decode()
                except OSError:  # the other side has closed it
                    raise AssertionError(f"ended without {text!r}:\n{self.seen}") from None
        self._read = at + len(text)

    def interrupt(self, text: str) -> None:
        """Ctrl-C until `text` is shown: a signal that comes between a prompt and the wait for a key interrupts
        nothing until the next one (CPython's input(), which looks for signals only when its select() fails)."""
        for _ in range(20):
            self.process.send_signal(signal.SIGINT)
            try:
                return self.wait_for(text, 3.0)
            except TimeoutError:
                continue
        raise AssertionError(f"no {text!r} in:\n{self.seen}")

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self._ours)[3] & termios.ECHO)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self._ours)


@pytest.fixture
def terminal(cluster: ScriptedCluster) -> Iterator[Terminal]:
    shown = Terminal("chat", "--address", cluster.address)
    yield shown
    shown.close()


def test_ctrl_c_stops_the_answer_and_ctrl_d_ends(cluster: ScriptedCluster, terminal: Terminal) -> None:
    cluster.endless, cluster.answers["on"] = "on", [Event(text="and on")]
    terminal.wait_for("tiny at 127.0.0.1:")
    terminal.wait_for("> ")
    terminal.interrupt("Ctrl-D ends")
    terminal.wait_for("> ")
    terminal.type("on\n")
    terminal.wait_for("and on")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("stopped")
    assert cluster.left.wait(10), "the request is cancelled"
    terminal.wait_for("> ")
    cluster.error = (grpc.StatusCode.UNAVAILABLE, "no worker")
    terminal.type("two\n")
    terminal.wait_for("no worker")
    terminal.wait_for("> ")
    cluster.error = None
    terminal.type("a \\\n")
    terminal.wait_for(". ")
    terminal.type("b\n")
    terminal.wait_for("Because so.")
    kept = [("user", "on"), ("assistant", "and on")]
    assert messages(cluster.requests[-1]) == [*kept, ("user", "a \nb")], "what failed is not part of it"
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0


def test_a_file_that_cannot_be_written_ends_no_typed_chat(cluster: ScriptedCluster, terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("one\n")
    terminal.wait_for("one!")
    for path in ("~nosuchuser/x", "/nowhere/x"):
        terminal.wait_for("> ")
        terminal.type(f"/save {path}\n")
        terminal.wait_for("cannot be written")
    terminal.wait_for("> ")
    terminal.type("two\n")
    terminal.wait_for("two!")
    assert messages(cluster.requests[-1]) == [("user", "one"), ("assistant", "one!"), ("user", "two")]


def length_end(prompt_tokens: int, completion_tokens: int) -> Event:
    end = generation_pb2.End()
    end.CopyFrom(END)
    end.finish_reason = generation_pb2.FINISH_REASON_LENGTH
    end.usage.prompt_tokens, end.usage.completion_tokens = prompt_tokens, completion_tokens
    return Event(text="!", end=end)


def test_which_limit_cut_an_answer_off_is_said(cluster: ScriptedCluster) -> None:
    cluster.model.model.max_model_len = 40
    cluster.answers |= {"short": [length_end(5, 30)], "full": [length_end(5, 35)]}
    for flags, question, words in (
        ((), "short", "the cluster gives this answer 30 tokens at most, as no --max-tokens is given"),
        ((), "full", "cut off there: no room is left for this conversation"),
        (("--max-tokens", "30"), "short", "cut off there: --max-tokens is reached"),
    ):
        shown = Terminal("chat", "--address", cluster.address, *flags)
        try:
            shown.wait_for("> ")
            shown.type(f"{question}\n")
            shown.wait_for(words)
        finally:
            shown.close()
    # A pipe is told what it could not know.
    assert "cut off there: the cluster gives" in chat(cluster, "short").err
    assert not chat(cluster, "short", flags=("--max-tokens", "30")).err


@pytest.mark.parametrize("terminal_kind", ["dumb", "xterm"])
def test_a_terminal_is_told_that_the_first_token_has_not_come(cluster: ScriptedCluster, terminal_kind: str) -> None:
    cluster.late_s = 3.0
    command = ("generate", "one", "--address", cluster.address)
    shown = Terminal(*command, kind=terminal_kind)
    try:
        shown.wait_for("waiting for the first token ...")
        assert "one!" not in shown.seen
        shown.wait_for("one!")
        between = "\r\n" if terminal_kind == "dumb" else "\x1b[0m\r\x1b[K"
        assert shown.seen.endswith((f"...{between}one!", f"...{between}one!\r\n")), shown.seen
        assert shown.process.wait(20) == 0
    finally:
        shown.close()
    # Who reads JSON is told nothing.
    quiet = Terminal(*command, "--json")
    try:
        quiet.wait_for('"token_ids": []\r\n}')
        assert "waiting" not in quiet.seen
    finally:
        quiet.close()


def test_what_is_no_terminal_is_told_nothing_while_it_waits(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.cli.waiting.AFTER_S", 0.01)
    cluster.late_s = 0.3
    run = Run("generate", "one", "--address", cluster.address)
    assert (run.code, run.out, run.err) == (0, "one!\n", "")


def test_a_person_whose_answers_go_elsewhere_is_prompted_too(cluster: ScriptedCluster, tmp_path: Path) -> None:
    with (tmp_path / "answers").open("w+") as answers:
        shown = Terminal("chat", "--address", cluster.address, stdout=answers.fileno())
        try:
            shown.wait_for("tiny at 127.0.0.1:")
            shown.wait_for("> ")
            shown.type("/nonsense\n")
            shown.wait_for("/help lists what is")
            shown.wait_for("> ")
            shown.interrupt("Ctrl-D ends")
            shown.wait_for("> ")
            shown.type("one\n")
            shown.wait_for("> ")
            shown.type("\x04")
            assert shown.process.wait(20) == 0
        finally:
            shown.close()
        answers.seek(0)
        assert answers.read() == "one!\n"


def test_ctrl_c_in_a_message_says_that_it_is_discarded(cluster: ScriptedCluster, terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type('"""one\n')
    terminal.wait_for(". ")
    terminal.interrupt("the message is discarded")
    terminal.wait_for("> ")
    terminal.interrupt("Ctrl-D ends")
    terminal.wait_for("> ")
    terminal.type("two\n")
    terminal.wait_for("two!")
    assert messages(cluster.requests[-1]) == [("user", "two")]


def test_what_is_typed_while_an_answer_comes_is_forgotten(cluster: ScriptedCluster, terminal: Terminal) -> None:
    cluster.endless, cluster.answers["on"] = "on", [Event(text="and on")]
    terminal.wait_for("> ")
    terminal.type("on\n")
    terminal.wait_for("and on")
    assert not terminal.echoes()
    terminal.type("typed too early\n")
    time.sleep(0.3)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("stopped")
    terminal.wait_for("> ")
    terminal.type("two\n")
    terminal.wait_for("two!")
    assert "early" not in terminal.seen
    assert [messages(request)[-1] for request in cluster.requests] == [("user", "on"), ("user", "two")]
    # A failure is no reason to leave the terminal silent.
    cluster.error = Overloaded("the queue is full", 1.0)
    terminal.wait_for("> ")
    terminal.type("two\n")
    terminal.wait_for("the queue is full")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0
    assert terminal.echoes()


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGHUP])
def test_the_terminal_is_as_before_when_a_chat_is_ended(
    cluster: ScriptedCluster, terminal: Terminal, ended_by: signal.Signals
) -> None:
    cluster.endless, cluster.answers["on"] = "on", [Event(text="and on")]
    terminal.wait_for("> ")
    terminal.type("on\n")
    terminal.wait_for("and on")
    assert not terminal.echoes()
    terminal.process.send_signal(ended_by)
    assert terminal.process.wait(20) == -ended_by
    assert terminal.echoes()


def test_the_terminal_is_as_before_while_a_chat_is_stopped(cluster: ScriptedCluster, terminal: Terminal) -> None:
    cluster.endless, cluster.answers["on"] = "on", [Event(text="and on")]
    terminal.wait_for("> ")
    terminal.type("on\n")
    terminal.wait_for("and on")
    assert not terminal.echoes()
    terminal.process.send_signal(signal.SIGTSTP)  # stops nothing here, where no shell could let it go on
    deadline = time.monotonic() + 20
    while not terminal.echoes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert terminal.echoes()
    terminal.process.send_signal(signal.SIGCONT)
    terminal.interrupt("stopped")


@pytest.mark.skipif("GNU" not in (readline.__doc__ or ""), reason="only the GNU readline takes what is pasted as one")
def test_what_is_pasted_is_one_message(cluster: ScriptedCluster) -> None:
    shown = Terminal("chat", "--address", cluster.address, kind="xterm")
    try:
        shown.wait_for("\x1b[?2004h")  # asks the terminal to say what is pasted
        shown.wait_for("> ")
        shown.type("\x1b[200~first\rsecond\r\rfourth\r\x1b[201~")
        time.sleep(0.3)
        assert not cluster.requests
        shown.type("\r")
        shown.wait_for("Because so.")
        assert messages(cluster.requests[0]) == [("user", "first\nsecond\n\nfourth")]
        shown.wait_for("> ")
        shown.type('\x1b[200~"""\rprint(1)\r"""\r\x1b[201~\r')
        shown.wait_for("Because so.")
        assert messages(cluster.requests[1])[-1] == ("user", "print(1)")
    finally:
        shown.close()
