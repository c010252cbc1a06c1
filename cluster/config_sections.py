"""The parts of a cluster's configuration file: each a mapping of keys, described where they are declared."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from pdcore.classes import ClassObjective, ClassObjectives, TenantLimits
from pdcore.config import RouterConfig
from pdcore.objective import ROUTER_DEFAULTS, SCHEDULER_DEFAULTS
from pdcore.types import PriorityClass

ByteCount = Annotated[ByteSize, Field(ge=1)]
Cores = Literal["auto"] | tuple[Annotated[int, Field(ge=0)], ...]
CodecChoice = Literal["auto", "raw", "zstd", "bexp-zstd", "bexp3", "q8", "q8-zstd", "k6v4", "k4v4", "tc4", "fp8"]
Dtype = Literal["float32", "bfloat16", "float16"]
ToolCallParser = Literal[
    "auto", "hermes", "llama3_json", "mistral", "mistral_v11", "pythonic", "qwen3_coder", "deepseek_v3",
    "deepseek_v31", "kimi_k2", "granite",
]  # fmt: skip
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, lt=1)]

_BALANCED = SCHEDULER_DEFAULTS["balanced"]
_CLASSES = ClassObjectives()
_ROUTER = RouterConfig(router_id="", model_path="", served_name="", controller="")


class Section(BaseModel):
    """A mapping of the file: unknown keys are errors, values are not converted behind the user's back."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class SchedulerSection(Section):
    """How an engine composes its steps. What `objective` sets is given here as for balanced.

    The budget is for CPUs: one core computes 128 tokens of a small model in a second or less, and a worker whose
    steps come near ``dead_after_s`` is taken for dead. Larger steps gain little there.
    """

    max_num_batched_tokens: int = Field(
        default=int(_BALANCED["max_num_batched_tokens"]), ge=1, description="token budget of one engine step"
    )
    max_num_seqs: int = Field(
        default=int(_BALANCED["max_num_seqs"]), ge=1, description="sequences in one step at most"
    )
    prefill_chunk_tokens: int = Field(
        default=int(_BALANCED["prefill_chunk_tokens"]),
        ge=1,
        description="prompt tokens of one sequence in one step at most",
    )
    max_partial_prefills: int = Field(
        default=int(_BALANCED["max_partial_prefills"]),
        ge=0,
        description="prompts that may be computed in part at once; more wait, unless they fit into one step as a "
        "whole; 0: any number",
    )
    long_prefill_tokens: int = Field(
        default=int(_BALANCED["long_prefill_tokens"]),
        ge=0,
        description="prompts that lack more tokens than this are long and leave one of max_partial_prefills to "
        "others; 0: none is long",
    )


class GeneratingSchedulerSection(SchedulerSection):
    """Of workers that generate, so that there are tokens whose pace can be kept."""

    target_itl_ms: float = Field(
        default=_BALANCED["target_itl_ms"],
        ge=0,
        allow_inf_nan=False,
        description="prompts get as many tokens of a step as keep the time between two tokens of running requests "
        "within this, by step times measured all the time; 0: no such limit",
    )


class DecodeSchedulerSection(GeneratingSchedulerSection):
    """Of workers that get KV from others."""

    local_prefill_tokens: int = Field(
        default=64,
        ge=0,
        description="prompt tokens that a decode worker offers to compute itself when it holds the prompt's "
        "beginning, instead of having them sent; 0: never",
    )


class PoolSection(Section):
    """One pool of equal workers."""

    workers: int = Field(default=1, ge=0, le=1024, description="how many workers the pool has")
    threads: Literal["auto"] | PositiveInt = Field(
        default="auto",
        description="compute threads of each worker's engine; auto shares out the cores of a one-node cluster, and "
        "takes all of the worker's own node otherwise",
    )
    cpu_affinity: Cores = Field(
        default="auto",
        description="cores of the engine threads, e.g. [0, 1]; [] leaves them free; auto keeps the prefill and the "
        "decode pool on cores of their own where one node has enough of them",
    )
    block_size: Literal[8, 16, 32, 64] = Field(default=16, description="tokens per KV block")
    kv_memory: Fraction | ByteCount = Field(
        default=ByteSize(1 << 30),
        description="memory of each worker's KV pool, e.g. 512MiB or 2GiB, or a fraction such as 0.2 of the memory "
        "that is available where the cluster is started",
    )
    num_blocks: PositiveInt | None = Field(
        default=None, description="size of each worker's KV pool in blocks, not in memory"
    )
    dtype: Dtype | None = Field(
        default=None, description="type of weights, arithmetic and KV cache of this pool; default: the cluster's"
    )
    num_cpus: float = Field(
        default=0, ge=0, description="CPUs that Ray sets aside for each worker; 0 lets it run beside others"
    )
    prefix_cache: bool = Field(
        default=True, description="keep KV for prompts that begin alike, as long as memory is not wanted"
    )
    scheduler: SchedulerSection = Field(default=SchedulerSection(), description="how steps are composed")

    @model_validator(mode="after")
    def _one_size(self) -> PoolSection:
        if self.num_blocks is not None and "kv_memory" in self.model_fields_set:
            raise ValueError("either kv_memory or num_blocks, not both")
        return self


