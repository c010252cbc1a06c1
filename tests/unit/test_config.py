"""The configuration tree: what it refuses and how it says so, and what it hands on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from cluster.config import ClusterConfig
from cluster.config_file import load_config, to_yaml
from cluster.config_sections import CodecChoice, PoolSection, QueueSection, SchedulerSection, ToolCallParser
from cluster.kv_shape import kv_bytes_per_token
from kv_transfer import frames
from kv_transfer.codecs.registry import STANDARD
from pdcore.classes import ClassObjective, ClassObjectives, TenantLimits
from pdcore.config import (
    CODEC_CHOICES,
    CODEC_DTYPES,
    CODECS,
    LOSSLESS_CODECS,
    QUEUE_POLICIES,
    TOOL_CALL_PARSERS,
    KvCodecByClass,
    QueueConfig,
    TenantWeight,
)
from pdcore.errors import ConfigError, ModelError
from pdcore.memory import available_memory
from pdcore.objective import OBJECTIVES, ROUTER_DEFAULTS, SCHEDULER_DEFAULTS
from pdcore.types import DTYPE_BYTES, PriorityClass, Role

CORES = [0, 1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder's config.json; 2 * 3 layers * 2 heads * 16 * 2 bytes = 384 bytes per token in bf16."""
    shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


def load_text(tmp_path: Path, text: str, **overrides: object) -> ClusterConfig:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_config(path, {key.replace("__", "."): value for key, value in overrides.items()})


