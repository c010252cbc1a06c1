"""What is said of an address that cannot be listened on."""

from __future__ import annotations

import errno
import socket

import pytest

from pdcore.errors import CannotListen, ConfigError
from pdcore.listening import cannot_listen, check_listening, was_refused


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = f"router.grpc_port: cannot listen on 127.0.0.1:{port}: the port is in use by another process; take 0"
        with pytest.raises(CannotListen) as found:
            check_listening("router.grpc_port", "127.0.0.1", port, "take 0")
        assert str(found.value) == words
        assert str(was_refused("router.grpc_port", "127.0.0.1", port, "take 0")) == words
    check_listening("router.grpc_port", "127.0.0.1", port)
    assert "a moment ago" in str(was_refused("router.grpc_port", "127.0.0.1", port))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])  # RFC 5737, RFC 2606
def test_an_address_of_another_machine(host: str) -> None:
    with pytest.raises(ConfigError, match=f"k: cannot listen on {host}:7: no ") as found:
        check_listening("k", host, 7, "take another port")
    assert "another port" not in str(found.value), "that would not help"


def test_what_else_there_may_be() -> None:
    denied = cannot_listen("k", "h", 80, OSError(errno.EACCES, "Permission denied"), "take another")
    assert str(denied) == "k: cannot listen on h:80: this user may not use that port; take another"
    odd = cannot_listen("k", "h", 80, OSError(errno.ENFILE, "Too many open files in system"), "take another")
    assert "Too many open files in system" in str(odd)
