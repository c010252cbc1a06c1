"""A push link that loses, delays, repeats and damages what goes through it, by a seeded plan.

It wraps a real one and is one: `KvSender` takes `faulty_links(...)` where it takes `GrpcPushLink`. What a real stream
promises is kept where the plan says nothing: order, both ways, and `on_closed` last. ::

    sender -- post --> [faults] --> real link == network == receiver
    sender <- listener - [faults] <-- real link <=========='
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from kv_transfer.manifest import Manifest, TicketRef
from kv_transfer.messages import Hello, LaneClose, LaneFrame, LaneOpen, PushReply
from kv_transfer.transport import LinkListener, OpenLink, PushLink

Fate = Literal["pass", "drop", "delay", "repeat", "damage", "reset"]


@dataclass(frozen=True, slots=True)
class MessageFaults:
    """What befalls messages, each by itself; the rest of the probability is to pass.

    Attributes:
        seed: of the choices; a link's also depend on how many the process made before.
        drop, delay, repeat: probabilities, of any message either way.
        damage: of a frame to have a byte changed, and of a manifest to have another digest.
        reset: of the stream to break at a message.
        max_delay_s: a delay is evenly distributed up to it, and holds up what comes behind it.
        while_file: faults happen only while this file exists; always if None.
        log_file: gets a line, ``FATE MESSAGE``, for each fault.
    """

    seed: int = 0
    drop: float = 0.0
    delay: float = 0.0
    repeat: float = 0.0
    damage: float = 0.0
    reset: float = 0.0
    max_delay_s: float = 0.0
    while_file: str | None = None
    log_file: str | None = None


class FaultSource:
    """Draws the fates of one link's messages. Thread-safe: either direction has a generator of its own."""

    def __init__(self, faults: MessageFaults, number: int) -> None:
        self._faults = faults
        self._generators = {way: random.Random(f"{faults.seed}/{number}/{way}") for way in ("out", "in")}

    def draw(self, way: Literal["out", "in"], name: str) -> tuple[Fate, float]:
        """The fate of the next message, and how long it is held up, in seconds."""
        faults, generator = self._faults, self._generators[way]
        value, share = generator.random(), generator.random()  # two of each, whatever the fate: the plan is stable
        if faults.while_file is not None and not Path(faults.while_file).exists():
            return "pass", 0.0
        fates: tuple[tuple[Fate, float], ...] = (
            ("drop", faults.drop),
            ("delay", faults.delay),
            ("repeat", faults.repeat),
            ("damage", faults.damage if name in ("Frame", "Manifest") else 0.0),
            ("reset", faults.reset),
        )
        for fate, probability in fates:
            if value < probability:
                self._log(f"{fate} {name}\n")
                return fate, share * faults.max_delay_s if fate == "delay" else 0.0
            value -= probability
        return "pass", 0.0

    def _log(self, line: str) -> None:
        if self._faults.log_file is None:
            return
        # One write of a line to a file opened for appending: whole, whoever else writes.
        file = os.open(self._faults.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, line.encode())
        os.close(file)


class _Job(NamedTuple):
    due: float
    act: Callable[[], None]


