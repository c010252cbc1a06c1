"""Structured outputs in the engine, on the fake runner: beside free ones, across workers, and across preemptions."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine.engine import Engine, SequenceKind, TokenOut
from pdcore.errors import InvalidRequest, TicketError
from pdcore.structured import StructuredOutput
from pdcore.types import FinishReason, RequestSpec, SamplingParams
from tests.support.engine_kit import ManualCopier, make_engine, prefill_and_transfer, request, run, step, tokens_of
from tests.support.fake_runner import FakeRunner, oracle
from tests.support.structures import END, EXAMPLES, bpe_tokenizer, choice, guards_of, regex

GENERATE, PREFILL = SequenceKind.GENERATE, SequenceKind.PREFILL
TOKENIZER = bpe_tokenizer()
VOCAB = TOKENIZER.get_vocab_size()
END_ID = TOKENIZER.token_to_id(END)
GUARDS = guards_of(TOKENIZER)


def fake_runner(**options: int) -> FakeRunner:
    return FakeRunner(vocab_size=VOCAB, **options)  # type: ignore[arg-type]


def asked(
    name: str,
    output: StructuredOutput | None,
    prompt: int | Sequence[int] = 20,
    max_tokens: int = 60,
    **options: object,
) -> RequestSpec:
    """A sampled request that ends at the end token, of which a fake model that knows no grammar makes few."""
    fields: dict[str, object] = {"stop": (END_ID,), "temperature": 1.0, "seed": len(name), "window": 1000}
    return request(name, prompt, max_tokens, structured=output, vocab_size=VOCAB, **(fields | options))  # type: ignore[arg-type]


def generate(engine: Engine, *specs: RequestSpec, copier: ManualCopier | None = None) -> list[TokenOut]:
    for spec in specs:
        engine.add(spec, GENERATE)
    return run(engine, copier=copier)


def outcome(tokens: Sequence[TokenOut], spec: RequestSpec) -> tuple[str, FinishReason | None]:
    """Text of what was generated, the stop token left out, and why it ended."""
    ids = [*spec.delivered, *tokens_of(tokens, spec)]
    finish = next(token.finish for token in reversed(tokens) if token.key == spec.key)
    if finish is FinishReason.STOP and ids[-1] == END_ID:
        ids.pop()
    return TOKENIZER.decode(ids), finish


def assert_fits(name: str, tokens: Sequence[TokenOut], spec: RequestSpec) -> None:
    text, finish = outcome(tokens, spec)
    if finish is FinishReason.STOP:
        assert EXAMPLES[name].fits(text), text
    else:
        assert EXAMPLES[name].unbounded, text


class TestBatches:
    def test_every_kind_at_once_and_free_ones_unchanged(self) -> None:
        runner = fake_runner(num_blocks=400, max_num_seqs=32)
        engine = make_engine(runner, budget=100, max_num_seqs=32, guards=GUARDS)
        structured = {
            f"{name}{i}": asked(f"{name}{i}", example.output, max_tokens=200)
            for name, example in EXAMPLES.items()
            for i in range(3)
        }
        free = [asked(f"free{i}", None, 5 + 7 * i, temperature=i % 2) for i in range(6)]
        tokens = generate(engine, *structured.values(), *free)
        ended = 0
        for name, spec in structured.items():
            assert_fits(name[:-1], tokens, spec)
            ended += outcome(tokens, spec)[1] is FinishReason.STOP
        assert ended >= 12
        for spec in free:
            assert tokens_of(tokens, spec) == oracle(runner, spec)[0]
        assert engine.load().free_blocks == 400

    def test_alone_and_in_a_batch_it_is_the_same(self) -> None:
        specs = [asked(name, example.output) for name, example in EXAMPLES.items()]
        together = generate(make_engine(fake_runner(num_blocks=200), max_num_seqs=16, guards=GUARDS), *specs)
        for spec in specs:
            alone = generate(make_engine(fake_runner(), guards=GUARDS), spec)
            assert tokens_of(alone, spec) == tokens_of(together, spec)


class TestTheEnd:
    def test_where_nothing_may_follow_without_an_end_token(self) -> None:
        """Also past the end tokens: with `ignore_eos` there is no stop token to end by."""
        spec = asked("r", choice("red", "green"), stop=())
        text, finish = outcome(generate(make_engine(fake_runner(), guards=GUARDS), spec), spec)
        assert text in ("red", "green")
        assert finish is FinishReason.STOP

    def test_end_tokens_are_not_sampled_where_they_are_ignored(self) -> None:
        spec = asked("r", regex("[a-z ]*"), stop=(), max_tokens=200)
        tokens = generate(make_engine(fake_runner(), guards=GUARDS), spec)
        ids = tokens_of(tokens, spec)
        assert len(ids) == 200
        assert END_ID not in ids
        assert tokens[-1].finish is FinishReason.LENGTH

    def test_a_stop_token_ends_it(self) -> None:
        spec = asked("r", regex("(a|b)+"), max_tokens=200, stop=(END_ID,))
        text, finish = outcome(generate(make_engine(fake_runner(), guards=GUARDS), spec), spec)
        assert finish is FinishReason.STOP
        assert set(text) <= {"a", "b"}
        assert text

    @pytest.mark.parametrize("least", [1, 10, 25])
    def test_min_tokens(self, least: int) -> None:
        spec = asked("r", regex("(a|b)+"), min_tokens=least)
        ids = tokens_of(generate(make_engine(fake_runner(), guards=GUARDS), spec), spec)
        assert END_ID not in ids[:least]
        short = asked("s", choice("yes"), min_tokens=30)
        text, finish = outcome(generate(make_engine(fake_runner(), guards=GUARDS), short), short)
        assert (text, finish) == ("yes", FinishReason.STOP), "the form wins"

    def test_max_tokens_cuts_it(self) -> None:
        spec = asked("r", regex("[0-9]{40}"), max_tokens=7)
        tokens = generate(make_engine(fake_runner(), guards=GUARDS), spec)
        assert len(tokens_of(tokens, spec)) == 7
        assert tokens[-1].finish is FinishReason.LENGTH

    def test_a_prefill_worker_ends_what_its_first_token_completes(self) -> None:
        engine = make_engine(fake_runner(), guards=GUARDS)
        (token,) = TOKENIZER.encode("x").ids
        engine.add(asked("r", choice("x")), PREFILL)
        (out,) = run(engine)
        assert (out.token_id, out.finish) == (token, FinishReason.STOP)


class TestAcrossWorkers:
    @pytest.mark.parametrize("name", EXAMPLES)
    def test_replays_at_every_token_go_on_alike(self, name: str) -> None:
        spec = asked(name, EXAMPLES[name].output, max_tokens=16)
        ids = tokens_of(generate(make_engine(fake_runner(), guards=GUARDS), spec), spec)
        for count in range(1, len(ids)):
            again = replace(spec, delivered=tuple(ids[:count]))
            tokens = generate(make_engine(fake_runner(), guards=GUARDS), again)
            assert tokens_of(tokens, again) == ids[count:], count

    @pytest.mark.parametrize("name", EXAMPLES)
    def test_prefill_and_decode_equal_one_worker(self, name: str) -> None:
        spec = asked(name, EXAMPLES[name].output, 37)
        whole = generate(make_engine(fake_runner(), guards=GUARDS), spec)
        here, there = fake_runner(), fake_runner(block_size=8)
        decode, prefill = make_engine(here, guards=GUARDS), make_engine(there, guards=GUARDS)
        reserved = decode.reserve("t", spec)
        assert reserved is not None
        first = prefill_and_transfer(prefill, there, here, spec, reserved.blocks)
        decode.commit_ticket("t", spec, first)
        split = run(decode)
        assert tokens_of(split, spec) == tokens_of(whole, spec)
        assert split[-1].finish == whole[-1].finish
        assert here.computed == len(tokens_of(split, spec)) - 1

    def test_a_first_token_off_the_grammar_commits_nothing(self) -> None:
        runner = fake_runner()
        engine = make_engine(runner, guards=GUARDS)
        spec = asked("r", regex("[0-9]{9}"))
        assert engine.reserve("t", spec) is not None
        with pytest.raises(InvalidRequest, match=r"first_tokens: .* does not fit the structured output"):
            engine.commit_ticket("t", spec, TOKENIZER.token_to_id("x"))
        engine.check_integrity()
        assert engine.load().open_tickets == 1
        engine.commit_ticket("t", spec, TOKENIZER.token_to_id("7"))
        with pytest.raises(TicketError):
            engine.commit_ticket("t", replace(spec, key=spec.key._replace(attempt=1)), 7)

    @pytest.mark.parametrize("preemption", ["recompute", "swap"])
    def test_preempted_again_and_again_it_is_the_same(self, preemption: str) -> None:
        outputs = [example.output for example in EXAMPLES.values()] * 2
        specs = [asked(f"r{i}", output, 10 + i, 50) for i, output in enumerate(outputs)]
        roomy = generate(make_engine(fake_runner(num_blocks=400), max_num_seqs=16, guards=GUARDS), *specs)
        copier = ManualCopier()  # a thread's copy may be under way while nothing else can run
        engine = make_engine(
            fake_runner(num_blocks=14, block_size=8),
            max_num_seqs=16,
            guards=GUARDS,
            preemption=preemption,
            swap_blocks=40 if preemption == "swap" else 0,
            copier=copier,
        )
        tight = generate(engine, *specs, copier=copier)
        assert engine.load().preemptions > 0
        assert bool(copier.done) == (preemption == "swap")
        for spec in specs:
            assert tokens_of(tight, spec) == tokens_of(roomy, spec)

    def test_paused_without_credit_it_goes_on_where_it_was(self) -> None:
        spec = asked("r", EXAMPLES["json schema"].output, max_tokens=80)
        whole = tokens_of(generate(make_engine(fake_runner(), guards=GUARDS), spec), spec)
        engine = make_engine(fake_runner(), guards=GUARDS)
        engine.add(replace(spec, token_window=1), GENERATE)
        tokens: list[TokenOut] = []
        while not tokens or tokens[-1].finish is None:
            engine.add_credit(spec.key, 1)
            tokens += run(engine)
        assert tokens_of(tokens, spec) == whole


class TestFailures:
    def test_without_a_tokenizer_it_is_refused(self) -> None:
        engine = make_engine(fake_runner())
        with pytest.raises(InvalidRequest, match=r"sampling\.structured_output\.choice: .*no tokenizer"):
            engine.add(asked("r", choice("a")), GENERATE)

    def test_a_bad_one_is_refused_before_anything_is_held(self) -> None:
        engine = make_engine(fake_runner(), guards=GUARDS)
        with pytest.raises(InvalidRequest, match=r"sampling\.structured_output\.regex"):
            engine.add(asked("r", regex("(")), GENERATE)
        assert not engine.has_work()

    def test_an_output_that_cannot_go_on_is_ended_and_the_others_run(self) -> None:
        """The model has no row for `b`."""
        limit = TOKENIZER.token_to_id("b")
        runner = FakeRunner(vocab_size=limit)
        guards = guards_of(TOKENIZER, vocab_size=limit)
        engine = make_engine(runner, guards=guards)
        stuck = request("stuck", 5, structured=regex("ab"), vocab_size=limit)
        free = request("free", 5, vocab_size=limit)
        engine.add(stuck, GENERATE)
        engine.add(free, GENERATE)
        rejected, tokens = [], []
        while engine.has_work():
            result = step(engine)
            assert result is not None
            rejected += result.rejected
            tokens += result.tokens
        ((key, error),) = rejected
        assert key == stuck.key
        assert isinstance(error, InvalidRequest)
        assert "nothing here that this model's tokens" in error.problem
        assert tokens_of(tokens, free) == oracle(runner, free)[0]
        assert engine.load().free_blocks == engine.load().total_blocks
        guards.close()

    def test_aborted_while_its_mask_is_being_made(self) -> None:
        engine = make_engine(fake_runner(), guards=GUARDS)
        spec, other = asked("r", EXAMPLES["json object"].output), asked("other", choice("yes", "no"))
        engine.add(spec, GENERATE)
        engine.add(other, GENERATE)
        step(engine)
        plan = engine.schedule()
        assert plan is not None
        assert engine.abort(spec.key)
        result = engine.apply(plan, engine.execute(plan))
        assert all(token.key == other.key for token in result.tokens)
        run(engine)
        assert engine.load().free_blocks == engine.load().total_blocks


def test_masks_are_made_beside_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """`schedule` returns while they are not there yet; whoever samples waits for them."""
    guards = guards_of(TOKENIZER)
    engine = make_engine(fake_runner(), guards=guards)
    engine.add(asked("r", choice("yes", "no")), GENERATE)
    may_go, fill = threading.Event(), guards._fill
    threads: list[str] = []

    def held(states: list, bits: np.ndarray) -> None:
        assert may_go.wait(30)
        threads.append(threading.current_thread().name)
        fill(states, bits)

    monkeypatch.setattr(guards, "_fill", held)
    plan = engine.schedule()
    assert plan is not None
    assert plan.step_input.mask_rows.tolist() == [0]
    assert not threads
    threading.Timer(0.05, may_go.set).start()
    (token,) = engine.apply(plan, engine.execute(plan)).tokens
    assert threads[0].startswith("masks")
    assert TOKENIZER.decode([token.token_id])[0] in "yn"
    guards.close()


def test_parameters_of_equal_structure_are_equal() -> None:
    one, other = (SamplingParams(5, structured_output=choice("a", "b")) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert choice("ab").digest != choice("a", "b").digest != regex("a").digest
