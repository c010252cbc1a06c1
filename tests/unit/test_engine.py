"""The engine on the fake runner: every rule of requests, tickets, sends and steps."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from engine.engine import Engine, SequenceKind, TokenOut
from engine.step import StepOutput
from pdcore.clock import ManualClock
from pdcore.errors import InternalError, InvalidRequest, TicketError
from pdcore.types import FinishReason, RequestKey, RequestSpec
from tests.support.engine_kit import make_engine, prefill_and_transfer, request, run, step, tokens_of
from tests.support.fake_runner import FakeRunner, oracle

GENERATE, PREFILL = SequenceKind.GENERATE, SequenceKind.PREFILL


def assert_empty(engine: Engine) -> None:
    load = engine.load()
    assert (load.free_blocks, load.reserved_blocks) == (load.total_blocks, 0)
    assert (load.waiting, load.running, load.paused, load.queued_prefill_tokens) == (0, 0, 0, 0)
    engine.check_integrity()


class TestTokens:
    @pytest.mark.parametrize("prompt", range(1, 50))
    def test_every_prompt_length_modulo_the_block(self, prompt: int) -> None:
        runner = FakeRunner()
        engine = make_engine(runner, budget=17, chunk=17)
        spec = request("r", prompt, 20)
        engine.add(spec, GENERATE)
        assert tokens_of(run(engine), spec) == oracle(runner, spec)[0]
        assert_empty(engine)

    def test_first_chunk_ends_inside_a_block(self) -> None:
        runner = FakeRunner(block_size=16)
        engine = make_engine(runner, budget=17, chunk=17)
        spec = request("r", 20, 4)
        engine.add(spec, GENERATE)
        plan = engine.schedule()
        assert plan is not None
        (chunk,) = plan.chunks
        assert (chunk.token_start, chunk.token_end, chunk.is_prompt) == (0, 17, True)
        assert chunk.block_ids == tuple(engine.block_table(spec.key) or ())
        assert engine.apply(plan, engine.execute(plan)).tokens == ()
        assert tokens_of(run(engine), spec) == oracle(runner, spec)[0]

    def test_many_prompts_at_once_each_get_their_own(self) -> None:
        runner = FakeRunner(num_blocks=400, max_num_seqs=16)
        engine = make_engine(runner, budget=100, max_num_seqs=16, chunk=32)
        specs = [request(f"r{i}", 1 + i % 37, 3, temperature=i % 2, seed=i) for i in range(200)]
        for spec in specs:
            engine.add(spec, GENERATE)
        tokens = run(engine)
        for spec in specs:
            assert tokens_of(tokens, spec) == oracle(runner, spec)[0]
        assert_empty(engine)

    def test_finish_reasons(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        free_run = oracle(runner, request("r", 10, 8))[0]
        for spec, reason in (
            (request("r", 10, 8), FinishReason.LENGTH),
            (request("r", 10, 8, stop=[free_run[3]]), FinishReason.STOP),
            (request("r", 10, 8, stop=[free_run[0]]), FinishReason.STOP),
            (request("r", 10, 1), FinishReason.LENGTH),
            (request("r", 10, 1, stop=[free_run[0]]), FinishReason.STOP),
        ):
            engine.add(spec, GENERATE)
            tokens = run(engine)
            assert (tokens_of(tokens, spec), tokens[-1].finish) == oracle(runner, spec)
            assert tokens[-1].finish is reason
            assert_empty(engine)

    def test_stop_tokens_are_forbidden_before_min_tokens(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        stop = oracle(runner, request("r", 10, 8))[0][1]
        spec = request("r", 10, 8, stop=[stop], min_tokens=3)
        engine.add(spec, GENERATE)
        tokens = tokens_of(run(engine), spec)
        assert tokens == oracle(runner, spec)[0]
        assert len(tokens) >= 3

    def test_seed_and_position_are_those_of_the_request(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        a, b = (
            request("a", [1, 2, 3], temperature=1.0, seed=2**64 - 1),
            request("b", [1, 2, 3], temperature=1.0, seed=5),
        )
        engine.add(a, GENERATE)
        engine.add(b, GENERATE)
        tokens = run(engine)
        assert tokens_of(tokens, a) == oracle(runner, a)[0]
        assert tokens_of(tokens, b) == oracle(runner, b)[0]
        assert tokens_of(tokens, a) != tokens_of(tokens, b)

    def test_delivered_tokens_are_forced_and_counted_as_replay(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        forced = request("r", 10, 8, delivered=[9, 8, 7])
        engine.add(forced, GENERATE)
        tokens = run(engine)
        assert tokens[0].index == 3
        assert tokens_of(tokens, forced) == oracle(runner, forced)[0]
        assert len(tokens) == 5
        assert engine.load().recomputed_tokens == {"preempt": 0, "rebuild": 0, "revoked": 0, "replay": 13}

    def test_a_rebuild_is_counted_as_one(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        again = replace(request("r", 10, 8), rebuild=True)
        engine.add(again, GENERATE)
        assert tokens_of(run(engine), again) == oracle(runner, again)[0]
        assert engine.load().recomputed_tokens == {"preempt": 0, "rebuild": 10, "revoked": 0, "replay": 0}

    def test_what_was_lost_with_a_ticket_is_counted_as_that(self) -> None:
        engine = make_engine(FakeRunner())
        engine.add(replace(request("r", 10, 8, delivered=[9]), revoked=True), GENERATE)
        run(engine)
        assert engine.load().recomputed_tokens == {"preempt": 0, "rebuild": 0, "revoked": 11, "replay": 0}

    def test_a_replay_goes_on_with_the_same_tokens(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        whole = request("r", 10, 8, temperature=0.7, seed=3)
        expected = oracle(runner, whole)[0]
        for done in range(1, 8):
            again = request("r", 10, 8, temperature=0.7, seed=3, delivered=expected[:done])
            engine.add(again, GENERATE)
            assert tokens_of(run(engine), again) == expected[done:]

    def test_nothing_is_recomputed_in_the_normal_path(self) -> None:
        engine = make_engine(FakeRunner(), budget=32)
        for i in range(12):
            engine.add(request(f"r{i}", 20 + i, 10), GENERATE)
        run(engine)
        assert engine.load().recomputed_tokens == {"preempt": 0, "rebuild": 0, "revoked": 0, "replay": 0}
        assert engine.load().preemptions == 0

    def test_a_model_that_yields_no_token_ends_the_request_only(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        bad, good = request("bad", 5), request("good", 5)
        engine.add(bad, GENERATE)
        engine.add(good, GENERATE)
        plan = engine.schedule()
        assert plan is not None
        output = engine.execute(plan)
        row = [chunk.key for chunk in plan.chunks].index(bad.key)
        ids = output.token_ids.copy()
        ids[row] = runner.model.vocab_size
        result = engine.apply(plan, StepOutput(ids))
        ((key, error),) = result.rejected
        assert key == bad.key
        assert isinstance(error, InternalError)
        assert tokens_of([*result.tokens, *run(engine)], good) == oracle(runner, good)[0]
        assert_empty(engine)


class TestBadRequests:
    @pytest.mark.parametrize(
        ("spec", "field"),
        [
            (request("r", []), "prompt"),
            (request("r", [0, 256]), "prompt"),
            (request("r", [-1]), "prompt"),
            (request("r", 10, 0), "sampling.max_tokens"),
            (request("r", 10, 91), "prompt"),
            (request("r", 100, 1), "prompt"),
            (request("r", 10, stop=[256]), "sampling.stop_token_ids"),
            (request("r", 10, seed=-1), "sampling.seed"),
            (request("r", 10, seed=2**64), "sampling.seed"),
            (request("r", 10, temperature=float("nan")), "sampling.temperature"),
            (request("r", 10, temperature=float("inf")), "sampling.temperature"),
            (request("r", 10, temperature=-0.5), "sampling.temperature"),
            (request("r", 10, top_k=-1), "sampling.top_k"),
            (request("r", 10, top_k=2**32 - 1), "sampling.top_k"),
            (request("r", 10, top_p=0.0), "sampling.top_p"),
            (request("r", 10, top_p=float("nan")), "sampling.top_p"),
            (request("r", 10, min_p=1.0), "sampling.min_p"),
            (request("r", 10, min_p=float("nan")), "sampling.min_p"),
            (request("r", 10, min_tokens=-1), "sampling.min_tokens"),
            (request("r", 10, window=0), "token_window"),
            (request("r", 10, 3, delivered=[1, 2, 3]), "delivered"),
            (request("r", 10, 4, delivered=[256]), "delivered"),
            (request("r", 10, 4, delivered=[7], stop=[7]), "delivered"),
        ],
    )
    @pytest.mark.parametrize("kind", list(SequenceKind))
    def test_are_refused_naming_the_field(self, spec: RequestSpec, field: str, kind: SequenceKind) -> None:
        engine = make_engine(FakeRunner(), max_model_len=100)
        with pytest.raises(InvalidRequest) as refused:
            engine.add(spec, kind)
        assert refused.value.field == field
        assert not engine.has_work()
        assert_empty(engine)

    def test_the_longest_that_fits_runs_and_one_more_is_refused(self) -> None:
        runner = FakeRunner(num_blocks=3, block_size=8)
        engine = make_engine(runner)
        with pytest.raises(InvalidRequest, match="4 KV blocks"):
            engine.add(request("r", 20, 6), GENERATE)
        spec = request("r", 20, 5)  # the last of 25 tokens is never in the cache
        engine.add(spec, GENERATE)
        assert tokens_of(run(engine), spec) == oracle(runner, spec)[0]

    def test_a_prefill_needs_blocks_for_its_prompt_only(self) -> None:
        engine = make_engine(FakeRunner(num_blocks=3, block_size=8))
        engine.add(request("r", 24, 100), PREFILL)
        (token,) = run(engine)
        assert token.finish is None

    def test_the_same_attempt_twice(self) -> None:
        engine = make_engine(FakeRunner())
        spec = request("r", 10)
        engine.add(spec, PREFILL)
        with pytest.raises(InvalidRequest, match="already here"):
            engine.add(spec, GENERATE)
        run(engine)
        with pytest.raises(InvalidRequest, match="already here"):  # the send session still holds its blocks
            engine.add(spec, GENERATE)
        engine.release_send(spec.key)
        engine.add(spec, GENERATE)


class TestPrefillSequences:
    def test_leave_after_one_token_and_keep_their_blocks_for_the_send(self) -> None:
        clock = ManualClock()
        runner = FakeRunner()
        engine = make_engine(runner, budget=16, clock=clock)
        spec = request("r", 40, 8)
        engine.add(spec, PREFILL)
        clock.advance(2.0)
        stats = None
        tokens: list[TokenOut] = []
        while engine.has_work():
            plan = engine.schedule()
            assert plan is not None
            output = engine.execute(plan)
            clock.advance(0.5)
            result = engine.apply(plan, output)
            tokens.extend(result.tokens)
            stats = result.prefilled
        assert tokens == [TokenOut(spec.key, 0, oracle(runner, spec, 1)[0][0], None)]
        assert stats is not None
        assert stats[0].key == spec.key
        assert (stats[0].queued_s, stats[0].compute_s, stats[0].chunks) == (2.0, 1.5, 3)
        assert engine.load().step_ms == pytest.approx(500)
        table = engine.block_table(spec.key)
        assert table is not None
        assert len(table) == 3
        assert engine.load().free_blocks == 61
        assert engine.load().open_sends == 1
        engine.release_send(spec.key)
        engine.release_send(spec.key)
        assert engine.block_table(spec.key) is None
        assert_empty(engine)

    def test_finish_is_reported_if_the_first_token_ends_the_request(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        first = oracle(runner, request("r", 10))[0][0]
        for spec, reason in (
            (request("r", 10, 1), FinishReason.LENGTH),
            (request("r", 10, 9, stop=[first]), FinishReason.STOP),
        ):
            engine.add(spec, PREFILL)
            assert run(engine) == [TokenOut(spec.key, 0, first, reason)]
            engine.release_send(spec.key)
            assert_empty(engine)

    def test_a_replay_reports_the_next_index(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        spec = request("r", 10, 9, delivered=[4, 5])
        engine.add(spec, PREFILL)
        plan = engine.schedule()
        assert plan is not None
        assert plan.chunks[0].token_end == 12
        assert plan.chunks[0].is_prompt
        (token,) = engine.apply(plan, engine.execute(plan)).tokens
        assert (token.index, token.token_id) == (2, oracle(runner, spec, 1)[0][0])
        assert engine.load().recomputed_tokens["replay"] == 12

    def test_abort_leaves_the_blocks_to_the_send(self) -> None:
        engine = make_engine(FakeRunner(), budget=8)
        spec = request("r", 40)
        engine.add(spec, PREFILL)
        step(engine)
        assert engine.abort(spec.key)
        assert not engine.has_work()
        assert engine.load().free_blocks == 61
        engine.check_integrity()
        engine.release_send(spec.key)
        assert_empty(engine)

    def test_abort_before_admission_leaves_nothing(self) -> None:
        engine = make_engine(FakeRunner())
        engine.add(request("r", 40), PREFILL)
        assert engine.abort(RequestKey("r", 0))
        assert_empty(engine)

    def test_a_send_that_fails_early_frees_when_the_sequence_ends(self) -> None:
        engine = make_engine(FakeRunner(), budget=8)
        spec = request("r", 40)
        engine.add(spec, PREFILL)
        step(engine)
        engine.release_send(spec.key)
        assert engine.load().free_blocks == 61
        engine.abort(spec.key)
        assert_empty(engine)

    def test_a_full_pool_queues_and_goes_on_when_sends_end(self) -> None:
        runner = FakeRunner(num_blocks=3)
        engine = make_engine(runner)
        first, second = request("a", 40), request("b", 40)
        engine.add(first, PREFILL)
        engine.add(second, PREFILL)
        step(engine)
        assert engine.schedule() is None
        assert engine.has_work()
        engine.release_send(first.key)
        assert tokens_of(run(engine), second) == oracle(runner, second, 1)[0]


class TestAbort:
    @pytest.mark.parametrize("steps", range(6))
    def test_in_every_state(self, steps: int) -> None:
        engine = make_engine(FakeRunner(), budget=16)
        spec = request("r", 40, 30, window=2)
        engine.add(spec, GENERATE)
        for _ in range(steps):
            step(engine)
        assert engine.abort(spec.key)
        assert not engine.abort(spec.key)
        assert_empty(engine)

    @pytest.mark.parametrize("kind", list(SequenceKind))
    def test_while_executing_frees_nothing_under_the_forward(self, kind: SequenceKind) -> None:
        runner = FakeRunner(num_blocks=4)
        engine = make_engine(runner, max_reserved_fraction=1.0)
        spec, other = request("r", 40), request("other", 3)
        engine.add(spec, kind)
        plan = engine.schedule()
        assert plan is not None
        assert engine.abort(spec.key)
        engine.release_send(spec.key)
        engine.release_send(spec.key)
        engine.check_integrity()
        assert engine.load().free_blocks == 1
        assert engine.reserve_ticket("t", 20) is None, "blocks that the forward writes were given away"
        with pytest.raises(InvalidRequest):
            engine.add(spec, kind)
        engine.add(other, GENERATE)
        result = engine.apply(plan, engine.execute(plan))
        assert result.tokens == ()
        assert result.prefilled == ()
        engine.check_integrity()
        assert engine.load().free_blocks == 4
        assert tokens_of(run(engine), other) == oracle(runner, other)[0]

    def test_of_a_send_while_another_step_executes(self) -> None:
        engine = make_engine(FakeRunner())
        spec, other = request("r", 40), request("other", 3)
        engine.add(spec, PREFILL)
        run(engine)
        engine.add(other, GENERATE)
        plan = engine.schedule()
        assert plan is not None
        engine.release_send(spec.key)
        assert engine.load().free_blocks == 63, "blocks that no forward writes must come back at once"
        engine.apply(plan, engine.execute(plan))

    def test_takes_the_echo_with_it(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        spec = request("r", 10)
        assert engine.reserve_ticket("t", 10) is not None
        engine.commit_ticket("t", spec, 1)
        engine.abort(spec.key)
        assert not engine.has_work()
        assert engine.schedule() is None
        assert_empty(engine)


class TestCredit:
    def test_a_sequence_pauses_with_its_blocks_until_credit_comes(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        spec = request("r", 10, 10, window=3)
        engine.add(spec, GENERATE)
        tokens = run(engine)
        assert len(tokens) == 3
        assert engine.schedule() is None
        assert engine.load().paused == 1
        assert engine.load().free_blocks == 63
        engine.add_credit(spec.key, 2)
        tokens += run(engine)
        assert len(tokens) == 5
        engine.add_credit(spec.key, 100)  # more than was used: no more than the window
        tokens += run(engine)
        assert len(tokens) == 8
        engine.add_credit(spec.key, 0)
        assert not engine.has_work()
        engine.add_credit(spec.key, 3)
        tokens += run(engine)
        assert tokens_of(tokens, spec) == oracle(runner, spec)[0]
        engine.add_credit(spec.key, 3)
        assert_empty(engine)

    def test_a_slow_reader_does_not_slow_others(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner, max_num_seqs=1)
        slow, quick = request("slow", 10, 10, window=1), request("quick", 10, 10)
        engine.add(slow, GENERATE)
        engine.add(quick, GENERATE)
        assert tokens_of(run(engine, 11), quick) == oracle(runner, quick)[0]

    def test_more_resumed_than_may_run_take_turns(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner, max_num_seqs=2)
        specs = [request(f"r{i}", 4, 9, window=1) for i in range(5)]
        tokens: list[TokenOut] = []
        for spec in specs:
            engine.add(spec, GENERATE)
            tokens += run(engine)
        for spec in specs:
            engine.add_credit(spec.key, 1)
        order = [token.key for token in run(engine, 3)]
        assert order == [spec.key for spec in specs]


class TestTickets:
    @pytest.mark.parametrize("prompt", [1, 7, 8, 9, 16, 31])
    @pytest.mark.parametrize("block_sizes", [(8, 16), (16, 8), (32, 16)])
    def test_transfer_and_go_on(self, prompt: int, block_sizes: tuple[int, int]) -> None:
        here, there = FakeRunner(block_size=block_sizes[0]), FakeRunner(block_size=block_sizes[1])
        engine, source = make_engine(here), make_engine(there, budget=5, max_num_seqs=5)
        spec = request("r", prompt, 20, temperature=0.5, seed=11)
        blocks = engine.reserve_ticket("t", prompt)
        assert blocks is not None
        assert engine.load().reserved_blocks == len(blocks) == here.geometry.blocks_for(prompt + 1)
        assert engine.load().open_tickets == 1
        first = prefill_and_transfer(source, there, here, spec, blocks)
        engine.commit_ticket("t", spec, first)
        engine.check_integrity()
        assert engine.load().reserved_blocks == 0
        engine.release_ticket("t")  # late: the ticket is gone, the sequence stays
        assert tokens_of(run(engine), spec) == oracle(here, spec)[0]
        assert here.computed == 19, "a decode worker computes generated tokens only"
        assert engine.load().recomputed_tokens == {"preempt": 0, "rebuild": 0, "revoked": 0, "replay": 0}
        assert_empty(engine)
        assert_empty(source)

    def test_the_echo_comes_once_with_the_right_index_and_uses_the_window(self) -> None:
        runner, there = FakeRunner(), FakeRunner()
        engine, source = make_engine(runner), make_engine(there)
        spec = request("r", 10, 9, delivered=[3, 4], window=1)
        blocks = engine.reserve_ticket("t", 12)
        assert blocks is not None
        first = prefill_and_transfer(source, there, runner, spec, blocks)
        engine.commit_ticket("t", spec, first)
        engine.check_integrity()
        assert engine.load().paused == 1
        result = step(engine)
        assert result is not None
        assert result.tokens == (TokenOut(spec.key, 2, first, None),)
        assert runner.steps == 0, "there was news and nothing to compute"
        assert not engine.has_work()
        tokens = list(result.tokens)
        for _ in range(6):
            engine.add_credit(spec.key, 1)
            tokens += run(engine, 1)
        assert tokens_of(tokens, spec) == oracle(runner, spec)[0]

    def test_an_echo_precedes_the_token_of_the_same_step(self) -> None:
        runner, there = FakeRunner(), FakeRunner()
        engine = make_engine(runner)
        spec = request("r", 10)
        blocks = engine.reserve_ticket("t", 10)
        assert blocks is not None
        engine.commit_ticket("t", spec, prefill_and_transfer(make_engine(there), there, runner, spec, blocks))
        result = step(engine)
        assert result is not None
        assert [token.index for token in result.tokens] == [0, 1]

    @pytest.mark.parametrize("last", ["stop", "length"])
    def test_a_first_token_that_ends_the_request(self, last: str) -> None:
        engine = make_engine(FakeRunner())
        spec = request("r", 16, 1 if last == "length" else 5, stop=[77])
        assert engine.reserve_ticket("t", 16) is not None
        engine.commit_ticket("t", spec, 77 if last == "stop" else 76)
        assert engine.load().free_blocks == 64
        (token,) = run(engine)
        assert (token.index, token.finish) == (0, FinishReason(last))
        assert_empty(engine)

    def test_release_is_idempotent_and_commit_after_it_is_refused(self) -> None:
        engine = make_engine(FakeRunner())
        engine.reserve_ticket("t", 10)
        engine.release_ticket("t")
        engine.release_ticket("t")
        assert_empty(engine)
        with pytest.raises(TicketError, match="not open"):
            engine.commit_ticket("t", request("r", 10), 1)

    def test_misuse_is_refused_and_changes_nothing(self) -> None:
        engine = make_engine(FakeRunner())
        assert engine.reserve_ticket("t", 40) is not None
        with pytest.raises(TicketError, match="already open"):
            engine.reserve_ticket("t", 40)
        with pytest.raises(TicketError, match="blocks"):
            engine.commit_ticket("t", request("r", 60), 1)
        with pytest.raises(TicketError, match="blocks"):
            engine.commit_ticket("t", request("r", 10), 1)
        with pytest.raises(InvalidRequest, match="first_tokens"):
            engine.commit_ticket("t", request("r", 40), 256)
        assert engine.load().reserved_blocks == 3
        assert not engine.has_work()
        engine.check_integrity()
        engine.commit_ticket("t", request("r", 40), 1)

    def test_a_full_pool_refuses(self) -> None:
        engine = make_engine(FakeRunner(num_blocks=4), max_reserved_fraction=1.0)
        assert engine.reserve_ticket("a", 47) is not None
        assert engine.reserve_ticket("b", 16) is None
        assert engine.reserve_ticket("c", 15) is not None
        engine.check_integrity()

    def test_the_reserved_fraction_bounds_tickets(self) -> None:
        engine = make_engine(FakeRunner(num_blocks=8), max_reserved_fraction=0.5)
        assert engine.reserve_ticket("a", 47) is not None
        assert engine.reserve_ticket("b", 16) is None
        assert engine.reserve_ticket("c", 15) is not None

    def test_a_block_of_growth_is_left_to_each_running_sequence(self) -> None:
        engine = make_engine(FakeRunner(num_blocks=6), max_reserved_fraction=1.0)
        engine.add(request("a", 10, 50), GENERATE)
        engine.add(request("b", 10, 50), GENERATE)
        step(engine)
        assert engine.reserve_ticket("t", 40) is None
        assert engine.reserve_ticket("t", 30) is not None

    def test_are_revoked_before_anyone_is_preempted(self) -> None:
        runner = FakeRunner(num_blocks=6)
        asked: list[str] = []
        engine = make_engine(runner, max_reserved_fraction=1.0, on_pressure=asked.append)
        a, b = request("a", 10, 40), request("b", 4, 40)
        engine.add(a, GENERATE)
        engine.add(b, GENERATE)
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        assert engine.reserve_ticket("old", 10) is not None
        assert engine.reserve_ticket("young", 10) is not None
        while not asked:
            result = step(engine)
            assert result is not None
            tokens += result.tokens
        assert asked == ["young"]
        while (result := step(engine)) is not None:
            tokens += result.tokens
        assert asked == ["young", "old"], "revocation is asked for once"
        engine.release_ticket("young")
        engine.release_ticket("old")
        tokens += run(engine)
        assert engine.load().preemptions == 0
        assert tokens_of(tokens, a) == oracle(runner, a)[0]
        assert tokens_of(tokens, b) == oracle(runner, b)[0]

    def test_pressure_is_passed_on_without_the_lock(self) -> None:
        """The receiver may take its own locks, and another thread may hold those while it waits for the engine."""
        free_from_elsewhere: list[bool] = []

        def pressed(owner: str) -> None:
            other = threading.Thread(target=engine.release_ticket, args=(owner,))
            other.start()
            other.join(10)
            free_from_elsewhere.append(not other.is_alive())

        engine = make_engine(FakeRunner(num_blocks=3), max_reserved_fraction=1.0, on_pressure=pressed)
        engine.add(request("a", 10, 30), GENERATE)
        step(engine)
        assert engine.reserve_ticket("t", 10) is not None
        while engine.has_work():
            step(engine)
        assert free_from_elsewhere == [True]


class TestMemory:
    def test_a_tiny_pool_preempts_and_the_output_is_exact(self) -> None:
        runner = FakeRunner(num_blocks=6, block_size=8)
        engine = make_engine(runner, budget=16)
        specs = [request(f"r{i}", 9 + i, 24, temperature=i % 2, seed=i) for i in range(4)]
        for spec in specs:
            engine.add(spec, GENERATE)
        tokens = run(engine)
        for spec in specs:
            assert tokens_of(tokens, spec) == oracle(runner, spec)[0]
        load = engine.load()
        assert load.preemptions > 0
        assert load.recomputed_tokens["preempt"] > 0
        known = sum(len(spec.prompt) for spec in specs)
        assert runner.computed == known + 4 * 23 + load.recomputed_tokens["preempt"], "the counter is exact"
        assert_empty(engine)

    def test_a_preempted_replay_is_counted_under_each_reason_once(self) -> None:
        runner = FakeRunner(num_blocks=6, block_size=8)
        engine = make_engine(runner, budget=16)
        specs = [request(f"r{i}", 7 + i, 26, delivered=[1, 2]) for i in range(4)]
        for spec in specs:
            engine.add(spec, GENERATE)
        tokens = run(engine)
        for spec in specs:
            assert tokens_of(tokens, spec) == oracle(runner, spec)[0]
        known = sum(len(spec.known_tokens) for spec in specs)
        recomputed = engine.load().recomputed_tokens
        assert recomputed["preempt"] > 0
        assert recomputed["replay"] == known
        assert runner.computed == known + 4 * 23 + recomputed["preempt"]

    def test_a_committed_sequence_that_loses_its_blocks_is_recomputed_exactly(self) -> None:
        runner, there = FakeRunner(num_blocks=4, block_size=8), FakeRunner()
        engine = make_engine(runner, max_reserved_fraction=1.0)
        old, spec = request("old", 3, 28), request("r", 7, 17)
        engine.add(old, GENERATE)
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        blocks = engine.reserve_ticket("t", 7)
        assert blocks is not None
        engine.commit_ticket("t", spec, prefill_and_transfer(make_engine(there), there, runner, spec, blocks))
        tokens += run(engine)
        assert engine.load().preemptions == 1
        assert engine.load().recomputed_tokens["preempt"] > 0
        assert tokens_of(tokens, old) == oracle(runner, old)[0]
        assert tokens_of(tokens, spec) == oracle(runner, spec)[0]

    def test_head_of_line(self) -> None:
        """A large request neither stops small ones behind it for ever, nor starves behind a stream of them."""
        runner = FakeRunner(num_blocks=8, block_size=8)
        engine = make_engine(runner, max_num_seqs=4)
        engine.add(request("running", 8, 20), GENERATE)
        step(engine)
        large = request("large", 55, 4)
        engine.add(large, GENERATE)
        small = 0
        ended: list[str] = []
        for _ in range(400):
            while engine.load().waiting < 3:
                engine.add(request(f"s{small}", 4, 3), GENERATE)
                small += 1
            result = step(engine)
            assert result is not None
            ended += [token.key.request_id for token in result.tokens if token.finish]
            if "large" in ended:
                break
        assert "large" in ended
        assert ended[0].startswith("s"), "small ones went ahead"
        assert sum(name.startswith("s") for name in ended) <= 16 + 4

    def test_tickets_do_not_starve_a_waiting_request(self) -> None:
        runner = FakeRunner(num_blocks=8, block_size=8)
        engine = make_engine(runner, max_reserved_fraction=1.0)
        blocker = engine.reserve_ticket("blocker", 7)
        assert blocker is not None
        engine.add(request("large", 60, 4), GENERATE)
        granted = 0
        for i in range(100):
            assert step(engine) is None
            if engine.reserve_ticket(f"t{i}", 7) is None:
                break
            granted += 1
            engine.release_ticket(f"t{i}")
        assert granted == 16
        engine.release_ticket("blocker")
        step(engine)
        assert engine.load().running == 1

    def test_a_long_prompt_among_short_ones(self) -> None:
        runner = FakeRunner(num_blocks=200, max_num_seqs=32)
        engine = make_engine(runner, budget=64, max_num_seqs=32, chunk=64)
        talker, long = request("talker", 4, 60), request("long", 1000, 4)
        engine.add(talker, GENERATE)
        step(engine)
        engine.add(long, GENERATE)
        step(engine)
        shorts = [request(f"s{i}", 20, 2) for i in range(4)]
        for spec in shorts:
            engine.add(spec, GENERATE)
        first: dict[str, int] = {}
        for number in range(1, 30):
            result = step(engine)
            assert result is not None
            assert any(token.key == talker.key for token in result.tokens), "a running stream lost its pace"
            for token in result.tokens:
                first.setdefault(token.key.request_id, number)
        assert all(first[spec.key.request_id] <= 3 for spec in shorts)
        assert first["long"] <= 25


class TestLoad:
    def test_counts(self) -> None:
        engine = make_engine(FakeRunner(num_blocks=10), budget=16, max_num_seqs=2, chunk=10)
        engine.add(request("a", 30, 4), GENERATE)
        engine.add(request("b", 30, 4), GENERATE)
        engine.add(request("c", 30, 4), GENERATE)
        assert engine.load().queued_prefill_tokens == 90
        assert (engine.load().waiting, engine.load().running) == (3, 0)
        step(engine)
        load = engine.load()
        assert (load.step, load.waiting, load.running) == (1, 1, 2)
        assert load.queued_prefill_tokens == 74
        assert (load.free_blocks, load.total_blocks) == (6, 10)

    def test_the_engine_and_its_pure_modules_need_no_torch_ray_or_grpc(self) -> None:
        code = (
            "import sys, engine.engine, engine.scheduler, engine.sequence, engine.blocks, engine.batch, engine.plan\n"
            "bad = {'torch', 'ray', 'grpc', 'google.protobuf', 'pydantic', 'kv_transfer'} & set(sys.modules)\n"
            "assert not bad, bad"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
