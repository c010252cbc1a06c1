"""How these programs are told by what a cluster knows them: the flags are those of `pdserve generate`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

from pdcore.errors import ConfigError
from pdcore.security import ClientTls
from router.client import Client


class Caller(NamedTuple):
    """Arguments of `Client` and `AsyncClient` beside the address."""

    api_key: str
    tls: ClientTls | None


def refuse(message: str) -> NoReturn:
    """End the program: what it was given is no good."""
    print(message, file=sys.stderr)
    sys.exit(2)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say who calls; by default the environment does."""
    for flag, what in (
        ("--api-key-file", "with an API key; default: the key in $PDSERVE_API_KEY"),
        ("--tls-ca", "of the authorities that the cluster's certificate is from (PEM)"),
        ("--tls-cert", "of this client's certificate, where the cluster wants one (PEM)"),
        ("--tls-key", "of its private key (PEM)"),
    ):
        variable = f"PDSERVE_{flag[2:].upper().replace('-', '_')}" if "tls" in flag else ""
        default = f"; default: that in ${variable}" if variable else ""
        parser.add_argument(flag, metavar="FILE", default=os.environ.get(variable, ""), help=f"file {what}{default}")


def caller(args: argparse.Namespace) -> Caller:
    """What the flags say. Ends the program if that cannot be."""
    key = os.environ.get("PDSERVE_API_KEY", "")
    named = args.tls_ca or args.tls_cert or args.tls_key
    try:
        if args.api_key_file:
            key = Path(args.api_key_file).read_text(encoding="utf-8")
        return Caller(key.strip(), ClientTls(args.tls_ca, args.tls_cert, args.tls_key) if named else None)
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        refuse(str(error))


def grpc_caller(args: argparse.Namespace) -> Caller:
    """The same for programs that call ``args.address`` by gRPC."""
    who = caller(args)
    try:
        Client(args.address, api_key=who.api_key, tls=who.tls).close()  # reads the files, and calls nobody
    except (ValueError, ConfigError) as error:
        refuse(str(error))
    return who
