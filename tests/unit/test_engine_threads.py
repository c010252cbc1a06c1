"""One thread steps, others add, abort, reserve, commit, release and return credit."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from engine.engine import Engine, SequenceKind
from engine.step import StepInput, StepOutput
from pdcore.types import RequestKey, RequestSpec
from tests.support.engine_kit import make_engine, prefill_and_transfer, prompt_of, request
from tests.support.fake_runner import FakeRunner, oracle

CALLERS = 3
REQUESTS = 40  # of each caller


def keep_stepping(engine: Engine, stop: threading.Event) -> dict[RequestKey, list[int]]:
    """Step until `stop` is set and nothing is left to do; all that was reported."""
    got: dict[RequestKey, list[int]] = {}
    idle = 0
    while not (stop.is_set() and not engine.has_work()):
        plan = engine.schedule()
        if plan is None:
            idle += stop.is_set()
            assert idle < 5000, f"nothing can run: {engine.load()}"
            time.sleep(0.001)
            continue
        for token in engine.apply(plan, engine.execute(plan)).tokens:
            mine = got.setdefault(token.key, [])
            assert token.index == len(mine)
            mine.append(token.token_id)
            engine.add_credit(token.key, 1)
        engine.check_integrity()
    return got


def make_calls(
    number: int, engine: Engine, runner: FakeRunner
) -> tuple[dict[RequestKey, RequestSpec], set[RequestKey]]:
    """Requests of every kind, some of them aborted; returns (all that were taken, those aborted)."""
    rng = random.Random(number)
    there = FakeRunner(num_blocks=24, block_size=16)
    source = make_engine(there)
    specs: dict[RequestKey, RequestSpec] = {}
    aborted: set[RequestKey] = set()
    for i in range(REQUESTS):
        prompt = prompt_of(rng.randint(0, 2), rng.randint(1, 30), rng.randint(0, 10), branch=rng.randint(0, 9))
        spec = request(f"c{number}-{i}", prompt, rng.randint(1, 12), window=rng.randint(1, 9))
        owner = spec.key.request_id
        way = rng.choice(["generate", "prefill", "ticket"])
        if way != "ticket":
            engine.add(spec, SequenceKind(way))
            specs[spec.key] = spec
        elif (ticket := engine.reserve(owner, spec)) is not None:
            first = prefill_and_transfer(source, there, runner, spec, ticket.blocks, ticket.prefix_tokens)
            if rng.random() < 0.7:
                engine.commit_ticket(owner, spec, first)
                specs[spec.key] = spec
            else:
                engine.release_ticket(owner)
        if specs and rng.random() < 0.4:
            key = rng.choice(list(specs))
            if engine.abort(key):
                aborted.add(key)
        for key in specs:
            engine.release_send(key)
        engine.load()
        engine.check_integrity()
    return specs, aborted


def test_calls_from_other_threads_at_any_moment() -> None:
    runner = FakeRunner(num_blocks=24, block_size=8)
    engine = make_engine(runner, budget=24, max_num_seqs=6, chunk=13, swap_blocks=30, preemption="swap")
    stop = threading.Event()
    specs: dict[RequestKey, RequestSpec] = {}
    aborted: set[RequestKey] = set()
    with ThreadPoolExecutor(CALLERS + 1) as pool:
        stepping = pool.submit(keep_stepping, engine, stop)
        try:
            for call in [pool.submit(make_calls, number, engine, runner) for number in range(CALLERS)]:
                taken, ended = call.result(60)
                specs |= taken
                aborted |= ended
            for _ in range(30_000):  # what waits may need the blocks of prefills that ended meanwhile
                if stepping.done() or not engine.has_work():
                    break
                for key in specs:
                    engine.release_send(key)
                time.sleep(0.001)
        finally:
            stop.set()
        got = stepping.result(60)
    for key in specs:
        engine.release_send(key)
    assert engine.close()
    engine.check_integrity()
    assert engine.load().free_blocks == 24
    assert engine.load().swap_used_bytes == 0
    assert engine.load().cached_tokens > 0
    assert 0 < len(aborted) < len(specs)
    for key, spec in specs.items():
        mine, expected = got.get(key, []), oracle(runner, spec)[0]
        assert mine == expected[: len(mine)]
        assert key in aborted or len(mine) in (1, len(expected)), "one token of a prefill, else all"


def test_no_lock_is_held_while_the_forward_runs() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(FakeRunner):
        def run(self, step: StepInput) -> StepOutput:
            entered.set()
            assert leave.wait(30)
            return super().run(step)

    runner = Slow()
    engine = make_engine(runner)
    running, late = request("running", 10), request("late", 10, 2)
    engine.add(running, SequenceKind.GENERATE)
    plan = engine.schedule()
    assert plan is not None
    outputs: list[StepOutput] = []
    thread = threading.Thread(target=lambda: outputs.append(engine.execute(plan)))
    thread.start()
    assert entered.wait(30)
    engine.add(late, SequenceKind.GENERATE)  # each of these would wait for ever if the forward held the lock
    assert engine.reserve_ticket("t", 10) is not None
    engine.release_ticket("t")
    engine.add_credit(running.key, 1)
    assert engine.load().running == 1
    assert engine.abort(running.key)
    assert engine.load().free_blocks == 63
    leave.set()
    thread.join(30)
    assert engine.apply(plan, outputs[0]).tokens == ()
    assert engine.load().free_blocks == 64
