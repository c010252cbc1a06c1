"""Queue policies: against oracles that are slow and obvious, and the bounds that the module states."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.config import QUEUE_POLICIES, SHARING, QueueConfig, TenantWeight
from pdcore.queueing import (
    MAX_TENANTS,
    OUTPUT_TOKEN_PRICE,
    QueueBook,
    QueueState,
    Waiting,
    batch_period,
    service_order,
)
from pdcore.types import PriorityClass

INTERACTIVE, STANDARD, BATCH = PriorityClass


@dataclass
class Queue:
    """A queue that serves one request after another, each as soon as it is told to."""

    config: QueueConfig
    waiting: list[Waiting] = field(default_factory=list)
    arrivals: int = 0

    def __post_init__(self) -> None:
        self.book = QueueBook(self.config)

    def offer(self, tokens: int = 10, tenant: str = "", priority: PriorityClass = STANDARD) -> Waiting:
        entry = Waiting(self.arrivals, tokens, tenant, priority)
        self.arrivals += 1
        self.waiting.append(entry)
        return entry

    def order(self, running: int = 0, places: int | None = None) -> list[Waiting]:
        state = self.book.look(self.waiting, running, places)
        return [self.waiting[i] for i in service_order(self.waiting, self.config, state)]

    def take(self, running: int = 0, places: int | None = None) -> Waiting | None:
        order = self.order(running, places)
        if not order:
            return None
        self.waiting.remove(order[0])
        self.book.started(order[0], [entry.priority for entry in self.waiting])
        return order[0]


REQUESTS = st.lists(
    st.tuples(st.integers(1, 400), st.sampled_from("abc"), st.sampled_from(PriorityClass)), max_size=30
)
WEIGHTS = (TenantWeight("a", 3.0), TenantWeight("b", 0.5))
CONFIGS = st.builds(
    QueueConfig,
    policy=st.sampled_from(QUEUE_POLICIES),
    sjf_age_tokens=st.integers(1, 60),
    batch_share=st.sampled_from([0.0, 0.1, 0.3, 0.5]),
) | st.sampled_from([QueueConfig(policy, tenant_weights=WEIGHTS) for policy in SHARING])


@given(CONFIGS, REQUESTS, st.randoms(use_true_random=False))
def test_everybody_is_served_once_whatever_the_order_they_are_listed_in(config, requests, random) -> None:  # type: ignore[no-untyped-def]
    queue = Queue(config)
    for request in requests:
        queue.offer(*request)
    order = queue.order()
    assert sorted(order) == sorted(queue.waiting)
    random.shuffle(queue.waiting)
    assert queue.order() == order


@given(CONFIGS.filter(lambda config: config.policy != "static"), REQUESTS)
def test_the_order_is_that_of_taking_one_after_another(config: QueueConfig, requests: list) -> None:  # type: ignore[type-arg]
    """What several decisions would choose one by one is what one decision lists."""
    queue = Queue(config)
    for request in requests:
        queue.offer(*request)
    expected = queue.order()
    assert [queue.take() for _ in requests] == expected


def test_fcfs() -> None:
    queue = Queue(QueueConfig("fcfs"))
    entries = [
        queue.offer(tokens, priority=priority) for tokens, priority in ((9, BATCH), (1, INTERACTIVE), (5, BATCH))
    ]
    assert queue.order() == entries


class TestShortestFirst:
    def test_short_ones_go_first(self) -> None:
        queue = Queue(QueueConfig("sjf", sjf_age_tokens=1))
        entries = {tokens: queue.offer(tokens) for tokens in (300, 20, 100, 20)}
        assert [entry.tokens for entry in queue.order()] == [20, 20, 100, 300]
        assert queue.order()[1] == entries[20], "the older first among equals"

    @given(REQUESTS, st.integers(1, 60))
    def test_as_by_the_length_that_is_left_after_ageing(self, requests: list, age: int) -> None:  # type: ignore[type-arg]
        queue = Queue(QueueConfig("sjf", sjf_age_tokens=age))
        for request in requests:
            queue.offer(*request)
        aged = {e: e.tokens - age * (queue.arrivals - 1 - e.arrival) for e in queue.waiting}
        assert queue.order() == sorted(queue.waiting, key=lambda e: (aged[e], e.arrival))

    @given(
        tokens=st.integers(1, 500),
        age=st.integers(1, 40),
        flood=st.lists(st.integers(1, 60), min_size=60, max_size=60),
    )
    def test_a_long_prompt_is_overtaken_a_bounded_number_of_times(
        self, tokens: int, age: int, flood: list[int]
    ) -> None:
        """Two come for each that is served: without ageing the long one would wait for ever."""
        queue = Queue(QueueConfig("sjf", sjf_age_tokens=age))
        long, arriving, overtook = queue.offer(tokens), deque(flood * 20), 0
        while True:
            queue.offer(arriving.popleft())
            queue.offer(arriving.popleft())
            if queue.take() == long:
                break
            overtook += 1
        assert overtook < max(1, tokens / age)


def oracle_fair(events: list[tuple[str, int]], config: QueueConfig) -> list[tuple[str, int]]:
    """Requests of (tenant, tokens) that all wait from the start: who is served when, by adding up from the start."""
    left, served = list(events), []
    while left:

        def had(tenant: str) -> float:
            return sum(tokens for name, tokens in served if name == tenant) / config.weight(tenant)

        best = min(left, key=lambda event: (had(event[0]), left.index(event)))
        left.remove(best)
        served.append(best)
    return served


@pytest.mark.parametrize("policy", SHARING)
class TestShares:
    """Of tenants whose requests are all of one class."""

    @given(requests=REQUESTS)
    def test_as_by_adding_up_what_each_tenant_had(self, policy: str, requests: list) -> None:  # type: ignore[type-arg]
        config = QueueConfig(policy, tenant_weights=(TenantWeight("a", 2.0),))
        queue = Queue(config)
        events = [(tenant, tokens) for tokens, tenant, _ in requests]
        for tenant, tokens in events:
            queue.offer(tokens, tenant)
        assert [(entry.tenant, entry.tokens) for entry in queue.order()] == oracle_fair(events, config)

    @given(
        costs=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 100)), min_size=40, max_size=40),
        weight=st.sampled_from([1.0, 4.0]),
    )
    def test_no_tenant_gets_far_ahead_of_another_that_has_work(
        self, policy: str, costs: list[tuple[int, int]], weight: float
    ) -> None:
        """Both always have a request waiting; requests run one at a time."""
        queue = Queue(QueueConfig(policy, tenant_weights=(TenantWeight("big", weight),)))
        prompts = {tenant: deque(costs) for tenant in ("big", "small")}
        had: Counter[str] = Counter()
        most = max(tokens + OUTPUT_TOKEN_PRICE * output for tokens, output in costs)
        queue.offer(prompts["big"][0][0], "big")
        queue.offer(prompts["small"][0][0], "small")
        for _ in range(len(costs)):
            entry = queue.take()
            assert entry is not None
            tokens, output = prompts[entry.tenant].popleft()
            assert tokens == entry.tokens
            queue.book.generated(entry.tenant, output)
            had[entry.tenant] += tokens + OUTPUT_TOKEN_PRICE * output
            if not all(prompts.values()):
                return
            queue.offer(prompts[entry.tenant][0][0], entry.tenant)
            assert abs(had["big"] / weight - had["small"]) <= most / min(weight, 1.0)

    def test_a_tenant_without_an_entry_has_the_weight_of_the_others(self, policy: str) -> None:
        queue = Queue(QueueConfig(policy, tenant_weights=(TenantWeight("*", 2.0), TenantWeight("a", 1.0))))
        for tenant in "aaabbbb":
            queue.offer(10, tenant)
        assert [queue.take().tenant for _ in range(6)] == list("abbabb")  # type: ignore[union-attr]
        assert (queue.config.weight("a"), queue.config.weight("b")) == (1.0, 2.0)

    def test_who_was_idle_has_saved_nothing(self, policy: str) -> None:
        queue = Queue(QueueConfig(policy))
        for _ in range(60):
            queue.offer(10, "busy")
        for _ in range(40):
            assert queue.take() is not None
        for _ in range(20):
            queue.offer(10, "idle")
        assert [queue.take().tenant for _ in range(6)].count("idle") == 3  # type: ignore[union-attr]

    def test_who_had_more_than_its_share_still_has_when_it_comes_back(self, policy: str) -> None:
        queue = Queue(QueueConfig(policy))
        queue.offer(1000, "greedy")
        queue.offer(10, "modest")
        queue.take()
        queue.take()
        for _ in range(5):
            queue.offer(10, "modest")
        queue.take()
        queue.offer(10, "greedy")
        assert [queue.take().tenant for _ in range(4)] == ["modest"] * 4  # type: ignore[union-attr]

    def test_output_counts_double(self, policy: str) -> None:
        queue = Queue(QueueConfig(policy))
        for _ in range(9):
            queue.offer(10, "a")
            queue.offer(10, "b")
        queue.take()
        queue.take()
        queue.book.generated("a", 15)  # as much as three prompts
        assert [queue.take().tenant for _ in range(4)] == ["b", "b", "b", "a"]  # type: ignore[union-attr]

    def test_who_comes_back_is_not_charged_twice(self, policy: str) -> None:
        queue = Queue(QueueConfig(policy))
        queue.offer(100, "a")
        first = queue.take()
        assert first is not None
        queue.waiting.append(first._replace(again=True))
        queue.offer(10, "b")
        queue.offer(10, "b")
        queue.take()
        assert queue.book.look(queue.waiting, 0).counters["a"] == 100

    def test_who_comes_back_keeps_its_place(self, policy: str) -> None:
        queue = Queue(QueueConfig(policy))
        queue.offer(1000, "heavy")
        first = queue.take()
        assert first is not None
        for _ in range(20):
            queue.offer(10, "light")
        queue.take()
        queue.book.generated("heavy", 500)
        queue.waiting.append(first._replace(again=True))
        assert queue.take() == first._replace(again=True)

    def test_foretelling_a_long_queue_looks_at_each_request_a_few_times(self, policy: str) -> None:
        """Not at each tenant for each request."""

        looks = 0

        class Name(str):
            def __hash__(self) -> int:
                nonlocal looks
                looks += 1
                return super().__hash__()

        names = [Name(f"t{number}") for number in range(300)]
        state = QueueState({name: float(number) for number, name in enumerate(names)})
        waiting = [Waiting(number, 10, names[number % 300]) for number in range(900)]
        assert len(list(service_order(waiting, QueueConfig(policy), state))) == 900
        assert looks < 12 * 900

    def test_tenants_are_not_remembered_without_end(self, policy: str) -> None:
        queue = Queue(QueueConfig(policy))
        for name in range(MAX_TENANTS + 50):
            queue.offer(10, str(name))
            queue.take()
        assert len(queue.book.look([], 0).counters) <= MAX_TENANTS + 1


class TestPriority:
    @given(REQUESTS, st.sampled_from([0.0, 0.1, 0.3, 0.5]))
    def test_tenants_share_within_a_class_by_one_account(self, requests: list, share: float) -> None:  # type: ignore[type-arg]
        config = QueueConfig("priority", batch_share=share, tenant_weights=(TenantWeight("a", 2.0),))
        queue = Queue(config)
        for request in requests:
            queue.offer(*request)
        had, since = Counter[str](), 0
        for entry in queue.order():
            batch = [other for other in queue.waiting if other.priority is BATCH]
            others = [other for other in queue.waiting if other.priority is not BATCH]
            turn = batch and (not others or since + 1 >= batch_period(config))
            since = 0 if turn else since + bool(batch)
            first = BATCH if turn else min(other.priority for other in others)
            of_class = [other for other in queue.waiting if other.priority is first]
            assert entry == min(of_class, key=lambda one: (had[one.tenant], one.arrival))
            had[entry.tenant] += entry.tokens / config.weight(entry.tenant)  # type: ignore[assignment]
            queue.waiting.remove(entry)

    def test_classes_in_order_and_each_in_order_of_arrival(self) -> None:
        queue = Queue(QueueConfig("priority", batch_share=0.0))
        for priority in (BATCH, STANDARD, INTERACTIVE, BATCH, STANDARD, INTERACTIVE):
            queue.offer(priority=priority)
        assert [entry.arrival for entry in queue.order()] == [2, 5, 1, 4, 0, 3]

    @given(
        st.lists(st.sampled_from(PriorityClass), min_size=30, max_size=120),
        st.sampled_from([0.05, 0.1, 0.25, 0.5]),
    )
    def test_batch_is_passed_a_bounded_number_of_times(self, classes: list[PriorityClass], share: float) -> None:
        """One comes for each that is served, so that there is always an interactive one if such ones keep coming."""
        queue = Queue(QueueConfig("priority", batch_share=share))
        passed: Counter[int] = Counter()
        for priority in classes:
            queue.offer(priority=priority)
            queue.offer(priority=INTERACTIVE)
            entry = queue.take()
            assert entry is not None
            waiting_batch = [other for other in queue.waiting if other.priority is BATCH]
            if entry.priority is not BATCH and waiting_batch:
                oldest = min(waiting_batch)
                passed[oldest.arrival] += 1
                assert passed[oldest.arrival] < 1 / share
            elif waiting_batch:
                assert entry.arrival < min(waiting_batch).arrival

    @pytest.mark.parametrize("batch_waits", [False, True])
    def test_who_was_idle_has_saved_nothing_though_somebody_waits_in_a_lower_class(self, batch_waits: bool) -> None:
        queue = Queue(QueueConfig("priority", batch_share=0.1))
        for _ in range(500 * batch_waits):
            queue.offer(1, "bulk", BATCH)
        for _ in range(100):
            queue.offer(100, "busy", INTERACTIVE)
        while sum(entry.tenant == "busy" for entry in queue.waiting) > 50:
            queue.take()
        for _ in range(50):
            queue.offer(100, "back", INTERACTIVE)
        served = [entry.tenant for entry in (queue.take() for _ in range(40)) if entry is not None]
        assert abs(served.count("busy") - served.count("back")) <= 1

    def test_batch_gets_its_share(self) -> None:
        queue = Queue(QueueConfig("priority", batch_share=0.2))
        for _ in range(100):
            queue.offer(priority=INTERACTIVE)
            queue.offer(priority=BATCH)
        taken = [queue.take().priority for _ in range(100)]  # type: ignore[union-attr]
        assert taken.count(BATCH) == 20


class TestStatic:
    @given(st.lists(st.integers(0, 4), max_size=30), st.integers(1, 5), st.randoms(use_true_random=False))
    def test_whole_batches(self, arrivals: list[int], places: int, random) -> None:  # type: ignore[no-untyped-def]
        """Who starts while others run was waiting when the first of them started."""
        queue, running = Queue(QueueConfig("static")), 0
        last_of_batch = -1
        for count in arrivals:
            for _ in range(count):
                queue.offer()
            if running == 0:
                last_of_batch = queue.arrivals - 1
            size = running
            while running < places and (entry := queue.take(running, places)) is not None:
                assert entry.arrival <= last_of_batch
                running += 1
            if size == 0:
                assert running == min(places, running + len(queue.waiting))
            if running:
                running -= random.randint(0, running)

    def test_nobody_enters_a_batch_that_runs(self) -> None:
        queue = Queue(QueueConfig("static"))
        for _ in range(5):
            queue.offer()
        assert queue.take(0, 3) is not None
        assert queue.take(1, 3) is not None
        assert queue.take(2, 3) is not None
        assert queue.take(2, 3) is None, "a place is free, but the batch runs"
        assert queue.take(0, 3) is not None

    def test_who_was_in_it_comes_back_into_it(self) -> None:
        queue = Queue(QueueConfig("static"))
        queue.offer()
        entry = queue.take()
        assert entry is not None
        queue.offer()
        queue.waiting.append(entry._replace(again=True))
        assert queue.take(running=1) == entry._replace(again=True)
        assert queue.take(running=1) is None

    def test_a_batch_is_closed_when_no_more_of_it_fits(self) -> None:
        queue = Queue(QueueConfig("static"))
        queue.offer()
        queue.offer()
        assert queue.take() is not None
        queue.book.close_batch()
        assert queue.take(running=1) is None
        assert queue.take(running=0) is not None


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_an_order_is_cheap_to_begin(policy: str) -> None:
    """Asking for the first few of a long queue looks at each waiting request a few times at most, not at pairs."""
    queue = Queue(QueueConfig(policy))
    for i in range(2000):
        queue.offer(i % 97 + 1, f"t{i % 5}", PriorityClass(i % 3))
    state = queue.book.look(queue.waiting, 0)
    assert isinstance(state, QueueState)
    first = [i for i, _ in zip(service_order(queue.waiting, queue.config, state), range(16), strict=False)]
    assert len(set(first)) == 16
    assert math.isfinite(queue.waiting[first[0]].tokens)
