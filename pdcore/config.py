"""Configuration as the parts of pdserve see it: frozen dataclasses with checked values.

`cluster.config` builds these from YAML and flags; tests and benchmarks build them directly. Every
check raises `ConfigError` naming the key, the value and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdcore.classes import OTHERS, ClassObjectives, TenantLimits
from pdcore.costs import AUTO
from pdcore.errors import ConfigError
from pdcore.faults import FAULT_POINTS, FaultPlan
from pdcore.security import InternalSecurity, PublicTls, check_listen
from pdcore.types import DTYPE_BYTES, PriorityClass, Role

LOSSLESS_CODECS = ("raw", "zstd", "bexp-zstd", "bexp3")
LOSSY_CODECS = ("q8", "q8-zstd", "k6v4", "k4v4", "tc4", "fp8")
CODECS = LOSSLESS_CODECS + LOSSY_CODECS
CODEC_DTYPES = {
    "bexp-zstd": ("bfloat16", "float16"),
    "bexp3": ("bfloat16",),
    "k6v4": ("bfloat16", "float16"),
    "k4v4": ("bfloat16", "float16"),
    "tc4": ("bfloat16", "float16"),
}
"""Cache dtypes that a codec can pack, if not all."""
CODEC_CHOICES = (AUTO, *CODECS)
"""What `kv_codec` may be, of a request, a class or the cluster; a worker may lack some of them."""
TRANSPORTS = ("grpc", "shm", "collective", "nixl")
PLAINTEXT_TRANSPORTS = ("collective", "nixl")
"""Those that have no encryption of their own and do not stay in one machine's memory."""
TRANSPORT_CHOICES = (AUTO, *TRANSPORTS)
"""What `transfer.transport` may be; a worker may lack some of them, and a pair of workers others."""
KV_CONVERSIONS = ("exact", "rounding")
"""How KV of another dtype than the cache's may be taken: see `convertible`."""
QUEUE_POLICIES = ("fcfs", "sjf", "fair", "priority", "static")
"""Orders of waiting requests; `pdcore.queueing` describes them."""
SHARING = ("fair", "priority")
"""Those under which tenants share by weight: all together, or within a class."""
MAX_CREDIT_BYTES = 1 << 30
"""Of `transfer.credit_bytes`: each pair of workers sets as much memory aside."""
ROUTING_POLICIES = ("cost", "least_loaded", "power_of_two", "prefix_affinity", "round_robin")
"""Ways to choose among workers; `router.ranking` describes them."""
DISAGGREGATE_CHOICES = (AUTO, "always")
"""What `router.disaggregate` may be; `router.policy` describes them."""
LOG_LEVELS = ("debug", "info", "warning", "error")
TOOL_CALL_PARSERS = (
    AUTO,
    "hermes",
    "llama3_json",
    "mistral",
    "mistral_v11",
    "pythonic",
    "qwen3_coder",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "granite",
)
"""What `router.tool_call_parser` may be; `router.tools.formats` describes them."""
BLOCK_SIZES = (8, 16, 32, 64)
DEVICES = ("cpu",)
MODEL_IMPLS = ("auto", "native", "transformers")
PREEMPT_BY_SWAP = "swap"
PREEMPT_BY_RECOMPUTE = "recompute"
PREEMPTION_MODES = (AUTO, PREEMPT_BY_SWAP, PREEMPT_BY_RECOMPUTE)
"""What `engine.preemption` may be."""


def convertible(source: str, target: str, allowed: str) -> bool:
    """A cache of dtype `target` may take KV of dtype `source`; `allowed` is one of `KV_CONVERSIONS`.

    Exact is what changes no number: every bfloat16 and every float16 is a float32 as well.
    """
    return target in (source, "float32") or allowed == "rounding"


