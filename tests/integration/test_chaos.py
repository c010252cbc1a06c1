"""A cluster of real processes, killed, frozen and cut off at random while it serves; see docs/chaos.md.

Alone in its file, so that nothing else of its process runs beside it. `benchmarks/chaos.py` does the same for as long
as one likes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdcore.types import Role
from tests.support.chaos import ChaosRun, chaos_configs
from tests.support.chaos_plan import Verb, make_plan
from tests.support.tiny_model import tiny_llama

SEED = 15
SECONDS = 20.0
RATE = 4.0
LIMIT_S = 50.0
"""For a request."""


@pytest.mark.timeout(120)
def test_every_request_ends_once_and_right_whatever_happens_to_the_workers(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    model = tiny_llama(tmp_path / "model")
    roles = {config.worker_id: config.role for config in chaos_configs(model)}
    plan = make_plan(SEED, seconds=SECONDS, rate=RATE, workers=list(roles), cases=18)
    # Whatever the seed, each thing must have happened, to prefill and to decode workers.
    assert {each.verb for each in plan.disturbances} == set(Verb)
    for verb in (Verb.KILL, Verb.FREEZE):
        assert {roles[each.worker] for each in plan.disturbances if each.verb is verb} == {Role.PREFILL, Role.DECODE}
    report = ChaosRun(plan, model, tmp_path / "run", limit_s=LIMIT_S).run()
    tell("; ".join(str(report).splitlines()[:3]))
    assert not report.problems, str(report)
    assert report.outcomes["finished"] > len(plan.requests) // 3
    assert report.replays, "nothing was disturbed while it ran"
    assert sum(report.message_faults.values()), "no message met with a fault"
