"""Entry of the ``pdserve`` command; ``python -m cluster`` is the same."""

from __future__ import annotations

import os
import sys

from cluster.cli.streams import prepare_streams, write_or_give_up
from pdcore.grpc_log import quiet_grpc


def main() -> None:
    """Run the command. Its exit code is 1 if its output cannot be written."""
    prepare_streams()
    quiet_grpc(os.environ)
    from cluster.cli.app import app

    try:
        try:
            app(prog_name="pdserve")
        finally:
            sys.stdout.flush()  # what fails at the very end would fail unseen
    except OSError as error:
        # Was it the output? A newline tells: there may be nothing left to flush of what failed.
        if write_or_give_up(sys.stdout, "\n") and write_or_give_up(sys.stderr, "\n"):
            raise
        if not isinstance(error, BrokenPipeError):  # where the reader has gone nobody asks why
            write_or_give_up(sys.stderr, f"error: the output cannot be written: {error.strerror}\n")
        sys.exit(1)
