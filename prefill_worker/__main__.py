"""``python -m prefill_worker CONFIG.json``"""

from __future__ import annotations

import os
import sys

from pdcore.grpc_log import quiet_grpc
from worker.openmp import share_cores


def main() -> int:
    share_cores()
    quiet_grpc(os.environ)
    from prefill_worker.worker import PrefillWorker  # brings torch and gRPC
    from worker.process import run

    return run(sys.argv[1:], PrefillWorker)


if __name__ == "__main__":
    sys.exit(main())
