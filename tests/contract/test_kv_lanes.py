"""What every lane beside the stream must survive: it gives way to the next best, and the KV is right in the end."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from kv_transfer import frame_intake
from kv_transfer.inbound_lanes import InboundLane, InboundLanes
from kv_transfer.lane_board import LaneState
from kv_transfer.lanes import LaneError
from kv_transfer.transports import collective, shm
from kv_transfer.transports.catalog import available_transports
from kv_transfer.transports.process_group import PairGroup
from kv_transfer.transports.shm import ShmSendLane
from pdcore.config import TRANSPORTS, TransferConfig
from pdcore.types import RequestKey
from protos import kv_pb2
from tests.contract.harness import WAIT_S, Pair, wait_until
from tests.support.kv_store import small_geometry

KEY = RequestKey("r", 0)


@pytest.fixture(params=[name for name in TRANSPORTS if name != "grpc"])
def lane(request: pytest.FixtureRequest) -> str:
    """Each transport that runs beside the stream."""
    name = str(request.param)
    if name not in available_transports():
        pytest.skip(f"{name} cannot be used here: it is not installed")
    return name


def config_of(transport: str, **changes: object) -> TransferConfig:
    values: dict[str, object] = {"frame_bytes": 16384, "credit_bytes": 65536, "message_bytes": 4096}
    return TransferConfig(**{**values, "transport": transport, **changes})  # type: ignore[arg-type]


def small_pair(config: TransferConfig, **more: object) -> Pair:
    return Pair(small_geometry(), small_geometry(block_size=32), config, **more)  # type: ignore[arg-type]


def settled(pair: Pair) -> None:
    """Nothing is under way, and no lane remembers a frame."""
    wait_until(lambda: pair.sender.open_sends == 0)
    wait_until(lambda: pair.receiver.counters.buffered_bytes == 0)
    wait_until(lambda: pair.sender.counters.unacked_bytes == 0)
    assert all(not entry.under_way for entry in pair.lanes())


def patience(lane: str) -> float:
    """Twice the time after which a silent lane is given up: more than it takes to open, and little more."""
    return 8.0 if lane == "nixl" else 2.0


class Inbound:
    """Every receiver's end of a lane that is made while this is in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lanes: list[InboundLane] = []
        made = InboundLane.__init__

        def remember(entry: InboundLane, *arguments: object, **named: object) -> None:
            made(entry, *arguments, **named)  # type: ignore[arg-type]
            self.lanes.append(entry)

        monkeypatch.setattr(InboundLane, "__init__", remember)


# --- lanes that fail -----------------------------------------------------------------------------------------------


def test_a_receive_that_cannot_be_posted_is_answered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the connection of a group has broken since the last frame: Gloo says so when the next one is posted."""
    receive, posts = PairGroup.receive, 0

    def broken(group: PairGroup, tensor: torch.Tensor, tag: int) -> object:
        nonlocal posts
        posts += 1
        if posts == 3:
            raise LaneError("the pair is closed")
        return receive(group, tensor, tag)

    monkeypatch.setattr(PairGroup, "receive", broken)
    with small_pair(config_of("collective")) as pair:
        assert pair.transfer(KEY, 400).error is None
        pair.assert_equal(400)
        settled(pair)
        counters = pair.sender.counters.lanes["collective"]
        assert (counters.downgrades, counters.moved_frames >= 1) == (1, True)
        wait_until(lambda: not pair.lanes() or pair.lanes()[0].state is LaneState.READY)


def test_a_receiver_that_does_not_close_a_lane_loses_the_stream(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What such a lane holds, credit or a place among the process groups, would be lost for the stream's life."""
    monkeypatch.setattr(InboundLanes, "close", lambda lanes, message: None)
    with small_pair(config_of(lane, send_timeout_s=patience(lane))) as pair:
        assert pair.transfer(KEY, 100).error is None
        (opened,) = pair.lanes()
        peers = pair.sender._peers
        peers.lane_failed(peers.peers()[0], opened, "the test says so")
        assert opened.state is LaneState.CLOSING
        wait_until(lambda: not pair.lanes())
        assert pair.transfer(RequestKey("r2", 0), 100).error is None
        assert pair.sender.counters.links == 2
        settled(pair)


@pytest.mark.parametrize("which", ["a middle one", "the last one", "the first one"])
def test_a_lost_announcement_costs_the_lane_and_nothing_else(lane: str, which: str) -> None:
    lost = {"the first one": 0, "a middle one": 2, "the last one": 5}[which]

    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        frame = message.lane_frame
        if message.WhichOneof("message") != "lane_frame" or (frame.frame_index, getattr(frame, "try")) != (lost, 0):
            yield message

    with small_pair(config_of(lane, send_timeout_s=patience(lane)), change=change) as pair:
        assert pair.transfer(KEY, 400).error is None
        pair.assert_equal(400)
        settled(pair)
        counters = pair.sender.counters.lanes
        assert (counters[lane].failures, counters[lane].downgrades) == (1, 1)
        assert counters[lane].moved_frames >= 1
        assert counters["grpc"].frames >= 1
        assert pair.host.commits[0][2].frames == 6


