"""The Ray that a cluster runs on: joined, or started here and then ended here."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import ray
from ray._common.utils import get_ray_address_file
from ray._private import services

from cluster.config import ClusterConfig
from cluster.ray_environment import ray_address
from cluster.ray_folder import RayFolder, remove_abandoned
from pdcore.errors import PdserveError
from pdcore.types import Role

T = TypeVar("T")

_OBJECT_STORE_BYTES = 128 << 20  # nothing large goes through it
_PROBE_S = 5.0


class RayThread:
    """The one thread that starts, joins and ends Ray.

    Ray asks the kernel to end its processes with the thread that started them, so that thread must stay. It is a
    daemon, so that a Ray that does not answer cannot keep this process from ending.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the thread."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        self._calls.put(work)
        return future

    def _run(self) -> None:
        while True:
            self._calls.get()()


@dataclass(frozen=True, slots=True)
class RaySession:
    """A connection to Ray.

    Attributes:
        owned: we started this Ray and end it.
        one_node: every worker will run on this machine.
        node_address: this machine's address, for the other nodes.
        resources: what all nodes together offer, by name.
        folder: of our own Ray's logs and sockets; None if it is not ours.
    """

    owned: bool
    one_node: bool
    node_address: str
    resources: dict[str, float]
    folder: RayFolder | None

    @classmethod
    def open(cls, config: ClusterConfig, *, log_to_driver: bool) -> RaySession:
        """Join or start Ray; takes seconds. `log_to_driver`: print what the workers log.

        Raises:
            PdserveError: there is no Ray at the address, or it cannot be started.
        """
        address = ray_address(config)
        owned = address == "local"
        if owned:
            remove_abandoned()
        folder = RayFolder() if owned else None
        try:
            if folder is not None:
                # Its processes inherit this mask: a SIGTERM for our whole process group must not end them before we
                # have drained. Ray ends those that do not listen by SIGKILL.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                ray.init(
                    address="local",
                    namespace=config.name,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    resources={role.value: config.pool(role).workers for role in Role if config.pool(role).workers},
                    logging_level=logging.ERROR,
                    log_to_driver=log_to_driver,
                    _temp_dir=str(folder.path),
                )
            else:
                _probe(_Sought.by(address).address)
                ray.init(
                    address=address,
                    namespace=config.name,
                    logging_level=logging.ERROR,
                    log_to_driver=log_to_driver,
                )
        except Exception as error:  # Ray raises bare ones as well, when its start takes too long
            with contextlib.suppress(Exception):
                ray.shutdown()  # what has started of it
            if folder is None:
                raise no_ray(address, str(error)) from error
            hint = "a busy machine may need a second try"
            if folder.keep():
                hint = f"Ray's logs are in {folder.path}; {hint}"
            raise PdserveError(f"cannot start a local Ray: {error} ({hint})") from error
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return cls(
            owned=owned,
            one_node=len(nodes) == 1,
            node_address=ray.util.get_node_ip_address(),
            resources=ray.cluster_resources(),
            folder=folder,
        )

    def close(self) -> None:
        """Leave Ray; ends it, and every process and file of it, if we started it."""
        ray.shutdown()
        if self.folder is not None:
            self.folder.remove()


def no_ray(address: str, problem: str) -> PdserveError:
    """That there is no Ray to join at a configured address, with what was tried and what to do. May take a second."""
    sought = _Sought.by(address)
    return PdserveError(f"no Ray at {sought.address!r}{sought.origin}: {problem} ({sought.advice})")


@dataclass(frozen=True, slots=True)
class _Sought:
    """Where a Ray is sought.

    Attributes:
        address: that is tried.
        origin: words behind it, that say where it is from; empty if it was given.
        advice: for when nobody answers there.
    """

    address: str
    origin: str = ""
    advice: str = "is a Ray cluster running there? `ray start --head` starts one"

    @classmethod
    def by(cls, address: str) -> _Sought:
        """What ``auto`` comes to, found as `ray.init` finds it; other addresses are what they are."""
        if address != "auto":
            return cls(address)
        if given := os.environ.get("RAY_ADDRESS"):
            return cls(given, ", which $RAY_ADDRESS names")
        try:
            found: str = services.get_ray_address_from_environment(address, None)
        except ConnectionError:
            return cls(address)
        file = get_ray_address_file(None)
        if found != services.find_bootstrap_address(None):
            return cls(found, ", of a process that runs here")
        stale = f"if the Ray that wrote {file} has ended, `ray stop` removes the file"
        return cls(found, f", which {file} names", f"{stale}, and `--ray-address local` starts a Ray of our own")


def _probe(address: str) -> None:
    """Raises OSError if nothing listens at a ``HOST:PORT``: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
