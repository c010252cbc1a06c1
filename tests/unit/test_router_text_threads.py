"""Long prompts are tokenised beside everything else, a few at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from router.chat_template import Conversation
from router.text_threads import LONG_THREADS, SHORT_CHARS, TextThreads
from router.tokenizer import TextModel
from tests.support.tiny_model import tiny_llama


class Gate:
    """Work that goes on when the test says so; counts how much of it has begun."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = 0
        self._count = threading.Lock()

    def __call__(self) -> str:
        with self._count:
            self.begun += 1
        assert self.open.wait(30.0)
        return "done"


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()  # no thread is left behind by a test that failed


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.005)


async def test_short_texts_pass_long_ones_and_only_a_few_long_ones_run_at_once(gate: Gate) -> None:
    threads = TextThreads()
    long = [asyncio.create_task(threads.run(SHORT_CHARS + 1, gate)) for _ in range(LONG_THREADS + 3)]
    await until(lambda: gate.begun == LONG_THREADS)
    for _ in range(20):
        assert await asyncio.wait_for(threads.run(SHORT_CHARS, lambda: "short"), 20.0) == "short"
    assert gate.begun == LONG_THREADS
    assert not any(task.done() for task in long)
    gate.open.set()
    assert await asyncio.wait_for(asyncio.gather(*long), 20.0) == ["done"] * len(long)
    threads.close()


async def test_the_event_loop_goes_on_and_an_error_is_the_callers(gate: Gate) -> None:
    threads = TextThreads()
    work = asyncio.create_task(threads.run(1, gate))
    await until(lambda: gate.begun == 1)
    gate.open.set()
    assert await asyncio.wait_for(work, 20.0) == "done"
    with pytest.raises(ZeroDivisionError):
        await threads.run(1, lambda: 1 // 0)
    threads.close()


async def test_a_prompt_is_not_kept_waiting_by_long_ones(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TextModel.load(tiny_llama(tmp_path))
    encode = model._encode

    def slow_if_long(text: str, **options: bool) -> list[int]:
        if len(text) > SHORT_CHARS:
            gate()
        return encode(text, **options)

    monkeypatch.setattr(model, "_encode", slow_if_long)
    text = "word " * SHORT_CHARS
    conversation = Conversation(({"role": "user", "content": text},), chars=len(text))
    long = [asyncio.create_task(model.tokenize(text, len(text))) for _ in range(2)]
    long += [asyncio.create_task(model.tokenize_chat(conversation, 2 * len(text))) for _ in range(2)]
    await until(lambda: gate.begun == LONG_THREADS)
    short = await asyncio.wait_for(model.tokenize("word", 10), 20.0)
    assert await asyncio.wait_for(model.detokenize(short), 20.0) == "word"
    assert await asyncio.wait_for(
        model.tokenize_chat(Conversation(({"role": "user", "content": "word"},)), 100), 20.0
    )
    assert not any(task.done() for task in long)
    gate.open.set()
    assert all(await asyncio.wait_for(asyncio.gather(*long), 20.0))
    model.close()
