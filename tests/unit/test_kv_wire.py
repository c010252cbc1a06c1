"""Every message of a push stream comes out of protobuf as it went in, and what makes no sense is refused."""

from __future__ import annotations

import pytest

from kv_transfer.manifest import Manifest, TicketRef
from kv_transfer.messages import (
    Abort,
    Committed,
    FrameAck,
    FrameNack,
    GroupStore,
    Hello,
    LaneAccept,
    LaneClose,
    LaneClosed,
    LaneDown,
    LaneFrame,
    LaneOpen,
    NixlStaging,
    NixlWriter,
    Piece,
    ProcessGroupOpening,
    PushMessage,
    PushReply,
    Revocation,
    ShmRing,
    TicketRefused,
    Welcome,
)
from kv_transfer.negotiation import STREAM_ONLY, LeftOut, Negotiation, Offer, Site
from kv_transfer.transports.wire import message_from_proto, message_to_proto, reply_from_proto, reply_to_proto
from pdcore.errors import FrameError
from pdcore.types import RequestKey
from protos import kv_pb2
from tests.support.kv_store import small_geometry

REF = TicketRef(3, 1 << 40)
SITE = Site("boot", "4:4026531836", 1000, "cuda", "GPU-1", "fd00::1", True)
OFFER = Offer(SITE, "auto", ("grpc", "shm", "collective"))
OUTCOME = Negotiation(("shm", "grpc"), (LeftOut("collective", "because"),))

MESSAGES: list[PushMessage] = [
    Hello(1, 2, "prefill-0", "a", "b", small_geometry(), OFFER),
    Piece(REF, 4, 1, 8, 24, b"0123456789abcdef"),
    Manifest(REF, RequestKey("r", 2), 100, 7, (42, 1), 0xFFFFFFFF),
    Abort(REF, "enough"),
    LaneOpen(5, ShmRing(77, 9, 1 << 33, bytes(range(16)))),
    LaneOpen(6, ProcessGroupOpening()),
    LaneOpen(7, NixlWriter()),
    LaneFrame(REF, 4, 2, 1 << 20, 5, 1 << 40, 1 << 33),
    LaneClose(5, "broken"),
]
REPLIES: list[PushReply] = [
    Welcome(1, "b", small_geometry(), ("raw",), 1 << 23, OUTCOME),
    FrameAck(REF, 4, 1 << 20),
    FrameNack(REF, 4, 1 << 20, True, "damaged"),
    Committed(REF),
    TicketRefused(REF, "stale"),
    LaneAccept(5, None),
    LaneAccept(6, GroupStore("127.0.0.1", 65535, "f" * 32, "gloo")),
    LaneAccept(7, NixlStaging(b"\x00\xff", 1 << 63, 1 << 23)),
    LaneDown(5, "no"),
    LaneClosed(5),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_of_the_sender(message: PushMessage) -> None:
    wire = message_to_proto(message).SerializeToString()
    assert message_from_proto(kv_pb2.PushMessage.FromString(wire)) == message


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: type(reply).__name__)
def test_messages_of_the_receiver(reply: PushReply) -> None:
    wire = reply_to_proto(reply).SerializeToString()
    assert reply_from_proto(kv_pb2.PushReply.FromString(wire)) == reply


def test_every_kind_of_message_is_among_them() -> None:
    assert {message_to_proto(message).WhichOneof("message") for message in MESSAGES} == {
        field.name for field in kv_pb2.PushMessage.DESCRIPTOR.fields
    }
    assert {reply_to_proto(reply).WhichOneof("reply") for reply in REPLIES} == {
        field.name for field in kv_pb2.PushReply.DESCRIPTOR.fields
    }


def test_an_end_that_knows_of_no_lanes_is_spoken_to_on_the_stream() -> None:
    hello = message_to_proto(MESSAGES[0])
    hello.hello.ClearField("transports")
    read = message_from_proto(hello)
    assert isinstance(read, Hello)
    assert read.offer == STREAM_ONLY
    welcome = reply_to_proto(REPLIES[0])
    del welcome.welcome.transports[:]
    del welcome.welcome.left_out[:]
    told = reply_from_proto(welcome)
    assert isinstance(told, Welcome)
    assert told.negotiation == Negotiation(("grpc",), ())


@pytest.mark.parametrize(
    "message",
    [
        kv_pb2.PushMessage(),
        kv_pb2.PushMessage(lane_open=kv_pb2.LaneOpen(lane=1)),
        kv_pb2.PushMessage(
            hello=kv_pb2.PushHello(transports=kv_pb2.TransportOffer(site=kv_pb2.Site(address="not an address")))
        ),
    ],
)
def test_what_makes_no_sense_is_an_error(message: kv_pb2.PushMessage) -> None:
    with pytest.raises(FrameError):
        message_from_proto(message)


@pytest.mark.parametrize("reason", ["stale", Revocation("no room")])
def test_a_revocation_arrives_as_one(reason: str) -> None:
    reply = reply_from_proto(reply_to_proto(TicketRefused(REF, reason)))
    assert isinstance(reply, TicketRefused)
    assert (reply.reason, type(reply.reason)) == (reason, type(reason))


def test_a_reply_of_no_kind_is_an_error() -> None:
    with pytest.raises(FrameError):
        reply_from_proto(kv_pb2.PushReply())
