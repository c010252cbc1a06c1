"""``python -m decode_worker CONFIG.json``; serves the aggregated role too."""

from __future__ import annotations

import os
import sys

from pdcore.grpc_log import quiet_grpc
from worker.openmp import share_cores


def main() -> int:
    share_cores()
    quiet_grpc(os.environ)
    from decode_worker.worker import DecodeWorker  # brings torch and gRPC
    from worker.process import run

    return run(sys.argv[1:], DecodeWorker)


if __name__ == "__main__":
    sys.exit(main())
