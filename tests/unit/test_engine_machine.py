"""The engine under every order of calls, against an oracle that knows tokens only."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.engine import Reservation, SequenceKind, StepPlan
from engine.step import StepOutput
from engine.ticket import CLAIM_S
from pdcore.clock import ManualClock
from pdcore.config import QUEUE_POLICIES, QueueConfig
from pdcore.types import FinishReason, PriorityClass, RequestKey, RequestSpec
from tests.support.engine_kit import ManualCopier, make_engine, prefill_and_transfer, prompt_of, request
from tests.support.fake_runner import FakeRunner, oracle

VOCAB = 32  # small, so that stop tokens come up


@dataclass
class Expected:
    """A request that the engine holds, as the test sees it."""

    spec: RequestSpec
    kind: SequenceKind
    tokens: list[int]  # all that may still be reported, delivered ones excluded
    reason: FinishReason | None
    got: list[int] = field(default_factory=list)
    credit: int = 0
    committed: bool = False
    first_chunk_at: int | None = None  # the token at which its first chunk began

    @property
    def echo_pending(self) -> bool:
        """Whether the engine has its first token from a commit and has not reported it."""
        return self.committed and not self.got


class EngineMachine(RuleBasedStateMachine):
    """Steps are split into schedule, execute and apply, with all other calls in between.

    Pools hold a few requests at most, so that memory is short most of the time. Most prompts begin like others, so
    that blocks are shared; what the model generates does not depend on it, and neither does what the test expects.
    Copies to and from host memory end, well or badly, at any moment and in any order.
    """

    @initialize(
        blocks=st.integers(6, 14),
        block_size=st.sampled_from([1, 2, 4]),
        source_block_size=st.sampled_from([3, 4, 8]),
        max_num_seqs=st.integers(1, 5),
        more_budget=st.integers(0, 12),
        chunk=st.integers(1, 12),
        fraction=st.sampled_from([0.5, 1.0]),
        prefix_cache=st.sampled_from([True, True, True, False]),
        swap_blocks=st.sampled_from([0, 5, 40]),
        preemption=st.sampled_from(["auto", "swap"]),
        policy=st.sampled_from(QUEUE_POLICIES),
        partial=st.sampled_from([0, 0, 1, 2]),
    )
    def build(
        self, blocks: int, block_size: int, source_block_size: int, max_num_seqs: int, more_budget: int, chunk: int,
        fraction: float, prefix_cache: bool, swap_blocks: int, preemption: str,
        policy: str, partial: int,
    ) -> None:  # fmt: skip
        self.runner = FakeRunner(
            num_blocks=blocks, block_size=block_size, vocab_size=VOCAB, max_num_seqs=max_num_seqs
        )
        self.budget, self.max_num_seqs, self.chunk = max_num_seqs + more_budget, max_num_seqs, chunk
        self.revoked: list[str] = []
        self.clock, self.copier = ManualClock(), ManualCopier()
        self.engine = make_engine(
            self.runner,
            budget=self.budget,
            max_num_seqs=max_num_seqs,
            chunk=chunk,
            max_model_len=64,
            max_reserved_fraction=fraction,
            prefix_cache=prefix_cache,
            on_pressure=self.revoked.append,
            clock=self.clock,
            swap_blocks=swap_blocks,
            preemption=preemption if swap_blocks else "auto",
            copier=self.copier,
            queue=QueueConfig(policy, batch_share=0.2),
            max_partial_prefills=partial,
            long_prefill_tokens=6,
        )
        self.source_runner = FakeRunner(num_blocks=64, block_size=source_block_size, vocab_size=VOCAB)
        self.source = make_engine(self.source_runner, budget=9, max_num_seqs=9, chunk=7)
        self.live: dict[RequestKey, Expected] = {}
        self.sends: set[RequestKey] = set()  # PREFILL keys whose send has not been released
        self.tickets: dict[str, tuple[RequestSpec, Reservation]] = {}
        self.heard = 0  # events of the prefix cache
        self.cached: set[bytes] = set()  # names of cached blocks, as one knows them who hears of events only
        self.plan: StepPlan | None = None
        self.output: StepOutput | None = None
        self.count = 0
        self.reported = 0  # tokens

    # -- requests ----------------------------------------------------------------------------------------------

    def _spec(self, data: st.DataObject) -> RequestSpec:
        self.count += 1
        pool = self.runner.geometry.num_blocks * self.runner.geometry.block_size
        length = data.draw(st.integers(1, min(9, pool - 2)), label="prompt")
        max_tokens = data.draw(st.integers(1, min(14, pool - length)), label="max_tokens")
        shared = data.draw(st.integers(0, length), label="shared")
        family = data.draw(st.integers(0, 1), label="family")
        prompt = prompt_of(family, shared, length - shared, branch=self.count, vocab_size=VOCAB)
        delivered = [1] * data.draw(st.integers(0, min(3, max_tokens - 1)), label="delivered")
        return request(
            f"r{self.count}",
            prompt,
            max_tokens,
            delivered=delivered,
            window=data.draw(st.integers(1, 16), label="window"),
            temperature=data.draw(st.sampled_from([0.0, 1.0]), label="temperature"),
            seed=self.count,
            stop=data.draw(st.sampled_from([(), (5, 6, 7)]), label="stop"),
            min_tokens=data.draw(st.integers(0, 4), label="min_tokens"),
            vocab_size=VOCAB,
            salt=data.draw(st.sampled_from(["", "", "", "salt"]), label="salt"),
            tenant=data.draw(st.sampled_from("ab"), label="tenant"),
            priority=data.draw(st.sampled_from(PriorityClass), label="priority"),
        )

    def _expect(self, spec: RequestSpec, kind: SequenceKind, committed: bool = False) -> None:
        limit = 1 if kind is SequenceKind.PREFILL else None
        tokens, reason = oracle(self.runner, spec, limit)
        self.live[spec.key] = Expected(spec, kind, tokens, reason, credit=spec.token_window, committed=committed)
        if kind is SequenceKind.PREFILL:
            self.sends.add(spec.key)

    @precondition(lambda self: len(self.live) < 7)
    @rule(data=st.data(), kind=st.sampled_from([SequenceKind.GENERATE] * 3 + [SequenceKind.PREFILL]))
    def add(self, data: st.DataObject, kind: SequenceKind) -> None:
        spec = self._spec(data)
        self.engine.add(spec, kind)
        self._expect(spec, kind)

    @precondition(lambda self: len(self.live) < 5)
    @rule(prompts=st.lists(st.integers(1, 4), min_size=2, max_size=4), alike=st.booleans())
    def add_crowd(self, prompts: list[int], alike: bool) -> None:
        """Requests that start small and grow: they come to lack memory. Those that are alike grow alike."""
        pool = self.runner.geometry.num_blocks * self.runner.geometry.block_size
        for length in prompts:
            self.count += 1
            prompt = prompt_of(0 if alike else self.count, length, vocab_size=VOCAB)
            spec = request(f"r{self.count}", prompt, min(pool - length, 20), seed=self.count)
            self.engine.add(spec, SequenceKind.GENERATE)
            self._expect(spec, SequenceKind.GENERATE)

    @precondition(lambda self: len(self.live) > 2)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        assert self.engine.abort(key)
        assert not self.engine.abort(key)
        del self.live[key]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(1, 6))
    def credit(self, data: st.DataObject, tokens: int) -> None:
        self._credit(data.draw(st.sampled_from(sorted(self.live))), tokens)

    def _credit(self, key: RequestKey, tokens: int) -> None:
        """Return credit as a router does: for tokens that were reported, and once."""
        expected = self.live[key]
        tokens = min(tokens, expected.spec.token_window - expected.credit)
        expected.credit += tokens
        self.engine.add_credit(key, tokens)

    @precondition(lambda self: self.sends)
    @rule(data=st.data())
    def release_send(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sends)))
        self.engine.release_send(key)
        self.engine.release_send(key)
        self.sends.remove(key)

    @rule()
    def clients_stall(self) -> None:
        self.clock.advance(2.0)

    # -- host memory -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.copier.waiting)
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def copy_ends(self, data: st.DataObject, fails: bool) -> None:
        index = data.draw(st.integers(0, len(self.copier.waiting) - 1))
        self.copier.finish(index, error=OSError("no memory") if fails else None)

    @precondition(lambda self: self.plan is None and self.live)
    @rule()
    def steps_until_a_copy(self) -> None:
        """Or until nothing can run."""
        for _ in range(40):
            if self.copier.waiting:
                return
            self.schedule()
            if self.plan is None:
                return
            self.execute()
            self.apply()
            self.integrity()

    @precondition(lambda self: any(not copy.cancelled for copy in self.copier.waiting))
    @rule(data=st.data())
    def abort_during_a_copy(self, data: st.DataObject) -> None:
        copy = data.draw(st.sampled_from([copy for copy in self.copier.waiting if not copy.cancelled]))
        assert self.engine.abort(copy.key)
        del self.live[copy.key]
        assert copy.cancelled

    # -- tickets -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.tickets) < 4)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        spec = self._spec(data)
        owner, known = spec.key.request_id, len(spec.known_tokens)
        before = self.engine.load().free_blocks
        ticket = self.engine.reserve(owner, spec)
        if ticket is None:
            assert self.engine.load().free_blocks == before
            return
        assert len(ticket.blocks) == self.runner.geometry.blocks_for(known + 1)
        assert ticket.prefix_tokens < known
        assert ticket.prefix_tokens % self.runner.geometry.block_size == 0
        self.tickets[owner] = (spec, ticket)

    @precondition(lambda self: len(self.tickets) > bool(not self.revoked))  # the last one only if it was asked back
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tickets)))
        spec, ticket = self.tickets.pop(owner)
        first = prefill_and_transfer(
            self.source, self.source_runner, self.runner, spec, ticket.blocks, ticket.prefix_tokens
        )
        self.engine.commit_ticket(owner, spec, first, exact=data.draw(st.booleans(), label="exact"))
        self._expect(spec, SequenceKind.GENERATE, committed=True)

    @precondition(lambda self: len(self.tickets) > 2)
    @rule(data=st.data())
    def release_ticket(self, data: st.DataObject) -> None:
        self._release_ticket(data.draw(st.sampled_from(sorted(self.tickets))))

    @precondition(lambda self: self.revoked)
    @rule()
    def give_in_to_pressure(self) -> None:
        self._release_ticket(self.revoked.pop(0))

    def _release_ticket(self, owner: str) -> None:
        self.tickets.pop(owner, None)
        self.engine.release_ticket(owner)
        self.engine.release_ticket(owner)

    # -- steps -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        self.plan = self.engine.schedule()
        if self.plan is None:
            return
        chunks = self.plan.chunks
        counts = [chunk.token_end - chunk.token_start for chunk in chunks]
        assert sum(counts) <= self.budget
        assert len({chunk.key for chunk in chunks}) == len(chunks) <= self.max_num_seqs
        assert all(count <= self.chunk for count in counts)
        moving = {copy.key for copy in self.copier.waiting}
        for chunk in chunks:
            assert chunk.key not in moving, "a sequence ran while its KV was being copied"
            expected = self.live[chunk.key]
            assert expected.credit > expected.echo_pending, "a sequence ran without credit"
            known = len(expected.spec.known_tokens)
            assert chunk.token_end <= known + len(expected.got) + expected.echo_pending
            assert chunk.is_prompt == (chunk.token_start < known)
            assert list(chunk.block_ids) == self.engine.block_table(chunk.key)
            if expected.first_chunk_at is None:
                expected.first_chunk_at = chunk.token_start
                assert expected.committed or chunk.token_start % self.runner.geometry.block_size == 0

    @precondition(lambda self: self.plan is None)
    @rule(steps=st.integers(1, 16))
    def whole_steps(self, steps: int) -> None:
        """Steps without a pause; a copy ends when nothing else can go on, so that more come to be under way."""
        for _ in range(steps):
            self.schedule()
            if self.plan is None:
                if not self.copier.waiting:
                    return
                self.copier.finish()
                self.integrity()
                continue
            self.execute()
            self.apply()
            self.integrity()

    @precondition(lambda self: self.plan is not None and self.output is None)
    @rule()
    def execute(self) -> None:
        assert self.plan is not None
        self.output = self.engine.execute(self.plan)

    @precondition(lambda self: self.output is not None)
    @rule()
    def apply(self) -> None:
        assert self.plan is not None
        assert self.output is not None
        result = self.engine.apply(self.plan, self.output)
        self.plan = self.output = None
        self.reported += len(result.tokens)
        assert not result.rejected
        prefilled = []
        for token in result.tokens:
            expected = self.live[token.key]  # an aborted request must not report
            if not expected.got and not expected.committed:
                assert expected.first_chunk_at is not None
                prefilled.append((token.key, min(expected.first_chunk_at, len(expected.spec.prompt))))
            assert token.index == len(expected.spec.delivered) + len(expected.got)
            expected.got.append(token.token_id)
            expected.credit -= 1
            assert expected.credit >= 0, "more was reported than the window allows"
            assert expected.got == expected.tokens[: len(expected.got)]
            if len(expected.got) == len(expected.tokens):
                assert token.finish is expected.reason
                del self.live[token.key]
            else:
                assert token.finish is None
        assert [(stats.key, stats.cached_tokens) for stats in result.prefilled] == prefilled

    @invariant()
    def integrity(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        load = self.engine.load()
        size = self.runner.geometry.block_size
        owned = sum(len(ticket.blocks) - ticket.prefix_tokens // size for _, ticket in self.tickets.values())
        assert load.reserved_blocks == owned
        for added, name in self.engine.cache_events(self.heard).events:
            (self.cached.add if added else self.cached.remove)(name)
            self.heard += 1
        assert self.cached == set(self.engine.cached_names()[0])
        assert load.cached_blocks == len(self.cached)
        assert load.preemptions <= self.reported + self.count, "preempted again without a new token"
        over = sum(e.echo_pending and len(e.tokens) == 1 for e in self.live.values())  # only its news is left
        assert load.waiting + load.running + load.paused == len(self.live) - over

    def teardown(self) -> None:
        """With credit flowing and tickets and sends released, everything ends in bounded time and nothing is left."""
        if not hasattr(self, "engine"):
            return
        if self.plan is not None:
            if self.output is None:
                self.execute()
            self.apply()
        bound = 20 + len(self.live) * sum(
            len(e.spec.known_tokens) + e.spec.params.max_tokens + 2 for e in self.live.values()
        )
        for _ in range(bound):
            self.revoked.clear()
            for owner in list(self.tickets):
                self._release_ticket(owner)
            for key in self.live:
                self._credit(key, 6)
            for key in self.sends - self.live.keys():
                self.engine.release_send(key)
            if not self.engine.has_work():
                break
            moving = bool(self.copier.waiting)
            self.clock.advance(CLAIM_S)  # nobody comes for what was claimed
            self.copier.finish_all()
            self.schedule()
            if self.plan is None:
                assert moving or self.copier.waiting, f"nothing can run: {self.engine.load()}"
                continue
            self.execute()
            self.apply()
            self.engine.check_integrity()
        assert not self.live, f"starved: {self.live}"
        for key in self.sends:
            self.engine.release_send(key)
        self.copier.finish_all()  # of aborted ones
        load = self.engine.load()
        assert load.free_blocks == load.total_blocks
        assert (load.swapped, load.swap_used_bytes) == (0, 0)
        assert (load.waiting, load.running, load.paused, load.open_tickets, load.open_sends) == (0, 0, 0, 0, 0)
        self.engine.check_integrity()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