@pytest.mark.parametrize(
    ("overrides", "key", "value", "words"),
    [
        ({"prefil.workers": 1}, "prefil", {"workers": 1}, "did you mean prefill?"),
        (
            {"decode.scheduler.max_num_sequences": 3},
            "decode.scheduler.max_num_sequences",
            3,
            "mean decode.scheduler.max_num_seqs?",
        ),
        ({"dtype": "bfloat"}, "dtype", "bfloat", "'float32', 'bfloat16' or 'float16'; did you mean bfloat16?"),
        ({"transfer.codec": "bexp_zstd"}, "transfer.codec", "bexp_zstd", "did you mean bexp-zstd?"),
        ({"router.grpc_port": 99999}, "router.grpc_port", 99999, "less than or equal to 65535"),
        ({"router.grpc_port": "50051"}, "router.grpc_port", "50051", "a valid integer"),
        ({"router.max_queue": True}, "router.max_queue", True, "a valid integer"),
        ({"prefill.threads": "many"}, "prefill.threads", "many", "'auto' or a valid integer"),
        ({"prefill.threads": 0}, "prefill.threads", 0, "'auto' or greater than or equal to 1"),
        ({"decode.cpu_affinity": "0,1"}, "decode.cpu_affinity", "0,1", "'auto' or a list of core numbers"),
        ({"prefill.kv_memory": "lots"}, "prefill.kv_memory", "lots", "a size such as 512MiB"),
        ({"decode.kv_memory": 0.0}, "decode.kv_memory", 0.0, "greater than 0"),
        ({"heartbeat_s": float("nan")}, "heartbeat_s", None, "finite"),
        ({"objective": "speed"}, "objective", "speed", "'latency', 'balanced' or 'throughput'"),
        ({"queue.policy": "prioritie"}, "queue.policy", "prioritie", "did you mean priority?"),
        ({"queue.batch_share": 0.7}, "queue.batch_share", 0.7, "less than or equal to 0.5"),
        ({"router.tenants.acme.weight": 0}, "router.tenants.acme.weight", 0, "greater than 0"),
        ({"router.tenants.acme.wieght": 2}, "router.tenants.acme.wieght", 2, "mean router.tenants.acme.weight?"),
        ({"router.tenants.acme": 2}, "router.tenants.acme", 2, "a mapping of keys"),
        ({"router.tenants.a.default_class": "bath"}, "router.tenants.a.default_class", "bath", "did you mean batch?"),
        ({"router.classes.batch.ttft_ms": -1}, "router.classes.batch.ttft_ms", -1, "greater than or equal to 0"),
        ({"router.classes.batch.max_queue": 0}, "router.classes.batch.max_queue", 0, "greater than or equal to 1"),
        (
            {"prefill.scheduler.target_itl_ms": 9},
            "prefill.scheduler.target_itl_ms",
            9,
            "eys of prefill.scheduler are",
        ),
        (
            {"aggregated.scheduler.local_prefill_tokens": 9},
            "aggregated.scheduler.local_prefill_tokens",
            9,
            "eys of aggregated.scheduler are",
        ),
        ({"decode.scheduler.target_itl_ms": -1}, "decode.scheduler.target_itl_ms", -1, "greater than or equal to 0"),
        ({"name": "a b"}, "name", "a b", "match pattern"),
        ({"prefill": 3}, "prefill", 3, "a mapping of keys"),
        # Values that are fine one by one and do not fit together.
        ({"decode.workers": 0}, "decode.workers", 0, "at least 1 beside 1 prefill workers"),
        ({"prefill.workers": 0}, "prefill.workers", 0, "or at least 1 aggregated worker"),
        ({"decode.scheduler.max_num_seqs": 1000}, "decode.scheduler.max_num_seqs", 1000, "max_num_batched_tokens"),
        ({"transfer.credit_bytes": "300KiB"}, "transfer.credit_bytes", 300 << 10, "twice message_bytes"),
        ({"router.replicas": 0}, "router.replicas", 0, "greater than or equal to 1"),
        (
            {"router.replicas": 3, "router.grpc_port": 65534},
            "router.grpc_port",
            65534,
            "at most 65533 with 3 routers",
        ),
        ({"router.http_port": -2}, "router.http_port", -2, "greater than or equal to -1"),
        (
            {"router.replicas": 3, "router.http_port": 65534},
            "router.http_port",
            65534,
            "at most 65533 with 3 routers",
        ),
        (
            {"router.replicas": 2, "router.grpc_port": 8001},
            "router.http_port",
            8000,
            "at least 2 away from router.grpc_port (8001)",
        ),
        ({"router.claim_ttl_s": 5}, "router.claim_ttl_s", 5, "at least twice dead_after_s (3)"),
        ({"dead_after_s": 0.6}, "dead_after_s", 0.6, "at least twice heartbeat_s"),
        ({"decode.preemption": "drop"}, "decode.preemption", "drop", "'auto', 'swap' or 'recompute'"),
        ({"decode.preemption": "swap"}, "decode.preemption", "swap", "auto or recompute while swap_memory is 0"),
        (
            {"aggregated.swap_memory": "1MiB", "aggregated.preemption": "recompute"},
            "aggregated.swap_memory",
            1 << 20,
            "0 while preemption is recompute",
        ),
        ({"prefill.swap_memory": "1MiB"}, "prefill.swap_memory", "1MiB", "eys of prefill are workers"),
        ({"dtype": "float32", "transfer.codec": "bexp-zstd"}, "transfer.codec", "bexp-zstd", "auto, raw, zstd, q8"),
        ({"router.kv_codec_by_class.batch": "bexp4"}, "router.kv_codec_by_class.batch", "bexp4", "you mean bexp3?"),
        (
            {"dtype": "float16", "router.kv_codec_by_class.interactive": "bexp3"},
            "router.kv_codec_by_class.interactive",
            "bexp3",
            "auto, raw, zstd, bexp-zstd, q8",
        ),
    ],
)
def test_refusal_names_key_value_and_what_is_allowed(
    overrides: dict[str, object], key: str, value: object, words: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(None, overrides)
    assert refusal.value.key == key
    if value is not None:
        assert refusal.value.value == value
    assert words in refusal.value.allowed
    assert key in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "router: {max_qeue: 1}",
            "there is no key router.max_qeue; did you mean router.max_queue? Keys of router are host",
        ),
        ("grpc_port: 1", "there is no key grpc_port; did you mean router.grpc_port? Keys at the top are name, model"),
        (
            "router.grpc_port: 1",
            "there is no key router.grpc_port: sections are nested in a file, as in router: {grpc_",
        ),
        ("zzz: 1", "there is no key zzz. Keys at the top are name, model"),
        ("router: {max_queue: -1}", "router.max_queue: -1 is not allowed; allowed: "),
        ("dead_after_s: 0.6", "dead_after_s: 0.6 is not allowed; allowed: at least twice heartbeat_s"),
        ("model: a\nmodel: b", "model: 'given twice' is not allowed"),
    ],
)
def test_a_refusal_names_the_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(tmp_path, text)
    assert str(refusal.value).startswith(f"{tmp_path}/cluster.yaml: {words}")


