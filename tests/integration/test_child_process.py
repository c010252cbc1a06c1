"""Child processes under both event loops, and that starting one runs nobody's fork handlers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from cluster.child_process import ChildProcess

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy.:DeprecationWarning")

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(params=[uvloop.EventLoopPolicy, asyncio.DefaultEventLoopPolicy], ids=["uvloop", "asyncio"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


def python(script: str) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", script])


async def test_it_answers_and_ends_with_its_input() -> None:
    child = python("import sys\nfor line in sys.stdin: print(line, end='', flush=True)")
    long = b"x" * 30_000
    assert await child.ask(long) == long + b"\n"
    assert await child.ask(b"again") == b"again\n"
    assert child.returncode is None
    waits = [asyncio.ensure_future(child.wait()) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not any(wait.done() for wait in waits)
    child.end()
    assert await asyncio.gather(*waits) == [0, 0, 0]
    assert await child.wait() == 0
    child.kill()  # nothing any more
    child.close()


async def test_signals_reach_it_and_a_wait_can_be_given_up() -> None:
    child = python("import signal; print('up', flush=True); input(); signal.pause()")
    assert await child.ask(b"") == b"up\n"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(child.wait(), 0.05)
    child.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(child.wait(), 10.0) == -signal.SIGTERM
    child.close()


async def test_one_that_ends_unasked() -> None:
    child = python("raise SystemExit(7)")
    assert await asyncio.wait_for(child.wait(), 10.0) == 7
    with pytest.raises(BrokenPipeError):
        await child.ask(b"anybody?")
    child.close()
    with pytest.raises(OSError, match="No such file"):
        ChildProcess(["/nowhere/to/be/found"])


async def test_a_question_to_one_that_hangs_ends_with_it() -> None:
    child = python("import time; time.sleep(600)")
    asking = asyncio.ensure_future(child.ask(b"x" * 300_000))
    await asyncio.sleep(0.1)
    child.end()  # nor does this stand still: its pipe is full
    with pytest.raises(BrokenPipeError):
        await asyncio.wait_for(asking, 10.0)
    assert await child.wait() == -signal.SIGKILL
    child.close()


async def test_an_answer_without_an_end_is_refused() -> None:
    child = python("import sys; sys.stdin.readline()\nwhile True: sys.stdout.write('x' * 9999)")
    with pytest.raises(ValueError, match="65536 bytes"):
        await asyncio.wait_for(child.ask(b""), 20.0)
    child.kill()
    assert await asyncio.wait_for(child.wait(), 10.0) == -signal.SIGKILL
    child.close()


async def test_a_grandchild_that_holds_a_pipe_keeps_nobody() -> None:
    child = python("import subprocess; subprocess.Popen(['sleep', '3']); raise SystemExit(5)")
    asking = asyncio.ensure_future(child.ask(b""))
    assert await asyncio.wait_for(child.wait(), 10.0) == 5
    child.close()
    assert not asking.done()
    with contextlib.suppress(BrokenPipeError):
        assert await asyncio.wait_for(asking, 20.0) == b""


async def test_many_start_at_once() -> None:
    """More than there are threads for whoever asks the loop for some."""
    children = [python("import sys, time; sys.stdin.readline(); time.sleep(600)") for _ in range(20)]
    hanging = [asyncio.ensure_future(child.ask(b"")) for child in children]
    await asyncio.sleep(0)
    quick = python("import sys; print(sys.stdin.readline(), end='', flush=True)")
    assert await asyncio.wait_for(quick.ask(b"at once"), 20.0) == b"at once\n"
    for child in children:
        child.kill()
    assert await asyncio.gather(*hanging) == [b""] * 20
    for child in (*children, quick):
        await child.wait()
        child.close()


async def test_its_end_is_seen_without_a_file_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    child = python("raise SystemExit(3)")
    assert await asyncio.wait_for(child.wait(), 10.0) == 3
    child.close()


COUNT_FORKS = """
import asyncio, ctypes, sys
import uvloop
from cluster.child_process import ChildProcess

forks = []
before = ctypes.CFUNCTYPE(None)(lambda: forks.append(1))
assert ctypes.CDLL(None).__register_atfork(before, None, None, None) == 0  # what glibc's pthread_atfork() calls

async def ours():
    child = ChildProcess(["cat"])
    assert await child.ask(b"x") == b"x\\n"
    child.end()
    await child.wait()

async def uvloops():
    child = await asyncio.create_subprocess_exec("true")
    await child.wait()

uvloop.run(ours())
print(len(forks))
uvloop.run(uvloops())
print(len(forks))
"""


def test_starting_one_runs_no_fork_handlers() -> None:
    """gRPC's abort the child now and then, so a router that had died was not started again."""
    run = subprocess.run(
        [sys.executable, "-c", COUNT_FORKS], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout.split() == ["0", "1"], run.stderr
