"""The demo model through the runner alone: greedy tokens in fp32 equal those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.loader import load_runner
from engine.model_store import resolve_model
from pdcore.config import EngineConfig
from tests.support.steps import ManualDriver, ManualSequence, Part

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
NEAR_TIE = 1e-3
QUESTIONS = ("What is the capital of France?", "Write a haiku about rivers.", "def fibonacci(n):")


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model("smollm2-135m").path


@pytest.fixture(scope="module")
def prompts(demo: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer(text).input_ids for text in texts]


def test_greedy_tokens_equal_transformers(demo: Path, prompts: list[list[int]]) -> None:
    driver = ManualDriver(load_runner(EngineConfig(str(demo), "demo", dtype="float32", num_blocks=64)))
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32, local_files_only=True)
    outputs = driver.generate(prompts, steps=24, chunk=32)
    ties = 0
    for prompt, tokens in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        for row, token in zip(logits, tokens, strict=True):
            best = row.max()
            if row.argmax() != token:
                assert best - row[token] < NEAR_TIE
                ties += 1
    print(f"{ties} near-ties")


def test_bf16_logits_stay_near_fp32(demo: Path, prompts: list[list[int]]) -> None:
    """Teacher-forced on the demo model: logits differ by less than 1 everywhere, by less than 0.12 on average."""
    runs = []
    for dtype in ("float32", "bfloat16"):
        driver = ManualDriver(load_runner(EngineConfig(str(demo), "demo", dtype=dtype, num_blocks=64)))
        runs.append(driver.logits([Part(ManualSequence(prompt), len(prompt)) for prompt in prompts]))
    error = (runs[0] - runs[1]).abs()
    assert error.max() < 1.0
    assert error.mean() < 0.12
