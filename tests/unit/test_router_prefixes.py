"""What a router makes of cache events, and of what it has sent itself."""

from __future__ import annotations

import numpy as np
import pytest

from pdcore.clock import ManualClock
from pdcore.hashing import block_hashes, chain_root
from protos import worker_pb2
from router.prefixes import Prefixes, PromptNames, lacking
from router.worker_sets import WorkerNumbers

PROMPT = list(range(100))
NAMING = ("digest", 16)


def names(tokens: list[int], naming: tuple[str, int] = NAMING, salt: str = "") -> list[bytes]:
    return block_hashes(chain_root(naming[0], salt=salt), tokens, naming[1])


def news(
    first: int, came: list[bytes], left: list[bytes] | None = None, reset: bool = False
) -> worker_pb2.CacheEvents:
    left = left or []
    runs = [run for run in (len(came), -len(left)) if run]
    return worker_pb2.CacheEvents(first=first, reset=reset, names=b"".join([*came, *left]), runs=runs)


@pytest.fixture
def prefixes() -> Prefixes:
    made = Prefixes(ManualClock(), WorkerNumbers())
    for worker in ("a", "b"):
        made.connected(worker, NAMING)
    return made


def cached(prefixes: Prefixes, tokens: list[int] = PROMPT, salt: str = "") -> dict[str, int]:
    """Tokens by worker."""
    column = prefixes.cached(PromptNames(tokens, salt))
    if column is None:
        return {}
    return {prefixes.numbers.id_of(number): int(held) for number, held in enumerate(column) if held}


def test_the_longest_beginning_of_each_worker(prefixes: Prefixes) -> None:
    prefixes.hear("a", news(0, names(PROMPT), reset=True))
    prefixes.hear("b", news(0, names(PROMPT)[:2], reset=True))
    assert cached(prefixes) == {"a": 96, "b": 32}
    prefixes.hear("a", news(6, [], names(PROMPT)[:2:-1]))
    assert cached(prefixes) == {"a": 48, "b": 32}
    assert cached(prefixes, [*PROMPT[:40], 7, *PROMPT[41:]]) == {"a": 32, "b": 32}
    assert cached(prefixes, [7, *PROMPT]) == {}
    assert cached(prefixes, PROMPT[:15]) == {}


def test_salts_and_block_sizes_are_kept_apart(prefixes: Prefixes) -> None:
    prefixes.connected("large", ("digest", 32))
    prefixes.connected("other", ("another", 16))
    prefixes.hear("a", news(0, names(PROMPT, salt="x"), reset=True))
    prefixes.hear("large", news(0, names(PROMPT, ("digest", 32)), reset=True))
    prefixes.hear("other", news(0, names(PROMPT), reset=True))
    assert cached(prefixes) == {"large": 96}, "the names of the other one are those of another model"
    assert cached(prefixes, salt="x") == {"a": 96}


def test_a_new_beginning_and_a_gap_forget_what_was_before(prefixes: Prefixes) -> None:
    prefixes.hear("a", news(0, names(PROMPT), reset=True))
    prefixes.hear("a", news(6, names(PROMPT)[:1], reset=True))
    assert cached(prefixes) == {"a": 16}
    prefixes.hear("a", news(99, names(PROMPT)[:0]))
    assert cached(prefixes) == {}
    prefixes.hear("a", news(99, names(PROMPT)[:3]))
    assert cached(prefixes) == {"a": 48}


def test_who_is_gone_has_nothing_and_comes_back_empty(prefixes: Prefixes) -> None:
    prefixes.hear("a", news(0, names(PROMPT), reset=True))
    prefixes.expect(["b"], PromptNames(PROMPT, ""))
    for worker in ("a", "b"):
        prefixes.lost(worker)
        prefixes.lost(worker)
    prefixes.hear("a", news(6, names(PROMPT)))
    assert cached(prefixes) == {}
    prefixes.connected("c", NAMING)
    prefixes.connected("a", NAMING)
    assert cached(prefixes) == {}
    assert prefixes.counts.known == 0


def test_a_prompt_just_sent_counts_until_time_or_events_say_otherwise() -> None:
    clock = ManualClock()
    prefixes = Prefixes(clock, WorkerNumbers())
    for worker in ("a", "b"):
        prefixes.connected(worker, NAMING)
    prefixes.hear("a", news(0, [], reset=True))
    prompt = PromptNames(PROMPT, "")
    prefixes.expect(["a"], prompt)
    prefixes.expect(["nobody"], prompt)
    assert cached(prefixes) == {"a": 96}, "a sibling that comes at once goes to the same worker"
    clock.advance(60.0)
    assert cached(prefixes) == {}
    prefixes.expect(["a"], prompt)
    prefixes.hear("a", news(0, names(PROMPT)))
    clock.advance(60.0)
    assert cached(prefixes) == {"a": 96}


@pytest.mark.parametrize(
    "nonsense",
    [
        worker_pb2.CacheEvents(names=b"x" * 16),
        worker_pb2.CacheEvents(names=b"x" * 15, runs=[1]),
        worker_pb2.CacheEvents(runs=[3]),
        worker_pb2.CacheEvents(runs=[2**31 - 1]),
        worker_pb2.CacheEvents(runs=[-(2**31)]),
        worker_pb2.CacheEvents(names=b"x" * 16, runs=[1, 0]),
    ],
)
def test_news_that_make_no_sense_are_forgotten(prefixes: Prefixes, nonsense: worker_pb2.CacheEvents) -> None:
    prefixes.hear("a", news(0, names(PROMPT), reset=True))
    nonsense.first = 6
    prefixes.hear("a", nonsense)
    assert cached(prefixes) == {}


def test_what_has_to_be_computed_wherever_it_goes() -> None:
    assert lacking(100, None) == 100
    assert lacking(100, np.array([16.0, 96.0])) == 4
    assert lacking(96, np.array([0.0, 96.0])) == 1


def test_names_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = PromptNames(PROMPT, "")
    assert prompt.by(NAMING) is prompt.by(NAMING)
    assert prompt.by(NAMING) == names(PROMPT)


def test_what_was_found_is_not_looked_for_again_until_something_changes() -> None:
    clock = ManualClock()
    prefixes = Prefixes(clock, WorkerNumbers())
    prefixes.connected("a", NAMING)
    prompt = PromptNames(PROMPT, "")

    def tokens() -> list[float]:
        found = prefixes.cached(prompt)
        assert prefixes.cached(prompt) is found
        fresh = prefixes.cached(PromptNames(PROMPT, ""))
        assert (found is None and fresh is None) or np.array_equal(found, fresh)  # type: ignore[arg-type]
        return [] if found is None else found.tolist()

    assert tokens() == []
    prefixes.hear("a", news(0, names(PROMPT)[:2], reset=True))
    assert tokens() == [32]
    prefixes.expect(["a"], prompt)
    assert tokens() == [96]
    clock.advance(11.0)
    assert tokens() == [32], "it never came"
    prefixes.connected("b", NAMING)
    assert tokens() == [32, 0]
    prefixes.hear("a", news(2, [], names(PROMPT)[1:2]))
    assert tokens() == [16, 0]
    prefixes.lost("a")
    assert tokens() == []
