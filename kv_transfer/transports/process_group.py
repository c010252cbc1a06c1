"""Two-member process groups of torch.distributed, made directly. The one place that touches its private parts.

torch.distributed's public way (`init_process_group`) makes one group of all ranks, once, known beforehand. Workers
come and go, so each pair of them gets a group of its own, over a store that the receiver hosts: the constructors of
the process groups, and the options that they take, are what torch does not promise to keep.

Seen with torch 2.13 and Gloo: a `wait` that times out, or a peer that dies, closes the group for good; nothing wakes
a waiting thread but the peer's closing or the time-out; a message longer than its receive buffer ends the *process*,
so lengths are agreed upon before anything is posted.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from kv_transfer.lanes import LaneError

RECEIVER: Final = 0
SENDER: Final = 1

_BACKLOG: Final = 64

# Most of what is used here is not in torch's stubs.
dist: Any = torch.distributed
Store = Any


def available() -> bool:
    """This torch has what is needed."""
    return bool(dist.is_available() and dist.is_gloo_available())


def host_store(address: str, timeout_s: float) -> Store:
    """A store served by this process on a free port of `address`, and of no other: torch by itself would listen
    on every interface. Raises `LaneError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
        return dist.TCPStore(
            address,
            listener.getsockname()[1],
            None,
            True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
        )
    except (OSError, RuntimeError) as error:
        listener.close()
        raise LaneError(f"no store on {address}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            listener.detach()  # the store's now, or closed


def reach_store(host: str, port: int, timeout_s: float) -> Store:
    """The store that another process serves. Raises `LaneError`."""
    try:
        return dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise LaneError(f"the store at {host}:{port} cannot be reached: {error}") from error


class PairGroup:
    """A process group of a sender and a receiver. Used by one thread, but for `abort`.

    The constructor waits until both members are there, `timeout_s` at most, without holding the GIL.

    Args:
        store: common to both. prefix: of this group's keys, never used before.
        rank: `RECEIVER` or `SENDER`.
        backend: ``gloo`` or ``nccl``. address: what Gloo binds to. device: of the tensors, a GPU's for NCCL.
        timeout_s: of the constructor, and of every wait.

    Raises:
        LaneError: the other member did not come, or the two cannot reach each other.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        *,
        backend: str,
        address: str,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._peer = 1 - rank
        scoped = dist.PrefixStore(prefix, store)
        try:
            self._group: Any = (
                _nccl_group(scoped, rank, self._timeout, device)
                if backend == "nccl"
                else _gloo_group(scoped, rank, self._timeout, address)
            )
        except (RuntimeError, ValueError) as error:
            raise LaneError(f"no {backend} group: {_first_line(error)}") from error
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, tensor: torch.Tensor, tag: int) -> Any:
        """Post a send; returns what `wait` takes. `tensor`: contiguous bytes on `device`, kept until then."""
        return self._post(lambda: self._group.send([tensor], self._peer, tag))

    def receive(self, tensor: torch.Tensor, tag: int) -> Any:
        """Post a receive of exactly as many bytes as the peer sends; returns what `wait` takes."""
        return self._post(lambda: self._group.recv([tensor], self._peer, tag))

    def wait(self, work: Any) -> None:
        """Until the operation is done. Raises `LaneError` after the time-out, and if the peer is gone."""
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise LaneError(_first_line(error)) from error

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """What runs within is in order with the group's own work on a GPU; nothing on a CPU."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def abort(self) -> None:
        """End the group. Any thread; returns at once.

        When the connection closes is for the backend to say: Gloo's does once nobody refers to the group or to an
        operation of it. Until then a peer that waits hears nothing, and notices at its time-out at the latest.
        """
        if self._stream is None:
            self._abort()
        else:  # NCCL waits for its kernels
            threading.Thread(target=self._abort, name="kv-lane-abort", daemon=True).start()

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def _post(self, post: Any) -> Any:
        try:
            if self._stream is None:
                return post()
            with torch.cuda.stream(self._stream):
                return post()
        except RuntimeError as error:
            raise LaneError(_first_line(error)) from error


def _gloo_group(store: Store, rank: int, timeout: timedelta, address: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _nccl_group(store: Store, rank: int, timeout: timedelta, device: torch.device, size: int = 2) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
