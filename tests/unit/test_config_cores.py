"""Sharing out cores: who gets which, and what never overlaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.cores import CorePlan, plan_cores
from pdcore.types import Role


def plan(cores: list[int] | None, prefill: int = 0, decode: int = 0, aggregated: int = 0) -> dict[str, CorePlan]:
    return plan_cores(cores, {Role.PREFILL: prefill, Role.DECODE: decode, Role.AGGREGATED: aggregated})


def test_two_cores_keep_the_pools_apart_and_transfers_off_the_decode_engine() -> None:
    assert plan([0, 1], prefill=1, decode=1) == {
        "prefill-0": CorePlan(1, (0,), (0,)),
        "decode-0": CorePlan(1, (1,), (0,)),
    }


def test_workers_share_when_there_are_too_few_cores() -> None:
    plans = plan([0, 1], prefill=2, decode=2)
    assert [plans[worker].engine for worker in ("prefill-0", "prefill-1")] == [(0,), (0,)]
    assert [plans[worker].engine for worker in ("decode-0", "decode-1")] == [(1,), (1,)]


def test_workers_get_cores_of_their_own_when_there_are_enough() -> None:
    plans = plan(list(range(8)), prefill=2, decode=1)
    assert plans["prefill-0"] == CorePlan(2, (0, 1), (0, 1, 2, 3))
    assert plans["prefill-1"] == CorePlan(2, (2, 3), (0, 1, 2, 3))
    assert plans["decode-0"] == CorePlan(4, (4, 5, 6, 7), (0, 1, 2, 3))


def test_one_kind_of_work_takes_everything_and_is_not_pinned() -> None:
    assert plan([0, 1], aggregated=1) == {"aggregated-0": CorePlan(2, (), ())}
    assert plan([0, 1], aggregated=2)["aggregated-1"] == CorePlan(1, (), ())


def test_one_core_pins_nothing() -> None:
    assert set(plan([3], prefill=1, decode=1).values()) == {CorePlan(1, (), ())}


def test_several_machines_leave_the_choice_to_each() -> None:
    assert set(plan(None, prefill=2, decode=1).values()) == {CorePlan(0, (), ())}


@given(
    cores=st.sets(st.integers(0, 255), min_size=2, max_size=32).map(sorted),
    prefill=st.integers(1, 5),
    decode=st.integers(0, 5),
    aggregated=st.integers(0, 5),
)
def test_decode_engines_share_no_core_with_prefill_or_transfers(
    cores: list[int], prefill: int, decode: int, aggregated: int
) -> None:
    plans = plan(cores, prefill, decode, aggregated)
    assert len(plans) == prefill + decode + aggregated
    serving = {core for worker, share in plans.items() if not worker.startswith("prefill") for core in share.engine}
    others = {core for worker, share in plans.items() if worker.startswith("prefill") for core in share.engine}
    others |= {core for share in plans.values() for core in share.transfer}
    assert not serving & others
    assert serving | others <= set(cores)
    assert all(share.threads >= 1 for share in plans.values())
    assert all(not share.engine or share.threads <= len(share.engine) for share in plans.values())