def test_a_refusal_does_not_blame_the_file_for_what_a_flag_says(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_text(tmp_path, "router: {max_queue: 2}", router__max_queue=-1)
    assert str(refusal.value).startswith("router.max_queue: -1 is not allowed")
    with pytest.raises(ConfigError, match=r"^there is no key router\.max_qeue; did you mean router\.max_queue\?"):
        load_text(tmp_path, "router: {max_queue: 2}", router__max_qeue=2)


def test_two_sizes_of_one_pool_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="either kv_memory or num_blocks") as refusal:
        load_text(tmp_path, "prefill: {workers: 1, kv_memory: 1GiB, num_blocks: 4}")
    assert refusal.value.key == "prefill"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prefill: {workers: 1}\nprefill: {workers: 2}\n", "prefill.*each key once"),
        ("router:\n  max_queue: 1\n  max_queue: 2\n", "max_queue.*each key once"),
        ("router: [\n", "valid YAML"),
        ("model: 2020-13-45\n", "valid YAML"),
        (f"router: {{grpc_port: {'1' * 5000}}}\n", "valid YAML"),
        ("[" * 3000, "valid YAML"),
        ("name: &a [*a]\n", "Circular reference"),
        ("- a\n- b\n", "mapping of keys at its top"),
        ("1: 2\n", "a key that is a string"),
    ],
)
def test_broken_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_text(tmp_path, text)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a readable UTF-8 file"):
        load_config(tmp_path / "none.yaml")


def test_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_text(tmp_path, "") == load_config(None)


def test_a_section_of_which_nothing_is_given_is_the_defaults(tmp_path: Path) -> None:
    text = "prefill:\n  scheduler:\n    #max_num_seqs: 3\nrouter:\ntls:\n  public:\n"
    assert load_text(tmp_path, text) == load_config(None)
    config = load_text(tmp_path, text, prefill__scheduler__max_num_seqs=4)
    assert config.prefill.scheduler.max_num_seqs == 4
    with pytest.raises(ConfigError, match=r"router\.tenants\.acme: None is not allowed"):
        load_text(tmp_path, "router: {tenants: {acme: }}")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    config = load_text(tmp_path, "router: {grpc_port: 1, max_queue: 7}\n", router__grpc_port=2)
    assert (config.router.grpc_port, config.router.max_queue) == (2, 7)


def test_flag_cannot_reach_into_a_plain_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a mapping of keys, since router\.max_queue is set"):
        load_text(tmp_path, "router: 3\n", router__max_queue=2)


@pytest.mark.parametrize("explain", [False, True])
def test_printed_configuration_reads_back_to_the_same(tmp_path: Path, explain: bool) -> None:
    config = load_text(
        tmp_path,
        "served_name: 'yes: it is'\ndtype: float16\nprefill: {workers: 2, threads: 3, cpu_affinity: [0, 1]}\n"
        "decode: {workers: 1, num_blocks: 17}\ntransfer: {frame_bytes: 12345, codec: raw}\n",
    )
    path = tmp_path / "printed.yaml"
    path.write_text(to_yaml(config, explain=explain))
    again = load_config(path)
    assert again.model_dump() == config.model_dump()


