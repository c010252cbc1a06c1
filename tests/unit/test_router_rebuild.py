"""What becomes of a request whose KV transfer has failed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdcore.costs import CodecCost, TransferSnapshot, transfer_or_recompute
from pdcore.types import KvTransferStats, Role, WorkerLoad
from router.fleet import Fleet
from router.rebuild import FailedTransfer, NextTry, TransferRates, after_failed_transfer, another_pair
from router.snapshot import WorkerSnapshot

FIRST = FailedTransfer(failures=1, delivered=0, tokens=1000, elsewhere=True)
SLOW = TransferSnapshot(50_000_000, 1 << 18, 1e6, (CodecCost("raw", 1.0, 1e9, 1e9),), hidden_s=1.0)


def worker(name: str, role: Role) -> WorkerSnapshot:
    return WorkerSnapshot(name, role, WorkerLoad(), block_size=16, max_requests=8, max_queued_prefill_tokens=1024)


def test_the_first_failure_goes_elsewhere() -> None:
    assert after_failed_transfer(FIRST) == NextTry(False, "another pair of workers")


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"delivered": 1}, "delivered"), ({"failures": 2}, "2 transfers failed"), ({"elsewhere": False}, "no other")],
)
def test_what_is_rebuilt_in_any_case(change: dict[str, object], reason: str) -> None:
    decision = after_failed_transfer(replace(FIRST, **change))  # type: ignore[arg-type]
    assert decision.rebuild
    assert reason in decision.reason


@pytest.mark.parametrize("rate", [10.0, 20.0, 500.0, 1e5])
def test_what_is_known_of_the_speeds_decides(rate: float) -> None:
    decision = after_failed_transfer(replace(FIRST, again=SLOW, prefill_tokens_s=rate))
    choice = transfer_or_recompute(SLOW, tokens=1000, prefill_tokens_s=rate)
    assert decision.rebuild is choice.recompute
    assert decision.rebuild is (1000 / rate * 1.1 < 51)


def test_another_pair_needs_one_worker_that_was_not_in_it() -> None:
    p0, p1 = (worker(name, Role.PREFILL) for name in ("p0", "p1"))
    d0, d1 = (worker(name, Role.DECODE) for name in ("d0", "d1"))
    failed = frozenset({"p0", "d0"})
    assert not another_pair(failed, Fleet.of([p0, d0]))
    assert another_pair(failed, Fleet.of([p0, p1, d0]))
    assert another_pair(failed, Fleet.of([p0, d0, d1]))
    assert another_pair(failed, Fleet.of([p1, d1]))
    assert not another_pair(failed, Fleet.of([p1])), "nobody decodes"
    assert not another_pair(failed, Fleet.of([p0, d0, worker("a0", Role.AGGREGATED)]))


def test_rates_are_means_in_which_old_news_fade() -> None:
    rates = TransferRates()
    assert rates.again(100) is None
    assert rates.decode_side_tokens_s is None
    rates.prefilled(Role.PREFILL, 1000, 2.0)
    assert rates.decode_side_tokens_s == 500.0, "nothing better is known"
    assert rates.again(100) is None
    rates.transferred(KvTransferStats(4, 60_000, 40_000, "raw", "grpc", 0.5), 60)
    again = rates.again(100)
    assert again is not None
    assert (again.raw_bytes, again.link_bytes_s, again.hidden_s) == (100_000, 80_000.0, 0.2)
    assert again.codecs[0].ratio == 1.5
    for _ in range(50):
        rates.prefilled(Role.PREFILL, 1000, 1.0)
        rates.prefilled(Role.DECODE, 100, 1.0)
        rates.transferred(KvTransferStats(4, 60_000, 40_000, "raw", "grpc", 0.1), 60)
    again = rates.again(100)
    assert again is not None
    assert again.link_bytes_s == pytest.approx(400_000, rel=0.01)
    assert again.hidden_s == pytest.approx(0.1, rel=0.01)
    assert rates.decode_side_tokens_s == pytest.approx(100)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (10, 0.0)])
def test_measurements_that_say_nothing_change_nothing(tokens: int, seconds: float) -> None:
    rates = TransferRates()
    rates.prefilled(Role.PREFILL, tokens, seconds)
    rates.transferred(KvTransferStats(0, 0, 0, "raw", "grpc", seconds), tokens)
    assert rates.decode_side_tokens_s is None
    assert rates.again(10) is None
