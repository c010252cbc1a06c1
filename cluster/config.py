"""The configuration of a whole cluster: one validated tree, from YAML and flags.

`cluster.config_file.load_config` reads it, `ClusterConfig.worker_configs` and `ClusterConfig.router_config` turn
it into the frozen dataclasses that the other parts know. Every key is described where it is declared;
``pdserve config --explain`` prints those descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from cluster.config_objective import fill_in, forget_given
from cluster.config_sections import (
    AggregatedSection,
    DecodeSection,
    Dtype,
    GeneratingSection,
    PoolSection,
    PositiveFloat,
    PositiveInt,
    QueueSection,
    RaySection,
    RouterSection,
    Section,
    TransferSection,
)
from cluster.config_security import TlsSection, internal_security
from cluster.cores import CorePlan, plan_cores
from cluster.kv_shape import kv_bytes_per_token
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
    check_internal_listen,
    convertible,
)
from pdcore.costs import AUTO
from pdcore.errors import ConfigError
from pdcore.memory import available_memory
from pdcore.security import InternalSecurity
from pdcore.types import Role


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
    decode: DecodeSection = Field(default=DecodeSection(), description="workers that generate from transferred KV")
    aggregated: AggregatedSection = Field(
        default=AggregatedSection(), description="workers that do both by themselves"
    )
    transfer: TransferSection = Field(default=TransferSection(), description="how KV travels")
    router: RouterSection = Field(default=RouterSection(), description="the public end")
    ray: RaySection = Field(default=RaySection(), description="where the workers run")
    tls: TlsSection = Field(default=TlsSection(), description="certificates; docs/security.md says how to make some")
    secret_file: str = Field(
        default="",
        description="file with a secret that every process of the cluster knows, and lets nobody in without; empty: "
        "that in $PDSERVE_CLUSTER_SECRET, else one of chance, made at each start. A relative path is from where the "
        "cluster is started",
    )
    heartbeat_s: PositiveFloat = Field(default=0.5, description="seconds between heartbeats inside the cluster")
    dead_after_s: PositiveFloat = Field(
        default=3.0, description="silence that counts as death; at least two heartbeats"
    )
    start_timeout_s: PositiveFloat = Field(default=180.0, description="seconds that all workers get to become ready")
    drain_timeout_s: float = Field(
        default=30.0, ge=0, allow_inf_nan=False, description="seconds that running requests get after SIGTERM"
    )

    @model_validator(mode="wrap")
    @classmethod
    def _fill_in_objective(cls, data: Any, make: ModelWrapValidatorHandler[ClusterConfig]) -> ClusterConfig:
        """Put the objective's defaults where nothing is given; they do not count as given."""
        data, filled = fill_in(cls, data)
        config = make(data)
        forget_given(config, filled)
        return config

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
        security: InternalSecurity | None = None,
    ) -> list[WorkerConfig]:
        """Make the configuration of every worker of every pool.

        Args:
            model_path: the resolved model folder.
            served_name: what clients call the model, unless the file says otherwise.
            controller: ``host:port`` of the membership service.
            host: what workers listen on and announce.
            cores: core numbers to share out if all workers run on one node; None if they do not.
            security: `internal_security`, with the secret perhaps; None: as it is in the file.

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
                        security=security or self.internal_security,
                    )
                )
        return configs

    @property
    def internal_security(self) -> InternalSecurity:
        """How the cluster's own hops are secured. Raises ConfigError."""
        return internal_security(self.tls, self.secret_file, allow_insecure_listen=self.ray.allow_insecure_listen)

    @property
    def claim_ttl_s(self) -> float:
        """Seconds that an idempotency key stays claimed without a word of its router."""
        return self.router.claim_ttl_s or max(10.0, 2 * self.dead_after_s)

    def router_config(
        self,
        *,
        model_path: Path,
        served_name: str,
        controller: str,
        index: int | None = None,
        security: InternalSecurity | None = None,
    ) -> RouterConfig:
        """Make a router's configuration. Arguments and errors as for `worker_configs`; `index`: which of several."""
        section = self.router
        return RouterConfig(
            router_id=f"{self.name}-router" if index is None else f"{self.name}-router-{index}",
            model_path=str(model_path),
            served_name=self.served_name or served_name,
            controller=controller,
            host=section.host,
            grpc_port=_port_of(section.grpc_port, index),
            http_port=_port_of(section.http_port, index),
            max_queue=section.max_queue,
            token_window=section.token_window,
            max_queued_prefill_tokens=section.max_queued_prefill_tokens,
            max_running_per_worker=section.max_running_per_worker,
            max_replays=section.max_replays,
            replay_share=section.replay_share,
            replays_per_s=section.replays_per_s,
            breaker_failures=section.breaker_failures,
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
            queue=self._queue_config(),
            policy=section.policy,
            disaggregate=section.disaggregate,
            classes=section.classes.to_config(),
            tenants=tuple(tenant.to_config(name) for name, tenant in section.tenants.items()),
            api_keys_file=section.api_keys_file,
            claim_ttl_s=self.claim_ttl_s,
            tool_call_parser=section.tool_call_parser,
            chat_template=section.chat_template or "",
            default_max_tokens=section.default_max_tokens,
            security=security or self.internal_security,
            tls=self.tls.public.to_config(),
            allow_insecure_listen=section.allow_insecure_listen,
            max_prompt_bytes=int(section.max_prompt_bytes),
            max_metadata_bytes=int(section.max_metadata_bytes),
            max_streams_per_connection=section.max_streams_per_connection,
            max_connections=section.max_connections,
            max_calls=section.max_calls,
            log_level=section.log_level,
            log_prompts=section.log_prompts,
        )

    def _queue_config(self) -> QueueConfig:
        """The order of waiting requests, as router and workers know it."""
        weights = tuple(TenantWeight(name, tenant.weight) for name, tenant in self.router.tenants.items())
        return QueueConfig(self.queue.policy, self.queue.sjf_age_tokens, self.queue.batch_share, weights)

    def check(self) -> None:
        """Raise ConfigError if values that are fine one by one do not fit together."""
        self._queue_config()
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
            if codec == "tc4" and key != "transfer.codec" and not self.transfer.calibration:
                needed = "another codec, or a file made by `pdserve calibrate` as transfer.calibration"
                raise ConfigError(key, codec, needed)
            if codec is not None and source not in CODEC_DTYPES.get(codec, (source,)):
                fitting = [name for name in CODEC_CHOICES if source in CODEC_DTYPES.get(name, (source,))]
                raise ConfigError(key, codec, f"{', '.join(fitting)} while the prefill pool's dtype is {source}")
        if self.dead_after_s < 2 * self.heartbeat_s:
            raise ConfigError("dead_after_s", self.dead_after_s, f"at least twice heartbeat_s ({self.heartbeat_s})")
        self._check_ports()
        security = self.internal_security
        if self.ray.worker_host != "auto":
            check_internal_listen("ray.worker_host", self.ray.worker_host, security)
        plan = CorePlan(0, (), ())
        for role in Role:
            self._worker_config(
                f"{role}-0",
                role,
                plan=plan,
                num_blocks=1,
                model_path="",
                served_name="",
                controller="",
                host="127.0.0.1",
                security=security,
            )
        self.router_config(model_path=Path(), served_name="", controller="")

    def _check_ports(self) -> None:
        count = self.router.replicas
        ports = {"router.grpc_port": self.router.grpc_port, "router.http_port": self.router.http_port}
        for key, port in ports.items():
            if port + count - 1 > 65535:
                raise ConfigError(key, port, f"at most {65536 - count} with {count} routers")
        grpc_port, http_port = ports.values()
        if grpc_port > 0 and http_port > 0 and abs(grpc_port - http_port) < count:
            allowed = f"a port at least {count} away from router.grpc_port ({grpc_port}), 0 or -1"
            raise ConfigError("router.http_port", http_port, allowed)

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
        security: InternalSecurity,
    ) -> WorkerConfig:
        pool = self.pool(role)
        try:
            scheduler = SchedulerConfig(**pool.scheduler.model_dump(), queue=self._queue_config())
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
            security=security,
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
            allow_plaintext_kv=section.allow_plaintext_kv,
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


def _port_of(first: int, index: int | None) -> int:
    """The port of router `index`, of which the first has `first`; 0 and -1 mean the same for all."""
    return first + (index or 0) if first > 0 else first
