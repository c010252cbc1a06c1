"""The worker pools as Ray actors: started, watched, started again after a death, drained, ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from cluster.config import ClusterConfig
from cluster.ray_session import RaySession
from decode_worker.actor import DecodeActor
from pdcore.config import WorkerConfig
from pdcore.errors import ConfigError, PdserveError
from pdcore.types import Role
from prefill_worker.actor import PrefillActor
from worker.hosted import HostedInfo

logger = logging.getLogger(__name__)

_WATCH_S = 10.0  # one call of the death watch
_STOP_S = 20.0  # a worker's own stop, and the end of its process
_RESTART_S = 120.0  # Ray's restart of one worker, model loading included
_FIRST_BACKOFF_S = 1.0
_LOOK_S = 1.0  # between looks at the member list
_HUNG_AFTER = 4  # times `dead_after_s`, off the member list with a live process: long enough for a stall to pass
_MAX_BACKOFF_S = 30.0


class WorkerActor:
    """One worker's actor over all of its lives.

    ::

        create() -> ready() -> watch() --process died--> [Ray restarts it] -> ready() ...
                        '- cannot start, or is gone for good: create() again after a pause

    The actor belongs to this process and ends with it: a worker whose controller and router are gone can serve
    nobody, and would keep its memory for ever.
    """

    def __init__(self, config: WorkerConfig, cluster: ClusterConfig, session: RaySession) -> None:
        self.config = config
        self.worker_id = config.worker_id
        self._cluster = cluster
        self._session = session
        self._handle: Any = None

    @property
    def resource(self) -> str | None:
        """The custom resource that pins this worker to its pool; None if the cluster has no such thing."""
        name = self.config.role.value
        return name if self._session.resources.get(name) else None

    def create(self) -> None:
        """Ask Ray for the actor; returns at once.

        Raises:
            ConfigError: another cluster of the same name runs in this Ray.
        """
        shell: Any = PrefillActor if self.config.role is Role.PREFILL else DecodeActor
        use_node_address = self._cluster.ray.worker_host == "auto" and not self._session.one_node
        try:
            self._handle = shell.options(
                name=self.worker_id,
                num_cpus=self._cluster.pool(self.config.role).num_cpus,
                resources={self.resource: 1} if self.resource else None,
                max_restarts=-1,
            ).remote(self.config, self._cluster.model, use_node_address)
        except ValueError as error:
            problem = "a name that no cluster in this Ray has yet; --set name=... gives this one another"
            raise ConfigError("name", self._cluster.name, problem) from error

    async def ready(self, timeout_s: float) -> HostedInfo:
        """Wait until the worker serves and is registered.

        Raises:
            ConfigError: it cannot start with this configuration.
            PdserveError: it cannot start; says why.
            TimeoutError: it has not within `timeout_s`.
        """
        try:
            # Not wait_for: in Python 3.11 it can swallow the cancellation of whoever waits.
            async with asyncio.timeout(timeout_s):
                return await self._info()
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, ConfigError):
                raise cause from None
            raise PdserveError(f"{self.worker_id} cannot start: {_cause(error)}") from error

    async def _info(self) -> HostedInfo:
        while True:
            try:
                info: HostedInfo = await _result(self._handle.info.remote())
                return info
            except ActorUnavailableError:
                await asyncio.sleep(0.1)  # Ray is starting its process again

    async def watch(self) -> str:
        """Wait for the worker's process to die; returns Ray's words for it. Noticed within milliseconds."""
        while True:
            try:
                await _result(self._handle.wait_end.remote(_WATCH_S))
            except RayError as error:
                return _cause(error)

    def kill(self, *, restart: bool) -> None:
        """End the worker's process now; Ray starts it again if told so."""
        if self._handle is not None:
            ray.kill(self._handle, no_restart=not restart)

    async def drain(self, timeout_s: float) -> bool:
        """Let the worker finish what it has; False if it did not within `timeout_s` or is dead."""
        if self._handle is None:
            return True
        try:
            async with asyncio.timeout(timeout_s + 5.0):
                drained: bool = await _result(self._handle.drain.remote(timeout_s))
        except (RayError, TimeoutError) as error:
            logger.warning("%s did not drain: %r", self.worker_id, error)
            return False
        return drained

    async def stop(self) -> None:
        """End the worker and its process, by force if it must be. Never raises for a worker that is dead."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        try:
            async with asyncio.timeout(_STOP_S):
                await _result(handle.stop.remote())
                handle.__ray_terminate__.remote()
                # Pending calls fail when the process is gone.
                await _result(handle.wait_end.remote(_STOP_S))
        except ActorDiedError:
            return
        except (RayError, TimeoutError) as error:
            logger.warning("%s did not stop by itself: %r", self.worker_id, error)
        ray.kill(handle, no_restart=True)


class WorkerPools:
    """All workers of a cluster.

    Args:
        report: told, in one line each, what a person at the terminal wants to know.
        registered: whether the worker of this id is among the members now.
    """

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        cluster: ClusterConfig,
        session: RaySession,
        report: Callable[[str], None],
        registered: Callable[[str], bool],
    ) -> None:
        self._registered = registered
        self.workers = [WorkerActor(config, cluster, session) for config in configs]
        self._cluster = cluster
        self._session = session
        self._report = report
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self, timeout_s: float) -> None:
        """Start every worker and wait until all serve.

        Raises:
            PdserveError: one cannot start, or is not ready within `timeout_s`; the rest are left to `stop`.
        """
        started = time.monotonic()
        for worker in self.workers:
            worker.create()
        waiting = {asyncio.ensure_future(worker.ready(timeout_s)): worker for worker in self.workers}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
                elapsed = time.monotonic() - started
                for task in done:
                    worker = waiting.pop(task)
                    info = await _or_timeout(task, worker, timeout_s, self._shortage())
                    self._report(f"{worker.worker_id} is ready at {info.address} (pid {info.pid}, {elapsed:.1f} s)")
                if not done:
                    names = ", ".join(sorted(worker.worker_id for worker in waiting.values()))
                    self._report(f"waiting for {names} ({elapsed:.0f} s){self._shortage()}")
        finally:
            for task in waiting:
                task.cancel()
        for worker in self.workers:
            keeper = asyncio.create_task(self._keep(worker), name=worker.worker_id)
            keeper.add_done_callback(self._keeper_ended)
            self._keepers.append(keeper)

    async def drain(self, timeout_s: float) -> bool:
        """Let every worker finish what it has, all at once. Deaths are no longer mended from here on."""
        await self._end_keepers()
        drained = await asyncio.gather(*(self._drain(worker, timeout_s) for worker in self.workers))
        return all(drained)

    async def _drain(self, worker: WorkerActor, timeout_s: float) -> bool:
        if not self._registered(worker.worker_id):
            # Dead, or hung: its sessions have ended and its requests are elsewhere. There is nothing to wait for.
            worker.kill(restart=False)
            return True
        if await worker.drain(timeout_s):
            return True
        self._report(f"{worker.worker_id} still held work after {timeout_s:.1f} s")
        return False

    async def stop(self) -> None:
        """End every worker. Idempotent."""
        await self._end_keepers()
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def _end_keepers(self) -> None:
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    async def _keep(self, worker: WorkerActor) -> None:
        """Report a worker's deaths and returns; replace an actor that Ray has given up."""
        while True:
            problem = await self._until_lost(worker)
            logger.info("%s: %s", worker.worker_id, problem)
            self._report(f"{worker.worker_id} has died; Ray starts it again")
            backoff, given_up = _FIRST_BACKOFF_S, False
            while True:
                try:
                    if given_up:
                        worker.create()  # fails while Ray still has the name of the last one
                    info = await worker.ready(_RESTART_S)
                    break
                except Exception as error:  # whatever it is, nobody else would start it
                    if not isinstance(error, (PdserveError, RayError, TimeoutError)):
                        logger.exception("%s cannot be started", worker.worker_id)
                    reason = str(error) or f"not ready after {_RESTART_S:g} s"
                    self._report(f"{worker.worker_id} is not back, next try in {backoff:.0f} s: {reason}")
                    await worker.stop()
                    given_up = True
                    await asyncio.sleep(backoff)
                    backoff = min(2 * backoff, _MAX_BACKOFF_S)
            self._report(f"{worker.worker_id} is back at {info.address} (pid {info.pid})")

    async def _until_lost(self, worker: WorkerActor) -> str:
        """Wait for the worker's process to die; returns why. One that has long been silent is made to."""
        hung_after_s = _HUNG_AFTER * self._cluster.dead_after_s
        watching = asyncio.ensure_future(worker.watch())
        silent_since: float | None = None
        try:
            while not (await asyncio.wait({watching}, timeout=_LOOK_S))[0]:
                now = time.monotonic()
                if self._registered(worker.worker_id):
                    silent_since = None
                elif silent_since is None:
                    silent_since = now
                elif now - silent_since >= hung_after_s:
                    self._report(f"{worker.worker_id} has been silent for {hung_after_s:g} s and is killed")
                    worker.kill(restart=True)
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

    def _shortage(self) -> str:
        """Which custom resources the cluster has too few of for all workers; empty if it has enough."""
        short = []
        for role in Role:
            wanted = self._cluster.pool(role).workers
            offered = self._session.resources.get(role.value, 0)
            if 0 < offered < wanted:
                short.append(
                    f"{wanted} {role.value} workers need {wanted} of Ray's resource {role.value!r}, "
                    f"the cluster offers {offered:g}"
                )
        return f"; {'; '.join(short)}" if short else ""


async def _or_timeout(
    task: asyncio.Future[HostedInfo], worker: WorkerActor, timeout_s: float, why: str
) -> HostedInfo:
    try:
        return await task
    except TimeoutError as error:
        raise PdserveError(f"{worker.worker_id} is not ready after {timeout_s:g} s{why}") from error


async def _result(ref: Any) -> Any:
    return await asyncio.wrap_future(ref.future())


def _cause(error: RayError) -> str:
    """The line of a Ray error that says what happened; the rest is a traceback of Ray's own calls."""
    cause = error.cause if hasattr(error, "cause") else None
    if cause is not None:
        return str(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)
