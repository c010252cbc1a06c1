"""Clients' requests, whichever protocol they come by: checked, run, and their answers taken to whoever asked.

A protocol's side is a `Sink` for each request, and a translation of its messages to those of generation.proto, which
say all that a request can say.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pdcore.clock import Clock
from pdcore.config import RouterConfig
from pdcore.errors import Draining, NoWorker, RequestError
from pdcore.types import ModelInfo
from protos import generation_pb2
from router.api_keys import tenant_of
from router.claims import Claim, Claims
from router.dispatcher import Dispatcher, RunningRequest
from router.load_meter import Pacer
from router.logit_validation import check_token_ids
from router.logs import PROMPTS
from router.metrics import CallMetrics
from router.pacing import pause
from router.prompt_size import check_detokenize_size, check_prompt_size
from router.stream import Chunk
from router.text import TextStream
from router.tokenizer import TextModel
from router.turns import Turns
from router.validation import (
    GenerationRequest,
    Limits,
    check_model,
    id_in_use,
    new_request_id,
    tokenize_input,
    usable_id,
    validate,
)

logger = logging.getLogger(__name__)
_prompts = logging.getLogger(PROMPTS)


class ClientGone(Exception):
    """A sink's client has gone, and there is nobody to be told."""


class Sink(Protocol):
    """Takes the answer of one request to its client."""

    async def begin(self, call: Call) -> None:
        """The request has been let in; `call.cancel()` ends it, should its client go. Raises ClientGone."""

    async def write(self, sample: int, chunk: Chunk) -> None:
        """Send what became known of a sample; the last chunk has its end. One at a time is called.

        Returns once the client's side has room for more, so that a slow client makes its request wait.
        Raises ClientGone.
        """


@dataclass(eq=False, slots=True)
class Call:
    """A request's samples, which share one sink.

    `arrived`: seconds on the clock. `claim`: of its idempotency key. `ended`: samples whose end is told, or about to
    be. `writing_since`: when the write in progress began. `turn`: one writes at a time.
    """

    request: GenerationRequest
    samples: list[RunningRequest]
    task: asyncio.Task[Any]
    arrived: float = 0.0
    claim: Claim | None = None
    ended: int = 0
    writing_since: float | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def cancel(self) -> None:
        """End what has not ended."""
        for sample in self.samples:
            sample.cancel()


@dataclass(slots=True, eq=False)
class _Preparing:
    """A request that is being looked at, and not let in yet. `cancelled`: by its id, meanwhile."""

    request_id: str
    caller: str | None
    cancelled: bool = False


