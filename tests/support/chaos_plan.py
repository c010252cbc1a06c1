"""What happens in a chaos run, decided beforehand: a seed gives the requests and the disturbances, with their times.

Pure. `tests.support.chaos` carries it out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from router.client import Sampling

VOCABULARY = 250  # token ids of prompts are 1 to this


class Verb(StrEnum):
    """What is done to the cluster."""

    KILL = "kill"  # SIGKILL; started again after `seconds`
    FREEZE = "freeze"  # SIGSTOP; SIGCONT after `seconds`
    RESTART = "restart"  # SIGTERM, which drains; started again when it has ended
    MESSAGES = "messages"  # KV messages meet with faults for `seconds`


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One thing done to the cluster, `at_s` seconds after the start. `worker`: empty for `Verb.MESSAGES`."""

    at_s: float
    verb: Verb
    worker: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.at_s:6.2f} s  {self.verb} {self.worker} {self.seconds:.2f} s"


class Manner(StrEnum):
    """How a client behaves."""

    READS = "reads"
    READS_SLOWLY = "reads slowly"  # sleeps `amount` seconds after each event
    LEAVES = "leaves"  # cancels its call after `amount` tokens
    CANCELS = "cancels"  # asks for the end by the request's id, after `amount` tokens
    DEADLINE = "deadline"  # gives the request `amount` seconds


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt with parameters: what must come out of it is known. `kind` names what it tests."""

    name: str
    kind: str
    prompt: tuple[int, ...]
    sampling: Sampling

    @property
    def samples(self) -> int:
        return self.sampling.n or 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the load: `case`, sent `at_s` seconds after the start.

    `salt`: of the prefix cache; one of its own, so that the prompt takes the whole way, or none.
    """

    request_id: str
    at_s: float
    case: Case
    manner: Manner
    amount: float
    priority: str
    salt: str

    def __str__(self) -> str:
        return (
            f"{self.request_id} at {self.at_s:.2f} s: {self.case.name} ({self.case.kind}, {len(self.case.prompt)} "
            f"tokens), {self.manner} {self.amount:.2f}, {self.priority}, salt {self.salt!r}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A chaos run. Everything follows from `seed`, `seconds`, `rate` and `workers`."""

    seed: int
    seconds: float
    rate: float
    workers: tuple[str, ...]
    cases: tuple[Case, ...] = field(repr=False)
    requests: tuple[Request, ...] = field(repr=False)
    disturbances: tuple[Disturbance, ...] = field(repr=False)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.seconds:g} s, {self.rate:g} requests/s, workers {', '.join(self.workers)}"]
        return "\n".join([*lines, *(f"  {each}" for each in self.disturbances)])


def make_plan(
    seed: int, *, seconds: float, rate: float, workers: Sequence[str], cases: int = 24, every_s: float = 2.0
) -> Plan:
    """Draw a plan.

    Args:
        seconds: of load and disturbances. rate: requests per second.
        workers: ids; each is disturbed by one thing at a time. cases: different prompts and parameters.
        every_s: mean seconds between two disturbances of any worker.
    """
    made = tuple(_case(random.Random(f"{seed}/case/{number}"), number) for number in range(cases))
    return Plan(
        seed,
        seconds,
        rate,
        tuple(workers),
        made,
        tuple(_requests(random.Random(f"{seed}/requests"), made, seconds, rate)),
        tuple(_disturbances(random.Random(f"{seed}/disturbances"), workers, seconds, every_s)),
    )


def _disturbances(
    generator: random.Random, workers: Sequence[str], seconds: float, every_s: float
) -> list[Disturbance]:
    found: list[Disturbance] = []
    busy_until = dict.fromkeys(workers, 0.0)
    at = generator.uniform(0.2, 1.0) * every_s
    while at < seconds:
        free = [worker for worker in workers if busy_until[worker] <= at]
        if free:
            worker = generator.choice(free)
            verb = generator.choices((Verb.KILL, Verb.FREEZE, Verb.RESTART), (5, 4, 1))[0]
            # A freeze is a hiccup, or longer than silence may last before it counts as death.
            length = {
                Verb.KILL: generator.uniform(0.0, 1.5),
                Verb.FREEZE: generator.choice((generator.uniform(0.05, 1.0), generator.uniform(3.0, 6.0))),
                Verb.RESTART: 0.0,
            }[verb]
            found.append(Disturbance(at, verb, worker, length))
            busy_until[worker] = at + length + 4.0  # about as long as a start takes
        at += generator.expovariate(1 / every_s)
    at = generator.uniform(0.5, 3.0)
    while at < seconds:
        length = generator.uniform(2.0, 6.0)
        found.append(Disturbance(at, Verb.MESSAGES, "", length))
        at += length + generator.uniform(1.0, 4.0)
    return sorted(found, key=lambda each: each.at_s)


def _requests(generator: random.Random, cases: Sequence[Case], seconds: float, rate: float) -> list[Request]:
    found: list[Request] = []
    at = 0.0
    while (at := at + generator.expovariate(rate)) < seconds:
        number = len(found)
        manner = generator.choices(tuple(Manner), (12, 3, 2, 2, 2))[0]
        amount = {
            Manner.READS: 0.0,
            Manner.READS_SLOWLY: generator.uniform(0.01, 0.08),
            Manner.LEAVES: float(generator.randrange(0, 40)),
            Manner.CANCELS: float(generator.randrange(0, 40)),
            Manner.DEADLINE: generator.uniform(0.05, 3.0),
        }[manner]
        found.append(
            Request(
                request_id=f"chaos-{number}",
                at_s=at,
                case=generator.choice(cases),
                manner=manner,
                amount=amount,
                priority=generator.choice(("interactive", "standard", "batch")),
                salt=f"salt-{number}" if generator.random() < 0.6 else "",
            )
        )
    return found


_STOPS = ("a", "e", "th", "Q", "z")


def _case(generator: random.Random, number: int) -> Case:
    """Case `number`: the kinds take turns, lengths and parameters are drawn."""
    length = generator.choice(
        (generator.randrange(1, 20), generator.randrange(20, 120), generator.randrange(120, 500))
    )
    prompt = tuple(generator.randrange(1, VOCABULARY + 1) for _ in range(length))
    tokens = generator.randrange(8, 80)
    seed = generator.randrange(1 << 32)
    kinds: dict[str, Sampling] = {
        "greedy": Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        "long": Sampling(max_tokens=150 + tokens, temperature=0.0, ignore_eos=True),
        "seeded": Sampling(max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True),
        "filters": Sampling(max_tokens=tokens, temperature=0.8, top_k=40, top_p=0.9, seed=seed, ignore_eos=True),
        "penalties": Sampling(
            max_tokens=tokens, temperature=0.7, seed=seed, repetition_penalty=1.2, presence_penalty=0.5
        ),
        "stop strings": Sampling(max_tokens=tokens, temperature=1.0, seed=seed, stop=_STOPS, min_tokens=3),
        "samples": Sampling(max_tokens=tokens, temperature=1.0, seed=seed, n=3, ignore_eos=True),
        "structured": Sampling(
            max_tokens=60, temperature=1.0, seed=seed, regex="[a-f]{3,9}-(red|green|blue)( [0-9]{1,3}){2}"
        ),
        "one token": Sampling(max_tokens=1, temperature=1.0, seed=seed),
    }
    kind = tuple(kinds)[number % len(kinds)]
    return Case(f"case-{number}", kind, prompt, kinds[kind])
