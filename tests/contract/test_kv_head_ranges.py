"""Workers split into ranks by KV heads, differently on the two sides, over every transport."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest
import torch

from kv_transfer.head_ranges import join_tickets
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from pdcore.clock import MonotonicClock
from pdcore.config import TransferConfig
from pdcore.errors import TicketError, TransferError
from pdcore.faults import FaultPoints
from pdcore.types import KvTicket, RequestKey
from protos import kv_pb2_grpc
from tests.contract.harness import WAIT_S, RecordingHost, Sending
from tests.support.kv_store import MemoryKvStore, small_geometry
from worker.grpc_options import SERVER_OPTIONS

HEADS = 4
TOKENS = 75
KEY = RequestKey("r", 0)

Split = list[tuple[int, int]]


def config_of(transport: str, **changes: object) -> TransferConfig:
    """Small frames and messages, so that even small caches make several of each."""
    values: dict[str, object] = {"transport": transport, "frame_bytes": 16384, "message_bytes": 4096}
    return TransferConfig(**{**values, **changes})  # type: ignore[arg-type]


class Ranks:
    """The ranks of a prefill worker and of a decode worker: one sender or receiver and one store for each."""

    def __init__(self, prefill: Split, decode: Split, config: TransferConfig, source_block: int = 16) -> None:
        self.config = config
        self.sources = [
            MemoryKvStore(small_geometry(heads=heads, block_size=source_block, num_blocks=32)) for heads in prefill
        ]
        self.targets = [MemoryKvStore(small_geometry(heads=heads, num_blocks=32)) for heads in decode]
        self.hosts = [RecordingHost() for _ in decode]
        self.crashes: list[BaseException] = []
        clock, faults = MonotonicClock(), FaultPoints()
        self.servers: list[grpc.Server] = []
        self.receivers: list[KvReceiver] = []
        self.addresses: list[str] = []
        for rank, (store, host) in enumerate(zip(self.targets, self.hosts, strict=True)):
            receiver = KvReceiver(
                worker_id="decode-0",
                incarnation=f"decode-rank-{rank}",
                store=store,
                config=config,
                host=host,
                clock=clock,
                faults=faults,
                on_crash=self.crashes.append,
            )
            server = grpc.server(ThreadPoolExecutor(8), options=SERVER_OPTIONS)
            kv_pb2_grpc.add_KvServicer_to_server(receiver.servicer(), server)
            self.addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            server.start()
            self.servers.append(server)
            self.receivers.append(receiver)
        self.senders = [
            KvSender(
                worker_id="prefill-0",
                incarnation=f"prefill-rank-{rank}",
                store=store,
                config=config,
                layers_done=lambda step_id: 0,
                clock=clock,
                faults=faults,
                on_crash=self.crashes.append,
            )
            for rank, store in enumerate(self.sources)
        ]
        self.values = self._fill()

    def _fill(self) -> torch.Tensor:
        """The same KV of all heads, each source holding its share: [layers, 2, tokens, heads, dim]."""
        whole = MemoryKvStore(small_geometry(heads=(0, HEADS), num_blocks=32))
        values = whole.fill(self.blocks(whole), TOKENS, seed=11)
        for store in self.sources:
            start, count = store.geometry.head_start, store.geometry.num_kv_heads
            store.scatter(0, self.blocks(store), 0, values[:, :, :, start : start + count].contiguous())
        return values

    @staticmethod
    def blocks(store: MemoryKvStore) -> list[int]:
        return list(range(2, 2 + store.geometry.blocks_for(TOKENS)))[::-1]

    def grant(self, key: RequestKey = KEY) -> KvTicket:
        tickets = [
            receiver.grant(key, "router-0", TOKENS, self.blocks(store), address)
            for receiver, store, address in zip(self.receivers, self.targets, self.addresses, strict=True)
        ]
        return join_tickets(tickets)

    def send(self, ticket: KvTicket, key: RequestKey = KEY) -> list[Sending]:
        sendings = []
        for sender, store in zip(self.senders, self.sources, strict=True):
            sendings.append(Sending())
            sender.open(key, ticket, self.blocks(store), sendings[-1])
        return sendings

    def finish(self, first_tokens: list[int]) -> None:
        for sender, token in zip(self.senders, first_tokens, strict=True):
            sender.finish(KEY, token)

    def assert_equal(self) -> None:
        """Every target holds, bit by bit, its heads of what the sources hold."""
        for store in self.targets:
            start, count = store.geometry.head_start, store.geometry.num_kv_heads
            expected = self.values[:, :, :, start : start + count].contiguous()
            got = store.read(self.blocks(store), TOKENS)
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        for receiver, server in zip(self.receivers, self.servers, strict=True):
            receiver.close()
            server.stop(None).wait(WAIT_S)
        assert self.crashes == []
        assert all(receiver.counters.buffered_bytes == 0 for receiver in self.receivers)


@contextmanager
def ranks(prefill: Split, decode: Split, config: TransferConfig, **options: int) -> Iterator[Ranks]:
    made = Ranks(prefill, decode, config, **options)
    try:
        yield made
    finally:
        made.close()


WHOLE: Split = [(0, 4)]
HALVES: Split = [(0, 2), (2, 2)]
QUARTERS: Split = [(0, 1), (1, 1), (2, 1), (3, 1)]
UNEVEN: Split = [(0, 1), (1, 3)]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(HALVES, WHOLE), (WHOLE, HALVES), (UNEVEN, HALVES), (QUARTERS, HALVES)],
    ids=["two-senders", "two-receivers", "across", "four-to-two"],
)
def test_every_rank_gets_its_heads(transport: str, prefill: Split, decode: Split) -> None:
    with ranks(prefill, decode, config_of(transport), source_block=8) as workers:
        sendings = workers.send(workers.grant())
        workers.finish([5] * len(prefill))
        assert [sending.wait().error for sending in sendings] == [None] * len(prefill)
        workers.assert_equal()
        for host, store in zip(workers.hosts, workers.targets, strict=True):
            ((key, first_tokens, stats),) = host.commits
            assert (key, first_tokens, stats.lossless) == (KEY, (5,), True)
            assert stats.raw_bytes == TOKENS * store.geometry.bytes_per_token
        assert [receiver.open_tickets for receiver in workers.receivers] == [0] * len(decode)


@pytest.mark.parametrize("codec", ["raw", "zstd", "bexp3", "bexp-zstd", "q8", "k6v4", "fp8"])
def test_every_codec_packs_a_range_of_heads(codec: str) -> None:
    with ranks(UNEVEN, HALVES, config_of("grpc", codec=codec)) as workers:
        sendings = workers.send(workers.grant())
        workers.finish([1, 1])
        assert [sending.wait().error for sending in sendings] == [None, None]
        for store in workers.targets:
            start, count = store.geometry.head_start, store.geometry.num_kv_heads
            expected = workers.values[:, :, :, start : start + count].float()
            got = store.read(workers.blocks(store), TOKENS).float()
            # Of a wrong head nothing would be near.
            assert (got - expected).abs().mean() < 0.2


def test_nothing_is_committed_before_the_last_sender(transport: str) -> None:
    with ranks(HALVES, WHOLE, config_of(transport)) as workers:
        first, second = workers.send(workers.grant())
        workers.senders[0].finish(KEY, 5)
        assert not first.done.wait(0.3)
        assert workers.hosts[0].ends(KEY) == 0
        workers.senders[1].finish(KEY, 5)
        assert (first.wait().error, second.wait().error) == (None, None)
        workers.assert_equal()


def test_senders_that_disagree_on_the_first_token_commit_nothing() -> None:
    with ranks(HALVES, WHOLE, config_of("grpc")) as workers:
        sendings = workers.send(workers.grant())
        workers.finish([5, 6])
        assert all("first token" in str(sending.wait().error) for sending in sendings)
        workers.hosts[0].wait_end(KEY)  # the senders are told first
        assert workers.hosts[0].commits == []
        assert [released[2] for released in workers.hosts[0].releases] == [True]
        assert [sender.counters.failed for sender in workers.senders] == [1, 1]
        assert workers.receivers[0].counters.failed == 1


def test_one_sender_s_end_is_the_other_s(transport: str) -> None:
    with ranks(HALVES, WHOLE, config_of(transport)) as workers:
        first, second = workers.send(workers.grant())
        workers.senders[1].finish(KEY, 5)
        workers.senders[0].abort(KEY, "a rank has failed")
        assert "a rank has failed" in str(first.wait().error)
        assert isinstance(second.wait().error, TicketError)
        workers.hosts[0].wait_end(KEY)
        assert workers.hosts[0].ends(KEY) == 1
        assert workers.receivers[0].open_tickets == 0
        # To give up is no failure; to be refused for it is one.
        assert [sender.counters.failed for sender in workers.senders] == [0, 1]
        assert workers.receivers[0].counters.failed == 0


def test_one_receiver_s_refusal_ends_the_send_to_all() -> None:
    with ranks(WHOLE, HALVES, config_of("grpc")) as workers:
        (sending,) = workers.send(workers.grant())
        workers.receivers[1].revoke(KEY, "no room")
        workers.finish([5])
        outcome = sending.wait()
        assert isinstance(outcome.error, TicketError)
        for host in workers.hosts:
            host.wait_end(KEY)
            assert host.ends(KEY) == 1
        assert workers.senders[0].open_sends == 0
        assert len(sending.outcomes) == 1


def test_a_second_sender_of_the_same_heads_is_refused() -> None:
    with ranks([(0, 2), (1, 3)], WHOLE, config_of("grpc", send_timeout_s=0.5)) as workers:
        sendings = workers.send(workers.grant())
        workers.finish([5, 5])
        errors = [sending.wait().error for sending in sendings]
        assert any("filled by another stream" in str(error) for error in errors)
        workers.hosts[0].wait_end(KEY)
        assert workers.hosts[0].commits == []


def test_heads_that_nobody_takes_are_refused_at_once() -> None:
    with ranks(WHOLE, HALVES, config_of("grpc")) as workers:
        ticket = workers.grant()
        half = replace(ticket, endpoints=ticket.endpoints[:1])
        with pytest.raises(TransferError, match=r"heads \[0, 4\); theirs take \[0, 2\)"):
            workers.send(half)


def test_tickets_that_do_not_belong_together_are_not_joined() -> None:
    with ranks(WHOLE, HALVES, config_of("grpc")) as workers:
        ticket = workers.grant()
        one, two = (replace(ticket, endpoints=(endpoint,)) for endpoint in ticket.endpoints)
        assert join_tickets([one, two]) == ticket
        with pytest.raises(TicketError, match="overlapping"):
            join_tickets([one, one])
        with pytest.raises(TicketError, match="different tokens"):
            join_tickets([one, replace(two, prefix_tokens=16)])
        with pytest.raises(TicketError, match="codec"):
            join_tickets([one, replace(two, codecs=("morse",))])


def test_a_sender_without_common_heads_is_refused() -> None:
    with ranks([(0, 2)], [(2, 2)], config_of("grpc")) as workers:
        (endpoint,) = workers.grant().endpoints
        lying = replace(workers.grant(RequestKey("s", 0)), endpoints=(replace(endpoint, head_start=0),))
        (sending,) = workers.send(lying)
        workers.finish([5])
        assert "[2, 4)" in str(sending.wait().error)
        assert "[0, 2)" in str(sending.wait().error)
