"""Why no connection comes about where TLS may be the reason: gRPC itself says that nobody answers."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from enum import Enum, auto

from pdcore.addresses import parse_address
from pdcore.security import ClientTls
from security.client import secured

_TIMEOUT_S = 1.0
_OTHER_NAME = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_OTHER_AUTHORITY = (2, 18, 19, 20, 21)  # unable to get issuer, self-signed, and the like


class Mistake(Enum):
    """What a caller could do otherwise."""

    PLAIN_TEXT = auto()  # speak TLS
    TLS = auto()  # speak none
    AUTHORITY = auto()  # trust whoever has signed its certificate
    NAME = auto()  # call it by the name in its certificate
    CERTIFICATE = auto()  # show a certificate, or another one
    NONE = auto()  # nothing: it is the other end's


@dataclass(frozen=True, slots=True)
class TlsProblem:
    """What is wrong between us and a router. `words` can follow a colon."""

    mistake: Mistake
    words: str


def tls_problem(address: str, tls: ClientTls | None) -> TlsProblem | None:
    """What is wrong between us and a router; None if TLS is not it.

    Args:
        address, tls: as of `router.client.Client`; one router, and files that can be read.
    """
    host, _, port = parse_address(address).target.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        return None
    encrypted = secured(address, tls)
    try:
        with socket.create_connection((host, int(port)), _TIMEOUT_S) as connection:
            connection.settimeout(_TIMEOUT_S)
            context = _context(tls or ClientTls()) if encrypted else _trusting()
            name = (tls.server_name if tls is not None else "") or host
            with context.wrap_socket(connection, server_hostname=name) as channel:
                if not encrypted:
                    return TlsProblem(Mistake.PLAIN_TEXT, "it speaks TLS, and was called in plain text")
                if not _answers(channel):
                    given = "another" if tls is not None and tls.cert_file else "a"
                    words = f"it ends the connection, as if it wanted {given} certificate of ours"
                    return TlsProblem(Mistake.CERTIFICATE, words)
    except ssl.SSLCertVerificationError as error:
        return TlsProblem(_mistake(error), f"its certificate is not trusted: {error.verify_message}")
    except ssl.SSLError as error:
        return _of_handshake(error) if encrypted else None
    except OSError:
        pass
    return None


def _answers(channel: ssl.SSLSocket) -> bool:
    """gRPC's servers speak first, unless our certificate is not to their liking: then they close the connection."""
    try:
        return bool(channel.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False


def _mistake(error: ssl.SSLCertVerificationError) -> Mistake:
    if error.verify_code in _OTHER_NAME:
        return Mistake.NAME
    return Mistake.AUTHORITY if error.verify_code in _OTHER_AUTHORITY else Mistake.NONE


def _of_handshake(error: ssl.SSLError) -> TlsProblem:
    reason = (error.reason or "").lower().replace("_", " ")
    if "wrong version" in reason or "eof" in reason:
        return TlsProblem(Mistake.TLS, f"it speaks no TLS ({reason})")
    return TlsProblem(Mistake.CERTIFICATE if "alert" in reason else Mistake.NONE, reason)


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
