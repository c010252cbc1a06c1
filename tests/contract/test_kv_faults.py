"""What every transport must survive: each send ends once, each ticket ends once, nothing stale is ever written."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from pdcore.clock import ManualClock
from pdcore.config import TransferConfig
from pdcore.errors import FrameError, TicketError, TicketRevoked, TransferError, TransferTimeout
from pdcore.types import RequestKey
from protos import kv_pb2
from tests.contract.harness import WAIT_S, Meddler, Pair, frame_of, wait_until
from tests.support.kv_store import small_geometry

KEY = RequestKey("r", 0)


def config_of(transport: str, **changes: object) -> TransferConfig:
    values: dict[str, object] = {
        "transport": transport,
        "frame_bytes": 12288,
        "message_bytes": 4096,
        "credit_bytes": 32768,
    }
    return TransferConfig(**{**values, **changes})  # type: ignore[arg-type]


def settled(pair: Pair, key: RequestKey = KEY) -> None:
    """Everything of `key` is over, once, on both sides, and no byte is held."""
    pair.host.wait_end(key)
    wait_until(lambda: pair.sender.open_sends == 0)
    wait_until(lambda: pair.receiver.counters.buffered_bytes == 0)
    assert pair.receiver.open_tickets == 0
    assert pair.host.ends(key) == 1


class Gate:
    """Holds a store's call until opened; says when one waits."""

    def __init__(self, passes: int = 0) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._passes = passes

    def __call__(self, layer: int, token: int) -> None:
        if self._passes > 0:
            self._passes -= 1
            return
        self.reached.set()
        assert self.opened.wait(WAIT_S)


# --- damage on the way ---------------------------------------------------------------------------------------------


def flip(data: bytes, position: int) -> bytes:
    damaged = bytearray(data)
    damaged[position] ^= 0x10
    return bytes(damaged)


