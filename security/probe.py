"""Why no connection comes about where TLS may be the reason: gRPC itself says that nobody answers."""

from __future__ import annotations

import socket
import ssl

from pdcore.addresses import parse_address
from pdcore.security import ClientTls
from security.client import secured

_TIMEOUT_S = 1.0


def tls_problem(address: str, tls: ClientTls | None) -> str:
    """What is wrong between us and a router, in words that can follow a colon; empty if TLS is not it.

    Args:
        address, tls: as of `router.client.Client`; one router, and files that can be read.
    """
    host, _, port = parse_address(address).target.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        return ""
    encrypted = secured(address, tls)
    try:
        with socket.create_connection((host, int(port)), _TIMEOUT_S) as connection:
            connection.settimeout(_TIMEOUT_S)
            context = _context(tls or ClientTls()) if encrypted else _trusting()
            name = (tls.server_name if tls is not None else "") or host
            with context.wrap_socket(connection, server_hostname=name) as channel:
                if not encrypted:
                    return "it speaks TLS, and was called in plain text"
                if not _answers(channel):
                    given = "another" if tls is not None and tls.cert_file else "a"
                    return f"it ends the connection, as if it wanted {given} certificate of ours"
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not trusted: {error.verify_message}"
    except ssl.SSLError as error:
        return _words(error) if encrypted else ""
    except OSError:
        pass
    return ""


def _answers(channel: ssl.SSLSocket) -> bool:
    """gRPC's servers speak first, unless our certificate is not to their liking: then they close the connection."""
    try:
        return bool(channel.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False


def _words(error: ssl.SSLError) -> str:
    reason = (error.reason or "").lower().replace("_", " ")
    return f"it speaks no TLS ({reason})" if "wrong version" in reason or "eof" in reason else reason


def _context(tls: ClientTls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca_file or None)
    context.set_alpn_protocols(["h2"])
    if tls.cert_file:
        context.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: b"")
    return context


def _trusting() -> ssl.SSLContext:
    """To find out that somebody speaks TLS; nothing is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context
