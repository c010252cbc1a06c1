"""Several samples of one request in the engine: one prefill, shared blocks, and the tokens each would have alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.displacement import displace
from engine.engine import Engine, SequenceKind, TokenOut
from engine.step import StepInput, StepOutput
from pdcore.config import QueueConfig
from pdcore.errors import InvalidRequest, TicketError
from pdcore.types import Branch, FinishReason, PriorityClass, RequestKey, RequestSpec
from tests.support.engine_kit import ManualCopier, make_engine, prompt_of, request, run, step, tokens_of
from tests.support.fake_runner import FakeRunner, oracle

BLOCK = 16


def trunk(name: str, n: int, prompt: int, max_tokens: int = 8, **extra: object) -> RequestSpec:
    spec = request(name, prompt, max_tokens, temperature=1.0, seed=7, **extra)  # type: ignore[arg-type]
    return replace(spec, branches=tuple(Branch(RequestKey(f"{name}#{i}", 3), i) for i in range(n)))


def check(runner: FakeRunner, spec: RequestSpec, tokens: Sequence[TokenOut]) -> None:
    """Each sample has the tokens that it has as a request of its own."""
    for sample in spec.samples:
        assert tokens_of(tokens, sample) == oracle(runner, sample)[0], sample.key


def at_rest(engine: Engine) -> None:
    load = engine.load()
    assert load.free_blocks == load.total_blocks
    assert (load.waiting, load.running, load.paused, load.open_tickets, load.open_sends) == (0, 0, 0, 0, 0)
    engine.check_integrity()


@pytest.mark.parametrize("cached", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 32, 50])
def test_one_prefill_and_the_tokens_of_requests_of_their_own(prompt: int, n: int, cached: bool) -> None:
    runner = FakeRunner(num_blocks=128)
    engine = make_engine(runner, max_num_seqs=16, prefix_cache=cached)
    spec = trunk("r", n, prompt)
    engine.add(spec, SequenceKind.GENERATE)
    tokens = run(engine)
    check(runner, spec, tokens)
    assert len({tuple(tokens_of(tokens, sample)) for sample in spec.samples}) == n, "samples that do not differ"
    assert runner.computed == prompt + n * 7
    assert engine.load().recomputed_tokens == {"preempt": 0, "rebuild": 0, "revoked": 0, "replay": 0}
    at_rest(engine)


@pytest.mark.parametrize("cached", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize(("prompt", "blocks"), [(16, 1 + 1), (33, 2 + 4), (48, 3 + 1), (3, 4)])
def test_full_blocks_are_shared_and_the_rest_is_copied(prompt: int, blocks: int, cached: bool) -> None:
    engine = make_engine(FakeRunner(), prefix_cache=cached)
    engine.add(trunk("r", 4, prompt), SequenceKind.GENERATE)
    assert step(engine) is not None
    load = engine.load()
    assert load.total_blocks - load.free_blocks == blocks
    assert load.running + load.waiting == 4


def test_the_trunk_reports_its_prefill_once_and_nothing_else() -> None:
    engine = make_engine(FakeRunner(), budget=16, chunk=16)
    spec = trunk("r", 3, 40)
    engine.add(spec, SequenceKind.GENERATE)
    results = [result for _ in range(3) if (result := step(engine)) is not None]
    assert [result.forked for result in results] == [(), (), (spec.key,)]
    (stats,) = results[-1].prefilled
    assert (stats.key, stats.chunks) == (spec.key, 3)
    assert [token.key for token in results[-1].tokens] == list(spec.branch_keys)
    assert all(token.key != spec.key for token in run(engine))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [5, 6, 7, 9, 12])
def test_a_pool_too_small_for_all_of_them(num_blocks: int, preemption: str) -> None:
    runner = FakeRunner(num_blocks=num_blocks)
    copier = ManualCopier()
    host = 32 if preemption == "swap" else 0
    engine = make_engine(runner, swap_blocks=host, preemption=preemption, copier=copier)
    spec = trunk("r", 4, 37, 30)
    engine.add(spec, SequenceKind.GENERATE)
    check(runner, spec, run(engine, copier=copier))
    at_rest(engine)


def test_samples_end_by_themselves() -> None:
    runner = FakeRunner()
    spec = trunk("r", 4, 20, 12)
    ends = [oracle(runner, sample)[0][index] for sample, index in zip(spec.samples, (0, 3, 5, 9), strict=True)]
    spec = replace(spec, params=replace(spec.params, stop_token_ids=tuple(ends)))
    engine = make_engine(runner)
    engine.add(spec, SequenceKind.GENERATE)
    tokens = run(engine)
    check(runner, spec, tokens)
    assert next(token.finish for token in tokens if token.index == 0) is FinishReason.STOP
    at_rest(engine)


def test_one_token_each() -> None:
    runner = FakeRunner()
    engine = make_engine(runner)
    spec = trunk("r", 3, 20, 1)
    engine.add(spec, SequenceKind.GENERATE)
    check(runner, spec, run(engine))
    at_rest(engine)


class TestAbort:
    def test_of_the_trunk_ends_all(self) -> None:
        engine = make_engine(FakeRunner(), budget=16, chunk=16)
        spec = trunk("r", 3, 40)
        engine.add(spec, SequenceKind.GENERATE)
        step(engine)
        assert engine.abort(spec.key)
        assert not engine.has_work()
        at_rest(engine)

    @pytest.mark.parametrize("under_way", [False, True], ids=["before its last step", "during it"])
    def test_of_a_sample_that_is_not_there_yet(self, under_way: bool) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        spec = trunk("r", 3, 40)
        engine.add(spec, SequenceKind.GENERATE)
        if under_way:
            plan = engine.schedule()
            assert plan is not None
            output = engine.execute(plan)
            assert engine.abort(spec.branch_keys[0])
            tokens = list(engine.apply(plan, output).tokens)
        else:
            assert engine.abort(spec.branch_keys[0])
            tokens = []
        tokens += run(engine)
        assert {token.key for token in tokens} == set(spec.branch_keys[1:])
        for sample in spec.samples[1:]:
            assert tokens_of(tokens, sample) == oracle(runner, sample)[0]
        at_rest(engine)

    def test_keys_of_samples_that_are_still_one_are_taken(self) -> None:
        engine = make_engine(FakeRunner())
        spec = trunk("r", 2, 40)
        engine.add(spec, SequenceKind.GENERATE)
        for taken in (replace(spec.samples[1]), replace(trunk("q", 2, 20), branches=spec.branches)):
            with pytest.raises(InvalidRequest, match="already here"):
                engine.add(taken, SequenceKind.GENERATE)
        run(engine)
        engine.add(spec, SequenceKind.GENERATE)
        assert engine.abort(spec.key)
        assert not engine.abort(spec.branch_keys[0]), "gone with their trunk"
        at_rest(engine)

    def test_of_all_samples_leaves_nothing(self) -> None:
        engine = make_engine(FakeRunner())
        spec = trunk("r", 3, 40)
        engine.add(spec, SequenceKind.GENERATE)
        for key in spec.branch_keys:
            assert engine.abort(key)
        assert run(engine) == []
        at_rest(engine)

    def test_of_the_first_one_leaves_the_others_their_blocks(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner, prefix_cache=False)
        spec = trunk("r", 3, 40)
        engine.add(spec, SequenceKind.GENERATE)
        result = step(engine)
        assert result is not None
        assert engine.abort(spec.branch_keys[0])
        tokens = [*result.tokens, *run(engine)]
        for sample in spec.samples[1:]:
            assert tokens_of(tokens, sample) == oracle(runner, sample)[0]
        at_rest(engine)

    def test_of_the_trunk_during_its_last_step(self) -> None:
        engine = make_engine(FakeRunner())
        spec = trunk("r", 3, 40)
        engine.add(spec, SequenceKind.GENERATE)
        plan = engine.schedule()
        assert plan is not None
        output = engine.execute(plan)
        assert engine.abort(spec.key)
        result = engine.apply(plan, output)
        assert (result.tokens, result.forked) == ((), ())
        assert not engine.has_work()
        at_rest(engine)


class TestTickets:
    @pytest.mark.parametrize("cached", [True, False], ids=["prefix cache", "no prefix cache"])
    @pytest.mark.parametrize("prompt", [1, 15, 16, 17, 40, 48])
    def test_prefill_there_and_decode_here(self, prompt: int, cached: bool) -> None:
        there, here = FakeRunner(block_size=8), FakeRunner()
        source, target = make_engine(there), make_engine(here, prefix_cache=cached)
        spec = trunk("r", 3, prompt)
        reservation = target.reserve("t", spec)
        assert reservation is not None
        assert len(reservation.blocks) == (prompt + 1 + BLOCK - 1) // BLOCK
        assert target.load().reserved_blocks == len(reservation.blocks) + 2
        source.add(spec, SequenceKind.PREFILL)
        firsts = run(source)
        assert [token.key for token in firsts] == list(spec.branch_keys)
        table = source.block_table(spec.key)
        assert table is not None
        values = there.cache.gather(0, there.geometry.num_layers, table, 0, prompt)
        here.cache.scatter(0, reservation.blocks, 0, values)
        source.release_send(spec.key)
        at_rest(source)
        target.commit_ticket("t", spec, *(token.token_id for token in firsts))
        target.check_integrity()
        before = here.computed
        check(here, spec, run(target))
        assert here.computed - before == 3 * 7
        at_rest(target)

    def test_a_sample_that_its_first_token_ends(self) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        spec = trunk("r", 3, 20)
        firsts = [oracle(runner, sample, 1)[0][0] for sample in spec.samples]
        spec = replace(spec, params=replace(spec.params, stop_token_ids=(firsts[0],)))
        source = make_engine(runner)
        reservation = engine.reserve("t", spec)
        assert reservation is not None
        source.add(spec, SequenceKind.PREFILL)
        tokens = run(source)
        assert [token.finish for token in tokens] == [FinishReason.STOP, None, None]
        engine.commit_ticket("t", spec, *firsts)
        engine.check_integrity()
        assert engine.load().running + engine.load().waiting == 2
        engine.abort(spec.branch_keys[1])
        engine.abort(spec.branch_keys[2])
        assert [token.key for token in run(engine)] == [spec.branch_keys[0]]
        at_rest(engine)

    @pytest.mark.parametrize("n", [1, 2, 5])
    def test_what_came_is_in_the_prefix_cache_from_the_commit_on(self, n: int) -> None:
        runner = FakeRunner()
        engine = make_engine(runner)
        spec = trunk("r", n, 40)
        reservation = engine.reserve("t", spec)
        assert reservation is not None
        source = make_engine(FakeRunner())
        source.add(spec, SequenceKind.PREFILL)
        firsts = run(source)
        table = source.block_table(spec.key)
        assert table is not None
        runner.cache.scatter(0, reservation.blocks, 0, source._runner.cache.gather(0, 2, table, 0, 40))
        engine.commit_ticket("t", spec, *(token.token_id for token in firsts))
        engine.check_integrity()
        assert engine.load().cached_blocks == 2
        check(runner, spec, run(engine))

    def test_misuse_is_refused_and_changes_nothing(self) -> None:
        engine = make_engine(FakeRunner())
        spec = trunk("r", 3, 20)
        assert engine.reserve("t", spec) is not None
        for tokens in ((1,), (1, 2), (1, 2, 3, 4), (1, 2, 256)):
            with pytest.raises(InvalidRequest, match="first_tokens"):
                engine.commit_ticket("t", spec, *tokens)
        with pytest.raises(TicketError, match="blocks"):
            engine.commit_ticket("t", trunk("r", 2, 20), 1, 2)
        engine.check_integrity()
        engine.commit_ticket("t", spec, 1, 2, 3)

    def test_release_gives_all_blocks_back(self) -> None:
        engine = make_engine(FakeRunner())
        assert engine.reserve("t", trunk("r", 9, 20)) is not None
        engine.release_ticket("t")
        at_rest(engine)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"delivered": (1,)}, "delivered"),
        ({"branches": (Branch(RequestKey("r", 0), 0),)}, "branches"),
        ({"branches": (Branch(RequestKey("a", 0), 0),) * 2}, "branches"),
        ({"branches": (Branch(RequestKey("a", 0), 16),)}, "branches"),
        ({"branches": tuple(Branch(RequestKey(f"a{i}", 0), 0) for i in range(17))}, "branches"),
        ({"branches": (), "sample": 16}, "sample"),
    ],
)
def test_what_can_never_run_is_refused(change: dict[str, object], field: str) -> None:
    engine = make_engine(FakeRunner())
    with pytest.raises(InvalidRequest) as refusal:
        engine.add(replace(trunk("r", 2, 20), **change), SequenceKind.GENERATE)  # type: ignore[arg-type]
    assert refusal.value.field == field
    assert not engine.has_work()


def test_a_key_that_is_in_use_is_refused() -> None:
    engine = make_engine(FakeRunner())
    engine.add(request("r#1", 5), SequenceKind.GENERATE)
    spec = replace(trunk("r", 2, 20), branches=(Branch(RequestKey("x", 0), 0), Branch(RequestKey("r#1", 0), 1)))
    with pytest.raises(InvalidRequest, match="already here"):
        engine.add(spec, SequenceKind.GENERATE)


def test_log_probabilities_of_the_prompt_come_once() -> None:
    engine = make_engine(FakeRunner())
    spec = trunk("r", 3, 20, 3, logprobs=2, prompt_logprobs=1)
    engine.add(spec, SequenceKind.GENERATE)
    first = step(engine)
    assert first is not None
    (scored,) = first.prompt_logprobs
    assert (scored.key, scored.logprobs.start, scored.logprobs.end) == (spec.key, 1, 20)
    tokens = [*first.tokens, *run(engine)]
    for sample in spec.samples:
        mine = [token for token in tokens if token.key == sample.key]
        assert [token.logprobs.values[0] for token in mine if token.logprobs] == [-t.token_id for t in mine]


class Nonsense(FakeRunner):
    def run(self, step: StepInput) -> StepOutput:
        output = super().run(step)
        output.token_ids[:] = -2
        return output


@pytest.mark.parametrize("kind", list(SequenceKind))
def test_of_a_model_that_makes_nonsense_nothing_stays_in_the_cache(kind: SequenceKind) -> None:
    engine = make_engine(Nonsense(), budget=16, chunk=16)
    spec = trunk("r", 3, 40)
    engine.add(spec, kind)
    rejected = [entry for _ in range(3) if (result := step(engine)) is not None for entry in result.rejected]
    assert [key for key, _ in rejected] == list(spec.branch_keys)
    engine.release_send(spec.key)
    assert engine.load().cached_blocks == 0
    at_rest(engine)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mix_ends_exact_and_at_rest(data: st.DataObject) -> None:
    """Trunks and plain requests in a pool that is too small, aborts at any moment."""
    runner = FakeRunner(num_blocks=data.draw(st.integers(6, 20), "blocks"))
    copier = ManualCopier()
    engine = make_engine(
        runner,
        budget=data.draw(st.sampled_from([8, 24, 64]), "budget"),
        chunk=8,
        max_num_seqs=data.draw(st.sampled_from([2, 8]), "seqs"),
        prefix_cache=data.draw(st.booleans(), "cached"),
        swap_blocks=data.draw(st.sampled_from([0, 20]), "swap"),
        copier=copier,
    )
    alive: dict[RequestKey, RequestSpec] = {}
    for i in range(data.draw(st.integers(1, 4), "requests")):
        n = data.draw(st.integers(0, 5), "n")
        prompt, tokens = data.draw(st.integers(1, 50), "prompt"), data.draw(st.integers(1, 20), "tokens")
        spec = trunk(f"r{i}", n, prompt, tokens) if n else request(f"r{i}", prompt, tokens)
        engine.add(spec, SequenceKind.GENERATE)
        alive.update({sample.key: sample for sample in spec.samples})
    told: list[TokenOut] = []
    for _ in range(3000):
        if not engine.has_work():
            break
        result = step(engine)
        if copier.waiting and (result is None or data.draw(st.booleans(), "copy")):
            copier.finish()
            engine.check_integrity()
        if result is not None:
            told += result.tokens
        if alive and data.draw(st.integers(0, 19), "abort") == 0:
            key = data.draw(st.sampled_from(sorted(alive)), "who")
            engine.abort(key)
            engine.check_integrity()
            del alive[key]
    assert not engine.has_work()
    copier.finish_all()  # of sequences that were aborted meanwhile
    for spec in alive.values():
        assert tokens_of(told, spec) == oracle(runner, spec)[0]
    at_rest(engine)


class TestDisplacement:
    """Samples of a batch request, or requests that begin alike, hold blocks together. See `engine.displacement`."""

    @staticmethod
    def full(runner: FakeRunner, **options: object) -> tuple[Engine, list[RequestSpec], list[TokenOut]]:
        """A batch request of three samples that hold two blocks together and one each."""
        engine = make_engine(runner, budget=128, chunk=128, **{"queue": QueueConfig(batch_share=0.0), **options})  # type: ignore[arg-type]
        spec = trunk("b", 3, 40, 30, priority=PriorityClass.BATCH)
        engine.add(spec, SequenceKind.GENERATE)
        result = step(engine)
        assert result is not None
        return engine, [spec], list(result.tokens)

    def test_what_they_hold_together_counts_and_comes_free(self) -> None:
        runner = FakeRunner(num_blocks=5)
        engine, specs, tokens = self.full(runner)
        load = engine.load()
        assert (load.free_blocks, load.yielding_requests, load.yielding_blocks) == (0, 3, 5)
        urgent = request("now", 70, 2, priority=PriorityClass.INTERACTIVE)
        engine.add(urgent, SequenceKind.GENERATE)
        result = step(engine)
        assert result is not None
        assert [token.key for token in result.tokens] == [urgent.key]
        assert engine.load().preemptions == 3
        tokens += [*result.tokens, *run(engine)]
        for spec in (urgent, *specs):
            check(runner, spec, tokens)
        at_rest(engine)

    def test_one_that_stays_keeps_what_all_hold(self) -> None:
        """So there are two blocks to be had and no third, and nobody gives way for that."""
        engine, _, _ = self.full(FakeRunner(num_blocks=5), max_num_seqs=4, queue=QueueConfig(batch_share=0.25))
        assert engine.load().yielding_blocks == 2
        engine.add(request("now", 40, 2, priority=PriorityClass.INTERACTIVE), SequenceKind.GENERATE)
        step(engine)
        assert engine.load().preemptions == 0

    @pytest.mark.parametrize("swap_blocks", [0, 8])
    def test_a_ticket_gets_what_comes_free_if_it_begins_with_it(self, swap_blocks: int) -> None:
        """The interactive request has the same beginning: that comes free, and it takes it again."""
        runner, copier = FakeRunner(num_blocks=6), ManualCopier()
        preemption = "swap" if swap_blocks else "recompute"
        engine, specs, tokens = self.full(runner, swap_blocks=swap_blocks, preemption=preemption, copier=copier)
        urgent = request("now", [*specs[0].prompt[:32], *range(20)], 2, priority=PriorityClass.INTERACTIVE)
        assert engine.reserve("t", urgent) is None
        result = step(engine)
        assert result is not None
        tokens += result.tokens
        copier.finish_all()
        gone = engine.load().preemptions
        assert gone == 2, "two blocks, and the beginning stays with the third sample"
        assert engine.reserve("t", urgent) is not None
        assert engine.load().preemptions == gone
        engine.release_ticket("t")
        tokens += run(engine, copier=copier)
        for spec in specs:
            check(runner, spec, tokens)
        at_rest(engine)


@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    batch=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 1), st.integers(1, 40)), min_size=1, max_size=4),
    urgent=st.tuples(st.integers(0, 1), st.integers(1, 60)),
    blocks=st.integers(12, 24),
    share=st.sampled_from([0.0, 0.25]),
    swap_blocks=st.sampled_from([0, 30]),
    by_ticket=st.booleans(),
    steps=st.integers(0, 5),
)
def test_who_gives_way_makes_room(  # type: ignore[no-untyped-def]
    batch, urgent, blocks, share, swap_blocks, by_ticket, steps
) -> None:
    """Batch requests of several samples and common beginnings: if any of them gives way, the interactive request has
    its blocks next, and no further ones give way; and if none does, it runs, or not even all would be enough."""
    runner, copier = FakeRunner(num_blocks=blocks, block_size=4), ManualCopier()
    engine = make_engine(
        runner,
        budget=400,
        chunk=400,
        max_num_seqs=16,
        max_reserved_fraction=1.0,
        queue=QueueConfig(batch_share=share),
        swap_blocks=swap_blocks,
        preemption="swap" if swap_blocks else "recompute",
        copier=copier,
    )
    for i, (n, family, own) in enumerate(batch):
        prompt = prompt_of(family, 9, own, branch=i)
        spec = request(f"b{i}", prompt, 12, priority=PriorityClass.BATCH)
        if n > 1:
            spec = replace(spec, branches=tuple(Branch(RequestKey(f"b{i}#{k}", 0), k) for k in range(n)))
        if engine_takes(engine, spec):
            step(engine)
    for _ in range(steps):
        if engine.has_work() and step(engine) is None:
            copier.finish_all()
    copier.finish_all()
    spec = request("now", prompt_of(urgent[0], 9, urgent[1], branch=9), 2, priority=PriorityClass.INTERACTIVE)
    if any(not sequence.num_blocks for sequence in engine._sequences.values()):
        return  # those that wait take what they can get, and more when they fork
    if not engine_takes(engine, spec, add=not by_ticket) or (by_ticket and engine.reserve("t", spec) is not None):
        return
    promised = displace(engine._snapshot(), engine._scheduler_config)
    before = engine.load()
    step(engine)
    if not promised:
        return
    assert engine.load().preemptions >= before.preemptions + len(promised)
    copier.finish_all()
    if by_ticket:
        assert engine.reserve("t", spec) is not None
        engine.release_ticket("t")
        return
    if spec.key in engine._sequences and not engine._sequences[spec.key].num_blocks:
        step(engine)
    assert spec.key not in engine._sequences or engine._sequences[spec.key].num_blocks


def engine_takes(engine: Engine, spec: RequestSpec, *, add: bool = True) -> bool:
    """Add the request; False if it could never run."""
    try:
        if add:
            engine.add(spec, SequenceKind.GENERATE)
        else:
            engine.check_runnable(spec)
    except InvalidRequest:
        return False
    return True
