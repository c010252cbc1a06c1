"""Which lanes two workers can use between them, in which order, and why not the others. Pure.

A *lane* is a way for the bytes of frames; the push stream, which is one (``grpc``), controls all of them. Both ends
say where they sit, what they can do and what they would like (`Offer`); the receiver decides by `negotiate` and tells
the sender. ``docs/kv-transports.md`` is generated from here.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import NamedTuple

AUTO = "auto"
GRPC = "grpc"
SHM = "shm"
COLLECTIVE = "collective"
NIXL = "nixl"

CPU = "cpu"
CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Site:
    """Where one end sits.

    Attributes:
        host: names the machine for as long as it runs (Linux: its boot id); empty if unknown.
        pid_namespace: within which process ids mean the same; empty if unknown.
        user: numeric user id of the process.
        device: where its KV cache lives, `CPU` or `CUDA`. device_id: names the GPU; empty on a CPU.
        address: numeric address that its process groups bind to; empty if it has none.
        tls: its end of the push stream is encrypted, and it lets KV out in no other way, shared memory excepted.
    """

    host: str = ""
    pid_namespace: str = ""
    user: int = 0
    device: str = CPU
    device_id: str = ""
    address: str = ""
    tls: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """What one end brings: its site, what it would like (`AUTO` or one transport), what it can and may use."""

    site: Site
    wanted: str
    transports: tuple[str, ...]


STREAM_ONLY = Offer(Site(), GRPC, (GRPC,))
"""The offer of an end that knows of no lanes."""


class LeftOut(NamedTuple):
    """A transport that two ends cannot use between them, and why not."""

    transport: str
    reason: str


@dataclass(frozen=True, slots=True)
class Negotiation:
    """`transports`: usable and wanted, best first; the last is always `GRPC`. `left_out`: wanted and impossible."""

    transports: tuple[str, ...]
    left_out: tuple[LeftOut, ...]


def negotiate(sender: Offer, receiver: Offer) -> Negotiation:
    """What a pair uses: the best transport first, the others to fall back to, the stream itself last."""
    usable: list[str] = []
    left_out: list[LeftOut] = []
    for transport in _preferences(sender, receiver):
        problem = obstacle(transport, sender, receiver)
        if problem is None:
            usable.append(transport)
        else:
            left_out.append(LeftOut(transport, problem))
    return Negotiation((*usable, GRPC), tuple(left_out))


def may_use(wanted: str, available: tuple[str, ...]) -> tuple[str, ...]:
    """Of the transports available to an end, those that its configuration `wanted` lets it use."""
    return tuple(name for name in available if wanted == AUTO or name in (wanted, GRPC))


def group_backend(sender: Site, receiver: Site) -> str:
    """What a process group of the two runs on. Frames are bytes in host memory: one GPU of two is no reason."""
    return "nccl" if sender.device == receiver.device == CUDA else "gloo"


def obstacle(transport: str, sender: Offer, receiver: Offer) -> str | None:
    """Why the two cannot use `transport` (another than `GRPC`); None if they can."""
    for name, offer in (("sender", sender), ("receiver", receiver)):
        if transport not in offer.transports:
            return f"the {name} does not offer it"
    ours, theirs = sender.site, receiver.site
    match transport:
        case "shm":
            return _no_shared_memory(ours, theirs)
        case "collective":
            return _no_process_group(ours, theirs)
        case "nixl":
            return _plain_text(ours, theirs)
    return "it is not known here"


def _preferences(sender: Offer, receiver: Offer) -> tuple[str, ...]:
    """Transports to look at beside the stream, best first: what the sender asks for, else what the receiver does."""
    wanted = receiver.wanted if sender.wanted == AUTO else sender.wanted
    if wanted == GRPC:
        return ()
    if wanted != AUTO:
        return (wanted,)
    # Between two GPUs a group takes the fastest way that there is, over the network too.
    both_on_gpus = sender.site.device == receiver.site.device == CUDA
    return (COLLECTIVE, SHM) if both_on_gpus else (SHM,)


def _same_host(ours: Site, theirs: Site) -> bool:
    return bool(ours.host) and ours.host == theirs.host


def _no_shared_memory(ours: Site, theirs: Site) -> str | None:
    if not ours.host or not theirs.host:
        return "it is not known whether the two share a host"
    if ours.host != theirs.host:
        return "the two are on different hosts"
    if not ours.pid_namespace or ours.pid_namespace != theirs.pid_namespace:
        return "the two are in different containers (PID namespaces)"
    if ours.user != theirs.user:
        return "the two run as different users"
    return None


def _no_process_group(ours: Site, theirs: Site) -> str | None:
    for name, site in (("sender", ours), ("receiver", theirs)):
        if not site.address:
            return f"the {name} has no address to bind a process group to"
    if not _same_host(ours, theirs):
        for name, site in (("sender", ours), ("receiver", theirs)):
            if ipaddress.ip_address(site.address).is_loopback:
                return f"the {name} binds process groups to loopback, and the two are on different hosts"
    if group_backend(ours, theirs) == "nccl" and ours.device_id == theirs.device_id:
        return "the two are on one GPU, where NCCL takes no two ranks"
    return _plain_text(ours, theirs)


def _plain_text(ours: Site, theirs: Site) -> str | None:
    """What one end has encrypted must not go by sockets in plain text, not even on one host: others may listen."""
    if ours.tls or theirs.tls:
        return "it is plain text, and the stream is encrypted (transfer.allow_plaintext_kv would allow it)"
    return None
