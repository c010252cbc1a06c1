"""The routing policies, each beside a judge of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.config import ROUTING_POLICIES
from pdcore.step_time import StepTime
from pdcore.types import Role, WorkerLoad
from router.fleet import Fleet
from router.policy import Mode, Route, RouteRequest, choose
from router.ranking import ALIKE, HERE_PRICE, PRICED_TOKENS, STREAM_PRICE, WORK_PRICE, Ranking, Wanted
from router.snapshot import InFlight, WorkerSnapshot

SLOW = StepTime(base_ms=20.0, token_ms=4.0, attended_ms=0.001, steps=50, largest=512)
FAST = StepTime(base_ms=10.0, token_ms=1.0, attended_ms=0.0005, steps=50, largest=512)


def worker(name: str, role: Role = Role.PREFILL, **options: object) -> WorkerSnapshot:
    load = WorkerLoad(free_blocks=100, total_blocks=100)
    made = WorkerSnapshot(name, role, load, 16, 8, 4096, max_num_batched_tokens=256)
    mine = {name: options.pop(name) for name in ("decisions", "age_s", "mine") if name in options}
    return replace(made, load=replace(load, **options), **mine)  # type: ignore[arg-type]


def wants(prompt_tokens: int, cached: Mapping[str, int] | None = None, **options: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt_tokens, "cached": cached, **options}


def best(
    kind: str, policy: str, wanted: dict[str, Any], workers: Sequence[WorkerSnapshot], token_ms: float = 0.0
) -> str | None:
    """Name of the best worker for a phase: prefill, decode or whole. `token_ms`: of a transfer."""
    fleet = Fleet.of(workers)
    cached = None if wanted["cached"] is None else fleet.column(wanted["cached"])
    everybody = np.ones(len(workers), np.bool_)
    ranking = Ranking(policy, Wanted(**wanted | {"cached": cached}), fleet)
    exposed = {"exposed_ms": token_ms * ranking.lacking} if kind == "decode" else {}
    found = getattr(ranking, kind)(everybody, **exposed)
    return None if found is None else fleet.id_of(found.number)


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_there_may_be_none_and_one_that_is_avoided_is_better_than_none(policy: str) -> None:
    for kind in ("prefill", "decode", "whole"):
        assert best(kind, policy, wants(10), []) is None
        assert best(kind, policy, wants(10, avoid=frozenset({"a"})), [worker("a")]) == "a"
        both = [worker("a"), worker("b", running=3, queued_prefill_tokens=900, free_blocks=10, decisions=9)]
        assert best(kind, policy, wants(10, avoid=frozenset({"a"})), both) == "b"


class TestCost:
    def test_a_fast_worker_with_a_queue_beats_a_slow_one_without(self) -> None:
        workers = [worker("slow", step_time=SLOW), worker("fast", step_time=FAST, queued_prefill_tokens=500)]
        assert best("prefill", "cost", wants(400), workers) == "fast"
        assert best("prefill", "least_loaded", wants(400), workers) == "slow"
        assert best("prefill", "cost", wants(40), workers) == "slow", "not worth the wait"

    def test_what_is_cached_need_not_be_computed(self) -> None:
        workers = [worker("idle", step_time=FAST), worker("knows", step_time=FAST, queued_prefill_tokens=300)]
        assert best("prefill", "cost", wants(1000, {"knows": 900}), workers) == "knows"
        assert best("prefill", "cost", wants(1000, {"knows": 200}), workers) == "idle"

    def test_what_is_held_need_not_be_sent(self) -> None:
        workers = [worker("idle", step_time=FAST), worker("holds", step_time=FAST, running=2)]
        cached = {"holds": 960}
        for ms, taken in ((1.0, "holds"), (0.01, "idle")):
            assert best("decode", "cost", wants(1000, cached), workers, token_ms=ms) == taken

    def test_streams_are_slower_where_many_run_or_much_is_attended_to(self) -> None:
        workers = [worker("full", step_time=SLOW, running=6), worker("free", step_time=SLOW, running=5)]
        assert best("decode", "cost", wants(100), workers) == "free"
        dear = replace(SLOW, attended_ms=0.01)
        long = [worker("long", step_time=dear, running=5, free_blocks=0), worker("full", step_time=dear, running=6)]
        assert best("decode", "cost", wants(100), long) == "full", "1,600 tokens more to attend to"

    def test_costs_that_are_alike_go_by_turns_and_others_do_not(self) -> None:
        for base, taken in ((21.0, "slow"), (30.0, "fast")):
            slow = worker("slow", step_time=replace(SLOW, token_ms=0.1, base_ms=base))
            fast = worker("fast", step_time=replace(SLOW, token_ms=0.1), decisions=5)
            assert best("decode", "cost", wants(10), [slow, fast]) == taken

    def test_siblings_queue_up_behind_the_first_and_strangers_do_not(self) -> None:
        idle = worker("idle", step_time=FAST)
        first = worker("first", step_time=FAST, mine=InFlight(requests=1, prefill_tokens=400, longest_prefill=400))
        assert best("prefill", "cost", wants(420, {"first": 400}), [idle, first]) == "first"
        assert best("prefill", "cost", wants(420), [idle, first]) == "idle"
        long = replace(first, mine=InFlight(requests=9, prefill_tokens=900))
        assert best("prefill", "cost", wants(420, {"first": 400}), [idle, long]) == "idle", "not at any price"

    def test_who_has_measured_nothing_is_like_the_others(self) -> None:
        workers = [worker("new", queued_prefill_tokens=10), worker("known", step_time=SLOW)]
        assert best("prefill", "cost", wants(100), workers) == "known"
        assert best("prefill", "cost", wants(100), [worker("new"), workers[1]]) in {"new", "known"}

    def test_old_news_fade_but_not_what_was_sent_meanwhile(self) -> None:
        idle = worker("then idle", step_time=FAST, age_s=20.0)
        busy = worker("busy", step_time=FAST, queued_prefill_tokens=100)
        calm = worker("calm", step_time=FAST, queued_prefill_tokens=20)
        assert best("prefill", "cost", wants(100), [replace(idle, age_s=0.0), busy, calm]) == "then idle"
        assert best("prefill", "cost", wants(100), [idle, busy, calm]) == "calm", "by now it has 40, like all"
        sent = replace(idle, age_s=20.0, mine=InFlight(requests=1, prefill_tokens=400))
        assert best("prefill", "cost", wants(100), [sent, busy]) == "busy"


def test_round_robin_takes_turns() -> None:
    turns = {"a": 0, "b": 0, "c": 0}
    for draw in range(30):
        workers = [worker(name, decisions=count, running=len(name)) for name, count in turns.items()]
        turns[best("decode", "round_robin", wants(9, draw=draw), workers)] += 1
    assert turns == {"a": 10, "b": 10, "c": 10}


def test_power_of_two_sees_every_pair_and_takes_the_less_loaded() -> None:
    workers = [worker(str(number), queued_prefill_tokens=100 * number) for number in range(4)]
    taken = Counter(best("prefill", "power_of_two", wants(9, draw=draw), workers) for draw in range(600))
    # Of the six pairs, 0 is in three, 1 is the better one of two, 2 of one, 3 of none.
    assert 240 < taken["0"] < 360
    assert 140 < taken["1"] < 260
    assert 50 < taken["2"] < 150
    assert taken["3"] == 0
    avoid = frozenset({"0", "1", "2"})
    assert best("prefill", "power_of_two", wants(9, avoid=avoid, draw=1), workers[:3]) in avoid


def test_prefix_affinity_goes_where_most_of_the_prompt_is() -> None:
    workers = [worker("a", queued_prefill_tokens=500), worker("b"), worker("c", queued_prefill_tokens=5)]
    assert best("prefill", "prefix_affinity", wants(900, {"a": 32, "c": 16}), workers) == "a"
    assert best("prefill", "prefix_affinity", wants(900, {"a": 32, "c": 32}), workers) == "c"
    assert best("prefill", "prefix_affinity", wants(900), workers) == "b"


def test_ties_go_by_turns_and_then_by_the_draw() -> None:
    equal = [worker(name) for name in "abcd"]
    for policy in ROUTING_POLICIES:
        taken = Counter(best("prefill", policy, wants(9, draw=draw), equal) for draw in range(400))
        assert min(taken[name] for name in "abcd") > 50, (policy, taken)
    turn = [replace(item, decisions=item.worker_id != "c") for item in equal]
    assert best("prefill", "cost", wants(9, draw=3), turn) == "c"


LOADS = st.builds(
    lambda queued, running, free, base, token, known, age: {
        "queued_prefill_tokens": queued,
        "running": running,
        "free_blocks": free,
        "step_time": StepTime(base, token, 0.001, steps=9 if known else 0, largest=128),
        "age_s": age,
    },
    st.integers(0, 900),
    st.integers(0, 7),
    st.integers(0, 100),
    st.sampled_from([1.0, 20.0]),
    st.sampled_from([0.5, 4.0]),
    st.booleans(),
    st.sampled_from([0.0, 2.0, 60.0]),
)


@given(loads=st.lists(LOADS, min_size=1, max_size=6), prompt=st.integers(1, 2000), data=st.data())
def test_the_cost_of_the_choice_is_the_least_there_is(loads, prompt, data) -> None:  # type: ignore[no-untyped-def]
    workers = [worker(f"w{number}", **load) for number, load in enumerate(loads)]
    cached = {w.worker_id: data.draw(st.integers(0, prompt)) for w in workers if data.draw(st.booleans())}
    known = [w.load.step_time for w in workers if w.load.step_time.known] or [StepTime(1.0, 1.0)]
    usual = [sum(getattr(m, name) for m in known) / len(known) for name in ("base_ms", "token_ms", "attended_ms")]
    queued = sum(w.load.queued_prefill_tokens for w in workers) / len(workers)

    def cost(w: WorkerSnapshot, kind: str) -> float:
        model = w.load.step_time
        a, b, c = (model.base_ms, model.token_ms, model.attended_ms) if model.known else usual
        sure = 0.5 ** (w.age_s / 2.0)
        waits = sure * w.load.queued_prefill_tokens + (1 - sure) * queued
        rest = max(1, prompt - cached.get(w.worker_id, 0))
        attended = sum(range(prompt - rest, prompt)) + rest
        own = a * -(-rest // 256) + b * rest + c * attended
        wait = a * -(-waits // 256) + b * waits
        held = 16 * (100 - w.load.free_blocks) + prompt
        streams = PRICED_TOKENS * (a + b * (w.load.running + 1) + c * held)
        if kind == "prefill":
            return wait + (1 + WORK_PRICE) * own
        if kind == "decode":
            return 0.3 * rest + streams
        return wait + (1 + WORK_PRICE + HERE_PRICE + STREAM_PRICE * w.load.running) * own + streams

    for kind in ("prefill", "decode", "whole"):
        costs = {w.worker_id: cost(w, kind) for w in workers}
        chosen = best(kind, "cost", wants(prompt, cached), workers, token_ms=0.3)
        assert chosen is not None
        assert costs[chosen] <= min(costs.values()) * (1 + ALIKE) + 0.01 * prompt


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_a_burst_between_two_reports_spreads(policy: str) -> None:
    """What was sent is in the next snapshot, though no worker has reported it."""
    mine = {f"{role}{number}": InFlight() for role in "pd" for number in range(4)}
    taken: Counter[str] = Counter()
    for draw in range(16):
        workers = [
            worker(name, Role.PREFILL if name[0] == "p" else Role.DECODE, mine=sent, decisions=taken[name])
            for name, sent in mine.items()
        ]
        route = choose(RouteRequest(100, 150, policy=policy, draw=draw), Fleet.of(workers))
        assert isinstance(route, Route)
        assert route.mode is Mode.DISAGGREGATED
        assert route.prefill is not None
        for name in (route.prefill, route.decode):
            taken[name] += 1
            sent, tokens = mine[name], 100 if name[0] == "p" else 0
            mine[name] = InFlight(
                requests=sent.requests + 1,
                prefill_tokens=sent.prefill_tokens + tokens,
                new_requests=sent.new_requests + 1,
                new_prefill_tokens=sent.new_prefill_tokens + tokens,
                new_blocks=sent.new_blocks + 7,
            )
    limit = 7 if policy == "power_of_two" else 4
    assert max(taken.values()) <= limit, taken
