"""Between what a push stream says of lanes and its protobuf form (`protos/kv.proto`)."""

from __future__ import annotations

import ipaddress

from kv_transfer.messages import (
    GroupStore,
    LaneAccept,
    LaneFrame,
    LaneOpen,
    NixlStaging,
    NixlWriter,
    ProcessGroupOpening,
    ShmRing,
)
from kv_transfer.negotiation import CPU, GRPC, STREAM_ONLY, LeftOut, Negotiation, Offer, Site
from kv_transfer.transports.ref_wire import ref_from_proto, ref_to_proto
from pdcore.errors import FrameError
from protos import kv_pb2


def offer_to_proto(offer: Offer) -> kv_pb2.TransportOffer:
    site = offer.site
    return kv_pb2.TransportOffer(
        site=kv_pb2.Site(
            host=site.host,
            pid_namespace=site.pid_namespace,
            user=site.user,
            device=site.device,
            device_id=site.device_id,
            address=site.address,
            tls=site.tls,
        ),
        wanted=offer.wanted,
        transports=offer.transports,
    )


def offer_from_proto(message: kv_pb2.PushHello) -> Offer:
    """What a hello offers; the stream alone if it says nothing. Raises `FrameError` for an address that is none."""
    if not message.HasField("transports"):
        return STREAM_ONLY
    offer, site = message.transports, message.transports.site
    if site.address:
        try:
            ipaddress.ip_address(site.address)
        except ValueError:
            raise FrameError(f"{site.address!r} is not a numeric address") from None
    return Offer(
        site=Site(
            host=site.host,
            pid_namespace=site.pid_namespace,
            user=site.user,
            device=site.device or CPU,
            device_id=site.device_id,
            address=site.address,
            tls=site.tls,
        ),
        wanted=offer.wanted,
        transports=tuple(offer.transports),
    )


def left_out_to_proto(negotiation: Negotiation) -> list[kv_pb2.LeftOut]:
    return [kv_pb2.LeftOut(transport=item.transport, reason=item.reason) for item in negotiation.left_out]


def negotiation_from_proto(message: kv_pb2.PushWelcome) -> Negotiation:
    """The outcome that a welcome tells; the stream alone if it tells none."""
    return Negotiation(
        tuple(message.transports) or (GRPC,),
        tuple(LeftOut(item.transport, item.reason) for item in message.left_out),
    )


def open_to_proto(message: LaneOpen) -> kv_pb2.LaneOpen:
    match message.how:
        case ShmRing(pid, fd, size, nonce):
            return kv_pb2.LaneOpen(lane=message.lane, shm=kv_pb2.ShmRing(pid=pid, fd=fd, bytes=size, nonce=nonce))
        case ProcessGroupOpening():
            return kv_pb2.LaneOpen(lane=message.lane, collective=kv_pb2.ProcessGroupOpening())
        case NixlWriter():
            return kv_pb2.LaneOpen(lane=message.lane, nixl=kv_pb2.NixlWriter())


def open_from_proto(message: kv_pb2.LaneOpen) -> LaneOpen:
    """Raises `FrameError` for a lane of a kind that is not known here."""
    match message.WhichOneof("how"):
        case "shm":
            ring = message.shm
            return LaneOpen(message.lane, ShmRing(ring.pid, ring.fd, ring.bytes, ring.nonce))
        case "collective":
            return LaneOpen(message.lane, ProcessGroupOpening())
        case "nixl":
            return LaneOpen(message.lane, NixlWriter())
        case _:
            raise FrameError("a lane of a kind that is not known here")


def frame_to_proto(message: LaneFrame) -> kv_pb2.LaneFrame:
    frame = kv_pb2.LaneFrame(
        ticket=ref_to_proto(message.ref),
        frame_index=message.frame_index,
        total=message.total,
        lane=message.lane,
        sequence=message.sequence,
        offset=message.offset,
    )
    setattr(frame, "try", message.attempt)  # a keyword in Python
    return frame


def frame_from_proto(message: kv_pb2.LaneFrame) -> LaneFrame:
    return LaneFrame(
        ref=ref_from_proto(message.ticket),
        frame_index=message.frame_index,
        attempt=getattr(message, "try"),
        total=message.total,
        lane=message.lane,
        sequence=message.sequence,
        offset=message.offset,
    )


def accept_to_proto(reply: LaneAccept) -> kv_pb2.LaneAccept:
    match reply.how:
        case GroupStore(host, port, prefix, backend):
            return kv_pb2.LaneAccept(
                lane=reply.lane, collective=kv_pb2.GroupStore(host=host, port=port, prefix=prefix, backend=backend)
            )
        case NixlStaging(agent, address, size):
            return kv_pb2.LaneAccept(
                lane=reply.lane, nixl=kv_pb2.NixlStaging(agent=agent, address=address, bytes=size)
            )
        case None:
            return kv_pb2.LaneAccept(lane=reply.lane)


def accept_from_proto(reply: kv_pb2.LaneAccept) -> LaneAccept:
    match reply.WhichOneof("how"):
        case "collective":
            store = reply.collective
            return LaneAccept(reply.lane, GroupStore(store.host, store.port, store.prefix, store.backend))
        case "nixl":
            staging = reply.nixl
            return LaneAccept(reply.lane, NixlStaging(staging.agent, staging.address, staging.bytes))
        case _:
            return LaneAccept(reply.lane, None)
