"""Messages of a push stream are lost, held up, repeated and damaged: every transfer ends once and right, and what the
faults took comes back when they are over."""

from __future__ import annotations

import itertools
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.messages import FrameAck, Hello, PushReply
from kv_transfer.transport import LinkListener, OpenLink, PushLink
from kv_transfer.transports.grpc_push import GrpcPushLink
from pdcore.config import TransferConfig
from pdcore.types import RequestKey
from tests.contract.harness import WAIT_S, Pair, wait_until
from tests.support.faulty_link import MessageFaults, faulty_links
from tests.support.kv_store import small_geometry

TIMEOUT_S = 0.4
TRANSFERS = 7


def pair_with(faults: MessageFaults, transport: str, open_link: OpenLink = GrpcPushLink) -> Pair:
    config = TransferConfig(
        transport=transport,
        frame_bytes=16384,
        message_bytes=4096,
        credit_bytes=65536,
        send_timeout_s=TIMEOUT_S,
        lease_s=3 * TIMEOUT_S,
    )
    return Pair(small_geometry(), small_geometry(), config, open_link=faulty_links(open_link, faults))


def test_without_faults_it_is_the_link_that_it_wraps(transport: str) -> None:
    with pair_with(MessageFaults(), transport) as pair:
        for number, length in enumerate((1, 16, 100, 200)):
            assert pair.transfer(RequestKey(f"r{number}", 0), length).error is None
            pair.assert_equal(length)
        assert pair.sender.counters.links == 1


KINDS = {
    "drop": MessageFaults(drop=0.2),
    "repeat": MessageFaults(repeat=0.3),
    "all": MessageFaults(drop=0.03, delay=0.2, repeat=0.1, damage=0.3, reset=0.02, max_delay_s=0.03),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_transfer_ends_once_and_right(kind: str, transport: str, tmp_path: Path) -> None:
    gate, log = tmp_path / "faults", tmp_path / "log"
    gate.touch()
    faults = replace(KINDS[kind], seed=20261130, while_file=str(gate), log_file=str(log))
    lengths = random.Random(1)
    with pair_with(faults, transport) as pair:
        committed = 0
        for number in range(TRANSFERS):
            key, length = RequestKey(f"r{number}", 0), lengths.randrange(1, 200)
            outcome = pair.transfer(key, length)
            pair.host.wait_end(key)
            # The receiver may have committed where the sender could not hear of it; never the reverse.
            taken = any(commit[0] == key for commit in pair.host.commits)
            assert taken or outcome.error is not None
            if taken:
                pair.assert_equal(length)
                committed += 1
        assert {line.split()[0] for line in log.read_text().splitlines()} >= (set() if kind == "all" else {kind}), (
            "no fault at all"
        )
        assert committed
        gate.unlink()
        # The stream that the faults hit may be given up yet, and a transfer with it; then all is well.
        ends = [pair.transfer(RequestKey(f"after{number}", 0), 200).error for number in range(4)]
        assert ends[-2:] == [None, None], ends
        pair.assert_equal(200)
        assert all(pair.host.ends(RequestKey(f"r{number}", 0)) == 1 for number in range(TRANSFERS))
        assert pair.receiver.open_tickets == 0
        wait_until(lambda: pair.sender.open_sends == 0)
        wait_until(lambda: all(peer.credit == peer.window for peer in pair.sender._peers.peers()))


class LosesOneAck:
    """A `LinkListener` that does not hear of the first frame that arrived."""

    def __init__(self, inner: LinkListener, lost: threading.Event) -> None:
        self._inner = inner
        self._lost = lost

    def on_reply(self, reply: PushReply) -> None:
        if isinstance(reply, FrameAck) and not self._lost.is_set():
            self._lost.set()
            return
        self._inner.on_reply(reply)

    def on_closed(self, reason: str, refused: bool) -> None:
        self._inner.on_closed(reason, refused)


def test_the_credit_of_a_lost_answer_is_not_lost_for_ever(transport: str) -> None:
    """Though the stream is never silent: others go by it all the time."""
    lost = threading.Event()

    def open_link(address: str, hello: Hello, listener: LinkListener, **options: Any) -> PushLink:
        return GrpcPushLink(address, hello, LosesOneAck(listener, lost), **options)

    with pair_with(MessageFaults(), transport, open_link) as pair:
        victim, numbers = RequestKey("victim", 0), itertools.count()
        sending = pair.open(victim, pair.grant(victim, 50, first=30), first=30)
        pair.sender.finish(victim, 1)
        wait_until(lost.is_set)
        deadline = time.monotonic() + WAIT_S
        while not sending.done.is_set() or any(p.credit != p.window for p in pair.sender._peers.peers()):
            assert time.monotonic() < deadline, "the credit does not come back"
            pair.transfer(RequestKey(f"other{next(numbers)}", 0), 20)
            time.sleep(0.02)
        assert pair.transfer(RequestKey("after", 0), 200).error is None
