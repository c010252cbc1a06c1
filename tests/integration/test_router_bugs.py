"""A mistake of the router's own ends the request that it happened to, and gives back what that had."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pdcore.errors import InternalError
from router import queue_pump
from router.client import AsyncClient, Sampling
from router.native.prefix_tree import NativePrefixTree
from tests.support.null_cluster import pair, until
from tests.support.null_worker import token_of
from tests.support.router_fleet import RouterFleet
from tests.support.tiny_model import tiny_llama

PROMPT = [7] * 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("where", ["chosen", "noted"])
async def test_a_request_that_cannot_be_started_ends(
    model: Path, monkeypatch: pytest.MonkeyPatch, where: str, queued: bool
) -> None:
    """As it comes, and as it waits with others: those are started all the same."""
    failures = [MemoryError("no memory for a prompt that was sent")]

    def failing(real: Any) -> Any:
        def once(*args: Any) -> Any:
            if failures:
                raise failures.pop()
            return real(*args)

        return once

    async with RouterFleet(model, pair(), count=1) as fleet, AsyncClient(fleet.routers[0].address) as client:
        dispatcher = fleet.routers[0]._dispatcher
        await client.complete([1] * 100, Sampling(max_tokens=2))
        if where == "chosen":
            monkeypatch.setattr(queue_pump, "choose", failing(queue_pump.choose))
        else:
            monkeypatch.setattr(NativePrefixTree, "enter", failing(NativePrefixTree.enter))
        later: list[Any] = []
        if queued:
            run = dispatcher._pump.run
            monkeypatch.setattr(dispatcher._pump, "run", lambda: later.append(run))
        broken = asyncio.ensure_future(client.complete(PROMPT, Sampling(max_tokens=3)))
        if queued:
            await until(lambda: dispatcher.queued == 1, "it waits")
        else:
            await until(lambda: not failures, "it has failed")
        other = asyncio.ensure_future(client.complete([8] * 100, Sampling(max_tokens=3)))
        if queued:
            await until(lambda: dispatcher.queued == 2, "another one does")
            monkeypatch.setattr(dispatcher._pump, "run", run)
            run()
        with pytest.raises(InternalError, match="internal error"):
            await asyncio.wait_for(broken, 10.0)
        tokens = tuple(token_of((8,) * 100, index) for index in range(3))
        assert (await asyncio.wait_for(other, 10.0)).token_ids == tokens
        assert not failures
        assert not dispatcher.request_ids
        await until(
            lambda: not any(book.assignments for book in dispatcher.pool._books.values()), "the books are clean"
        )
        assert await fleet.routers[0].drain()
