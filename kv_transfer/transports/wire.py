"""Between the messages of a push stream and their protobuf form (`protos/kv.proto`)."""

from __future__ import annotations

from kv_transfer.manifest import MAX_REASON_CHARS, Manifest
from kv_transfer.messages import (
    Abort,
    Committed,
    FrameAck,
    FrameNack,
    Hello,
    LaneAccept,
    LaneClose,
    LaneClosed,
    LaneDown,
    LaneFrame,
    LaneOpen,
    Piece,
    PushMessage,
    PushReply,
    Revocation,
    TicketRefused,
    Welcome,
)
from kv_transfer.transports import lane_wire
from kv_transfer.transports.ref_wire import ref_from_proto, ref_to_proto
from pdcore.errors import FrameError
from pdcore.types import MAX_SAMPLES, RequestKey
from protos import kv_pb2
from protos.convert import geometry_from_proto, geometry_to_proto


def message_to_proto(message: PushMessage) -> kv_pb2.PushMessage:
    """Sender's message as it goes out."""
    match message:
        case Piece():
            chunk = kv_pb2.KvChunk(
                ticket=ref_to_proto(message.ref),
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
                    ticket=ref_to_proto(message.ref),
                    request_id=message.key.request_id,
                    attempt=message.key.attempt,
                    num_tokens=message.num_tokens,
                    num_frames=message.num_frames,
                    first_tokens=message.first_tokens,
                    digest=message.digest,
                    codec_reason=message.codec_reason,
                )
            )
        case Abort():
            return kv_pb2.PushMessage(abort=kv_pb2.PushAbort(ticket=ref_to_proto(message.ref), reason=message.reason))
        case Hello():
            return kv_pb2.PushMessage(
                hello=kv_pb2.PushHello(
                    protocol_min=message.protocol_min,
                    protocol_max=message.protocol_max,
                    worker_id=message.worker_id,
                    worker_incarnation=message.worker_incarnation,
                    receiver_incarnation=message.receiver_incarnation,
                    geometry=geometry_to_proto(message.geometry),
                    transports=lane_wire.offer_to_proto(message.offer),
                )
            )
        case LaneFrame():
            return kv_pb2.PushMessage(lane_frame=lane_wire.frame_to_proto(message))
        case LaneOpen():
            return kv_pb2.PushMessage(lane_open=lane_wire.open_to_proto(message))
        case LaneClose(lane, reason):
            return kv_pb2.PushMessage(lane_close=kv_pb2.LaneClose(lane=lane, reason=reason))


def message_from_proto(message: kv_pb2.PushMessage) -> PushMessage:
    """Sender's message as it came in. Raises `FrameError` if it is of a kind that is not known here."""
    match message.WhichOneof("message"):
        case "chunk":
            chunk = message.chunk
            return Piece(
                ref=ref_from_proto(chunk.ticket),
                frame_index=chunk.frame_index,
                attempt=getattr(chunk, "try"),
                offset=chunk.offset,
                total=chunk.total,
                data=chunk.data,
            )
        case "manifest":
            manifest = message.manifest
            if not 1 <= len(manifest.first_tokens) <= MAX_SAMPLES:
                raise FrameError(f"a manifest with {len(manifest.first_tokens)} first tokens, not 1 to {MAX_SAMPLES}")
            return Manifest(
                ref=ref_from_proto(manifest.ticket),
                key=RequestKey(manifest.request_id, manifest.attempt),
                num_tokens=manifest.num_tokens,
                num_frames=manifest.num_frames,
                first_tokens=tuple(manifest.first_tokens),
                digest=manifest.digest,
                codec_reason=manifest.codec_reason[:MAX_REASON_CHARS],
            )
        case "abort":
            return Abort(ref_from_proto(message.abort.ticket), message.abort.reason)
        case "hello":
            hello = message.hello
            return Hello(
                protocol_min=hello.protocol_min,
                protocol_max=hello.protocol_max,
                worker_id=hello.worker_id,
                worker_incarnation=hello.worker_incarnation,
                receiver_incarnation=hello.receiver_incarnation,
                geometry=geometry_from_proto(hello.geometry),
                offer=lane_wire.offer_from_proto(hello),
            )
        case "lane_frame":
            return lane_wire.frame_from_proto(message.lane_frame)
        case "lane_open":
            return lane_wire.open_from_proto(message.lane_open)
        case "lane_close":
            return LaneClose(message.lane_close.lane, message.lane_close.reason)
        case _:
            raise FrameError("a push message of a kind that is not known here")


