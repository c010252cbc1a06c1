"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker.openmp import share_cores

# Before torch is imported: the reference computes beside worker processes on the same cores.
share_cores()

# No test may reach for a hub, whatever the machine allows.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct in bf16, converted once per machine."""
    from engine.model_store import resolve_model

    return resolve_model("smollm2-135m").path
