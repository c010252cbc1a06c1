"""Where this process sits, and what it can offer, found out once."""

from __future__ import annotations

import fcntl
import functools
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Final

from kv_transfer.negotiation import CPU, CUDA, Offer, Site, may_use
from kv_transfer.transports.catalog import available_transports
from pdcore.errors import ConfigError

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE: Final = Path("/proc/self/ns/pid")
_SIOCGIFADDR: Final = 0x8915
_LOOPBACK: Final = "127.0.0.1"


def local_offer(wanted: str, interface: str, device: str, *, encrypted: bool = False) -> Offer:
    """What this process offers its peers.

    Args:
        wanted: ``transfer.transport`` of the configuration.
        interface: ``transfer.interface``; see `bind_address`.
        device: where the KV cache lives, as torch names it (``cpu``, ``cuda:1``).
        encrypted: KV may leave the machine encrypted only; see `Site.tls`.

    Raises:
        ConfigError: `wanted` or `interface` is impossible here.
    """
    available = available_transports()
    if wanted != "auto" and wanted not in available:
        hint = "; `pip install --no-deps nixl nixl-cu12` brings nixl" if wanted == "nixl" else ""
        raise ConfigError(
            "transfer.transport", wanted, f"auto, {', '.join(available)} (what is installed here{hint})"
        )
    gpu = device.startswith(CUDA)
    site = Site(
        host=_boot_id(),
        pid_namespace=_pid_namespace(),
        user=os.geteuid(),
        device=CUDA if gpu else CPU,
        device_id=_gpu_id(device) if gpu else "",
        address=bind_address(interface),
        tls=encrypted,
    )
    return Offer(site, wanted, may_use(wanted, available))


def bind_address(interface: str) -> str:
    """The numeric address that process groups bind to: that of a network interface (``eth0``), of a host's name, or
    an address itself; loopback if empty. Raises `ConfigError` if there is no such thing."""
    if not interface:
        return _LOOPBACK
    if interface in {name for _, name in socket.if_nameindex()}:
        return _interface_address(interface)
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(interface)
    except OSError as error:
        raise ConfigError("transfer.interface", interface, f"an interface or an address ({error.strerror})") from None


def _interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            allowed = f"an interface with an IPv4 address ({error.strerror})"
            raise ConfigError("transfer.interface", name, allowed) from None
    return socket.inet_ntoa(answer[20:24])


@functools.cache
def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


@functools.cache
def _pid_namespace() -> str:
    """Device and inode of the namespace: two processes that see the same may name each other by process id."""
    try:
        status = _PID_NAMESPACE.stat()
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"


def _gpu_id(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
