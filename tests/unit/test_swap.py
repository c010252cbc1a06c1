"""Swapping on the fake runner: exact in every mode, at every moment, and bounded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import swap as swap_module
from engine.blocks import BlockManager, Owner
from engine.engine import Engine, SequenceKind, TokenOut
from engine.preemption import STALL_S
from engine.sequence import Sequence as EngineSequence
from engine.swap import Copy, CopyCancelled, HostKv, ThreadCopier
from pdcore.clock import ManualClock
from pdcore.config import QUEUE_POLICIES, EngineConfig, QueueConfig, WorkerConfig
from pdcore.errors import ConfigError, InvalidRequest
from pdcore.hashing import block_hashes, chain_root
from pdcore.types import RequestKey, RequestSpec, Role, WorkerLoad
from protos.convert import load_from_proto, load_to_proto
from tests.support.engine_kit import (
    ManualCopier,
    make_engine,
    prefill_and_transfer,
    prompt_of,
    request,
    run,
    step,
    tokens_of,
)
from tests.support.fake_runner import FakeRunner, oracle

GENERATE = SequenceKind.GENERATE


def at_rest(engine: Engine) -> None:
    load = engine.load()
    assert load.free_blocks == load.total_blocks
    assert (load.waiting, load.running, load.paused, load.swapped, load.swap_used_bytes) == (0, 0, 0, 0, 0)
    engine.check_integrity()


def check_exact(runner: FakeRunner, tokens: Sequence[TokenOut], specs: Sequence[RequestSpec]) -> None:
    for spec in specs:
        assert tokens_of(tokens, spec) == oracle(runner, spec)[0]


def until_copy(engine: Engine, copier: ManualCopier) -> list[TokenOut]:
    """Step until a copy begins; the tokens of those steps."""
    tokens: list[TokenOut] = []
    for _ in range(60):
        result = step(engine)
        tokens += result.tokens if result is not None else ()
        if copier.waiting:
            return tokens
    raise AssertionError("nothing is copied")


class TestAnAbsurdlySmallPool:
    """Four sequences of which hardly two fit."""

    @pytest.mark.parametrize("prefix_cache", [True, False])
    @pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
    @pytest.mark.parametrize("late", [0, 3])
    def test_exact_with_few_preemptions(self, mode: str, prefix_cache: bool, late: int) -> None:
        runner, copier = FakeRunner(num_blocks=6, block_size=8), ManualCopier()
        swap_blocks = 0 if mode == "recompute" else 20
        engine = make_engine(
            runner, budget=16, prefix_cache=prefix_cache, swap_blocks=swap_blocks, preemption=mode, copier=copier
        )
        specs = [request(f"r{i}", 9 + i, 24, temperature=i % 2, seed=i) for i in range(4)]
        for spec in specs:
            engine.add(spec, GENERATE)
        tokens = run(engine, copier=copier, late=late)
        check_exact(runner, tokens, specs)
        load = engine.load()
        # A sequence has a block's worth of tokens, and head-room for one more, before it can be chosen again.
        assert 0 < load.preemptions <= len(tokens) / 8
        assert (load.swaps_out, load.swaps_in) == ((0, 0) if mode == "recompute" else (load.preemptions,) * 2)
        known = sum(len(spec.prompt) for spec in specs)
        assert runner.computed == known + 4 * 23 + load.recomputed_tokens["preempt"], "the counter is exact"
        assert (load.recomputed_tokens["preempt"] == 0) == (mode != "recompute")
        at_rest(engine)

    @settings(max_examples=20, deadline=None)
    @given(
        shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 25), st.booleans()), min_size=2, max_size=6),
        num_blocks=st.integers(6, 9),
        swap_blocks=st.integers(1, 12),
        mode=st.sampled_from(["auto", "swap"]),
        late=st.integers(0, 5),
        alike=st.booleans(),
    )
    def test_whatever_the_shapes(
        self,
        shapes: list[tuple[int, int, bool]],
        num_blocks: int,
        swap_blocks: int,
        mode: str,
        late: int,
        alike: bool,
    ) -> None:
        runner, copier = FakeRunner(num_blocks=num_blocks, block_size=8), ManualCopier()
        engine = make_engine(runner, budget=16, swap_blocks=swap_blocks, preemption=mode, copier=copier)
        specs = [
            request(f"r{i}", prompt_of(0 if alike else i, prompt), new, temperature=float(warm), seed=i)
            for i, (prompt, new, warm) in enumerate(shapes)
        ]
        for spec in specs:
            engine.add(spec, GENERATE)
        tokens = run(engine, copier=copier, late=late)
        check_exact(runner, tokens, specs)
        assert engine.load().preemptions <= len(tokens)
        at_rest(engine)


class Pressed:
    """An old and a young sequence, of which the young one has just been chosen to be swapped: 8 blocks of 4 tokens.

    `old` grows from 2 blocks to 8; `young` gives way, and fits again when `old` has ended.
    """

    def __init__(self, *, swap_blocks: int = 20, mode: str = "swap", prefix_cache: bool = True) -> None:
        self.runner, self.copier = FakeRunner(num_blocks=8, block_size=4), ManualCopier()
        self.clock = ManualClock()
        self.engine = make_engine(
            self.runner,
            swap_blocks=swap_blocks,
            preemption=mode,
            copier=self.copier,
            prefix_cache=prefix_cache,
            clock=self.clock,
            max_reserved_fraction=1.0,
        )
        self.old, self.young = request("old", 5, 28, window=64), request("young", 12, 14)
        self.tokens: list[TokenOut] = []
        self.engine.add(self.old, GENERATE)
        self.engine.add(self.young, GENERATE)
        self.tokens += until_copy(self.engine, self.copier)

    def step(self) -> bool:
        result = step(self.engine)
        if result is not None:
            self.tokens += result.tokens
        return result is not None

    def until_coming_back(self) -> Copy:
        """Swap out, let the old one end, and begin to swap in."""
        self.copier.finish()
        self.tokens += until_copy(self.engine, self.copier)
        return self.copier.waiting[0]

    def end(self, *, lost: Sequence[RequestSpec] = ()) -> None:
        """Run to the end; everything is exact, and nothing is left."""
        self.tokens += run(self.engine, copier=self.copier)
        self.copier.finish_all()
        check_exact(self.runner, self.tokens, [spec for spec in (self.old, self.young) if spec not in lost])
        at_rest(self.engine)


class TestTheWayThereAndBack:
    def test_steps_go_on_while_a_copy_is_under_way_and_its_sequence_does_not_run(self) -> None:
        pressed = Pressed()
        (copy,) = pressed.copier.waiting
        assert (copy.out, copy.key) == (True, pressed.young.key)
        assert pressed.engine.block_table(pressed.young.key) is None
        load = pressed.engine.load()
        assert (load.swapped, load.swaps_out, load.waiting) == (1, 0, 1)
        assert load.swap_used_bytes > 0
        pressed.end()
        load = pressed.engine.load()
        assert (load.swaps_out, load.swaps_in, load.preemptions) == (1, 1, 1)
        assert load.recomputed_tokens["preempt"] == 0

    def test_the_old_one_waits_for_the_blocks_and_no_more_is_swapped(self) -> None:
        pressed = Pressed()
        free = pressed.engine.load().free_blocks
        assert not pressed.step(), "it sits out"
        assert pressed.engine.load().free_blocks == free == 0
        pressed.copier.finish()
        assert pressed.engine.load().free_blocks > 0
        assert pressed.step()
        pressed.end()

    def test_coming_back_takes_a_step_of_its_own(self) -> None:
        pressed = Pressed()
        copy = pressed.until_coming_back()
        assert (copy.out, copy.key) == (False, pressed.young.key)
        assert not pressed.step(), "it does not run yet"
        other = request("other", 3, 3)
        pressed.engine.add(other, GENERATE)
        assert pressed.step(), "others do"
        pressed.copier.finish()
        assert pressed.engine.load().swapped == 0
        pressed.end()

    def test_what_the_prefix_cache_still_has_is_not_copied_back(self) -> None:
        pressed = Pressed()
        pressed.engine.abort(pressed.old.key)  # before it needs what the young one left to the cache
        copy = pressed.until_coming_back()
        assert (copy.token_start, copy.token_end) == (16, 19), "only its last block was not shared"
        pressed.end(lost=[pressed.old])
        assert pressed.engine.load().recomputed_tokens["preempt"] == 0

    @pytest.mark.parametrize("prefix_cache", [True, False])
    def test_blocks_that_came_back_can_be_shared_again(self, prefix_cache: bool) -> None:
        pressed = Pressed(prefix_cache=prefix_cache)
        pressed.until_coming_back()
        pressed.copier.finish()
        pressed.engine.check_integrity()
        assert (len(pressed.engine.cached_names()[0]) > 0) == prefix_cache
        pressed.end()

    def test_what_others_use_is_not_copied(self) -> None:
        runner, copier = FakeRunner(num_blocks=9, block_size=4), ManualCopier()
        engine = make_engine(runner, swap_blocks=20, preemption="swap", copier=copier)
        old, young = request("old", prompt_of(0, 9), 24), request("young", prompt_of(0, 9, 4), 12)
        engine.add(old, GENERATE)
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        engine.add(young, GENERATE)
        tokens += until_copy(engine, copier)
        (copy,) = copier.waiting
        assert copy.token_start == 8, "two blocks of the common beginning"
        assert copy.host.blocks == -(-(copy.token_end - 8) // 4)
        tokens += run(engine, copier=copier)
        check_exact(runner, tokens, [old, young])
        assert engine.load().recomputed_tokens["preempt"] == 0
        at_rest(engine)

    def test_a_front_that_is_gone_makes_it_recompute_all(self) -> None:
        """It was left behind since another sequence used it; that one has ended, and its blocks were wanted."""
        runner, copier = FakeRunner(num_blocks=9, block_size=4), ManualCopier()
        engine = make_engine(runner, swap_blocks=20, preemption="swap", copier=copier)
        old, young = request("old", prompt_of(0, 9), 24), request("young", prompt_of(0, 9, 4), 12)
        engine.add(old, GENERATE)
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        engine.add(young, GENERATE)
        tokens += until_copy(engine, copier)
        copier.finish()
        engine.abort(old.key)
        blocker = engine.reserve_ticket("t", 9 * 4 - 1)  # evicts everything
        assert blocker is not None
        assert engine.load().cached_blocks == 0
        engine.release_ticket("t")
        tokens += run(engine, copier=copier)
        check_exact(runner, tokens, [young])
        load = engine.load()
        assert (load.swaps_in, load.recomputed_tokens["preempt"] > 0) == (0, True)
        at_rest(engine)

    def test_one_that_may_take_nothing_from_the_cache_leaves_nothing_behind(self) -> None:
        """Its prompt tokens are being scored, so that it computes them all; others share its blocks meanwhile."""
        spec = request("r", prompt_of(0, 13))
        scoring = replace(spec, params=replace(spec.params, prompt_logprobs=0))
        blocks = BlockManager(8, 4)
        mine, other = Owner.sequence(spec.key), Owner.ticket("t")
        taken = blocks.allocate(mine, 4)
        blocks.publish(mine, block_hashes(chain_root("m"), list(spec.prompt), 4), 2)
        blocks.share(other, taken[:2])
        for which, left in ((spec, 2), (scoring, 0)):
            sequence = EngineSequence(which, GENERATE, block_size=4, now=0.0, root=chain_root("m"))
            assert swap_module.front_left_behind(sequence, blocks) == left

    def test_one_that_was_swapped_before_its_first_step_comes_back_under_every_policy(self) -> None:
        """It came by a ticket, and its first token used its window. Whoever waits, it is not a new request."""
        for policy in QUEUE_POLICIES:
            runner, there, copier = FakeRunner(num_blocks=6, block_size=4), FakeRunner(), ManualCopier()
            clock = ManualClock()
            engine = make_engine(
                runner,
                swap_blocks=20,
                preemption="swap",
                copier=copier,
                max_reserved_fraction=1.0,
                clock=clock,
                queue=QueueConfig(policy),
            )
            spec, other = request("first", 9, 4, window=1), request("other", 5, 3)
            blocks = engine.reserve_ticket("t", 9)
            assert blocks is not None
            engine.commit_ticket("t", spec, prefill_and_transfer(make_engine(there), there, runner, spec, blocks))
            tokens = run(engine)
            assert runner.steps == 0
            clock.advance(STALL_S)
            assert engine.reserve_ticket("more", 15) is None
            tokens += until_copy(engine, copier)
            copier.finish()
            engine.add(other, GENERATE)
            for _ in range(20):
                engine.add_credit(spec.key, 1)
                result = step(engine)  # none while it is copied
                copier.finish_all()
                tokens += result.tokens if result is not None else ()
            check_exact(runner, tokens, [spec, other])
            at_rest(engine)

    def test_kv_of_a_lossy_codec_comes_back_as_it_was(self) -> None:
        """The prefix cache has come to have the exact KV of the same tokens: it must not be mixed in."""
        runner, there, copier = FakeRunner(num_blocks=6, block_size=4), FakeRunner(), ManualCopier()
        clock = ManualClock()
        engine = make_engine(
            runner, swap_blocks=20, preemption="swap", copier=copier, max_reserved_fraction=1.0, clock=clock
        )
        spec, twin = request("lossy", prompt_of(0, 9), 8, window=2), request("twin", prompt_of(0, 9), 3)
        blocks = engine.reserve_ticket("t", 9)
        assert blocks is not None
        first = prefill_and_transfer(make_engine(there), there, runner, spec, blocks)
        engine.commit_ticket("t", spec, first, exact=False)
        tokens = run(engine)
        clock.advance(STALL_S)
        assert engine.reserve_ticket("more", 15) is None
        tokens += until_copy(engine, copier)
        assert copier.waiting[0].token_start == 0
        copier.finish()
        engine.add(twin, GENERATE)
        tokens += run(engine)
        names = block_hashes(chain_root(runner.model.digest), list(spec.prompt), 4)
        assert set(names) <= set(engine.cached_names()[0])
        engine.add_credit(spec.key, 2)
        tokens += until_copy(engine, copier)
        assert copier.waiting[0].token_start == 0
        while len(tokens) < 11:
            tokens += run(engine, copier=copier)
            engine.add_credit(spec.key, 2)
        check_exact(runner, tokens, [spec, twin])
        assert not engine.load().recomputed_tokens["preempt"]
        at_rest(engine)


class TestHysteresis:
    def test_nobody_is_thrown_out_again_while_it_recovers(self) -> None:
        """Its tokens are computed again one by one, while an older one comes to need all blocks that there are."""
        runner = FakeRunner(num_blocks=13, block_size=4)
        engine = make_engine(runner, budget=3, max_num_seqs=3, chunk=1, prefix_cache=False)
        old, other, young = request("old", 3, 40), request("other", 3, 30), request("young", 20, 20)
        for spec in (old, other, young):
            engine.add(spec, GENERATE)
        tokens: list[TokenOut] = []
        while not engine.load().preemptions:
            tokens += step(engine).tokens  # type: ignore[union-attr]
        assert engine.block_table(young.key) is None
        engine.abort(other.key)
        got = sum(token.key == young.key for token in tokens)
        waited = 0
        while sum(token.key == young.key for token in tokens) == got:
            result = step(engine)
            assert result is not None
            tokens += result.tokens
            waited += all(token.key != old.key for token in result.tokens)
            assert engine.load().preemptions == 1
        assert waited > 1, "the old one sat out"
        tokens += run(engine)
        check_exact(runner, tokens, [old, young])
        at_rest(engine)


class TestEndings:
    @pytest.mark.parametrize("phase", ["out", "host", "in"])
    def test_abort_in_every_phase_frees_once(self, phase: str) -> None:
        pressed = Pressed()
        if phase == "host":
            pressed.copier.finish()
        if phase == "in":
            pressed.until_coming_back()
        busy = pressed.engine.load().free_blocks
        assert pressed.engine.abort(pressed.young.key)
        assert not pressed.engine.abort(pressed.young.key)
        pressed.engine.check_integrity()
        if phase != "host":
            assert pressed.engine.load().free_blocks == busy, "the copy still uses its blocks"
            with pytest.raises(InvalidRequest, match="already here"):
                pressed.engine.add(pressed.young, GENERATE)
            assert pressed.copier.waiting[0].cancelled
            pressed.copier.finish()
            assert isinstance(pressed.copier.done[-1].error, CopyCancelled)
            assert pressed.engine.load().free_blocks > busy
        assert pressed.engine.load().swap_used_bytes == 0
        again = replace(pressed.young, delivered=())
        pressed.tokens = [token for token in pressed.tokens if token.key != again.key]
        pressed.engine.add(again, GENERATE)
        pressed.end()

    @pytest.mark.parametrize("phase", ["out", "in"])
    def test_a_copy_that_fails_is_made_good_by_computing_again(self, phase: str) -> None:
        pressed = Pressed()
        if phase == "in":
            pressed.until_coming_back()
        pressed.copier.finish(error=MemoryError())
        pressed.engine.check_integrity()
        assert pressed.engine.load().swap_used_bytes == 0
        pressed.end()
        assert pressed.engine.load().swaps_in == 0

    def test_host_memory_that_is_full_makes_the_next_one_drop(self) -> None:
        runner, copier = FakeRunner(num_blocks=6, block_size=8), ManualCopier()
        engine = make_engine(runner, budget=16, swap_blocks=4, preemption="swap", copier=copier, prefix_cache=False)
        specs = [request(f"r{i}", 9 + i, 24) for i in range(4)]
        for spec in specs:
            engine.add(spec, GENERATE)
        tokens = run(engine, copier=copier)
        check_exact(runner, tokens, specs)
        load = engine.load()
        assert 0 < load.swaps_out < load.preemptions
        assert load.recomputed_tokens["preempt"] > 0
        at_rest(engine)

    def test_tickets_wait_for_blocks_that_are_being_copied(self) -> None:
        pressed = Pressed()
        assert pressed.engine.reserve_ticket("t", 3) is None
        pressed.copier.finish()
        assert pressed.engine.reserve_ticket("t", 3) is not None
        pressed.engine.release_ticket("t")
        pressed.end()

    def test_a_ticket_is_revoked_before_a_running_sequence_is_swapped(self) -> None:
        asked: list[str] = []
        runner, copier = FakeRunner(num_blocks=6), ManualCopier()
        engine = make_engine(
            runner,
            max_reserved_fraction=1.0,
            on_pressure=asked.append,
            swap_blocks=9,
            preemption="swap",
            copier=copier,
        )
        specs = [request("a", 10, 40), request("b", 4, 40)]
        for spec in specs:
            engine.add(spec, GENERATE)
        tokens = list(step(engine).tokens)  # type: ignore[union-attr]
        assert engine.reserve_ticket("t", 30) is not None
        while not asked:
            tokens += step(engine).tokens  # type: ignore[union-attr]
        assert not copier.waiting
        engine.release_ticket("t")
        check_exact(runner, [*tokens, *run(engine, copier=copier)], specs)


class TestStalledClients:
    def make(self, mode: str = "swap") -> tuple[FakeRunner, ManualCopier, ManualClock, Engine, RequestSpec]:
        """An engine of 6 blocks whose only sequence holds 4 of them, and whose client takes nothing."""
        runner, copier, clock = FakeRunner(num_blocks=6, block_size=8), ManualCopier(), ManualClock()
        engine = make_engine(
            runner,
            clock=clock,
            copier=copier,
            swap_blocks=0 if mode == "recompute" else 9,
            preemption=mode,
            max_reserved_fraction=1.0,
        )
        slow = request("slow", 26, 20, window=2)
        engine.add(slow, GENERATE)
        return runner, copier, clock, engine, slow

    @pytest.mark.parametrize("mode", ["swap", "recompute"])
    def test_give_way_to_a_request_that_waits(self, mode: str) -> None:
        runner, copier, clock, engine, slow = self.make(mode)
        tokens = run(engine)
        waiting = request("waiting", 20, 20)
        engine.add(waiting, GENERATE)
        assert engine.schedule() is None, "the client may be about to take its tokens"
        load = engine.load()
        assert (load.paused, load.stalled_requests, load.stalled_blocks) == (1, 0, 0)
        clock.advance(STALL_S)
        load = engine.load()
        assert (load.stalled_requests, load.stalled_blocks) == (1, 4), "routers count it as free"
        tokens += run(engine, copier=copier)
        check_exact(runner, tokens, [waiting])
        load = engine.load()
        assert (load.paused, load.swapped, load.preemptions) == (1, int(mode == "swap"), 1)
        clock.advance(STALL_S)
        load = engine.load()
        assert (load.stalled_requests, load.stalled_blocks) == (1, 0), "it holds no memory now, and no place"
        while len(tokens) < 40:
            engine.add_credit(slow.key, 2)
            tokens += run(engine, copier=copier)
        check_exact(runner, tokens, [slow])
        assert (engine.load().recomputed_tokens["preempt"] == 0) == (mode == "swap")
        at_rest(engine)

    def test_give_way_to_a_ticket_that_was_refused(self) -> None:
        runner, copier, clock, engine, slow = self.make()
        tokens = run(engine)
        clock.advance(STALL_S)
        assert engine.reserve_ticket("t", 20) is None
        assert engine.schedule() is None
        copier.finish()
        assert engine.reserve_ticket("t", 20) is not None
        engine.release_ticket("t")
        while len(tokens) < 20:
            engine.add_credit(slow.key, 2)
            tokens += run(engine, copier=copier)
        check_exact(runner, tokens, [slow])
        at_rest(engine)

    def test_keep_their_blocks_while_nobody_wants_them(self) -> None:
        _, copier, clock, engine, _ = self.make()
        run(engine)
        clock.advance(100 * STALL_S)
        assert engine.schedule() is None
        assert not copier.waiting

    def test_credit_that_comes_while_the_kv_is_on_its_way_out(self) -> None:
        runner, copier, clock, engine, slow = self.make()
        tokens = run(engine)
        other = request("other", 20, 3)
        engine.add(other, GENERATE)
        clock.advance(STALL_S)
        assert engine.schedule() is None
        engine.add_credit(slow.key, 2)
        engine.check_integrity()
        assert engine.schedule() is None
        for _ in range(60):
            copier.finish_all()
            clock.advance(STALL_S)
            result = step(engine)
            tokens += result.tokens if result is not None else ()
            engine.add_credit(slow.key, 2)
        check_exact(runner, tokens, [slow, other])
        at_rest(engine)


class TestAuto:
    """The choice follows what has been measured."""

    def chosen(
        self,
        copy_bytes_s: float,
        prefill_tokens_s: float,
        *,
        prefer_swap: bool = False,
        prefix_cache: bool = False,
        old_tokens: int = 28,
    ) -> bool:
        """Whether the young one of two is swapped, of 19 or 20 tokens; the old one comes to have `old_tokens`."""
        runner, copier = FakeRunner(num_blocks=8, block_size=4), ManualCopier()
        engine = make_engine(
            runner, swap_blocks=20, prefix_cache=prefix_cache, copier=copier, prefer_swap=prefer_swap
        )
        engine._swap.out_speed.add(1e3 * copy_bytes_s, 1e3)
        engine._swap.in_speed.add(1e3 * copy_bytes_s, 1e3)
        engine._swap.prefill_speed.add(1e3 * prefill_tokens_s, 1e3)
        for spec in (request("old", 5, old_tokens), request("young", 12, 14)):
            engine.add(spec, GENERATE)
        while not engine.load().preemptions:
            step(engine)
        return bool(copier.waiting)

    def test_swap_or_recompute(self) -> None:
        per_token = FakeRunner().geometry.bytes_per_token
        assert self.chosen(200 * per_token, 90), "100 tokens/s there and back"
        assert not self.chosen(200 * per_token, 110)
        assert self.chosen(200 * per_token, 390, prefer_swap=True), "a decode worker would rather swap"
        assert not self.chosen(200 * per_token, 410, prefer_swap=True)

    def test_what_the_prefix_cache_will_keep_counts(self) -> None:
        per_token = FakeRunner().geometry.bytes_per_token
        assert self.chosen(200 * per_token, 90, prefix_cache=True), "the old one can come to need all that comes free"
        assert not self.chosen(200 * per_token, 90, prefix_cache=True, old_tokens=12), "one block is all it lacks"

    def test_copies_and_prefills_are_measured(self) -> None:
        pressed = Pressed()
        bytes_copied = (pressed.copier.waiting[0].token_end - pressed.copier.waiting[0].token_start) * 320
        pressed.copier.finish(seconds=2.0)
        assert pressed.engine._swap.out_speed.per_second == pytest.approx(bytes_copied / 2)
        runner, clock = FakeRunner(), ManualClock()
        engine = make_engine(runner, clock=clock)
        engine.add(request("first", 30, 1), GENERATE)
        run(engine)
        engine.add(request("second", 40, 1), GENERATE)
        plan = engine.schedule()
        assert plan is not None
        output = engine.execute(plan)
        clock.advance(0.5)
        engine.apply(plan, output)
        assert engine._swap.prefill_speed.per_second == pytest.approx(80)


class TestConfiguration:
    def test_options_without_an_effect_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="auto or recompute while swap_memory is 0"):
            EngineConfig("m", "m", preemption="swap")
        with pytest.raises(ConfigError, match="0 while preemption is recompute"):
            EngineConfig("m", "m", preemption="recompute", swap_memory=1 << 20)
        with pytest.raises(ConfigError, match="auto, swap, recompute"):
            EngineConfig("m", "m", preemption="drop")
        with pytest.raises(ConfigError, match=">= 0"):
            EngineConfig("m", "m", swap_memory=-1)
        with pytest.raises(ConfigError, match="0 on a prefill worker"):
            WorkerConfig("p", Role.PREFILL, EngineConfig("m", "m", swap_memory=1 << 20))

    def test_host_memory_for_less_than_a_block_is_refused(self) -> None:
        runner = FakeRunner()
        with pytest.raises(ConfigError, match="at least one block: 5120 bytes"):
            Engine(runner, EngineConfig("m", "m", swap_memory=5119))

    def test_the_load_crosses_the_wire(self) -> None:
        load = WorkerLoad(swapped=3, swaps_out=7, swaps_in=5, swap_used_bytes=1 << 40)
        assert load_from_proto(load_to_proto(load)) == load


class SlowCache:
    """A fake runner's cache whose copies wait to be let go."""

    def __init__(self, runner: FakeRunner) -> None:
        self.geometry, self._cache = runner.geometry, runner.cache
        self.entered, self.leave = threading.Event(), threading.Event()
        self.calls = 0

    def gather(self, *args: int) -> torch.Tensor:
        self.calls += 1
        self.entered.set()
        assert self.leave.wait(30)
        return self._cache.gather(*args)  # type: ignore[arg-type]

    def scatter(self, *args: int) -> None:
        self._cache.scatter(*args)  # type: ignore[arg-type]


