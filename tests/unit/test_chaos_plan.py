"""The chaos run's own parts: a plan is its seed's, and the judge tells right from wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.sampler import sample
from pdcore.errors import DeadlineExceeded, InternalError, Overloaded, Unavailable
from protos import generation_pb2
from router.client import Sampling
from tests.support.chaos_load import Judge, Sample, Seen, Verdict, noisy_scores
from tests.support.chaos_plan import Case, Manner, Request, Verb, make_plan
from tests.support.faulty_link import FaultSource, MessageFaults

WORKERS = ("prefill-0", "decode-0", "decode-1")
CASE = Case("case", "greedy", (1, 2, 3), Sampling(max_tokens=4, temperature=0.0))
EXPECTED = Sample([5, 6, 7, 8], "abcd", "length")


def request(manner: Manner = Manner.READS) -> Request:
    return Request("r", 0.0, CASE, manner, 1.0, "standard", "")


def seen_of(tokens: int = 4, finish: str | None = "length", **fields: object) -> Seen:
    sample = Sample(EXPECTED.tokens[:tokens], EXPECTED.text[:tokens], finish)
    return Seen([sample], **fields)  # type: ignore[arg-type]


class FixedMargin(Judge):
    """Knows no model."""

    value = 1.0

    def __init__(self) -> None:
        super().__init__({"case": [EXPECTED]}, None, [(10.0, 20.0)])  # type: ignore[arg-type]

    def margin(self, *_: object) -> float:
        return self.value


def problems_of(seen: Seen, manner: Manner = Manner.READS) -> tuple[str, ...]:
    return FixedMargin().judge(request(manner), seen).problems


def test_a_plan_is_its_seeds() -> None:
    one, again, other = (make_plan(seed, seconds=60, rate=5, workers=WORKERS) for seed in (1, 1, 2))
    assert one == again
    assert one.disturbances != other.disturbances
    assert one.requests != other.requests
    assert {each.verb for each in one.disturbances} == set(Verb)
    assert {each.manner for each in one.requests} == set(Manner)
    assert len({each.kind for each in one.cases}) == 9


def test_a_worker_is_disturbed_by_one_thing_at_a_time() -> None:
    plan = make_plan(3, seconds=300, rate=1, workers=WORKERS, every_s=0.5)
    until = dict.fromkeys(WORKERS, 0.0)
    for each in plan.disturbances:
        if each.verb is not Verb.MESSAGES:
            assert each.at_s >= until[each.worker]
            until[each.worker] = each.at_s + each.seconds


@pytest.mark.parametrize(
    ("seen", "manner"),
    [
        (seen_of(), Manner.READS),
        (seen_of(), Manner.CANCELS),
        (seen_of(2, "cancelled", asked_to_cancel=True), Manner.CANCELS),
        (seen_of(2, None, left=True), Manner.LEAVES),
        (seen_of(3, None, error=DeadlineExceeded("late")), Manner.DEADLINE),
        (seen_of(0, None, error=Overloaded("it would be late", 1.0)), Manner.DEADLINE),
        (seen_of(0, None, error=Unavailable("no decode worker"), began=15.0), Manner.READS),
    ],
)
def test_right_outcomes(seen: Seen, manner: Manner) -> None:
    assert problems_of(seen, manner) == ()


@pytest.mark.parametrize(
    ("seen", "manner"),
    [
        (seen_of(3), Manner.READS),  # too short
        (seen_of(2, None), Manner.READS),  # no end
        (seen_of(2, "cancelled"), Manner.READS),  # nobody asked
        (seen_of(2, None, error=DeadlineExceeded("late")), Manner.READS),  # no deadline
        (seen_of(4, "length", error=DeadlineExceeded("late")), Manner.DEADLINE),  # two ends
        (seen_of(2, None, error=InternalError("bug")), Manner.READS),
        (seen_of(0, None, error=Overloaded("it would be late", 1.0)), Manner.READS),  # no deadline
        (seen_of(1, None, error=Overloaded("it would be late", 1.0)), Manner.DEADLINE),  # it had begun
        (seen_of(2, None, error=TimeoutError()), Manner.READS),
        (seen_of(0, None, error=Unavailable("no decode worker"), began=25.0), Manner.READS),  # there was one
        (seen_of(1, None, error=Unavailable("no decode worker"), began=15.0), Manner.READS),  # it had begun
        (Seen([Sample([5, 6, 9, 8], "abcd", "length")]), Manner.READS),  # another token
        (Seen([Sample([5, 6, 7, 8, 9], "abcde", "length")]), Manner.READS),  # too long
        (Seen([replace(EXPECTED, text="abcx")]), Manner.READS),
        (Seen([replace(EXPECTED, finish="stop")]), Manner.READS),
    ],
)
def test_wrong_outcomes(seen: Seen, manner: Manner) -> None:
    assert len(problems_of(seen, manner)) == 1


def test_a_divergence_at_a_near_tie_is_counted() -> None:
    judge = FixedMargin()
    judge.value = 1e-4
    verdict = judge.judge(request(), Seen([Sample([5, 6, 9, 1], "abxy", "length")]))
    assert verdict == Verdict((), 1)


def test_gaps_repeats_and_events_after_the_end_are_seen() -> None:
    seen = Seen([Sample()])
    event = generation_pb2.GenerateEvent
    for index, end in ((0, False), (2, False), (2, True), (3, False)):
        message = event(token_index=index, token_ids=[1])
        if end:
            message.end.SetInParent()
        seen.take(message)
    assert seen.broken == ["sample 0: tokens from 2 on follow 1 tokens", "an event of sample 0 after its end"]


def test_fates_are_the_seeds_and_only_while_the_file_exists(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    faults = MessageFaults(seed=5, drop=0.2, delay=0.2, repeat=0.2, damage=0.2, max_delay_s=1.0, while_file=str(gate))
    assert {FaultSource(faults, 0).draw("out", "Frame") for _ in range(20)} == {("pass", 0.0)}
    gate.touch()
    first, again, other = (FaultSource(faults, number) for number in (0, 0, 1))
    fates = [first.draw("out", "Frame") for _ in range(200)]
    assert fates == [again.draw("out", "Frame") for _ in range(200)]
    assert fates != [other.draw("out", "Frame") for _ in range(200)]
    assert {fate for fate, _ in fates} == {"pass", "drop", "delay", "repeat", "damage"}
    assert all((delay > 0) == (fate == "delay") for fate, delay in fates)
    assert "damage" not in {FaultSource(faults, 0).draw("in", "FrameAck")[0] for _ in range(200)}


def test_the_judge_knows_the_noise_of_the_sampler() -> None:
    """What the sampler takes has the highest score, by the judge's own sum."""
    rows, seed, temperature = 20, 77, 0.7
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(1))

    def each(value: float, dtype: type) -> np.ndarray:
        return np.full(rows, value, dtype)

    fields = SimpleNamespace(
        temperature=each(temperature, np.float32),
        top_p=each(1.0, np.float32),
        min_p=each(0.0, np.float32),
        top_k=each(0, np.int32),
        seeds=each(seed, np.uint64),
        sample_index=each(2, np.int32),
        sample_positions=np.arange(rows, dtype=np.int64),
        forbidden_rows=np.zeros(0, np.int32),
        forbidden_tokens=np.zeros(0, np.int32),
        mask_rows=np.zeros(0, np.int32),
        rules=None,
    )
    taken = sample(logits, fields)  # type: ignore[arg-type]
    scores = [noisy_scores(row / temperature, range(50), seed, 2, at) for at, row in enumerate(logits)]
    assert [int(each.argmax()) for each in scores] == taken.tolist()
    assert taken.tolist() != logits.argmax(-1).tolist()


def test_a_margin_counts_penalties_and_temperature() -> None:
    class Flat:
        """A model to which all tokens but one are alike."""

        def __call__(self, tokens: torch.Tensor, logits_to_keep: int) -> SimpleNamespace:
            logits = torch.zeros(1, 1, 20)
            logits[..., 5] = 3.0
            return SimpleNamespace(logits=logits)

    judge = Judge({}, Flat())  # type: ignore[arg-type]
    penalties = Sampling(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.25)
    assert judge.margin(CASE, 0, [], 5, 6) == pytest.approx(3.0)
    assert judge.margin(replace(CASE, sampling=penalties), 0, [5], 5, 6) == pytest.approx(3.0 / 1.5 - 0.25)
    noisy = replace(CASE, sampling=Sampling(temperature=1.0, seed=3))
    assert judge.margin(noisy, 0, [], 5, 6) != judge.margin(noisy, 1, [], 5, 6)
