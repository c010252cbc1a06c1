"""The clients of a chaos run, what they saw, and whether it was right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from engine.sampler import _gumbel, _row_keys
from pdcore.errors import DeadlineExceeded, Overloaded, PdserveError, Unavailable
from router.client import AsyncClient, Event, finish_reason_name
from tests.support.chaos_plan import Case, Manner, Request

NEAR_TIE = 1e-3
"""Design decision 7: where the best two scores are closer than this, logits' last bits may choose."""


@dataclass(slots=True)
class Sample:
    """One sample of an answer. `finish`: None until it has ended."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None


@dataclass(slots=True)
class Seen:
    """What a client saw of one request.

    `error`: by which it ended. `broken`: promises of the stream that were not kept. `left`: the client went away.
    `heard_at`: when the last event came, on the monotonic clock; `began` likewise. `worst_gap_s`: the longest time
    between two events.
    """

    samples: list[Sample]
    error: Exception | None = None
    left: bool = False
    asked_to_cancel: bool = False
    broken: list[str] = field(default_factory=list)
    heard_at: float | None = None
    worst_gap_s: float = 0.0
    replays: int = 0
    began: float = 0.0
    seconds: float = 0.0

    def take(self, event: Event) -> None:
        sample = self.samples[event.sample]
        if sample.finish is not None:
            self.broken.append(f"an event of sample {event.sample} after its end")
        if event.token_ids and event.token_index != len(sample.tokens):
            self.broken.append(
                f"sample {event.sample}: tokens from {event.token_index} on follow {len(sample.tokens)} tokens"
            )
        sample.tokens.extend(event.token_ids)
        sample.text += event.text
        now = time.monotonic()
        if self.heard_at is not None:
            self.worst_gap_s = max(self.worst_gap_s, now - self.heard_at)
        self.heard_at = now
        if event.HasField("end"):
            sample.finish = finish_reason_name(event.end.finish_reason)
            self.replays = max(self.replays, event.end.timeline.replays)

    @property
    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def ended(self) -> bool:
        return all(sample.finish is not None for sample in self.samples)

    @property
    def outcome(self) -> str:
        """In one word or two."""
        if self.error is not None:
            return type(self.error).__name__
        if self.left:
            return "left"
        finishes = {sample.finish for sample in self.samples}
        return "cancelled" if "cancelled" in finishes else "finished"


async def run_request(
    client: AsyncClient, request: Request, limit_s: float, heard: Callable[[int], None] = lambda tokens: None
) -> Seen:
    """Be the client of one request; `TimeoutError` in `Seen.error` if it has not ended within `limit_s`.

    Args:
        heard: called for each event, with the number of its tokens.
    """
    seen = Seen([Sample() for _ in range(request.case.samples)])
    seen.began = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            await _follow(client, request, seen, heard)
    except (PdserveError, TimeoutError) as error:
        seen.error = error
    seen.seconds = time.monotonic() - seen.began
    return seen


async def _follow(client: AsyncClient, request: Request, seen: Seen, heard: Callable[[int], None]) -> None:
    manner, amount = request.manner, request.amount
    stream = client.generate(
        request.case.prompt,
        request.case.sampling,
        timeout_s=amount if manner is Manner.DEADLINE else None,
        request_id=request.request_id,
        priority=request.priority,
        cache_salt=request.salt,
    )
    async with stream:
        async for event in stream:
            seen.take(event)
            heard(len(event.token_ids))
            if manner is Manner.LEAVES and seen.tokens >= amount:
                seen.left = True
                return
            if manner is Manner.CANCELS and seen.tokens >= amount and not seen.asked_to_cancel:
                seen.asked_to_cancel = True
                await client.cancel(request.request_id)
            if manner is Manner.READS_SLOWLY:
                await asyncio.sleep(amount)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`problems`: what is wrong with an outcome. `near_ties`: samples that went another way at a near-tie."""

    problems: tuple[str, ...]
    near_ties: int


