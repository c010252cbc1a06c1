"""One prefill and one decode worker, driven over their sessions as a router would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from decode_worker.worker import DecodeWorker
from engine.step import StepInput, StepOutput
from pdcore.config import SchedulerConfig, TransferConfig, WorkerConfig
from pdcore.errors import ConfigError, TicketError
from pdcore.types import PROTOCOL_VERSION, RequestKey, RequestSpec, Role
from prefill_worker.worker import PrefillWorker
from protos import worker_pb2, worker_pb2_grpc
from tests.support.reference import divergences, load_reference
from tests.support.session_client import SessionClient
from tests.support.specs import prompt_of, spec_of
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def _config(model: Path, role: Role, **engine: object) -> WorkerConfig:
    from tests.support.processes import worker_config

    # Without a prefix cache, so that what is compared to a transfer is computed on its own, and all of it is sent.
    return worker_config(model, role, **({"prefix_cache": False} | engine))  # type: ignore[arg-type]


@dataclass
class Pair:
    """Both workers, and a session with each."""

    prefill_worker: PrefillWorker
    decode_worker: DecodeWorker
    p: SessionClient
    d: SessionClient

    def run(self, spec: RequestSpec) -> worker_pb2.ReserveReply:
        """Reserve on D, prefill on P."""
        reply = self.d.reserve(spec)
        deadline = time.monotonic() + 30.0
        while reply.refused.code == worker_pb2.FAILURE_CODE_OVERLOADED and time.monotonic() < deadline:
            time.sleep(0.01)
            reply = self.d.reserve(spec)
        assert reply.WhichOneof("result") == "granted", reply
        self.p.prefill(spec, reply.granted)
        return reply

    def at_rest(self) -> None:
        """Both workers hold nothing."""
        for session, worker in ((self.p, self.prefill_worker), (self.d, self.decode_worker)):

            def free(session: SessionClient = session, worker: PrefillWorker | DecodeWorker = worker) -> bool:
                load = session.load
                return (
                    load is not None
                    and load.free_blocks == load.total_blocks
                    and not load.open_tickets + load.open_sends
                    # A report can be older than what has begun since: ask the worker itself as well.
                    and not worker.runtime.handler.held()
                )

            session.wait(free, 8.0, f"{worker.config.worker_id} at its baseline, last {session.load}")
            worker.runtime.engine.check_integrity()
            assert not worker.runtime.handler.held()


@contextmanager
def running_pair(
    model: Path, *, p: dict[str, object] | None = None, d: dict[str, object] | None = None
) -> Iterator[Pair]:
    with ExitStack() as stack:
        prefill = PrefillWorker(_config(model, Role.PREFILL, **(p or {})))
        stack.callback(prefill.stop)
        prefill.start()
        decode = DecodeWorker(_config(model, Role.DECODE, **(d or {})))
        stack.callback(decode.stop)
        decode.start()
        yield Pair(
            prefill,
            decode,
            stack.enter_context(SessionClient(prefill.address, "r")),
            stack.enter_context(SessionClient(decode.address, "r")),
        )


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Pair]:
    scheduler = SchedulerConfig(max_num_batched_tokens=128, prefill_chunk_tokens=48, max_num_seqs=32)
    with running_pair(model, p={"scheduler": scheduler}, d={"scheduler": scheduler}) as pair:
        yield pair


def test_greedy_equals_the_reference_for_every_length_modulo_the_block_size(
    pair: Pair, model: Path, tell: Callable[[str], None]
) -> None:
    reference = load_reference(model)
    specs = [spec_of(prompt_of(length, length)) for length in [*range(1, 36), 47, 48, 49, 97, 200, 333]]
    for spec in specs:
        pair.run(spec)
    differing = 0
    for spec in specs:
        output = pair.d.wait_finished(spec.key.request_id)
        assert len(output) == spec.params.max_tokens
        assert pair.p.tokens_of(spec.key.request_id) == {0: output[0]}, "P's first token is D's"
        for divergence in divergences(reference, spec.prompt, output):
            differing += 1
            assert divergence.margin < 1e-3, (len(spec.prompt), divergence)
    tell(f"{len(specs)} prompts; {differing} tokens differ within the margin")
    pair.at_rest()


def test_disaggregated_equals_generated_whole(pair: Pair) -> None:
    for length in (3, 16, 50):
        for params in ({}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}):
            two, one = spec_of(prompt_of(length), **params), spec_of(prompt_of(length), **params)
            pair.run(two)
            pair.d.generate(one)
            assert pair.d.wait_finished(two.key.request_id) == pair.d.wait_finished(one.key.request_id)
    pair.at_rest()


def test_two_hundred_prompts_at_once_each_get_their_own_first_token(pair: Pair) -> None:
    reference = {}
    specs = [spec_of(prompt_of(5 + i % 7, seed=i), max_tokens=2) for i in range(200)]
    for spec in specs:
        alone = spec_of(list(spec.prompt), max_tokens=2)
        reference[spec.key] = alone
        pair.d.generate(alone)
    for spec in specs:
        pair.run(spec)
    for spec in specs:
        assert pair.d.wait_finished(spec.key.request_id) == pair.d.wait_finished(reference[spec.key].key.request_id)
    pair.at_rest()


def test_what_the_steps_did_can_be_fetched(pair: Pair) -> None:
    spec = spec_of(prompt_of(100), max_tokens=5)
    pair.run(spec)
    pair.d.wait_finished(spec.key.request_id)
    pair.at_rest()
    for worker, tokens in ((pair.prefill_worker, [48, 48, 4]), (pair.decode_worker, [1, 1, 1])):
        with grpc.insecure_channel(worker.address) as channel:
            reply = worker_pb2_grpc.WorkerStub(channel).GetSteps(worker_pb2.GetStepsRequest(count=3), timeout=10)
        assert [step.tokens for step in reply.steps] == tokens
        assert [step.step - reply.steps[0].step for step in reply.steps] == [0, 1, 2]
        assert all(step.ms > 0 and step.age_s > 0 and step.predicted_ms > 0 for step in reply.steps)
    assert pair.d.fresh_load().step_time.steps > 0


def test_the_receiver_counts_the_transfer(pair: Pair) -> None:
    spec = spec_of(prompt_of(100))
    pair.run(spec)
    pair.d.wait_finished(spec.key.request_id)
    stats = next(
        n.kv_received
        for n in pair.d.notices
        if n.request_id == spec.key.request_id and n.WhichOneof("notice") == "kv_received"
    )
    geometry = pair.decode_worker.runtime.runner.geometry
    assert stats.raw_bytes == 100 * geometry.bytes_per_token
    assert stats.blocks == 7
    assert stats.wire_bytes > 0
    assert stats.transport == "shm"
    assert pair.d.load is not None
    assert not any(pair.d.load.recomputed_tokens.values()), "a decode worker that prefills again is a fault"
    pair.at_rest()


@pytest.mark.parametrize("params", [{"max_tokens": 1}, {"max_tokens": 12, "stop": True}])
def test_a_request_that_ends_at_its_first_token_commits_nothing(pair: Pair, params: dict[str, object]) -> None:
    prompt = prompt_of(40)
    first = spec_of(prompt, max_tokens=2)
    pair.d.generate(first)
    token = pair.d.wait_finished(first.key.request_id)[0]
    extra = {"stop_token_ids": (token,)} if params.pop("stop", False) else {}
    spec = spec_of(prompt, **params, **extra)  # type: ignore[arg-type]
    pair.run(spec)
    assert pair.p.wait_finished(spec.key.request_id) == [token]
    pair.at_rest()
    assert pair.d.tokens_of(spec.key.request_id) == {}
    assert pair.d.failure_of(spec.key.request_id) is None
    assert pair.p.failure_of(spec.key.request_id) is None


@pytest.mark.parametrize("blocks", [(8, 32), (32, 8), (16, 64)])
def test_workers_with_different_block_sizes(model: Path, blocks: tuple[int, int]) -> None:
    with running_pair(model, p={"block_size": blocks[0]}, d={"block_size": blocks[1]}) as pair:
        for length in (1, 7, 8, 9, 31, 32, 33, 100):
            two, one = spec_of(prompt_of(length)), spec_of(prompt_of(length))
            pair.run(two)
            pair.d.generate(one)
            assert pair.d.wait_finished(two.key.request_id) == pair.d.wait_finished(one.key.request_id)
        pair.at_rest()


def test_a_full_token_window_pauses_and_credit_resumes(pair: Pair) -> None:
    spec, free = spec_of(prompt_of(20), max_tokens=30, window=5), spec_of(prompt_of(20), max_tokens=30)
    pair.run(spec)
    pair.d.generate(free)
    expected = pair.d.wait_finished(free.key.request_id)
    rid = spec.key.request_id
    pair.d.wait(lambda: len(pair.d.tokens_of(rid)) == 5, 5.0, "a full window")
    pair.d.wait(lambda: pair.d.load is not None and pair.d.load.paused == 1, 5.0, "paused")
    assert len(pair.d.tokens_of(rid)) == 5
    for seen in range(5, 30, 5):
        pair.d.credit(rid, 5)
        pair.d.wait(lambda seen=seen: len(pair.d.tokens_of(rid)) == seen + 5, 10.0, "five more")
    assert pair.d.wait_finished(rid) == expected
    pair.at_rest()


def test_aborts_in_every_state_leave_nothing(pair: Pair) -> None:
    reserved = spec_of(prompt_of(60))
    pair.d.reserve(reserved)
    prefilling = spec_of(prompt_of(300), max_tokens=400)
    pair.run(prefilling)
    decoding = spec_of(prompt_of(30), max_tokens=400)
    pair.run(decoding)
    pair.d.wait(lambda: len(pair.d.tokens_of(decoding.key.request_id)) > 3, 10.0, "decoding")
    paused = spec_of(prompt_of(30), max_tokens=400, window=2)
    pair.run(paused)
    pair.d.wait(lambda: len(pair.d.tokens_of(paused.key.request_id)) == 2, 10.0, "paused")
    for spec in (reserved, prefilling, decoding, paused):
        pair.p.abort(spec.key.request_id)
        pair.d.abort(spec.key.request_id)
        pair.d.abort(spec.key.request_id)
    pair.at_rest()


def test_an_ended_session_releases_all_that_its_router_owned(pair: Pair) -> None:
    with (
        SessionClient(pair.prefill_worker.address, "leaver") as p,
        SessionClient(pair.decode_worker.address, "leaver") as d,
    ):
        spec, kept = spec_of(prompt_of(50), max_tokens=500), spec_of(prompt_of(20), max_tokens=500)
        p.prefill(spec, d.reserve(spec).granted)
        d.reserve(kept)
        d.wait(lambda: len(d.tokens_of(spec.key.request_id)) > 2, 10.0, "decoding")
    pair.at_rest()


def test_a_silent_router_is_dead(pair: Pair) -> None:
    with SessionClient(pair.decode_worker.address, "mute", heartbeats=False) as mute:
        spec = spec_of(prompt_of(20), max_tokens=500)
        mute.reserve(spec)
        mute.wait(lambda: mute.ended, 8.0, "the worker ends the session")
    pair.at_rest()


def test_a_new_session_of_the_same_router_supersedes_the_old(pair: Pair) -> None:
    with SessionClient(pair.decode_worker.address, "twin") as old:
        spec = spec_of(prompt_of(20), max_tokens=200)
        old.generate(spec)
        old.wait(lambda: old.tokens_of(spec.key.request_id), 10.0, "decoding")
        with SessionClient(pair.decode_worker.address, "twin", router_incarnation="twin-2") as new:
            old.wait(lambda: old.ended, 5.0, "the old session ends")
            new.generate(spec)  # the same id and attempt: the old one's work is gone
            assert len(new.wait_finished(spec.key.request_id)) == 200
    pair.at_rest()


def test_two_routers_may_use_the_same_request_id(pair: Pair) -> None:
    with (
        SessionClient(pair.decode_worker.address, "r1") as one,
        SessionClient(pair.decode_worker.address, "r2") as two,
    ):
        first = spec_of(prompt_of(20))
        second = RequestSpec(key=first.key, prompt=tuple(prompt_of(21, 3)), params=first.params, token_window=1000)
        one.generate(first)
        two.generate(second)
        alone = spec_of(prompt_of(21, 3))
        pair.d.generate(alone)
        assert two.wait_finished(second.key.request_id) == pair.d.wait_finished(alone.key.request_id)
        assert one.wait_finished(first.key.request_id) != two.wait_finished(second.key.request_id)


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        ({"protocol_min": 7, "protocol_max": 9}, ("protocol version", str(PROTOCOL_VERSION), "7 to 9")),
        ({"model_digest": "feed"}, ("model digest", "feed")),
        ({"worker_incarnation": "yesterday"}, ("incarnation", "yesterday")),
        ({"router_incarnation": "a/b"}, ("router incarnation", "a/b")),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_naming_both_values(
    pair: Pair, hello: dict[str, object], words: tuple[str, ...]
) -> None:
    with SessionClient(pair.decode_worker.address, **hello) as session:  # type: ignore[arg-type]
        session.wait(lambda: session.ended, 5.0, "the refusal")
        assert session.ended is not None
        assert session.ended.startswith("FAILED_PRECONDITION")
        assert all(word in session.ended for word in words), session.ended


def test_commands_for_another_role_are_refused(pair: Pair) -> None:
    spec = spec_of(prompt_of(20))
    assert pair.p.reserve(spec).refused.code == worker_pb2.FAILURE_CODE_INVALID
    reply = pair.d.reserve(spec)
    other = spec_of(prompt_of(20))
    pair.d.prefill(other, reply.granted)
    pair.d.wait(lambda: pair.d.failure_of(other.key.request_id), 5.0, "refusal")
    pair.d.abort(spec.key.request_id)
    pair.at_rest()


def test_what_can_never_run_is_refused_at_once_and_nothing_stays(pair: Pair) -> None:
    too_long = spec_of(prompt_of(2040), max_tokens=100)
    reply = pair.d.reserve(too_long)
    assert reply.refused.code == worker_pb2.FAILURE_CODE_INVALID
    assert "2048" in reply.refused.message
    odd = spec_of([5, 100000, 7])
    assert pair.d.reserve(odd).refused.code == worker_pb2.FAILURE_CODE_INVALID
    pair.at_rest()


def test_a_full_decode_worker_refuses_a_reserve_without_waiting(model: Path) -> None:
    transfer = TransferConfig(max_reserved_fraction=0.5)
    with running_pair(model, d={"num_blocks": 32, "transfer": transfer}) as pair:
        replies = [pair.d.reserve(spec_of(prompt_of(100))) for _ in range(4)]
        codes = [reply.WhichOneof("result") for reply in replies]
        assert codes == ["granted", "granted", "refused", "refused"]
        assert replies[2].refused.code == worker_pb2.FAILURE_CODE_OVERLOADED


def test_running_sequences_outlive_tickets_under_pressure(model: Path) -> None:
    with running_pair(model, d={"num_blocks": 24, "transfer": TransferConfig(max_reserved_fraction=1.0)}) as pair:
        running = spec_of(prompt_of(30), max_tokens=300)
        pair.d.generate(running)
        pair.d.wait(lambda: pair.d.tokens_of(running.key.request_id), 10.0, "running")
        ticket = spec_of(prompt_of(200))
        assert pair.d.reserve(ticket).WhichOneof("result") == "granted"
        alone = pair.d.wait_finished(running.key.request_id)
        assert len(alone) == 300
        failure = pair.d.failure_of(ticket.key.request_id)
        assert failure is not None
        assert failure.code == worker_pb2.FAILURE_CODE_OVERLOADED, "nobody's fault, and not counted as a replay"
        assert "revoked" in failure.message
        assert pair.d.load is not None
        assert pair.d.load.preemptions == 0
        pair.at_rest()


def test_a_ticket_expires_with_its_lease(model: Path) -> None:
    with running_pair(model, d={"transfer": TransferConfig(lease_s=0.8)}) as pair:
        with SessionClient(pair.decode_worker.address, "quiet", heartbeats=False) as quiet:
            spec = spec_of(prompt_of(50))
            reply = quiet.reserve(spec)
            quiet.wait(lambda: quiet.failure_of(spec.key.request_id), 3.0, "expiry")
        pair.p.prefill(spec, reply.granted)
        pair.p.wait(lambda: pair.p.failure_of(spec.key.request_id), 8.0, "the sender is refused")
        pair.at_rest()


def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(model: Path) -> None:
    with running_pair(model) as pair:
        spec = spec_of(prompt_of(20), max_tokens=200)
        pair.run(spec)
        pair.d.wait(lambda: pair.d.tokens_of(spec.key.request_id), 10.0, "decoding")
        pair.d.drain()
        pair.d.wait(lambda: pair.d.draining, 5.0, "told")
        refused = spec_of(prompt_of(20))
        assert pair.d.reserve(refused).refused.code == worker_pb2.FAILURE_CODE_DRAINING
        assert len(pair.d.wait_finished(spec.key.request_id)) == 200
        assert pair.decode_worker.drain(5.0)


def test_a_second_worker_on_a_taken_port_fails_to_start(pair: Pair, model: Path) -> None:
    port = int(pair.decode_worker.address.rsplit(":", 1)[1])
    other = DecodeWorker(replace(_config(model, Role.DECODE), port=port))
    with pytest.raises(ConfigError, match=str(port)):
        other.start()


def test_a_stream_without_hello_is_refused(pair: Pair) -> None:
    from protos import worker_pb2_grpc

    with grpc.insecure_channel(pair.decode_worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        first = worker_pb2.SessionCommand(heartbeat=worker_pb2.Heartbeat())
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Session(iter([first]), timeout=5.0))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_an_abort_that_comes_while_a_ticket_is_granted_leaves_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = pair.decode_worker.runtime.handler
    receiver = handler.receiver  # type: ignore[attr-defined]
    grant = receiver.grant

    def slow_grant(key: RequestKey, *arguments: object, **more: object) -> object:
        aborter = threading.Thread(target=handler.abort, args=(key, "test"))
        aborter.start()
        aborter.join(0.3)
        return grant(key, *arguments, **more)

    monkeypatch.setattr(receiver, "grant", slow_grant)
    spec = spec_of(prompt_of(60))
    pair.d.reserve(spec)
    pair.at_rest()


def test_a_ticket_that_cannot_be_granted_costs_no_blocks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = pair.decode_worker.runtime.handler.receiver  # type: ignore[attr-defined]

    def no_grant(*_: object, **__: object) -> None:
        raise TicketError("the receiver is closing")

    monkeypatch.setattr(receiver, "grant", no_grant)
    assert pair.d.reserve(spec_of(prompt_of(60))).refused.code == worker_pb2.FAILURE_CODE_TRANSFER
    pair.at_rest()


def test_two_sessions_of_one_router_at_once_leave_one(pair: Pair) -> None:
    sessions = [SessionClient(pair.decode_worker.address, "double") for _ in range(6)]
    try:
        sessions[0].wait(lambda: sum(session.ended is None for session in sessions) == 1, 8.0, "one is left")
    finally:
        for session in sessions:
            session.close()


def test_a_worker_whose_engine_stands_still_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime._STUCK_S", 2.0)
    # Several of the client's heartbeats: were it taken for dead, its request would go, and nothing would stand still.
    config = replace(_config(model, Role.DECODE), heartbeat_s=0.1, dead_after_s=1.5)
    worker = DecodeWorker(config)
    worker.start()
    release = threading.Event()
    try:
        run = worker.runtime.runner.run

        def stuck(step: StepInput) -> StepOutput:
            release.wait(30.0)
            return run(step)

        monkeypatch.setattr(worker.runtime.runner, "run", stuck)
        with SessionClient(worker.address, "r") as session:
            assert not worker.failed.wait(2.5), "an idle worker is alive"
            session.generate(spec_of(prompt_of(20)))
            assert worker.failed.wait(10.0)
        assert "progress" in worker.problem
    finally:
        release.set()
        worker.stop()


def test_a_step_that_raises_ends_its_requests_and_not_the_worker(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = pair.decode_worker.runtime.runner
    run = runner.run
    failures = iter([True])

    def failing(step: StepInput) -> StepOutput:
        if next(failures, False):
            raise RuntimeError("out of memory")
        return run(step)

    monkeypatch.setattr(runner, "run", failing)
    spec, after = spec_of(prompt_of(20)), spec_of(prompt_of(20))
    pair.d.generate(spec)
    pair.d.wait(lambda: pair.d.failure_of(spec.key.request_id), 10.0, "the failure is told")
    failure = pair.d.failure_of(spec.key.request_id)
    assert failure is not None
    assert failure.code == worker_pb2.FAILURE_CODE_INTERNAL
    assert "memory" not in failure.message, "what went wrong inside is for the log"
    pair.d.generate(after)
    assert len(pair.d.wait_finished(after.key.request_id)) == 12
    pair.at_rest()


def test_a_core_that_is_not_there_is_named(model: Path) -> None:
    config = _config(model, Role.DECODE)
    worker = DecodeWorker(replace(config, engine=replace(config.engine, cpu_affinity=(9999,))))
    with pytest.raises(ConfigError, match="9999"):
        worker.start()
    worker.stop()
