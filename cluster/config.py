"""The configuration of a whole cluster: one validated tree, from YAML and flags.

`cluster.config_file.load_config` reads it, `ClusterConfig.worker_configs` and `ClusterConfig.router_config` turn
it into the frozen dataclasses that the other parts know. Every key is described where it is declared;
``pdserve config --explain`` prints those descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from cluster.cores import CorePlan, plan_cores
from cluster.memory import available_memory
from pdcore.config import (
    CODEC_CHOICES,
    CODEC_DTYPES,
    EngineConfig,
    KvCodecByClass,
    QueueConfig,
    RouterConfig,
    SchedulerConfig,
    TenantWeight,
    TransferConfig,
    WorkerConfig,
    convertible,
)
from pdcore.costs import AUTO
from pdcore.errors import ConfigError, ModelError
from pdcore.objective import ROUTER_DEFAULTS, SCHEDULER_DEFAULTS
from pdcore.types import KvGeometry, Role

ByteCount = Annotated[ByteSize, Field(ge=1)]
Cores = Literal["auto"] | tuple[Annotated[int, Field(ge=0)], ...]
CodecChoice = Literal["auto", "raw", "zstd", "bexp-zstd", "bexp3", "q8", "q8-zstd", "k6v4", "k4v4", "tc4", "fp8"]
Dtype = Literal["float32", "bfloat16", "float16"]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, lt=1)]

_BALANCED = SCHEDULER_DEFAULTS["balanced"]


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
    target_itl_ms: float = Field(
        default=_BALANCED["target_itl_ms"],
        ge=0,
        allow_inf_nan=False,
        description="prompts get as many tokens of a step as keep the time between two tokens of running requests "
        "within this, by step times measured all the time; 0: no such limit",
    )
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
    preemption: Literal["auto", "swap", "recompute"] = Field(
        default="auto",
        description="what becomes of a sequence that gives way; swap: its KV goes to swap_memory and comes back, "
        "recompute: it is computed again, auto: what costs less",
    )


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
        default=ByteSize(8 << 20), description="unacknowledged bytes per connection; bounds the receiver's memory"
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
    """In which order waiting requests are served; docs/scheduling.md says which policy is for what."""

    policy: Literal["fcfs", "sjf", "fair", "priority", "static"] = Field(
        default="priority",
        description="fcfs: in order of arrival; sjf: short prompts first, with ageing; fair: the tenant that has had "
        "least; priority: interactive before standard before batch requests; static: whole batches, a baseline",
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
    tenant_weights: dict[str, PositiveFloat] = Field(
        default={}, description="fair: shares of tenants by name, relative to all others, which have 1"
    )

    def to_config(self) -> QueueConfig:
        """As the parts know it."""
        weights = tuple(TenantWeight(tenant, weight) for tenant, weight in self.tenant_weights.items())
        return QueueConfig(self.policy, self.sjf_age_tokens, self.batch_share, weights)


class RouterSection(Section):
    """The public end."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for every interface"
    )
    grpc_port: int = Field(default=50051, ge=0, le=65535, description="public gRPC port; 0 picks a free one")
    max_queue: int = Field(default=256, ge=1, description="requests that may wait for a worker; more are shed")
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
    client_stall_timeout_s: PositiveFloat = Field(
        default=120.0, description="seconds without the client taking a token until its request is cancelled"
    )
    worker_wait_s: float = Field(
        default=60.0,
        ge=0,
        description="seconds that requests wait while no worker could take them, as during a restart",
    )
    max_message_bytes: Annotated[ByteSize, Field(ge=65536)] = Field(
        default=ByteSize(16 << 20), description="gRPC message limit, both ways"
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


class ClusterConfig(Section):
    """The whole cluster."""

    name: str = Field(
        default="pdserve",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="name of the cluster: its Ray namespace; one cluster of a name runs in one Ray",
    )
    model: str = Field(
        default="smollm2-135m",
        min_length=1,
        description="short name (see `pdserve models`), Hugging Face folder, GGUF file, or hub id",
    )
    served_name: str | None = Field(
        default=None, min_length=1, description="the model's name for clients; default: its own"
    )
    dtype: Dtype = Field(
        default="bfloat16", description="type of weights, arithmetic and KV cache, of pools that name no other"
    )
    device: Literal["cpu"] = Field(default="cpu", description="where the model runs")
    model_impl: Literal["auto", "native", "transformers"] = Field(
        default="auto",
        description="native: this project's own implementation; transformers: that library's modelling code on this "
        "project's paged attention; auto: native where there is one for the model, else transformers",
    )
    max_model_len: PositiveInt | None = Field(
        default=None, description="prompt and output tokens of one request; default: the model's own limit"
    )
    objective: Literal["latency", "balanced", "throughput"] = Field(
        default="balanced",
        description="what to tune for; sets the defaults of every pool's max_num_batched_tokens, max_num_seqs, "
        "prefill_chunk_tokens, max_partial_prefills, long_prefill_tokens and target_itl_ms, and of the router's "
        "max_running_per_worker; values that are given win",
    )
    queue: QueueSection = Field(
        default=QueueSection(), description="the order of waiting requests, in the router and in each worker"
    )
    prefill: PoolSection = Field(default=PoolSection(), description="workers that compute prompts")
    decode: GeneratingSection = Field(
        default=GeneratingSection(), description="workers that generate from transferred KV"
    )
    aggregated: AggregatedSection = Field(
        default=AggregatedSection(), description="workers that do both by themselves"
    )
    transfer: TransferSection = Field(default=TransferSection(), description="how KV travels")
    router: RouterSection = Field(default=RouterSection(), description="the public end")
    ray: RaySection = Field(default=RaySection(), description="where the workers run")
    heartbeat_s: PositiveFloat = Field(default=0.5, description="seconds between heartbeats inside the cluster")
    dead_after_s: PositiveFloat = Field(
        default=3.0, description="silence that counts as death; at least two heartbeats"
    )
    start_timeout_s: PositiveFloat = Field(default=180.0, description="seconds that all workers get to become ready")
    drain_timeout_s: float = Field(
        default=30.0, ge=0, allow_inf_nan=False, description="seconds that running requests get after SIGTERM"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_objective(cls, data: Any) -> Any:
        """Put the objective's defaults where nothing is given."""
        objective = data.get("objective", "balanced") if isinstance(data, dict) else None
        if not isinstance(objective, str) or objective not in SCHEDULER_DEFAULTS:
            return data  # the fields' own checks say what is wrong
        data = _tuples(data)
        for name in ("prefill", "decode", "aggregated"):
            pool = _as_mapping(data.get(name, {}))
            if pool is None:
                continue
            scheduler = _as_mapping(pool.get("scheduler", {}))
            if scheduler is not None:
                data[name] = {**pool, "scheduler": {**SCHEDULER_DEFAULTS[objective], **scheduler}}
        router = _as_mapping(data.get("router", {}))
        if router is not None:
            data["router"] = {**ROUTER_DEFAULTS[objective], **router}
        return data

    def pool(self, role: Role) -> PoolSection:
        """The section of one pool."""
        pools = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.AGGREGATED: self.aggregated}
        return pools[role]

    def pool_dtype(self, role: Role) -> str:
        """Type of weights, arithmetic and KV cache of one pool."""
        return self.pool(role).dtype or self.dtype

    def worker_configs(
        self,
        *,
        model_path: Path,
        served_name: str,
        controller: str,
        host: str,
        cores: Sequence[int] | None,
    ) -> list[WorkerConfig]:
        """Make the configuration of every worker of every pool.

        Args:
            model_path: the resolved model folder.
            served_name: what clients call the model, unless the file says otherwise.
            controller: ``host:port`` of the membership service.
            host: what workers listen on and announce.
            cores: core numbers to share out if all workers run on one node; None if they do not.

        Raises:
            ConfigError: a combination of values does not fit; the key is given as in the file.
        """
        counts = {role: self.pool(role).workers for role in Role}
        if cores is not None:
            self._check_fractions(counts)
        sizes = {role: self._num_blocks(role, model_path) for role in Role if counts[role]}
        plans = plan_cores(cores, counts)
        configs = []
        for role in Role:
            for index in range(counts[role]):
                worker_id = f"{role}-{index}"
                configs.append(
                    self._worker_config(
                        worker_id,
                        role,
                        plan=plans[worker_id],
                        num_blocks=sizes[role],
                        model_path=str(model_path),
                        served_name=self.served_name or served_name,
                        controller=controller,
                        host=host,
                    )
                )
        return configs

    def router_config(self, *, model_path: Path, served_name: str, controller: str) -> RouterConfig:
        """Make the router's configuration. Arguments and errors as for `worker_configs`."""
        section = self.router
        return RouterConfig(
            router_id=f"{self.name}-router",
            model_path=str(model_path),
            served_name=self.served_name or served_name,
            controller=controller,
            host=section.host,
            grpc_port=section.grpc_port,
            max_queue=section.max_queue,
            token_window=section.token_window,
            max_queued_prefill_tokens=section.max_queued_prefill_tokens,
            max_running_per_worker=section.max_running_per_worker,
            max_replays=section.max_replays,
            client_stall_timeout_s=section.client_stall_timeout_s,
            worker_wait_s=section.worker_wait_s,
            heartbeat_s=self.heartbeat_s,
            dead_after_s=self.dead_after_s,
            max_message_bytes=int(section.max_message_bytes),
            kv_codec_by_class=KvCodecByClass(
                interactive=section.kv_codec_by_class.interactive or "",
                standard=section.kv_codec_by_class.standard or "",
                batch=section.kv_codec_by_class.batch or "",
            ),
            drain_timeout_s=self.drain_timeout_s,
            queue=self.queue.to_config(),
        )

    def check(self) -> None:
        """Raise ConfigError if values that are fine one by one do not fit together."""
        counts = {role: self.pool(role).workers for role in Role}
        if not counts[Role.AGGREGATED] and not (counts[Role.PREFILL] and counts[Role.DECODE]):
            key, other = ("prefill", "decode") if not counts[Role.PREFILL] else ("decode", "prefill")
            raise ConfigError(
                f"{key}.workers",
                0,
                f"at least 1 beside {counts[Role(other)]} {other} workers, or at least 1 aggregated worker",
            )
        chosen = {"transfer.codec": self.transfer.codec} | {
            f"router.kv_codec_by_class.{name}": codec
            for name, codec in self.router.kv_codec_by_class.model_dump().items()
        }
        source, target = self.pool_dtype(Role.PREFILL), self.pool_dtype(Role.DECODE)
        disaggregated = counts[Role.PREFILL] and counts[Role.DECODE]
        if disaggregated and not convertible(source, target, self.transfer.kv_conversion):
            allowed = f"{source} or float32 while prefill has {source}, unless transfer.kv_conversion is rounding"
            raise ConfigError("decode.dtype", target, allowed)
        for key, codec in chosen.items():
            if codec is not None and source not in CODEC_DTYPES.get(codec, (source,)):
                fitting = [name for name in CODEC_CHOICES if source in CODEC_DTYPES.get(name, (source,))]
                raise ConfigError(key, codec, f"{', '.join(fitting)} while the prefill pool's dtype is {source}")
        if self.dead_after_s < 2 * self.heartbeat_s:
            raise ConfigError("dead_after_s", self.dead_after_s, f"at least twice heartbeat_s ({self.heartbeat_s})")
        plan = CorePlan(0, (), ())
        for role in Role:
            self._worker_config(
                f"{role}-0", role, plan=plan, num_blocks=1, model_path="", served_name="", controller="", host=""
            )
        self.router_config(model_path=Path(), served_name="", controller="")

    def _worker_config(
        self,
        worker_id: str,
        role: Role,
        *,
        plan: CorePlan,
        num_blocks: int,
        model_path: str,
        served_name: str,
        controller: str,
        host: str,
    ) -> WorkerConfig:
        pool = self.pool(role)
        try:
            scheduler = SchedulerConfig(**pool.scheduler.model_dump(), queue=self.queue.to_config())
        except ConfigError as error:
            raise ConfigError(f"{role}.{error.key}", error.value, error.allowed) from error
        swap_memory, preemption = 0, AUTO
        if isinstance(pool, GeneratingSection):
            swap_memory, preemption = int(pool.swap_memory), pool.preemption
        try:
            engine = EngineConfig(
                model_path=model_path,
                served_name=served_name,
                device=self.device,
                dtype=self.pool_dtype(role),
                block_size=pool.block_size,
                num_blocks=num_blocks,
                max_model_len=self.max_model_len,
                threads=plan.threads if pool.threads == "auto" else pool.threads,
                cpu_affinity=plan.engine if pool.cpu_affinity == "auto" else pool.cpu_affinity,
                prefix_cache=pool.prefix_cache,
                swap_memory=swap_memory,
                preemption=preemption,
                scheduler=scheduler,
                model_impl=self.model_impl,
            )
        except ConfigError as error:  # of the two keys that must fit together
            key = error.key.replace("engine", role, 1)
            raise ConfigError(key, error.value, error.allowed) from error
        return WorkerConfig(
            worker_id=worker_id,
            role=role,
            engine=engine,
            transfer=self._transfer_config(plan, host),
            host=host,
            controller=controller,
            heartbeat_s=self.heartbeat_s,
            dead_after_s=self.dead_after_s,
            drain_timeout_s=self.drain_timeout_s,
        )

    def _transfer_config(self, plan: CorePlan, host: str) -> TransferConfig:
        section = self.transfer
        return TransferConfig(
            codec=section.codec,
            calibration=section.calibration,
            transport=section.transport,
            interface=section.interface or host,
            max_pairs=section.max_pairs,
            message_bytes=int(section.message_bytes),
            frame_tokens=section.frame_tokens,
            frame_bytes=int(section.frame_bytes),
            credit_bytes=int(section.credit_bytes),
            lease_s=section.lease_s,
            send_timeout_s=section.send_timeout_s,
            max_reserved_fraction=section.max_reserved_fraction,
            max_frame_retries=section.max_frame_retries,
            kv_conversion=section.kv_conversion,
            receive_threads=section.receive_threads,
            cpu_affinity=plan.transfer if section.cpu_affinity == "auto" else section.cpu_affinity,
        )

    def _num_blocks(self, role: Role, model_path: Path) -> int:
        pool = self.pool(role)
        swap_memory = int(pool.swap_memory) if isinstance(pool, GeneratingSection) else 0
        if pool.num_blocks is not None and not swap_memory:
            return pool.num_blocks
        block_bytes = pool.block_size * kv_bytes_per_token(model_path, self.pool_dtype(role))
        if 0 < swap_memory < block_bytes:
            raise ConfigError(f"{role}.swap_memory", swap_memory, f"0, or at least one block: {block_bytes} bytes")
        if pool.num_blocks is not None:
            return pool.num_blocks
        memory = int(pool.kv_memory)
        if pool.kv_memory < 1:
            available = available_memory()
            if available is None:
                raise ConfigError(
                    f"{role}.kv_memory", pool.kv_memory, "a size such as 2GiB: free memory is not known"
                )
            memory = int(available * pool.kv_memory)
        if memory < block_bytes:
            raise ConfigError(f"{role}.kv_memory", memory, f"at least one block: {block_bytes} bytes")
        return memory // block_bytes

    def _check_fractions(self, counts: Mapping[Role, int]) -> None:
        """Workers of one machine cannot have more than all of its memory between them."""
        shares = {role: counts[role] * self.pool(role).kv_memory for role in Role if self.pool(role).kv_memory < 1}
        total = sum(shares.values())
        if total >= 1:
            role = next(role for role in shares if shares[role])
            allowed = f"fractions that add up to less than 1 over all workers of the machine (now {total:g})"
            raise ConfigError(f"{role}.kv_memory", self.pool(role).kv_memory, allowed)


def _tuples(value: Any) -> Any:
    """Lists as tuples, throughout: what was JSON is checked as Python's values from here on."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _as_mapping(value: Any) -> Mapping[str, Any] | None:
    """What is given in a section, be it read or made in code; None if it is neither."""
    if isinstance(value, Section):
        return value.model_dump(exclude_unset=True)
    return value if isinstance(value, dict) else None


def kv_bytes_per_token(model_path: Path, dtype: str) -> int:
    """Bytes of K and V that one token takes over all layers; errors as for `kv_shape`."""
    return kv_shape(model_path, dtype).bytes_per_token


def kv_shape(model_path: Path, dtype: str) -> KvGeometry:
    """The shape of a model's KV, from the model folder's ``config.json``; neither digest nor blocks are known.

    Raises:
        ModelError: the file cannot be read or lacks the shape.
    """
    try:
        shape = json.loads((model_path / "config.json").read_text())
        if isinstance(shape, dict) and "num_attention_heads" not in shape:
            shape = _shape_by_transformers(model_path)
        heads = shape["num_attention_heads"]
        return KvGeometry(
            model_digest="",
            num_layers=shape["num_hidden_layers"],
            num_kv_heads=shape.get("num_key_value_heads") or heads,
            head_dim=shape.get("head_dim") or shape["hidden_size"] // heads,
            dtype=dtype,
            block_size=1,
            num_blocks=1,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{model_path / 'config.json'} does not give the model's shape: {error!r}") from error


def _shape_by_transformers(model_path: Path) -> dict[str, int]:
    """Of a model whose config has names of its own for these things, e.g. ``n_head``."""
    from transformers import AutoConfig  # here, for it takes seconds and few models need it

    config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    return {key: value for key in keys if (value := getattr(config, key, None)) is not None}
