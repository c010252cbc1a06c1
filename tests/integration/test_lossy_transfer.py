"""Every lossy codec between two real workers: used where it is asked for, and only there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.codec_quality.model_runs import model_geometry
from decode_worker.worker import DecodeWorker
from kv_transfer.codecs.calibration import save_calibration
from kv_transfer.frames import LOSSLESS_CODECS
from pdcore.config import LOSSY_CODECS, TransferConfig
from pdcore.types import Role
from prefill_worker.worker import PrefillWorker
from protos import kv_pb2
from tests.support.calibrations import random_calibration
from tests.support.processes import worker_config
from tests.support.session_client import SessionClient
from tests.support.specs import prompt_of, spec_of
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SessionClient, SessionClient]]:
    """Of a prefill and of a decode worker in bfloat16, both with a calibration of the model."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_llama(folder / "model")
    digest = model_geometry(model, "bfloat16").model_digest
    calibration = random_calibration(layers=3, heads=2, head_dim=16, width=32, step=0.1, model_digest=digest)
    path: Path = folder / "calibration.safetensors"
    save_calibration(calibration, path)
    transfer = TransferConfig(calibration=str(path))
    with ExitStack() as stack:
        prefill = PrefillWorker(worker_config(model, Role.PREFILL, dtype="bfloat16", transfer=transfer))
        decode = DecodeWorker(worker_config(model, Role.DECODE, dtype="bfloat16", transfer=transfer))
        for worker in (prefill, decode):
            stack.callback(worker.stop)
            worker.start()
        p = stack.enter_context(SessionClient(prefill.address, "r"))
        d = stack.enter_context(SessionClient(decode.address, "r"))
        yield p, d


def transfer(sessions: tuple[SessionClient, SessionClient], codec: str, seed: int) -> kv_pb2.TransferStats:
    p, d = sessions
    spec = replace(spec_of(prompt_of(150, seed), max_tokens=6), kv_codec=codec)
    reply = d.reserve(spec)
    assert reply.WhichOneof("result") == "granted", reply
    p.prefill(spec, reply.granted)
    assert len(d.wait_finished(spec.key.request_id)) == 6

    def received() -> list[kv_pb2.TransferStats]:
        mine = [notice for notice in list(d.notices) if notice.request_id == spec.key.request_id]
        return [notice.kv_received for notice in mine if notice.WhichOneof("notice") == "kv_received"]

    d.wait(lambda: bool(received()), 5.0, f"the transfer of {spec.key.request_id}")
    return received()[0]


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_a_codec_that_is_asked_for_is_used(sessions: tuple[SessionClient, SessionClient], codec: str) -> None:
    stats = transfer(sessions, codec, seed=LOSSY_CODECS.index(codec))
    assert stats.codec == codec
    assert stats.wire_bytes < stats.raw_bytes


def test_none_is_used_unasked(sessions: tuple[SessionClient, SessionClient]) -> None:
    assert transfer(sessions, "", seed=50).codec in LOSSLESS_CODECS
