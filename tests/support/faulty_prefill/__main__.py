"""``python -m tests.support.faulty_prefill CONFIG.json``: a prefill worker whose KV messages meet with faults.

The faults are read from ``CONFIG.faults.json`` beside the configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

from worker.openmp import share_cores


def main() -> int:
    share_cores()
    from kv_transfer.transports.grpc_push import GrpcPushLink
    from pdcore.config_json import from_json
    from prefill_worker.worker import PrefillWorker
    from tests.support.faulty_link import MessageFaults, faulty_links
    from worker.process import run

    faults = from_json(MessageFaults, Path(sys.argv[1]).with_suffix(".faults.json").read_text())
    return run(sys.argv[1:], lambda config: PrefillWorker(config, open_link=faulty_links(GrpcPushLink, faults)))


if __name__ == "__main__":
    sys.exit(main())