def fail_at_the_receiver(pair: Pair, inbound: Inbound) -> None:
    for entry in inbound.lanes:
        entry.take_down("a test says so")


def fail_at_the_sender(pair: Pair, inbound: Inbound) -> None:
    for peer in pair.sender._peers.peers():
        for entry in peer.board:
            pair.sender._peers.lane_failed(peer, entry, "a test says so")


def break_it(pair: Pair, inbound: Inbound) -> None:
    """As when the other end's machine is gone: nobody says anything."""
    for entry in inbound.lanes:
        assert entry.lane is not None
        entry.lane.close()


@pytest.mark.parametrize("how", [fail_at_the_receiver, fail_at_the_sender, break_it])
def test_a_lane_that_fails_in_the_middle(lane: str, how: object, monkeypatch: pytest.MonkeyPatch) -> None:
    inbound = Inbound(monkeypatch)
    with small_pair(config_of(lane, send_timeout_s=patience(lane))) as pair:
        pair.source.fill(pair.blocks(pair.source, 400), 400, seed=1)
        sending = pair.open(KEY, pair.grant(KEY, 400))
        pair.sender.computed(KEY, 256)
        wait_until(lambda: pair.receiver.counters.frames == 3)
        how(pair, inbound)  # type: ignore[operator]
        pair.sender.finish(KEY, 5)
        assert sending.wait().error is None
        pair.assert_equal(400)
        settled(pair)
        counters = pair.sender.counters.lanes
        if how is not break_it:
            assert counters[lane].downgrades == 1
        assert counters["grpc"].frames >= 3
        assert pair.host.ends(KEY) == 1


