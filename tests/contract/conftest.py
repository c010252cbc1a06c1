"""Every requirement is put to every transport that can be used here."""

from __future__ import annotations

import pytest

from kv_transfer.transports.catalog import available_transports
from pdcore.config import TRANSPORTS


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport in turn; skipped where it is not installed."""
    name = str(request.param)
    if name not in available_transports():
        pytest.skip(f"{name} cannot be used here: it is not installed")
    return name