def test_every_key_is_explained() -> None:
    lines = to_yaml(load_config(None), explain=True).splitlines()
    keys = [index for index, line in enumerate(lines) if not line.lstrip().startswith("# ")]
    assert keys
    assert any(lines[index].lstrip().startswith("#") for index in keys)
    assert all(lines[index - 1].lstrip().startswith("# ") for index in keys)


def make_workers(config: ClusterConfig, model: Path, cores: list[int] | None = CORES) -> dict[str, object]:
    workers = config.worker_configs(
        model_path=model, served_name="m", controller="127.0.0.1:1", host="127.0.0.1", cores=cores
    )
    return {worker.worker_id: worker for worker in workers}


def test_pools_may_have_types_of_their_own(tmp_path: Path, model: Path) -> None:
    config = load_text(tmp_path, "decode: {dtype: float32, kv_memory: 1MiB}\nprefill: {kv_memory: 1MiB}\n")
    workers = make_workers(config, model)
    prefill, decode = workers["prefill-0"], workers["decode-0"]
    assert (prefill.engine.dtype, decode.engine.dtype) == ("bfloat16", "float32")
    assert prefill.engine.num_blocks // 2 == decode.engine.num_blocks
    # Codecs pack what the prefill pool has.
    load_text(tmp_path, "decode: {dtype: float32}\ntransfer: {codec: bexp3}\n").check()


@pytest.mark.parametrize(
    ("text", "key", "allowed"),
    [
        ("dtype: float32\ndecode: {dtype: bfloat16}\n", "decode.dtype", "kv_conversion"),
        ("dtype: float16\ndecode: {dtype: bfloat16}\n", "decode.dtype", "float16 or float32"),
        (
            "prefill: {dtype: float32}\ndecode: {dtype: float32}\ntransfer: {codec: bexp3}\n",
            "transfer.codec",
            "prefill",
        ),
    ],
)
def test_types_that_do_not_go_together_are_refused(tmp_path: Path, text: str, key: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed) as caught:
        load_text(tmp_path, text).check()
    assert caught.value.key == key
    if key == "decode.dtype":
        load_text(tmp_path, text + "transfer: {kv_conversion: rounding}\n").check()


def test_workers_get_what_the_file_says(tmp_path: Path, model: Path) -> None:
    config = load_text(
        tmp_path,
        "dtype: float16\nmax_model_len: 99\nmodel_impl: transformers\n"
        "heartbeat_s: 0.25\ndead_after_s: 2\ndrain_timeout_s: 7\n"
        "prefill: {workers: 2, block_size: 8, num_blocks: 5, threads: 3, cpu_affinity: [1]}\n"
        "decode: {workers: 1, prefix_cache: false, swap_memory: 1MiB, preemption: swap, "
        "scheduler: {max_num_seqs: 9, max_num_batched_tokens: 100, local_prefill_tokens: 3}}\n"
        "aggregated: {workers: 1}\ntransfer: {codec: zstd, lease_s: 4, cpu_affinity: []}\n"
        "ray: {allow_insecure_listen: true}\n",
    )
    workers = config.worker_configs(
        model_path=model, served_name="m", controller="127.0.0.1:1", host="10.0.0.1", cores=CORES
    )
    assert [worker.worker_id for worker in workers] == ["prefill-0", "prefill-1", "decode-0", "aggregated-0"]
    assert [worker.role for worker in workers] == [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.AGGREGATED]
    prefill, decode = workers[1], workers[2]
    assert prefill.engine.model_path == str(model)
    assert (prefill.engine.dtype, prefill.engine.max_model_len, prefill.engine.served_name) == ("float16", 99, "m")
    assert (prefill.engine.block_size, prefill.engine.num_blocks) == (8, 5)
    assert {worker.engine.model_impl for worker in workers} == {"transformers"}
    assert (prefill.engine.threads, prefill.engine.cpu_affinity) == (3, (1,))
    assert (prefill.host, prefill.port, prefill.controller) == ("10.0.0.1", 0, "127.0.0.1:1")
    assert (prefill.heartbeat_s, prefill.dead_after_s, prefill.drain_timeout_s) == (0.25, 2.0, 7.0)
    assert (decode.engine.scheduler.max_num_seqs, decode.engine.scheduler.max_num_batched_tokens) == (9, 100)
    assert (prefill.engine.prefix_cache, decode.engine.prefix_cache) == (True, False)
    assert decode.engine.scheduler.local_prefill_tokens == 3
    assert (decode.engine.swap_memory, decode.engine.preemption) == (1 << 20, "swap")
    assert (workers[3].engine.swap_memory, workers[3].engine.preemption) == (0, "auto")
    assert (decode.transfer.codec, decode.transfer.lease_s, decode.transfer.cpu_affinity) == ("zstd", 4.0, ())
    assert decode.faults == ()


