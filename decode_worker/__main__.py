"""``python -m decode_worker CONFIG.json``; serves the aggregated role too."""

from __future__ import annotations

import sys

from decode_worker.worker import DecodeWorker
from worker.process import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], DecodeWorker))
