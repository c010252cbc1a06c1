"""gRPC's credentials: of servers, which take up renewed certificates by themselves, and of clients."""

from __future__ import annotations

import grpc

from pdcore.security import ClientTls, PublicTls
from security.files import Pem, PemFiles, Renewing

NAME_OVERRIDE = "grpc.ssl_target_name_override"

Options = tuple[tuple[str, str], ...]


def server_credentials(files: Renewing, *, mutual: bool) -> grpc.ServerCredentials:
    """Of a server whose every handshake uses the files as they are by then.

    Args:
        mutual: whoever connects must show a certificate of the files' authorities.
    """
    used = files.version

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Called for each handshake, on a thread of gRPC's; None: nothing new."""
        nonlocal used
        pem, version = files.current(), files.version
        if version == used:
            return None
        used = version
        return _server_configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(files.current()), renewed, require_client_authentication=mutual
    )


def public_files(tls: PublicTls) -> Renewing:
    """Raises ConfigError, see `PemFiles.read`."""
    files = PemFiles("tls.public", tls.cert_file, tls.key_file, tls.client_ca_file, authorities_key="client_ca_file")
    return Renewing(files)


def client_credentials(tls: ClientTls) -> tuple[grpc.ChannelCredentials, Options]:
    """What a client of the public end makes its channels with: credentials, and options beside its own.

    Raises:
        ConfigError: see `PemFiles.read`.
    """
    pem = PemFiles("tls", tls.cert_file, tls.key_file, tls.ca_file).read()
    options = ((NAME_OVERRIDE, tls.server_name),) if tls.server_name else ()
    return channel_credentials(pem), options


def channel_credentials(pem: Pem) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pem.authorities or None, pem.key or None, pem.certificate or None)


def _server_configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authorities or None)
