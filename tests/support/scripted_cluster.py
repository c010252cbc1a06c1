"""A cluster that answers as it is told to, over real gRPC, and the command line that talks to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from grpc_status import rpc_status
from typer.testing import CliRunner

from cluster.cli.app import app
from pdcore.errors import RequestError, UnknownModel
from protos import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc, kv_pb2, worker_pb2
from router.wire_errors import REQUEST_ID_METADATA, status_of

Event = generation_pb2.GenerateEvent

END = generation_pb2.End(
    finish_reason=generation_pb2.FINISH_REASON_STOP,
    usage=generation_pb2.Usage(prompt_tokens=5, completion_tokens=3),
    timeline=generation_pb2.Timeline(
        queued_ms=1.5,
        ttft_ms=12.25,
        tpot_ms=4.5,
        prefill_worker="prefill-0",
        decode_worker="decode-1",
        kv=kv_pb2.TransferStats(
            blocks=2,
            raw_bytes=4000,
            wire_bytes=2500,
            codec="bexp-zstd",
            transport="grpc",
            seconds=0.0125,
            codec_reason="asked for",
        ),
    ),
)


class ScriptedCluster(generation_pb2_grpc.GenerationServicer, admin_pb2_grpc.AdminServicer):
    """Answers every Generate with `events`, then `error` if there is one, and keeps the requests.

    Attributes:
        answers: other events, by the prompt or the last message of a chat.
        late_s: seconds until the first event of an answer, or until Detokenize and Cancel reply.
        made_id: of the request, in every RequestError that a call fails with; empty for none.
        status_error: what GetStatus and GetSteps fail with.
        endless: what is asked like this gets its events and no end. left: set once its client has gone.
    """

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.keys: list[str | None] = []
        self.events = [
            Event(token_ids=[7, 8], text="Because "),
            Event(token_ids=[9], text="so.", token_index=2),
            Event(end=END),
        ]
        self.answers: dict[str, list[generation_pb2.GenerateEvent]] = {}
        self.made_id = ""
        self.status_error: RequestError | None = None
        self.endless: str | None = None
        self.left = threading.Event()
        self.late_s = 0.0
        self.error: tuple[grpc.StatusCode, str] | RequestError | None = None
        self.model = generation_pb2.GetModelReply(
            model=worker_pb2.ModelDescription(name="tiny"), has_chat_template=True
        )
        self.status = admin_pb2.GetStatusReply()
        self.steps = admin_pb2.GetClusterStepsReply()
        self.asked_steps = 0

    def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateEvent]:
        self.requests.append(request)
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        last = request.chat.messages[-1].content if request.chat.messages else request.prompt
        gone = threading.Event()
        context.add_callback(gone.set)
        if last == self.endless:
            context.add_callback(self.left.set)
        gone.wait(self.late_s)
        yield from self.answers.get(last, self.events)
        if last == self.endless:
            gone.wait(30)
            return
        if isinstance(self.error, RequestError):
            self._fail(context, self.error)
        if self.error is not None:
            context.abort(*self.error)

    def GetModel(
        self, request: generation_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> generation_pb2.GetModelReply:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        if request.model not in ("", self.model.model.name):
            error = UnknownModel(request.model, [self.model.model.name])
            self._fail(context, error)
        return self.model

    def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> generation_pb2.TokenizeReply:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        return generation_pb2.TokenizeReply(token_ids=[61, 62])

    def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> generation_pb2.DetokenizeReply:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        self._come_late(context)
        return generation_pb2.DetokenizeReply(text="".join(f"t{token_id}" for token_id in request.token_ids))

    def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> admin_pb2.GetStatusReply:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        self._fail_status(context)
        return self.status

    def GetSteps(
        self, request: worker_pb2.GetStepsRequest, context: grpc.ServicerContext
    ) -> admin_pb2.GetClusterStepsReply:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        self.asked_steps = request.count
        self._fail_status(context)
        return self.steps

    def _come_late(self, context: grpc.ServicerContext) -> None:
        gone = threading.Event()
        if context.add_callback(gone.set):
            gone.wait(self.late_s)

    def _fail(self, context: grpc.ServicerContext, error: RequestError) -> None:
        status = rpc_status.to_status(status_of(error))
        made = ((REQUEST_ID_METADATA, self.made_id),) if self.made_id else ()
        context.set_trailing_metadata((*status.trailing_metadata, *made))
        context.abort(status.code, status.details)

    def _fail_status(self, context: grpc.ServicerContext) -> None:
        if self.status_error is not None:
            self._fail(context, self.status_error)

    def Cancel(
        self, request: generation_pb2.CancelRequest, context: grpc.ServicerContext
    ) -> generation_pb2.CancelReply:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        self._come_late(context)
        return generation_pb2.CancelReply(found=True)


@contextmanager
def scripted_cluster() -> Iterator[ScriptedCluster]:
    """One that serves until the end."""
    scripted = ScriptedCluster()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServicer_to_server(scripted, server)
    admin_pb2_grpc.add_AdminServicer_to_server(scripted, server)
    scripted.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield scripted
    finally:
        server.stop(0).wait(5)


class Run:
    """One finished run of the command."""

    def __init__(self, *arguments: str, stdin: str | None = None) -> None:
        result = CliRunner().invoke(app, list(arguments), input=stdin, prog_name="pdserve")
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr
