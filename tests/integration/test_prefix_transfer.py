"""Shared prefixes on real workers and a real model: what is computed, what is sent, and that no token changes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from decode_worker.worker import DecodeWorker
from engine.engine import Engine, SequenceKind
from engine.loader import load_runner
from pdcore.config import EngineConfig, SchedulerConfig, TransferConfig
from pdcore.types import RequestKey, RequestSpec, Role, SamplingParams
from prefill_worker.worker import PrefillWorker
from protos import kv_pb2, worker_pb2
from router.client import Client, Sampling
from tests.support.local_cluster import LocalCluster
from tests.support.processes import eventually, worker_config
from tests.support.reference import divergences, load_reference
from tests.support.session_client import SessionClient
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


_names = iter(range(10**6))


def prompt_of(family: int, shared: int, own: int = 0, branch: int = 0) -> list[int]:
    """`shared` tokens that all prompts of the family begin with, then `own` of the branch."""
    front = [(31 * i + 97 * family + i * i) % 250 + 1 for i in range(shared)]
    return front + [(29 * i + 53 * branch + i * i + 7) % 250 + 1 for i in range(own)]


def spec_of(prompt: Sequence[int], max_tokens: int = 8, window: int = 1000, salt: str = "") -> RequestSpec:
    return RequestSpec(
        RequestKey(f"q{next(_names)}", 0),
        tuple(prompt),
        SamplingParams(max_tokens, temperature=0.0),
        token_window=window,
        cache_salt=salt,
    )


@dataclass
class Transfer:
    """How one request went. `held` and `computed_from`: tokens that D had, and that P had, of its prompt."""

    output: list[int]
    held: int
    computed_from: int
    stats: kv_pb2.TransferStats


class Pair:
    """A prefill worker P and a decode worker D, and a router's session with each."""

    def __init__(self, prefill: PrefillWorker, decode: DecodeWorker, p: SessionClient, d: SessionClient) -> None:
        self.prefill, self.decode, self.p, self.d = prefill, decode, p, d

    def reserve(self, spec: RequestSpec) -> kv_pb2.Ticket:
        reply = self.d.reserve(spec)
        assert reply.WhichOneof("result") == "granted", reply
        return reply.granted

    def transfer(self, spec: RequestSpec) -> Transfer:
        """Compute on P, decode on D, wait for the last token."""
        ticket = self.reserve(spec)
        self.p.prefill(spec, ticket)
        output = self.d.wait_finished(spec.key.request_id)
        done = notice_of(self.p, spec, "prefill_done").prefill_done
        stats = notice_of(self.d, spec, "kv_received").kv_received
        return Transfer(output, ticket.prefix_tokens, done.cached_tokens, stats)

    def generate(self, spec: RequestSpec) -> tuple[list[int], int]:
        """Run the whole request on D; its output, and the prompt tokens that D had."""
        self.d.generate(spec)
        output = self.d.wait_finished(spec.key.request_id)
        return output, notice_of(self.d, spec, "prefill_done").prefill_done.cached_tokens

    def at_rest(self) -> None:
        """Both workers hold nothing but cached blocks that nobody uses."""
        for worker in (self.prefill, self.decode):

            def free(worker: PrefillWorker | DecodeWorker = worker) -> bool:
                load = worker.runtime.load()
                in_use = load.total_blocks - load.free_blocks + load.open_tickets + load.open_sends
                return not in_use and not worker.runtime.handler.held()

            eventually(free, 10.0, f"{worker.config.worker_id} at its baseline")
            worker.runtime.engine.check_integrity()


def notice_of(session: SessionClient, spec: RequestSpec, kind: str) -> worker_pb2.RequestNotice:
    def find() -> worker_pb2.RequestNotice | None:
        mine = [notice for notice in list(session.notices) if notice.request_id == spec.key.request_id]
        return next((notice for notice in mine if notice.WhichOneof("notice") == kind), None)

    session.wait(find, 5.0, f"{kind} of {spec.key.request_id}")
    found = find()
    assert found is not None
    return found


@contextmanager
def running_pair(
    model: Path, *, p: dict[str, object] | None = None, d: dict[str, object] | None = None
) -> Iterator[Pair]:
    with ExitStack() as stack:
        prefill = PrefillWorker(worker_config(model, Role.PREFILL, **(p or {})))  # type: ignore[arg-type]
        stack.callback(prefill.stop)
        prefill.start()
        decode = DecodeWorker(worker_config(model, Role.DECODE, **(d or {})))  # type: ignore[arg-type]
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
    scheduler = SchedulerConfig(max_num_batched_tokens=64, prefill_chunk_tokens=48, max_num_seqs=16)
    with running_pair(model, p={"scheduler": scheduler}, d={"scheduler": scheduler}) as pair:
        yield pair


