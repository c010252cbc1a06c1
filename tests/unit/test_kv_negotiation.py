"""Which lanes a pair uses: every placement, and what may never be negotiated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.negotiation import (
    AUTO,
    COLLECTIVE,
    CPU,
    CUDA,
    GRPC,
    NIXL,
    SHM,
    STREAM_ONLY,
    Offer,
    Site,
    may_use,
    negotiate,
    obstacle,
)

ALL = (GRPC, SHM, COLLECTIVE, NIXL)
HERE = Site(host="a", pid_namespace="1", user=7, address="10.0.0.1")


def offer(site: Site = HERE, wanted: str = AUTO, transports: tuple[str, ...] = ALL) -> Offer:
    return Offer(site, wanted, may_use(wanted, transports))


def usable(sender: Offer, receiver: Offer) -> tuple[str, ...]:
    return negotiate(sender, receiver).transports


def test_auto_takes_shared_memory_on_one_host_and_the_stream_elsewhere() -> None:
    assert usable(offer(), offer()) == (SHM, GRPC)
    assert usable(offer(), offer(replace(HERE, host="b"))) == (GRPC,)


def test_auto_takes_a_group_between_two_gpus() -> None:
    first = replace(HERE, device=CUDA, device_id="g0")
    second = replace(HERE, device=CUDA, device_id="g1")
    assert usable(offer(first), offer(second)) == (COLLECTIVE, SHM, GRPC)
    assert usable(offer(first), offer(replace(second, host="b"))) == (COLLECTIVE, GRPC)
    assert usable(offer(first), offer()) == (SHM, GRPC), "one GPU alone is no reason"
    one_gpu = negotiate(offer(first), offer(first))
    assert one_gpu.transports == (SHM, GRPC)
    assert "one GPU" in one_gpu.left_out[0].reason


@pytest.mark.parametrize("wanted", [SHM, COLLECTIVE, NIXL])
def test_what_one_end_asks_for_comes_first_whichever_it_is(wanted: str) -> None:
    assert usable(offer(wanted=wanted), offer()) == (wanted, GRPC)
    assert usable(offer(), offer(wanted=wanted)) == (wanted, GRPC)


def test_the_senders_wish_comes_before_the_receivers() -> None:
    outcome = negotiate(offer(wanted=SHM), offer(wanted=COLLECTIVE))
    assert outcome.transports == (GRPC,)
    assert outcome.left_out == ((SHM, "the receiver does not offer it"),)


@pytest.mark.parametrize("wanted", [AUTO, GRPC, SHM, COLLECTIVE, NIXL])
def test_an_end_that_is_told_to_use_the_stream_uses_nothing_else(wanted: str) -> None:
    assert usable(offer(wanted=GRPC), offer(wanted=wanted)) == (GRPC,)
    assert usable(offer(wanted=wanted), offer(wanted=GRPC)) == (GRPC,)
    assert usable(offer(wanted=wanted), STREAM_ONLY) == (GRPC,)


@pytest.mark.parametrize(
    ("transport", "change", "words"),
    [
        (SHM, {"host": "b"}, "different hosts"),
        (SHM, {"host": ""}, "not known"),
        (SHM, {"pid_namespace": "2"}, "containers"),
        (SHM, {"pid_namespace": ""}, "containers"),
        (SHM, {"user": 8}, "different users"),
        (COLLECTIVE, {"address": ""}, "address"),
        (COLLECTIVE, {"host": "b", "address": "127.0.0.1"}, "loopback"),
        (COLLECTIVE, {"host": "b", "tls": True}, "plain text"),
        (NIXL, {"host": "b", "tls": True}, "plain text"),
    ],
)
def test_impossible_pairs_are_left_out_with_the_reason(transport: str, change: dict[str, object], words: str) -> None:
    there = replace(HERE, **change)  # type: ignore[arg-type]
    for sender, receiver in ((HERE, there), (there, HERE)):
        outcome = negotiate(offer(sender, transport), offer(receiver))
        assert outcome.transports == (GRPC,)
        (left_out,) = outcome.left_out
        assert left_out.transport == transport
        assert words in left_out.reason


def test_where_the_stream_is_encrypted_only_shared_memory_is_beside_it() -> None:
    encrypted = replace(HERE, tls=True)
    assert usable(offer(encrypted, SHM), offer(encrypted)) == (SHM, GRPC)
    for transport in (COLLECTIVE, NIXL):
        assert usable(offer(encrypted, transport), offer(encrypted)) == (GRPC,)
        assert usable(offer(HERE, transport), offer(encrypted)) == (GRPC,)  # one end is enough


def test_a_transport_that_is_not_known_is_no_reason_to_fail() -> None:
    outcome = negotiate(Offer(HERE, "pigeon", (GRPC, "pigeon")), Offer(HERE, AUTO, (*ALL, "pigeon")))
    assert outcome.transports == (GRPC,)
    assert outcome.left_out == (("pigeon", "it is not known here"),)


SITES = st.builds(
    Site,
    host=st.sampled_from(["", "a", "b"]),
    pid_namespace=st.sampled_from(["", "1", "2"]),
    user=st.integers(0, 1),
    device=st.sampled_from([CPU, CUDA]),
    device_id=st.sampled_from(["", "g0", "g1"]),
    address=st.sampled_from(["", "127.0.0.1", "10.0.0.1", "::1"]),
    tls=st.booleans(),
)
OFFERS = st.builds(
    lambda site, wanted, transports: Offer(site, wanted, may_use(wanted, (GRPC, *sorted(transports)))),
    SITES,
    st.sampled_from([AUTO, *ALL]),
    st.sets(st.sampled_from([SHM, COLLECTIVE, NIXL])),
)


@settings(deadline=None)
@given(sender=OFFERS, receiver=OFFERS)
def test_any_two_ends_agree_on_something_possible(sender: Offer, receiver: Offer) -> None:
    outcome = negotiate(sender, receiver)
    *lanes, last = outcome.transports
    assert last == GRPC
    assert len(set(outcome.transports)) == len(outcome.transports)
    for transport in lanes:
        assert transport in sender.transports
        assert transport in receiver.transports
        assert obstacle(transport, sender, receiver) is None
    for transport, reason in outcome.left_out:
        assert transport not in outcome.transports
        assert reason
    # Who asks first plays no part in what is possible.
    for transport in ALL[1:]:
        ours, theirs = obstacle(transport, sender, receiver), obstacle(transport, receiver, sender)
        assert (ours is None) == (theirs is None)
