"""Who may listen where, and with which files what is said there is encrypted. Pure.

See docs/security.md for what these protect, and from whom.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from pdcore.errors import ConfigError

INTERNAL_NAME = "pdserve-internal"
"""The name in the certificate of every process of a cluster, whatever its host: one certificate does for all."""


@dataclass(frozen=True, slots=True)
class PublicTls:
    """Files (PEM) of the public end.

    Attributes:
        cert_file: its certificate, and those between it and the authority's. key_file: its private key.
        client_ca_file: authorities whose certificates clients must have; empty asks for none.
    """

    cert_file: str
    key_file: str
    client_ca_file: str = ""

    def __post_init__(self) -> None:
        _require_files("tls.public", cert_file=self.cert_file, key_file=self.key_file)


@dataclass(frozen=True, slots=True)
class InternalTls:
    """Files (PEM) of a process inside the cluster, which shows its certificate whether it calls or is called.

    Attributes:
        cert_file, key_file: as for `PublicTls`. ca_file: the authorities that the others' certificates are from.
        server_name: the name that the certificate of whoever is called must have.
    """

    cert_file: str
    key_file: str
    ca_file: str
    server_name: str = INTERNAL_NAME

    def __post_init__(self) -> None:
        _require_files("tls.internal", cert_file=self.cert_file, key_file=self.key_file, ca_file=self.ca_file)
        if not self.server_name:
            raise ConfigError("tls.internal.server_name", self.server_name, "a name that the certificate has")


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a client of the public end encrypts.

    Attributes:
        ca_file: authorities that the server's certificate may be from (PEM); empty: the usual public ones.
        cert_file, key_file: the client's own certificate, where the server asks for one.
        server_name: the name that the server's certificate must have; empty: the host that is called.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            missing = "key_file" if self.cert_file else "cert_file"
            raise ConfigError(f"tls.{missing}", "", "a file: a certificate and its private key are given together")


@dataclass(frozen=True, slots=True)
class InternalSecurity:
    """How the processes of a cluster know each other, and what of their talk can be read by others.

    Attributes:
        tls: None leaves it in plain text.
        secret_file: file with the cluster's secret, which every call inside the cluster must come with.
        secret: the secret itself, where it was handed over; wins over the file. Both empty: none is asked for.
        allow_insecure_listen: listen in plain text on other addresses than loopback, if told to.
    """

    tls: InternalTls | None = None
    secret_file: str = ""
    secret: str = field(default="", repr=False)
    allow_insecure_listen: bool = False


def check_listen(key: str, host: str, *, encrypted: bool, allowed: bool, flag: str, tls: str) -> None:
    """Nothing listens in plain text where other machines can reach it, unless it is said to be wanted.

    Args:
        key, host: the configuration's key and its value. encrypted: TLS is on.
        allowed: what the key `flag` says. tls: the key under which certificates are given.

    Raises:
        ConfigError: it must not listen there.
    """
    if encrypted or allowed or is_loopback(host):
        return
    raise ConfigError(
        key,
        host,
        f"127.0.0.1, or any address with TLS (certificates in {tls}); `{flag}: true` (or the flag --insecure) allows "
        "plain text there, for networks that nobody else is on",
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`. A name is looked up nowhere: but for localhost, it
    may be any machine's."""
    name = host.strip("[]").partition("%")[0]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


def _require_files(section: str, **files: str) -> None:
    for name, path in files.items():
        if not path:
            others = " and ".join(other for other in files if other != name)
            raise ConfigError(f"{section}.{name}", path, f"a file, as there must be for {others}")
