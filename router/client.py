"""Typed clients of the public API, synchronous and asynchronous.

::

    with Client("127.0.0.1:50051") as client:
        for event in client.generate("Once upon a time", Sampling(max_tokens=32)):
            print(event.text, end="")

Failures raise the errors of `pdcore.errors`: InvalidRequest names the field, Overloaded says when to try again.
Where the cluster has API keys, give one as `api_key`.

With several routers (``"a:50051,b:50051"``) calls begin at each in turn. One that is unavailable gives way to the
next, until the first event of an answer has come.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from pdcore.addresses import split_addresses
from pdcore.api_key import key_metadata
from pdcore.logprobs import Logprobs, joined
from protos import generation_pb2, generation_pb2_grpc, worker_pb2
from protos.convert import logprobs_from_proto
from router.channels import client_options
from router.failover import Deadline, Rotation, raise_unless_next
from router.wire_errors import error_of

MAX_MESSAGE_BYTES = 16 << 20
READ_AHEAD_BYTES = 64 << 10

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages with ``role`` and ``content``."""

Event = generation_pb2.GenerateEvent


@dataclass(frozen=True, slots=True)
class Sampling:
    """See `Sampling` in generation.proto; None takes the default stated there.

    At most one of `json_schema` (as text or as an object), `json_object`, `regex`, `choice` and `grammar` says which
    form the output must have.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int | None = None
    n: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None


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


def build_request(
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    model: str = "",
    request_id: str = "",
    tenant: str = "",
    priority: str = "",
    kv_codec: str = "",
    cache_salt: str = "",
    idempotency_key: str = "",
) -> generation_pb2.GenerateRequest:
    """The message for a request; see `Client.generate`. Raises ValueError for what the message cannot carry."""
    message = generation_pb2.GenerateRequest(
        request_id=request_id,
        model=model,
        tenant=tenant,
        sampling=_sampling_message(sampling or Sampling()),
        kv_codec=kv_codec,
        cache_salt=cache_salt,
        idempotency_key=idempotency_key,
    )
    if priority:
        message.priority = generation_pb2.Priority.Value(f"PRIORITY_{priority.upper()}")
    if isinstance(prompt, str):
        message.prompt = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        message.chat.CopyFrom(_chat_message(prompt))
    else:
        message.token_ids.ids.extend(prompt)  # type: ignore[arg-type]  # the branch above has taken the messages
        message.token_ids.SetInParent()
    return message


def _sampling_message(sampling: Sampling) -> generation_pb2.Sampling:
    return generation_pb2.Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        n=sampling.n,
        structured_output=_structured_message(sampling),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
    )


def _structured_message(sampling: Sampling) -> worker_pb2.StructuredOutput | None:
    schema = sampling.json_schema
    fields: dict[str, Any] = {
        "json_schema": schema if schema is None or isinstance(schema, str) else json.dumps(schema),
        "json_object": sampling.json_object or None,
        "regex": sampling.regex,
        "choice": worker_pb2.Choice(choices=sampling.choice) if sampling.choice else None,
        "grammar": sampling.grammar,
    }
    asked = {name: value for name, value in fields.items() if value is not None}
    if len(asked) > 1:
        raise ValueError(f"at most one of {', '.join(fields)} may be given, got {' and '.join(asked)}")
    return worker_pb2.StructuredOutput(**asked) if asked else None


def _chat_message(messages: Sequence[Any]) -> generation_pb2.Chat:
    return generation_pb2.Chat(
        messages=[generation_pb2.ChatMessage(role=entry["role"], content=entry["content"]) for entry in messages]
    )


def _tokenize_request(prompt: str | Sequence[Mapping[str, str]], model: str) -> generation_pb2.TokenizeRequest:
    if isinstance(prompt, str):
        return generation_pb2.TokenizeRequest(model=model, prompt=prompt)
    return generation_pb2.TokenizeRequest(model=model, chat=_chat_message(prompt))


class _Collector:
    """Puts the events of one request together."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: list[Logprobs] = []
        self._last = Event()

    def add(self, event: Event) -> None:
        self._text.append(event.text)
        self._token_ids.extend(event.token_ids)
        if event.HasField("logprobs"):
            self._logprobs.append(logprobs_from_proto(event.logprobs))
        if event.HasField("prompt_logprobs"):
            self._prompt_logprobs.append(logprobs_from_proto(event.prompt_logprobs))
        self._last = event

    def completion(self) -> Completion:
        return Completion(
            self._last.request_id,
            "".join(self._text),
            tuple(self._token_ids),
            self._last.end,
            joined(self._logprobs) if self._logprobs else None,
            joined(self._prompt_logprobs) if self._prompt_logprobs else None,
        )


