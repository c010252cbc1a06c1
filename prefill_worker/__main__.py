"""``python -m prefill_worker CONFIG.json``"""

from __future__ import annotations

import sys

from prefill_worker.worker import PrefillWorker
from worker.process import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], PrefillWorker))
