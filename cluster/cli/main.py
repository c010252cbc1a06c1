"""Entry of the ``pdserve`` command; ``python -m cluster`` is the same."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence

CLIENTS = ("chat", "generate", "status")


def quiet_grpc(arguments: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Leave it to commands that call a cluster to say why nobody answers, unless gRPC is to speak for itself.

    It reads this when it is imported, and knows no other way.
    """
    if arguments and arguments[0] in CLIENTS and "GRPC_TRACE" not in environment:
        environment.setdefault("GRPC_VERBOSITY", "NONE")


def main() -> None:
    """Run the command."""
    quiet_grpc(sys.argv[1:], os.environ)
    from cluster.cli.app import app

    try:
        app(prog_name="pdserve")
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; nothing is left to say to it
        sys.exit(1)
