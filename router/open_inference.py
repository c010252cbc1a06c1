"""The Open Inference Protocol (KServe, Triton): its gRPC service, on `router.calls`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from importlib import metadata

import grpc

from pdcore.errors import InvalidRequest, RequestError, UnknownModel
from protos import open_inference_pb2 as pb
from protos import open_inference_pb2_grpc
from router.api_keys import Door
from router.calls import Calls
from router.open_inference_answer import VERSION, Inference, Send
from router.open_inference_request import INPUTS, OUTPUTS, InferRequest, understand
from router.open_inference_stream import InferStream
from router.validation import MAX_ID_CHARS, new_request_id, usable_id

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
OPEN_TO_ALL = (f"{SERVICE}/ServerLive", f"{SERVICE}/ServerReady")
"""Methods that need no API key: probes."""

GRPC_ERRORS = "triton_grpc_error"
"""Metadata of ModelStreamInfer: if it is ``true``, an error ends the stream with its status."""

_DATA_TYPES = {
    "BYTES": pb.TYPE_STRING,
    "BOOL": pb.TYPE_BOOL,
    "INT32": pb.TYPE_INT32,
    "UINT32": pb.TYPE_UINT32,
    "UINT64": pb.TYPE_UINT64,
    "FP32": pb.TYPE_FP32,
}


class OpenInferenceService(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """See open_inference.proto. Methods raise RequestError, and `router.guard` stands before them.

    Args:
        served_name: of the model. ready: whether requests can be served.
    """

    def __init__(self, calls: Calls, door: Door, served_name: str, ready: Callable[[], bool]) -> None:
        self._calls = calls
        self._door = door
        self._served_name = served_name
        self._ready = ready
        self._names: set[str] = set()  # of requests that run
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """From now on streams end once nothing runs on them."""
        self._draining.set()

    # -- about server and model ----------------------------------------------------------------------------------

    async def ServerLive(
        self, request: pb.ServerLiveRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: pb.ServerReadyRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._ready())

    async def ModelReady(
        self, request: pb.ModelReadyRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelReadyResponse:
        served = request.name == self._served_name and request.version in ("", VERSION)
        return pb.ModelReadyResponse(ready=served and self._ready())

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="pdserve", version=_version(), extensions=["model_configuration"])

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelMetadataResponse:
        self._check_model(request.name, request.version)
        described = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=self._served_name,
            versions=[VERSION],
            platform="pdserve",
            inputs=[described(name=name, datatype=kind, shape=[-1]) for name, kind in INPUTS.items()],
            outputs=[described(name=name, datatype=kind, shape=[-1]) for name, kind in OUTPUTS.items()],
        )

    async def ModelConfig(
        self, request: pb.ModelConfigRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelConfigResponse:
        self._check_model(request.name, request.version)
        inputs = [
            pb.ModelInput(name=name, data_type=_DATA_TYPES[kind], dims=[-1], optional=number > 0)
            for number, (name, kind) in enumerate(INPUTS.items())
        ]
        outputs = [
            pb.ModelOutput(name=name, data_type=_DATA_TYPES[kind], dims=[-1]) for name, kind in OUTPUTS.items()
        ]
        config = pb.ModelConfig(
            name=self._served_name,
            backend="pdserve",
            input=inputs,
            output=outputs,
            model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
        )
        return pb.ModelConfigResponse(config=config)

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, context: grpc.aio.ServicerContext
    ) -> pb.RepositoryIndexResponse:
        ready = self._ready()
        state, reason = ("READY", "") if ready else ("UNAVAILABLE", "no worker is connected, or the router drains")
        model = pb.RepositoryIndexResponse.ModelIndex(
            name=self._served_name, version=VERSION, state=state, reason=reason
        )
        return pb.RepositoryIndexResponse(models=[model] if ready or not request.ready else [])

    def _check_model(self, name: str, version: str) -> None:
        served = self._served_name
        if name not in ("", served):
            raise UnknownModel(name[:MAX_ID_CHARS], [served])
        if version not in ("", VERSION):
            raise UnknownModel(f"{served} version {version[:32]}", [f"{served} version {VERSION}"])

    # -- inference -----------------------------------------------------------------------------------------------

    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelInferResponse:
        caller = self._door.caller(context.invocation_metadata() or ())
        with self._named(request.id) as request_id:
            asked = self._understood(request)
            if asked.stream:
                raise InvalidRequest(
                    "stream", "must be false, or left out, where there is one answer: ModelStreamInfer"
                )
            inference = Inference(self._calls, request, asked, request_id)
            return await inference.run(caller=caller, remaining_s=context.time_remaining())

    async def ModelStreamInfer(  # type: ignore[override]  # a coroutine that writes
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> None:
        about = context.invocation_metadata() or ()
        caller = self._door.caller(about)

        async def infer(request: pb.ModelInferRequest, send: Send) -> pb.ModelInferResponse | None:
            with self._named(request.id) as request_id:
                asked = self._understood(request)
                inference = Inference(self._calls, request, asked, request_id, send)
                response = await inference.run(caller=caller, remaining_s=context.time_remaining())
                return None if asked.stream else response

        by_status = any(key == GRPC_ERRORS and value == "true" for key, value in about)
        await InferStream(context, infer, self._draining, by_status=by_status).run()

    def _understood(self, request: pb.ModelInferRequest) -> InferRequest:
        self._check_model(request.model_name, request.model_version)
        return understand(request)

    @contextmanager
    def _named(self, asked: str) -> Iterator[str]:
        """The id that a request has here, which the errors in the block get: its client's if that can be had.

        For Triton, ids need not differ from one another, nor look like ours.
        """
        free = asked not in self._names and not self._calls.is_running(asked)
        name = asked if free and usable_id(asked) else new_request_id()
        self._names.add(name)
        try:
            yield name
        except RequestError as error:
            error.request_id = name
            raise
        finally:
            self._names.discard(name)


def _version() -> str:
    try:
        return metadata.version("pdserve")
    except metadata.PackageNotFoundError:  # it runs from its sources
        return "0"