class GeneratingSection(PoolSection):
    """A pool whose workers generate, so that memory can run short under their sequences."""

    swap_memory: Annotated[ByteSize, Field(ge=0)] = Field(
        default=ByteSize(0),
        description="host memory of each worker for the KV of sequences that give way to others, e.g. 1GiB; 0: none",
    )
    scheduler: GeneratingSchedulerSection = Field(
        default=GeneratingSchedulerSection(), description="how steps are composed"
    )
    preemption: Literal["auto", "swap", "recompute"] = Field(
        default="auto",
        description="what becomes of a sequence that gives way; swap: its KV goes to swap_memory and comes back, "
        "recompute: it is computed again, auto: what costs less",
    )


class DecodeSection(GeneratingSection):
    """The pool that generates from KV of others."""

    scheduler: DecodeSchedulerSection = Field(default=DecodeSchedulerSection(), description="how steps are composed")


class AggregatedSection(GeneratingSection):
    """The pool that a cluster has only when asked for."""

    workers: int = Field(default=0, ge=0, le=1024, description="how many workers the pool has")


class TransferSection(Section):
    """How KV travels from prefill to decode workers."""

    codec: CodecChoice = Field(
        default="auto",
        description="how KV is packed for requests that do not say; auto: the lossless codec, or none, that is "
        "fastest for each transfer; q8, q8-zstd, k6v4, k4v4, tc4 and fp8 change the numbers",
    )
    calibration: str = Field(
        default="", description="file that pdserve calibrate made for the model, which the codec tc4 needs"
    )
    transport: Literal["auto", "grpc", "shm", "collective", "nixl"] = Field(
        default="auto",
        description="how KV travels where both workers can; auto: shared memory on one host, a process group between "
        "two GPUs, else gRPC; what fails gives way to gRPC",
    )
    interface: str = Field(
        default="",
        description="network interface, or an address of one, that process groups bind to; empty: the worker's host",
    )
    max_pairs: PositiveInt = Field(default=64, description="process groups that a worker is in at most")
    message_bytes: ByteCount = Field(default=ByteSize(512 << 10), description="size of one transport message, about")
    frame_tokens: int = Field(default=256, ge=1, le=256, description="tokens per frame at most")
    frame_bytes: ByteCount = Field(
        default=ByteSize(512 << 10),
        description="raw bytes of a frame, about, at most; a slow link gets smaller ones, none more than half of "
        "credit_bytes",
    )
    credit_bytes: ByteCount = Field(
        default=ByteSize(8 << 20),
        description="unacknowledged bytes per connection, 1GiB at most; as much memory is set aside at both ends",
    )
    lease_s: PositiveFloat = Field(default=10.0, description="seconds without renewal until a ticket expires")
    send_timeout_s: PositiveFloat = Field(default=5.0, description="seconds without progress until a send fails")
    max_reserved_fraction: float = Field(
        default=0.5, gt=0, le=1, description="share of a decode worker's KV pool that waiting transfers may hold"
    )
    max_frame_retries: int = Field(default=2, ge=0, description="how often a damaged frame is sent again")
    kv_conversion: Literal["exact", "rounding"] = Field(
        default="exact",
        description="where the decode pool has another dtype than the prefill pool: exact takes its KV only if no "
        "number changes (to float32), rounding in any case",
    )
    allow_plaintext_kv: bool = Field(
        default=False,
        description="with tls.internal, let KV travel by collective and nixl as well, which encrypt nothing",
    )
    receive_threads: int = Field(default=1, ge=1, description="threads that unpack received KV, per decode worker")
    cpu_affinity: Cores = Field(
        default="auto",
        description="cores of the transfer threads; [] leaves them free; auto keeps them off the decode engines",
    )


class KvCodecSection(Section):
    """Codecs by class; see ``transfer.codec``."""

    interactive: CodecChoice | None = Field(default=None, description="for interactive requests that do not say")
    standard: CodecChoice | None = Field(default=None, description="for standard requests that do not say")
    batch: CodecChoice | None = Field(default=None, description="for batch requests that do not say")