class Reference:
    """Greedy outputs, judged by `transformers`."""

    def __init__(self, model: Path) -> None:
        self._model = load_reference(model)

    def check(self, spec: RequestSpec, output: Sequence[int]) -> None:
        """Design decision 7 allows a divergence where the two best logits are closer than 1e-3."""
        assert len(output) == spec.params.max_tokens
        for divergence in divergences(self._model, spec.prompt, output):
            assert divergence.margin < 1e-3, (len(spec.prompt), divergence)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


def test_a_repeated_prompt_sends_and_computes_its_last_block_only(pair: Pair, reference: Reference) -> None:
    token_bytes = pair.decode.runtime.runner.geometry.bytes_per_token
    for round_number, (held, blocks) in enumerate([(0, 7), (96, 1), (96, 1)]):
        spec = spec_of(prompt_of(1, 100))
        went = pair.transfer(spec)
        reference.check(spec, went.output)
        assert (went.held, went.computed_from) == (held, held), round_number
        assert (went.stats.raw_bytes, went.stats.blocks) == ((100 - held) * token_bytes, blocks)
    pair.at_rest()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 64, 65])
def test_a_full_hit_leaves_a_token_to_be_computed(pair: Pair, reference: Reference, length: int) -> None:
    outputs = []
    for held in (0, (length - 1) // 16 * 16):
        spec = spec_of(prompt_of(2, length), salt=f"full-{length}")
        went = pair.transfer(spec)
        reference.check(spec, went.output)
        assert went.held == went.computed_from == held
        outputs.append(went.output)
    assert outputs[0] == outputs[1]
    pair.at_rest()


def test_a_partial_hit(pair: Pair, reference: Reference) -> None:
    for branch, held in ((1, 0), (2, 48), (3, 48)):
        spec = spec_of(prompt_of(3, 60, 50, branch=branch))
        went = pair.transfer(spec)
        reference.check(spec, went.output)
        assert (went.held, went.computed_from) == (held, held)
    pair.at_rest()


def test_the_next_turn_finds_what_was_generated(pair: Pair, reference: Reference) -> None:
    first = spec_of(prompt_of(4, 40), max_tokens=30)
    answer = pair.transfer(first).output
    second = spec_of([*first.prompt, *answer, *prompt_of(5, 20)])
    went = pair.transfer(second)
    reference.check(second, went.output)
    assert went.held == 64, "D decoded 69 tokens, the last of which it did not feed"
    assert went.computed_from == 32, "P knows the prompt only"
    pair.at_rest()


def test_d_holds_what_p_does_not(pair: Pair, reference: Reference) -> None:
    warm = spec_of(prompt_of(6, 100))
    output, cached = pair.generate(warm)
    reference.check(warm, output)
    assert cached == 0
    spec = spec_of(prompt_of(6, 80, 40))
    went = pair.transfer(spec)
    reference.check(spec, went.output)
    assert (went.held, went.computed_from) == (80, 0)
    assert went.stats.raw_bytes == 40 * pair.decode.runtime.runner.geometry.bytes_per_token
    pair.at_rest()


def test_p_holds_what_d_does_not(model: Path, reference: Reference) -> None:
    """What P need not compute is sent all the same, and is no hit of D's."""
    with running_pair(model, d={"prefix_cache": False}) as pair:
        for cached in (0, 96):
            spec = spec_of(prompt_of(7, 100))
            went = pair.transfer(spec)
            reference.check(spec, went.output)
            assert (went.held, went.computed_from) == (0, cached)
            assert went.stats.raw_bytes == 100 * pair.decode.runtime.runner.geometry.bytes_per_token
        pair.at_rest()


@pytest.mark.parametrize("sizes", [(8, 32), (32, 8), (64, 16), (16, 64)])
def test_a_held_prefix_that_is_not_whole_blocks_of_the_sender(
    model: Path, reference: Reference, sizes: tuple[int, int]
) -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=37, prefill_chunk_tokens=37, max_num_seqs=16)
    ours, theirs = sizes
    with running_pair(model, p={"block_size": ours, "scheduler": scheduler}, d={"block_size": theirs}) as pair:
        for branch, own in enumerate((3, 50, 0, 90)):
            spec = spec_of(prompt_of(8, 140, own, branch=branch))
            went = pair.transfer(spec)
            reference.check(spec, went.output)
            hit = 0 if branch == 0 else min(140, 139 + own)
            assert (went.held, went.computed_from) == (hit // theirs * theirs, hit // ours * ours), branch
        pair.at_rest()


def test_lossy_kv_never_answers_a_lookup(pair: Pair, reference: Reference) -> None:
    for cached in (0, 96):
        spec = replace(spec_of(prompt_of(21, 100)), kv_codec="q8")
        went = pair.transfer(spec)
        assert (went.stats.codec, went.stats.lossless) == ("q8", False)
        assert (went.held, went.computed_from) == (0, cached), "what P computed is exact, what D was sent is not"
    exact = spec_of(prompt_of(21, 100))
    went = pair.transfer(exact)
    reference.check(exact, went.output)
    assert went.held == 0
    rest = replace(spec_of(prompt_of(21, 90, 60)), kv_codec="q8")
    assert pair.transfer(rest).held == 80, "exact KV serves everybody"
    pair.at_rest()


def test_salts_keep_requests_apart(pair: Pair) -> None:
    for salt, held in (("x", 0), ("y", 0), ("x", 96)):
        assert pair.transfer(spec_of(prompt_of(9, 100), salt=salt)).held == held
    pair.at_rest()


def test_many_that_begin_alike_at_once(pair: Pair, reference: Reference) -> None:
    specs = [spec_of(prompt_of(10, 40 + i % 9, 1 + i % 30, branch=i)) for i in range(40)]
    for spec in specs:
        deadline = time.monotonic() + 30.0
        reply = pair.d.reserve(spec)
        while reply.WhichOneof("result") == "refused" and time.monotonic() < deadline:
            time.sleep(0.01)
            reply = pair.d.reserve(spec)
        pair.p.prefill(spec, reply.granted)
    for spec in specs:
        reference.check(spec, pair.d.wait_finished(spec.key.request_id))
    pair.at_rest()
    assert pair.d.load is not None
    assert not any(pair.d.load.recomputed_tokens.values())


def test_a_hit_while_the_first_still_runs(pair: Pair, reference: Reference) -> None:
    slow = spec_of(prompt_of(11, 70), max_tokens=60, window=3)
    pair.p.prefill(slow, pair.reserve(slow))
    pair.d.wait(lambda: len(pair.d.tokens_of(slow.key.request_id)) == 3, 10.0, "it is paused, and holds its blocks")
    spec = spec_of(prompt_of(11, 70))
    went = pair.transfer(spec)
    reference.check(spec, went.output)
    assert went.held == 64
    pair.d.credit(slow.key.request_id, 3)
    pair.d.wait(lambda: len(pair.d.tokens_of(slow.key.request_id)) == 6, 10.0, "it goes on")
    pair.p.abort(slow.key.request_id)
    pair.d.abort(slow.key.request_id)
    pair.at_rest()


def test_aborts_of_prefix_hits_in_every_state_leave_nothing(pair: Pair, reference: Reference) -> None:
    warm = spec_of(prompt_of(12, 200))
    pair.transfer(warm)
    reserved = spec_of(prompt_of(12, 150))
    assert pair.reserve(reserved).prefix_tokens == 144
    prefilling = spec_of(prompt_of(12, 150, 300), max_tokens=100)
    pair.p.prefill(prefilling, pair.reserve(prefilling))
    decoding = spec_of(prompt_of(12, 190), max_tokens=400)
    pair.p.prefill(decoding, pair.reserve(decoding))
    pair.d.wait(lambda: len(pair.d.tokens_of(decoding.key.request_id)) > 3, 10.0, "decoding")
    paused = spec_of(prompt_of(12, 180), max_tokens=400, window=2)
    pair.p.prefill(paused, pair.reserve(paused))
    pair.d.wait(lambda: len(pair.d.tokens_of(paused.key.request_id)) == 2, 10.0, "paused")
    for spec in (reserved, prefilling, decoding, paused):
        pair.p.abort(spec.key.request_id)
        pair.d.abort(spec.key.request_id)
    pair.at_rest()
    again = spec_of(prompt_of(12, 200))
    went = pair.transfer(again)
    reference.check(again, went.output)
    assert went.held == 192
    pair.at_rest()


def test_a_ticket_pins_its_prefix_until_its_lease_ends(model: Path, reference: Reference) -> None:
    transfer = TransferConfig(lease_s=1.0, max_reserved_fraction=1.0)
    with running_pair(model, d={"num_blocks": 16, "transfer": transfer}) as pair:
        pair.generate(spec_of(prompt_of(13, 96)))
        with SessionClient(pair.decode.address, "quiet", heartbeats=False) as quiet:
            spec = spec_of(prompt_of(13, 100))
            assert quiet.reserve(spec).granted.prefix_tokens == 96
            other = spec_of(prompt_of(14, 120))  # needs all that is not pinned
            reference.check(other, pair.generate(other)[0])
            assert pair.decode.runtime.engine.load().free_blocks == 16 - 7
            quiet.wait(lambda: quiet.failure_of(spec.key.request_id), 5.0, "expiry")
        pair.at_rest()
        big = spec_of(prompt_of(15, 240))
        reference.check(big, pair.generate(big)[0])
        pair.at_rest()


def test_a_revoked_ticket_unpins_its_prefix(model: Path) -> None:
    with running_pair(model, d={"num_blocks": 16, "transfer": TransferConfig(max_reserved_fraction=1.0)}) as pair:
        pair.generate(spec_of(prompt_of(16, 80)))
        running = spec_of(prompt_of(17, 30), max_tokens=200)
        pair.d.generate(running)
        pair.d.wait(lambda: pair.d.tokens_of(running.key.request_id), 10.0, "running")
        ticket = spec_of(prompt_of(16, 100))
        assert pair.reserve(ticket).prefix_tokens == 80
        assert len(pair.d.wait_finished(running.key.request_id)) == 200
        failure = pair.d.failure_of(ticket.key.request_id)
        assert failure is not None
        assert failure.code == worker_pb2.FAILURE_CODE_OVERLOADED
        pair.at_rest()


def test_a_small_rest_runs_on_d_in_its_tickets_place(pair: Pair, reference: Reference) -> None:
    """As a router does it: the ticket says so, is aborted, and `generate` of the same attempt follows at once."""
    pair.transfer(spec_of(prompt_of(18, 100)))
    spec = spec_of(prompt_of(18, 96, 20))
    for _ in range(3):  # whatever the order in which the ticket's end and the request's come about
        spec = replace(spec, key=RequestKey(f"q{next(_names)}", 0))
        ticket = pair.reserve(spec)
        assert ticket.prefix_tokens >= 96
        assert ticket.run_here
        pair.d.abort(spec.key.request_id)
        output, cached = pair.generate(spec)
        reference.check(spec, output)
        assert cached == ticket.prefix_tokens
        assert pair.d.failure_of(spec.key.request_id) is None
    large = spec_of(prompt_of(18, 96, 80, branch=9))
    assert not pair.reserve(large).run_here
    pair.d.abort(large.key.request_id)
    pair.at_rest()


@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.AGGREGATED,)])
def test_usage_tells_the_cached_tokens(model: Path, tmp_path: Path, roles: tuple[Role, ...]) -> None:
    """Through a router, to a client. KV that a decode worker was sent is no hit."""
    configs = [worker_config(model, role) for role in roles]
    sampling = Sampling(max_tokens=5, temperature=0.0)
    with LocalCluster(model, tmp_path, configs, forked=True) as cluster, Client(cluster.address) as client:
        answers = [
            client.complete(prompt_of(20, 100, own), sampling, cache_salt=salt)
            for own, salt in ((0, ""), (0, ""), (100, ""), (0, "another"))
        ]
        assert [answer.end.usage.cached_tokens for answer in answers] == [0, 96, 96, 0]
        assert [answer.end.usage.prompt_tokens for answer in answers] == [100, 100, 200, 100]
        assert answers[0].token_ids == answers[1].token_ids == answers[3].token_ids
        if Role.AGGREGATED not in roles:
            # The decode worker computes the four tokens that it lacks of the second itself; the third it is sent.
            modes = [answer.end.timeline.mode for answer in answers]
            assert modes == ["disaggregated", "local", "disaggregated", "disaggregated"]
            assert [answer.end.timeline.kv.blocks for answer in answers] == [7, 0, 7, 7]
        cluster.assert_baseline(10.0)


def test_the_model_answers_alike_with_and_without_a_prefix_cache(model: Path, reference: Reference) -> None:
    outputs = []
    for prefix_cache in (True, False):
        config = EngineConfig(
            str(model),
            "tiny",
            dtype="float32",
            num_blocks=64,
            threads=1,
            prefix_cache=prefix_cache,
            scheduler=SchedulerConfig(40, 6, 40),
        )
        engine = Engine(load_runner(config), config)
        specs = [spec_of(prompt_of(i % 3, 50, 1 + i, branch=i)) for i in range(18)]
        got: dict[RequestKey, list[int]] = {spec.key: [] for spec in specs}
        for spec in specs:
            engine.add(spec, SequenceKind.GENERATE)
        while engine.has_work():
            plan = engine.schedule()
            assert plan is not None
            for token in engine.apply(plan, engine.execute(plan)).tokens:
                got[token.key].append(token.token_id)
            engine.check_integrity()
        for spec in specs:
            reference.check(spec, got[spec.key])
        outputs.append(list(got.values()))
        assert (engine.load().cached_tokens > 0) is prefix_cache
        assert engine.load().free_blocks == 64
    assert outputs[0] == outputs[1]
