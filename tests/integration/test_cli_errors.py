"""What the command says of calls that fail, and of which request; and how long it lets them run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdcore.errors import Draining, InternalError, InvalidRequest, RequestError, Unauthenticated, UnknownMethod
from tests.support.scripted_cluster import Run, ScriptedCluster, scripted_cluster


@pytest.fixture
def cluster() -> Iterator[ScriptedCluster]:
    with scripted_cluster() as scripted:
        yield scripted


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_request_is_named_as_in_the_router_s_log(cluster: ScriptedCluster, command: str) -> None:
    """Its own name for it where the router has made none."""
    cluster.events, cluster.error = [], InvalidRequest("prompt", "is bad")
    for made in ("of-the-router", ""):
        cluster.made_id = made
        run = Run(command, "--address", cluster.address, stdin="Why?\n")
        assert run.code == 2
        sent = cluster.requests[-1].request_id
        assert f", request {made or sent})" in run.err
        assert not made or sent not in run.err


@pytest.mark.parametrize("flags", [(), ("--steps",), ("--json",)])
@pytest.mark.parametrize(
    ("error", "code", "words", "advice"),
    [
        (
            Unauthenticated("the status is for operators"),
            2,
            "the status is for operators (",
            "give a key in $PDSERVE_API_KEY",
        ),
        (Draining("the router is draining"), 75, "the router is draining (", "this router is ending"),
        (InternalError("internal error"), 1, "internal error (", "the cluster's log has the details"),
        (UnknownMethod("no such call"), 1, "no such call (", "something else than pdserve listens there"),
    ],
)
def test_status_says_what_failed_and_what_to_do(
    cluster: ScriptedCluster, error: RequestError, code: int, words: str, advice: str, flags: tuple[str, ...]
) -> None:
    cluster.status_error, cluster.made_id = error, "of-the-router"
    run = Run("status", *flags, "--address", cluster.address)
    assert (run.code, run.out) == (code, "")
    assert run.err.startswith(f"error: {words}")
    assert f"from {cluster.address}, request of-the-router); {advice}" in run.err
    assert ", request of-the-router)" in run.err
    assert run.err.count("\n") == 1


@pytest.mark.parametrize("timeout", ["inf", "1e300", "1e10", "1e9"])
def test_a_timeout_may_be_as_long_as_one_likes(cluster: ScriptedCluster, timeout: str) -> None:
    run = Run("generate", "Why?", "--address", cluster.address, "--timeout", timeout)
    assert (run.code, run.out, run.err) == (0, "Because so.\n", "")
    run = Run("chat", "--address", cluster.address, "--timeout", timeout, stdin="Why?\n")
    assert (run.code, run.out, run.err) == (0, "Because so.\n", "")


@pytest.mark.parametrize("timeout", ["nan", "-1", "0", "-inf", "x"])
def test_a_timeout_that_is_none_is_a_bad_flag(cluster: ScriptedCluster, timeout: str) -> None:
    run = Run("generate", "Why?", "--address", cluster.address, "--timeout", timeout)
    assert run.code == 2
    assert "--timeout" in run.err
    assert not cluster.requests