def test_router_gets_what_the_file_says(tmp_path: Path, model: Path) -> None:
    config = load_text(
        tmp_path,
        "name: blue\nserved_name: s\nheartbeat_s: 0.25\nrouter: {host: 0.0.0.0, allow_insecure_listen: true, "
        "grpc_port: 0, max_queue: 3, "
        "token_window: 5, max_replays: 0, client_stall_timeout_s: 9, max_message_bytes: 1MiB, "
        "max_queued_prefill_tokens: 11, max_running_per_worker: 12}\n",
    )
    router = config.router_config(model_path=model, served_name="m", controller="127.0.0.1:1")
    assert (router.router_id, router.served_name, router.model_path) == ("blue-router", "s", str(model))
    assert (router.host, router.grpc_port, router.controller) == ("0.0.0.0", 0, "127.0.0.1:1")
    assert (router.max_queue, router.token_window, router.max_replays) == (3, 5, 0)
    assert (router.client_stall_timeout_s, router.max_message_bytes) == (9.0, 1 << 20)
    assert (router.max_queued_prefill_tokens, router.max_running_per_worker) == (11, 12)
    assert router.heartbeat_s == 0.25


def test_kv_memory_becomes_whole_blocks(tmp_path: Path, model: Path) -> None:
    config = load_text(tmp_path, "prefill: {workers: 1, kv_memory: 100KiB}\ndecode: {workers: 1, kv_memory: 6144}\n")
    workers = make_workers(config, model)
    assert workers["prefill-0"].engine.num_blocks == (100 << 10) // (16 * 384)
    assert workers["decode-0"].engine.num_blocks == 1
    too_small = load_text(tmp_path, "prefill: {workers: 1, kv_memory: 6143}\n")
    with pytest.raises(ConfigError, match="at least one block: 6144 bytes") as refusal:
        make_workers(too_small, model)
    assert refusal.value.key == "prefill.kv_memory"
    too_small = load_text(tmp_path, "decode: {workers: 1, swap_memory: 6143, num_blocks: 9}\n")
    with pytest.raises(ConfigError, match="0, or at least one block: 6144 bytes") as refusal:
        make_workers(too_small, model)
    assert refusal.value.key == "decode.swap_memory"


def test_head_dim_of_the_model_wins_over_the_quotient(model: Path) -> None:
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**shape, "head_dim": 32}))
    assert kv_bytes_per_token(model, "float32") == 2 * 3 * 2 * 32 * 4


def test_shape_under_other_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 64}')
    assert kv_bytes_per_token(tmp_path, "float32") == 2 * 3 * 4 * 16 * 4


@pytest.mark.parametrize("text", ["", "[]", '{"hidden_size": 64}'])
def test_model_without_a_shape_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="does not give the model's shape"):
        kv_bytes_per_token(tmp_path, "bfloat16")


