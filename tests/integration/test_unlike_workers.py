"""Workers whose caches have different types; and what a worker's load says of transfers that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from decode_worker.worker import DecodeWorker
from pdcore.config import TransferConfig
from pdcore.types import Role
from prefill_worker.worker import PrefillWorker
from protos import kv_pb2, worker_pb2
from tests.support.processes import worker_config
from tests.support.session_client import SessionClient
from tests.support.specs import prompt_of, spec_of
from tests.support.tiny_model import tiny_llama

Sessions = tuple[SessionClient, SessionClient]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@contextmanager
def pair(model: Path, source: str, target: str, transfer: TransferConfig) -> Iterator[Sessions]:
    """Sessions with a prefill worker of dtype `source` and a decode worker of dtype `target`."""
    with ExitStack() as stack:
        prefill = PrefillWorker(worker_config(model, Role.PREFILL, dtype=source, transfer=transfer))
        decode = DecodeWorker(worker_config(model, Role.DECODE, dtype=target, transfer=transfer))
        for worker in (prefill, decode):
            stack.callback(worker.stop)
            worker.start()
        p = stack.enter_context(SessionClient(prefill.address, "r"))
        d = stack.enter_context(SessionClient(decode.address, "r"))
        yield p, d


def run(sessions: Sessions) -> tuple[list[int], kv_pb2.TransferStats]:
    """One request through both: its tokens and its transfer."""
    p, d = sessions
    spec = spec_of(prompt_of(70), max_tokens=8)
    reply = d.reserve(spec)
    assert reply.granted.prefix_tokens == 0, reply
    p.prefill(spec, reply.granted)
    name = spec.key.request_id
    tokens = d.wait_finished(name)

    def received() -> list[kv_pb2.TransferStats]:
        return [n.kv_received for n in list(d.notices) if n.request_id == name and n.HasField("kv_received")]

    d.wait(lambda: bool(received()), 5.0, "the transfer's figures")
    return tokens, received()[0]


@pytest.mark.parametrize(
    ("source", "target", "conversion"),
    [("bfloat16", "float32", "exact"), ("float16", "float32", "exact"), ("float32", "bfloat16", "rounding")],
)
def test_converted_kv_is_used_and_never_shared(model: Path, source: str, target: str, conversion: str) -> None:
    with pair(model, source, target, TransferConfig(kv_conversion=conversion)) as sessions:
        first, stats = run(sessions)
        # The model's KV in the sender's type: 3 layers, 2 heads of 16.
        assert stats.raw_bytes == 70 * 2 * 3 * 2 * 16 * (4 if source == "float32" else 2)
        assert not stats.lossless
        again, _ = run(sessions)  # the same prompt; `run` sees to it that nothing of it is held
        assert again == first
        assert len(first) == 8


def test_kv_of_one_type_is_shared(model: Path) -> None:
    """The control: what makes the difference above is the conversion."""
    with pair(model, "bfloat16", "bfloat16", TransferConfig()) as sessions:
        _, stats = run(sessions)
        assert stats.lossless
        assert sessions[1].reserve(spec_of(prompt_of(70), max_tokens=8)).granted.prefix_tokens > 0


def test_what_went_wrong_with_transfers_is_in_the_load(model: Path) -> None:
    transfer = TransferConfig(lease_s=1.0)
    with pair(model, "float32", "bfloat16", transfer) as (p, d):
        spec = spec_of(prompt_of(70), max_tokens=8)
        p.prefill(spec, d.reserve(spec).granted)
        name = spec.key.request_id
        p.wait(lambda: p.failure_of(name) is not None, 10.0, "the refusal")
        failure = p.failure_of(name)
        assert failure is not None
        assert failure.code == worker_pb2.FAILURE_CODE_TRANSFER
        assert "kv_conversion" in failure.message
        p.wait(lambda: p.load is not None and p.load.transfer_events["sends_failed"] == 1, 5.0, "the count")
        d.heartbeats = False  # nobody renews the ticket any more
        d.wait(lambda: d.load is not None and d.load.transfer_events["tickets_failed"] == 1, 10.0, "the expiry")
