"""A decode worker whose pool is too small: it swaps beside its steps, says so, and ends its thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from decode_worker.worker import DecodeWorker
from engine.preemption import DECODE_WEIGHT
from pdcore.types import Role
from tests.support.processes import worker_config
from tests.support.reference import divergences, load_reference
from tests.support.session_client import SessionClient
from tests.support.specs import prompt_of, spec_of
from tests.support.tiny_model import tiny_llama

BLOCKS = 12  # of 8 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def worker(model: Path) -> Iterator[DecodeWorker]:
    config = worker_config(model, Role.DECODE, block_size=8, num_blocks=BLOCKS)
    worker = DecodeWorker(replace(config, engine=replace(config.engine, swap_memory=1 << 20)))
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()
        assert not any(thread.name == "kv-swap" for thread in threading.enumerate())


def check(model: Path, session: SessionClient, specs: list) -> None:  # type: ignore[type-arg]
    reference = load_reference(model)
    for spec in specs:
        output = session.wait_finished(spec.key.request_id)
        assert len(output) == spec.params.max_tokens
        assert all(found.margin < 1e-3 for found in divergences(reference, spec.prompt, output))


@pytest.mark.parametrize(("role", "weight"), [(Role.DECODE, DECODE_WEIGHT), (Role.AGGREGATED, 1.0)])
def test_computing_again_weighs_more_on_a_decode_worker(model: Path, role: Role, weight: float) -> None:
    worker = DecodeWorker(worker_config(model, role))
    worker.start()
    try:
        assert worker.runtime.engine._swap.terms().recompute_weight == weight
    finally:
        worker.stop()


def test_it_prefers_to_swap_and_computes_nothing_again(model: Path, worker: DecodeWorker) -> None:
    specs = [spec_of(prompt_of(7 + 4 * i, seed=i), max_tokens=40) for i in range(5)]
    with SessionClient(worker.address, "r") as session:
        for spec in specs:
            session.generate(spec)
        check(model, session, specs)
        session.wait(
            lambda: session.load is not None and session.load.free_blocks == BLOCKS, 8.0, "a worker at its baseline"
        )
        assert session.load is not None
        assert session.load.swaps_out == session.load.swaps_in == session.load.preemptions > 0
        assert not any(session.load.recomputed_tokens.values())
        assert (session.load.swapped, session.load.swap_used_bytes) == (0, 0)
        worker.runtime.engine.check_integrity()


def test_a_client_that_takes_nothing_gives_way_and_goes_on_later(model: Path, worker: DecodeWorker) -> None:
    """To a request that waits, and to a transfer that wants a ticket."""
    stalled = [spec_of(prompt_of(30, seed=i), max_tokens=10, window=2) for i in range(2)]
    waiting = spec_of(prompt_of(50), max_tokens=30)
    with SessionClient(worker.address, "r") as session:
        for spec in stalled:
            session.generate(spec)
        session.wait(lambda: session.load is not None and session.load.paused == 2, 10.0, "two that stall")
        session.generate(waiting)
        check(model, session, [waiting])
        session.wait(lambda: session.load is not None and session.load.swapped >= 1, 5.0, "one that is swapped")
        transfer = spec_of(prompt_of(85, seed=9))
        session.wait(lambda: session.reserve(transfer).WhichOneof("result") == "granted", 10.0, "a ticket")
        assert session.fresh_load().swapped == 2
        session.abort(transfer.key.request_id)
        for _ in range(5):
            seen = [len(session.tokens_of(spec.key.request_id)) for spec in stalled]
            for spec in stalled:
                session.credit(spec.key.request_id, 2)
            session.wait(
                lambda seen=seen: all(
                    len(session.tokens_of(spec.key.request_id)) >= min(10, before + 2)
                    for spec, before in zip(stalled, seen, strict=True)
                ),
                10.0,
                "two more tokens of each",
            )
        check(model, session, stalled)
