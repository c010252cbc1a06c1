"""``python -m prefill_worker CONFIG.json``"""

from __future__ import annotations

import sys

from worker.openmp import share_cores


def main() -> int:
    share_cores()
    from prefill_worker.worker import PrefillWorker  # brings torch
    from worker.process import run

    return run(sys.argv[1:], PrefillWorker)


if __name__ == "__main__":
    sys.exit(main())
