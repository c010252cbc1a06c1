"""What logs get of errors that nobody meant: types and frames, and no words."""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from pdcore.tracebacks import wordless

REPOSITORY = Path(__file__).resolve().parents[2]
SECRET = "the-prompt"
HAVE_PROMPTS = ("router", "worker", "prefill_worker", "decode_worker", "engine", "kv_transfer")


class OursError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")
        self.prompt = first
        self.add_note(first)


def plain() -> None:
    raise OursError(SECRET, SECRET)


def caused() -> None:
    try:
        {}[SECRET]
    except KeyError as error:
        raise OSError(28, SECRET, SECRET) from error


def while_handled() -> None:
    try:
        plain()
    except OursError:
        raise UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET)  # noqa: B904


def hidden() -> None:
    try:
        plain()
    except OursError:
        raise SystemExit(SECRET) from None


def grouped() -> None:
    members: list[Exception] = []
    for function in (plain, caused):
        try:
            function()
        except Exception as error:  # noqa: BLE001
            members.append(error)
    raise ExceptionGroup(SECRET, [*members, ExceptionGroup(SECRET, members)])


def in_a_ring() -> None:
    try:
        plain()
    except OursError as error:
        error.__cause__ = ValueError(SECRET)
        error.__cause__.__cause__ = error
        raise


@pytest.mark.parametrize(
    ("function", "names", "frames"),
    [
        (plain, ["test_tracebacks.OursError"], ["plain"]),
        (caused, ["KeyError", "OSError: ENOSPC", "direct cause"], ["caused"]),
        (while_handled, ["OursError", "UnicodeDecodeError", "During handling"], ["plain", "while_handled"]),
        (hidden, ["SystemExit"], ["hidden"]),
        (grouped, ["ExceptionGroup", "OursError", "OSError: ENOSPC"], ["plain", "caused", "grouped"]),
        (in_a_ring, ["OursError", "ValueError"], ["plain", "in_a_ring"]),
    ],
)
def test_types_and_frames_and_no_words(
    function: Callable[[], None], names: list[str], frames: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    try:
        function()
    except BaseException as error:
        logging.getLogger("any").exception("it is broken", exc_info=wordless(error))
    assert SECRET not in caplog.text
    assert [name for name in names if name not in caplog.text] == []
    assert [name for name in frames if f", in {name}\n" not in caplog.text] == []
    assert ("OursError" in caplog.text) == (function not in (caused, hidden)), "what was said not to matter does not"


def test_nobody_logs_words_where_there_are_prompts() -> None:
    """`logger.exception` and ``exc_info`` log them, unless `wordless` takes them away."""
    seen = 0
    for package in HAVE_PROMPTS:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                given = [word.value for word in node.keywords if word.arg == "exc_info"]
                logs = isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "logger.exception"
                if not logs and not given:
                    continue
                seen += 1
                where = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                assert [ast.unparse(word).startswith("wordless(") for word in given] == [True], where
    assert seen > 15