@pytest.mark.parametrize("where", ["header", "payload", "end"])
def test_a_damaged_frame_is_sent_again(transport: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(frame_index: int, attempt: int, data: bytes) -> bytes:
        position = {"header": 60, "payload": 300, "end": len(data) - 1}[where]
        return flip(data, position) if (frame_index, attempt) == (1, 0) else data

    meddler = Meddler(monkeypatch, damage)
    with Pair(small_geometry(), small_geometry(), config_of(transport), change=meddler) as pair:
        assert pair.transfer(KEY, 200).error is None
        pair.assert_equal(200)
        settled(pair)
        assert sorted(meddler.tries)[:3] == [(0, 0), (1, 0), (1, 1)]
        assert pair.host.commits[0][2].retries == 1
        assert pair.sender.counters.retries == 1


def test_a_frame_that_stays_damaged_is_tried_every_way_and_fails_the_transfer(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(frame_index: int, attempt: int, data: bytes) -> bytes:
        return flip(data, 300) if frame_index == 0 else data

    meddler = Meddler(monkeypatch, damage)
    config = config_of(transport, max_frame_retries=2)
    with Pair(small_geometry(), small_geometry(), config, change=meddler) as pair:
        error = pair.transfer(KEY, 200).error
        assert isinstance(error, FrameError)
        assert "checksum" in str(error)
        ways = 3 if transport == "grpc" else 4  # the last of them is the stream
        assert [attempt for index, attempt in meddler.tries if index == 0] == list(range(ways))
        if transport != "grpc":
            assert pair.sender.counters.lanes["grpc"].frames == 1
        settled(pair)
        assert pair.host.commits == []


def test_a_frame_that_only_a_lane_damages_comes_another_way(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if transport == "grpc":
        pytest.skip("the stream is the last way that there is")

    def damage(frame_index: int, attempt: int, data: bytes) -> bytes:
        return flip(data, 300) if frame_index == 0 and attempt <= 2 else data

    meddler = Meddler(monkeypatch, damage)
    config = config_of(transport, max_frame_retries=2)
    with Pair(small_geometry(), small_geometry(), config, change=meddler) as pair:
        assert pair.transfer(KEY, 200).error is None
        pair.assert_equal(200)
        assert pair.host.commits[0][2].transport == transport
        assert pair.sender.counters.lanes["grpc"].frames == 1
        settled(pair)


def test_a_frame_for_another_ticket_is_not_written(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The envelope names a live ticket, the frame inside was made for another one."""
    frames: list[bytes] = []
    other = RequestKey("other", 0)

    def swap(frame_index: int, attempt: int, data: bytes) -> bytes:
        frames.append(data)
        assert len(frames[-1]) == len(frames[0])
        return frames[0]

    config = config_of(transport, codec="raw")
    with Pair(small_geometry(), small_geometry(), config, change=Meddler(monkeypatch, swap)) as pair:
        assert pair.transfer(KEY, 10).error is None
        before = pair.target.cache.clone()
        error = pair.transfer(other, 10).error
        assert isinstance(error, FrameError)
        assert "ticket" in str(error)
        settled(pair, other)
        assert bool((pair.target.cache == before).all())
        assert [key for key, _, _ in pair.host.commits] == [KEY]


@pytest.mark.parametrize("wrong", ["offset", "interleaved", "credit", "short"])
def test_a_sender_that_breaks_the_protocol_loses_its_stream(transport: str, wrong: str) -> None:
    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        frame = frame_of(message)
        if frame is not None:
            match wrong:
                case "offset":
                    frame.offset += 1 << 40 if isinstance(frame, kv_pb2.LaneFrame) else 1
                case "interleaved" if isinstance(frame, kv_pb2.KvChunk):
                    frame.total += 1
                    yield message
                    frame.frame_index += 1
                case "interleaved":
                    frame.lane += 1  # one that is not open
                case "credit":
                    frame.total = 1 << 30
                case _:
                    frame.total = 5
        yield message

    if wrong == "offset" and transport == "collective":
        pytest.skip("frames of a process group have no offset")
    with Pair(small_geometry(), small_geometry(), config_of(transport), change=change) as pair:
        assert pair.transfer(KEY, 20).error is not None
        wait_until(lambda: pair.sender.open_sends == 0)
        pair.receiver.release(KEY, "the router gives up")  # a ticket whose first frame never began is not bound
        settled(pair)
        assert pair.host.commits == []


# --- bounded memory ------------------------------------------------------------------------------------------------


def test_a_slow_receiver_bounds_memory_on_both_sides(transport: str) -> None:
    config = config_of(transport, codec="raw", credit_bytes=16384)
    gate = Gate()
    with Pair(small_geometry(), small_geometry(), config) as pair:
        gathered: list[int] = []
        pair.source.on_gather = lambda layer, token: gathered.append(token)
        pair.target.on_scatter = gate
        pair.source.fill(pair.blocks(pair.source, 900), 900, seed=1)
        sending = pair.open(KEY, pair.grant(KEY, 900))
        pair.sender.finish(KEY, 1)
        assert gate.reached.wait(WAIT_S)
        wait_until(lambda: pair.sender.counters.unacked_bytes > 16384 // 2)
        stalled = len(gathered)
        assert stalled * 4096 <= 2 * 16384, "KV was gathered without credit"
        gate.opened.set()
        assert sending.wait().error is None
        pair.assert_equal(900)
        assert len(gathered) > 2 * stalled
        assert pair.receiver.counters.peak_stream_bytes <= 16384
        assert pair.receiver.counters.peak_buffered_bytes <= 16384
        assert pair.sender.counters.peak_unacked_bytes <= 16384
        settled(pair)


def test_a_receiver_that_never_acknowledges_fails_the_send_in_time(transport: str) -> None:
    clock = ManualClock()
    gate = Gate()
    with Pair(small_geometry(), small_geometry(), config_of(transport, lease_s=1000.0), clock=clock) as pair:
        pair.target.on_scatter = gate
        sending = pair.open(KEY, pair.grant(KEY, 100))
        pair.sender.finish(KEY, 1)
        assert gate.reached.wait(WAIT_S)
        wait_until(lambda: pair.sender.counters.frames == 3)  # one for each layer: all that there is to send
        assert not sending.done.is_set()
        clock.advance(5.0)
        assert isinstance(sending.wait().error, TransferTimeout)
        assert pair.host.ends(KEY) == 0, "released with a scatter in flight"
        gate.opened.set()
        settled(pair)


def test_a_prompt_may_queue_for_as_long_as_it_likes(transport: str) -> None:
    clock = ManualClock()
    with Pair(small_geometry(), small_geometry(), config_of(transport, lease_s=1000.0), clock=clock) as pair:
        pair.source.fill(pair.blocks(pair.source, 100), 100, seed=1)
        sending = pair.open(KEY, pair.grant(KEY, 100))
        wait_until(lambda: pair.sender.counters.links == 1)
        pair.transfer(RequestKey("warm", 0), 1)
        clock.advance(500.0)
        time.sleep(0.25)  # two ticks of the pump
        assert not sending.done.is_set()
        pair.sender.finish(KEY, 1)
        assert sending.wait().error is None
        settled(pair)


# --- tickets that end early ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["release", "revoke", "release_router"])
def test_a_ticket_taken_back_during_a_scatter(transport: str, how: str) -> None:
    gate = Gate(passes=2)
    with Pair(small_geometry(), small_geometry(), config_of(transport)) as pair:
        pair.target.on_scatter = gate
        sending = pair.open(KEY, pair.grant(KEY, 300))
        pair.sender.finish(KEY, 1)
        assert gate.reached.wait(WAIT_S)
        match how:
            case "release":
                pair.receiver.release(KEY, "gone")
            case "revoke":
                pair.receiver.revoke(KEY, "gone")
            case _:
                pair.receiver.release_router("router-0", "gone")
        assert type(sending.wait().error) is TicketRevoked
        assert pair.sender.counters.failed == pair.receiver.counters.failed == 0, "nobody's fault"
        assert pair.receiver.counters.rejected == 0, "nothing was damaged"
        assert pair.host.ends(KEY) == 0, "released with a scatter in flight"
        gate.opened.set()
        settled(pair)
        assert pair.host.releases == [(KEY, "gone", how == "revoke")]
        pair.target.on_scatter = None
        assert pair.transfer(RequestKey("r", 1), 300).error is None


def test_a_lease_runs_out_unless_renewed(transport: str) -> None:
    clock = ManualClock()
    with Pair(small_geometry(), small_geometry(), config_of(transport, lease_s=10.0), clock=clock) as pair:
        ticket = pair.grant(KEY, 100)
        kept = pair.grant(RequestKey("kept", 0), 16, first=30)
        clock.advance(9.0)
        pair.receiver.renew("router-0")
        clock.advance(9.0)
        time.sleep(0.25)  # two ticks of the housekeeper
        assert pair.receiver.open_tickets == 2
        clock.advance(1.0)
        settled(pair)
        assert pair.host.releases[0][2], "an expired ticket failed"
        assert pair.host.ends(RequestKey("kept", 0)) == 1
        before = pair.target.cache.clone()
        for late in (ticket, kept):
            sending = pair.open(RequestKey("late", late.endpoints[0].ticket_id), late)
            pair.sender.finish(RequestKey("late", late.endpoints[0].ticket_id), 1)
            assert isinstance(sending.wait().error, TicketError)
        assert bool((pair.target.cache == before).all())


def test_stale_frames_never_reach_blocks_that_have_changed_hands(transport: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of(transport), change=None) as pair:
        old = pair.grant(KEY, 100)
        pair.receiver.release(KEY, "gone")
        pair.host.wait_end(KEY)
        new_key = RequestKey("new", 0)
        new = pair.grant(new_key, 100)  # the same slot and the same blocks
        (was,), (now,) = old.endpoints, new.endpoints
        assert (now.ticket_id, now.generation > was.generation) == (was.ticket_id, True)
        before = pair.target.cache.clone()
        pair.source.fill(pair.blocks(pair.source, 100), 100, seed=3)
        stale = pair.open(KEY, old)
        pair.sender.finish(KEY, 1)
        error = stale.wait().error
        assert type(error) is TicketRevoked
        assert "gone" in str(error)
        assert pair.sender.counters.failed == 0
        assert pair.receiver.counters.rejected == 0, "they came too late, and none was damaged"
        assert bool((pair.target.cache == before).all())
        sending = pair.open(new_key, new)
        pair.sender.finish(new_key, 1)
        assert sending.wait().error is None
        pair.assert_equal(100)
        settled(pair, new_key)
        # The slot's second ticket is over too: whoever fills the first one has still done nothing wrong.
        later = pair.open(RequestKey("later", 0), old)
        pair.sender.finish(RequestKey("later", 0), 1)
        assert type(later.wait().error) is TicketRevoked
        assert pair.sender.counters.failed == 0


def test_the_host_refuses_the_commit(transport: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of(transport)) as pair:
        pair.host.accept = False
        assert isinstance(pair.transfer(KEY, 100).error, TicketError)
        settled(pair)
        assert len(pair.host.releases) == 1


def test_a_release_during_the_commit_is_the_hosts_to_decide(transport: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of(transport)) as pair:
        pair.host.on_commit_hook = lambda key: pair.receiver.release(key, "too late")
        assert pair.transfer(KEY, 100).error is None
        settled(pair)
        assert len(pair.host.commits) == 1


def test_a_manifest_that_comes_twice_commits_once(transport: str) -> None:
    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        yield message
        if message.WhichOneof("message") == "manifest":
            yield message

    with Pair(small_geometry(), small_geometry(), config_of(transport), change=change) as pair:
        for attempt in range(5):
            assert pair.transfer(RequestKey("r", attempt), 100).error is None
            settled(pair, RequestKey("r", attempt))
        assert len(pair.host.commits) == 5


@pytest.mark.parametrize("field", ["digest", "num_frames", "num_tokens", "attempt", "request_id"])
def test_a_manifest_that_does_not_fit_commits_nothing(transport: str, field: str) -> None:
    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        if message.WhichOneof("message") == "manifest":
            if field == "request_id":
                message.manifest.request_id = "somebody else's"
            else:
                setattr(message.manifest, field, getattr(message.manifest, field) - 1 & 0xFF)
        yield message

    with Pair(small_geometry(), small_geometry(), config_of(transport), change=change) as pair:
        assert isinstance(pair.transfer(KEY, 100).error, TicketError)
        settled(pair)
        assert pair.host.commits == []


def test_a_frame_that_is_lost_every_way_is_noticed(transport: str) -> None:
    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        frame = frame_of(message)
        if frame is None or frame.frame_index != 1:
            yield message

    with Pair(small_geometry(), small_geometry(), config_of(transport, send_timeout_s=0.5), change=change) as pair:
        assert isinstance(pair.transfer(KEY, 200).error, TransferTimeout)
        settled(pair)
        assert pair.host.commits == []


# --- ends of senders, streams and workers --------------------------------------------------------------------------


def test_an_abort_frees_the_ticket(transport: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of(transport)) as pair:
        sending = pair.open(KEY, pair.grant(KEY, 200))
        pair.sender.computed(KEY, 100)
        wait_until(lambda: pair.receiver.counters.frames > 0)
        pair.sender.abort(KEY, "the client left")
        pair.sender.abort(KEY, "the client left")
        error = sending.wait().error
        assert error is not None
        assert "the client left" in str(error)
        settled(pair)
        assert len(sending.outcomes) == 1
        _, reason, failed = pair.host.releases[0]
        assert "the client left" in reason
        assert not failed, "the prefill worker reports why it gave up; the decode worker has nothing to add"


def test_an_abort_waits_for_the_gather_in_flight(transport: str) -> None:
    gate = Gate()
    with Pair(small_geometry(), small_geometry(), config_of(transport)) as pair:
        pair.source.on_gather = gate
        sending = pair.open(KEY, pair.grant(KEY, 200))
        pair.sender.finish(KEY, 1)
        assert gate.reached.wait(WAIT_S)
        pair.sender.abort(KEY, "the client left")
        time.sleep(0.05)
        assert not sending.done.is_set(), "done with a gather in flight"
        gate.opened.set()
        assert sending.wait().error is not None
        settled(pair)


def test_the_sender_closes_with_sends_under_way(transport: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of(transport)) as pair:
        sending = pair.open(KEY, pair.grant(KEY, 200))
        pair.sender.computed(KEY, 100)
        wait_until(lambda: pair.receiver.counters.frames > 0)
        pair.sender.close()
        assert sending.wait().error is not None
        settled(pair)
        with pytest.raises(TransferError, match="closing"):
            pair.open(RequestKey("r", 1), pair.grant(RequestKey("r", 1), 16))
    assert pair.host.ends(RequestKey("r", 1)) == 1


def test_the_receiver_closes_with_tickets_open(transport: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of(transport)) as pair:
        sending = pair.open(KEY, pair.grant(KEY, 200))
        pair.sender.computed(KEY, 100)
        wait_until(lambda: pair.receiver.counters.frames > 0)
        pair.grant(RequestKey("unused", 0), 16, first=40)
        pair.stop_receiver()
        assert sending.wait().error is not None
        settled(pair)
        assert pair.host.ends(RequestKey("unused", 0)) == 1
        with pytest.raises(TicketError):
            pair.grant(RequestKey("late", 0), 16)


def test_a_broken_stream_ends_the_sends_and_tickets_on_it(transport: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of(transport)) as pair:
        sending = pair.open(KEY, pair.grant(KEY, 200))
        pair.sender.computed(KEY, 100)
        wait_until(lambda: pair.receiver.counters.frames > 0)
        for link in pair.sender._peers.links():
            link.cancel()
        error = sending.wait().error
        assert type(error) is TransferError
        assert error.retryable
        settled(pair)
        assert pair.host.releases[0][2]
        assert pair.transfer(RequestKey("r", 1), 100).error is None, "a new stream is opened on demand"
        assert pair.sender.counters.links == 2


def test_a_send_that_has_sent_nothing_survives_the_loss_of_an_idle_stream(transport: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of(transport)) as pair:
        pair.source.fill(pair.blocks(pair.source, 100), 100, seed=2)
        sending = pair.open(KEY, pair.grant(KEY, 100))
        wait_until(lambda: any(peer.ready for peer in pair.sender._peers.peers()))
        for link in pair.sender._peers.links():
            link.cancel()
        wait_until(lambda: pair.sender.counters.links == 2)
        pair.sender.finish(KEY, 1)
        assert sending.wait().error is None
        pair.assert_equal(100)
        settled(pair)


def test_nobody_listens(transport: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of(transport)) as pair, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, but not listening
        ticket = pair.receiver.grant(KEY, "router-0", 16, [0], f"127.0.0.1:{bound.getsockname()[1]}")
        sending = pair.open(KEY, ticket)
        pair.sender.finish(KEY, 1)
        error = sending.wait().error
        assert type(error) is TransferError
        assert error.retryable
        pair.receiver.release(KEY, "gone")
        settled(pair)


def test_a_listener_that_never_answers(transport: str) -> None:
    with (
        Pair(small_geometry(), small_geometry(), config_of(transport, send_timeout_s=0.5)) as pair,
        socket.socket() as silent,
    ):
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        ticket = pair.receiver.grant(KEY, "router-0", 16, [0], f"127.0.0.1:{silent.getsockname()[1]}")
        sending = pair.open(KEY, ticket)
        pair.sender.finish(KEY, 1)
        assert sending.wait().error is not None
        pair.receiver.release(KEY, "gone")
        settled(pair)


def test_the_receiver_restarts_under_its_old_address(transport: str) -> None:
    with Pair(small_geometry(), small_geometry(), config_of(transport)) as pair:
        assert pair.transfer(RequestKey("before", 0), 100).error is None
        old = pair.grant(KEY, 100)
        pair.stop_receiver()
        pair.host.wait_end(KEY)
        pair.receiver, pair.server, _ = pair._serve(pair.config, "decode-b", pair.port, None)
        stale = pair.open(KEY, old)
        pair.sender.finish(KEY, 1)
        error = stale.wait().error
        assert error is not None
        assert "decode-a" in str(error)
        assert "decode-b" in str(error)
        assert pair.transfer(RequestKey("after", 0), 100).error is None
        pair.assert_equal(100)
        settled(pair, RequestKey("after", 0))


@pytest.mark.parametrize(
    ("change", "ours", "theirs"),
    [
        ({"digest": "other"}, "abc123", "other"),
        ({"dtype": "float16"}, "bfloat16", "float16"),
        ({"layers": 4}, "3", "4"),
    ],
)
def test_workers_that_do_not_fit_name_both_values(
    transport: str, change: dict[str, object], ours: str, theirs: str
) -> None:
    target = small_geometry(**change)  # type: ignore[arg-type]
    with Pair(small_geometry(), target, config_of(transport)) as pair:
        error = pair.transfer(KEY, 100).error
        assert error is not None
        assert ours in str(error)
        assert theirs in str(error)
        pair.receiver.release(KEY, "gone")
        settled(pair)
        assert not pair.target.cache.any()
