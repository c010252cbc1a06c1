"""The life of a cluster: Ray, membership, worker pools and routers, from nothing to drained."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.membership import MembershipServer
from cluster.pools import WorkerPools
from cluster.ray_environment import ray_address
from cluster.ray_session import RaySession, RayThread, no_ray
from cluster.reports import unfailing
from cluster.routers import HostedRouter, RouterProcesses, Routers
from pdcore.errors import ConfigError, PdserveError
from pdcore.listening import check_listening
from pdcore.security import InternalSecurity
from protos import membership_pb2
from router.api_keys import ApiKeys
from router.template_source import given_template
from security.credentials import public_files
from security.internal import Internal
from security.secret import new_secret, read_secret, with_secret_of

logger = logging.getLogger(__name__)

_CONNECT_S = 30.0  # the router's sessions with workers that already serve
_SIGN_OF_LIFE_S = 5.0  # between lines that say what is waited for
_DRAIN_NEWS_S = 3.0  # between lines that say what still runs
_JOIN_RAY_S = 30.0  # for a Ray that is being joined; Ray itself would try for ever
_LEAVE_RAY_S = 10.0  # for a Ray that is being joined when we are told to end
_LEAVE_OWN_RAY_S = 60.0  # for one that is being started: what is not up cannot be ended in order
_CANCEL_S = 3.0  # a cancelled conversion's tidying up; whatever goes on is left to end with the process


class ClusterController:
    """Starts a whole cluster, keeps its workers alive, and ends it.

    ::

        start() ---> serving ---> drain() ---> stop()
           '------ failed -------------------> stop()

    `stop` ends whatever was started, at any point, and must always be called.

    Args:
        config: the cluster's configuration.
        report: told, in one line each, what a person at the terminal wants to know. It may fail.
        log_to_driver: print what the workers log.
        on_ray: called on the event loop once Ray is joined; Ray has taken SIGTERM for itself by then.
    """

    def __init__(
        self,
        config: ClusterConfig,
        report: Callable[[str], None],
        *,
        log_to_driver: bool = True,
        on_ray: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.addresses: Sequence[str] = ()  # of the routers
        self.http_addresses: Sequence[str] = ()  # of those that have HTTP
        self.served_name = ""
        self._report = unfailing(report)
        self._log_to_driver = log_to_driver
        self._on_ray = on_ray
        self._session: RaySession | None = None
        self._ray_thread = RayThread()
        self._membership: MembershipServer | None = None
        self._pools: WorkerPools | None = None
        self._routers: Routers | None = None

    async def start(self) -> None:
        """Start everything; returns once every router is connected to every worker.

        Raises:
            PdserveError: something cannot be started within its bound; says what and why.
        """
        config = self.config
        security = self._security()
        await asyncio.to_thread(_check_router, config)
        await asyncio.to_thread(Internal, security)  # reads the certificates, as every process of the cluster will
        address = ray_address(config)
        if address == "local":
            _check_file("transfer.calibration", config.transfer.calibration)
        self._report(f"resolving model {config.model}")
        path, name = await _resolve(config.model, self._report)
        self.served_name = config.served_name or name
        started = time.monotonic()
        self._report("starting a local Ray" if address == "local" else f"joining Ray at {address}")
        session = self._session = await self._open_ray(started)
        self._on_ray()
        self._report(f"Ray is up ({time.monotonic() - started:.1f} s)")
        host = self._internal_host(session)
        self._membership = MembershipServer(
            host,
            dead_after_s=config.dead_after_s,
            kv_conversion=config.transfer.kv_conversion,
            claim_ttl_s=config.claim_ttl_s,
            claim_grace_s=0.0,  # it listens on a port that no router has ever heard of
            security=security,
        )
        await self._membership.start()
        configs = config.worker_configs(
            model_path=path,
            served_name=name,
            controller=self._membership.address,
            host=host,
            cores=sorted(os.sched_getaffinity(0)) if session.one_node else None,
            security=security,
        )
        self._pools = WorkerPools(configs, config, session, self._report, self._registered)
        await self._pools.start(config.start_timeout_s)
        self._routers = self._make_routers(path, name, self._membership, security)
        await self._routers.start()
        self.addresses = self._routers.addresses
        self.http_addresses = self._routers.http_addresses
        await self._wait_connected(self._membership, self.config.router.replicas, len(configs))

    def _security(self) -> InternalSecurity:
        """As configured, with a secret in any case. Raises ConfigError."""
        security = with_secret_of(self.config.internal_security, os.environ)
        return replace(security, secret=read_secret(security) or new_secret())

    def _make_routers(
        self, path: Path, name: str, membership: MembershipServer, security: InternalSecurity
    ) -> Routers:
        several = self.config.router.replicas > 1
        configs = [
            self.config.router_config(
                model_path=path,
                served_name=name,
                controller=membership.address,
                index=index if several else None,
                security=security,
            )
            for index in range(self.config.router.replicas)
        ]
        if not several:
            return HostedRouter(configs[0])
        routers = membership.routers
        return RouterProcesses(configs, self._report, listed=routers.listed, died=routers.died)

    def _registered(self, worker_id: str) -> bool:
        return any(member.worker.worker_id == worker_id for member in self.members().members)

    async def _open_ray(self, started: float) -> RaySession:
        opening = asyncio.wrap_future(
            self._ray_thread.call(lambda: RaySession.open(self.config, log_to_driver=self._log_to_driver))
        )
        address = ray_address(self.config)
        try:
            while not (await asyncio.wait({opening}, timeout=_SIGN_OF_LIFE_S))[0]:
                elapsed = time.monotonic() - started
                if address != "local" and elapsed >= _JOIN_RAY_S:
                    raise await asyncio.to_thread(no_ray, address, f"no answer within {_JOIN_RAY_S:g} s")
                self._report(f"waiting for Ray ({elapsed:.0f} s)")
        except asyncio.CancelledError:
            # It cannot be interrupted, and `stop` must find it; but a Ray that does not answer is left behind.
            await asyncio.wait({opening}, timeout=_LEAVE_OWN_RAY_S if address == "local" else _LEAVE_RAY_S)
            if opening.done() and opening.exception() is None:
                self._session = opening.result()
            raise
        return opening.result()

    def members(self) -> membership_pb2.MemberList:
        """The workers that are registered now."""
        assert self._membership is not None, "not started"
        return self._membership.members()

    async def drain(self) -> bool:
        """Take nothing new, let running requests finish. False if some did not within ``drain_timeout_s``.

        The bound is for all of it: whoever told us to end may not wait any longer.
        """
        timeout_s = self.config.drain_timeout_s
        started = time.monotonic()
        drained = True
        if self._routers is not None:
            self._report(f"draining: running requests get {timeout_s:g} s")
            telling = asyncio.create_task(self._tell_what_runs(started + timeout_s))
            try:
                drained = await self._routers.drain(timeout_s)
            finally:
                telling.cancel()
            if not drained:
                self._report("some requests did not finish in time and are cut off")
        if self._pools is not None:
            left_s = max(0.0, timeout_s - (time.monotonic() - started)) if drained else 0.0
            drained = await self._pools.drain(left_s) and drained
        if drained:
            self._report(f"drained ({time.monotonic() - started:.1f} s)")
        return drained

    async def _tell_what_runs(self, ends: float) -> None:
        """Say so every few seconds, by what the routers say themselves, until cancelled."""
        assert self._membership is not None
        while True:
            await asyncio.sleep(_DRAIN_NEWS_S)
            running = sum(report.running_requests for report in self._membership.routers.reports().values())
            left_s = max(0.0, ends - time.monotonic())
            self._report(f"draining: {running} running, {left_s:.0f} s left")

    async def stop(self) -> None:
        """End everything that was started; every part has its turn though another fails. Idempotent."""
        if self._routers is not None:
            await _attempt("the routers", self._routers.stop(), 15.0)
            self._routers = None
        if self._pools is not None:
            await _attempt("the workers", self._pools.stop(), 45.0)
            self._pools = None
        if self._membership is not None:
            await _attempt("the membership service", self._membership.stop(), 5.0)
            self._membership = None
        if self._session is not None:
            await _attempt("Ray", asyncio.wrap_future(self._ray_thread.call(self._session.close)), 30.0)
            self._session = None

    def _internal_host(self, session: RaySession) -> str:
        host = self.config.ray.worker_host
        if host != "auto":
            return host
        return "127.0.0.1" if session.one_node else session.node_address

    async def _wait_connected(self, membership: MembershipServer, routers: int, workers: int) -> None:
        """Until each of so many routers has a session with each of so many workers, by what they say themselves."""
        deadline = time.monotonic() + _CONNECT_S
        while True:
            reports = membership.routers.reports()
            if sum(report.connected_workers >= workers for report in reports.values()) >= routers:
                return
            if time.monotonic() >= deadline:
                lacking = {name: r for name, r in reports.items() if r.connected_workers < workers}
                words = [
                    f"{name} is connected to {report.connected_workers} of {workers} workers"
                    + (f" ({report.problem})" if report.problem else "")
                    for name, report in lacking.items()
                ]
                unheard = routers - len(reports)
                words += [f"{unheard} of {routers} routers have not registered"] if unheard > 0 else []
                raise PdserveError(f"{'; '.join(words)} after {_CONNECT_S:g} s")
            await asyncio.sleep(0.02)


async def _resolve(model: str, report: Callable[[str], None]) -> tuple[Path, str]:
    """The model's folder and name. Can be cancelled, though it takes minutes to convert or download a model."""
    cancelled = threading.Event()
    result: Future[tuple[Path, str]] = Future()

    def say(line: str) -> None:
        if not cancelled.is_set():
            report(line)

    def work() -> None:
        try:
            from engine.model_store import resolve_model  # may bring torch, when it has to convert

            resolved = resolve_model(model, progress=say, cancelled=cancelled.is_set)
            result.set_result((resolved.path, resolved.served_name))
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            result.set_exception(error)

    # Not a thread of an executor: the end of the process would wait for those.
    result.set_running_or_notify_cancel()
    threading.Thread(target=work, name="resolve", daemon=True).start()
    waiting = asyncio.wrap_future(result)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        cancelled.set()
        await asyncio.wait({waiting}, timeout=_CANCEL_S)
        if waiting.done():
            waiting.exception()  # the cancellation is what the caller hears of
        raise


