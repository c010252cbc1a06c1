"""What every transport must survive: each send ends once, each ticket ends once, nothing stale is ever written."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from pdcore.clock import ManualClock
from pdcore.config import TransferConfig
from pdcore.errors import FrameError, TicketError, TransferError, TransferTimeout
from pdcore.types import RequestKey
from protos import kv_pb2
from tests.contract.harness import WAIT_S, Pair, wait_until
from tests.support.kv_store import small_geometry

KEY = RequestKey("r", 0)


def config_of(**changes: object) -> TransferConfig:
    values: dict[str, object] = {"frame_bytes": 4096, "message_bytes": 4096, "credit_bytes": 32768}
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
def test_a_damaged_frame_is_sent_again(where: str) -> None:
    hit = [0]

    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        chunk = message.chunk
        if message.WhichOneof("message") == "chunk" and chunk.frame_index == 1 and getattr(chunk, "try") == 0:
            position = {"header": 60, "payload": 300, "end": len(chunk.data) - 1}[where]
            if chunk.offset == 0:
                hit[0] += 1
                chunk.data = flip(chunk.data, position)
        yield message

    with Pair(small_geometry(), small_geometry(), config_of(), change=change) as pair:
        assert pair.transfer(KEY, 200).error is None
        pair.assert_equal(200)
        settled(pair)
        assert hit == [1]
        assert pair.host.commits[0][2].retries == 1
        assert pair.sender.counters.retries == 1


def test_a_frame_that_stays_damaged_fails_the_transfer() -> None:
    tries: list[int] = []

    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        if message.WhichOneof("message") == "chunk" and message.chunk.frame_index == 0 and message.chunk.offset == 0:
            tries.append(getattr(message.chunk, "try"))
            message.chunk.data = flip(message.chunk.data, 300)
        yield message

    with Pair(small_geometry(), small_geometry(), config_of(max_frame_retries=2), change=change) as pair:
        error = pair.transfer(KEY, 200).error
        assert isinstance(error, FrameError)
        assert "checksum" in str(error)
        assert tries == [0, 1, 2]
        settled(pair)
        assert pair.host.commits == []


def test_a_frame_for_another_ticket_is_not_written() -> None:
    """The envelope names a live ticket, the frame inside was made for another one."""
    frames: list[bytes] = []
    other = RequestKey("other", 0)

    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        if message.WhichOneof("message") == "chunk":
            frames.append(message.chunk.data)
            assert len(frames[-1]) == len(frames[0]) == message.chunk.total
            message.chunk.data = frames[0]
        yield message

    with Pair(small_geometry(), small_geometry(), config_of(codec="raw"), change=change) as pair:
        assert pair.transfer(KEY, 10).error is None
        before = pair.target.cache.clone()
        error = pair.transfer(other, 10).error
        assert isinstance(error, FrameError)
        assert "ticket" in str(error)
        settled(pair, other)
        assert bool((pair.target.cache == before).all())
        assert [key for key, _, _ in pair.host.commits] == [KEY]


@pytest.mark.parametrize("wrong", ["offset", "interleaved", "credit", "short"])
def test_a_sender_that_breaks_the_protocol_loses_its_stream(wrong: str) -> None:
    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        if message.WhichOneof("message") == "chunk":
            match wrong:
                case "offset":
                    message.chunk.offset += 1
                case "interleaved":
                    message.chunk.total += 1
                    yield message
                    message.chunk.frame_index += 1
                case "credit":
                    message.chunk.total = 1 << 30
                case _:
                    message.chunk.total = 5
        yield message

    with Pair(small_geometry(), small_geometry(), config_of(), change=change) as pair:
        assert pair.transfer(KEY, 20).error is not None
        wait_until(lambda: pair.sender.open_sends == 0)
        pair.receiver.release(KEY, "the router gives up")  # a ticket whose first frame never began is not bound
        settled(pair)
        assert pair.host.commits == []


# --- bounded memory ------------------------------------------------------------------------------------------------


def test_a_slow_receiver_bounds_memory_on_both_sides() -> None:
    config = config_of(codec="raw", credit_bytes=16384)
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


def test_a_receiver_that_never_acknowledges_fails_the_send_in_time() -> None:
    clock = ManualClock()
    gate = Gate()
    with Pair(small_geometry(), small_geometry(), config_of(lease_s=1000.0), clock=clock) as pair:
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


def test_a_prompt_may_queue_for_as_long_as_it_likes() -> None:
    clock = ManualClock()
    with Pair(small_geometry(), small_geometry(), config_of(lease_s=1000.0), clock=clock) as pair:
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
def test_a_ticket_taken_back_during_a_scatter(how: str) -> None:
    gate = Gate(passes=2)
    with Pair(small_geometry(), small_geometry(), config_of()) as pair:
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
        assert isinstance(sending.wait().error, TicketError)
        assert pair.host.ends(KEY) == 0, "released with a scatter in flight"
        gate.opened.set()
        settled(pair)
        assert pair.host.releases == [(KEY, "gone", how == "revoke")]
        pair.target.on_scatter = None
        assert pair.transfer(RequestKey("r", 1), 300).error is None


def test_a_lease_runs_out_unless_renewed() -> None:
    clock = ManualClock()
    with Pair(small_geometry(), small_geometry(), config_of(lease_s=10.0), clock=clock) as pair:
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
            sending = pair.open(RequestKey("late", late.ticket_id), late)
            pair.sender.finish(RequestKey("late", late.ticket_id), 1)
            assert isinstance(sending.wait().error, TicketError)
        assert bool((pair.target.cache == before).all())


def test_stale_frames_never_reach_blocks_that_have_changed_hands() -> None:
    with Pair(small_geometry(), small_geometry(), config_of(), change=None) as pair:
        old = pair.grant(KEY, 100)
        pair.receiver.release(KEY, "gone")
        pair.host.wait_end(KEY)
        new_key = RequestKey("new", 0)
        new = pair.grant(new_key, 100)  # the same slot and the same blocks
        assert (new.ticket_id, new.generation > old.generation) == (old.ticket_id, True)
        before = pair.target.cache.clone()
        pair.source.fill(pair.blocks(pair.source, 100), 100, seed=3)
        stale = pair.open(KEY, old)
        pair.sender.finish(KEY, 1)
        error = stale.wait().error
        assert isinstance(error, TicketError)
        assert "gone" in str(error)
        assert bool((pair.target.cache == before).all())
        sending = pair.open(new_key, new)
        pair.sender.finish(new_key, 1)
        assert sending.wait().error is None
        pair.assert_equal(100)
        settled(pair, new_key)


def test_the_host_refuses_the_commit() -> None:
    with Pair(small_geometry(), small_geometry(), config_of()) as pair:
        pair.host.accept = False
        assert isinstance(pair.transfer(KEY, 100).error, TicketError)
        settled(pair)
        assert len(pair.host.releases) == 1


def test_a_release_during_the_commit_is_the_hosts_to_decide() -> None:
    with Pair(small_geometry(), small_geometry(), config_of()) as pair:
        pair.host.on_commit_hook = lambda key: pair.receiver.release(key, "too late")
        assert pair.transfer(KEY, 100).error is None
        settled(pair)
        assert len(pair.host.commits) == 1


def test_a_manifest_that_comes_twice_commits_once() -> None:
    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        yield message
        if message.WhichOneof("message") == "manifest":
            yield message

    with Pair(small_geometry(), small_geometry(), config_of(), change=change) as pair:
        for attempt in range(5):
            assert pair.transfer(RequestKey("r", attempt), 100).error is None
            settled(pair, RequestKey("r", attempt))
        assert len(pair.host.commits) == 5


@pytest.mark.parametrize("field", ["digest", "num_frames", "num_tokens", "attempt", "request_id"])
def test_a_manifest_that_does_not_fit_commits_nothing(field: str) -> None:
    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        if message.WhichOneof("message") == "manifest":
            if field == "request_id":
                message.manifest.request_id = "somebody else's"
            else:
                setattr(message.manifest, field, getattr(message.manifest, field) - 1 & 0xFF)
        yield message

    with Pair(small_geometry(), small_geometry(), config_of(), change=change) as pair:
        assert isinstance(pair.transfer(KEY, 100).error, TicketError)
        settled(pair)
        assert pair.host.commits == []


def test_a_frame_that_is_lost_is_noticed() -> None:
    def change(message: kv_pb2.PushMessage) -> Iterator[kv_pb2.PushMessage]:
        if message.WhichOneof("message") != "chunk" or message.chunk.frame_index != 1:
            yield message

    with Pair(small_geometry(), small_geometry(), config_of(send_timeout_s=0.5), change=change) as pair:
        assert isinstance(pair.transfer(KEY, 200).error, TransferTimeout)
        settled(pair)
        assert pair.host.commits == []


# --- ends of senders, streams and workers --------------------------------------------------------------------------


def test_an_abort_frees_the_ticket() -> None:
    with Pair(small_geometry(), small_geometry(), config_of()) as pair:
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


def test_an_abort_waits_for_the_gather_in_flight() -> None:
    gate = Gate()
    with Pair(small_geometry(), small_geometry(), config_of()) as pair:
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


def test_the_sender_closes_with_sends_under_way() -> None:
    with Pair(small_geometry(), small_geometry(), config_of()) as pair:
        sending = pair.open(KEY, pair.grant(KEY, 200))
        pair.sender.computed(KEY, 100)
        wait_until(lambda: pair.receiver.counters.frames > 0)
        pair.sender.close()
        assert sending.wait().error is not None
        settled(pair)
        with pytest.raises(TransferError, match="closing"):
            pair.open(RequestKey("r", 1), pair.grant(RequestKey("r", 1), 16))
    assert pair.host.ends(RequestKey("r", 1)) == 1


def test_the_receiver_closes_with_tickets_open() -> None:
    with Pair(small_geometry(), small_geometry(), config_of()) as pair:
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


def test_a_broken_stream_ends_the_sends_and_tickets_on_it() -> None:
    with Pair(small_geometry(), small_geometry(), config_of()) as pair:
        sending = pair.open(KEY, pair.grant(KEY, 200))
        pair.sender.computed(KEY, 100)
        wait_until(lambda: pair.receiver.counters.frames > 0)
        for peer in list(pair.sender._peers.values()):
            assert peer.link is not None
            peer.link.cancel()
        error = sending.wait().error
        assert type(error) is TransferError
        assert error.retryable
        settled(pair)
        assert pair.host.releases[0][2]
        assert pair.transfer(RequestKey("r", 1), 100).error is None, "a new stream is opened on demand"
        assert pair.sender.counters.links == 2


def test_a_send_that_has_sent_nothing_survives_the_loss_of_an_idle_stream() -> None:
    with Pair(small_geometry(), small_geometry(), config_of()) as pair:
        pair.source.fill(pair.blocks(pair.source, 100), 100, seed=2)
        sending = pair.open(KEY, pair.grant(KEY, 100))
        wait_until(lambda: any(peer.ready for peer in pair.sender._peers.values()))
        for peer in list(pair.sender._peers.values()):
            assert peer.link is not None
            peer.link.cancel()
        wait_until(lambda: pair.sender.counters.links == 2)
        pair.sender.finish(KEY, 1)
        assert sending.wait().error is None
        pair.assert_equal(100)
        settled(pair)


def test_nobody_listens() -> None:
    with Pair(small_geometry(), small_geometry(), config_of()) as pair, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, but not listening
        ticket = pair.receiver.grant(KEY, "router-0", 16, [0], f"127.0.0.1:{bound.getsockname()[1]}")
        sending = pair.open(KEY, ticket)
        pair.sender.finish(KEY, 1)
        error = sending.wait().error
        assert type(error) is TransferError
        assert error.retryable
        pair.receiver.release(KEY, "gone")
        settled(pair)


def test_a_listener_that_never_answers() -> None:
    with Pair(small_geometry(), small_geometry(), config_of(send_timeout_s=0.5)) as pair, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        ticket = pair.receiver.grant(KEY, "router-0", 16, [0], f"127.0.0.1:{silent.getsockname()[1]}")
        sending = pair.open(KEY, ticket)
        pair.sender.finish(KEY, 1)
        assert sending.wait().error is not None
        pair.receiver.release(KEY, "gone")
        settled(pair)


def test_the_receiver_restarts_under_its_old_address() -> None:
    with Pair(small_geometry(), small_geometry(), config_of()) as pair:
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
def test_workers_that_do_not_fit_name_both_values(change: dict[str, object], ours: str, theirs: str) -> None:
    target = small_geometry(**change)  # type: ignore[arg-type]
    with Pair(small_geometry(), target, config_of()) as pair:
        error = pair.transfer(KEY, 100).error
        assert error is not None
        assert ours in str(error)
        assert theirs in str(error)
        pair.receiver.release(KEY, "gone")
        settled(pair)
        assert not pair.target.cache.any()
