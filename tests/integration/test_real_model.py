"""Right answers on the demo model in fp32, through prefill worker, transfer and decode worker.

Every token is checked against `transformers` (see tests/support/reference.py), and the aggregated worker's output is
compared too. A token may differ only where the two best logits are closer than 1e-3; how many did is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pdcore.config import TransferConfig
from pdcore.types import Role
from tests.support.generate import Outcome, generate
from tests.support.local_cluster import LocalCluster
from tests.support.processes import REPOSITORY, worker_config
from tests.support.reference import Divergence, divergences, load_reference

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NEW_TOKENS = 48
PATIENCE_S = 60.0  # nothing fails here: a machine with other work must not look like a fault
BLOCK = 16
# One to about 1,500 tokens; every length modulo the block size is among them.
LENGTHS = [1, 2, 3, 4, 5, 15, 16, 17, 22, 25, 26, 28, 39, 45, 46, 59, 80, 104, 119, 171, 236, 331, 700, 1501]


def _prompts(model: Path) -> list[list[int]]:
    """Real text of this repository, cut to each length at another place."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = (REPOSITORY / "docs" / "architecture.md").read_text() + (REPOSITORY / "CONTRIBUTING.md").read_text()
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) > max(LENGTHS) + 24
    return [tokens[i : i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def clusters(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalCluster]]:
    def config(role: Role):  # type: ignore[no-untyped-def]
        made = worker_config(
            demo_model,
            role,
            block_size=BLOCK,
            num_blocks=1024,
            served_name="smollm2-135m",
            prefix_cache=False,
            transfer=TransferConfig(lease_s=PATIENCE_S, send_timeout_s=PATIENCE_S),
        )
        # One thread: two would wait for each other at every operation while another test has one of the cores.
        return replace(made, engine=replace(made.engine, threads=1), dead_after_s=PATIENCE_S)

    def cluster(*roles: Role) -> LocalCluster:
        patience = {"dead_after_s": PATIENCE_S, "claim_ttl_s": 2 * PATIENCE_S}
        return LocalCluster(demo_model, folder, [config(role) for role in roles], forked=True, **patience)

    folder = tmp_path_factory.mktemp("real")
    with cluster(Role.PREFILL, Role.DECODE) as split, cluster(Role.AGGREGATED) as whole:
        yield {"split": split, "whole": whole}


def test_greedy_output_is_the_reference_s(
    clusters: dict[str, LocalCluster], demo_model: Path, tell: Callable[[str], None]
) -> None:
    assert {length % BLOCK for length in LENGTHS} == set(range(BLOCK))
    prompts = _prompts(demo_model)
    split, whole = clusters["split"].address, clusters["whole"].address

    # The two clusters share nothing but the machine, and neither uses more than a core.
    with ThreadPoolExecutor(8) as one_pool, ThreadPoolExecutor(8) as other_pool:
        there = other_pool.map(lambda prompt: generate(whole, prompt, NEW_TOKENS, timeout_s=300.0), prompts)
        alone = [generate(split, prompt, NEW_TOKENS, timeout_s=300.0) for prompt in prompts]
        here = one_pool.map(lambda prompt: generate(split, prompt, NEW_TOKENS, timeout_s=300.0), prompts)
        reference = load_reference(demo_model)
        checked: list[list[Divergence]] = []
        for prompt, outcome in zip(prompts, alone, strict=True):
            _assert_whole(outcome, "alone")
            checked.append(divergences(reference, prompt, outcome.tokens))
        together, aggregated = list(here), list(there)

    counts = {}
    for name, outcomes in (("alone", alone), ("8 at a time", together), ("aggregated", aggregated)):
        counts[name] = 0
        for index, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
            _assert_whole(outcome, name)
            if name != "alone" and outcome.tokens == alone[index].tokens:
                continue  # checked with the first
            found = checked[index] if name == "alone" else divergences(reference, prompt, outcome.tokens)
            assert all(d.margin < 1e-3 for d in found), (name, len(prompt), found)
            counts[name] += len(found)
    tell(f"{len(prompts)} prompts x {NEW_TOKENS} tokens; differing within the margin: {counts}")


def _assert_whole(outcome: Outcome, name: str) -> None:
    assert outcome.error is None, (name, outcome.details)
    assert len(outcome.tokens) == NEW_TOKENS
    assert outcome.end is not None
    if name != "aggregated":
        assert outcome.end.timeline.mode == "disaggregated", outcome.end.timeline
        assert outcome.end.timeline.kv.raw_bytes == outcome.end.usage.prompt_tokens * 2 * 30 * 3 * 64 * 4
        assert outcome.end.timeline.replays == 0
    else:
        assert outcome.end.timeline.mode == "local"


def test_the_normal_path_recomputes_nothing(clusters: dict[str, LocalCluster]) -> None:
    for worker in clusters["split"].of_role(Role.DECODE):
        with clusters["split"].probe(worker) as probe:
            probe.wait(lambda probe=probe: probe.load is not None, 5.0, "a load")
            assert probe.load is not None
            assert not any(probe.load.recomputed_tokens.values())
    clusters["split"].assert_baseline(12.0)
