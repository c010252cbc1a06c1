"""Fixtures shared by all tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from router.logs import PROMPTS
from worker.openmp import share_cores

# Before torch is imported: the reference computes beside worker processes on the same cores.
share_cores()

# A test never fails for the time that it took: the machine may have other work.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

# No test may reach for a hub, whatever the machine allows.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def levels_of_logs() -> Iterator[None]:
    """Commands that a test runs in this process set them; the next test finds them as they were."""
    loggers = [logging.getLogger(name) for name in ("", "router", PROMPTS)]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct in bf16, converted once per machine."""
    from engine.model_store import resolve_model

    return resolve_model("smollm2-135m").path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models that are a few kilobytes wide gain nothing from a second thread, which would only spin."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Put a line into pytest's summary, whichever process the test runs in."""
    return lambda text: record_property("told", text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    told = [
        (report.nodeid, value)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if name == "told"
    ]
    if told:
        terminalreporter.section("told by tests")
    for nodeid, value in sorted(set(told)):
        terminalreporter.write_line(f"{nodeid.partition('::')[2]}: {value}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the file that takes longest, so that no process ends long after the others.

    Files that start a Ray keep all cores at work by themselves: they are spread over the run, far from each other.
    """
    files = {item.path: item.get_closest_marker("ray") is not None for item in items}
    rest = [path for path, starts_ray in files.items() if not starts_ray]
    rest.sort(key=lambda path: path.name != "test_real_model.py")
    rays = [path for path, starts_ray in files.items() if starts_ray]
    step = len(rest) // (len(rays) + 1)
    for number, path in reversed([*enumerate(rays, 1)]):
        rest.insert(number * step, path)
    rank = {path: number for number, path in enumerate(rest)}
    items.sort(key=lambda item: rank[item.path])
