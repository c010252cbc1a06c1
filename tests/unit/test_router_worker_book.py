"""What a router has given to a worker: in the next snapshot at once, and out of it once."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from pdcore.types import PriorityClass, RequestKey
from router.snapshot import InFlight
from router.worker_book import WorkerBook


@dataclass
class Row:
    """A request as the test remembers it. `new`: after the last report."""

    tokens: int
    blocks: int
    priority: PriorityClass
    new: bool = True


EVENTS = st.tuples(
    st.sampled_from(["assign", "computed", "release", "report"]),
    st.integers(0, 5),
    st.integers(0, 90),
    st.integers(1, 9),
    st.sampled_from(PriorityClass),
)


@given(st.lists(EVENTS, max_size=40))
def test_as_by_adding_up(events: list[tuple[str, int, int, int, PriorityClass]]) -> None:
    book = WorkerBook()
    held: dict[RequestKey, Row] = {}
    for attempt, (what, number, tokens, blocks, priority) in enumerate(events):
        key = list(held)[number % len(held)] if held else RequestKey("nobody", 0)
        match what:
            case "assign":
                key = RequestKey(f"r{number}", attempt)
                book.assign(key, tokens, blocks, priority)
                held[key] = Row(tokens, blocks, priority)
            case "computed":
                book.prefill_computed(key)
                if key in held:
                    held[key].tokens = 0
            case "release":
                book.release(key)
                held.pop(key, None)
            case "report":
                book.reported()
                for row in held.values():
                    row.new = False
        rows = list(held.values())
        assert book.in_flight() == InFlight(
            requests=len(rows),
            prefill_tokens=sum(row.tokens for row in rows),
            longest_prefill=max((row.tokens for row in rows), default=0),
            new_requests=sum(row.new for row in rows),
            new_prefill_tokens=sum(row.tokens for row in rows if row.new),
            new_blocks=sum(row.blocks for row in rows if row.new),
            by_class=tuple(sum(row.priority is each for row in rows) for each in PriorityClass),
        )
        assert len(book.prefilling) == sum(row.tokens > 0 for row in rows), "nothing is kept of what is done"
