"""Keeps a worker registered with the controller for as long as it serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import grpc

from protos import membership_pb2, membership_pb2_grpc
from security.internal import PLAIN, Internal
from worker.grpc_options import CHANNEL_OPTIONS

logger = logging.getLogger(__name__)


class Registration:
    """A thread that holds `Membership.Register` open, and opens it again when it breaks.

    Args:
        controller: ``host:port`` of the membership service.
        worker: what to register; complete, since nothing of it changes while the process lives.
        heartbeat_s: seconds between signs of life.
        on_refused: called with the controller's words if this worker does not fit the cluster, or lacks its secret;
            the thread ends then, for trying again cannot help.
        internal: how the controller is called.
    """

    def __init__(
        self,
        *,
        controller: str,
        worker: membership_pb2.WorkerDescription,
        heartbeat_s: float,
        on_refused: Callable[[str], None],
        internal: Internal = PLAIN,
    ) -> None:
        self._controller = controller
        self._worker = worker
        self._heartbeat_s = heartbeat_s
        self._on_refused = on_refused
        self._internal = internal
        self._state = membership_pb2.WORKER_STATE_SERVING
        self._stopped = threading.Event()
        self._changed = threading.Event()
        self._registered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> None:
        """Tell the controller that this worker takes nothing new."""
        self._state = membership_pb2.WORKER_STATE_DRAINING
        self._changed.set()

    def stop(self) -> None:
        """End the registration; the worker leaves the member list at once."""
        self._stopped.set()
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5.0)

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until the controller has listed this worker; False if it has not within `timeout_s`."""
        return self._registered.wait(timeout_s)

    def _messages(self) -> Iterator[membership_pb2.Registration]:
        yield membership_pb2.Registration(worker=self._worker, state=self._state)
        while not self._stopped.is_set():
            self._changed.wait(self._heartbeat_s)
            self._changed.clear()
            if not self._stopped.is_set():
                yield membership_pb2.Registration(state=self._state)

    def _run(self) -> None:
        backoff = self._heartbeat_s
        while not self._stopped.is_set():
            with self._internal.channel(self._controller, CHANNEL_OPTIONS) as channel:
                try:
                    stub = membership_pb2_grpc.MembershipStub(channel)
                    for _ in stub.Register(self._messages(), metadata=self._internal.metadata):
                        self._registered.set()
                        backoff = self._heartbeat_s
                except grpc.RpcError as error:
                    self._registered.clear()
                    if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED):
                        self._on_refused(error.details())
                        return
                    logger.warning("registration with %s lost: %s", self._controller, error.details())
            self._stopped.wait(backoff)
            backoff = min(2 * backoff, 5.0)