def test_frames_in_every_stage_survive_the_end_of_their_lane(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is being scattered, others wait behind it, the rest are not sent yet when the lane fails."""
    reached, opened = threading.Event(), threading.Event()

    def gate(layer: int, token: int) -> None:
        reached.set()
        assert opened.wait(WAIT_S)

    inbound = Inbound(monkeypatch)
    with small_pair(config_of(lane)) as pair:
        pair.target.on_scatter = gate
        pair.source.fill(pair.blocks(pair.source, 900), 900, seed=1)
        sending = pair.open(KEY, pair.grant(KEY, 900))
        pair.sender.finish(KEY, 5)
        assert reached.wait(WAIT_S)
        wait_until(lambda: sum(len(entry.under_way) for entry in pair.lanes()) >= 3)
        fail_at_the_receiver(pair, inbound)
        opened.set()
        assert sending.wait().error is None
        pair.assert_equal(900)
        settled(pair)
        assert pair.receiver.counters.peak_stream_bytes <= 65536
        assert pair.sender.counters.peak_unacked_bytes <= 65536


def test_a_lane_that_has_failed_is_opened_again(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inbound = Inbound(monkeypatch)
    with small_pair(config_of(lane)) as pair:
        assert pair.transfer(RequestKey("r", 0), 100).error is None
        fail_at_the_receiver(pair, inbound)
        wait_until(lambda: pair.lanes() == [])
        assert pair.transfer(RequestKey("r", 1), 100).error is None
        assert pair.host.commits[-1][2].transport == "grpc", "it is left alone for a while"
        attempt = 2
        while pair.sender.counters.lanes[lane].opened < 2:
            assert pair.transfer(RequestKey("r", attempt), 100).error is None
            attempt += 1
        assert pair.transfer(RequestKey("r", attempt), 100).error is None
        pair.assert_equal(100)
        assert pair.host.commits[-1][2].transport == lane
        assert [entry.number for entry in inbound.lanes] == [0, 1], "a new generation"
        settled(pair)


def test_lanes_end_with_their_stream(lane: str) -> None:
    with small_pair(config_of(lane)) as pair:
        assert pair.transfer(RequestKey("r", 0), 100).error is None
        sending = pair.open(KEY, pair.grant(KEY, 400))
        pair.sender.computed(KEY, 256)
        wait_until(lambda: pair.receiver.counters.frames > 3)
        for link in pair.sender._peers.links():
            link.cancel()
        assert sending.wait().error is not None
        pair.host.wait_end(KEY)
        assert pair.transfer(RequestKey("r", 2), 100).error is None
        assert pair.host.commits[-1][2].transport == lane
        settled(pair)


# --- lanes that do not open ----------------------------------------------------------------------------------------


def test_the_receiver_cannot_open_its_end(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise LaneError("not today")

    monkeypatch.setattr("kv_transfer.transports.catalog.ReceiveLanes.make", refuse)
    with small_pair(config_of(lane)) as pair:
        assert pair.transfer(KEY, 100).error is None
        pair.assert_equal(100)
        assert pair.host.commits[0][2].transport == "grpc"
        counters = pair.sender.counters.lanes[lane]
        assert (counters.failures, counters.opened, counters.downgrades) == (1, 0, 0)
        settled(pair)


def test_the_sender_cannot_open_its_end(
    lane: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise LaneError("not today")

    with small_pair(config_of(lane)) as pair:
        made = pair.sender._lanes.make(lane, 65536, None)  # type: ignore[arg-type]
        monkeypatch.setattr(type(made), "offer", refuse)
        with caplog.at_level(logging.WARNING):
            assert pair.transfer(KEY, 100).error is None
        pair.assert_equal(100)
        assert "not today" in caplog.text
        assert pair.host.commits[0][2].transport == "grpc"
        settled(pair)


def test_an_opening_that_nobody_answers(lane: str) -> None:
    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        if message.WhichOneof("message") != "lane_open":
            yield message

    with small_pair(config_of(lane, send_timeout_s=1.0), change=change) as pair:
        assert pair.transfer(KEY, 100).error is None
        pair.assert_equal(100)
        assert pair.host.commits[0][2].transport == "grpc"
        settled(pair)


def test_a_receiver_that_is_told_to_use_the_stream(lane: str) -> None:
    with small_pair(config_of(lane), receiver_config=config_of("grpc")) as pair:
        assert pair.transfer(KEY, 100).error is None
        assert pair.host.commits[0][2].transport == "grpc"
        (peer,) = pair.sender._peers.peers()
        assert [tuple(item) for item in peer.left_out] == [(lane, "the receiver does not offer it")]
        assert pair.sender.counters.lanes.keys() == {"grpc"}


def test_what_the_receiver_asks_for_is_used(lane: str) -> None:
    with small_pair(config_of("auto"), receiver_config=config_of(lane)) as pair:
        assert pair.transfer(KEY, 100).error is None
        assert pair.host.commits[0][2].transport == lane


def test_a_lane_that_was_not_negotiated_ends_the_stream() -> None:
    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        if message.WhichOneof("message") == "manifest":
            yield kv_pb2.PushMessage(lane_open=kv_pb2.LaneOpen(lane=9, shm=kv_pb2.ShmRing(pid=1, fd=1, bytes=4096)))
        yield message

    with small_pair(config_of("grpc"), change=change) as pair:
        assert "not negotiated" in str(pair.transfer(KEY, 100).error)


# --- shared memory -------------------------------------------------------------------------------------------------


def ring_of(pair: Pair) -> ShmSendLane:
    (entry,) = pair.lanes()
    assert isinstance(entry.lane, ShmSendLane)
    return entry.lane


def test_a_byte_flipped_in_the_ring_is_noticed() -> None:
    flipped: list[int] = []
    pairs: list[Pair] = []

    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        frame = message.lane_frame
        if message.WhichOneof("message") == "lane_frame" and (frame.frame_index, getattr(frame, "try")) == (1, 0):
            loader = ring_of(pairs[0])._loader
            assert loader is not None
            loader._memory[frame.offset + frame.total - 1] ^= 1
            flipped.append(frame.offset)
        yield message

    with small_pair(config_of("shm"), change=change) as pair:
        pairs.append(pair)
        assert pair.transfer(KEY, 400).error is None
        pair.assert_equal(400)
        assert len(flipped) == 1
        assert pair.host.commits[0][2].retries == 1
        assert pair.sender.counters.lanes["shm"].failures == 0, "a damaged frame is no reason to leave the lane"


def test_a_sender_that_writes_while_its_frame_is_read_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decoded is what was checked: the frame is copied first, so that scribbling comes too late."""
    copy = frame_intake.private_copy

    def copy_then_scribble(data: memoryview) -> memoryview:
        private = copy(data)
        loader = ring_of(pair)._loader
        assert loader is not None
        loader._memory[:] ^= 0xFF
        loader._memory[:] ^= 0xFF  # for the frames behind it
        return private

    monkeypatch.setattr(frame_intake, "private_copy", copy_then_scribble)
    with small_pair(config_of("shm", codec="raw")) as pair:
        assert pair.transfer(KEY, 250).error is None
        pair.assert_equal(250)
        assert pair.host.commits[0][2].transport == "shm"


@pytest.mark.parametrize("wrong", ["pid", "fd", "bytes", "nonce"])
def test_a_ring_that_is_not_the_senders_is_not_read(wrong: str) -> None:
    with open(os.devnull) as other:

        def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
            if message.WhichOneof("message") == "lane_open":
                ring = message.lane_open.shm
                match wrong:
                    case "pid":
                        ring.pid = 1 << 30
                    case "fd":
                        ring.fd = other.fileno()
                    case "bytes":
                        ring.bytes *= 2
                    case "nonce":
                        ring.nonce = bytes(16)
            yield message

        with small_pair(config_of("shm"), change=change) as pair:
            assert pair.transfer(KEY, 100).error is None
            pair.assert_equal(100)
            assert pair.host.commits[0][2].transport == "grpc"
            assert pair.sender.counters.lanes["shm"].failures == 1


def test_shared_memory_is_gone_with_its_lane() -> None:
    def mapped() -> list[str]:
        with open("/proc/self/maps") as maps:
            return [line for line in maps if "pdserve-kv" in line]

    files = len(os.listdir("/proc/self/fd"))
    with small_pair(config_of("shm")) as pair:
        assert pair.transfer(KEY, 100).error is None
        assert len(mapped()) == 2, "the sender's end and the receiver's"
        assert not [name for name in os.listdir("/dev/shm") if "pdserve" in name], "it has a name"
    wait_until(lambda: mapped() == [])
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files)


