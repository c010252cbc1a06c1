"""``python -m router CONFIG.json``; see `router.process`."""

from __future__ import annotations

import os
import sys

from pdcore.grpc_log import quiet_grpc


def main() -> int:
    quiet_grpc(os.environ)
    from router.process import main as run  # brings gRPC

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
