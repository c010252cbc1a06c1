"""The queue of waiting requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcore.config import QueueConfig
from pdcore.types import PriorityClass
from router.admission import AdmissionQueue, Queued, QueueEntry, Shed, Started

STANDARD = PriorityClass.STANDARD


def offer(queue: AdmissionQueue, *names: str, priority: PriorityClass = STANDARD) -> None:
    for name in names:
        assert isinstance(queue.offer(name, priority), Queued)


def start(queue: AdmissionQueue, fits: set[str] | None = None, now: float = 0.0) -> str | None:
    def route_for(entry: QueueEntry) -> str | None:
        return "route" if fits is None or entry.request_id in fits else None

    started = queue.start_next(now, route_for)
    if started is None:
        return None
    assert isinstance(started, Started)
    return started.entry.request_id


def test_class_order_then_arrival_order() -> None:
    queue = AdmissionQueue(10)
    offer(queue, "b1", "b2", priority=PriorityClass.BATCH)
    offer(queue, "s1", "s2")
    offer(queue, "i1", priority=PriorityClass.INTERACTIVE)
    assert [start(queue) for _ in range(6)] == ["i1", "s1", "s2", "b1", "b2", None]


def test_batch_has_its_share() -> None:
    queue = AdmissionQueue(20, QueueConfig(batch_share=0.25))
    offer(queue, "b1", "b2", priority=PriorityClass.BATCH)
    offer(queue, *(f"i{n}" for n in range(6)), priority=PriorityClass.INTERACTIVE)
    assert [start(queue) for _ in range(8)] == ["i0", "i1", "i2", "b1", "i3", "i4", "i5", "b2"]


def test_short_prompts_first() -> None:
    queue = AdmissionQueue(20, QueueConfig("sjf"))
    for name, tokens in (("long", 900), ("short", 50), ("middle", 300)):
        queue.offer(name, STANDARD, tokens=tokens)
    assert [start(queue) for _ in range(3)] == ["short", "middle", "long"]


def test_tenants_take_turns_by_what_they_had() -> None:
    queue = AdmissionQueue(20, QueueConfig("fair"))
    for name in ("a1", "a2", "a3", "b1", "b2"):
        queue.offer(name, STANDARD, tokens=100, tenant=name[0])
    first = queue.start_next(0.0, lambda entry: "route")
    assert first is not None
    assert first.entry.request_id == "a1"
    queue.generated(first.entry, 75)
    assert [start(queue) for _ in range(4)] == ["b1", "b2", "a2", "a3"]


def test_those_that_wait_out_a_delay_hold_nobody_up() -> None:
    """However many they are, and however many pass them: they are not passed over, and keep their places."""
    queue = AdmissionQueue(100, max_passes=3, look_ahead=4)
    old = [f"old{n}" for n in range(10)]
    offer(queue, *old)
    entries = [queue.start_next(0.0, lambda entry: "route") for _ in old]
    for started in entries:
        assert started is not None
        queue.put_back(started.entry, not_before=5.0)
    new = [f"new{n}" for n in range(10)]
    offer(queue, *new)
    assert [start(queue, now=4.0) for _ in range(11)] == [*new, None]
    assert queue.next_wake(4.0) == 5.0
    offer(queue, "last")
    assert [start(queue, now=5.0) for _ in range(12)] == [*old, "last", None]


def test_whole_batches() -> None:
    queue = AdmissionQueue(20, QueueConfig("static"))
    offer(queue, "a", "b", "large")
    small = {"a", "b", "c"}
    assert [start(queue, small) for _ in range(3)] == ["a", "b", None]
    offer(queue, "c")
    queue.remove("a")
    assert start(queue) is None, "b is still running"
    queue.remove("b")
    assert [start(queue) for _ in range(3)] == ["large", "c", None]


def test_a_refused_one_goes_back_into_its_batch() -> None:
    queue = AdmissionQueue(20, QueueConfig("static"))
    offer(queue, "a", "b")
    started = queue.start_next(0.0, lambda entry: "route")
    assert started is not None
    assert [start(queue), start(queue)] == ["b", None]
    queue.put_back(started.entry, not_before=0.0)
    offer(queue, "c")
    assert [start(queue), start(queue)] == ["a", None]


def test_full_means_shed_with_a_hint() -> None:
    queue = AdmissionQueue(2, max_by_class={PriorityClass.BATCH: 1})
    offer(queue, "a", "b")
    offer(queue, "c", priority=PriorityClass.BATCH)
    for priority, max_queue in ((STANDARD, 2), (PriorityClass.BATCH, 1)):
        shed = queue.offer("d", priority)
        assert isinstance(shed, Shed)
        assert 0.5 <= shed.retry_after_s <= 30
        assert shed.max_queue == max_queue
    offer(queue, "i", "j", priority=PriorityClass.INTERACTIVE)
    assert isinstance(queue.offer("k", PriorityClass.INTERACTIVE), Shed)
    assert [queue.waiting_of(priority) for priority in PriorityClass] == [2, 2, 1]
    assert start(queue) == "i"
    offer(queue, "k", priority=PriorityClass.INTERACTIVE)
    assert queue.remove("c")
    offer(queue, "d", priority=PriorityClass.BATCH)


def test_the_hint_grows_with_the_time_between_starts() -> None:
    fast, slow = AdmissionQueue(1000), AdmissionQueue(1000)
    for queue, interval in ((fast, 0.01), (slow, 2.0)):
        offer(queue, *(str(i) for i in range(200)))
        for step in range(100):
            start(queue, now=step * interval)
    assert slow.retry_after_s() > 4 * fast.retry_after_s()


def test_a_request_that_comes_back_keeps_its_place_and_is_never_shed() -> None:
    queue = AdmissionQueue(2)
    offer(queue, "a", "b")
    started = queue.start_next(0.0, lambda entry: "route")
    assert started is not None
    offer(queue, "c")
    queue.put_back(started.entry, not_before=0.0)
    assert queue.waiting() == ["a", "b", "c"]


def test_a_delay_is_waited_out() -> None:
    queue = AdmissionQueue(10)
    offer(queue, "a")
    started = queue.start_next(0.0, lambda entry: "route")
    assert started is not None
    queue.put_back(started.entry, not_before=5.0)
    assert queue.next_wake(1.0) == 5.0
    assert start(queue, now=4.9) is None
    assert start(queue, now=5.0) == "a"
    assert queue.next_wake(5.0) is None


def test_smaller_ones_pass_a_large_one_a_bounded_number_of_times() -> None:
    queue = AdmissionQueue(1000, max_passes=5)
    offer(queue, "large", *(f"s{i}" for i in range(20)))
    small = {f"s{i}" for i in range(20)}
    assert [start(queue, small) for _ in range(7)] == ["s0", "s1", "s2", "s3", "s4", None, None]
    assert start(queue) == "large"
    assert start(queue, small) == "s5"


def test_looks_past_a_bounded_number() -> None:
    queue = AdmissionQueue(1000, look_ahead=4)
    offer(queue, *(f"large{i}" for i in range(4)), "small")
    asked: list[str] = []

    def route_for(entry: QueueEntry) -> str | None:
        asked.append(entry.request_id)
        return "route" if entry.request_id == "small" else None

    assert queue.start_next(0.0, route_for) is None
    assert asked == ["large0", "large1", "large2", "large3"]


class TestBatchFillsGaps:
    def test_it_does_not_take_what_others_wait_for(self) -> None:
        queue = AdmissionQueue(10)
        offer(queue, "small batch", priority=PriorityClass.BATCH)
        offer(queue, "large")
        assert start(queue, {"small batch"}) is None
        assert start(queue) == "large"
        assert start(queue, {"small batch"}) == "small batch"

    def test_its_share_is_its_own(self) -> None:
        queue = AdmissionQueue(10, QueueConfig(batch_share=0.5))
        offer(queue, "batch", priority=PriorityClass.BATCH)
        offer(queue, "first", "large")
        assert start(queue) == "first"
        assert queue.batch_due
        assert start(queue, {"batch"}) == "batch"
        assert not queue.batch_due

    def test_who_waits_out_a_delay_waits_for_no_room(self) -> None:
        queue = AdmissionQueue(10)
        offer(queue, "failed")
        started = queue.start_next(0.0, lambda entry: "route")
        assert started is not None
        queue.put_back(started.entry, not_before=5.0)
        offer(queue, "batch", priority=PriorityClass.BATCH)
        assert start(queue, now=1.0) == "batch"

    def test_other_policies_know_no_classes(self) -> None:
        queue = AdmissionQueue(10, QueueConfig("fcfs"))
        offer(queue, "large")
        offer(queue, "batch", priority=PriorityClass.BATCH)
        assert start(queue, {"batch"}) == "batch"


ENTRIES = st.lists(st.tuples(st.sampled_from(PriorityClass), st.integers(1, 300), st.sampled_from("ab")), max_size=20)


@given(st.sampled_from(["fcfs", "sjf", "priority"]), ENTRIES, st.sampled_from(PriorityClass), st.integers(1, 300))
def test_what_is_ahead_is_what_is_started_before(
    policy: str, entries: list[tuple[PriorityClass, int, str]], priority: PriorityClass, tokens: int
) -> None:
    """What is foretold for a new request, and for those that wait, against starting them all."""
    queue = AdmissionQueue(100, QueueConfig(policy, batch_share=0.0))
    for number, (other, size, tenant) in enumerate(entries):
        queue.offer(str(number), other, tokens=size, tenant=tenant)
    foretold = queue.ahead_of_new(priority, tokens=tokens, tenant="a")
    queue.offer("new", priority, tokens=tokens, tenant="a")
    listed = {entry.request_id: ahead for entry, ahead in queue.ahead_of_waiting()}
    sizes = {str(number): size for number, (_, size, _) in enumerate(entries)} | {"new": tokens}
    order = [start(queue) for _ in range(len(entries) + 1)]
    before = 0
    for position, name in enumerate(order):
        assert name is not None
        assert listed[name] == (before, position)
        before += sizes[name]
    assert foretold == listed["new"]


@given(ENTRIES, st.sampled_from(["fair", "static"]))
def test_foretelling_changes_nothing(entries: list[tuple[PriorityClass, int, str]], policy: str) -> None:
    queues = [AdmissionQueue(100, QueueConfig(policy)) for _ in range(2)]
    for number, (priority, size, tenant) in enumerate(entries):
        for queue in queues:
            queue.offer(str(number), priority, tokens=size, tenant=tenant)
        queues[0].ahead_of_new(priority, tokens=size, tenant=tenant)
        assert sum(1 for _ in queues[0].ahead_of_waiting()) == number + 1
    orders = [[start(queue) for _ in range(len(entries) + 1)] for queue in queues]
    assert orders[0] == orders[1]


def test_the_pace_of_starts_is_known_after_some() -> None:
    queue = AdmissionQueue(100)
    offer(queue, *(str(number) for number in range(12)))
    for number in range(8):
        start(queue, now=0.5 * number)
    assert queue.start_interval_s is None
    start(queue, now=4.0)
    assert queue.start_interval_s is not None
    assert 0.1 < queue.start_interval_s < 0.5


def test_remove() -> None:
    queue = AdmissionQueue(10)
    offer(queue, "a", "b")
    assert queue.remove("a")
    assert not queue.remove("a")
    assert queue.waiting() == ["b"]


@given(
    st.lists(st.tuples(st.sampled_from(PriorityClass), st.integers(1, 10)), min_size=1, max_size=40),
    st.lists(st.integers(1, 10), min_size=200, max_size=200),
)
def test_nobody_starves(requests: list[tuple[PriorityClass, int]], rooms: list[int]) -> None:
    """Room varies; whenever there is room for everything, each request starts after a bounded number of others."""
    queue = AdmissionQueue(100, QueueConfig(batch_share=0.0), max_passes=3, look_ahead=100)
    sizes = {}
    for index, (priority, size) in enumerate(requests):
        sizes[str(index)] = size
        offer(queue, str(index), priority=priority)
    order = [str(i) for i, _ in sorted(enumerate(requests), key=lambda pair: (pair[1][0], pair[0]))]
    started: list[str] = []
    for room in rooms:

        def route_for(entry: QueueEntry, room: int = room) -> bool | None:
            return True if sizes[entry.request_id] <= room else None

        result = queue.start_next(0.0, route_for)
        if result is not None:
            started.append(result.entry.request_id)
    for position, name in enumerate(order):
        if name in started:
            behind = set(order[position + 1 :])
            passed = sum(1 for other in started[: started.index(name)] if other in behind)
            assert passed <= 3
