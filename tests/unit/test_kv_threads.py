from __future__ import annotations

import os
import sys

import pytest

from kv_transfer.threads import CrashGuard, check_cores
from pdcore.errors import ConfigError


def test_cores_must_be_allowed_not_just_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    check_cores("transfer.cpu_affinity", ())
    check_cores("transfer.cpu_affinity", (3, 1))
    with pytest.raises(ConfigError) as caught:
        check_cores("transfer.cpu_affinity", (1, 2))
    assert caught.value.key == "transfer.cpu_affinity"
    assert caught.value.value == (1, 2)
    assert "[1, 3]" in caught.value.allowed


def test_only_the_first_death_is_told_and_every_one_logged(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []
    guard = CrashGuard(told.append)
    guard.run(lambda: None)
    assert told == []
    guard.run(lambda: sys.exit("first"))
    guard.run(lambda: sys.exit("second"))
    assert [str(error) for error in told] == ["first"]
    kinds = [record.exc_info[0].__name__ for record in caplog.records if record.exc_info]  # type: ignore[union-attr]
    assert kinds == ["SystemExit"] * 2


def test_a_death_that_nobody_asked_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    CrashGuard(None).run(lambda: sys.exit("alone"))
    assert len(caplog.records) == 1
