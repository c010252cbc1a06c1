"""What an HTTP request comes to: requests for the core, and what they share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdcore.errors import InvalidRequest
from pdcore.types import MAX_SAMPLES
from protos import generation_pb2
from router.claims import key_of
from router.openai.fields import PRIORITIES, GenerationFields, check_together, sampling_of
from router.validation import new_request_id, usable_id

Names = Sequence[tuple[str, str]]

REQUEST_ID = "x-request-id"
MAX_COPIED_BYTES = 8 << 20
"""Of what several prompts have in common, and each one's request has a copy of."""


def plain(request_id: str) -> str:
    """A request's id as it may stand in a header: what a client calls it may be anything."""
    return request_id if usable_id(request_id) else new_request_id()


@dataclass(frozen=True, slots=True)
class Headers:
    """What the headers of a request say about it.

    `request_id`: of the header, or made here. `idempotency_key`: empty if there is none. `tenant`: who the client
    says it is; empty if it does not. `remaining_s`: seconds that the client will wait for the end of the answer, and
    for that of a stream; None if it does not say.
    """

    request_id: str
    idempotency_key: str = ""
    tenant: str = ""
    remaining_s: float | None = None
    stream_remaining_s: float | None = None


def headers_of(raw: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Read the headers of a request; names are in lower case."""
    found: Mapping[str, str] = {name.decode("latin-1"): value.decode("latin-1") for name, value in raw}
    proxy_s = _number(found.get("x-envoy-expected-rq-timeout-ms"), 0.001)
    # OpenAI's client says how long it waits for each read: without a stream that is for all of the answer.
    reads_s = _number(found.get("x-stainless-read-timeout"), 1.0)
    return Headers(
        request_id=found.get(REQUEST_ID) or new_request_id(),
        idempotency_key=found.get("idempotency-key", ""),
        tenant=found.get("openai-organization", ""),
        remaining_s=min((limit for limit in (proxy_s, reads_s) if limit is not None), default=None),
        stream_remaining_s=proxy_s,
    )


def _number(text: str | None, unit: float) -> float | None:
    """Of a header that is no more than a hint: what cannot be read says nothing."""
    try:
        value = float(text or "") * unit
    except ValueError:
        return None
    return value if 0 < value < 1e9 else None


@dataclass(slots=True)
class Plan:
    """The requests of one HTTP request, in the order of its prompts, and how their answer is told.

    Attributes:
        names: of each, what stands for the core's names of fields.
        samples: of each prompt. created: seconds since 1970.
        remaining_s: see `Headers`.
    """

    request_id: str
    requests: list[generation_pb2.GenerateRequest]
    names: list[Names]
    model: str
    stream: bool
    with_usage: bool
    with_running_usage: bool
    samples: int
    skip_special: bool
    remaining_s: float | None
    created: int = field(default_factory=lambda: int(time.time()))


def begin_plan(
    body: GenerationFields, headers: Headers, served_name: str
) -> tuple[Plan, generation_pb2.GenerateRequest]:
    """A plan without requests, and the request that all of its prompts begin with. Raises InvalidRequest."""
    check_together(body)
    request_id = body.request_id or headers.request_id
    sampling = sampling_of(body)
    request = generation_pb2.GenerateRequest(
        request_id=request_id,
        model=body.model or "",
        sampling=sampling,
        tenant=headers.tenant,
        priority=PRIORITIES[body.priority] if body.priority else generation_pb2.PRIORITY_UNSPECIFIED,
        kv_codec=body.kv_codec or "",
        cache_salt=body.cache_salt or "",
        idempotency_key=headers.idempotency_key,
    )
    plan = Plan(
        request_id=request_id,
        requests=[],
        names=[],
        model=served_name,
        stream=bool(body.stream),
        with_usage=body.with_usage,
        with_running_usage=body.with_running_usage,
        samples=min(max(1, sampling.n), MAX_SAMPLES),  # places are made for them before the core refuses more
        skip_special=body.skip_special_tokens is not False,
        remaining_s=headers.stream_remaining_s if body.stream else headers.remaining_s,
    )
    return plan, request


def check_copies(request: generation_pb2.GenerateRequest, count: int) -> None:
    """Raises InvalidRequest if `count` requests like this one would be too much."""
    size = count * request.ByteSize()
    if size > MAX_COPIED_BYTES:
        problem = f"must be fewer, or have less beside them: {count} come to {size} bytes, of {MAX_COPIED_BYTES}"
        raise InvalidRequest("prompt", problem)


def numbered(request: generation_pb2.GenerateRequest, number: int) -> generation_pb2.GenerateRequest:
    """The request of prompt `number` of several: their keys differ, and are the same when it is sent again."""
    copy = generation_pb2.GenerateRequest()
    copy.CopyFrom(request)
    copy.idempotency_key = key_of(request.idempotency_key, number)
    return copy
