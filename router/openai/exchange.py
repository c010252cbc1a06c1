"""One HTTP request and its answer, over raw ASGI: read within bounds, run by `router.calls`, told as it comes.

::

    read body --> plan --> Calls.run for each prompt --> answer, or events
        '-- the client goes, at any point: everything of it is cancelled at once
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from pdcore.errors import InvalidRequest, RequestError
from router.calls import Call, Calls, ClientGone
from router.guard import bug, note
from router.openai.collected import Collected
from router.openai.errors import Headers, HttpProblem, renamed, reply_of
from router.openai.plan import Plan
from router.openai.usage import Usage
from router.stream import Chunk

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DONE = "data: [DONE]\n\n"
LINGER_S = 5.0
BODY_S = 30.0
"""Seconds that may pass between two parts of a request's body."""
_JSON = (b"content-type", b"application/json")
_EVENT_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that buffered would hold the tokens back
]


class Stalled(Exception):
    """The client takes nothing: its answer was given up."""


class Format(Protocol):
    """How an answer looks; see `CompletionFormat`, `ChatFormat` and `ResponseFormat`."""

    @property
    def discards(self) -> bool: ...

    def begin(self, number: int, call: Call) -> None:
        """The request of prompt `number` has been let in; of streams only."""

    def event(self, number: int, sample: int, chunk: Chunk) -> str: ...

    def end(self, usage: Usage) -> str:
        """What a stream ends with."""
        ...

    def failure(self, error: RequestError) -> str:
        """What a stream ends with that has begun and fails; empty: an event with OpenAI's error body."""
        ...

    def answer(self, collected: list[Collected], usage: Usage) -> bytes: ...


class TooLarge(HttpProblem):
    """The body of a request has more than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        close = (("connection", "close"),)
        super().__init__(413, "request_too_large", f"body: must have at most {max_bytes} bytes", close)
        self.max_bytes = max_bytes


async def read_body(receive: Receive, headers: Sequence[tuple[bytes, bytes]], max_bytes: int) -> bytes:
    """The body of a request.

    Raises:
        HttpProblem: it is no JSON by its own account, larger than `max_bytes`, or does not come.
        ClientGone: the client does not wait for an answer.
    """
    found = dict(headers)
    kind = found.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":  # also keeps web pages of others out, which can send no such thing unasked
        raise HttpProblem(415, "unsupported_media_type", "content-type: must be application/json")
    too_large = TooLarge(max_bytes)
    length = found.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        try:
            async with asyncio.timeout(BODY_S):
                message = await receive()
        except TimeoutError:
            problem = f"body: nothing of it came for {BODY_S:g} s"
            raise HttpProblem(408, "request_timeout", problem, (("connection", "close"),)) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise too_large
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


async def _read_on(receive: Receive, max_bytes: int) -> None:
    """Take what the client is still sending, within bounds: one that is cut off does not read why."""
    size, more = 0, True
    try:
        async with asyncio.timeout(LINGER_S):
            while more and size < max_bytes:
                message = await receive()
                size += len(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        pass


class Reply:
    """The response to one request: whole, or as a stream that begins with the first event."""

    def __init__(self, send: Send, request_id: str, draining: Callable[[], bool]) -> None:
        self.request_id = request_id
        self.started = False
        self._send = send
        self._draining = draining

    async def whole(
        self, status: int, body: bytes, headers: Headers, *, before_end: Awaitable[None] | None = None
    ) -> None:
        """A response at once. `before_end`: awaited when the client has it all, and the connection is still there."""
        await self.open(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body, "more_body": before_end is not None})
        if before_end is not None:
            await before_end
            await self._send({"type": "http.response.body", "body": b""})

    async def json(self, body: bytes) -> None:
        await self.whole(200, body, [_JSON])

    async def open(self, status: int, headers: Headers) -> None:
        """Begin the response."""
        self.started = True
        every = [*headers, (b"x-request-id", self.request_id.encode())]
        if self._draining():  # so that the client's next request finds another router
            every = [header for header in every if header[0] != b"connection"] + [(b"connection", b"close")]
        await self._send({"type": "http.response.start", "status": status, "headers": every})

    async def error(self, error: Exception, receive: Receive) -> None:
        """Tell of an error, in whichever way there still is. Of what is no RequestError the log has the details."""
        if not isinstance(error, RequestError):
            error = bug(error, self.request_id)
        note(error, self.request_id)
        reply = reply_of(error)
        if self.started:
            await self._send({"type": "http.response.body", "body": b"data: %s\n\n" % reply.body})
            return
        rest = _read_on(receive, 4 * error.max_bytes) if isinstance(error, TooLarge) else None
        await self.whole(reply.status, reply.body, [*reply.headers, _JSON], before_end=rest)

    async def events(self, text: str) -> None:
        """Events; returns once the client's side has room for more."""
        if not self.started:
            await self.open(200, _EVENT_HEADERS)
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def end(self, text: str) -> None:
        await self._send({"type": "http.response.body", "body": text.encode()})


