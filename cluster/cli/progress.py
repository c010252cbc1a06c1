"""How far a command is that computes for minutes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LINE_S = 10.0

Report = Callable[[str, int, int], None]


@contextmanager
def reporting(console: Console) -> Iterator[Report]:
    """What a long function calls with (what it does, how much is done, of how much)."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading the model", total=None)

        def report(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield report


def _lines(console: Console) -> Report:
    """For logs and pipes: a line when something new begins, and one every `_LINE_S` while it lasts."""
    doing, said = "", 0.0

    def report(what: str, done: int, total: int) -> None:
        nonlocal doing, said
        now = time.monotonic()
        if what != doing or now - said >= _LINE_S:
            doing, said = what, now
            console.print(f"{what}: {done} of {total}", highlight=False, soft_wrap=True)

    return report