class Calls:
    """What the router does for its clients. Everything happens on one event loop."""

    def __init__(
        self, config: RouterConfig, dispatcher: Dispatcher, text_model: TextModel, claims: Claims, clock: Clock
    ) -> None:
        self.text_model = text_model
        self.clock = clock
        self._config = config
        self._dispatcher = dispatcher
        self._claims = claims
        self.metrics = CallMetrics()
        self._preparing: set[_Preparing] = set()
        self._running: set[Call] = set()
        self._shared: set[str] = set()  # ids of calls that have several requests
        self._idle = asyncio.Event()
        self._idle.set()
        self._pacer = Pacer(clock.now())
        self._turns = Turns()

    @property
    def draining(self) -> bool:
        """Whether no new request is let in."""
        return self._dispatcher.draining

    @property
    def running(self) -> int:
        """Requests that were let in and whose clients have not all of their answers."""
        return len(self._running)

    async def run(
        self,
        request: generation_pb2.GenerateRequest,
        sink: Sink,
        *,
        caller: str | None,
        remaining_s: float | None = None,
        part: int | None = None,
    ) -> None:
        """Run a request to its end. Cancelling this ends it at once.

        Args:
            caller: the tenant whose API key it came with; None where there are no keys.
            remaining_s: seconds that its client will wait; None: for ever.
            part: its number, if its call has several, whose id it has: see `sharing`.

        Raises:
            RequestError: it was refused, or one of its samples has failed, after what it delivered. Its `request_id`
                is set; a request that names none gets one first of all.
            ClientGone: the sink said so. Nothing is to be written any more.
        """
        request_id = request.request_id if usable_id(request.request_id) else new_request_id()
        if not request.request_id:
            request.request_id = request_id
        arrived = self.clock.now()
        deadline = None if remaining_s is None else arrived + remaining_s
        let_in = False
        preparing = _Preparing(request_id, caller)
        self._preparing.add(preparing)
        try:
            checked, texts = await self._checked(request, caller, part)
            async with self._claims.held(checked.tenant, checked.idempotency_key, checked.request_id) as claim:
                if checked.request_id in self._shared:  # since it was checked
                    raise id_in_use(checked.request_id)
                samples = self._dispatcher.submit(checked, texts, deadline)
                let_in = True
                self._preparing.discard(preparing)
                if preparing.cancelled:  # it ends as others do that are cancelled
                    for sample in samples:
                        sample.cancel()
                task = asyncio.current_task()
                assert task is not None
                await self._run(Call(checked, samples, task, arrived, claim), sink)
        except RequestError as error:
            error.request_id = request_id
            if not let_in:
                self.metrics.refused(error)
            raise
        finally:
            self._preparing.discard(preparing)

    @contextmanager
    def sharing(self, request_id: str) -> Iterator[None]:
        """Keep an id for all requests of a call, which are run as its parts.

        Within the block nobody else has the id, and `cancel` ends what runs under it. Each part has an id of its own
        as well, ``id/0`` and so on, which no client's request can have.

        Raises:
            InvalidRequest: a request with this id is running.
        """
        if self.is_running(request_id):
            raise id_in_use(request_id)
        self._shared.add(request_id)
        try:
            yield
        finally:
            self._shared.discard(request_id)

    async def _checked(
        self, request: generation_pb2.GenerateRequest, caller: str | None, part: int | None
    ) -> tuple[GenerationRequest, Sequence[TextStream]]:
        """A request that may be let in, and where its samples' texts come to be."""
        if self.draining:
            raise Draining("the router is draining")
        tenant = tenant_of(caller, request.tenant)
        admission = self._dispatcher.admission
        admission.knock(tenant)  # before the prompt is tokenized
        check_prompt_size(request, self._config.max_prompt_bytes)
        checked = await validate(
            request,
            text_model=self.text_model,
            served_name=self._config.served_name,
            limits=self.limits(),
            in_flight=(request.request_id,) if part is None and self.is_running(request.request_id) else (),
            tenant=tenant,
            default_class=admission.default_class(tenant),
        )
        if part is not None:
            checked = replace(checked, request_id=f"{checked.request_id}/{part}")
        texts = [
            self.text_model.stream(
                checked.stops,
                include_stop=checked.include_stop,
                min_tokens=checked.params.min_tokens,
                special=checked.special,
            )
            for _ in range(checked.samples)
        ]
        if self._config.log_prompts:
            await self._log_prompt(checked)
        return checked, texts

    async def _log_prompt(self, request: GenerationRequest) -> None:
        """As its model gets it, but for special tokens; in quotes, so that a line of it is none of the log's."""
        text = json.dumps(await self.text_model.detokenize(request.prompt), ensure_ascii=False)
        request_id = request.request_id
        _prompts.info("request %s: its prompt is %s", request_id, text, extra={"request_id": request_id})

    async def _run(self, call: Call, sink: Sink) -> None:
        self._running.add(call)
        self._idle.clear()
        try:
            await asyncio.sleep(0)  # what the request's worker is told first goes out before this does
            await sink.begin(call)
            await self._stream_all(call, sink)
        finally:
            call.cancel()
            self._running.discard(call)
            if not self._running:
                self._idle.set()
            for number, sample in enumerate(call.samples):
                if sample.terminal is not None:
                    self.metrics.ended(call.request.priority, sample.terminal, call.arrived, first=number == 0)

    async def _stream_all(self, call: Call, sink: Sink) -> None:
        if len(call.samples) == 1:
            await self._stream(call, 0, sink)
            return
        tasks = [asyncio.ensure_future(self._stream(call, sample, sink)) for sample in range(len(call.samples))]
        try:
            await asyncio.gather(*tasks)
        finally:  # the first error is the call's; the others have nobody to write to any more
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, call: Call, sample: int, sink: Sink) -> None:
        """Write a sample's chunks, each with all that is there by then: when `router.pacing` has it, and in turn."""
        running, priority = call.samples[sample], call.request.priority
        written_at, told_at = -math.inf, call.arrived  # anything, and tokens
        told = False
        while True:
            await running.ready()
            now = self.clock.now()
            delay = pause(self._pacer.look(now), now - written_at)
            if delay:
                await asyncio.sleep(delay)
            await self._turns.turn()
            chunk = running.take()
            error = chunk.end.outcome.error if chunk.end is not None else None
            if chunk.end is not None:
                call.ended += 1
                if call.ended == len(call.samples):
                    await self._claims.give_back(call.claim)  # so that who hears of the end may use the key again
            if error is None or chunk.token_ids or chunk.prompt_logprobs is not None:
                async with call.turn:
                    call.writing_since = written_at = self.clock.now()
                    await sink.write(sample, chunk)
                    call.writing_since = None
                running.took(len(chunk.token_ids))
                if chunk.token_ids:
                    self.metrics.written(priority, written_at - told_at, len(chunk.token_ids), not told)
                    told, told_at = True, written_at
            if error is not None:
                raise error
            if chunk.end is not None:
                return

    async def finished(self, timeout_s: float) -> bool:
        """Wait until clients have all that there is for them; False if some have not within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def watch_stalls(self) -> None:
        """Cancel calls whose client takes nothing for `client_stall_timeout_s`. Runs until cancelled."""
        limit = self._config.client_stall_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            now = self.clock.now()
            for call in [c for c in self._running if c.writing_since is not None and now - c.writing_since > limit]:
                request_id = call.request_id
                logger.warning(
                    "request %s: the client took nothing for %.1f s",
                    request_id,
                    limit,
                    extra={"request_id": request_id},
                )
                call.cancel()
                call.task.cancel()

    # -- the small ones ------------------------------------------------------------------------------------------

    def cancel(self, request_id: str, caller: str | None) -> bool:
        """End a request, or all that share the id, of the tenant `caller` if that is not None.

        Returns whether there was one.

        One that has still to be tokenized ends once it is.
        """
        found = self._dispatcher.cancel(request_id, caller)
        if request_id in self._shared:
            parts = [call.request_id for call in self._running if call.request_id.rpartition("/")[0] == request_id]
            found = any([self._dispatcher.cancel(part, caller) for part in parts])
        for each in self._preparing:
            if each.request_id == request_id and caller in (None, each.caller):
                each.cancelled = found = True
        return found

    def is_running(self, request_id: str) -> bool:
        """Whether the id is taken at present."""
        return request_id in self._dispatcher.request_ids or request_id in self._shared

    def model(self, asked: str) -> ModelInfo:
        """What the workers serve. Raises UnknownModel, or NoWorker while none is connected."""
        check_model(asked, self._config.served_name)
        model = self._dispatcher.pool.model
        if model is None:
            raise NoWorker("no worker is connected")
        return model

    async def tokenize(self, request: generation_pb2.TokenizeRequest) -> list[int]:
        """Token ids of a text or a chat. Raises InvalidRequest, UnknownModel, NoWorker."""
        check_model(request.model, self._config.served_name)
        check_prompt_size(request, self._config.max_prompt_bytes)
        return await tokenize_input(request, self.text_model, self.limits())

    async def detokenize(self, request: generation_pb2.DetokenizeRequest) -> str:
        """The text of token ids. Raises InvalidRequest, UnknownModel."""
        check_model(request.model, self._config.served_name)
        check_detokenize_size(request, self._config.max_prompt_bytes)
        limits = self._dispatcher.pool.limits()
        vocab_size = self.text_model.vocab_size if limits is None else limits.vocab_size
        check_token_ids("token_ids", request.token_ids, vocab_size)
        return await self.text_model.detokenize(request.token_ids)

    def limits(self) -> Limits:
        """What the connected workers allow. Raises NoWorker while there is none."""
        limits = self._dispatcher.pool.limits()
        if limits is None:
            raise NoWorker("no worker is connected")
        return limits
