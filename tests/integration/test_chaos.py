"""A cluster of real processes, killed, frozen and cut off at random while it serves; see docs/chaos.md.

Alone in its file, so that nothing else of its process runs beside it. `benchmarks/chaos.py` does the same for as long
as one likes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.chaos import ChaosRun, chaos_configs
from tests.support.chaos_plan import Verb, make_plan
from tests.support.tiny_model import tiny_llama

SEED = 15
SECONDS = 20.0
RATE = 4.0
LIMIT_S = 50.0
"""For a request. With it the test ends within two minutes whatever happens, on a machine that has a core for it."""


def test_every_request_ends_once_and_right_whatever_happens_to_the_workers(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    model = tiny_llama(tmp_path / "model")
    workers = [config.worker_id for config in chaos_configs(model)]
    plan = make_plan(SEED, seconds=SECONDS, rate=RATE, workers=workers, cases=18)
    # Whatever the seed, each thing must have happened.
    assert {each.verb for each in plan.disturbances} == set(Verb)
    report = ChaosRun(plan, model, tmp_path / "run", limit_s=LIMIT_S).run()
    tell("; ".join(str(report).splitlines()[:3]))
    assert not report.problems, str(report)
    assert report.outcomes["finished"] > len(plan.requests) // 3
    assert report.replays, "nothing was disturbed while it ran"
    assert sum(report.message_faults.values()), "no message met with a fault"
