"""Certificates and keys from files: checked before they are used, and read again when they have changed.

Whoever issues certificates replaces them in place (cert-manager does so in a mounted secret), long before they end.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdcore.clock import Clock, MonotonicClock
from pdcore.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
LOOK_EVERY_S = 1.0
"""Files are looked at no more often than this, however many connections are made."""


Stamp = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Pem:
    """What is in the files. Nothing of a key is ever shown."""

    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    authorities: bytes = b""


@dataclass(frozen=True, slots=True)
class PemFiles:
    """Which files, by what they are for; an empty path is none.

    Attributes:
        section: of the configuration, under which errors name the keys.
        certificate, key, authorities: paths. authorities_key: how the configuration calls the last one.
        own_name: the authorities are those of this certificate too, which must have this name; empty: they are not.
    """

    section: str
    certificate: str
    key: str
    authorities: str
    authorities_key: str = "ca_file"
    own_name: str = ""

    def read(self) -> Pem:
        """Read and check them all.

        Raises:
            ConfigError: one cannot be read, or holds something else; key and certificate do not belong together; the
                certificate has expired, or is not valid yet, or not from the authorities, or for another name.
        """
        pem = Pem(
            self._bytes("cert_file", self.certificate),
            self._bytes("key_file", self.key),
            self._bytes(self.authorities_key, self.authorities),
        )
        authorities = self._trusted(pem.authorities) if self.authorities else None
        if self.certificate:
            self._check_certificate(authorities if self.own_name else None)
        return pem

    def stamp(self) -> Sequence[object]:
        """Differs once one of the files has been replaced or written to."""
        return [stamp_of(path) for path in (self.certificate, self.key, self.authorities) if path]

    def _bytes(self, key: str, path: str) -> bytes:
        if not path:
            return b""
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe may take for ever
                raise self._wrong(key, path, "a readable file (it is something else)")
            with Path(path).open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise self._wrong(key, path, f"a readable file ({error.strerror or error})") from None
        if len(data) > MAX_FILE_BYTES:
            raise self._wrong(key, path, f"a PEM file of at most {MAX_FILE_BYTES} bytes")
        return data

    def _trusted(self, authorities: bytes) -> ssl.SSLContext:
        """A client's context that trusts them alone."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cadata=authorities.decode("ascii"))
        except (ssl.SSLError, ValueError):
            allowed = "a PEM file of certificates (-----BEGIN CERTIFICATE-----)"
            raise self._wrong(self.authorities_key, self.authorities, allowed) from None
        return context

    def _check_certificate(self, trusted: ssl.SSLContext | None) -> None:
        """By shaking hands with ourselves: what OpenSSL says of it then, others will say as well."""
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A key with a password must be refused, not asked for at a terminal.
            server.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except (OSError, ValueError) as error:
            raise self._unusable(error) from None
        client = trusted or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if trusted is not None:  # and the other way round: inside the cluster both ends show theirs
            client.load_cert_chain(self.certificate, self.key)
            server.load_verify_locations(self.authorities)
            server.verify_mode = ssl.CERT_REQUIRED
        else:  # whoever it is from, it has its time
            client.check_hostname = False
            client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            client.load_verify_locations(self.certificate)
        try:
            _shake_hands(server, client, self.own_name if trusted else None)
        except ssl.SSLCertVerificationError as error:
            raise self._wrong("cert_file", self.certificate, self._words(error)) from None
        except ssl.SSLError as error:
            raise self._wrong(
                "cert_file", self.certificate, f"a certificate that can be used ({error.reason})"
            ) from None

    def _words(self, error: ssl.SSLCertVerificationError) -> str:
        why = error.verify_message
        if "expired" in why:
            return "a certificate that has not expired"
        if "not yet valid" in why:
            return "a certificate that is valid already (or this machine's clock is wrong)"
        if "ostname" in why:
            return f"a certificate with the name (DNS subject alternative name) {self.own_name}"
        if "purpose" in why:
            return "a certificate for both ends of a connection (extended key usage: server and client)"
        return f"a certificate from an authority in {self.section}.{self.authorities_key} ({why})"

    def _unusable(self, error: OSError | ValueError) -> ConfigError:
        reason = getattr(error, "reason", None) or ""
        if reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            return self._wrong("key_file", self.key, f"the private key of the certificate in {self.certificate}")
        certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            certificate.load_verify_locations(self.certificate)
        except (OSError, ValueError):
            return self._wrong("cert_file", self.certificate, "a PEM file (-----BEGIN CERTIFICATE-----)")
        return self._wrong("key_file", self.key, "a PEM file of a private key without a password")

    def _wrong(self, key: str, path: str, allowed: str) -> ConfigError:
        return ConfigError(f"{self.section}.{key}", path, allowed)


class Renewing:
    """The files' content as it is now. Thread-safe.

    Changed files are read again, if a while has passed since the last look; while they are not right, the old content
    is kept, and the log says so once.

    Attributes:
        version: grows with every new content.
    """

    def __init__(self, files: PemFiles, *, clock: Clock | None = None, look_every_s: float = LOOK_EVERY_S) -> None:
        """Raises ConfigError, see `PemFiles.read`."""
        self._files = files
        self._clock = clock or MonotonicClock()
        self._look_every_s = look_every_s
        self._lock = threading.Lock()
        self._seen = files.stamp()
        self._looked_at = self._clock.now()
        self._pem = files.read()
        self._refused = ""
        self.version = 0

    def current(self) -> Pem:
        """What to use for the next connection."""
        with self._lock:
            now = self._clock.now()
            if now - self._looked_at >= self._look_every_s:
                self._looked_at = now
                self._look()
            return self._pem

    def _look(self) -> None:
        stamp = self._files.stamp()
        if stamp == self._seen:
            return
        try:
            pem = self._files.read()
        except ConfigError as error:
            # Not seen yet: a key and its certificate are often replaced one after the other.
            if str(error) != self._refused:
                logger.error("new certificates are not used, the old ones are: %s", error)
                self._refused = str(error)
            return
        self._seen, self._refused = stamp, ""
        if pem != self._pem:
            self._pem = pem
            self.version += 1
            logger.info("new certificates of %s are used", self._files.section)


def stamp_of(path: str | Path) -> Stamp:
    """Differs once the file has been replaced or written to; None if it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> None:
    """A handshake in memory. Raises SSLError, of the client's verification above all."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(8):  # flights; TLS 1.3 needs three
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass
        if not ends:
            return