def _check_one(sampling: Sampling | None) -> None:
    if sampling is not None and (sampling.n or 1) != 1:
        raise ValueError(f"n is {sampling.n}: `samples` returns them all")


class _Samples:
    """Puts the events of one request together, sample by sample."""

    def __init__(self, sampling: Sampling | None) -> None:
        self._collectors = [_Collector() for _ in range(1 if sampling is None or sampling.n is None else sampling.n)]

    def add(self, event: Event) -> None:
        self._collectors[event.sample].add(event)

    def completions(self) -> list[Completion]:
        return [collector.completion() for collector in self._collectors]


class Client:
    """Synchronous client; thread-safe. `timeout_s` of a call is its deadline, which the cluster honours.

    Args:
        address: ``host:port`` of a router; several separated by commas, or a sequence of them.
        api_key: says whose the requests are, where the cluster has keys. It travels as it is: use it on networks that
            you trust, or through a proxy that encrypts.
        read_ahead_bytes: what a router may send of one stream before it is read here.
    """

    def __init__(
        self, address: str | Sequence[str], *, api_key: str = "", read_ahead_bytes: int = READ_AHEAD_BYTES
    ) -> None:
        self._metadata = key_metadata(api_key)
        options = client_options(MAX_MESSAGE_BYTES, read_ahead_bytes)
        self._channels = [grpc.insecure_channel(name, options=options) for name in split_addresses(address)]
        self._stubs = Rotation([generation_pb2_grpc.GenerationStub(channel) for channel in self._channels])

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, *, timeout_s: float | None = None, **request: str
    ) -> Iterator[Event]:
        """Stream events; the last one of each sample has `end`. Leaving the loop early cancels the request.

        Args:
            request: `model`, `request_id`, `tenant`, `priority` (``interactive``, ``standard`` or ``batch``),
                `kv_codec` (how KV travels inside the cluster), `cache_salt` (who shares cached prompts) and
                `idempotency_key` (AlreadyRunning is raised while another request with this key runs).
        """
        message, deadline = build_request(prompt, sampling, **request), Deadline(timeout_s)
        for stub, last in self._stubs.take():
            call, begun = stub.Generate(message, timeout=deadline.left_s, metadata=self._metadata), False
            try:
                for event in call:
                    begun = True
                    yield event
                return
            except grpc.RpcError as error:
                raise_unless_next(error, begun or last)
            finally:
                call.cancel()

    def complete(
        self, prompt: Prompt, sampling: Sampling | None = None, *, timeout_s: float | None = None, **request: str
    ) -> Completion:
        """The whole answer; arguments as for `generate`. Raises ValueError for several samples: see `samples`."""
        _check_one(sampling)
        return self.samples(prompt, sampling, timeout_s=timeout_s, **request)[0]

    def samples(
        self, prompt: Prompt, sampling: Sampling | None = None, *, timeout_s: float | None = None, **request: str
    ) -> list[Completion]:
        """All ``sampling.n`` samples of the answer; arguments as for `generate`."""
        samples = _Samples(sampling)
        for event in self.generate(prompt, sampling, timeout_s=timeout_s, **request):
            samples.add(event)
        return samples.completions()

    def cancel(self, request_id: str, timeout_s: float = 10.0) -> bool:
        """End a running request, on whichever router it is; False if there is none with this id.

        Raises Unavailable if it was not found, and not every router answered.
        """
        request, silent = generation_pb2.CancelRequest(request_id=request_id), None
        for stub, _ in self._stubs.take():
            try:
                if stub.Cancel(request, timeout=timeout_s, metadata=self._metadata).found:
                    return True
            except grpc.RpcError as error:
                silent = error
        if silent is not None:
            raise error_of(silent) from silent
        return False

    def model(self, timeout_s: float = 10.0) -> generation_pb2.GetModelReply:
        """What is served."""
        request = generation_pb2.GetModelRequest()
        reply: generation_pb2.GetModelReply = self._call("GetModel", request, timeout_s)
        return reply

    def tokenize(
        self, prompt: str | Sequence[Mapping[str, str]], *, model: str = "", timeout_s: float = 10.0
    ) -> list[int]:
        """Token ids of a text or of chat messages."""
        reply = self._call("Tokenize", _tokenize_request(prompt, model), timeout_s)
        return list(reply.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float = 10.0) -> str:
        """Text of token ids, special ones skipped."""
        request = generation_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        return str(self._call("Detokenize", request, timeout_s).text)

    def _call(self, method: str, request: object, timeout_s: float) -> Any:
        for stub, last in self._stubs.take():
            try:
                return getattr(stub, method)(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.RpcError as error:
                raise_unless_next(error, last)
        raise AssertionError("there is at least one router")


class AsyncClient:
    """`Client` for asyncio; to be made and used on one event loop."""

    def __init__(
        self, address: str | Sequence[str], *, api_key: str = "", read_ahead_bytes: int = READ_AHEAD_BYTES
    ) -> None:
        self._metadata = key_metadata(api_key)
        options = client_options(MAX_MESSAGE_BYTES, read_ahead_bytes)
        self._channels = [grpc.aio.insecure_channel(name, options=options) for name in split_addresses(address)]
        self._stubs: Rotation[Any] = Rotation(
            [generation_pb2_grpc.GenerationStub(channel) for channel in self._channels]
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, *, timeout_s: float | None = None, **request: str
    ) -> AsyncIterator[Event]:
        """See `Client.generate`. Close the iterator (``aclosing``) to cancel when leaving the loop early."""
        message, deadline = build_request(prompt, sampling, **request), Deadline(timeout_s)
        for stub, last in self._stubs.take():
            call, begun = stub.Generate(message, timeout=deadline.left_s, metadata=self._metadata), False
            try:
                async for event in call:
                    begun = True
                    yield event
                return
            except grpc.RpcError as error:
                raise_unless_next(error, begun or last)
            finally:
                call.cancel()

    async def complete(
        self, prompt: Prompt, sampling: Sampling | None = None, *, timeout_s: float | None = None, **request: str
    ) -> Completion:
        """See `Client.complete`."""
        _check_one(sampling)
        return (await self.samples(prompt, sampling, timeout_s=timeout_s, **request))[0]

    async def samples(
        self, prompt: Prompt, sampling: Sampling | None = None, *, timeout_s: float | None = None, **request: str
    ) -> list[Completion]:
        """See `Client.samples`."""
        samples = _Samples(sampling)
        async for event in self.generate(prompt, sampling, timeout_s=timeout_s, **request):
            samples.add(event)
        return samples.completions()

    async def cancel(self, request_id: str, timeout_s: float = 10.0) -> bool:
        """See `Client.cancel`."""
        request, silent = generation_pb2.CancelRequest(request_id=request_id), None
        for stub, _ in self._stubs.take():
            try:
                if (await stub.Cancel(request, timeout=timeout_s, metadata=self._metadata)).found:
                    return True
            except grpc.RpcError as error:
                silent = error
        if silent is not None:
            raise error_of(silent) from silent
        return False

    async def model(self, timeout_s: float = 10.0) -> generation_pb2.GetModelReply:
        """See `Client.model`."""
        reply: generation_pb2.GetModelReply = await self._call(
            "GetModel", generation_pb2.GetModelRequest(), timeout_s
        )
        return reply

    async def tokenize(
        self, prompt: str | Sequence[Mapping[str, str]], *, model: str = "", timeout_s: float = 10.0
    ) -> list[int]:
        """See `Client.tokenize`."""
        reply = await self._call("Tokenize", _tokenize_request(prompt, model), timeout_s)
        return list(reply.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float = 10.0) -> str:
        """See `Client.detokenize`."""
        request = generation_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        reply = await self._call("Detokenize", request, timeout_s)
        return str(reply.text)

    async def _call(self, method: str, request: object, timeout_s: float) -> Any:
        for stub, last in self._stubs.take():
            try:
                return await getattr(stub, method)(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.RpcError as error:
                raise_unless_next(error, last)
        raise AssertionError("there is at least one router")