class TestTheThread:
    @pytest.mark.parametrize("mode", ["auto", "swap"])
    def test_copies_beside_the_steps(self, mode: str) -> None:
        runner, told = FakeRunner(num_blocks=6, block_size=8), threading.Semaphore(0)
        engine = make_engine(runner, budget=16, swap_blocks=20, preemption=mode, on_copied=told.release)
        specs = [request(f"r{i}", 9 + i, 24, temperature=i % 2, seed=i) for i in range(4)]
        for spec in specs:
            engine.add(spec, GENERATE)
        tokens: list[TokenOut] = []
        while engine.has_work():
            result = step(engine)
            if result is None:
                assert told.acquire(timeout=30), "nobody says that a copy has ended"
                continue
            tokens += result.tokens
        check_exact(runner, tokens, specs)
        load = engine.load()
        assert load.swaps_out == load.swaps_in == load.preemptions > 0
        assert engine.close()
        at_rest(engine)

    def test_a_copy_that_hangs_stops_nobody_else(self) -> None:
        runner = FakeRunner(num_blocks=8, block_size=4)
        slow = SlowCache(runner)
        engine = make_engine(runner, swap_blocks=20, preemption="swap")
        copier = engine._swap._copier
        assert isinstance(copier, ThreadCopier)
        copier._cache = slow  # type: ignore[assignment]
        for spec in (request("old", 5, 20), request("young", 13, 14)):
            engine.add(spec, GENERATE)
        while not slow.entered.is_set():
            if step(engine) is None:
                slow.entered.wait(30)
        engine.abort(RequestKey("old", 0))
        other = request("other", 3, 9)
        engine.add(other, GENERATE)
        assert tokens_of([token for token in self.steps(engine) if token.key == other.key], other)
        slow.leave.set()
        assert engine.close()

    def steps(self, engine: Engine) -> list[TokenOut]:
        tokens: list[TokenOut] = []
        while (result := step(engine)) is not None:
            tokens += result.tokens
        return tokens

    def copy(self, runner: FakeRunner, tokens: int) -> Copy:
        blocks = tuple(range(runner.geometry.blocks_for(tokens)))
        return Copy(RequestKey("r", 0), True, blocks, 0, tokens, HostKv(len(blocks)))

    def test_closing_ends_a_long_copy_at_the_next_piece_and_those_that_wait_at_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(swap_module, "PIECE_BYTES", 1)
        runner = FakeRunner()
        slow, done = SlowCache(runner), list[Copy]()
        copier = ThreadCopier(slow, done.append, self.crashed)  # type: ignore[arg-type]
        copies = [self.copy(runner, 200), self.copy(runner, 100)]
        for copy in copies:
            copier.submit(copy)
        assert slow.entered.wait(30)
        assert not copier.close(timeout_s=0.01), "a piece is being copied"
        slow.leave.set()
        assert copier.close(timeout_s=30)
        assert copier.close(timeout_s=30)
        assert slow.calls == 1
        assert done == copies
        assert all(isinstance(copy.error, CopyCancelled) for copy in copies)

    def test_a_failure_to_book_a_copy_is_told(self) -> None:
        runner, crashes = FakeRunner(), list[BaseException]()

        def fails(copy: Copy) -> None:
            raise AssertionError("a bug")

        copier = ThreadCopier(runner.cache, fails, crashes.append)
        copier.submit(self.copy(runner, 5))
        copier._thread.join(30)
        assert [str(crash) for crash in crashes] == ["a bug"]
        assert copier.close()

    def test_a_copy_that_raises_is_told_and_the_next_one_runs(self) -> None:
        runner = FakeRunner(num_blocks=4)
        ended, done = threading.Event(), list[Copy]()

        def on_done(copy: Copy) -> None:
            done.append(copy)
            if len(done) == 2:
                ended.set()

        copier = ThreadCopier(runner.cache, on_done, self.crashed)
        bad, good = self.copy(runner, 30), self.copy(runner, 30)
        bad.block_ids = (99, 99)
        copier.submit(bad)
        copier.submit(good)
        assert ended.wait(30)
        assert copier.close()
        assert (bad.error is not None, good.error) == (True, None)
        assert good.seconds > 0

    @staticmethod
    def crashed(error: BaseException) -> None:
        raise AssertionError(error)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    start=st.integers(0, 39),
    piece=st.integers(1, 9),
    back_from=st.integers(0, 39),
)
def test_what_comes_back_is_what_went_out(tokens: int, start: int, piece: int, back_from: int) -> None:
    """Any range, in pieces of any size, into other blocks; from a later block on perhaps."""
    size = 4
    runner = FakeRunner(num_blocks=24, block_size=size, max_num_seqs=1)
    cache = runner.cache
    cache.data.copy_(torch.arange(cache.data.numel()).view(cache.data.shape))
    start = min(start, tokens - 1) // size * size
    back_from = min(max(back_from, start), tokens - 1) // size * size
    count = runner.geometry.blocks_for(tokens)
    there = tuple(range(count))
    back = tuple(range(12, 12 + count))
    before = cache.gather(0, 2, there, 0, tokens).clone()
    original = swap_module.PIECE_BYTES
    swap_module.PIECE_BYTES = piece * size * runner.geometry.bytes_per_token
    try:
        host = HostKv(count)
        out = Copy(RequestKey("r", 0), True, there, start, tokens, host)
        out.run(cache)
        into = Copy(RequestKey("r", 0), False, back, back_from, tokens, host)
        untouched = cache.gather(0, 2, back, 0, max(1, back_from)).clone()
        into.run(cache)
    finally:
        swap_module.PIECE_BYTES = original
    assert out.error is None
    assert into.error is None
    assert cache.gather(0, 2, back, back_from, tokens - back_from).equal(before[:, :, back_from:])
    if back_from:
        assert cache.gather(0, 2, back, 0, back_from).equal(untouched)
