"""The scheduler's policies in a whole engine: who is served when, and that tokens stay exact."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine, SequenceKind
from engine.step import StepOutput
from engine.ticket import CLAIM_S
from pdcore.clock import ManualClock
from pdcore.config import QUEUE_POLICIES, QueueConfig
from pdcore.types import PriorityClass, RequestSpec
from tests.support.engine_kit import ManualCopier, make_engine, request, run, step, tokens_of
from tests.support.fake_runner import FakeRunner, oracle

INTERACTIVE, STANDARD, BATCH = PriorityClass


def add(engine: Engine, *specs: RequestSpec) -> None:
    for spec in specs:
        engine.add(spec, SequenceKind.GENERATE)


def first_tokens(engine: Engine, steps: int = 500) -> dict[str, int]:
    """In which step each request got its first token; runs until all have ended."""
    firsts: dict[str, int] = {}
    for number in range(1, steps):
        if not engine.has_work():
            return firsts
        result = step(engine)
        assert result is not None
        for token in result.tokens:
            firsts.setdefault(token.key.request_id, number)
    raise AssertionError("still at work")


def test_short_prompts_pass_a_prompt_of_10k() -> None:
    runner = FakeRunner(num_blocks=1000, max_model_len=12_000)
    engine = make_engine(
        runner, budget=512, chunk=512, max_num_seqs=16, max_partial_prefills=2, long_prefill_tokens=1024
    )
    add(engine, request("long", 10_000, 1))
    step(engine)
    add(engine, *(request(f"short{i}", 50, 1) for i in range(10)))
    firsts = first_tokens(engine)
    assert max(step for name, step in firsts.items() if name != "long") <= 2
    assert firsts["long"] <= 22, "10,000 tokens in chunks of 512, and two steps shared with the short ones"


def test_a_second_long_prompt_waits_without_blocks_and_short_ones_do_not() -> None:
    engine = make_engine(
        FakeRunner(num_blocks=100), budget=64, chunk=32, max_partial_prefills=2, long_prefill_tokens=100
    )
    add(engine, request("a", 400, 1), request("b", 300, 1), request("short", 20, 1))
    step(engine)
    load = engine.load()
    assert (load.running, load.waiting) == (1, 1), "the short one is done, b waits"
    assert load.total_blocks - load.free_blocks <= 27
    firsts = first_tokens(engine)
    assert firsts["a"] < firsts["b"]


def test_a_chunk_may_end_inside_a_block() -> None:
    runner = FakeRunner(num_blocks=32)
    engine = make_engine(runner, budget=7, chunk=7, max_num_seqs=2)
    specs = [request("a", 45, 4), request("b", 33, 4)]
    add(engine, *specs)
    plan = engine.schedule()
    assert plan is not None
    assert [chunk.token_end % 16 for chunk in plan.chunks] != [0] * len(plan.chunks)
    engine.apply(plan, engine.execute(plan))
    tokens = run(engine)
    for spec in specs:
        assert tokens_of(tokens, spec) == oracle(runner, spec)[0]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["batch", "long", "short", "b", "now"]),
        ("sjf", ["short", "now", "b", "batch", "long"]),
        ("priority", ["now", "b", "long", "short", "batch"]),
        ("fair", ["batch", "b", "long", "short", "now"]),
    ],
)
def test_requests_start_in_the_order_of_the_policy(policy: str, order: list[str]) -> None:
    engine = make_engine(FakeRunner(), max_num_seqs=1, queue=QueueConfig(policy, sjf_age_tokens=1))
    add(
        engine,
        request("batch", 40, 1, tenant="a", priority=BATCH),
        request("long", 60, 1, tenant="a"),
        request("short", 10, 1, tenant="a"),
        request("b", 30, 1, tenant="b"),
        request("now", 20, 1, tenant="a", priority=INTERACTIVE),
    )
    firsts = first_tokens(engine)
    assert sorted(firsts, key=firsts.__getitem__) == order


def test_static_batches_start_and_end_together() -> None:
    engine = make_engine(FakeRunner(), max_num_seqs=2, queue=QueueConfig("static"))
    add(engine, request("a", 10, 2), request("b", 10, 9), request("c", 10, 2), request("d", 10, 2))
    firsts = first_tokens(engine)
    assert firsts["a"] == firsts["b"] == 1
    assert firsts["c"] == firsts["d"] == 10, "b's last token is the ninth, and a's place stays empty until then"


def test_generated_tokens_are_charged_to_their_tenant() -> None:
    engine = make_engine(FakeRunner(), max_num_seqs=1, queue=QueueConfig("fair"))
    add(engine, *(request(f"a{i}", 10, 20, tenant="a") for i in range(2)))
    add(engine, *(request(f"b{i}", 10, 1, tenant="b") for i in range(5)))
    firsts = first_tokens(engine)
    assert sorted(firsts, key=firsts.__getitem__) == ["a0", "b0", "b1", "b2", "b3", "b4", "a1"]


class TestDisplacement:
    def test_an_interactive_request_takes_the_place_of_a_batch_one_and_nothing_is_lost(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner, max_num_seqs=2, queue=QueueConfig(batch_share=0.5))
        batch = [request(f"b{i}", 12, 30, priority=BATCH) for i in range(2)]
        add(engine, *batch)
        tokens = [token for _ in range(5) for token in step(engine).tokens]  # type: ignore[union-attr]
        load = engine.load()
        assert (load.yielding_requests, load.yielding_blocks) == (1, 1)
        urgent = request("now", 10, 3, priority=INTERACTIVE)
        add(engine, urgent)
        soon = [step(engine), step(engine)]
        news = [token for result in soon if result is not None for token in result.tokens]
        assert urgent.key in {token.key for token in news}
        tokens += news + run(engine)
        assert engine.load().preemptions == 1
        for spec in (*batch, urgent):
            assert tokens_of(tokens, spec) == oracle(runner, spec)[0]

    def test_it_takes_blocks_too_and_runs_at_once_if_all_gave_way(self) -> None:
        runner = FakeRunner(num_blocks=4)
        engine = make_engine(runner, max_num_seqs=2, prefix_cache=False, queue=QueueConfig(batch_share=0.0))
        add(engine, request("b", 20, 40, priority=BATCH))
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        add(engine, request("now", 50, 2, priority=INTERACTIVE))
        result = step(engine)
        assert result is not None
        assert [token.key.request_id for token in result.tokens] == ["now"]
        tokens += [*result.tokens, *run(engine)]
        assert tokens_of(tokens, request("b", 20, 40)) == oracle(runner, request("b", 20, 40))[0]

    def test_a_ticket_of_an_interactive_request_takes_blocks_and_has_them_when_it_comes_again(self) -> None:
        runner, clock = FakeRunner(num_blocks=12), ManualClock()
        engine = make_engine(
            runner,
            clock=clock,
            budget=128,
            max_num_seqs=4,
            prefix_cache=False,
            queue=QueueConfig(batch_share=0.25),
        )
        batch = [request(f"b{i}", 30, 40, priority=BATCH) for i in range(4)]
        add(engine, *batch)
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        assert engine.load().free_blocks == 4
        urgent = request("now", 60, 3, priority=INTERACTIVE)
        assert engine.reserve("standard", request("later", 60, 3)) is None
        tokens += step(engine).tokens  # type: ignore[union-attr]
        assert engine.load().preemptions == 0, "nobody gives way to a standard request"
        assert engine.reserve("t", urgent) is None
        for _ in range(3):  # until the router asks again, those that gave way are not let in
            clock.advance(0.02)
            tokens += step(engine).tokens  # type: ignore[union-attr]
            assert engine.load().preemptions == 2
        assert engine.reserve("t", urgent) is not None
        first = oracle(runner, urgent)[0][0]
        engine.commit_ticket("t", urgent, first)
        tokens += run(engine)
        assert len(tokens_of(tokens, urgent)) == 3
        for spec in batch:
            assert tokens_of(tokens, spec) == oracle(runner, spec)[0]
        assert engine.load().free_blocks == 12

    @staticmethod
    def full_of_batch(num_blocks: int = 12, **options: object) -> tuple[Engine, ManualClock]:
        """Four batch requests of two blocks each: of 12 blocks 4 are free, and as many for their growth."""
        clock = ManualClock()
        engine = make_engine(
            FakeRunner(num_blocks=num_blocks),
            clock=clock,
            budget=128,
            max_num_seqs=4,
            prefix_cache=False,
            **{"max_reserved_fraction": 1.0, "queue": QueueConfig(batch_share=0.25), **options},  # type: ignore[arg-type]
        )
        add(engine, *(request(f"b{i}", 30, 40, priority=BATCH) for i in range(4)))
        step(engine)
        return engine, clock

    @pytest.mark.parametrize("other", [BATCH, STANDARD, INTERACTIVE])
    def test_what_is_claimed_is_not_given_to_another_ticket(self, other: PriorityClass) -> None:
        engine, clock = self.full_of_batch()
        urgent = request("now", 60, 3, priority=INTERACTIVE)
        assert engine.reserve("t", urgent) is None
        for number in range(5):
            clock.advance(0.02)
            step(engine)
            assert engine.reserve(f"o{number}", request(f"o{number}", 60, 3, priority=other)) is None
        assert engine.reserve("t", urgent) is not None

    def test_a_small_ticket_that_fits_beside_a_claim_does_not_end_it(self) -> None:
        engine, clock = self.full_of_batch(queue=QueueConfig(batch_share=0.0))
        urgent = request("now", 70, 3, priority=INTERACTIVE)
        assert engine.reserve("t", urgent) is None
        clock.advance(0.02)
        step(engine)
        assert engine.reserve("s", request("small", 10, 3, priority=INTERACTIVE)) is not None
        assert engine.reserve("o", request("o", 60, 3, priority=BATCH)) is None
        assert engine.reserve("t", urgent) is not None

    def test_nobody_gives_way_to_a_ticket_that_waits_for_others(self) -> None:
        """The share of all tickets together is taken: memory is not what it waits for. But it goes first."""
        engine, clock = self.full_of_batch(20, max_reserved_fraction=0.15)
        assert engine.reserve("first", request("first", 40, 3)) is not None
        urgent = request("now", 20, 3, priority=INTERACTIVE)
        for _ in range(5):
            assert engine.reserve("t", urgent) is None
            clock.advance(0.02)
            step(engine)
        assert engine.load().preemptions == 0
        engine.release_ticket("first")
        assert engine.reserve("small", request("small", 4, 3)) is not None, "the only ticket may always come"
        engine.release_ticket("small")
        assert engine.reserve("t", urgent) is not None

    def test_interactive_ones_grow_at_the_cost_of_batch_ones_and_not_the_other_way_round(self) -> None:
        runner = FakeRunner(num_blocks=16)
        engine = make_engine(runner, budget=128, prefix_cache=False)
        batch = [request(f"b{i}", 40, 60, priority=BATCH) for i in range(3)]
        urgent = request("now", 40, 60, priority=INTERACTIVE)
        add(engine, *batch)
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        add(engine, urgent)
        for _ in range(60):
            result = step(engine)
            assert result is not None
            assert urgent.key in {token.key for token in result.tokens}, "it never waits"
            tokens += result.tokens
        assert engine.load().preemptions > 0
        tokens += run(engine)
        for spec in (*batch, urgent):
            assert tokens_of(tokens, spec) == oracle(runner, spec)[0]

    def test_batch_ones_leave_the_places_to_those_that_came_by_tickets(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner, max_num_seqs=2, queue=QueueConfig(batch_share=0.0))
        add(engine, *(request(f"b{i}", 12, 30, priority=BATCH) for i in range(2)))
        step(engine)
        for number in range(2):
            spec = request(f"now{number}", 10, 9, priority=INTERACTIVE)
            assert engine.reserve(f"t{number}", spec) is not None
            engine.commit_ticket(f"t{number}", spec, oracle(runner, spec)[0][0])
        for _ in range(8):
            result = step(engine)
            assert result is not None
            assert {token.key.request_id for token in result.tokens} == {"now0", "now1"}
        run(engine)
        assert engine.load().preemptions == 0, "there is memory for all"

    @pytest.mark.parametrize("swap_blocks", [0, 16])
    def test_every_preemption_is_in_a_record(self, swap_blocks: int) -> None:
        engine = make_engine(
            FakeRunner(num_blocks=4),
            max_num_seqs=2,
            prefix_cache=False,
            queue=QueueConfig(batch_share=0.0),
            preemption="swap" if swap_blocks else "recompute",
            swap_blocks=swap_blocks,
            copier=(copier := ManualCopier()),
        )
        add(engine, request("b", 20, 40, priority=BATCH))
        step(engine)
        add(engine, request("now", 50, 2, priority=INTERACTIVE))
        run(engine, copier=copier)
        load, records = engine.load(), engine.last_steps(500)
        assert load.preemptions == sum(record.preempted for record in records) == 1
        assert load.swaps_out == sum(record.swapped_out for record in records) == (swap_blocks > 0)
        assert load.swaps_in == sum(record.swapped_in for record in records) == (swap_blocks > 0)

    def test_a_claim_ends_when_nobody_comes_for_it(self) -> None:
        runner, clock = FakeRunner(num_blocks=12), ManualClock()
        engine = make_engine(runner, clock=clock, budget=128, max_num_seqs=4, prefix_cache=False)
        batch = [request(f"b{i}", 30, 40, priority=BATCH) for i in range(4)]
        add(engine, *batch)
        step(engine)
        assert engine.reserve("t", request("now", 60, 3, priority=INTERACTIVE)) is None
        step(engine)
        step(engine)
        load = engine.load()
        assert (load.running, load.waiting) == (2, 2)
        clock.advance(CLAIM_S)
        step(engine)
        assert engine.load().running > 2

    def test_batch_ends_under_a_stream_of_interactive_ones(self) -> None:
        """Its share of places is not taken away, and its share of starts lets it in."""
        engine = make_engine(FakeRunner(num_blocks=200), max_num_seqs=2, queue=QueueConfig(batch_share=0.25))
        add(engine, *(request(f"b{i}", 12, 10, priority=BATCH) for i in range(4)))
        ended: set[str] = set()
        for number in range(400):
            add(engine, request(f"i{number}", 5, 3, priority=INTERACTIVE))
            result = step(engine)
            assert result is not None
            ended |= {token.key.request_id for token in result.tokens if token.finish is not None}
            if {"b0", "b1", "b2", "b3"} <= ended:
                break
        else:
            raise AssertionError(f"batch requests starve: {sorted(ended)[:8]}")


@settings(max_examples=15, deadline=None)
@given(
    policy=st.sampled_from(QUEUE_POLICIES),
    raw=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 12), st.sampled_from("ab"), st.sampled_from(PriorityClass)),
        min_size=1,
        max_size=10,
    ),
    blocks=st.integers(6, 20),
    partial=st.integers(0, 2),
    share=st.sampled_from([0.0, 0.2, 0.5]),
    at_once=st.integers(1, 4),
)
def test_every_request_ends_with_its_own_tokens(policy, raw, blocks, partial, share, at_once) -> None:  # type: ignore[no-untyped-def]
    """Memory is short, requests come while others run, batch ones are displaced: nothing is lost or repeated."""
    runner = FakeRunner(num_blocks=blocks)
    engine = make_engine(
        runner,
        budget=24,
        chunk=16,
        max_num_seqs=3,
        max_partial_prefills=partial,
        long_prefill_tokens=20,
        queue=QueueConfig(policy, batch_share=share),
    )
    specs = [request(f"r{i}", n, m, tenant=tenant, priority=c) for i, (n, m, tenant, c) in enumerate(raw)]
    tokens = []
    for first in range(0, len(specs), at_once):
        add(engine, *specs[first : first + at_once])
        for _ in range(2):
            result = step(engine)
            tokens += [] if result is None else result.tokens
    tokens += run(engine)
    for spec in specs:
        assert tokens_of(tokens, spec) == oracle(runner, spec)[0]
    assert engine.load().free_blocks == blocks


@pytest.mark.parametrize("seed", range(40))
def test_no_class_waits_for_ever_for_another(seed: int) -> None:
    """Pools so small that nearly every step lacks memory, and classes that take from each other."""
    draw = random.Random(seed)
    blocks = draw.randint(8, 30)
    runner = FakeRunner(num_blocks=blocks, block_size=draw.choice([1, 2, 4]), vocab_size=64)
    engine = make_engine(
        runner,
        max_num_seqs=draw.randint(2, 8),
        prefix_cache=draw.random() < 0.5,
        queue=QueueConfig("priority", batch_share=draw.choice([0.0, 0.2, 0.5])),
    )
    size = runner.geometry.block_size
    specs = []
    for number in range(14):
        known = draw.randint(1, blocks * size // 2)
        most = min(60, draw.randint(1, blocks * size - known))  # of a window of 64
        specs.append(request(f"r{number}", known, most, vocab_size=64, priority=draw.choice(list(PriorityClass))))
    tokens = []
    for spec in specs:
        add(engine, spec)
        for _ in range(draw.randint(0, 4)):
            if engine.has_work():
                result = step(engine)
                assert result is not None, engine.load()
                tokens += result.tokens
    tokens += run(engine, steps=4000)
    for spec in specs:
        assert tokens_of(tokens, spec) == oracle(runner, spec)[0]
    assert engine.load().free_blocks == blocks


class SlowRunner(FakeRunner):
    """Takes 10 ms a step and 1 ms a token, on a clock set by hand."""

    def __init__(self, clock: ManualClock, **options: int) -> None:
        super().__init__(**options)
        self._clock = clock

    def run(self, step) -> StepOutput:  # type: ignore[no-untyped-def]
        self._clock.advance(0.010 + 0.001 * len(step.token_ids))
        return super().run(step)


class TestRecords:
    def test_what_a_step_did_and_why(self) -> None:
        clock = ManualClock(100.0)
        engine = make_engine(SlowRunner(clock), clock=clock, budget=32, chunk=32, max_num_seqs=2)
        add(engine, request("a", 50, 3), request("b", 10, 3), request("c", 10, 3, priority=BATCH))
        run(engine)
        records = engine.last_steps(100)
        assert [record.step for record in records] == list(range(1, len(records) + 1))
        first = records[0]
        assert (first.tokens, first.decodes, first.prefills, first.bound_by) == (32, 0, 2, "tokens")
        assert (first.running, first.waiting) == (0, (0, 2, 1))
        assert first.free_blocks == 64
        assert (first.started, first.ms) == (100.0, pytest.approx(42.0))
        assert first.predicted_ms == 0.0, "nothing is known yet"
        assert records[-1].predicted_ms == pytest.approx(records[-1].ms, rel=0.3)
        assert engine.last_steps(2) == records[-2:]
        assert engine.load().step_ms == pytest.approx(sum(r.ms for r in records) / len(records))

    def test_the_load_carries_what_steps_take(self) -> None:
        clock = ManualClock()
        engine = make_engine(SlowRunner(clock), clock=clock, budget=64, chunk=64)
        for i in range(12):
            add(engine, request(f"r{i}", 5 + 4 * i, 4))
            run(engine)
        model = engine.load().step_time
        assert model.known
        assert model.base_ms == pytest.approx(10.0, rel=0.1)
        assert model.token_ms == pytest.approx(1.0, rel=0.1)
        assert model.error < 0.1


def test_the_target_keeps_tokens_flowing_while_a_long_prompt_comes_in() -> None:
    """8 decodes and then a prompt: without a target each step takes what the budget allows."""

    def gaps(target_ms: float) -> tuple[float, int]:
        clock = ManualClock()
        runner = SlowRunner(clock, num_blocks=200)
        engine = make_engine(runner, clock=clock, budget=256, chunk=256, max_num_seqs=16, target_itl_ms=target_ms)
        add(engine, *(request(f"d{i}", 8 * i + 8, 120) for i in range(8)))
        for _ in range(10):
            step(engine)
        add(engine, request("long", 1000, 1))
        worst, steps = 0.0, 0
        while "long" in {key.request_id for key in engine._sequences}:
            began = clock.now()
            step(engine)
            worst, steps = max(worst, clock.now() - began), steps + 1
        return 1e3 * worst, steps

    worst, steps = gaps(0.0)
    assert worst > 250
    assert steps <= 5
    worst, more_steps = gaps(60.0)
    assert worst <= 62, "a step that is predicted exactly takes 60 ms at most"
    assert 1000 / 42 <= more_steps <= 1000 / 42 + 6
