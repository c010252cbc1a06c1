"""The same certificates for what Python's own TLS serves."""

from __future__ import annotations

import logging
import ssl
from typing import Any

from pdcore.security import PublicTls
from security.files import Renewing

logger = logging.getLogger(__name__)


def server_context(tls: PublicTls, files: Renewing) -> ssl.SSLContext:
    """Of an HTTP server. Each handshake uses the files as they are by then.

    Args:
        files: of `tls`; see `security.credentials.public_files`.
    """
    return _Renewed(tls, files)


class _Renewed(ssl.SSLContext):
    """Every connection is one of a context that was made from the newest files.

    To give a connection another context in its handshake (by `sni_callback`) would be too late: whoever has a session
    of before resumes it, and shows no certificate. Sessions end with the context that they began with.
    """

    def __new__(cls, tls: PublicTls, files: Renewing) -> _Renewed:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, tls: PublicTls, files: Renewing) -> None:
        self._tls = tls
        self._files = files
        self._newest, self._version = _context(tls), files.version

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """What event loops call for each connection."""
        self._files.current()
        if self._files.version != self._version:
            try:
                self._newest, self._version = _context(self._tls), self._files.version
            except (OSError, ValueError) as error:  # they have changed again since they were checked
                logger.error("new certificates of HTTP are not used yet: %s", error)
        return self._newest.wrap_bio(*arguments, **named)


def _context(tls: PublicTls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: b"")
    if tls.client_ca_file:
        context.load_verify_locations(tls.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
