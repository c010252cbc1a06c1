"""uvicorn's side of a connection, with bounds on what has no bound there: heads of requests, and waiting for them.

A connection answers one request at a time. Whole requests may be sent behind it, and wait.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.openai.errors import HttpProblem, reply_of
from router.validation import new_request_id

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 << 10
"""Request line and headers together."""
HEAD_S = 30.0
"""Seconds from the first byte of a request, or from a connection's beginning, to the end of its headers."""
MAX_WAITING_BYTES = 64 << 10
"""Of requests that wait behind the one that runs."""
SURPLUS_S = 1.0
"""For a connection that is one too many to send something, so that it can be told."""
_ABOUT_UPGRADE = (b"connection", b"upgrade", b"http2-settings")
_EXTENSION = "pdserve.connection"
_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


def abort(scope: Any) -> None:
    """Cut off the connection that a request came on, whatever is still to be written."""
    extension = scope.get("extensions", {}).get(_EXTENSION)
    if extension is not None:
        extension["connection"].abort()


def _unchunked(app: Any, cycle: RequestResponseCycle) -> Any:
    """`app` for a client of HTTP/1.0, which knows no chunks (RFC 9112, 6.1): where no length is told, the end of the
    connection is that of the answer. uvicorn ends it in any case."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        endless = False

        async def send_plain(message: Any) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                endless = all(name != b"content-length" for name, _ in message.get("headers", ()))
                if endless:
                    cycle.chunked_encoding = False
            elif endless:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return run


class Connection(HttpToolsProtocol):
    """Counts what the parser takes without telling of it (half of a header, of a trailer, of a chunk's size), and
    what it tells of a request's head.

    ::

        cycle:   [running] <- [waits] <- [waits]     uvicorn's `cycle` is the one that came last
                `_current`   `pipeline`

    uvicorn reads nothing more while a request waits, and tells only the newest that the client has gone. Here it is
    read on, so that the end of the connection is seen, and the one that runs is told.
    """

    _current: RequestResponseCycle | None = None
    _waiting_bytes = 0
    _deaf = False
    _head_bytes = 0
    _untold_bytes = 0
    _in_head = True
    _too_large = False
    _surplus = False
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._most, self.limit_concurrency = self.limit_concurrency, None

    def abort(self) -> None:
        """End it at once; what happens to its request is of no interest to anybody."""
        self._tell_gone()
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Those that are there already go on: uvicorn's own limit would refuse their requests as well.
        self._surplus = self._most is not None and len(self.connections) > self._most
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._got_head()
        self._tell_gone()
        super().connection_lost(exc)

    def _tell_gone(self) -> None:
        """Tell the request that runs that its client has gone."""
        if self._runs:
            assert self._current is not None
            self._current.disconnected = True
            self._current.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._surplus:  # now that it has sent something, it will read the answer
            self._refuse_surplus()
            return
        if self._deaf:
            return
        if self._in_head and self._head_timer is None:
            self._await_head()
        self._untold_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError:
            logger.info("what came from %s is not an HTTP request", self.client)
            self.send_400_response("")
        if self._untold_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")
        if self.transport.is_closing():
            return
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self._drop_waiting()
        elif self._waits:
            self.flow.resume_reading()

    def _drop_waiting(self) -> None:
        """Answer the request that runs, and then no more. What else comes is read, for the sake of its end."""
        assert self._current is not None
        self._deaf = True
        self._got_head()
        self.pipeline.clear()
        self.cycle = self._current
        self.cycle.keep_alive = False
        self.flow.resume_reading()

    def _parse(self, data: bytes) -> bytes:
        """Returns what is still to be parsed. Raises HttpParserError."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("there is no way to anywhere") from None
            return self._without_upgrade(data[upgrade.args[0] :])
        return b""

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Go on with a request that asks for another protocol, as if it did not: that is a server's right.

        Java's client asks for HTTP/2 whenever there is no TLS. The parser would drop the body of such a request, so a
        new one gets its head again, without the question, and then what comes behind it.
        """
        kept = [(name, value) for name, value in self.headers if name not in _ABOUT_UPGRADE]
        for name, value in self.headers:
            if name == b"connection":
                words = [word for word in value.split(b",") if word.strip().lower() not in _ABOUT_UPGRADE]
                kept.append((name, b",".join(words)))
        head = b"%s %s HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
        head += b"".join(b"%s: %s\r\n" % header for header in kept) + b"\r\n"
        self.parser = httptools.HttpRequestParser(self)
        self._in_head = True
        return head + rest

    def send_400_response(self, msg: str) -> None:
        """What is no request, or has too large a head."""
        if self._too_large:
            problem = HttpProblem(431, "headers_too_large", f"headers: must have at most {MAX_HEAD_BYTES} bytes")
        else:
            problem = HttpProblem(400, "bad_request", "this is not an HTTP request")
        self._refuse(problem)

    def _refuse_surplus(self) -> None:
        if not self.transport.is_closing():
            problem = f"there are {self._most} connections already"
            self._refuse(HttpProblem(503, "too_many_connections", problem))

    def _refuse(self, problem: HttpProblem) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.abort()  # an answer would get into that of the request before
            return
        request_id = new_request_id()  # what the client calls it may not have come
        logger.info("request %s fails: %s", request_id, problem.reason, extra={"request_id": request_id})
        body = reply_of(problem).body
        head = (
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"x-request-id: %s\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head % (problem.status, _PHRASES[problem.status], len(body), request_id.encode()) + body)
        self.transport.close()

    # -- requests in their order ----------------------------------------------------------------------------------

    @property
    def _runs(self) -> bool:
        """Whether a request is being answered."""
        return self._current is not None and not self._current.response_complete

    @property
    def _waits(self) -> bool:
        """Whether what is being parsed stands behind the request that runs."""
        return self._runs and (self._in_head or self.cycle is not self._current)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._current = cycle
        if not self.pipeline:
            self._waiting_bytes = 0
        super()._start_asgi_task(cycle, _unchunked(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    # -- the head's time -----------------------------------------------------------------------------------------

    def _await_head(self) -> None:
        late, seconds = (self._refuse_surplus, SURPLUS_S) if self._surplus else (self._head_is_late, HEAD_S)
        self._head_timer = self.loop.call_later(seconds, late)

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
        if not self._upgrading:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._untold_bytes = 0
        if self._waits:
            self._waiting_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._untold_bytes = 0
        self._in_head = True
        if not self._upgrading:
            super().on_message_complete()

    @property
    def _upgrading(self) -> bool:
        return (
            bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"
        )  # for which there is no way

    def _count(self, size: int) -> None:
        self._untold_bytes = 0
        self._head_bytes += size
        if self._waits:
            self._waiting_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._too_large = True
            raise ValueError("the head is too large")
