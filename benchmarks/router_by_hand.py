"""Workers driven without a router: by hand, and by a relay that does the same for whoever calls it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from pdcore.types import PROTOCOL_VERSION, RequestKey, RequestSpec, SamplingParams
from protos import generation_pb2, generation_pb2_grpc, kv_pb2, worker_pb2, worker_pb2_grpc
from protos.convert import spec_to_proto

ANSWER_S = 10.0


class ByHand:
    """A session with one worker. Use with `async with`."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._waiting: dict[str, asyncio.Future[Any]] = {}

    async def __aenter__(self) -> ByHand:
        self._call = worker_pb2_grpc.WorkerStub(self._channel).Session()
        hello = worker_pb2.Hello(
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            router_id="by-hand",
            router_incarnation="by-hand-1",
        )
        await self._call.write(worker_pb2.SessionCommand(hello=hello))
        assert (await self._call.read()).HasField("welcome")
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        self._call.cancel()
        await self._channel.close()

    async def reserve(self, spec: RequestSpec) -> kv_pb2.Ticket:
        reserve = worker_pb2.Reserve(request=spec_to_proto(spec))
        answer: kv_pb2.Ticket = await self._ask(spec.key, worker_pb2.SessionCommand(reserve=reserve))
        return answer

    async def first_token(self, spec: RequestSpec, ticket: kv_pb2.Ticket) -> int:
        prefill = worker_pb2.Prefill(request=spec_to_proto(spec), ticket=ticket)
        answer: int = await self._ask(spec.key, worker_pb2.SessionCommand(prefill=prefill))
        return answer

    async def release(self, key: RequestKey) -> None:
        order = worker_pb2.Abort(request_id=key.request_id, attempt=key.attempt, reason="done")
        await self._call.write(worker_pb2.SessionCommand(abort=order))

    async def _ask(self, key: RequestKey, command: worker_pb2.SessionCommand) -> Any:
        answer = self._waiting[key.request_id] = asyncio.get_running_loop().create_future()
        await self._call.write(command)
        return await asyncio.wait_for(answer, ANSWER_S)

    async def _read(self) -> None:
        while isinstance(event := await self._call.read(), worker_pb2.SessionEvent):
            if event.HasField("reserve"):
                self._waiting.pop(event.reserve.request_id).set_result(event.reserve.granted)
            for token in event.report.tokens:
                self._waiting.pop(token.request_id).set_result(token.token_id)


class BareRelay(generation_pb2_grpc.GenerationServicer):
    """Asks the workers by hand for a call's first token, and passes it on. No checks, no choice."""

    def __init__(self, prefill: ByHand, decode: ByHand) -> None:
        self._prefill = prefill
        self._decode = decode

    async def Generate(  # type: ignore[override]
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        key = RequestKey(request.request_id, 1)
        spec = RequestSpec(key, tuple(request.token_ids.ids), SamplingParams(max_tokens=1))
        token = await self._prefill.first_token(spec, await self._decode.reserve(spec))
        await context.write(generation_pb2.GenerateEvent(request_id=request.request_id, token_ids=[token]))
        await self._decode.release(key)
