"""``python -m cluster``: the ``pdserve`` command."""

from __future__ import annotations

from cluster.cli.main import main

if __name__ == "__main__":
    main()