def test_codecs_of_requests_that_ask_for_none(model: Path) -> None:
    config = load_config(None, {"transfer.codec": "zstd", "router.kv_codec_by_class.batch": "q8"})
    workers = make_workers(config, model)
    assert {worker.transfer.codec for worker in workers.values()} == {"zstd"}
    router = config.router_config(model_path=model, served_name="m", controller="c:1")
    assert router.kv_codec_by_class == KvCodecByClass(batch="q8")
    assert load_config(None).transfer.codec == "auto"


def test_policy_names_are_the_same_everywhere() -> None:
    assert get_args(QueueSection.model_fields["policy"].annotation) == QUEUE_POLICIES


def test_codec_names_are_the_same_everywhere() -> None:
    assert get_args(CodecChoice) == CODEC_CHOICES
    assert get_args(ToolCallParser) == TOOL_CALL_PARSERS
    assert set(LOSSLESS_CODECS) == frames.LOSSLESS_CODECS
    assert set(CODECS) == set(frames.CODEC_IDS)
    for codec in STANDARD:
        assert set(codec.dtypes) == set(CODEC_DTYPES.get(codec.name, DTYPE_BYTES)), codec.name


def _values(objective: str) -> list[int]:
    return list(ROUTER_DEFAULTS[objective].values())


class TestObjective:
    def test_it_sets_the_defaults_of_every_pool_and_of_the_router(self) -> None:
        for objective in OBJECTIVES:
            config = load_config(None, {"objective": objective})
            for role in Role:
                scheduler = config.pool(role).scheduler.model_dump()
                expected = {key: value for key, value in SCHEDULER_DEFAULTS[objective].items() if key in scheduler}
                assert {key: scheduler[key] for key in expected} == expected
                assert ("target_itl_ms" in expected) == (role is not Role.PREFILL)
            assert config.router.max_running_per_worker == ROUTER_DEFAULTS[objective]["max_running_per_worker"]

    def test_what_is_given_wins(self, model: Path) -> None:
        config = load_config(None, {"objective": "throughput", "decode.scheduler.max_num_batched_tokens": 300})
        assert config.decode.scheduler.max_num_batched_tokens == 300
        assert config.decode.scheduler.prefill_chunk_tokens == 512
        assert config.prefill.scheduler.max_num_batched_tokens == 512
        assert make_workers(config, model)["decode-0"].engine.scheduler.max_num_batched_tokens == 300

    def test_no_objective_is_balanced(self) -> None:
        assert load_config(None) == load_config(None, {"objective": "balanced"})

    def test_the_two_ends_lie_on_both_sides_of_the_middle(self) -> None:
        """In the direction that their names promise."""
        for key in SCHEDULER_DEFAULTS["balanced"]:
            latency, balanced, throughput = (SCHEDULER_DEFAULTS[objective][key] for objective in OBJECTIVES)
            if key == "target_itl_ms":
                assert latency > 0 == balanced == throughput
            else:
                assert latency < balanced < throughput, key
        assert all(low < middle < high for low, middle, high in zip(*map(_values, OBJECTIVES), strict=True))

    def test_under_latency_a_step_holds_all_streams_and_a_chunk(self) -> None:
        latency = SCHEDULER_DEFAULTS["latency"]
        room = latency["max_num_batched_tokens"] - latency["max_num_seqs"]
        assert room == latency["prefill_chunk_tokens"]

    def test_the_explanation_says_what_it_does(self) -> None:
        given = {"objective": "latency", "decode.scheduler.target_itl_ms": 99, "decode.scheduler.max_num_seqs": 32}
        lines = to_yaml(load_config(None, given), explain=True).splitlines()
        where = {line.strip(): lines[i - 1] for i, line in enumerate(lines)}
        assert "(objective latency alone: 60)" in where["target_itl_ms: 99.0"]
        assert "(objective latency alone: 32)" in where["max_num_seqs: 32"]  # given, though it changes nothing
        assert "(by objective latency; " in where["#target_itl_ms: 60.0"]
        assert "(by objective latency; " in where["#max_num_seqs: 32"]

    @pytest.mark.parametrize("first", OBJECTIVES)
    @pytest.mark.parametrize("then", OBJECTIVES)
    def test_it_can_be_changed_in_an_explained_file(self, tmp_path: Path, first: str, then: str) -> None:
        given = {"decode.workers": 2, "prefill.scheduler.max_num_seqs": 64, "aggregated.scheduler.max_num_seqs": 9}
        text = to_yaml(load_config(None, {"objective": first, **given}), explain=True)
        assert text.count(f"\nobjective: {first}\n") == 1
        changed = load_text(tmp_path, text.replace(f"\nobjective: {first}\n", f"\nobjective: {then}\n"))
        assert changed.model_dump() == load_config(None, {"objective": then, **given}).model_dump()

    def test_a_value_that_loses_its_number_sign_wins(self, tmp_path: Path) -> None:
        text = to_yaml(load_config(None), explain=True)
        every = re.sub(r"(?m)^( *)#(?! )", r"\1", text).replace("objective: balanced\n", "objective: latency\n")
        pinned = load_text(tmp_path, every)
        assert pinned.model_dump() == load_config(None).model_dump() | {"objective": "latency"}
        one = text.replace("#max_running_per_worker: 64", "max_running_per_worker: 65")
        assert load_text(tmp_path, one).router.max_running_per_worker == 65

    def test_the_short_form_means_the_same_whatever_it_came_of(self, tmp_path: Path) -> None:
        for objective in OBJECTIVES:
            config = load_config(None, {"objective": objective, "decode.scheduler.max_num_seqs": 7})
            text = to_yaml(config)
            assert "#" not in text
            assert load_text(tmp_path, text).model_dump() == config.model_dump()

    def test_a_configuration_made_in_code(self) -> None:
        config = ClusterConfig(objective="latency", decode=PoolSection(scheduler=SchedulerSection(max_num_seqs=7)))
        assert (config.decode.scheduler.max_num_seqs, config.decode.scheduler.target_itl_ms) == (7, 60.0)


