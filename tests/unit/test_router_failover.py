"""Addresses of several routers, and whose turn it is."""

from __future__ import annotations

import grpc
import pytest

from pdcore.addresses import split_addresses
from pdcore.errors import Draining, InvalidRequest, NoWorker, RequestError
from router.client import Client
from router.failover import REST_S, Deadline, Rotation
from router.wire_errors import status_of


def test_addresses_are_split() -> None:
    assert split_addresses("a:1") == ["a:1"]
    assert split_addresses("a:1, b:2") == ["a:1", "b:2"]
    assert split_addresses(["a:1", "b:2"]) == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("address", "whole"),
    [
        ("localhost", "localhost:50051"),
        ("127.0.0.1", "127.0.0.1:50051"),
        ("[::1]", "[::1]:50051"),
        ("::1", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("https://host", "https://host:50051"),
        ("grpcs://[::1]/", "grpcs://[::1]:50051"),
        ("https://host:443", "https://host:443"),
        (f"https://{'a' * 63}", f"https://{'a' * 63}:50051"),
        ("caf\u00e9.example.:7", "caf\u00e9.example.:7"),
        ("dns:host", "dns:host"),
        ("dns:///host", "dns:///host"),
        ("unix:/run/a=b", "unix:/run/a=b"),
    ],
)
def test_an_address_without_a_port_has_the_usual_one(address: str, whole: str) -> None:
    assert split_addresses(address) == [whole]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("grpc=127.0.0.1:50051", "without grpc= before it"),
        ("a:1,grpc=grpcs://b:1", "without grpc= before it"),
        ("http=http://127.0.0.1:8000", "without http= before it"),
        ("host:", "a number below 65536"),
        ("host:x", "a number below 65536"),
        ("host:65536", "a number below 65536"),
        (f"{'a' * 64}:1", "a host's name as HOST"),
        (f"b.{'a' * 64}", "a host's name as HOST"),
        ("a..b:1", "a host's name as HOST"),
        ("\udcff:1", "a host's name as HOST"),
    ],
)
def test_what_is_no_address_is_refused_at_once(address: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Client(address)


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


class Failure(grpc.RpcError):
    """A call that ended with a status, as grpc has it."""

    def __init__(self, error: RequestError) -> None:
        self._status = status_of(error)

    def code(self) -> grpc.StatusCode:
        return next(code for code in grpc.StatusCode if code.value[0] == self._status.code)

    def details(self) -> str:
        return self._status.message

    def initial_metadata(self) -> tuple[()]:
        return ()

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return (("grpc-status-details-bin", self._status.SerializeToString()),)


def test_a_router_that_drains_is_asked_last_and_comes_back() -> None:
    now = 0.0
    turns = Rotation(["a", "b", "c"], lambda: now)

    def order() -> list[str]:
        call = list(turns.take())
        assert [last for _, last in call] == [False, False, True]
        return [name for name, _ in call]

    turns.failed("b", Failure(Draining("it drains")), final=False)
    assert [order() for _ in range(3)] == [["a", "c", "b"], ["c", "a", "b"], ["c", "a", "b"]]
    with pytest.raises(Draining):
        turns.failed("c", Failure(Draining("it drains, too", 2 * REST_S)), final=True)
    assert order() == ["a", "b", "c"]
    now = REST_S
    assert [order() for _ in range(2)] == [["b", "a", "c"], ["a", "b", "c"]]
    now = 2 * REST_S
    assert [order() for _ in range(3)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    # Others that are unavailable keep their turn; what would be the same everywhere is raised at once.
    turns.failed("a", Failure(NoWorker("none")), final=False)
    assert order() == ["a", "b", "c"]
    with pytest.raises(InvalidRequest):
        turns.failed("b", Failure(InvalidRequest("prompt", "is bad")), final=False)


def test_what_is_left_of_a_deadline_is_never_less_than_nothing() -> None:
    assert Deadline(None).left_s is None
    assert Deadline(0.0).left_s == 0.0
    left = Deadline(1000.0).left_s
    assert left is not None
    assert 0 < left <= 1000.0