def _require(condition: bool, key: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(key, value, allowed)


@dataclass(frozen=True, slots=True)
class TenantWeight:
    """A tenant's share under the queue policies of `SHARING`, relative to the others. The entry `OTHERS` is that of
    each one without an entry, which is 1 if there is none."""

    tenant: str
    weight: float


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """In which order waiting requests are served, in the router and in each worker; see `pdcore.queueing`.

    Attributes:
        policy: one of `QUEUE_POLICIES`.
        sjf_age_tokens: `sjf`: each later arrival makes a waiting prompt count as so many tokens shorter.
        batch_share: `priority`: of the requests started while batch ones wait, at least this share is of them; of
            the running ones, this share is not made to give way. 0 leaves nothing to batch.
        tenant_weights: `fair`, `priority`: weights of tenants (`router.tenants` in the configuration).
    """

    policy: str = "priority"
    sjf_age_tokens: int = 32
    batch_share: float = 0.1
    tenant_weights: tuple[TenantWeight, ...] = ()

    def __post_init__(self) -> None:
        _require(self.policy in QUEUE_POLICIES, "queue.policy", self.policy, ", ".join(QUEUE_POLICIES))
        _require(self.sjf_age_tokens >= 1, "queue.sjf_age_tokens", self.sjf_age_tokens, "an integer >= 1")
        _require(0 <= self.batch_share <= 0.5, "queue.batch_share", self.batch_share, "a number in [0, 0.5]")
        for entry in self.tenant_weights:
            _require(entry.weight > 0, f"router.tenants.{entry.tenant}.weight", entry.weight, "a number > 0")
            shares = self.policy in SHARING or entry.weight == 1
            only = f"1, unless queue.policy is {' or '.join(SHARING)}: no other policy shares by weight"
            _require(shares, f"router.tenants.{entry.tenant}.weight", entry.weight, only)

    def weight(self, tenant: str) -> float:
        """The tenant's weight."""
        weights = {entry.tenant: entry.weight for entry in self.tenant_weights}
        return weights.get(tenant, weights.get(OTHERS, 1.0))


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How steps are composed.

    Attributes:
        max_num_batched_tokens: token budget of one step.
        max_num_seqs: sequences in one step at most.
        prefill_chunk_tokens: prompt tokens of one sequence in one step at most.
        local_prefill_tokens: prompt tokens that a decode worker offers to compute beside its decodes, when it holds
            the beginning of the prompt; 0 is never.
        max_partial_prefills: prompts that may be computed in part at once; others wait without blocks, unless they
            fit into a step as a whole. 0 is any number.
        long_prefill_tokens: prompts that lack more tokens than this are long, and leave one of the
            `max_partial_prefills` to others (if there are two or more). 0: none is long.
        target_itl_ms: prompts get as many tokens of a step as keep the time between two tokens of the running
            decodes within this, by the measured step times; 0 is no limit.
        queue: in which order waiting requests are admitted.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    prefill_chunk_tokens: int = 512
    local_prefill_tokens: int = 64
    max_partial_prefills: int = 0
    long_prefill_tokens: int = 0
    target_itl_ms: float = 0.0
    queue: QueueConfig = field(default_factory=QueueConfig)

    def __post_init__(self) -> None:
        for key in ("max_partial_prefills", "long_prefill_tokens"):
            _require(getattr(self, key) >= 0, f"scheduler.{key}", getattr(self, key), "an integer >= 0")
        _require(self.target_itl_ms >= 0, "scheduler.target_itl_ms", self.target_itl_ms, "a number >= 0")
        for key in ("max_num_batched_tokens", "max_num_seqs", "prefill_chunk_tokens"):
            _require(getattr(self, key) >= 1, f"scheduler.{key}", getattr(self, key), "an integer >= 1")
        _require(
            self.local_prefill_tokens >= 0,
            "scheduler.local_prefill_tokens",
            self.local_prefill_tokens,
            "an integer >= 0",
        )
        _require(
            self.max_num_seqs <= self.max_num_batched_tokens,
            "scheduler.max_num_seqs",
            self.max_num_seqs,
            f"at most max_num_batched_tokens ({self.max_num_batched_tokens})",
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: its model, its KV pool and its scheduler.

    Attributes:
        model_path: a local Hugging Face folder (`engine.model_store` makes one of every other source).
        served_name: the name under which clients know the model.
        device: where the model runs. dtype: weights, compute and cache.
        block_size: tokens per KV block. num_blocks: blocks in the pool.
        max_model_len: prompt and output tokens of one sequence; None takes the model's own limit.
        threads: intra-op threads of the engine; 0 leaves torch's default.
        cpu_affinity: cores of the engine's threads; empty leaves them free.
        prefix_cache: whether full blocks are kept for prompts that begin alike, as long as memory is not wanted.
        model_impl: ``native`` takes this project's implementation, ``transformers`` that library's modelling code
            with this project's paged attention, ``auto`` the native one where there is one for the model.
        swap_memory: bytes of host memory for the KV of preempted sequences; 0 is none. Taken as it is used.
        preemption: what becomes of that KV: ``swap`` copies it to host memory as long as there is room, ``recompute``
            drops it, ``auto`` does what costs less.
    """

    model_path: str
    served_name: str
    device: str = "cpu"
    dtype: str = "bfloat16"
    block_size: int = 16
    num_blocks: int = 2048
    max_model_len: int | None = None
    threads: int = 0
    cpu_affinity: tuple[int, ...] = ()
    prefix_cache: bool = True
    swap_memory: int = 0
    preemption: str = AUTO
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    model_impl: str = "auto"

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPE_BYTES, "engine.dtype", self.dtype, ", ".join(DTYPE_BYTES))
        _require(self.device in DEVICES, "engine.device", self.device, ", ".join(DEVICES))
        _require(self.model_impl in MODEL_IMPLS, "engine.model_impl", self.model_impl, ", ".join(MODEL_IMPLS))
        _require(self.block_size in BLOCK_SIZES, "engine.block_size", self.block_size, str(BLOCK_SIZES))
        _require(self.num_blocks >= 1, "engine.num_blocks", self.num_blocks, "an integer >= 1")
        _require(self.threads >= 0, "engine.threads", self.threads, "an integer >= 0")
        _require(
            self.max_model_len is None or self.max_model_len >= 1,
            "engine.max_model_len",
            self.max_model_len,
            "an integer >= 1, or nothing",
        )
        _require(
            self.preemption in PREEMPTION_MODES, "engine.preemption", self.preemption, ", ".join(PREEMPTION_MODES)
        )
        _require(self.swap_memory >= 0, "engine.swap_memory", self.swap_memory, "an integer >= 0")
        # An option that would do nothing.
        _require(
            not (self.swap_memory and self.preemption == PREEMPT_BY_RECOMPUTE),
            "engine.swap_memory",
            self.swap_memory,
            "0 while preemption is recompute",
        )
        _require(
            bool(self.swap_memory) or self.preemption != PREEMPT_BY_SWAP,
            "engine.preemption",
            self.preemption,
            "auto or recompute while swap_memory is 0",
        )


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """KV transfer, both sides.

    Attributes:
        codec: codec of the requests that ask for none, if the ticket accepts it; ``auto`` takes whichever lossless
            one is fastest.
        calibration: file that `pdserve calibrate` made for the model; a worker without it lacks the codec `tc4`.
        transport: how frames travel, where both ends can; ``auto`` takes shared memory on one host, a process group
            between two GPUs, else gRPC. What fails gives way to the next best, gRPC last.
        interface: network interface, or address of one, that process groups bind to; empty is loopback.
        max_pairs: process groups that a worker is in at most; idle ones make room for new ones.
        message_bytes: size of one transport message's payload, about.
        frame_tokens: tokens per frame at most (<= 256).
        frame_bytes: raw bytes of a frame, about, at most: layers are grouped until it has them. Less on a slow link.
        credit_bytes: unacknowledged frame bytes per connection at most; bounds the receiver's memory.
        lease_s: seconds without renewal until a ticket expires.
        send_timeout_s: seconds without progress until a send fails.
        max_reserved_fraction: share of the KV pool that uncommitted tickets may hold.
        max_frame_retries: how often one frame is sent again before the transfer fails.
        kv_conversion: KV in another type than this cache's, of a prefill worker with another dtype: ``exact`` takes
            it where its numbers stay as they are (bfloat16 or float16 to float32), ``rounding`` in any case.
        receive_threads: threads that decode and scatter. cpu_affinity: their cores; empty leaves them free.
        allow_plaintext_kv: where the cluster's hops are encrypted, KV may go by `PLAINTEXT_TRANSPORTS` all the same.
    """

    codec: str = AUTO
    calibration: str = ""
    transport: str = AUTO
    interface: str = ""
    max_pairs: int = 64
    message_bytes: int = 512 * 1024
    frame_tokens: int = 256
    frame_bytes: int = 512 * 1024
    credit_bytes: int = 8 * 1024 * 1024
    lease_s: float = 10.0
    send_timeout_s: float = 5.0
    max_reserved_fraction: float = 0.5
    max_frame_retries: int = 2
    kv_conversion: str = "exact"
    receive_threads: int = 1
    cpu_affinity: tuple[int, ...] = ()
    allow_plaintext_kv: bool = False

    def __post_init__(self) -> None:
        _require(self.codec in CODEC_CHOICES, "transfer.codec", self.codec, ", ".join(CODEC_CHOICES))
        _require(
            self.codec != "tc4" or bool(self.calibration),
            "transfer.calibration",
            self.calibration,
            "a file made by `pdserve calibrate`, which transfer.codec tc4 needs",
        )
        _require(
            self.transport in TRANSPORT_CHOICES, "transfer.transport", self.transport, ", ".join(TRANSPORT_CHOICES)
        )
        _require(self.max_pairs >= 1, "transfer.max_pairs", self.max_pairs, "an integer >= 1")
        _require(
            4096 <= self.message_bytes <= 8 << 20,
            "transfer.message_bytes",
            self.message_bytes,
            "4096 to 8388608",
        )
        _require(1 <= self.frame_tokens <= 256, "transfer.frame_tokens", self.frame_tokens, "1 to 256")
        _require(self.frame_bytes >= 1, "transfer.frame_bytes", self.frame_bytes, "an integer >= 1")
        _require(
            2 * self.message_bytes <= self.credit_bytes <= MAX_CREDIT_BYTES,
            "transfer.credit_bytes",
            self.credit_bytes,
            f"twice message_bytes to {MAX_CREDIT_BYTES}",
        )
        _require(self.lease_s > 0, "transfer.lease_s", self.lease_s, "a number > 0")
        _require(self.send_timeout_s > 0, "transfer.send_timeout_s", self.send_timeout_s, "a number > 0")
        _require(
            0 < self.max_reserved_fraction <= 1,
            "transfer.max_reserved_fraction",
            self.max_reserved_fraction,
            "a number in (0, 1]",
        )
        _require(self.max_frame_retries >= 0, "transfer.max_frame_retries", self.max_frame_retries, "an integer >= 0")
        _require(
            self.kv_conversion in KV_CONVERSIONS,
            "transfer.kv_conversion",
            self.kv_conversion,
            ", ".join(KV_CONVERSIONS),
        )
        _require(self.receive_threads >= 1, "transfer.receive_threads", self.receive_threads, "an integer >= 1")

    @property
    def lane_timeout_s(self) -> float:
        """How long a way for frames may stay silent until they are sent another way: in time to save their send."""
        return self.send_timeout_s / 2


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker process.

    Attributes:
        worker_id: name within the cluster, e.g. ``decode-0``; survives restarts.
        role: what it does.
        host: address to listen on and to announce. port: 0 picks a free one.
        controller: ``host:port`` of the membership service; empty for a worker that is addressed directly.
        heartbeat_s: seconds between heartbeats. dead_after_s: silence that counts as death.
        drain_timeout_s: seconds that a draining worker waits for its requests.
        faults: fault plans, for tests; empty in production.
        security: of the hops inside the cluster.
    """

    worker_id: str
    role: Role
    engine: EngineConfig
    transfer: TransferConfig = field(default_factory=TransferConfig)
    host: str = "127.0.0.1"
    port: int = 0
    controller: str = ""
    heartbeat_s: float = 0.5
    dead_after_s: float = 3.0
    drain_timeout_s: float = 30.0
    faults: tuple[FaultPlan, ...] = ()
    security: InternalSecurity = field(default_factory=InternalSecurity)

    def __post_init__(self) -> None:
        _require(bool(self.worker_id), "worker.worker_id", self.worker_id, "a non-empty name")
        _require(0 <= self.port < 65536, "worker.port", self.port, "0 to 65535")
        _require(self.heartbeat_s > 0, "worker.heartbeat_s", self.heartbeat_s, "a number > 0")
        _require(
            self.dead_after_s >= 2 * self.heartbeat_s,
            "worker.dead_after_s",
            self.dead_after_s,
            "at least twice heartbeat_s",
        )
        _require(self.drain_timeout_s >= 0, "worker.drain_timeout_s", self.drain_timeout_s, "a number >= 0")
        _require(
            self.role is not Role.PREFILL or self.engine.swap_memory == 0,
            "engine.swap_memory",
            self.engine.swap_memory,
            "0 on a prefill worker, whose sequences never give way",
        )
        for plan in self.faults:
            _require(plan.point in FAULT_POINTS, "worker.faults", plan.point, ", ".join(FAULT_POINTS))
        check_internal_listen("worker.host", self.host, self.security)
        _require(
            not self.encrypted_kv or self.transfer.transport not in PLAINTEXT_TRANSPORTS,
            "transfer.transport",
            self.transfer.transport,
            "auto, grpc or shm with TLS inside the cluster, which this one knows nothing of; "
            "transfer.allow_plaintext_kv: true lets KV travel unencrypted",
        )

    @property
    def encrypted_kv(self) -> bool:
        """KV may leave the machine encrypted only."""
        return self.security.tls is not None and not self.transfer.allow_plaintext_kv


def check_internal_listen(key: str, host: str, security: InternalSecurity) -> None:
    """Raises ConfigError if a worker or the controller must not listen on `host`, which the key says."""
    check_listen(
        key,
        host,
        encrypted=security.tls is not None,
        allowed=security.allow_insecure_listen,
        flag="ray.allow_insecure_listen",
        tls="tls.internal",
    )


@dataclass(frozen=True, slots=True)
class KvCodecByClass:
    """Codec of the KV transfers of each class of requests; empty leaves it to the prefill worker's setting."""

    interactive: str = ""
    standard: str = ""
    batch: str = ""

    def __post_init__(self) -> None:
        for name in ("interactive", "standard", "batch"):
            codec = getattr(self, name)
            allowed = f"nothing, or one of {', '.join(CODEC_CHOICES)}"
            _require(codec in ("", *CODEC_CHOICES), f"router.kv_codec_by_class.{name}", codec, allowed)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One router.

    Attributes:
        router_id: name within the cluster.
        model_path: folder with tokenizer, config and generation config of the served model.
        served_name: the model's name for clients.
        host, grpc_port: public address; port 0 picks a free one.
        http_port: of the HTTP interface on the same host; 0 picks a free one, -1 is none.
        controller: ``host:port`` of the membership service.
        max_queue: requests of a class waiting for a worker at most, unless the class says otherwise; more are shed.
        classes: what is promised to each class. tenants: what each may ask of this router.
        api_keys_file: says whose key is whose (`router.api_keys`); empty: tenants are who they say they are.
        token_window: tokens per request on their way to a client that has not taken them.
        max_queued_prefill_tokens: prompt tokens that one worker may hold queued, its longest prompt not counted;
            0 for what the worker computes in two steps.
        max_running_per_worker: requests on one decode worker at most.
        max_replays: how often a request is run again after worker deaths.
        replay_share, replays_per_s: replays of all requests together, as a share of what starts, and without that.
        breaker_failures: in a row on a worker, until it gets nothing for a while that another one can take.
        client_stall_timeout_s: seconds without the client taking a token until it is cancelled.
        worker_wait_s: seconds that requests wait while there is no worker that could take them; a restart takes as
            long as loading the model.
        heartbeat_s, dead_after_s: as for workers.
        max_message_bytes: gRPC message limit, both ways; and of the body of an HTTP request.
        drain_timeout_s: seconds that running requests get after SIGTERM.
        kv_codec_by_class: codecs of the requests that ask for none.
        queue: in which order waiting requests are started. policy: which workers they are started on.
        disaggregate: whether requests run on two workers wherever both pools serve, or only where that is better.
        claim_ttl_s: seconds without a word to the controller after which a claimed idempotency key is free again.
        tool_call_parser: the format in which the served model calls tools.
        chat_template: path of a Jinja file, or a template, in place of the model's own; empty: the latter.
        default_max_tokens: of a request that names none; 0: as many as the context has room for; None: what the
            model's generation config says, or 256.
        security: of the hops inside the cluster. tls: of the public end; None: plain text.
        allow_insecure_listen: listen in plain text on other addresses than loopback, if told to.
        max_prompt_bytes: of a request's text, or of its token ids at four bytes each.
        max_metadata_bytes: of one call's headers.
        max_streams_per_connection, max_connections, max_calls: of gRPC, at one time; calls beyond `max_calls` are
            refused, those of a connection beyond its streams wait at the client.
        log_level: debug, info (each request that fails, with its id), warning or error.
        log_prompts: write the prompt of each request to the log, whatever its level is.
    """

    router_id: str
    model_path: str
    served_name: str
    controller: str
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8000
    max_queue: int = 256
    token_window: int = 64
    max_queued_prefill_tokens: int = 0
    max_running_per_worker: int = 64
    max_replays: int = 3
    replay_share: float = 0.2
    replays_per_s: float = 10.0
    breaker_failures: int = 5
    client_stall_timeout_s: float = 120.0
    worker_wait_s: float = 60.0
    heartbeat_s: float = 0.5
    dead_after_s: float = 3.0
    max_message_bytes: int = 16 * 1024 * 1024
    drain_timeout_s: float = 30.0
    kv_codec_by_class: KvCodecByClass = field(default_factory=KvCodecByClass)
    queue: QueueConfig = field(default_factory=QueueConfig)
    policy: str = "cost"
    disaggregate: str = AUTO
    classes: ClassObjectives = field(default_factory=ClassObjectives)
    tenants: tuple[TenantLimits, ...] = ()
    api_keys_file: str = ""
    claim_ttl_s: float = 10.0
    tool_call_parser: str = AUTO
    chat_template: str = ""
    default_max_tokens: int | None = None
    security: InternalSecurity = field(default_factory=InternalSecurity)
    tls: PublicTls | None = None
    allow_insecure_listen: bool = False
    max_prompt_bytes: int = 4 << 20
    max_metadata_bytes: int = 16 << 10
    max_streams_per_connection: int = 1024
    max_connections: int = 4096
    max_calls: int = 16384
    log_level: str = "info"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        allowed = ", ".join(TOOL_CALL_PARSERS)
        _require(
            self.tool_call_parser in TOOL_CALL_PARSERS, "router.tool_call_parser", self.tool_call_parser, allowed
        )
        _require(
            self.default_max_tokens is None or 0 <= self.default_max_tokens < 2**31,
            "router.default_max_tokens",
            self.default_max_tokens,
            "0 to 2147483647, or nothing",
        )
        check_listen(
            "router.host",
            self.host,
            encrypted=self.tls is not None,
            allowed=self.allow_insecure_listen,
            flag="router.allow_insecure_listen",
            tls="tls.public",
        )
        for key in ("max_prompt_bytes", "max_streams_per_connection", "max_connections", "max_calls"):
            _require(getattr(self, key) >= 1, f"router.{key}", getattr(self, key), "an integer >= 1")
        _require(
            1024 <= self.max_metadata_bytes <= 1 << 20,
            "router.max_metadata_bytes",
            self.max_metadata_bytes,
            "1024 to 1048576",
        )
        _require(self.log_level in LOG_LEVELS, "router.log_level", self.log_level, ", ".join(LOG_LEVELS))
        allowed = ", ".join(DISAGGREGATE_CHOICES)
        _require(self.disaggregate in DISAGGREGATE_CHOICES, "router.disaggregate", self.disaggregate, allowed)
        _require(self.policy in ROUTING_POLICIES, "router.policy", self.policy, ", ".join(ROUTING_POLICIES))
        _require(0 <= self.grpc_port < 65536, "router.grpc_port", self.grpc_port, "0 to 65535")
        _require(-1 <= self.http_port < 65536, "router.http_port", self.http_port, "0 to 65535, or -1 for none")
        for key in ("max_queue", "token_window", "max_running_per_worker"):
            _require(getattr(self, key) >= 1, f"router.{key}", getattr(self, key), "an integer >= 1")
        _require(
            self.max_queued_prefill_tokens >= 0,
            "router.max_queued_prefill_tokens",
            self.max_queued_prefill_tokens,
            "an integer >= 0",
        )
        _require(self.max_replays >= 0, "router.max_replays", self.max_replays, "an integer >= 0")
        _require(0 <= self.replay_share <= 1, "router.replay_share", self.replay_share, "0 to 1")
        _require(self.replays_per_s > 0, "router.replays_per_s", self.replays_per_s, "a number > 0")
        _require(self.breaker_failures >= 1, "router.breaker_failures", self.breaker_failures, "an integer >= 1")
        _require(
            self.client_stall_timeout_s > 0,
            "router.client_stall_timeout_s",
            self.client_stall_timeout_s,
            "a number > 0",
        )
        _require(self.worker_wait_s >= 0, "router.worker_wait_s", self.worker_wait_s, "a number >= 0")
        _require(self.heartbeat_s > 0, "router.heartbeat_s", self.heartbeat_s, "a number > 0")
        _require(
            self.dead_after_s >= 2 * self.heartbeat_s,
            "router.dead_after_s",
            self.dead_after_s,
            "at least twice heartbeat_s",
        )
        _require(
            self.max_message_bytes >= 65536, "router.max_message_bytes", self.max_message_bytes, "at least 65536"
        )
        _require(self.drain_timeout_s >= 0, "router.drain_timeout_s", self.drain_timeout_s, "a number >= 0")
        _require(
            self.claim_ttl_s >= 2 * self.dead_after_s,
            "router.claim_ttl_s",
            self.claim_ttl_s,
            f"at least twice dead_after_s ({self.dead_after_s:g}): workers must have let go by then",
        )

    @property
    def max_queue_by_class(self) -> dict[PriorityClass, int]:
        """Requests of each class that may wait."""
        own = {priority: self.classes.of(priority).max_queue for priority in PriorityClass}
        return {priority: self.max_queue if value is None else value for priority, value in own.items()}