def test_the_queue_reaches_router_and_workers(model: Path) -> None:
    config = load_config(
        None,
        {
            "queue.policy": "fair",
            "queue.sjf_age_tokens": 9,
            "queue.batch_share": 0.25,
            "router.tenants": {"acme": {"weight": 3}},
            "decode.scheduler.target_itl_ms": 80,
            "prefill.scheduler.max_partial_prefills": 3,
            "prefill.scheduler.long_prefill_tokens": 777,
        },
    )
    expected = QueueConfig("fair", 9, 0.25, (TenantWeight("acme", 3.0),))
    assert config.router_config(model_path=model, served_name="m", controller="c:1").queue == expected
    workers = make_workers(config, model)
    assert {worker.engine.scheduler.queue for worker in workers.values()} == {expected}
    assert workers["decode-0"].engine.scheduler.target_itl_ms == 80
    assert workers["prefill-0"].engine.scheduler.max_partial_prefills == 3
    assert workers["prefill-0"].engine.scheduler.long_prefill_tokens == 777
    assert expected.weight("acme") == 3
    assert expected.weight("others") == 1


def test_classes_and_tenants_reach_the_router(tmp_path: Path, model: Path) -> None:
    text = """
queue: {policy: fair}
router:
  max_queue: 7
  api_keys_file: keys.yaml
  classes:
    interactive: {ttft_ms: 800, max_queue: 3}
    batch: {itl_ms: 900}
  tenants:
    acme: {weight: 2, requests_per_minute: 60, tokens_per_minute: 5000, max_concurrent: 4, default_class: batch}
    "*": {max_concurrent: 1}
"""
    config = load_text(tmp_path, text)
    router = config.router_config(model_path=model, served_name="m", controller="c:1")
    assert router.classes.interactive == ClassObjective(800.0, ClassObjectives().interactive.itl_ms, 3)
    assert router.classes.standard == ClassObjectives().standard
    assert router.classes.batch == ClassObjective(0.0, 900.0, None)
    assert router.max_queue_by_class == dict(zip(PriorityClass, (3, 7, 7), strict=True))
    assert router.tenants == (
        TenantLimits("acme", 60, 5000, 4, PriorityClass.BATCH),
        TenantLimits("*", max_concurrent=1),
    )
    assert router.queue.tenant_weights == (TenantWeight("acme", 2.0), TenantWeight("*", 1.0))
    assert router.api_keys_file == "keys.yaml"
    assert load_text(tmp_path, to_yaml(config)) == config


