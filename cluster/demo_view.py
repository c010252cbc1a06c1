"""Two ways to show answers that come in side by side: panels on a terminal, prefixed lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from cluster.demo import DemoRequest, DemoView


def make_view(console: Console) -> DemoView:
    """The view that suits the console."""
    return PanelView(console) if console.is_terminal else LineView(console)


class PanelView:
    """A panel for each answer, filled while it comes in."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._texts: dict[str, str] = {}
        self._live: Live | None = None

    def begin(self, requests: Sequence[DemoRequest]) -> None:
        self._texts = {request.name: "" for request in requests}
        for request in requests:
            self._console.print(f"[bold]{request.name}[/]: {escape(_opening(request.message))}", highlight=False)
        self._live = Live(self._panels(), console=self._console, refresh_per_second=15)
        self._live.start()

    def text(self, name: str, piece: str) -> None:
        self._texts[name] += piece
        if self._live is not None:
            self._live.update(self._panels())

    def finish(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.update(self._panels(), refresh=True)
            live.stop()

    def _panels(self) -> Columns:
        width = self._console.width // len(self._texts) - 1
        panels = [Panel(Text(text), title=name, width=width) for name, text in self._texts.items()]
        return Columns(panels, padding=(0, 1))


class LineView:
    """Whole lines, each with the name of its request in front."""

    def __init__(self, console: Console, width: int = 96) -> None:
        self._console = console
        self._width = width
        self._pending: dict[str, str] = {}

    def begin(self, requests: Sequence[DemoRequest]) -> None:
        self._pending = {request.name: "" for request in requests}
        for request in requests:
            self._line(request.name, f"> {_opening(request.message)}")

    def text(self, name: str, piece: str) -> None:
        lines = (self._pending[name] + piece).split("\n")
        for line in lines[:-1]:
            self._line(name, line)
        rest = lines[-1]
        while len(rest) > self._width:
            cut = rest.rfind(" ", 0, self._width)
            if cut <= 0:
                cut = self._width
            self._line(name, rest[:cut])
            rest = rest[cut:].lstrip(" ")
        self._pending[name] = rest

    def finish(self) -> None:
        for name, rest in self._pending.items():
            if rest:
                self._line(name, rest)
        self._pending = {}

    def _line(self, name: str, line: str) -> None:
        self._console.print(f"{name:>8} | {line}", markup=False, highlight=False, soft_wrap=True)


def _opening(message: str) -> str:
    """The message's first line, and how much more there is."""
    first, _, rest = message.partition("\n")
    words = len(rest.split())
    return f"{first} [+ {words} words]" if words else first
