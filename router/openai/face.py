"""What each path does. All errors of requests become answers here."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any, TypeVar

from pdcore.api_key import AUTHORIZATION
from pdcore.errors import InvalidRequest, Unavailable
from protos import generation_pb2
from router.api_keys import Door
from router.calls import Calls, ClientGone
from router.metrics import RouterMetrics
from router.openai.chat import ChatFormat, ChatRequest, chat_names, plan_chat
from router.openai.completions import CompletionFormat, CompletionRequest, plan_completions
from router.openai.connection import abort
from router.openai.errors import renamed
from router.openai.exchange import (
    Receive,
    Reply,
    Scope,
    Send,
    Stalled,
    read_body,
    run_plan,
    while_there,
)
from router.openai.parsing import Message, parse
from router.openai.plan import Headers, Plan, headers_of, plain
from router.openai.response_format import ResponseFormat
from router.openai.responses import ResponseRequest, plan_response
from router.openai.tokens import DetokenizeRequest, TokenizeRequest, to_tokenize

M = TypeVar("M", bound=Message)
OWNER = "pdserve"
MANY_BYTES = 1 << 16
"""Of a body: less is read in a millisecond or a few."""


class Exchange:
    """A request that is being answered. `caller`: the tenant whose key it has; None where there are no keys."""

    def __init__(self, scope: Scope, receive: Receive, reply: Reply, headers: Headers, caller: str | None) -> None:
        self.scope = scope
        self.receive = receive
        self.reply = reply
        self.headers = headers
        self.caller = caller


Handler = Callable[[Exchange], Awaitable[None]]


class Face:
    """The requests of OpenAI's clients, on the router's event loop.

    Args:
        serving: whether a request can be routed. metrics: what Prometheus is told.
        max_body_bytes: of a request.
    """

    def __init__(
        self,
        calls: Calls,
        door: Door,
        metrics: RouterMetrics,
        *,
        served_name: str,
        serving: Callable[[], bool],
        max_body_bytes: int,
    ) -> None:
        self._calls = calls
        self._door = door
        self._metrics = metrics
        self._served_name = served_name
        self._serving = serving
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())

    async def respond(
        self, scope: Scope, receive: Receive, send: Send, handler: Handler, *, public: bool = False
    ) -> None:
        """Answer a request, whatever comes of it. `public`: no key is needed."""
        raw: Sequence[tuple[bytes, bytes]] = scope["headers"]
        headers = headers_of(raw)
        reply = Reply(send, plain(headers.request_id), lambda: self._calls.draining)
        try:
            caller = None if public else self._caller(raw)
            if caller is not None:  # the key says whose it is, whatever organisation its owner has elsewhere
                headers = replace(headers, tenant="")
            await handler(Exchange(scope, receive, reply, headers, caller))
        except ClientGone:
            abort(scope)
        except Stalled:
            abort(scope)
        except asyncio.CancelledError:  # the server ends, and the client would take nothing
            abort(scope)
            raise
        except Exception as error:  # noqa: BLE001 - everything is told and logged
            await reply.error(error, receive)

    def _caller(self, raw: Sequence[tuple[bytes, bytes]]) -> str | None:
        name = AUTHORIZATION.encode()
        return self._door.caller([(AUTHORIZATION, value.decode("latin-1")) for key, value in raw if key == name])

    async def _parsed(self, exchange: Exchange, kind: type[M]) -> M:
        body = await read_body(exchange.receive, exchange.scope["headers"], self._max_body_bytes)
        message = parse(kind, body)
        if len(body) > MANY_BYTES:  # others have waited for long enough, and what follows may take as long again
            await asyncio.sleep(0)
        return message

    # -- generation --------------------------------------------------------------------------------------------

    async def completions(self, exchange: Exchange) -> None:
        body = await self._parsed(exchange, CompletionRequest)
        plan = plan_completions(body, exchange.headers, self._served_name)

        async def work() -> None:
            echoes = [await self._echo(prompt, body.model) for prompt in body.prompt] if body.echo else []
            form = CompletionFormat(body, plan, self._calls.text_model, echoes)
            await run_plan(self._calls, plan, form, exchange.reply, exchange.caller)

        await self._run(exchange, plan, work)

    async def _echo(self, prompt: str | list[int], model: str | None) -> str:
        if isinstance(prompt, str):
            return prompt
        request = generation_pb2.DetokenizeRequest(model=model or "", token_ids=prompt)
        try:
            return await self._calls.detokenize(request)
        except InvalidRequest as error:
            raise renamed(error, [("token_ids", "prompt")]) from error

    async def chat(self, exchange: Exchange) -> None:
        body = await self._parsed(exchange, ChatRequest)
        readable = self._calls.text_model.tools_readable
        plan = plan_chat(body, exchange.headers, self._served_name, readable=readable)

        async def work() -> None:
            form = ChatFormat(body, plan, self._calls.text_model)
            await run_plan(self._calls, plan, form, exchange.reply, exchange.caller)

        await self._run(exchange, plan, work)

    async def responses(self, exchange: Exchange) -> None:
        body = await self._parsed(exchange, ResponseRequest)
        readable = self._calls.text_model.tools_readable
        plan = plan_response(body, exchange.headers, self._served_name, readable=readable)

        async def work() -> None:
            form = ResponseFormat(body, plan, self._calls.text_model)
            await run_plan(self._calls, plan, form, exchange.reply, exchange.caller)

        await self._run(exchange, plan, work)

    async def _run(self, exchange: Exchange, plan: Plan, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        exchange.reply.request_id = plain(plan.request_id)
        if not await while_there(exchange.receive, work()):
            raise ClientGone

    # -- the small ones ------------------------------------------------------------------------------------------

    async def models(self, exchange: Exchange) -> None:
        cards = [self._card(self._served_name)]
        await exchange.reply.json(json.dumps({"object": "list", "data": cards}).encode())

    async def model(self, exchange: Exchange) -> None:
        card = self._card(exchange.scope["path_params"]["model"])
        await exchange.reply.json(json.dumps(card).encode())

    def _card(self, name: str) -> dict[str, object]:
        """Raises UnknownModel."""
        try:
            length: int | None = self._calls.model(name).max_model_len
        except Unavailable:
            length = None
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": OWNER,
            "max_model_len": length,
        }

    async def tokenize(self, exchange: Exchange) -> None:
        body = await self._parsed(exchange, TokenizeRequest)
        length = self._calls.model(body.model or "").max_model_len
        try:
            tokens = await self._calls.tokenize(to_tokenize(body))
        except InvalidRequest as error:
            raise renamed(error, chat_names(body.messages or (), body.tools)) from error
        reply: dict[str, object] = {"count": len(tokens), "max_model_len": length, "tokens": tokens}
        if body.return_token_strs:
            text = self._calls.text_model
            reply["token_strs"] = [text.token_bytes(token).decode(errors="replace") for token in tokens]
        await exchange.reply.json(json.dumps(reply).encode())

    async def detokenize(self, exchange: Exchange) -> None:
        body = await self._parsed(exchange, DetokenizeRequest)
        request = generation_pb2.DetokenizeRequest(model=body.model or "", token_ids=body.tokens)
        try:
            text = await self._calls.detokenize(request)
        except InvalidRequest as error:
            raise renamed(error, [("token_ids", "tokens")]) from error
        await exchange.reply.json(json.dumps({"prompt": text}).encode())

    async def health(self, exchange: Exchange) -> None:
        serving = self._serving()
        body = json.dumps({"status": "serving" if serving else "not serving"}).encode()
        await exchange.reply.whole(200 if serving else 503, body, [(b"content-type", b"application/json")])

    async def metrics(self, exchange: Exchange) -> None:
        accept = dict(exchange.scope["headers"]).get(b"accept", b"").decode("latin-1")
        kind, text = await self._metrics.render(accept)
        await exchange.reply.whole(200, text, [(b"content-type", kind.encode())])

    async def version(self, exchange: Exchange) -> None:
        await exchange.reply.json(json.dumps({"version": version()}).encode())


def version() -> str:
    """Of this program; ``unknown`` if it runs from a folder that was never installed."""
    try:
        return metadata.version("pdserve")
    except metadata.PackageNotFoundError:
        return "unknown"