def reply_to_proto(reply: PushReply) -> kv_pb2.PushReply:
    """Receiver's message as it goes out."""
    match reply:
        case FrameAck():
            return kv_pb2.PushReply(
                ack=kv_pb2.FrameAck(
                    ticket=ref_to_proto(reply.ref),
                    frame_index=reply.frame_index,
                    credit_bytes=reply.credit_bytes,
                    held_us=_microseconds(reply.held_s),
                    work_us=_microseconds(reply.work_s),
                )
            )
        case FrameNack():
            return kv_pb2.PushReply(
                nack=kv_pb2.FrameNack(
                    ticket=ref_to_proto(reply.ref),
                    frame_index=reply.frame_index,
                    credit_bytes=reply.credit_bytes,
                    retryable=reply.retryable,
                    reason=reply.reason,
                )
            )
        case Committed():
            return kv_pb2.PushReply(committed=kv_pb2.Committed(ticket=ref_to_proto(reply.ref)))
        case TicketRefused():
            revoked = isinstance(reply.reason, Revocation)
            refused = kv_pb2.TicketRefused(ticket=ref_to_proto(reply.ref), reason=reply.reason, revoked=revoked)
            return kv_pb2.PushReply(refused=refused)
        case Welcome():
            return kv_pb2.PushReply(
                welcome=kv_pb2.PushWelcome(
                    protocol=reply.protocol,
                    worker_incarnation=reply.worker_incarnation,
                    geometry=geometry_to_proto(reply.geometry),
                    codecs=reply.codecs,
                    credit_bytes=reply.credit_bytes,
                    transports=reply.negotiation.transports,
                    left_out=lane_wire.left_out_to_proto(reply.negotiation),
                    decode_rates=[kv_pb2.CodecRate(codec=name, bytes_s=rate) for name, rate in reply.decode_rates],
                )
            )
        case LaneAccept():
            return kv_pb2.PushReply(lane_accept=lane_wire.accept_to_proto(reply))
        case LaneDown(lane, reason):
            return kv_pb2.PushReply(lane_down=kv_pb2.LaneDown(lane=lane, reason=reason))
        case LaneClosed(lane):
            return kv_pb2.PushReply(lane_closed=kv_pb2.LaneClosed(lane=lane))


def reply_from_proto(reply: kv_pb2.PushReply) -> PushReply:
    """Receiver's message as it came in. Raises `FrameError` if it is of a kind that is not known here."""
    match reply.WhichOneof("reply"):
        case "ack":
            ack = reply.ack
            return FrameAck(
                ref_from_proto(ack.ticket), ack.frame_index, ack.credit_bytes, 1e-6 * ack.held_us, 1e-6 * ack.work_us
            )
        case "nack":
            nack = reply.nack
            return FrameNack(
                ref_from_proto(nack.ticket), nack.frame_index, nack.credit_bytes, nack.retryable, nack.reason
            )
        case "committed":
            return Committed(ref_from_proto(reply.committed.ticket))
        case "refused":
            reason = Revocation(reply.refused.reason) if reply.refused.revoked else reply.refused.reason
            return TicketRefused(ref_from_proto(reply.refused.ticket), reason)
        case "welcome":
            welcome = reply.welcome
            return Welcome(
                protocol=welcome.protocol,
                worker_incarnation=welcome.worker_incarnation,
                geometry=geometry_from_proto(welcome.geometry),
                codecs=tuple(welcome.codecs),
                credit_bytes=welcome.credit_bytes,
                negotiation=lane_wire.negotiation_from_proto(welcome),
                decode_rates=tuple((rate.codec, rate.bytes_s) for rate in welcome.decode_rates),
            )
        case "lane_accept":
            return lane_wire.accept_from_proto(reply.lane_accept)
        case "lane_down":
            return LaneDown(reply.lane_down.lane, reply.lane_down.reason)
        case "lane_closed":
            return LaneClosed(reply.lane_closed.lane)
        case _:
            raise FrameError("a push reply of a kind that is not known here")


def _microseconds(seconds: float) -> int:
    return min(max(0, round(1e6 * seconds)), 2**32 - 1)