def test_kv_memory_as_a_fraction(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.config.available_memory", lambda: 100 * 16 * 384)
    config = load_text(tmp_path, "prefill: {kv_memory: 0.25}\ndecode: {kv_memory: 0.5}\n")
    workers = make_workers(config, model)
    assert workers["prefill-0"].engine.num_blocks == 25
    assert workers["decode-0"].engine.num_blocks == 50
    assert load_text(tmp_path, to_yaml(config)).model_dump() == config.model_dump()


def test_fractions_of_one_machine_that_are_too_much_together(tmp_path: Path, model: Path) -> None:
    config = load_text(tmp_path, "prefill: {kv_memory: 0.3}\ndecode: {kv_memory: 0.4, workers: 2}\n")
    with pytest.raises(ConfigError, match="less than 1 over all workers") as refusal:
        make_workers(config, model)
    assert refusal.value.key == "prefill.kv_memory"
    make_workers(config, model, cores=None)


def test_a_fraction_of_memory_that_is_not_known(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.config.available_memory", lambda: None)
    with pytest.raises(ConfigError, match="a size such as 2GiB"):
        make_workers(load_text(tmp_path, "prefill: {kv_memory: 0.3}"), model)


class TestAvailableMemory:
    def files(self, tmp_path: Path, **contents: str) -> tuple[Path, Path]:
        for name, text in contents.items():
            (tmp_path / name.replace("__", ".")).write_text(text)
        return tmp_path / "meminfo", tmp_path

    def test_what_the_kernel_estimates(self, tmp_path: Path) -> None:
        files = self.files(tmp_path, meminfo="MemTotal: 9000 kB\nMemAvailable:    5000 kB\n", memory__max="max\n")
        assert available_memory(*files) == 5000 * 1024

    def test_what_a_container_may_have_if_that_is_less(self, tmp_path: Path) -> None:
        files = self.files(
            tmp_path, meminfo="MemAvailable: 5000 kB\n", memory__max="3000000\n", memory__current="1000000\n"
        )
        assert available_memory(*files) == 2_000_000

    def test_neither(self, tmp_path: Path) -> None:
        assert available_memory(*self.files(tmp_path)) is None

    def test_this_machine(self) -> None:
        assert (available_memory() or 0) > 0


def test_several_routers_differ_in_name_and_port(model: Path) -> None:
    ports = {"router.grpc_port": 6000, "router.http_port": 6002}
    config = load_config(None, {"router.replicas": 2, "dead_after_s": 7, **ports})
    routers = [
        config.router_config(model_path=model, served_name="m", controller="c:1", index=index) for index in range(2)
    ]
    assert [(r.router_id, r.grpc_port) for r in routers] == [("pdserve-router-0", 6000), ("pdserve-router-1", 6001)]
    assert [r.http_port for r in routers] == [6002, 6003]
    assert routers[0].claim_ttl_s == 14.0, "workers must have let go before a key is free"
    free = load_config(None, {"router.replicas": 2, "router.grpc_port": 0, "router.http_port": -1})
    both = [free.router_config(model_path=model, served_name="m", controller="c", index=n) for n in (0, 1)]
    assert [(r.grpc_port, r.http_port) for r in both] == [(0, -1), (0, -1)]
    assert free.claim_ttl_s == 10.0
