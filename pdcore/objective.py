"""What a cluster is tuned for, by one word: defaults of many settings, each of which can still be set by itself.

==============================  =========  ==========  ============
setting                          latency    balanced    throughput
==============================  =========  ==========  ============
scheduler.max_num_batched_tokens  96         128         512
scheduler.prefill_chunk_tokens    64         128         512
scheduler.max_num_seqs            32         64          128
scheduler.max_partial_prefills    2          4           8
scheduler.long_prefill_tokens     256        512         2048
scheduler.target_itl_ms           60         0 (off)     0 (off)
router.max_running_per_worker     32         64          128
==============================  =========  ==========  ============

*latency*: few streams, steps that hold all of them and one short chunk, and that are cut to what keeps running
streams flowing. *balanced*: one longer chunk, or many streams and part of one. *throughput*: the weights are read for
as many tokens at once as is of use, whatever a single stream sees of it. The figures are for CPUs, where one core
computes 128 tokens of a small model in a second or less.
"""

from __future__ import annotations

from collections.abc import Mapping

LATENCY, BALANCED, THROUGHPUT = "latency", "balanced", "throughput"
OBJECTIVES = (LATENCY, BALANCED, THROUGHPUT)

SCHEDULER_DEFAULTS: Mapping[str, Mapping[str, int | float]] = {
    LATENCY: {
        "max_num_batched_tokens": 96,
        "max_num_seqs": 32,
        "prefill_chunk_tokens": 64,
        "max_partial_prefills": 2,
        "long_prefill_tokens": 256,
        "target_itl_ms": 60.0,
    },
    BALANCED: {
        "max_num_batched_tokens": 128,
        "max_num_seqs": 64,
        "prefill_chunk_tokens": 128,
        "max_partial_prefills": 4,
        "long_prefill_tokens": 512,
        "target_itl_ms": 0.0,
    },
    THROUGHPUT: {
        "max_num_batched_tokens": 512,
        "max_num_seqs": 128,
        "prefill_chunk_tokens": 512,
        "max_partial_prefills": 8,
        "long_prefill_tokens": 2048,
        "target_itl_ms": 0.0,
    },
}
"""Fields of `SchedulerConfig`, by objective."""

ROUTER_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    LATENCY: {"max_running_per_worker": 32},
    BALANCED: {"max_running_per_worker": 64},
    THROUGHPUT: {"max_running_per_worker": 128},
}
"""Fields of `RouterConfig`, by objective."""