def test_a_ring_cannot_shrink_under_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose size is not sealed could be cut off by its owner: the reader would die of it."""
    monkeypatch.setattr(shm, "available", lambda: True)
    monkeypatch.setattr(shm, "_SEALS", 0)
    with small_pair(config_of("shm")) as pair:
        assert pair.transfer(KEY, 100).error is None
        assert pair.host.commits[0][2].transport == "grpc"


def test_frames_that_do_not_fit_the_end_of_the_ring_wrap() -> None:
    """More bytes than the ring has, in frames that do not divide it."""
    with small_pair(config_of("shm", codec="raw", frame_tokens=47)) as pair:
        for attempt in range(4):
            assert pair.transfer(RequestKey("r", attempt), 900).error is None
            pair.assert_equal(900)
        assert pair.sender.counters.lanes["shm"].frame_bytes > 8 * 65536


# --- process groups ------------------------------------------------------------------------------------------------


def test_a_group_that_the_sender_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(host: str, port: int, timeout_s: float) -> object:
        if threading.current_thread().name == "kv-lane-send":
            raise LaneError("no route")
        return reach(host, port, timeout_s)

    reach = collective.reach_store
    monkeypatch.setattr(collective, "reach_store", unreachable)
    with small_pair(config_of("collective", send_timeout_s=2.0)) as pair:
        assert pair.transfer(KEY, 100).error is None
        pair.assert_equal(100)
        assert pair.host.commits[0][2].transport == "grpc"
        settled(pair)


def test_a_sender_is_in_a_bounded_number_of_groups() -> None:
    config = config_of("collective", max_pairs=2)
    with small_pair(config) as first, small_pair(config) as second, small_pair(config) as third:
        pairs = [first, second, third]

        def groups() -> list[str]:
            return [
                peer.address
                for peer in first.sender._peers.peers()
                for entry in peer.board
                if entry.state is not LaneState.CLOSING
            ]

        attempt = 0

        def send(pair: Pair) -> str:
            nonlocal attempt
            attempt += 1
            key = RequestKey("r", attempt)
            first.source.fill(first.blocks(first.source, 100), 100, seed=attempt)
            sending = first.open(key, pair.grant(key, 100))
            first.sender.finish(key, 1)
            assert sending.wait().error is None
            assert len(groups()) <= 2
            wait_until(lambda: pair.host.ends(key) == 1)
            return pair.host.commits[-1][2].transport

        assert [send(pair) for pair in pairs[:2]] == ["collective"] * 2
        assert send(third) == "grpc", "there is no place for a third group yet; one is being made"
        while send(third) != "collective":
            pass
        assert first.address not in groups(), "the one that was idle for longest gave way"
        while send(first) != "collective":
            pass
        assert second.address not in groups()


def test_a_receiver_is_in_a_bounded_number_of_groups() -> None:
    config = config_of("collective", max_pairs=1)
    with small_pair(config) as pair, small_pair(config) as other:

        def send(by: Pair, attempt: int) -> str:
            key = RequestKey("r", attempt)
            by.source.fill(by.blocks(by.source, 100), 100, seed=attempt)
            sending = by.open(key, pair.grant(key, 100))
            by.sender.finish(key, 1)
            assert sending.wait().error is None
            wait_until(lambda: pair.host.ends(key) == 1)
            return pair.host.commits[-1][2].transport

        assert send(pair, 0) == "collective"
        assert send(other, 1) == "collective", "an idle group makes room"
        wait_until(lambda: pair.lanes() == [])
        assert send(pair, 2) == "grpc", "its own was taken down a moment ago"
        attempt = 3
        while send(pair, attempt) != "collective":
            attempt += 1