class _Stream:
    """Takes the answer to prompt `number` to the client as events; see `router.calls.Sink`."""

    def __init__(self, number: int, reply: Reply, form: Format, usage: Usage, turn: asyncio.Lock) -> None:
        self._number = number
        self._reply = reply
        self._form = form
        self._usage = usage
        self._turn = turn

    async def begin(self, call: Call) -> None:
        """Nothing is sent before the first token: until then an error can have its own status."""
        self._form.begin(self._number, call)

    async def write(self, sample: int, chunk: Chunk) -> None:
        events = self._form.event(self._number, sample, chunk)
        if chunk.end is not None and chunk.end.outcome.error is None:
            self._usage.add(sample, chunk.end, discarded=self._form.discards)
        if events:
            async with self._turn:  # prompts share the response
                await self._reply.events(events)


async def run_plan(calls: Calls, plan: Plan, form: Format, reply: Reply, caller: str | None) -> None:
    """Run a plan and answer it. Raises RequestError, with names of fields as HTTP clients know them."""
    usage = Usage()
    if not plan.stream:
        collected = [Collected(plan.samples, usage, discards=form.discards) for _ in plan.requests]
        await _run_all(calls, plan, collected, caller)
        await reply.json(form.answer(collected, usage))
        return
    turn = asyncio.Lock()
    sinks = [_Stream(number, reply, form, usage, turn) for number in range(len(plan.requests))]
    try:
        await _run_all(calls, plan, sinks, caller)
    except RequestError as error:
        told = form.failure(error) if reply.started else ""
        if not told:
            raise
        note(error, reply.request_id)
        await reply.end(told)
        return
    await reply.end(form.end(usage))


async def _run_all(calls: Calls, plan: Plan, sinks: Sequence[Collected | _Stream], caller: str | None) -> None:
    async def run(number: int, part: int | None) -> None:
        request, sink = plan.requests[number], sinks[number]
        try:
            await calls.run(request, sink, caller=caller, remaining_s=plan.remaining_s, part=part)
        except InvalidRequest as error:
            raise renamed(error, plan.names[number]) from error

    if len(sinks) == 1:
        await run(0, None)
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(calls.sharing(plan.request_id))
        except InvalidRequest as error:
            raise renamed(error, plan.names[0]) from error
        tasks = [asyncio.ensure_future(run(number, number)) for number in range(len(sinks))]
        try:
            await asyncio.gather(*tasks)
        finally:  # the first error is the answer
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work` until its end or that of the client's patience. The whole body must have been received.

    Returns whether the work was done; False if the client has gone.

    Raises what the work raises; Stalled if it was cancelled from elsewhere (`Calls.watch_stalls`).
    """
    running = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return False
        if running.cancelled():
            raise Stalled
        running.result()
        return True
    finally:
        for task in (running, gone):
            task.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
