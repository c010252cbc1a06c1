"""Between ticket references and their protobuf form."""

from __future__ import annotations

from kv_transfer.manifest import TicketRef
from protos import kv_pb2


def ref_to_proto(ref: TicketRef) -> kv_pb2.TicketRef:
    return kv_pb2.TicketRef(ticket_id=ref.ticket_id, generation=ref.generation)


def ref_from_proto(ref: kv_pb2.TicketRef) -> TicketRef:
    return TicketRef(ref.ticket_id, ref.generation)
