"""The routers of a cluster: one in this process, or several in processes of their own, kept alive like workers."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.child_process import ChildProcess
from pdcore.addresses import grpc_address
from pdcore.config import RouterConfig
from pdcore.config_json import to_json
from pdcore.errors import PdserveError
from router.service import RouterServer

logger = logging.getLogger(__name__)

_START_S = 60.0  # a router's start, its tokenizer included
_STOP_S = 10.0
_DRAIN_SPARE_S = 5.0
_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 30.0
_LOOK_S = 1.0  # between looks at the list of routers
_HUNG_AFTER = 4  # times `dead_after_s`, off the list with a live process
_READY = b"READY "


class Routers(Protocol):
    """What the controller does with its routers, wherever they run."""

    @property
    def addresses(self) -> Sequence[str]:
        """``host:port`` of each, once they have been started. Restarts keep them."""
        ...

    @property
    def http_addresses(self) -> Sequence[str]:
        """The same of their HTTP interfaces; empty if they have none."""
        ...

    async def start(self) -> None:
        """Raises PdserveError if one cannot start."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, let running requests finish. False if some did not."""
        ...

    async def stop(self) -> None:
        """End all of them at once. Idempotent."""
        ...


class HostedRouter:
    """The only router, in this process: it lives and dies with the controller."""

    def __init__(self, config: RouterConfig) -> None:
        self._router = RouterServer(config)

    @property
    def addresses(self) -> Sequence[str]:
        return [self._router.address]

    @property
    def http_addresses(self) -> Sequence[str]:
        return [self._router.http_address] if self._router.http_address else []

    async def start(self) -> None:
        await self._router.start()

    async def drain(self, timeout_s: float) -> bool:
        return await self._router.drain(timeout_s)

    async def stop(self) -> None:
        await self._router.stop()


@dataclass(frozen=True, slots=True)
class RouterInfo:
    """What a router's process said when it was ready."""

    address: str
    incarnation: str
    pid: int
    http_address: str


class RouterProcess:
    """One router's process over all of its lives, ``python -m router -``. It ends when this process does."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.info: RouterInfo | None = None
        self._process: ChildProcess | None = None

    @property
    def router_id(self) -> str:
        return self.config.router_id

    async def start(self) -> RouterInfo:
        """Start it, on the ports that it had before, and wait until it listens.

        Raises:
            PdserveError: it does not within its bound, or ends; its own words are on standard error. It has ended
                then, as it has if anything else is raised.
        """
        if self._process is not None:  # its last life
            self._process.close()
        # In a session of its own: a Ctrl-C at the terminal is for us, we drain it.
        process = self._process = ChildProcess([sys.executable, "-m", "router", "-"])
        try:
            async with asyncio.timeout(_START_S):
                answer = await process.ask(json.dumps(json.loads(to_json(self.config))).encode())
            self.info = _ready(answer)
        except BaseException as error:
            process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise PdserveError(f"{self.router_id} is not ready after {_START_S:g} s") from error
            if isinstance(error, (BrokenPipeError, ValueError)):
                raise PdserveError(f"{self.router_id} cannot start; what it said is on standard error") from error
            raise
        # Clients know it by these.
        self.config = replace(self.config, grpc_port=_port_in(self.info.address))
        if self.info.http_address:
            self.config = replace(self.config, http_port=_port_in(self.info.http_address))
        return self.info

    async def watch(self) -> int:
        """Wait for its process to end; returns the exit status, negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def drain(self, timeout_s: float) -> bool:
        """Let it finish what it has, and end. False if it cut something off."""
        process = self._process
        if process is None or process.returncode is not None:
            return True  # dead, and its requests with it: there is nothing to wait for
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                return await process.wait() == 0
        except TimeoutError:
            return False

    async def stop(self) -> None:
        """End it, by force if it must be."""
        process = self._process
        if process is None:
            return
        process.end()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        process.close()
        if self._process is process:
            self._process = None


def _ready(line: bytes) -> RouterInfo:
    """What a router says when it listens; ValueError if this is something else, or nothing."""
    if not line.startswith(_READY):
        raise ValueError("no READY")
    try:
        info = RouterInfo(**json.loads(line.removeprefix(_READY)))
        for address in filter(None, (info.address, info.http_address)):
            _port_in(address)
    except (TypeError, AttributeError) as error:
        raise ValueError("READY with something else behind it") from error
    return info


