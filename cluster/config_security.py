"""The parts of a cluster's configuration file that say with what it is secured; docs/security.md has the whole."""

from __future__ import annotations

from pydantic import Field

from cluster.config_sections import Section
from pdcore.security import INTERNAL_NAME, InternalSecurity, InternalTls, PublicTls


class PublicTlsSection(Section):
    """Certificates of the public end."""

    cert_file: str = Field(
        default="",
        description="PEM file of the routers' certificate, with those between it and the authority's; empty: no TLS. "
        "Relative paths, here and below, are from where the cluster is started",
    )
    key_file: str = Field(default="", description="PEM file of its private key")
    client_ca_file: str = Field(
        default="", description="PEM file of the authorities whose certificates clients must have; empty: none needed"
    )

    def to_config(self) -> PublicTls | None:
        """As a router knows it; None without TLS. Raises ConfigError."""
        if not (self.cert_file or self.key_file or self.client_ca_file):
            return None
        return PublicTls(self.cert_file, self.key_file, self.client_ca_file)


class InternalTlsSection(Section):
    """Certificates inside the cluster, where both ends of a connection show theirs."""

    cert_file: str = Field(
        default="",
        description="PEM file of the certificate of every process inside the cluster, for both ends of a connection; "
        "empty: no TLS. The same path on every node, and an absolute one where Ray runs already: it may have another "
        "working directory",
    )
    key_file: str = Field(default="", description="PEM file of its private key")
    ca_file: str = Field(default="", description="PEM file of the authorities that such certificates are from")
    server_name: str = Field(
        default=INTERNAL_NAME,
        min_length=1,
        description="name (DNS subject alternative name) that the certificate must have, whatever host it is on",
    )

    def to_config(self) -> InternalTls | None:
        """As workers and routers know it; None without TLS. Raises ConfigError."""
        if not (self.cert_file or self.key_file or self.ca_file):
            return None
        return InternalTls(self.cert_file, self.key_file, self.ca_file, self.server_name)


class TlsSection(Section):
    """What is encrypted. Files that are replaced are used from the next connection on."""

    public: PublicTlsSection = Field(default=PublicTlsSection(), description="between clients and routers")
    internal: InternalTlsSection = Field(
        default=InternalTlsSection(),
        description="between routers, workers and the controller; KV then goes by gRPC, or by shared memory on one "
        "host, alone",
    )


def internal_security(tls: TlsSection, secret_file: str, *, allow_insecure_listen: bool) -> InternalSecurity:
    """As workers, routers and the controller know it. Raises ConfigError."""
    return InternalSecurity(
        tls=tls.internal.to_config(), secret_file=secret_file, allow_insecure_listen=allow_insecure_listen
    )
