"""Runs one router as a process of its own: READY on standard output, SIGTERM drains and ends it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from pdcore.config import RouterConfig
from pdcore.config_json import from_json, load_json
from pdcore.errors import PdserveError
from router.logs import set_levels
from router.service import RouterServer
from security.secret import with_secret_of

logger = logging.getLogger(__name__)

FROM_PARENT = "-"

DRAINED = 0
FAILED = 1
USAGE = 2
CUT_OFF = 3


def main(arguments: Sequence[str]) -> int:
    """Entry of ``python -m router CONFIG.json``.

    With ``-`` in place of a file the configuration is the first line of standard input, and the router ends at once
    when that is closed: a parent that dies takes it along.

    Prints one line ``READY {"address", "incarnation", "pid", "http_address"}`` once it listens. A second signal ends
    it at once. The cluster's secret is taken from the environment if the configuration has none.

    Returns:
        Exit status: 0 after SIGTERM or SIGINT, 1 if it cannot start or its place was taken, 2 for bad usage, 3 if
        requests were cut off.
    """
    if len(arguments) != 1 or (arguments[0].startswith("-") and arguments[0] != FROM_PARENT):
        print("usage: python -m router CONFIG.json", file=sys.stderr)
        return USAGE
    from_parent = arguments[0] == FROM_PARENT
    level = logging.WARNING if from_parent else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        if from_parent:
            config = from_json(RouterConfig, sys.stdin.readline())
        else:
            config = load_json(RouterConfig, Path(arguments[0]))
        set_levels(config.log_level, prompts=config.log_prompts)
        config = replace(config, security=with_secret_of(config.security, os.environ))
        # A message costs less of the processor on it than on asyncio's own; Ray takes it for workers as well.
        return uvloop.run(_serve(config, from_parent))
    except (PdserveError, OSError) as error:
        print(f"cannot start the router: {error}", file=sys.stderr)
        return FAILED


async def _serve(config: RouterConfig, from_parent: bool) -> int:
    loop = asyncio.get_running_loop()
    asked, told_twice, replaced = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (told_twice if asked.is_set() else asked).set()

    def on_replaced(words: str) -> None:
        logger.error("router %s ends: %s", config.router_id, words)
        replaced.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)
    router = RouterServer(config, on_replaced=on_replaced)
    try:
        await router.start()
        if from_parent:
            _when_stdin_ends(loop, told_twice)
        ready = {"address": router.address, "incarnation": router.incarnation, "pid": os.getpid()}
        ready["http_address"] = router.http_address
        print("READY", json.dumps(ready), flush=True)
        await _first(asked.wait(), told_twice.wait(), replaced.wait())
        if replaced.is_set():
            return FAILED
        draining = asyncio.ensure_future(router.drain())
        await _first(asyncio.shield(draining), told_twice.wait())
        drained = draining.done() and draining.result()
        draining.cancel()
        return DRAINED if drained else CUT_OFF
    finally:
        await router.stop()


async def _first(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _when_stdin_ends(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    """Set `ended` when the parent closes standard input, as it does by dying."""

    def read() -> None:
        while sys.stdin.read(4096):
            pass
        try:
            loop.call_soon_threadsafe(ended.set)
        except RuntimeError:
            pass  # the loop has ended by itself

    threading.Thread(target=read, name="parent", daemon=True).start()
