"""Entry of the ``pdserve`` command; ``python -m cluster`` is the same."""

from __future__ import annotations

import os
import sys

from pdcore.grpc_log import quiet_grpc


def main() -> None:
    """Run the command."""
    quiet_grpc(os.environ)
    from cluster.cli.app import app

    try:
        app(prog_name="pdserve")
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; nothing is left to say to it
        sys.exit(1)
