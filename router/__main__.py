"""``python -m router CONFIG.json``; see `router.process`."""

from __future__ import annotations

import sys

from router.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
