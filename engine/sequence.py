"""One request as an engine runs it: its tokens, how far they are computed, its block table and its credit."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.token_rules import SequenceRules
from pdcore.hashing import block_hashes
from pdcore.types import FinishReason, RequestKey, RequestSpec

if TYPE_CHECKING:  # this module is pure
    from engine.structured import OutputState


class SequenceKind(StrEnum):
    """What the engine does with a sequence."""

    GENERATE = "generate"  # runs until it is finished
    PREFILL = "prefill"  # leaves after its first token; its blocks stay for the send session


class SequenceState(StrEnum):
    """See `Sequence`."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    PAUSED = "paused"
    FINISHED = "finished"
    ABORTED = "aborted"


_LIVE = (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.SWAPPED, SequenceState.PAUSED)


class SwapPhase(StrEnum):
    """Where the KV of a SWAPPED sequence is."""

    OUT = "out"  # being copied to host memory
    HOST = "host"  # there
    IN = "in"  # being copied from there into blocks that it has been given


class Sequence:
    """A sequence: `num_computed` tokens chasing `num_tokens` known ones.

    ::

          add: no blocks                            credit is used up
        -----------------> WAITING --- start ---> RUNNING ---------> PAUSED
          commit: with      ^ ^ ^                | | ^ |               |  |
          the ticket's      | | +---- preempt ---+ | | | +-- credit ---+  |
          blocks            | +------ preempt -----|-|-|------------------+
                            |                      | | |                  |
                            | copy lost            | | +-- last token --> FINISHED
                            |                      v |                    |
                            +----------------- SWAPPED <--- swap out -----+
                                         OUT -> HOST -> IN --- copied in ---> RUNNING (or PAUSED)

        Abort leads from each of WAITING, RUNNING, SWAPPED and PAUSED to ABORTED.

    A preempted sequence keeps its tokens and loses its blocks; what the prefix cache does not keep of them is
    computed again. A SWAPPED one has lost its blocks as well, but its KV is in host memory from block `host_from` on;
    what lies before was in use by others, and is expected in the prefix cache when it comes back. If it is gone then,
    or a copy has failed, the sequence is as one that was preempted. While it is SWAPPED it does not run, and its
    blocks, if a copy is under way, are not its own (see `engine.swap`). Whoever was preempted or swapped while PAUSED
    has no credit and is not admitted before it has some. A sequence that came by commit with a window of one token
    goes to PAUSED at once: its first token used the window.

    Tokens, from the front::

        |<-- prompt -->|<- delivered ->|<---- sampled here ---->|
        |<------ num_known ----------->|                        |
        |<------------------- num_tokens ---------------------->|
        |<------ num_computed: in the cache ------>|<- at least one, the input of a later step

    The sequence of a request with several samples is a *trunk*: all its known tokens are computed, and what is
    sampled then are its branches' first tokens. They go on as sequences of their own, which share its full blocks.

    `num_scored`: prompt tokens from the front whose log-probabilities need not be reported any more; `num_prompt` if
    they were not asked for. Until then it takes nothing from the prefix cache: every token of the prompt is computed.

    `buffer[:num_tokens]` are the tokens. `table[:num_blocks]` is the block table; it equals the block manager's list
    of the owner::

        |<- num_published: found in the prefix cache, or offered to it; not written ->|<- written by later steps ->|
        |<- hashes: names of full blocks, kept over preemptions ->|
    """

    __slots__ = (
        "_block_size",
        "_root",
        "_table_ids",
        "arrival",
        "buffer",
        "cached_tokens",
        "chunks",
        "credit",
        "exact",
        "hashes",
        "hits",
        "host_from",
        "key",
        "kind",
        "last_step",
        "max_blocks",
        "num_blocks",
        "num_computed",
        "num_known",
        "num_prompt",
        "num_published",
        "num_scored",
        "num_tokens",
        "outputs",
        "phase",
        "preempt_until",
        "preempted",
        "queued_at",
        "ran_at",
        "replay_until",
        "rules",
        "send_over",
        "skipped",
        "spec",
        "started_at",
        "state",
        "stop_tokens",
        "table",
        "unwanted",
    )

    def __init__(
        self, spec: RequestSpec, kind: SequenceKind, *, block_size: int, now: float, root: bytes | None = None
    ) -> None:
        """`root`: what the names of its blocks are chained to; None if it takes no part in the prefix cache."""
        known = spec.known_tokens
        total = self.total_tokens(spec, kind)
        assert len(known) < total, (spec.key, len(known), total)
        self.spec = spec
        self.key = spec.key
        self.kind = kind
        self.state = SequenceState.WAITING
        self.num_prompt = len(spec.prompt)
        self.num_known = len(known)
        self.num_tokens = len(known)
        self.num_computed = 0
        self.buffer: NDArray[np.int64] = np.empty(total, np.int64)
        self.buffer[: len(known)] = known
        self.max_blocks = -(-(total - 1) // block_size)  # the last token is never an input, so never in the cache
        # A ticket has room for one token more than the prompt, even if that one turns out to be the last.
        self.table: NDArray[np.int32] = np.zeros(-(-total // block_size), np.int32)
        self.num_blocks = 0
        self._table_ids: tuple[int, ...] = ()
        self._block_size = block_size
        self._root = root
        self.hashes: list[bytes] = []
        self.hits = 0  # blocks from the front that the prefix cache had when it was last asked
        self.num_published = 0
        self.exact = True  # no KV in its blocks came through a codec that changes numbers
        self.cached_tokens = 0  # of the prompt: taken from the prefix cache when it first got blocks
        self.stop_tokens = frozenset(spec.params.stop_token_ids)
        # Where structured outputs stand, for each of `samples`.
        self.outputs: tuple[OutputState | None, ...] = (None,) * len(self.samples)
        self.unwanted: set[RequestKey] = set()  # branches of a trunk that were aborted before there were any
        prompt, output = self.buffer[: self.num_prompt], self.buffer[self.num_prompt : self.num_known]
        self.rules = SequenceRules.of(spec.params, prompt, output, total)
        # Nothing stands before the first token that could make it likely.
        self.num_scored = self.num_prompt if spec.params.prompt_logprobs is None else 1
        self.credit = spec.token_window
        self.skipped = 0  # how many requests got blocks ahead of this one while it did not fit
        self.last_step = 0  # id of the last step it was in
        self.chunks = 0
        self.arrival = 0  # counts the engine's sequences, the oldest first
        self.queued_at = now
        self.started_at = now
        self.ran_at = now  # when its last step began
        self.phase: SwapPhase | None = None  # of a SWAPPED one
        self.host_from = 0  # first block whose KV is in host memory, of a SWAPPED one
        self.preempted = False  # and without a new token since
        self.send_over = False  # PREFILL: the send session ended before the sequence did
        # Computing token t again counts as recomputed after a preemption if t < preempt_until, else by the reason
        # why the KV of an earlier attempt was lost (`lost_by`) if t < replay_until.
        self.preempt_until = 0
        self.replay_until = len(known) if spec.delivered or spec.rebuild or spec.revoked else 0

    @staticmethod
    def total_tokens(spec: RequestSpec, kind: SequenceKind) -> int:
        """Tokens that a sequence of this kind can come to have here."""
        if kind is SequenceKind.PREFILL:
            return len(spec.known_tokens) + 1
        return len(spec.prompt) + spec.params.max_tokens

    @property
    def samples(self) -> tuple[RequestKey, ...]:
        """Who gets the next token: the branches of a trunk, else itself."""
        return self.spec.branch_keys or (self.key,)

    def sample_number(self, draw: int) -> int:
        """Which of its client's samples the `draw`-th of `samples` is."""
        return self.spec.branches[draw].sample if self.spec.branches else self.spec.sample

    @property
    def output(self) -> OutputState | None:
        """Where its structured output stands; None if it is free. Not of a trunk, which has none."""
        return self.outputs[0]

    @property
    def lost_by(self) -> str:
        """How the KV of earlier attempts was lost, if there were any; as in `WorkerLoad.recomputed_tokens`."""
        return "rebuild" if self.spec.rebuild else "revoked" if self.spec.revoked else "replay"

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; at least 1 until it is finished."""
        return self.num_tokens - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens of the request, or tokens lost by a preemption, are still to be computed."""
        return self.num_computed < self.num_known or self.remaining > 1

    @property
    def copying(self) -> bool:
        """Whether its KV is being copied to host memory or back."""
        return self.phase in (SwapPhase.OUT, SwapPhase.IN)

    @property
    def generated(self) -> int:
        """Tokens after the prompt, delivered ones included: the index of the next one."""
        return self.num_tokens - self.num_prompt

    @property
    def may_hit(self) -> int:
        """Blocks from the front that may be taken from the prefix cache: the last token is always computed."""
        if self._root is None or self.num_scored < self.num_prompt:
            return 0
        return (self.num_tokens - 1) // self._block_size

    @property
    def may_publish(self) -> int:
        """Blocks from the front that are full of KV as this model computes it, so that others may use them."""
        return self.num_computed // self._block_size if self._root is not None and self.exact else 0

    def name_blocks(self, count: int) -> list[bytes]:
        """Names of at least its first `count` blocks, whose tokens must be known. Each is computed once."""
        have = len(self.hashes)
        if have < count:
            assert self._root is not None, self.key
            tokens = self.buffer[have * self._block_size : count * self._block_size].tolist()
            parent = self.hashes[-1] if self.hashes else self._root
            self.hashes += block_hashes(parent, tokens, self._block_size)
        return self.hashes

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The block table as a tuple."""
        if len(self._table_ids) != self.num_blocks:
            self._table_ids = tuple(self.table[: self.num_blocks].tolist())
        return self._table_ids

    def take_blocks(self, blocks: Seq[int]) -> None:
        """Append to the block table."""
        end = self.num_blocks + len(blocks)
        self.table[self.num_blocks : end] = blocks
        self.num_blocks = end

    def take_cached(self, blocks: Seq[int]) -> None:
        """Begin with these blocks, which the prefix cache had."""
        assert self.num_blocks == 0, self.key
        self.take_blocks(blocks)
        self.num_computed = len(blocks) * self._block_size
        self.num_published = len(blocks)
        if self.chunks == 0:
            self.cached_tokens = min(self.num_computed, self.num_prompt)

    def start(self, now: float, step_id: int) -> None:
        """It is in step `step_id`."""
        assert self.credit > 0, self.key
        assert self.num_blocks > 0, self.key
        if self.chunks == 0:
            self.started_at = now
        self.ran_at = now
        self.state = SequenceState.RUNNING
        self.skipped = 0
        self.chunks += 1
        self.last_step = step_id

    def branch_off(self, trunk: Sequence) -> None:
        """Be one of the samples of `trunk`, of which all known tokens are computed and which has no more prompt
        tokens to report. Its blocks come from elsewhere, if it gets any: it is as one that lost them until then."""
        self.hashes = list(trunk.hashes)
        self.exact = trunk.exact
        self.num_scored = self.num_prompt
        self.chunks, self.last_step = trunk.chunks, trunk.last_step
        self.queued_at, self.started_at, self.ran_at = trunk.queued_at, trunk.started_at, trunk.ran_at
        self.cached_tokens = trunk.cached_tokens
        self.replay_until, self.preempt_until = 0, trunk.num_computed
        self.preempted = True

    def take_computed(self, blocks: Seq[int], tokens: int, published: int) -> None:
        """Begin with these blocks, which hold the KV of `tokens` tokens; the first `published` of them were offered
        to the prefix cache."""
        assert self.num_blocks == 0, self.key
        self.take_blocks(blocks)
        self.num_computed = tokens
        self.num_published = published
        self.preempt_until = 0
        self.preempted = False

    def preempt(self) -> None:
        """Its blocks are gone, or the copy of them in host memory."""
        assert self.state in _LIVE, self.state
        self.state = SequenceState.WAITING
        self.preempt_until = max(self.preempt_until, self.num_computed)
        self.num_computed = 0
        self.exact = True  # whatever it had, this model computes it now
        self._lose_blocks()

    def swap_out(self, host_from: int) -> None:
        """Its blocks are no longer its own: their KV, from block `host_from` on, is being copied to host memory."""
        assert self.state in _LIVE, self.state
        assert self.num_blocks > 0, self.key
        self.state = SequenceState.SWAPPED
        self.host_from = host_from
        self._lose_blocks()
        self.phase = SwapPhase.OUT

    def swapped_out(self) -> None:
        """Its KV is in host memory."""
        assert self.phase is SwapPhase.OUT, self.phase
        self.phase = SwapPhase.HOST

    def swap_in(self) -> None:
        """Its KV is being copied into blocks that will be its own."""
        assert self.phase is SwapPhase.HOST, self.phase
        self.phase = SwapPhase.IN

    def swapped_in(self, blocks: Seq[int], cached: int) -> None:
        """Its KV is in these blocks, the first `cached` of which are the prefix cache's."""
        assert self.phase is SwapPhase.IN, self.phase
        self.phase = None
        self.state = SequenceState.RUNNING if self.credit > 0 else SequenceState.PAUSED
        self.take_blocks(blocks)
        self.num_published = cached
        self.skipped = 0

    def _lose_blocks(self) -> None:
        self.phase = None
        self.num_blocks = 0
        self.num_published = 0
        self.preempted = True
        self._table_ids = ()

    def abort(self) -> None:
        """It ends without a last token."""
        assert self.state is not SequenceState.FINISHED, self.key
        self.state = SequenceState.ABORTED

    def append(self, token: int) -> FinishReason | None:
        """Take the token that comes next, spend a credit for it, and say whether it is the last."""
        assert self.credit > 0, self.key
        self.buffer[self.num_tokens] = token
        self.num_tokens += 1
        if self.rules is not None:
            self.rules.add(token)
        self.credit -= 1
        self.preempted = False
        reason: FinishReason | None = None
        if token in self.stop_tokens or (self.output is not None and self.output.complete):
            reason = FinishReason.STOP
        elif self.generated >= self.spec.params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None or self.kind is SequenceKind.PREFILL:
            self.state = SequenceState.FINISHED
        elif self.credit == 0 and self.num_blocks > 0:
            self.state = SequenceState.PAUSED
        return reason

    def add_credit(self, tokens: int) -> None:
        """The client took `tokens` tokens. Credit never exceeds the window, whatever is returned."""
        self.credit = min(self.credit + max(tokens, 0), self.spec.token_window)
        if self.state is SequenceState.PAUSED and self.credit > 0:
            self.state = SequenceState.RUNNING

    def recomputed(self, start: int, end: int) -> tuple[int, int]:
        """Of tokens [start, end): (computed again after a preemption, computed again by reason `lost_by`)."""
        preempt = max(0, min(end, self.preempt_until) - start)
        replay = max(0, min(end, self.replay_until) - max(start, self.preempt_until))
        return preempt, replay