def _check_router(config: ClusterConfig) -> None:
    """Raise ConfigError for what the routers would refuse, but a quarter of a minute later: ports and files."""
    for flag, first in (("grpc", config.router.grpc_port), ("http", config.router.http_port)):
        for index in range(config.router.replicas if first > 0 else 0):
            advice = f"end that one, or take another by --{flag}-port; 0 finds a free one"
            check_listening(f"router.{flag}_port", config.router.host, first + index, advice)
    if config.router.chat_template:
        given_template(config.router.chat_template)
    if config.router.api_keys_file:
        ApiKeys.load(Path(config.router.api_keys_file))
    if (tls := config.tls.public.to_config()) is not None:
        public_files(tls)


def _check_file(key: str, path: str) -> None:
    """Raise ConfigError if a file is not there: found out by all workers of this machine, but a minute later."""
    if path and not Path(path).is_file():
        problem = "it is a folder" if Path(path).is_dir() else "there is no such file"
        raise ConfigError(key, path, f"a file made by `pdserve calibrate` for this model ({problem})")


async def _attempt(what: str, ending: Awaitable[object], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await ending
    except TimeoutError:
        logger.error("%s did not end within %g s and is left behind", what, timeout_s)
    except Exception:  # one part's failure must not leave the others running
        logger.exception("could not end %s", what)
