"""What the process that forks workers has in memory. Imported there and nowhere else."""

import importlib

from worker.openmp import share_cores

share_cores()

# Now torch may come.
for _name in ("prefill_worker.__main__", "prefill_worker.worker", "decode_worker.__main__", "decode_worker.worker"):
    importlib.import_module(_name)
