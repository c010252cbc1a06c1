"""Addresses of several routers, and whose turn it is."""

from __future__ import annotations

import pytest

from pdcore.addresses import split_addresses
from router.failover import Deadline, Rotation


def test_addresses_are_split() -> None:
    assert split_addresses("a:1") == ["a:1"]
    assert split_addresses("a:1, b:2") == ["a:1", "b:2"]
    assert split_addresses(["a:1", "b:2"]) == ["a:1", "b:2"]


@pytest.mark.parametrize("address", ["", "a:1,", ",a:1", [], ["a:1", ""]])
def test_an_empty_address_is_refused(address: object) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_addresses(address)  # type: ignore[arg-type]


def test_every_call_begins_at_the_next_router_and_tries_each_once() -> None:
    turns = Rotation(["a", "b", "c"])
    calls = [list(turns.take()) for _ in range(4)]
    assert [[name for name, _ in call] for call in calls] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert all([last for _, last in call] == [False, False, True] for call in calls)


def test_what_is_left_of_a_deadline_is_never_less_than_nothing() -> None:
    assert Deadline(None).left_s is None
    assert Deadline(0.0).left_s == 0.0
    left = Deadline(1000.0).left_s
    assert left is not None
    assert 0 < left <= 1000.0
