"""Answers as clients read them: streams of events, and what the events of one request come to."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pdcore.errors import InternalError, RequestCancelled, RequestError
from pdcore.logprobs import Logprobs, joined
from protos import generation_pb2, worker_pb2
from protos.convert import logprobs_from_proto

Event = generation_pb2.GenerateEvent


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, or one of several samples of it. `end` has the finish reason, the usage and the timeline.

    `logprobs`: of `token_ids`. `prompt_logprobs`: of the prompt's tokens from the second on. None if not asked for,
    or if there are no such tokens.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    end: generation_pb2.End
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None

    @property
    def finish_reason(self) -> str:
        """``stop``, ``length`` or ``cancelled``."""
        return finish_reason_name(self.end.finish_reason)


def finish_reason_name(reason: generation_pb2.FinishReason.ValueType) -> str:
    """``stop``, ``length`` or ``cancelled``."""
    return generation_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


class _Collector:
    """Puts the events of one sample together."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[worker_pb2.Logprobs] = []
        self._prompt_logprobs: list[worker_pb2.Logprobs] = []
        self.end: generation_pb2.End | None = None

    def add(self, event: Event) -> None:
        self._text.append(event.text)
        self._token_ids.extend(event.token_ids)
        if event.HasField("logprobs"):
            self._logprobs.append(event.logprobs)
        if event.HasField("prompt_logprobs"):
            self._prompt_logprobs.append(event.prompt_logprobs)
        if event.HasField("end"):
            self.end = event.end

    def completion(self, request_id: str) -> Completion:
        assert self.end is not None, "checked before"
        return Completion(
            request_id,
            "".join(self._text),
            tuple(self._token_ids),
            self.end,
            joined([logprobs_from_proto(part) for part in self._logprobs]) if self._logprobs else None,
            joined([logprobs_from_proto(part) for part in self._prompt_logprobs]) if self._prompt_logprobs else None,
        )


Flag = TypeVar("Flag", threading.Event, asyncio.Event)


class Progress(Generic[Flag]):
    """What a stream shares with the generator that reads its events.

    Args:
        samples: that are asked for.

    Attributes:
        request_id: of the request. call: gRPC's, which runs; None while there is none. begun: an event has come.
        cancelled: set once nobody wants the answer any more. failure: what reading ended with, if it failed.
    """

    def __init__(self, request_id: str, samples: int, cancelled: Flag) -> None:
        self.request_id = request_id
        self.samples = samples
        self.call: Any = None
        self.begun = False
        self.cancelled: Flag = cancelled
        self.failure: RequestError | None = None
        self._collectors: defaultdict[int, _Collector] = defaultdict(_Collector)

    def began(self, call: Any) -> None:
        """gRPC's call runs. If `cancel` came before, or comes now, it ends at once."""
        self.call = call
        if self.cancelled.is_set():
            call.cancel()

    def add(self, event: Event) -> Event:
        """An event has come; returns it."""
        self.begun = True
        self._collectors[event.sample].add(event)
        return event

    def cancel(self) -> None:
        """End it. Sync streams: from any thread."""
        self.cancelled.set()
        call = self.call
        if call is not None:
            call.cancel()

    def failed(self, error: RequestError) -> RequestError:
        """The answer ends with this error; returns it, which knows its request.

        A router that was told no id, or none that it takes, has made one: that is the one in its log.
        """
        if error is not self.failure:
            error.request_id = error.request_id or self.request_id
            error.add_note(f"request {error.request_id}")
            self.failure = error
        return error

    def was_cancelled(self) -> RequestError:
        """The answer ends since nobody wants it; returns the error for whoever reads it."""
        return self.failed(RequestCancelled("cancelled by the client"))

    def check_complete(self) -> None:
        """If a sample has not ended, raises the error that reading ended with; RequestCancelled if it was not read to
        its end; InternalError if the stream ended too early."""
        ended = sum(collector.end is not None for collector in self._collectors.values())
        if ended == self.samples:
            return
        if self.failure is not None:
            raise self.failure
        if self.cancelled.is_set():
            raise self.was_cancelled()
        raise self.failed(InternalError(f"the stream ended when {ended} of {self.samples} answers were complete"))

    def completions(self) -> list[Completion]:
        """All samples. Raises what `check_complete` does."""
        self.check_complete()
        return [self._collectors[sample].completion(self.request_id) for sample in range(self.samples)]

    def completion(self) -> Completion:
        """The only sample. Raises ValueError if there are several, else what `check_complete` does."""
        if self.samples != 1:
            raise ValueError(f"n is {self.samples}: `samples` returns them all")
        return self.completions()[0]


class Stream(Iterator[Event]):
    """The events of one request; made by `Client.generate`. The request begins with the first of them.

    ::

        with client.generate("Once upon a time") as stream:
            for event in stream:
                print(event.text, end="", flush=True)
        print(stream.collect().end.usage)

    To be read on one thread; `cancel` may be called on any. A stream that is closed, or that nobody holds any more,
    ends its request.
    """

    def __init__(self, events: Generator[Event, None, None], progress: Progress[threading.Event]) -> None:
        self._events = events
        self._progress = progress

    @property
    def request_id(self) -> str:
        """The request's name in the cluster's logs, and for `Client.cancel`."""
        return self._progress.request_id

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def __next__(self) -> Event:
        return next(self._events)

    def collect(self) -> Completion:
        """The whole answer, with what was read before. Raises ValueError for several samples: see `samples`.

        After reading has failed, the same error again; RequestCancelled after `cancel` or `close` before the end.
        """
        if self._progress.samples == 1:
            for _ in self._events:
                pass
        return self._progress.completion()

    def samples(self) -> list[Completion]:
        """All samples of the answer, with what was read before."""
        for _ in self._events:
            pass
        return self._progress.completions()

    def cancel(self) -> None:
        """End the request at once: who reads gets RequestCancelled."""
        self._progress.cancel()

    def close(self) -> None:
        """Read no more; ends the request if it runs."""
        self._progress.cancel()
        self._events.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(AsyncIterator[Event]):
    """`Stream` for asyncio; made by `AsyncClient.generate`.

    ::

        async with client.generate("Once upon a time") as stream:
            async for event in stream:
                print(event.text, end="", flush=True)

    Leaving the loop early ends the request at the end of ``async with``; without that, some time later.
    """

    def __init__(self, events: AsyncGenerator[Event, None], progress: Progress[asyncio.Event]) -> None:
        self._events = events
        self._progress = progress

    @property
    def request_id(self) -> str:
        """See `Stream.request_id`."""
        return self._progress.request_id

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def collect(self) -> Completion:
        """See `Stream.collect`."""
        if self._progress.samples == 1:
            async for _ in self._events:
                pass
        return self._progress.completion()

    async def samples(self) -> list[Completion]:
        """See `Stream.samples`."""
        async for _ in self._events:
            pass
        return self._progress.completions()

    def cancel(self) -> None:
        """See `Stream.cancel`."""
        self._progress.cancel()

    async def aclose(self) -> None:
        """See `Stream.close`."""
        self._progress.cancel()
        await self._events.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
