"""What a process finds out about where it sits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from kv_transfer.negotiation import AUTO, CPU, GRPC, SHM
from kv_transfer.site import bind_address, local_offer
from kv_transfer.transports import catalog, process_group, shm
from kv_transfer.transports.catalog import available_transports
from pdcore.errors import ConfigError


def test_two_processes_of_one_machine_find_the_same_site() -> None:
    ours = local_offer(AUTO, "", "cpu").site
    code = "from kv_transfer.site import local_offer; print(local_offer('auto', '', 'cpu').site)"
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert theirs.stdout.strip() == str(ours)
    assert ours.host
    assert ours.pid_namespace
    assert (ours.user, ours.device, ours.tls) == (os.geteuid(), CPU, False)


@pytest.mark.parametrize(
    ("interface", "address"),
    [("", "127.0.0.1"), ("lo", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::1", "::1"), ("localhost", "127.0.0.1")],
)
def test_addresses(interface: str, address: str) -> None:
    if interface == "lo" and "lo" not in {name for _, name in socket.if_nameindex()}:
        pytest.skip("loopback has another name here")
    assert bind_address(interface) == address


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise OSError(-2, "no such host")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    with pytest.raises(ConfigError) as caught:
        bind_address("eth99")
    assert caught.value.key == "transfer.interface"
    assert caught.value.value == "eth99"
    assert caught.value.allowed == "an interface or an address (no such host)"


def test_a_transport_that_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.site.available_transports", lambda: (GRPC, SHM))
    with pytest.raises(ConfigError) as caught:
        local_offer("nixl", "", "cpu")
    assert caught.value.key == "transfer.transport"
    assert "grpc, shm" in caught.value.allowed
    assert local_offer(AUTO, "", "cpu").transports == (GRPC, SHM)
    assert local_offer(GRPC, "", "cpu").transports == (GRPC,)


def test_what_is_there_is_looked_up_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "available", lambda: False)
    monkeypatch.setattr(process_group, "available", lambda: False)
    monkeypatch.setattr(catalog.nixl_lane, "available", lambda: False)
    assert available_transports() == (GRPC,)


def test_nixl_is_not_imported_before_a_lane_is_asked_for() -> None:
    code = "import sys; import kv_transfer.sender, kv_transfer.receiver; print('nixl' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
