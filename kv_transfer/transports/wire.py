"""Between the messages of a push stream and their protobuf form (`protos/kv.proto`)."""

from __future__ import annotations

from kv_transfer.manifest import Manifest, TicketRef
from kv_transfer.messages import (
    Abort,
    Committed,
    FrameAck,
    FrameNack,
    Hello,
    Piece,
    PushMessage,
    PushReply,
    TicketRefused,
    Welcome,
)
from pdcore.errors import FrameError
from pdcore.types import RequestKey
from protos import kv_pb2
from protos.convert import geometry_from_proto, geometry_to_proto


def message_to_proto(message: PushMessage) -> kv_pb2.PushMessage:
    """Sender's message as it goes out."""
    match message:
        case Piece():
            chunk = kv_pb2.KvChunk(
                ticket=_ref_to_proto(message.ref),
                frame_index=message.frame_index,
                offset=message.offset,
                total=message.total,
                data=message.data,
            )
            setattr(chunk, "try", message.attempt)  # a keyword in Python
            return kv_pb2.PushMessage(chunk=chunk)
        case Manifest():
            return kv_pb2.PushMessage(
                manifest=kv_pb2.Manifest(
                    ticket=_ref_to_proto(message.ref),
                    request_id=message.key.request_id,
                    attempt=message.key.attempt,
                    num_tokens=message.num_tokens,
                    num_frames=message.num_frames,
                    first_token=message.first_token,
                    digest=message.digest,
                )
            )
        case Abort():
            return kv_pb2.PushMessage(
                abort=kv_pb2.PushAbort(ticket=_ref_to_proto(message.ref), reason=message.reason)
            )
        case Hello():
            return kv_pb2.PushMessage(
                hello=kv_pb2.PushHello(
                    protocol_min=message.protocol_min,
                    protocol_max=message.protocol_max,
                    worker_id=message.worker_id,
                    worker_incarnation=message.worker_incarnation,
                    receiver_incarnation=message.receiver_incarnation,
                    geometry=geometry_to_proto(message.geometry),
                )
            )


def message_from_proto(message: kv_pb2.PushMessage) -> PushMessage:
    """Sender's message as it came in. Raises `FrameError` if it is of a kind that is not known here."""
    match message.WhichOneof("message"):
        case "chunk":
            chunk = message.chunk
            return Piece(
                ref=_ref_from_proto(chunk.ticket),
                frame_index=chunk.frame_index,
                attempt=getattr(chunk, "try"),
                offset=chunk.offset,
                total=chunk.total,
                data=chunk.data,
            )
        case "manifest":
            manifest = message.manifest
            return Manifest(
                ref=_ref_from_proto(manifest.ticket),
                key=RequestKey(manifest.request_id, manifest.attempt),
                num_tokens=manifest.num_tokens,
                num_frames=manifest.num_frames,
                first_token=manifest.first_token,
                digest=manifest.digest,
            )
        case "abort":
            return Abort(_ref_from_proto(message.abort.ticket), message.abort.reason)
        case "hello":
            hello = message.hello
            return Hello(
                protocol_min=hello.protocol_min,
                protocol_max=hello.protocol_max,
                worker_id=hello.worker_id,
                worker_incarnation=hello.worker_incarnation,
                receiver_incarnation=hello.receiver_incarnation,
                geometry=geometry_from_proto(hello.geometry),
            )
        case _:
            raise FrameError("a push message of a kind that is not known here")


def reply_to_proto(reply: PushReply) -> kv_pb2.PushReply:
    """Receiver's message as it goes out."""
    match reply:
        case FrameAck():
            return kv_pb2.PushReply(
                ack=kv_pb2.FrameAck(
                    ticket=_ref_to_proto(reply.ref), frame_index=reply.frame_index, credit_bytes=reply.credit_bytes
                )
            )
        case FrameNack():
            return kv_pb2.PushReply(
                nack=kv_pb2.FrameNack(
                    ticket=_ref_to_proto(reply.ref),
                    frame_index=reply.frame_index,
                    credit_bytes=reply.credit_bytes,
                    retryable=reply.retryable,
                    reason=reply.reason,
                )
            )
        case Committed():
            return kv_pb2.PushReply(committed=kv_pb2.Committed(ticket=_ref_to_proto(reply.ref)))
        case TicketRefused():
            return kv_pb2.PushReply(
                refused=kv_pb2.TicketRefused(ticket=_ref_to_proto(reply.ref), reason=reply.reason)
            )
        case Welcome():
            return kv_pb2.PushReply(
                welcome=kv_pb2.PushWelcome(
                    protocol=reply.protocol,
                    worker_incarnation=reply.worker_incarnation,
                    geometry=geometry_to_proto(reply.geometry),
                    codecs=reply.codecs,
                    credit_bytes=reply.credit_bytes,
                )
            )


def reply_from_proto(reply: kv_pb2.PushReply) -> PushReply:
    """Receiver's message as it came in. Raises `FrameError` if it is of a kind that is not known here."""
    match reply.WhichOneof("reply"):
        case "ack":
            return FrameAck(_ref_from_proto(reply.ack.ticket), reply.ack.frame_index, reply.ack.credit_bytes)
        case "nack":
            nack = reply.nack
            return FrameNack(
                _ref_from_proto(nack.ticket), nack.frame_index, nack.credit_bytes, nack.retryable, nack.reason
            )
        case "committed":
            return Committed(_ref_from_proto(reply.committed.ticket))
        case "refused":
            return TicketRefused(_ref_from_proto(reply.refused.ticket), reply.refused.reason)
        case "welcome":
            welcome = reply.welcome
            return Welcome(
                protocol=welcome.protocol,
                worker_incarnation=welcome.worker_incarnation,
                geometry=geometry_from_proto(welcome.geometry),
                codecs=tuple(welcome.codecs),
                credit_bytes=welcome.credit_bytes,
            )
        case _:
            raise FrameError("a push reply of a kind that is not known here")


def _ref_to_proto(ref: TicketRef) -> kv_pb2.TicketRef:
    return kv_pb2.TicketRef(ticket_id=ref.ticket_id, generation=ref.generation)


def _ref_from_proto(ref: kv_pb2.TicketRef) -> TicketRef:
    return TicketRef(ref.ticket_id, ref.generation)
