"""Whether an address can be listened on, and what to say if it cannot."""

from __future__ import annotations

import errno
import socket

from pdcore.errors import CannotListen

OTHER_PORT = "end that one, or take another port; 0 finds a free one"
"""Advice for a port that can be chosen."""

_REASONS = {
    errno.EADDRINUSE: "the port is in use by another process",
    errno.EADDRNOTAVAIL: "no network interface of this machine has that address",
    errno.EACCES: "this user may not use that port",
}


def cannot_listen(key: str, host: str, port: int, error: OSError, advice: str = "") -> CannotListen:
    """What an address could not be taken for, in words.

    Args:
        key: of the configuration, which says so. error: of the socket. advice: what to do where the port is the
            trouble.
    """
    resolved = not isinstance(error, socket.gaierror)
    reason = _REASONS.get(error.errno or 0) if resolved else "no machine of that name is known"
    words = reason or error.strerror or str(error)
    advised = advice and resolved and error.errno != errno.EADDRNOTAVAIL
    return CannotListen(key, f"{host}:{port}", f"{words}; {advice}" if advised else words)


def check_listening(key: str, host: str, port: int, advice: str = "") -> None:
    """Take an address, and let it go again. Blocking: a name may have to be looked up.

    Args:
        port: 0 for any free one. key, advice: as of `cannot_listen`.

    Raises:
        CannotListen: it cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise cannot_listen(key, host, port, error, advice) from error


def was_refused(key: str, host: str, port: int, advice: str = "") -> CannotListen:
    """The same error where somebody else has tried in vain, and does not say why, as gRPC's servers."""
    try:
        check_listening(key, host, port, advice)
    except CannotListen as error:
        return error
    return CannotListen(key, f"{host}:{port}", "it was taken a moment ago, or the certificates were refused")
