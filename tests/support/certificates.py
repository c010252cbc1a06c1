"""An authority for tests, and files with certificates of it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import trustme

from pdcore.security import INTERNAL_NAME, ClientTls, InternalSecurity, InternalTls, PublicTls

SECRET = "a secret of the tests, long enough"


class Authority:
    """Writes what it issues into files in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.ca_file = str(folder / "ca.crt")
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(
        self, name: str, *names: str, until: datetime | None = None, since: datetime | None = None
    ) -> tuple[str, str]:
        """Paths of a certificate for `names`, and of its key."""
        issued = self._ca.issue_cert(*names, not_after=until, not_before=since, key_type=trustme.KeyType.ECDSA)
        cert, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return str(cert), str(key)

    def internal_tls(self) -> InternalTls:
        """One certificate for all processes of a cluster."""
        cert, key = self.issue("internal", INTERNAL_NAME)
        return InternalTls(cert, key, self.ca_file)

    def internal(self, secret: str = SECRET) -> InternalSecurity:
        """Certificates and a secret."""
        return InternalSecurity(tls=self.internal_tls(), secret=secret)

    def public(self, *, mutual: bool = False) -> PublicTls:
        """For a router on this machine."""
        cert, key = self.issue("public", "127.0.0.1", "localhost")
        return PublicTls(cert, key, self.ca_file if mutual else "")

    def client(self) -> ClientTls:
        """A client with a certificate."""
        cert, key = self.issue("client", "client.test")
        return ClientTls(self.ca_file, cert, key)
