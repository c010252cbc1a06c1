"""What the engine takes from its prefix cache and gives to it, on the fake runner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine, SequenceKind
from engine.step import StepOutput
from pdcore.errors import InternalError, TicketError
from pdcore.types import RequestSpec
from tests.support.engine_kit import make_engine, prefill_and_transfer, prompt_of, request, run, step, tokens_of
from tests.support.fake_runner import FakeRunner, oracle

GENERATE, PREFILL = SequenceKind.GENERATE, SequenceKind.PREFILL


def cached_tokens(engine: Engine, spec: RequestSpec, kind: SequenceKind = GENERATE) -> int:
    """Run a request to its end, check its tokens, and return how many of its prompt the cache had."""
    engine.add(spec, kind)
    tokens, cached = [], []
    while engine.has_work():
        result = step(engine)
        assert result is not None
        tokens += result.tokens
        cached += [stats.cached_tokens for stats in result.prefilled if stats.key == spec.key]
    runner = engine._runner
    assert isinstance(runner, FakeRunner)
    assert tokens_of(tokens, spec) == oracle(runner, spec, 1 if kind is PREFILL else None)[0]
    engine.release_send(spec.key)
    (hit,) = cached
    return hit


def at_rest(engine: Engine) -> None:
    load = engine.load()
    assert load.free_blocks == load.total_blocks
    assert (load.waiting, load.running, load.paused, load.open_tickets, load.open_sends) == (0, 0, 0, 0, 0)
    engine.check_integrity()


class TestHits:
    @pytest.mark.parametrize("kind", list(SequenceKind))
    @pytest.mark.parametrize(
        ("length", "cached"), [(1, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32), (100, 96)]
    )
    def test_a_repeated_prompt_computes_its_last_block_only(
        self, kind: SequenceKind, length: int, cached: int
    ) -> None:
        runner = FakeRunner()
        engine = make_engine(runner, budget=24, chunk=24)
        assert cached_tokens(engine, request("a", prompt_of(0, length)), kind) == 0
        before = runner.computed
        assert cached_tokens(engine, request("b", prompt_of(0, length)), kind) == cached
        assert runner.computed - before == length - cached + (7 if kind is GENERATE else 0)
        assert engine.load().cached_tokens == cached
        assert engine.load().recomputed_tokens == {"preempt": 0, "rebuild": 0, "revoked": 0, "replay": 0}
        at_rest(engine)

    def test_as_far_as_the_prompts_agree(self) -> None:
        engine = make_engine(FakeRunner())
        assert cached_tokens(engine, request("a", prompt_of(0, 70, 20, branch=1))) == 0
        assert cached_tokens(engine, request("b", prompt_of(0, 70, 20, branch=2))) == 64
        assert cached_tokens(engine, request("c", prompt_of(0, 40, 50, branch=3))) == 32
        assert cached_tokens(engine, request("d", prompt_of(0, 70, 20, branch=2))) == 80
        assert cached_tokens(engine, request("e", prompt_of(1, 70))) == 0

    def test_of_generated_tokens_too(self) -> None:
        """The next turn of a conversation: prompt and answer, and a new question."""
        runner = FakeRunner()
        engine = make_engine(runner)
        first = request("a", prompt_of(0, 30), 40)
        assert cached_tokens(engine, first) == 0
        answer = oracle(runner, first)[0]
        assert cached_tokens(engine, request("b", [*first.prompt, *answer, 1, 2, 3])) == 64, (
            "the last is not computed"
        )

    def test_while_the_first_is_still_running(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        first, second = request("a", prompt_of(0, 40), 30), request("b", prompt_of(0, 40), 30)
        engine.add(first, GENERATE)
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        used = 64 - engine.load().free_blocks
        engine.add(second, GENERATE)
        result = step(engine)
        assert result is not None
        assert [stats.cached_tokens for stats in result.prefilled] == [32]
        assert 64 - engine.load().free_blocks == used + 1, "the full blocks are shared"
        tokens += [*result.tokens, *run(engine)]
        for spec in (first, second):
            assert tokens_of(tokens, spec) == oracle(runner, spec)[0]
        at_rest(engine)

    def test_while_the_first_is_still_being_computed(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner, budget=40, chunk=20)
        first, second = request("a", prompt_of(0, 100)), request("b", prompt_of(0, 100))
        engine.add(first, GENERATE)
        for _ in range(3):
            step(engine)
        engine.add(second, GENERATE)
        tokens = run(engine)
        assert engine.load().cached_tokens == 48, "what was full when it got its blocks"
        for spec in (first, second):
            assert tokens_of(tokens, spec) == oracle(runner, spec)[0]

    def test_two_at_once_compute_the_same_and_one_copy_is_kept(self) -> None:
        engine = make_engine(FakeRunner(), budget=200)
        specs = [request(name, prompt_of(0, 64), 4) for name in "ab"]
        for spec in specs:
            engine.add(spec, GENERATE)
        run(engine)
        assert engine.load().cached_tokens == 0
        assert engine.load().cached_blocks == 4
        at_rest(engine)

    def test_a_send_that_still_reads_its_blocks_shares_them(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        first, second = request("a", prompt_of(0, 40)), request("b", prompt_of(0, 40))
        engine.add(first, PREFILL)
        run(engine)
        table = engine.block_table(first.key)
        assert table is not None
        before = runner.cache.gather(0, 2, table, 0, 40).clone()
        engine.add(second, PREFILL)
        run(engine)
        shared = engine.block_table(second.key)
        assert shared is not None
        assert shared[:2] == table[:2]
        assert shared[2] != table[2]
        assert runner.cache.gather(0, 2, table, 0, 40).equal(before), "what is being sent is not written"
        engine.release_send(first.key)
        assert runner.cache.gather(0, 2, shared, 0, 40).equal(before)
        engine.release_send(second.key)
        at_rest(engine)
        assert cached_tokens(engine, request("c", prompt_of(0, 40))) == 32, "when no send is left"

    def test_salts_keep_requests_apart(self) -> None:
        engine = make_engine(FakeRunner())
        assert cached_tokens(engine, request("a", prompt_of(0, 40), salt="x")) == 0
        assert cached_tokens(engine, request("b", prompt_of(0, 40), salt="y")) == 0
        assert cached_tokens(engine, request("c", prompt_of(0, 40))) == 0
        assert cached_tokens(engine, request("d", prompt_of(0, 40), salt="x")) == 32

    def test_another_model_has_other_names(self) -> None:
        engines = [make_engine(FakeRunner(vocab_size=size)) for size in (250, 251)]
        for engine in engines:
            cached_tokens(engine, request("a", [1] * 20, vocab_size=250))
        assert not set(engines[0].cached_names()[0]) & set(engines[1].cached_names()[0])

    def test_without_a_prefix_cache_nothing_is_kept(self) -> None:
        engine = make_engine(FakeRunner(), prefix_cache=False)
        for name in "ab":
            assert cached_tokens(engine, request(name, prompt_of(0, 40))) == 0
        ticket = engine.reserve("t", request("c", prompt_of(0, 40)))
        assert ticket is not None
        assert ticket.prefix_tokens == 0
        engine.release_ticket("t")
        assert engine.load().cached_blocks == 0
        assert engine.cache_events(0).events == ()
        at_rest(engine)

    def test_queued_tokens_are_those_that_will_be_computed(self) -> None:
        engine = make_engine(FakeRunner(num_blocks=8), max_num_seqs=1)
        cached_tokens(engine, request("a", prompt_of(0, 80)))
        engine.add(request("running", 10, 30), GENERATE)
        step(engine)
        engine.add(request("b", prompt_of(0, 80)), GENERATE)
        step(engine)
        assert engine.load().queued_prefill_tokens == 16

    @settings(max_examples=40, deadline=None)
    @given(
        prompts=st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 20), st.integers(0, 3)), max_size=12
        ),
        num_blocks=st.integers(8, 40),
        budget=st.integers(4, 50),
    )
    def test_tokens_are_the_same_with_and_without(
        self, prompts: list[tuple[int, int, int, int]], num_blocks: int, budget: int
    ) -> None:
        answers = []
        for prefix_cache in (True, False):
            runner = FakeRunner(num_blocks=num_blocks, block_size=8)
            engine = make_engine(runner, budget=budget, max_num_seqs=4, chunk=17, prefix_cache=prefix_cache)
            specs = [
                request(f"r{i}", prompt_of(family, shared, own, branch=branch), 1 + (i * 5) % 4)
                for i, (family, shared, own, branch) in enumerate(prompts)
                if shared + own + 4 <= num_blocks * 8
            ]
            for spec in specs:
                engine.add(spec, GENERATE)
            tokens = run(engine)
            answers.append([tokens_of(tokens, spec) for spec in specs])
            at_rest(engine)
        assert answers[0] == answers[1]


class TestMemory:
    def test_cached_blocks_are_free_and_told_apart(self) -> None:
        engine = make_engine(FakeRunner(num_blocks=10))
        cached_tokens(engine, request("a", prompt_of(0, 40), 9))
        load = engine.load()
        assert (load.free_blocks, load.cached_blocks) == (10, 3)

    def test_the_cache_gives_way_to_requests_tails_first(self) -> None:
        runner = FakeRunner(num_blocks=8)
        engine = make_engine(runner, budget=128, chunk=128)
        cached_tokens(engine, request("a", prompt_of(0, 80), 2))
        assert engine.load().cached_blocks == 5
        assert cached_tokens(engine, request("big", prompt_of(1, 90), 2)) == 0
        assert cached_tokens(engine, request("b", prompt_of(0, 80), 2)) == 32
        at_rest(engine)

    def test_what_is_admitted_in_one_step_does_not_evict_what_the_other_counts_on(self) -> None:
        runner = FakeRunner(num_blocks=10)
        engine = make_engine(runner, budget=200, chunk=200)
        cached_tokens(engine, request("a", prompt_of(0, 80), 2))
        stranger, friend = request("s", prompt_of(1, 70), 2), request("f", prompt_of(0, 70), 2)
        engine.add(stranger, GENERATE)
        engine.add(friend, GENERATE)
        result = step(engine)
        assert result is not None
        assert {stats.key: stats.cached_tokens for stats in result.prefilled} == {stranger.key: 0, friend.key: 64}
        tokens = [*result.tokens, *run(engine)]
        for spec in (stranger, friend):
            assert tokens_of(tokens, spec) == oracle(runner, spec)[0]

    def test_pinned_blocks_are_not_evicted(self) -> None:
        runner, there = FakeRunner(num_blocks=8), FakeRunner()
        engine = make_engine(runner, max_reserved_fraction=1.0)
        cached_tokens(engine, request("a", prompt_of(0, 48), 2))
        spec = request("b", prompt_of(0, 50), 6)
        ticket = engine.reserve("t", spec)
        assert ticket is not None
        assert ticket.prefix_tokens == 48
        for i in range(3):
            assert cached_tokens(engine, request(f"p{i}", prompt_of(9 + i, 50), 2)) == 0
            engine.check_integrity()
        first = prefill_and_transfer(make_engine(there), there, runner, spec, ticket.blocks, ticket.prefix_tokens)
        engine.commit_ticket("t", spec, first)
        assert tokens_of(run(engine), spec) == oracle(runner, spec)[0]
        at_rest(engine)

    def test_a_preempted_sequence_takes_back_what_is_left_of_it(self) -> None:
        counts = []
        for prefix_cache in (True, False):
            runner = FakeRunner(num_blocks=9, block_size=8)
            engine = make_engine(runner, prefix_cache=prefix_cache)
            specs = [request("old", 8, 30), request("young", 40, 20)]
            for spec in specs:
                engine.add(spec, GENERATE)
            tokens = run(engine)
            for spec in specs:
                assert tokens_of(tokens, spec) == oracle(runner, spec)[0]
            counts.append(engine.load().recomputed_tokens["preempt"])
            assert engine.load().cached_tokens == 0, "its own blocks are no hit of its prompt"
            at_rest(engine)
        assert 0 < counts[0] < counts[1] / 2

    def test_preemption_of_sequences_that_share_blocks(self) -> None:
        runner = FakeRunner(num_blocks=10, block_size=8)
        engine = make_engine(runner, budget=32, max_num_seqs=4)
        specs = [request(f"r{i}", prompt_of(0, 17, i, branch=i), 30) for i in range(4)]
        engine.add(specs[0], GENERATE)
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        for spec in specs[1:]:
            engine.add(spec, GENERATE)
        tokens += run(engine)
        for spec in specs:
            assert tokens_of(tokens, spec) == oracle(runner, spec)[0]
        load = engine.load()
        assert load.preemptions > 0
        assert load.cached_tokens == 3 * 16
        at_rest(engine)

    def test_whoever_gives_way_frees_what_others_do_not_hold(self) -> None:
        """Two need a block in the same step, and a third holds three, of which they share two."""
        runner = FakeRunner(num_blocks=7, block_size=4)
        engine = make_engine(runner)
        specs = [request("a", prompt_of(0, 8), 20)]
        specs += [request(name, prompt_of(0, 8, 1, branch=i), 19) for i, name in enumerate("bc")]
        engine.add(specs[0], GENERATE)
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        for spec in specs[1:]:
            engine.add(spec, GENERATE)
        while engine.load().preemptions == 0:
            tokens += step(engine).tokens  # type: ignore[union-attr]
        assert [engine.block_table(spec.key) is None for spec in specs] == [False, False, True]
        tokens += run(engine)
        for spec in specs:
            assert tokens_of(tokens, spec) == oracle(runner, spec)[0]
        at_rest(engine)

    def test_preemption_of_one_that_goes_on_where_another_is(self) -> None:
        runner = FakeRunner(num_blocks=6, block_size=4)
        engine = make_engine(runner, budget=32, max_num_seqs=3)
        old = request("old", prompt_of(1, 3), 20)
        first = request("first", prompt_of(0, 5), 18)
        again = request("again", [*first.prompt, *oracle(runner, first)[0][:4]], 14)
        engine.add(old, GENERATE)
        engine.add(first, GENERATE)
        tokens = []
        for _ in range(4):
            tokens += step(engine).tokens  # type: ignore[union-attr]
        engine.add(again, GENERATE)
        tokens += run(engine)
        for spec in (old, first, again):
            assert tokens_of(tokens, spec) == oracle(runner, spec)[0]
        assert engine.load().preemptions > 0
        at_rest(engine)


class TestAborts:
    @pytest.mark.parametrize("kind", list(SequenceKind))
    @pytest.mark.parametrize("steps", range(5))
    def test_of_one_that_shares_blocks_in_every_state(self, kind: SequenceKind, steps: int) -> None:
        runner = FakeRunner()
        engine = make_engine(runner, budget=16)
        owner, spec = request("owner", prompt_of(0, 50), 30), request("r", prompt_of(0, 80), 30, window=2)
        engine.add(owner, GENERATE)
        tokens = []
        for _ in range(4):
            tokens += step(engine).tokens  # type: ignore[union-attr]
        engine.add(spec, kind)
        for _ in range(steps):
            result = step(engine)
            assert result is not None
            tokens += result.tokens
        assert engine.abort(spec.key) == (kind is GENERATE or steps < 3)
        engine.check_integrity()
        engine.release_send(spec.key)
        tokens += run(engine)
        assert tokens_of(tokens, owner) == oracle(runner, owner)[0]
        at_rest(engine)

    @pytest.mark.parametrize("kind", list(SequenceKind))
    def test_under_the_forward_pass(self, kind: SequenceKind) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        cached_tokens(engine, request("a", prompt_of(0, 40)))
        spec = request("r", prompt_of(0, 60))
        engine.add(spec, kind)
        plan = engine.schedule()
        assert plan is not None
        assert plan.chunks[0].token_start == 32
        engine.abort(spec.key)
        engine.release_send(spec.key)
        engine.check_integrity()
        assert engine.load().free_blocks == 60
        engine.apply(plan, engine.execute(plan))
        at_rest(engine)
        assert engine.load().cached_blocks == 2, "what the aborted step computed is not trusted"
        assert cached_tokens(engine, request("b", prompt_of(0, 60))) == 32

    @pytest.mark.parametrize("end", ["release", "commit", "commit_then_abort", "commit_to_the_end"])
    def test_a_ticket_unpins_its_prefix_when_it_ends(self, end: str) -> None:
        runner, there = FakeRunner(), FakeRunner()
        engine = make_engine(runner)
        cached_tokens(engine, request("a", prompt_of(0, 40)))
        spec = request("b", prompt_of(0, 60), 5)
        ticket = engine.reserve("t", spec)
        assert ticket is not None
        assert engine.load().free_blocks == 64 - 4
        assert engine.load().reserved_blocks == 2
        if end == "release":
            engine.release_ticket("t")
            engine.release_ticket("t")
        else:
            first = prefill_and_transfer(make_engine(there), there, runner, spec, ticket.blocks, ticket.prefix_tokens)
            engine.commit_ticket("t", spec, first)
            engine.check_integrity()
            if end == "commit_then_abort":
                assert engine.abort(spec.key)
            else:
                assert tokens_of(run(engine), spec) == oracle(runner, spec)[0]
        at_rest(engine)
        assert cached_tokens(engine, request("c", prompt_of(0, 60))) == (32 if end == "release" else 48)

    def test_a_step_that_raised_leaves_nothing_in_the_cache(self) -> None:
        engine = make_engine(FakeRunner(), budget=32)
        engine.add(request("a", prompt_of(0, 70)), GENERATE)
        step(engine)
        plan = engine.schedule()
        assert plan is not None
        engine.fail(plan, InternalError("out of memory"))
        at_rest(engine)
        assert engine.load().cached_blocks == 2

    def test_a_model_that_yields_no_token_leaves_nothing_in_the_cache(self) -> None:
        """What made its logits useless may be the KV that it began with."""
        runner = FakeRunner()
        engine = make_engine(runner)
        cached_tokens(engine, request("a", prompt_of(0, 40)))
        friend = request("friend", prompt_of(0, 40), 20)
        engine.add(friend, GENERATE)
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        engine.add(request("bad", prompt_of(0, 60)), GENERATE)
        plan = engine.schedule()
        assert plan is not None
        ids = engine.execute(plan).token_ids.copy()
        ids[[chunk.key.request_id for chunk in plan.chunks].index("bad")] = runner.model.vocab_size
        result = engine.apply(plan, StepOutput(np.asarray(ids)))
        assert [key.request_id for key, _ in result.rejected] == ["bad"]
        engine.check_integrity()
        assert engine.load().cached_blocks == 0
        tokens += [*result.tokens, *run(engine)]
        assert tokens_of(tokens, friend) == oracle(runner, friend)[0]
        at_rest(engine)


class TestTickets:
    @pytest.mark.parametrize("held", [0, 5, 16, 40, 48, 49, 60])
    @pytest.mark.parametrize("block_sizes", [(8, 16), (16, 8), (32, 16), (16, 16)])
    def test_only_the_rest_is_transferred(self, held: int, block_sizes: tuple[int, int]) -> None:
        here, there = FakeRunner(block_size=block_sizes[0]), FakeRunner(block_size=block_sizes[1])
        engine, source = make_engine(here), make_engine(there, budget=5, max_num_seqs=5)
        if held:
            cached_tokens(engine, request("a", prompt_of(0, held), 1))
        spec = request("b", prompt_of(0, 49), 20, temperature=0.5, seed=11)
        ticket = engine.reserve("t", spec)
        assert ticket is not None
        size = block_sizes[0]
        assert ticket.prefix_tokens == min(held // size, 48 // size) * size
        before = here.computed
        first = prefill_and_transfer(source, there, here, spec, ticket.blocks, ticket.prefix_tokens)
        engine.commit_ticket("t", spec, first)
        assert tokens_of(run(engine), spec) == oracle(here, spec)[0]
        assert here.computed - before == 19
        assert engine.load().cached_tokens == 0, "KV that was transferred is no prefix hit"
        at_rest(engine)
        assert cached_tokens(engine, request("c", prompt_of(0, 49), 1)) == 48 // size * size, "it is one for the next"

    def test_two_tickets_and_a_sequence_hold_the_same_prefix(self) -> None:
        here, there = FakeRunner(), FakeRunner()
        engine = make_engine(here)
        cached_tokens(engine, request("a", prompt_of(0, 40)))
        specs = [request(name, prompt_of(0, 32, 8, branch=i), 4) for i, name in enumerate("bcd")]
        tickets = [engine.reserve(spec.key.request_id, spec) for spec in specs[:2]]
        engine.add(specs[2], GENERATE)
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        assert engine.load().free_blocks == 64 - 2 - 3
        assert engine.load().reserved_blocks == 2
        for spec, ticket in zip(specs, tickets, strict=False):
            assert ticket is not None
            first = prefill_and_transfer(make_engine(there), there, here, spec, ticket.blocks, ticket.prefix_tokens)
            engine.commit_ticket(spec.key.request_id, spec, first)
            engine.check_integrity()
        tokens += run(engine)
        for spec in specs:
            assert tokens_of(tokens, spec) == oracle(here, spec)[0]
        at_rest(engine)

    def test_the_reserved_fraction_bounds_fresh_blocks_only(self) -> None:
        engine = make_engine(FakeRunner(num_blocks=16), max_reserved_fraction=0.25)
        cached_tokens(engine, request("a", prompt_of(0, 96)))
        for i in range(4):
            assert engine.reserve(f"t{i}", request(f"t{i}", prompt_of(0, 97))) is not None
        assert engine.reserve("t4", request("t4", prompt_of(0, 97))) is None
        engine.check_integrity()

    def test_a_prefix_that_would_be_pinned_counts_as_memory(self) -> None:
        engine = make_engine(FakeRunner(num_blocks=8), max_reserved_fraction=1.0)
        cached_tokens(engine, request("a", prompt_of(0, 96)))
        engine.add(request("running", 10, 50), GENERATE)
        step(engine)
        assert engine.load().free_blocks == 7
        assert engine.reserve("t", request("t", prompt_of(0, 96))) is None, "7 blocks, and one is to be left"
        assert engine.reserve("t", request("t", prompt_of(0, 90))) is not None
        engine.check_integrity()

    def test_commit_for_other_tokens_is_refused(self) -> None:
        engine = make_engine(FakeRunner())
        spec = request("b", prompt_of(0, 40))
        assert engine.reserve("t", spec) is not None
        for other in (request("b", prompt_of(1, 40)), request("b", prompt_of(0, 40), salt="x")):
            with pytest.raises(TicketError, match="other tokens"):
                engine.commit_ticket("t", other, 1)
        engine.check_integrity()
        engine.commit_ticket("t", spec, 1)

    def test_lossy_kv_never_answers_a_lookup(self) -> None:
        """The KV here is rubbish, so that anybody who uses it gets other tokens than the model's."""
        runner = FakeRunner()
        engine = make_engine(runner)
        cached_tokens(engine, request("a", prompt_of(0, 32)))
        lossy = request("lossy", prompt_of(0, 70), 40, window=100)
        ticket = engine.reserve("t", lossy)
        assert ticket is not None
        assert ticket.prefix_tokens == 32
        values = runner.cache.gather(0, 2, ticket.blocks, 32, 38)
        runner.cache.scatter(0, ticket.blocks, 32, values * 0 + 3)
        engine.commit_ticket("t", lossy, 1, exact=False)
        engine.check_integrity()
        for _ in range(12):
            step(engine)
        assert engine.load().cached_blocks == 2
        assert cached_tokens(engine, request("b", prompt_of(0, 70))) == 32
        run(engine)
        at_rest(engine)
        assert cached_tokens(engine, request("c", prompt_of(0, 70))) == 64, "from b"

    def test_a_preempted_one_that_came_lossy_is_exact_from_then_on(self) -> None:
        runner = FakeRunner(num_blocks=6, block_size=8)
        engine = make_engine(runner, max_reserved_fraction=1.0)
        old, lossy = request("old", prompt_of(1, 6), 40), request("lossy", prompt_of(0, 18), 20)
        engine.add(old, GENERATE)
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        ticket = engine.reserve("t", lossy)
        assert ticket is not None
        engine.commit_ticket("t", lossy, 5, exact=False)
        tokens += run(engine)
        assert engine.load().preemptions == 1
        assert tokens_of(tokens, old) == oracle(runner, old)[0]
        at_rest(engine)
        assert cached_tokens(engine, request("again", prompt_of(0, 18), 2)) == 16

    @pytest.mark.parametrize(("limit", "here"), [(64, True), (11, True), (10, False), (0, False)])
    def test_a_small_rest_is_offered_to_be_run_here(self, limit: int, here: bool) -> None:
        runner = FakeRunner()
        engine = make_engine(runner, local_prefill_tokens=limit)
        cached_tokens(engine, request("a", prompt_of(0, 50)))
        ticket = engine.reserve("t", request("b", prompt_of(0, 48, 11)))
        assert ticket is not None
        assert ticket[1:] == (48, here)
        engine.release_ticket("t")
        assert cached_tokens(engine, request("b", prompt_of(0, 48, 11))) == 48, "as `generate` does it"
        nothing_held = engine.reserve("u", request("c", prompt_of(3, 10)))
        assert nothing_held is not None
        assert not nothing_held.run_here
        engine.release_ticket("u")

    def test_small_rests_do_not_pile_up(self) -> None:
        engine = make_engine(FakeRunner())
        cached_tokens(engine, request("a", prompt_of(0, 50)))
        engine.add(request("queued", prompt_of(5, 60)), GENERATE)
        ticket = engine.reserve("t", request("b", prompt_of(0, 48, 11)))
        assert ticket is not None
        assert not ticket.run_here


class TestEvents:
    def test_follow_the_cache(self) -> None:
        engine = make_engine(FakeRunner(num_blocks=8))
        known: set[bytes] = set()
        last = 0
        for i in range(30):
            cached_tokens(engine, request(f"r{i}", prompt_of(i % 4, 40, i), 3))
            first, events, gap = engine.cache_events(last)
            assert (first, gap) == (last, False)
            last += len(events)
            for added, name in events:
                assert added != (name in known)
                (known.add if added else known.remove)(name)
            assert known == set(engine.cached_names()[0])
            assert len(known) == engine.load().cached_blocks