class _Line:
    """One direction: acts in order, none before its time. Its thread ends behind the act given with `last`."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, act: Callable[[], None], delay_s: float = 0.0, last: bool = False) -> None:
        self._jobs.put(_Job(time.monotonic() + delay_s, act))
        if last:
            self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            left = job.due - time.monotonic()
            if left > 0:
                time.sleep(left)
            job.act()


class FaultyLink:
    """`PushLink` around another; see the module. `LinkListener` of that one."""

    def __init__(self, source: FaultSource, address: str, listener: LinkListener) -> None:
        self._source = source
        self._listener = listener
        self._out = _Line(f"kv-faults-out {address}")
        self._in = _Line(f"kv-faults-in {address}")
        self._finished = threading.Event()
        self.inner: PushLink  # set by `faulty_links`, before anybody has this link

    # -- PushLink ----------------------------------------------------------------------------------------------

    def post_frame(self, ref: TicketRef, frame_index: int, attempt: int, frame: bytes) -> None:
        fate, delay = self._source.draw("out", "Frame")
        if fate == "damage":
            middle = len(frame) // 2
            frame = frame[:middle] + bytes([frame[middle] ^ 0x40]) + frame[middle + 1 :]
        self._send(fate, delay, lambda: self.inner.post_frame(ref, frame_index, attempt, frame))

    def post_manifest(self, manifest: Manifest, on_sent: Callable[[], None]) -> None:
        fate, delay = self._source.draw("out", "Manifest")
        if fate == "damage":
            manifest = replace(manifest, digest=manifest.digest ^ 1)
        if fate == "drop":
            self._out.put(on_sent)  # as a network does that takes a message and loses it
        self._send(fate, delay, lambda: self.inner.post_manifest(manifest, on_sent))

    def post_abort(self, ref: TicketRef, reason: str) -> None:
        self._send(*self._source.draw("out", "Abort"), lambda: self.inner.post_abort(ref, reason))

    def post_lane(self, message: LaneOpen | LaneFrame | LaneClose) -> None:
        self._send(*self._source.draw("out", type(message).__name__), lambda: self.inner.post_lane(message))

    def cancel(self) -> None:
        self._end_out(self.inner.cancel)
        self.inner.cancel()

    def finish(self) -> None:
        self._end_out(self.inner.finish)

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self.finish()
        self._out.join(timeout_s / 4)
        self.inner.close(max(0.0, 0.75 * (deadline - time.monotonic())))
        self._in.join(max(0.0, deadline - time.monotonic()))

    def _send(self, fate: Fate, delay_s: float, post: Callable[[], None]) -> None:
        if fate == "reset":
            self.inner.cancel()
        if fate in ("drop", "reset"):
            return
        self._out.put(post, delay_s)
        if fate == "repeat":
            self._out.put(post)

    def _end_out(self, act: Callable[[], None]) -> None:
        if not self._finished.is_set():
            self._finished.set()
            self._out.put(act, last=True)

    # -- LinkListener of the inner link ------------------------------------------------------------------------

    def on_reply(self, reply: PushReply) -> None:
        fate, delay = self._source.draw("in", type(reply).__name__)
        if fate == "reset":
            self.inner.cancel()
        if fate in ("drop", "reset"):
            return
        self._in.put(lambda: self._listener.on_reply(reply), delay)
        if fate == "repeat":
            self._in.put(lambda: self._listener.on_reply(reply))

    def on_closed(self, reason: str, refused: bool) -> None:
        self._end_out(self.inner.finish)
        self._in.put(lambda: self._listener.on_closed(reason, refused), last=True)


class _Early:
    """Stands for a link until it is made: the one inside speaks as soon as it is."""

    def __init__(self) -> None:
        self.link: FaultyLink
        self._made = threading.Event()

    def made(self, link: FaultyLink) -> None:
        self.link = link
        self._made.set()

    def on_reply(self, reply: PushReply) -> None:
        self._made.wait()
        self.link.on_reply(reply)

    def on_closed(self, reason: str, refused: bool) -> None:
        self._made.wait()
        self.link.on_closed(reason, refused)


def faulty_links(open_link: OpenLink, faults: MessageFaults) -> OpenLink:
    """Links made by `open_link`, with faults."""
    numbers = iter(range(1 << 62))

    def open_faulty(
        address: str, hello: Hello, listener: LinkListener, *, message_bytes: int, cores: tuple[int, ...] = ()
    ) -> PushLink:
        early = _Early()
        link = FaultyLink(FaultSource(faults, next(numbers)), address, listener)
        link.inner = open_link(address, hello, early, message_bytes=message_bytes, cores=cores)
        early.made(link)
        return link

    return open_faulty