class Judge:
    """Compares what clients saw with what comes out of each case undisturbed.

    Args:
        expected: by case name, each sample in full. model: computes the margins at divergences.
        outages: from and to, on the monotonic clock: when the router did not serve.
    """

    def __init__(
        self,
        expected: Mapping[str, Sequence[Sample]],
        model: PreTrainedModel,
        outages: Sequence[tuple[float, float]] = (),
    ) -> None:
        self._expected = expected
        self._outages = outages
        self._model = model

    def judge(self, request: Request, seen: Seen) -> Verdict:
        """Exactly one outcome, of those that this client can have, and tokens that are the case's:

        - every client may finish, with the whole answer;
        - one with a deadline may get `DeadlineExceeded` instead, or be shed before its first token if it could not be
          met, and one that cancels an end that says so;
        - one that leaves hears no end;
        - one that came when the router did not serve may be refused by `Unavailable`, before its first token;
        - no other error is right: the run allows as many replays as it can cause, and its queue holds all requests.
        """
        problems = list(seen.broken)
        near_ties = 0
        if seen.error is not None:
            shed = isinstance(seen.error, Overloaded) and not seen.tokens
            late = shed or isinstance(seen.error, DeadlineExceeded)
            if not ((late and request.manner is Manner.DEADLINE) or self._nobody_was_there(seen)):
                problems.append(f"ended by {type(seen.error).__name__}: {seen.error}")
            elif seen.ended:
                problems.append("an error after the end of every sample")
        elif not seen.ended and not seen.left:
            problems.append("the stream ended without an end of every sample")
        for number, sample in enumerate(seen.samples):
            expected = self._expected[request.case.name][number]
            problem, tie = self._compare(request.case, number, sample, expected)
            near_ties += tie
            if problem:
                problems.append(f"sample {number}: {problem}")
            elif sample.finish == "cancelled" and not seen.asked_to_cancel:
                problems.append(f"sample {number} was cancelled, and nobody asked for it")
            elif sample.finish not in (None, "cancelled") and not tie:
                got = (sample.finish, len(sample.tokens), sample.text)
                wanted = (expected.finish, len(expected.tokens), expected.text)
                if got != wanted:
                    problems.append(f"sample {number} ended as {got}, not {wanted}")
        return Verdict(tuple(problems), near_ties)

    def _nobody_was_there(self, seen: Seen) -> bool:
        return (
            isinstance(seen.error, Unavailable)
            and not seen.tokens
            and any(start <= seen.began <= stop for start, stop in self._outages)
        )

    def _compare(self, case: Case, number: int, sample: Sample, expected: Sample) -> tuple[str, bool]:
        """What is wrong with the tokens so far, and whether they diverge where they may."""
        for same, (got, wanted) in enumerate(zip(sample.tokens, expected.tokens, strict=False)):
            if got != wanted:
                margin = self.margin(case, number, expected.tokens[:same], got, wanted)
                if margin < NEAR_TIE:
                    return "", True
                return f"token {same} is {got}, not {wanted}; their scores are {margin:.2g} apart", False
        if len(sample.tokens) > len(expected.tokens):
            return f"{len(sample.tokens)} tokens, not {len(expected.tokens)}", False
        if not expected.text.startswith(sample.text):
            return f"the text {sample.text!r} is no beginning of {expected.text!r}", False
        return "", False

    def margin(self, case: Case, number: int, output: Sequence[int], one: int, other: int) -> float:
        """How far the scores of two tokens are apart behind `output`, noise included."""
        known = [*case.prompt, *output]
        with torch.no_grad():
            logits = self._model(torch.tensor([known]), logits_to_keep=1).logits[0, -1].float().clone()
        sampling = case.sampling
        for token in set(known) if sampling.repetition_penalty else ():
            value = logits[token]
            logits[token] = torch.where(
                value > 0, value / sampling.repetition_penalty, value * sampling.repetition_penalty
            )
        for token in set(output) if sampling.presence_penalty else ():
            logits[token] -= sampling.presence_penalty
        pair = logits[[one, other]]
        if sampling.temperature:
            scores = noisy_scores(pair / sampling.temperature, (one, other), sampling.seed or 0, number, len(known))
        else:
            scores = pair
        return float(abs(scores[0] - scores[1]))


def noisy_scores(
    scaled: torch.Tensor, tokens: Sequence[int], seed: int, sample_index: int, position: int
) -> torch.Tensor:
    """What sampling chooses the largest of: float32 [N] for scaled logits [N] of `tokens`."""
    import numpy as np

    keys = _row_keys(np.array([seed], np.uint64), np.array([sample_index], np.int32), np.array([position], np.int64))
    return scaled + _gumbel(keys, torch.tensor([list(tokens)]))[0]