class QueueSection(Section):
    """In which order waiting requests are served; docs/scheduling.md says which policy is for what. Tenants' weights
    are with the other things that are set for them, in `RouterSection`."""

    policy: Literal["fcfs", "sjf", "fair", "priority", "static"] = Field(
        default="priority",
        description="fcfs: in order of arrival; sjf: short prompts first, with ageing; fair: the tenant that has had "
        "least; priority: interactive before standard before batch requests, and within a class as fair; "
        "static: whole batches, a baseline",
    )
    sjf_age_tokens: int = Field(
        default=32,
        ge=1,
        description="sjf: each later arrival makes a waiting prompt count as so many tokens shorter",
    )
    batch_share: float = Field(
        default=0.1,
        ge=0,
        le=0.5,
        description="priority: share of starts and of running places that batch requests are sure of; 0: none",
    )


_TTFT = (
    "time to first token that is aimed at; what cannot meet it is shed before anything is computed, with a hint when "
    "to come again; 0: none"
)
_ITL = (
    "time between two tokens that is aimed at; batch requests are kept from workers where one more would break it "
    "(queue policy priority); 0: none"
)


def _milliseconds(default: float, description: str) -> Any:
    return Field(default=default, ge=0, allow_inf_nan=False, description=description)


class ClassSection(Section):
    """One class of requests."""

    ttft_ms: float = _milliseconds(_CLASSES.batch.ttft_ms, _TTFT)
    itl_ms: float = _milliseconds(_CLASSES.batch.itl_ms, _ITL)
    max_queue: PositiveInt | None = Field(
        default=None, description="requests of the class that may wait; null: router.max_queue"
    )

    def to_config(self) -> ClassObjective:
        """As the router knows it."""
        return ClassObjective(self.ttft_ms, self.itl_ms, self.max_queue)


class InteractiveSection(ClassSection):
    """Somebody waits for each token."""

    ttft_ms: float = _milliseconds(_CLASSES.interactive.ttft_ms, _TTFT)
    itl_ms: float = _milliseconds(_CLASSES.interactive.itl_ms, _ITL)


class StandardSection(ClassSection):
    """What says nothing else."""

    ttft_ms: float = _milliseconds(_CLASSES.standard.ttft_ms, _TTFT)
    itl_ms: float = _milliseconds(_CLASSES.standard.itl_ms, _ITL)


class ClassesSection(Section):
    """What is promised to each class; the defaults suit small models on CPUs."""

    interactive: InteractiveSection = Field(default=InteractiveSection(), description="the most urgent requests")
    standard: StandardSection = Field(default=StandardSection(), description="requests that name no class")
    batch: ClassSection = Field(default=ClassSection(), description="requests that fill the gaps")

    def to_config(self) -> ClassObjectives:
        """As the router knows it."""
        return ClassObjectives(*(section.to_config() for section in (self.interactive, self.standard, self.batch)))


class TenantSection(Section):
    """One tenant. Limits hold for each router."""

    weight: PositiveFloat = Field(
        default=1.0, description="queue policies priority and fair: share, relative to the other tenants"
    )
    requests_per_minute: int = Field(default=0, ge=0, description="requests that are let in a minute; 0: any number")
    tokens_per_minute: int = Field(
        default=0, ge=0, description="tokens of prompts and outputs a minute; 0: any number"
    )
    max_concurrent: int = Field(default=0, ge=0, description="requests at a time; 0: any number")
    default_class: Literal["interactive", "standard", "batch"] = Field(
        default="standard", description="class of requests that name none"
    )

    def to_config(self, name: str) -> TenantLimits:
        """As the router knows it; the weight is the queue's."""
        return TenantLimits(
            tenant=name,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_concurrent=self.max_concurrent,
            default_class=PriorityClass[self.default_class.upper()],
        )


