"""The nouns that every part of pdserve shares. Immutable, and free of torch, ray, grpc and protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import NamedTuple

from pdcore.step_time import StepTime
from pdcore.structured import StructuredOutput

PROTOCOL_VERSION = 3
"""Version of the session and KV protocols spoken by this build."""

MAX_SAMPLES = 16
"""Samples of one request, at most."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the supported weight, compute and cache dtypes."""


class Role(StrEnum):
    """What a worker does. An aggregated worker runs both phases itself and is the baseline."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


class PriorityClass(IntEnum):
    """How urgent a request is; the lower goes first where the queue's policy is `priority`."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop token or a stop string
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"  # the client cancelled or went away
    ERROR = "error"  # the request failed; the status carries the reason


class RequestKey(NamedTuple):
    """Identity of one attempt at a request. Anything carrying an older attempt is stale."""

    request_id: str
    attempt: int


class Branch(NamedTuple):
    """One of several samples of a request, as a request of its own: its key, and which of the samples it is."""

    key: RequestKey
    sample: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a worker chooses tokens. Validated by the router at admission.

    Attributes:
        max_tokens: generated tokens at most, delivered ones of earlier attempts included (>= 1).
        temperature: 0 is greedy; else logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this (0 < top_p <= 1).
        min_p: drop tokens less likely than `min_p` times the likeliest (0 <= min_p < 1).
        seed: 64-bit seed of the counter-based generator; always set (the router draws one).
        stop_token_ids: tokens that end the sequence; the router adds the model's end tokens unless
            the client asked to ignore them.
        min_tokens: stop tokens are not sampled before this many tokens are generated.
        structured_output: the form that the output must have; None leaves it free.
        presence_penalty: taken from the logit of every token that has been generated.
        frequency_penalty: taken from it once for each time that it has been generated.
        repetition_penalty: the logit of every token of prompt and output is divided by it if positive, else
            multiplied (> 0; 1 is off).
        logit_bias: (token, what is added to its logit), each token once.
        allowed_token_ids: only these are sampled; empty allows all.
        bad_words: token sequences that never come to stand in prompt and output by a sampled token.
        logprobs: report log-probabilities of the sampled token and of the this many likeliest; None is off.
        prompt_logprobs: the same for each prompt token but the first, given those before it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    structured_output: StructuredOutput | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """All that a worker needs to run a request, or to run it again elsewhere.

    Attributes:
        key: request id and attempt.
        prompt: token ids of the prompt (at least one).
        params: sampling parameters.
        delivered: tokens that the client already has, from earlier attempts; they are forced, never
            sampled again. The first token that a worker reports has index ``len(delivered)``.
        token_window: how many tokens may be reported before the router returns credit.
        cache_salt: requests share cached KV only with those of the same salt.
        kv_codec: codec of its KV transfer, or ``auto``; empty for the prefill worker's setting.
        rebuild: its KV was computed elsewhere before, and the transfer failed.
        tenant: who it is for; the queue policy `fair` shares out among tenants.
        priority: how urgent it is; the queue policy `priority` goes by it.
        sample: which of its client's samples this is; it makes the random draws differ.
        branches: this is the trunk of several samples: its prompt is computed, and sent, once. In the place of a
            first token of its own it has one for each of these, which go on from there as requests of their own
            (`samples`). Empty for a request with one sample; nothing is delivered of a trunk.
        revoked: its KV was computed elsewhere before, and the ticket for it was taken back for want of memory.
    """

    key: RequestKey
    prompt: tuple[int, ...]
    params: SamplingParams
    delivered: tuple[int, ...] = ()
    token_window: int = 64
    cache_salt: str = ""
    kv_codec: str = ""
    rebuild: bool = False
    tenant: str = ""
    priority: PriorityClass = PriorityClass.STANDARD
    sample: int = 0
    branches: tuple[Branch, ...] = ()
    revoked: bool = False

    @property
    def samples(self) -> tuple[RequestSpec, ...]:
        """The requests that get the first tokens: its branches, or itself if there are none."""
        if not self.branches:
            return (self,)
        params = replace(self.params, prompt_logprobs=None)  # the trunk's business
        return tuple(
            replace(self, key=branch.key, params=params, sample=branch.sample, branches=())
            for branch in self.branches
        )

    @property
    def branch_keys(self) -> tuple[RequestKey, ...]:
        """Of its branches."""
        return tuple(branch.key for branch in self.branches)

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """Prompt followed by the delivered tokens: what must be computed before a new one is sampled."""
        return self.prompt + self.delivered


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of a KV cache and identity of the model that filled it.

    Two workers can exchange KV only if `model_digest`, `num_layers` and `head_dim` are equal, they have heads in
    common, and the receiver can convert from the sender's `dtype`.

    Attributes:
        model_digest: hex digest of weights identity, architecture and rope parameters. The weights are those that are
            computed with, a merged adapter's among them.
        num_layers, num_kv_heads, head_dim: shape of one token's KV in this cache.
        dtype: element type of the cache, a key of `DTYPE_BYTES`.
        block_size: tokens per block. Local to a worker; token ranges are authoritative on the wire.
        num_blocks: blocks in this worker's pool.
        head_start: the model's KV head that is this cache's first: 0 but for ranks of a tensor-parallel worker.
    """

    model_digest: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    num_blocks: int
    head_start: int = 0

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers, in bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """Where the frames of one range of heads go.

    Attributes:
        address: ``host:port`` of the receiver. transport: what is spoken there.
        head_start, head_count: heads of the model that it accepts.
        ticket_id: slot number in the receiver's ticket table; reused.
        generation: distinguishes successive uses of `ticket_id`; stale ones are refused.
        worker_incarnation: of the receiver; a restarted one refuses older tickets.
    """

    address: str
    transport: str
    head_start: int
    head_count: int
    ticket_id: int
    generation: int
    worker_incarnation: str


@dataclass(frozen=True, slots=True)
class KvTicket:
    """A decode worker's promise to take the KV of one request.

    Attributes:
        num_tokens: tokens of KV expected, counted from the start of the sequence.
        prefix_tokens: tokens that the decode worker already holds; only the rest is sent.
        lease_s: seconds, on the decode worker's clock, without a renewal until the ticket expires.
        codecs: accepted codec names, preferred first.
        endpoints: one for each range of heads: one in all, unless the decode worker is tensor-parallel.
        run_here: so little is missing that the decode worker would rather compute it than have it sent: it asks for
            `generate` in the ticket's place (after an abort of the ticket). The ticket is good all the same.
    """

    num_tokens: int
    prefix_tokens: int
    lease_s: float
    codecs: tuple[str, ...]
    endpoints: tuple[KvEndpoint, ...]
    run_here: bool = False


@dataclass(frozen=True, slots=True)
class KvTransferStats:
    """One transfer as the receiver counted it.

    Attributes:
        blocks: blocks of the decode worker that were filled; held prefixes are not among them.
        raw_bytes: KV bytes after decoding.
        wire_bytes: frame bytes received, headers and repeats included.
        codec: codec of most frames' bytes. transport: how they came.
        seconds: from the first frame's first byte to the commit.
        frames: frames scattered. retries: frames that came more than once.
        lossless: every bit of the KV is as the sender had it, whatever codecs it came through.
        codec_reason: why the sender chose its codec, for people.
    """

    blocks: int
    raw_bytes: int
    wire_bytes: int
    codec: str
    transport: str
    seconds: float
    frames: int = 0
    retries: int = 0
    lossless: bool = True
    codec_reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's pushed load. Counters grow from the worker's start.

    Attributes:
        step: engine steps done.
        waiting, running, paused: sequences by state; swapped ones are among the waiting, or the paused if they lack
            credit too.
        queued_prefill_tokens: prompt tokens admitted and not yet computed.
        free_blocks, total_blocks, reserved_blocks: KV pool; free are those that can be given away, cached ones that
            nobody uses included; reserved are allocated to uncommitted tickets.
        open_tickets, open_sends: transfers under way.
        preemptions: sequences preempted.
        recomputed_tokens: tokens computed again, by reason: ``preempt``, ``rebuild`` (a transfer failed), ``revoked``
            (a ticket was taken back for want of memory), ``replay`` (another worker failed).
        transfers: what became of KV transfers, by event. What went wrong: ``frames_retried``, ``lanes_failed``,
            ``frames_moved`` to another transport, ``sends_failed``, ``frames_rejected``, ``tickets_failed``. A
            prefill worker adds what each transport did: ``grpc_frames``, ``grpc_bytes``, and ``shm_opened`` and
            ``shm_downgrades`` for those that are opened beside the stream; and each codec: ``codec_bexp3_raw_bytes``
            and what they became, ``codec_bexp3_wire_bytes``.
        step_ms: mean duration of the recent steps.
        progress: grows while the engine's loop lives, within a long step too; a worker with work and without
            progress is stuck.
        cached_blocks: blocks in the prefix cache, used or not. cached_tokens: prompt tokens that were not computed
            because it had them.
        step_time: what its steps are expected to take; see `pdcore.step_time`.
        yielding_requests: batch requests that would give way to interactive ones. yielding_blocks: what that frees.
        stalled_requests: of the paused ones, those whose clients have taken nothing for a while: they take no part in
            steps, and their memory is for others. stalled_blocks: what that would free.
        swapped: preempted sequences whose KV is in host memory, or on its way there or back.
        swaps_out, swaps_in: copies to host memory, and back, that have ended well.
        swap_used_bytes: host memory set aside for them now.
    """

    step: int = 0
    waiting: int = 0
    running: int = 0
    paused: int = 0
    queued_prefill_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    reserved_blocks: int = 0
    open_tickets: int = 0
    open_sends: int = 0
    preemptions: int = 0
    recomputed_tokens: dict[str, int] = field(default_factory=dict)
    step_ms: float = 0.0
    progress: int = 0
    cached_blocks: int = 0
    cached_tokens: int = 0
    swapped: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    swap_used_bytes: int = 0
    transfers: dict[str, int] = field(default_factory=dict)
    step_time: StepTime = field(default_factory=StepTime)
    yielding_requests: int = 0
    yielding_blocks: int = 0
    stalled_requests: int = 0
    stalled_blocks: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a worker says of its model; equal on every worker of a cluster.

    Attributes:
        name: the name under which it is served.
        digest: see `KvGeometry.model_digest`.
        max_model_len: tokens of prompt and output together, at most.
        vocab_size: token ids are in ``[0, vocab_size)``.
        dtype: compute dtype.
    """

    name: str
    digest: str
    max_model_len: int
    vocab_size: int
    dtype: str
