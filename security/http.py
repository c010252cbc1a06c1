"""The same certificates for what Python's own TLS serves."""

from __future__ import annotations

import logging
import ssl

from pdcore.security import PublicTls
from security.files import Renewing

logger = logging.getLogger(__name__)


def server_context(tls: PublicTls, files: Renewing) -> ssl.SSLContext:
    """Of an HTTP server. Each handshake uses the files as they are by then.

    Args:
        files: of `tls`; see `security.credentials.public_files`.
    """
    newest, version = _context(tls), files.version

    def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in each handshake."""
        nonlocal newest, version
        files.current()
        if files.version != version:
            try:
                newest, version = _context(tls), files.version
            except (OSError, ValueError) as error:  # they have changed again since they were checked
                logger.error("new certificates of HTTP are not used yet: %s", error)
        connection.context = newest

    listening = _context(tls)
    listening.sni_callback = renew
    return listening


def _context(tls: PublicTls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: b"")
    if tls.client_ca_file:
        context.load_verify_locations(tls.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