class RouterSection(Section):
    """The public end."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for every interface"
    )
    allow_insecure_listen: bool = Field(
        default=False,
        description="listen without tls.public on other addresses than 127.0.0.1, for a network that nobody else is "
        "on; also --insecure",
    )
    grpc_port: int = Field(
        default=50051, ge=0, le=65535, description="public gRPC port of the first router; 0 picks a free one for each"
    )
    http_port: int = Field(
        default=8000,
        ge=-1,
        le=65535,
        description="public port of the first router's HTTP interface, for OpenAI's clients; 0 picks a free one for "
        "each; -1: none",
    )
    replicas: int = Field(
        default=1,
        ge=1,
        le=64,
        description="routers that serve the cluster, on grpc_port, http_port and the ports after them; several run "
        "in processes of their own and are started again when they die; limits and fairness hold within each of them",
    )
    policy: Literal["cost", "least_loaded", "power_of_two", "prefix_affinity", "round_robin"] = Field(
        default="cost",
        description="which of the workers that could take a request gets it; cost: where its client is expected to "
        "wait least, by measured step times, queues and cached prompts; docs/routing.md describes them",
    )
    disaggregate: Literal["auto", "always"] = Field(
        default="auto",
        description="always: the prompt on a prefill worker, the rest on a decode worker, wherever both serve; auto: "
        "both on one worker where that is better by prediction, as for short or mostly cached prompts",
    )
    max_queue: int = Field(
        default=256, ge=1, description="requests of each class that may wait for a worker; more are shed"
    )
    classes: ClassesSection = Field(
        default=ClassesSection(), description="objectives of each class; docs/routing.md says what becomes of them"
    )
    tenants: dict[str, TenantSection] = Field(
        default={},
        description="weights, limits and classes of tenants by name; the name * stands for each tenant without an "
        "entry of its own",
    )
    api_keys_file: str = Field(
        default="",
        description="file of API keys: a mapping of SHA-256 digests of keys, in hexadecimal, to tenants, or to "
        "{tenant: NAME, admin: true} for keys that the Admin service takes; every request needs a key then; empty: "
        "no keys, tenants are who they say they are. A relative path is from where the cluster is started",
    )
    token_window: int = Field(
        default=64, ge=1, description="tokens per request that the client has not taken yet, at most"
    )
    max_queued_prefill_tokens: int = Field(
        default=0,
        ge=0,
        description="prompt tokens that one worker may hold queued, more wait in the router; 0: two of its steps",
    )
    max_running_per_worker: int = Field(
        default=ROUTER_DEFAULTS["balanced"]["max_running_per_worker"],
        ge=1,
        description="requests on one decode worker at most",
    )
    max_replays: int = Field(default=3, ge=0, description="how often a request is run again after its worker died")
    replay_share: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="replays of all requests together, as a share of the requests that start; more wait their turn",
    )
    replays_per_s: PositiveFloat = Field(
        default=10.0, description="replays per second that there may be beside that share; ten seconds of it save up"
    )
    breaker_failures: int = Field(
        default=5,
        ge=1,
        description="failures in a row until a worker gets nothing for a while that another one could take",
    )
    client_stall_timeout_s: PositiveFloat = Field(
        default=120.0, description="seconds without the client taking a token until its request is cancelled"
    )
    worker_wait_s: float = Field(
        default=60.0,
        ge=0,
        description="seconds that requests wait while no worker could take them, as during a restart",
    )
    max_message_bytes: Annotated[ByteSize, Field(ge=65536)] = Field(
        default=ByteSize(16 << 20), description="gRPC message limit, both ways, and limit of HTTP bodies"
    )
    max_prompt_bytes: ByteCount = Field(
        default=ByteSize(_ROUTER.max_prompt_bytes),
        description="of a request's text, or of its token ids at four bytes each",
    )
    max_metadata_bytes: Annotated[ByteSize, Field(ge=1024, le=1 << 20)] = Field(
        default=ByteSize(_ROUTER.max_metadata_bytes), description="of the headers of one call"
    )
    max_streams_per_connection: PositiveInt = Field(
        default=_ROUTER.max_streams_per_connection,
        description="calls of one gRPC connection at a time; more wait at the client",
    )
    max_connections: PositiveInt = Field(
        default=_ROUTER.max_connections,
        description="connections at a time, of gRPC and of HTTP each; more are closed at once",
    )
    max_calls: PositiveInt = Field(
        default=_ROUTER.max_calls, description="gRPC calls at a time, of all connections; more are refused"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning",
        description="what the routers write to standard error; info: each request that fails too, with its id",
    )
    log_prompts: bool = Field(
        default=_ROUTER.log_prompts,
        description="write the prompt of each request to the routers' log, where whoever reads logs can read it",
    )
    claim_ttl_s: PositiveFloat | None = Field(
        default=None,
        description="seconds after which an idempotency key is free again if its router is not heard of; default: "
        "10, or twice dead_after_s if that is more",
    )
    tool_call_parser: ToolCallParser = Field(
        default="auto",
        description="the format in which the model calls tools; auto: the one that its chat template speaks of",
    )
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        description="file with a Jinja template that makes prompts of chats, or its text; default: the model's own",
    )
    default_max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None,
        description="tokens of an answer at most where its request names no max_tokens; 0: as many as the context "
        "has room for; default: what the model's generation config says, else 256",
    )
    kv_codec_by_class: KvCodecSection = Field(
        default=KvCodecSection(), description="how KV is packed, by class of request; null: transfer.codec"
    )


class RaySection(Section):
    """Where the workers run."""

    address: str | None = Field(
        default=None,
        min_length=1,
        description="local: start a Ray and end it again; auto: join the one that runs here; or host:port; default: "
        "that of the Ray job that this runs in, else local",
    )
    worker_host: str = Field(
        default="auto",
        min_length=1,
        description="address that workers and the controller listen on and announce; auto: 127.0.0.1 while Ray has "
        "one node, the node's own address otherwise",
    )
    allow_insecure_listen: bool = Field(
        default=False,
        description="let workers and the controller listen without tls.internal on other addresses than 127.0.0.1, "
        "which they need where Ray has several nodes, for a network that nobody else is on; also --insecure",
    )