def _port_in(address: str) -> int:
    return int(address.rpartition(":")[2])


class RouterProcesses:
    """Several routers, each in a process of its own.

    ::

        start() -> listens -> watch() --it ended--> start() again, on the same port, after a pause if that fails
                      '- off the controller's list for long: killed

    Args:
        configs: of each. They differ in id and port.
        report: told, in one line each, what a person at the terminal wants to know.
        listed: whether the router of this id is on the controller's list now.
        died: told of a router (id and incarnation) whose process has ended.
    """

    def __init__(
        self,
        configs: Sequence[RouterConfig],
        report: Callable[[str], None],
        *,
        listed: Callable[[str], bool],
        died: Callable[[str, str], None],
    ) -> None:
        self._routers = [RouterProcess(config) for config in configs]
        self._tls = configs[0].tls is not None
        self._hung_after_s = _HUNG_AFTER * configs[0].dead_after_s
        self._report = report
        self._listed = listed
        self._died = died
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def addresses(self) -> Sequence[str]:
        return [router.info.address for router in self._routers if router.info is not None]

    @property
    def http_addresses(self) -> Sequence[str]:
        infos = [router.info for router in self._routers if router.info is not None]
        return [info.http_address for info in infos if info.http_address]

    async def start(self) -> None:
        infos = await asyncio.gather(*(router.start() for router in self._routers))
        for router, info in zip(self._routers, infos, strict=True):
            self._report(f"{router.router_id} is ready at {self._shown(info)} (pid {info.pid})")
            keeper = asyncio.create_task(self._keep(router), name=router.router_id)
            keeper.add_done_callback(self._keeper_ended)
            self._keepers.append(keeper)

    def _shown(self, info: RouterInfo) -> str:
        """Where clients call it."""
        return grpc_address(info.address, tls=self._tls)

    async def drain(self, timeout_s: float) -> bool:
        """As `Routers.drain`; deaths are no longer mended from here on. Each router's own bound is the
        configuration's ``drain_timeout_s``, so `timeout_s` should not be less."""
        await self._end_keepers()
        drains = [router.drain(timeout_s + _DRAIN_SPARE_S) for router in self._routers]
        return all(await asyncio.gather(*drains))

    async def stop(self) -> None:
        await self._end_keepers()
        await asyncio.gather(*(router.stop() for router in self._routers))

    async def _end_keepers(self) -> None:
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    async def _keep(self, router: RouterProcess) -> None:
        while True:
            status = await self._until_ended(router)
            assert router.info is not None
            self._died(router.router_id, router.info.incarnation)
            self._report(f"{router.router_id} has died (exit status {status}); it is started again")
            backoff = _FIRST_BACKOFF_S
            while True:
                try:
                    info = await router.start()
                    break
                except Exception as error:  # whatever it is, nobody else would start it
                    if not isinstance(error, (PdserveError, OSError)):
                        logger.exception("%s cannot be started", router.router_id)
                    self._report(f"{router.router_id} is not back, next try in {backoff:.0f} s: {error}")
                    await asyncio.sleep(backoff)
                    backoff = min(2 * backoff, _MAX_BACKOFF_S)
            self._report(f"{router.router_id} is back at {self._shown(info)} (pid {info.pid})")

    async def _until_ended(self, router: RouterProcess) -> int:
        """Wait for the router's process to end; one that has long been off the list is made to."""
        watching = asyncio.ensure_future(router.watch())
        silent_since: float | None = None
        try:
            while not (await asyncio.wait({watching}, timeout=_LOOK_S))[0]:
                now = time.monotonic()
                if self._listed(router.router_id):
                    silent_since = None
                elif silent_since is None:
                    silent_since = now
                elif now - silent_since >= self._hung_after_s:
                    self._report(f"{router.router_id} has been silent for {self._hung_after_s:g} s and is killed")
                    router.kill()
                    silent_since = None
        finally:
            watching.cancel()
        return watching.result()

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        if keeper.cancelled():
            return
        error = keeper.exception()
        logger.error("the keeper of %s has failed", keeper.get_name(), exc_info=error)
        self._report(f"{keeper.get_name()} is watched no longer, nobody will start it again: {error!r}")
