"""What tests fetch: whoever has no network skips them, and everybody else learns what is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.support import tools


class Empty(BaseHTTPRequestHandler):
    """A registry that has nothing."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def empty() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Empty) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing has been fetched, and there is no other registry."""
    monkeypatch.setattr(tools, "TOOLS", tmp_path)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("fetch", [tools.grpcurl, tools.kserve])
def test_only_a_registry_that_cannot_be_reached_is_a_reason_to_skip(
    fetch: Callable[[], Path], empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", empty)
    with pytest.raises(AssertionError, match="No matching distribution found"):
        fetch()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(pytest.skip.Exception, match="cannot be fetched"):
        fetch()
