"""The flags of every command that talks to a cluster with TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.client import EXIT_USAGE, TLS_VARIABLES, fail, source_of, wrong_file
from pdcore.errors import ConfigError
from pdcore.security import ClientTls

TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        help="PEM file of the authorities that the cluster's certificate is from; encrypts the calls, as does an "
        "--address with https://, for which the public authorities do.",
        metavar="FILE",
        envvar=TLS_VARIABLES["--tls-ca"],
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        help="PEM file of this client's certificate, where the cluster wants one.",
        metavar="FILE",
        envvar=TLS_VARIABLES["--tls-cert"],
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option("--tls-key", help="PEM file of its private key.", metavar="FILE", envvar=TLS_VARIABLES["--tls-key"]),
]
TlsName = Annotated[
    str,
    typer.Option(
        "--tls-name",
        help="Name that the cluster's certificate has, if not the host of --address.",
        metavar="NAME",
    ),
]


def client_tls(ca: Path | None, cert: Path | None, key: Path | None, name: str = "") -> ClientTls | None:
    """What the flags ask for; None if for nothing. Ends the command with an error if they do not fit together."""
    if not (ca or cert or key or name):
        return None
    if bool(cert) != bool(key):
        given, missing = ("--tls-cert", "--tls-key") if cert else ("--tls-key", "--tls-cert")
        raise fail(f"{source_of(given, str(cert or key))} needs {missing}", EXIT_USAGE)
    try:
        files = [str(path) if path else "" for path in (ca, cert, key)]
        return ClientTls(files[0], files[1], files[2], server_name=name)
    except ConfigError as error:
        raise wrong_file(error) from error
