"""The lanes that there are: which of them this process can use, and how their ends are made."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence

import torch

from kv_transfer.lanes import FrameSink, LaneListener, ReceiveLane, SendLane
from kv_transfer.messages import LaneOpen, NixlWriter, ProcessGroupOpening, ShmRing
from kv_transfer.negotiation import COLLECTIVE, GRPC, NIXL, SHM, Offer, Site, group_backend
from kv_transfer.transports import nixl_lane, process_group, shm
from kv_transfer.transports.collective import CollectiveReceiveLane, CollectiveSendLane, GroupSettings, StoreHost
from kv_transfer.transports.nixl_lane import NixlAgent, NixlReceiveLane, NixlSendLane
from kv_transfer.transports.shm import ShmReceiveLane, ShmSendLane


def available_transports() -> tuple[str, ...]:
    """What this process can use, as far as that can be told without trying."""
    found: dict[str, Callable[[], bool]] = {
        SHM: shm.available,
        COLLECTIVE: process_group.available,
        NIXL: nixl_lane.available,
    }
    return (GRPC, *(name for name, available in found.items() if available()))


class SendLanes:
    """Makes the sender's ends of lanes.

    Args:
        offer: the sender's. device: where its KV cache lives, as torch names it.
        timeout_s: of opening, and of every wait of a lane. cores: affinity of the lanes' threads.
    """

    def __init__(self, offer: Offer, device: str, timeout_s: float, cores: tuple[int, ...]) -> None:
        self._groups = GroupSettings(offer.site.address, torch.device(device), timeout_s, cores)
        self._nixl = NixlAgent(receives=False)
        self._made: weakref.WeakSet[SendLane] = weakref.WeakSet()

    def make(self, transport: str, credit_bytes: int, listener: LaneListener) -> SendLane:
        """One end of a new lane. `credit_bytes`: of the stream."""
        lane = self._make(transport, credit_bytes, listener)
        self._made.add(lane)
        return lane

    def close(self, timeout_s: float) -> None:
        """Close what is open, and wait for the lanes' threads at most this long."""
        _close_all(list(self._made), timeout_s)
        self._nixl.close()

    def _make(self, transport: str, credit_bytes: int, listener: LaneListener) -> SendLane:
        match transport:
            case "shm":
                return ShmSendLane(credit_bytes, listener)
            case "collective":
                return CollectiveSendLane(self._groups, listener)
            case "nixl":
                return NixlSendLane(credit_bytes, self._nixl, self._groups.timeout_s, self._groups.cores, listener)
        raise AssertionError(transport)


class ReceiveLanes:
    """Makes the receiver's ends of lanes; arguments as for `SendLanes`, `credit_bytes` as the receiver gives it."""

    def __init__(
        self, offer: Offer, device: str, timeout_s: float, cores: tuple[int, ...], credit_bytes: int
    ) -> None:
        self._site = offer.site
        self._credit_bytes = credit_bytes
        self._groups = GroupSettings(offer.site.address, torch.device(device), timeout_s, cores)
        self._store = StoreHost(self._groups)
        self._nixl = NixlAgent(receives=True)
        self._made: weakref.WeakSet[ReceiveLane] = weakref.WeakSet()

    def make(self, opening: LaneOpen, sender: Site, sink: FrameSink) -> ReceiveLane:
        """The other end of the lane that a sender at `sender` would like to open."""
        lane = self._make(opening, sender, sink)
        self._made.add(lane)
        return lane

    def close(self, timeout_s: float) -> None:
        """Close what is open, and wait for the lanes' threads at most this long."""
        _close_all(list(self._made), timeout_s)
        self._store.close()
        self._nixl.close()

    def _make(self, opening: LaneOpen, sender: Site, sink: FrameSink) -> ReceiveLane:
        match opening.how:
            case ShmRing():
                return ShmReceiveLane(opening.how, self._credit_bytes, sink)
            case ProcessGroupOpening():
                return CollectiveReceiveLane(group_backend(sender, self._site), self._groups, self._store, sink)
            case NixlWriter():
                return NixlReceiveLane(self._credit_bytes, self._nixl, sink)


def _close_all(lanes: Sequence[SendLane | ReceiveLane], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for lane in lanes:
        lane.close()
    for lane in lanes:
        lane.join(max(0.0, deadline - time.monotonic()))
