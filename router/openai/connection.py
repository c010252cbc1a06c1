"""uvicorn's side of a connection, with bounds on what has no bound there: heads of requests, and waiting for them."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.openai.errors import HttpProblem, reply_of

MAX_HEAD_BYTES = 32 << 10
"""Request line and headers together."""
HEAD_S = 30.0
"""Seconds from the first byte of a request, or from a connection's beginning, to the end of its headers."""
_EXTENSION = "pdserve.connection"
_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


def abort(scope: Any) -> None:
    """Cut off the connection that a request came on, whatever is still to be written."""
    extension = scope.get("extensions", {}).get(_EXTENSION)
    if extension is not None:
        extension["connection"].abort()


class Connection(HttpToolsProtocol):
    """Counts what the parser takes without telling of it (half of a header, of a trailer, of a chunk's size), and
    what it tells of a request's head."""

    _head_bytes = 0
    _untold_bytes = 0
    _in_head = True
    _too_large = False
    _head_timer: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        """End it at once; what happens to its request is of no interest to anybody."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._got_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._head_timer is None:
            self._await_head()
        self._untold_bytes += len(data)
        super().data_received(data)
        if self._untold_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """What is no request, or has too large a head."""
        if self._too_large:
            problem = HttpProblem(431, "headers_too_large", f"headers: must have at most {MAX_HEAD_BYTES} bytes")
        else:
            problem = HttpProblem(400, "bad_request", "this is not an HTTP request")
        self._refuse(problem)

    def _refuse(self, problem: HttpProblem) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.abort()  # an answer would get into that of the request before
            return
        body = reply_of(problem).body
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (problem.status, _PHRASES[problem.status], len(body)) + body)
        self.transport.close()

    # -- the head's time -----------------------------------------------------------------------------------------

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def _got_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # what came behind a request may wait for its answer
        elif not self.transport.is_closing():
            self._refuse(HttpProblem(408, "request_timeout", f"no request came for {HEAD_S:g} s"))

    # -- the parser's callbacks ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._untold_bytes = self._head_bytes = 0
        self.scope["extensions"] = {_EXTENSION: {"connection": self}}

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._untold_bytes = 0
        self._in_head = False
        self._got_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._untold_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._untold_bytes = 0
        self._in_head = True
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._untold_bytes = 0
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._too_large = True
            raise ValueError("the head is too large")
