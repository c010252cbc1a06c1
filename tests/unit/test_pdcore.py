"""Configuration round trips, fault plans, and the conversions to and from the wire."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pdcore.clock import ManualClock
from pdcore.config import (
    EngineConfig,
    QueueConfig,
    RouterConfig,
    SchedulerConfig,
    TenantWeight,
    TransferConfig,
    WorkerConfig,
)
from pdcore.config_json import from_json, load_json, to_json
from pdcore.errors import ConfigError, HandshakeRefused, InvalidRequest, Overloaded, PdserveError, TicketError
from pdcore.faults import FaultPlan, FaultPoints
from pdcore.logprobs import Logprobs
from pdcore.step_time import StepTime
from pdcore.types import (
    KvEndpoint,
    KvGeometry,
    KvTicket,
    KvTransferStats,
    ModelInfo,
    PriorityClass,
    RequestKey,
    RequestSpec,
    Role,
    SamplingParams,
    WorkerLoad,
)
from protos import convert, kv_pb2, worker_pb2

SCHEDULER = SchedulerConfig(64, 8, 32, queue=QueueConfig("fair", tenant_weights=(TenantWeight("a", 2.0),)))
CONFIG = WorkerConfig(
    worker_id="decode-0",
    role=Role.DECODE,
    engine=EngineConfig(model_path="/m", served_name="m", cpu_affinity=(0, 1), scheduler=SCHEDULER),
    transfer=TransferConfig(lease_s=3.5),
    faults=(FaultPlan("decode.before_commit", action="stall", seconds=1.0),),
)


def test_a_worker_configuration_survives_json() -> None:
    assert from_json(WorkerConfig, to_json(CONFIG)) == CONFIG


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (('"lease_s": 3.5', '"lease": 3.5'), "lease"),
        (('"lease_s": 3.5', '"lease_s": "long"'), "lease_s"),
        (('"role": "decode"', '"role": "cook"'), "role"),
        (('"threads": 0', '"threads": true'), "threads"),
        (('"action": "stall"', '"action": "sing"'), "action"),
        (("{", "["), "WorkerConfig"),
    ],
)
def test_json_that_does_not_fit_names_the_key(change: tuple[str, str], key: str) -> None:
    text = to_json(CONFIG)
    assert change[0] in text
    with pytest.raises(ConfigError, match=key):
        from_json(WorkerConfig, text.replace(*change, 1))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"WorkerConfig: '.*worker.json' is not allowed; .*\(No such file or directory\)"),
        (b"\xe4", r"\(it is not UTF-8\)"),
        (b"{", r"^/.*worker.json: WorkerConfig: '\{' is not allowed; allowed: a JSON object"),
        (b"[" * 10**5, "a JSON object"),
        (
            b'{"roles": 1}',
            r"worker.json: there is no key WorkerConfig.roles; did you mean WorkerConfig.role\? Keys of ",
        ),
        (b"{}", r"worker.json: WorkerConfig.worker_id: None is not allowed; allowed: a value, which it needs"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "worker.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load_json(WorkerConfig, file)


@pytest.mark.parametrize(
    ("make", "key", "allowed"),
    [
        (lambda: SchedulerConfig(max_num_batched_tokens=0), "max_num_batched_tokens", ">= 1"),
        (lambda: SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=9), "max_num_seqs", "8"),
        (lambda: SchedulerConfig(target_itl_ms=-1.0), "target_itl_ms", ">= 0"),
        (lambda: SchedulerConfig(max_partial_prefills=-1), "max_partial_prefills", ">= 0"),
        (lambda: QueueConfig("lifo"), "queue.policy", "fcfs"),
        (lambda: QueueConfig(batch_share=0.9), "queue.batch_share", "[0, 0.5]"),
        (lambda: QueueConfig(tenant_weights=(TenantWeight("a", 0.0),)), "router.tenants.a.weight", "> 0"),
        (lambda: QueueConfig("sjf", tenant_weights=(TenantWeight("a", 2.0),)), "router.tenants.a.weight", "fair"),
        (lambda: EngineConfig("m", "m", dtype="int3"), "dtype", "bfloat16"),
        (lambda: EngineConfig("m", "m", block_size=12), "block_size", "16"),
        (lambda: TransferConfig(codec="gzip"), "codec", "bexp-zstd"),
        (lambda: TransferConfig(frame_tokens=300), "frame_tokens", "256"),
        (lambda: TransferConfig(credit_bytes=10), "credit_bytes", "message_bytes"),
        (lambda: TransferConfig(max_reserved_fraction=0.0), "max_reserved_fraction", "(0, 1]"),
        (lambda: RouterConfig("r", "m", "m", "c", grpc_port=70000), "grpc_port", "65535"),
        (lambda: RouterConfig("r", "m", "m", "c", http_port=-2), "http_port", "-1 for none"),
        (lambda: RouterConfig("r", "m", "m", "c", heartbeat_s=2.0), "dead_after_s", "heartbeat_s"),
        (
            lambda: WorkerConfig("w", Role.DECODE, EngineConfig("m", "m"), faults=(FaultPlan("nowhere"),)),
            "faults",
            "decode.before_commit",
        ),
    ],
)
def test_a_bad_value_names_key_and_what_is_allowed(make, key: str, allowed: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as error:
        make()
    assert key in error.value.key
    assert allowed in error.value.allowed


def test_a_fault_fires_once_per_file_after_the_skipped_visits(tmp_path: Path) -> None:
    plan = FaultPlan("decode.after_step", action="stall", skip=2, once_file=str(tmp_path / "once"))
    points = FaultPoints([plan])
    for visit in range(5):
        points.hit("decode.after_step")
        points.hit("decode.after_report")
        assert (tmp_path / "once").exists() == (visit >= 2)


def test_a_kill_is_a_kill() -> None:
    code = (
        "from pdcore.faults import *\n"
        "p = FaultPoints([FaultPlan('decode.after_step')])\n"
        "p.hit('decode.after_report'); print('here', flush=True); p.hit('decode.after_step'); print('not here')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == -9
    assert done.stdout == "here\n"


def test_the_manual_clock_moves_when_told() -> None:
    clock = ManualClock(5.0)
    clock.advance(0.5)
    assert clock.now() == 5.5


def test_everything_on_the_wire_round_trips() -> None:
    geometry = KvGeometry("ab", 30, 3, 64, "bfloat16", 16, 99, 6)
    assert convert.geometry_from_proto(convert.geometry_to_proto(geometry)) == geometry
    assert geometry.bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert [geometry.blocks_for(n) for n in (1, 16, 17)] == [1, 1, 2]
    model = ModelInfo("m", "ab", 8192, 49152, "bfloat16")
    assert convert.model_from_proto(convert.model_to_proto(model)) == model
    ticket = KvTicket(100, 0, 10.0, ("bexp-zstd", "raw"), (KvEndpoint("h:1", "grpc", 0, 3, 3, 7, "inc"),), True)
    assert convert.ticket_from_proto(convert.ticket_to_proto(ticket)) == ticket
    stats = KvTransferStats(7, 1000, 700, "raw", "grpc", 0.25, 4, 1, True, "asked for")
    assert convert.stats_from_proto(convert.stats_to_proto(stats)) == stats
    load = WorkerLoad(
        1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, {"preempt": 12}, 1.5, 13, 14, 15, 16, 17, 18, 19, {"sends_failed": 20}
    )
    load = replace(
        load,
        step_time=StepTime(1.5, 0.25, 0.125, 0.5, 17, 18, 1.25),
        yielding_requests=19,
        yielding_blocks=20,
        stalled_requests=21,
        stalled_blocks=22,
    )
    assert convert.load_from_proto(convert.load_to_proto(load)) == load


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, -1.0])
def test_times_that_are_none_are_not_believed(wrong: float) -> None:
    """One of them would stay in every mean that it comes into."""
    assert convert.measured(wrong) == 0.0
    assert convert.measured(1.5) == 1.5
    assert convert.stats_from_proto(kv_pb2.TransferStats(seconds=wrong)).seconds == 0.0
    for field in ("base_ms", "token_ms", "attended_ms", "drift"):
        said = worker_pb2.StepTime(**{"base_ms": 1.0, "token_ms": 1.0, "steps": 9, "largest": 64, field: wrong})
        assert convert.step_time_from_proto(said) == StepTime()
    params = SamplingParams(9, 0.5, 4, 0.75, 0.25, 2**63 + 1, (1, 2), 3)
    spec = RequestSpec(
        RequestKey("r", 2), (1, 2, 3), params, (4,), 8, "salt", "q8", True, "tenant", PriorityClass.BATCH
    )
    assert convert.spec_from_proto(convert.spec_to_proto(spec)) == spec
    assert spec.known_tokens == (1, 2, 3, 4)
    shaped = SamplingParams(
        9,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.25,
        logit_bias=((3, 1.5), (1, -2.0)),
        allowed_token_ids=(7, 9),
        bad_words=((1,), (2, 3)),
        logprobs=0,
        prompt_logprobs=5,
    )
    spec = replace(spec, params=shaped, revoked=True)
    assert convert.spec_from_proto(convert.spec_to_proto(spec)) == spec
    logprobs = Logprobs(4, 2, (-0.5, -1.5), (1, 2, 3, 4), (-0.25, -0.5, -0.75, -1.0))
    assert convert.logprobs_from_proto(convert.logprobs_to_proto(logprobs)) == logprobs
    assert {convert.role_from_proto(convert.role_to_proto(role)) for role in Role} == set(Role)


def test_log_probabilities_of_no_token_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="1 likeliest tokens of 2 x 1"):
        convert.logprobs_from_proto(worker_pb2.Logprobs(top=1, values=[-1.0, -2.0], top_ids=[3], top_values=[-1.0]))


@pytest.mark.parametrize(
    ("field", "value"), [("prompt", []), ("max_tokens", 0), ("token_window", 0), ("logit_bias", [5])]
)
def test_a_worker_request_that_makes_no_sense_is_refused(field: str, value: object) -> None:
    message = worker_pb2.WorkerRequest(
        request_id="r", prompt=[1], sampling=worker_pb2.WorkerSampling(max_tokens=1), token_window=1
    )
    if field == "prompt":
        del message.prompt[:]
    elif field == "max_tokens":
        message.sampling.max_tokens = 0
    elif field == "logit_bias":
        message.sampling.bias_token_ids.append(5)
    else:
        message.token_window = 0
    with pytest.raises(InvalidRequest, match=field):
        convert.spec_from_proto(message)


def test_an_unknown_role_number_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="77"):
        convert.role_from_proto(77)


def test_errors_are_made_anew_whole() -> None:
    errors: list[PdserveError] = [
        ConfigError("a.b", 3, "an even number"),
        InvalidRequest("sampling.n", "must be 1"),
        HandshakeRefused("protocol", 3, 4),
        Overloaded("full", retry_after_s=1.5),
        TicketError("expired"),
    ]
    for error in errors:
        again = copy.copy(error)  # by the same protocol as a pickle
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
