"""The HTTP application: paths, their description, and errors that no path has a part in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from router.openai import replies
from router.openai.chat import ChatRequest
from router.openai.completions import CompletionRequest
from router.openai.errors import HttpProblem
from router.openai.exchange import Receive, Scope, Send
from router.openai.face import Exchange, Face, Handler, version
from router.openai.parsing import Message
from router.openai.responses import ResponseRequest
from router.openai.tokens import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_REF = "#/components/schemas/"
_BEARER = {"type": "http", "scheme": "bearer", "description": "Needed where the cluster has API keys."}
_ERRORS = {
    400: "A field is wrong, unknown or not supported; `param` names it.",
    401: "No API key, or one that is not known.",
    404: "The model is not served here.",
    405: "The path takes another method.",
    408: "The body did not come in time.",
    409: "A request with this idempotency key runs.",
    413: "The body is too large.",
    415: "The body is no JSON by its content-type.",
    429: "Shed, or over the tenant's limits; `retry-after` says when to come again.",
    431: "The headers are too large.",
    499: "The request was ended by its id.",
    500: "A fault of the server.",
    503: "No worker, or draining.",
    504: "The deadline has passed.",
}
_ANYWHERE = (405, 431)


class _Raw(Response):
    """A response that writes itself, by ASGI."""

    def __init__(self, respond: AsgiApp) -> None:
        super().__init__()
        self._respond = respond

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._respond(scope, receive, send)


def make_app(face: Face) -> FastAPI:
    """The application."""
    app = FastAPI(
        title="pdserve",
        version=version(),
        description="Disaggregated serving of large language models, as OpenAI's clients know it.",
        docs_url=None,  # they would fetch scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )

    def add(
        method: str,
        path: str,
        handler: Handler,
        summary: str,
        *,
        body: type[Message] | None = None,
        answer: Any = None,
        events: str = "",
        done: bool = True,
        public: bool = False,
        errors: tuple[int, ...] = (),
        extra: dict[str, Any] | None = None,
    ) -> None:
        async def endpoint(request: Request) -> Response:
            return _Raw(lambda scope, receive, send: face.respond(scope, receive, send, handler, public=public))

        ok: dict[str, Any] = {"description": "The answer."}
        if answer is str:
            ok["content"] = {"text/plain": {"schema": {"type": "string"}}}
        else:
            ok["model"] = answer
        if events:
            last = "; in the last event [DONE]" if done else ""
            data = {"type": "string", "description": f"A {events} as JSON{last}."}
            schema = {"type": "object", "description": "Of each event.", "properties": {"data": data}}
            ok["content"] = {"text/event-stream": {"schema": schema}}
        responses: dict[int | str, dict[str, Any]] = {200: ok}
        for status in sorted({*errors, *_ANYWHERE}):
            responses[status] = {"model": replies.ErrorBody, "description": _ERRORS[status]}
        more: dict[str, Any] = dict(extra or {})
        if not public:
            more["security"] = [{"bearer": []}, {}]  # a cluster without keys asks for none
        if body is not None:
            schema = {"$ref": _REF + body.__name__}
            more["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            summary=summary,
            name=handler.__name__,
            operation_id=handler.__name__,
            response_class=_Raw,
            response_model=None,
            status_code=200,
            responses=responses,
            openapi_extra=more,
        )

    reads = (400, 401, 404, 408, 413, 415, 500, 503)
    runs = tuple(_ERRORS)
    add(
        "POST", "/v1/chat/completions", face.chat, "Go on with a chat", body=ChatRequest,
        answer=replies.ChatCompletion, events="ChatCompletionChunk", errors=runs,
    )  # fmt: skip
    add(
        "POST", "/v1/completions", face.completions, "Go on with a text", body=CompletionRequest,
        answer=replies.Completion, events="Completion", errors=runs,
    )  # fmt: skip
    add(
        "POST", "/v1/responses", face.responses, "Answer an input, or call tools", body=ResponseRequest,
        answer=replies.ResponseBody, events="ResponseEvent", errors=runs, done=False,
    )  # fmt: skip
    add("GET", "/v1/models", face.models, "What is served", answer=replies.ModelList, errors=(401,))
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    add(
        "GET", "/v1/models/{model:path}", face.model, "One model", answer=replies.ModelCard, errors=(401, 404),
        extra={"parameters": [name]},
    )  # fmt: skip
    add(
        "POST", "/tokenize", face.tokenize, "Tokens of a text or a chat", body=TokenizeRequest,
        answer=TokenizeReply, errors=reads,
    )  # fmt: skip
    add(
        "POST", "/detokenize", face.detokenize, "The text of tokens", body=DetokenizeRequest,
        answer=DetokenizeReply, errors=reads,
    )  # fmt: skip
    health = {"application/json": {"schema": {"$ref": _REF + replies.Health.__name__}}}
    add(
        "GET", "/health", face.health, "Whether requests can be served", answer=replies.Health, public=True,
        extra={"responses": {"503": {"description": "No, at present.", "content": health}}},
    )  # fmt: skip
    add("GET", "/version", face.version, "Of this program", answer=replies.Version, public=True)
    add(
        "GET", "/metrics", face.metrics, "For Prometheus; docs/metrics.md says what is there", answer=str, public=True
    )
    app.add_exception_handler(HTTPException, _http_error(face, frozenset(getattr(r, "path", "") for r in app.routes)))
    app.openapi = _description(app)  # type: ignore[method-assign]
    return app


def _http_error(face: Face, paths: frozenset[str]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Starlette's own errors, in OpenAI's form. `paths`: all that there are."""

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        allow = [("allow", value) for name, value in (error.headers or {}).items() if name.lower() == "allow"]
        method, path = request.method[:16], request.url.path[:128]
        if error.status_code == 405:
            problem = HttpProblem(405, "method_not_allowed", f"{path} takes no {method}", allow)
        else:
            words = f"there is no {path} here"
            if f"/v1{path}" in paths:
                words += f", but /v1{path}: a client's base URL ends with /v1"
            problem = HttpProblem(error.status_code, "not_found", words)

        async def handler(exchange: Exchange) -> None:
            raise problem

        return _Raw(lambda scope, receive, send: face.respond(scope, receive, send, handler, public=True))

    return answer


def _description(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """The OpenAPI description: FastAPI's, and the bodies that it does not know of."""
    made: dict[str, Any] = {}

    def describe() -> dict[str, Any]:
        if not made:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, definitions = models_json_schema(
                [
                    (ChatRequest, "validation"),
                    (CompletionRequest, "validation"),
                    (TokenizeRequest, "validation"),
                    (DetokenizeRequest, "validation"),
                    (ResponseRequest, "validation"),
                    (replies.ChatCompletionChunk, "serialization"),
                    (replies.ResponseEvent, "serialization"),
                ],
                ref_template=_REF + "{model}",
            )
            components: MutableMapping[str, Any] = schema.setdefault("components", {})
            components.setdefault("schemas", {}).update(definitions["$defs"])
            components["securitySchemes"] = {"bearer": _BEARER}
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # FastAPI's, for what it checks: nothing here
            for name in ("HTTPValidationError", "ValidationError"):
                components["schemas"].pop(name, None)
            made.update(schema)
        return made

    return describe
