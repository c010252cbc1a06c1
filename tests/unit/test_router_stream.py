"""The mailbox between a tracker and a client's call."""

from __future__ import annotations

import asyncio

from pdcore.logprobs import Logprobs
from pdcore.types import FinishReason
from router.effects import Outcome
from router.stream import PROMPT_TOKENS_AT_ONCE, Chunk, RequestStream, Terminal
from router.text import TextStream
from router.tracker import Timeline


class Letters:
    def push(self, token_id: int) -> str:
        return chr(97 + token_id)

    def flush(self) -> str:
        return ""


def scores(start: int, count: int) -> Logprobs:
    values = tuple(-float(position) for position in range(start, start + count))
    return Logprobs(start, 1, values, tuple(range(start, start + count)), values)


async def next_chunk(stream: RequestStream) -> Chunk:
    await asyncio.wait_for(stream.ready(), 1.0)
    return stream.take()


async def test_all_that_is_there_comes_at_once() -> None:
    stream = RequestStream(TextStream(Letters(), None))
    stream.push_prompt(scores(1, 3))
    stream.push_prompt(scores(4, 2))
    stream.push(0, False, scores(0, 1))
    stream.push(1, False, scores(1, 1))
    chunk = await next_chunk(stream)
    assert (chunk.index, chunk.token_ids, chunk.text) == (0, [0, 1], "ab")
    assert chunk.logprobs == scores(0, 2)
    assert chunk.prompt_logprobs == scores(1, 5)
    stream.push(2, False, None)
    chunk = await next_chunk(stream)
    assert (chunk.index, chunk.token_ids, chunk.logprobs, chunk.prompt_logprobs) == (2, [2], None, None)


async def test_a_long_prompts_scores_come_in_parts_before_any_token_and_the_end() -> None:
    stream = RequestStream(TextStream(Letters(), None))
    total = 2 * PROMPT_TOKENS_AT_ONCE + 10
    stream.push_prompt(scores(1, total))
    stream.push(0, False, None)
    stream.end(Terminal(Outcome(FinishReason.LENGTH), total + 1, 1, Timeline(0.0)))
    chunks = [await next_chunk(stream) for _ in range(3)]
    parts = [chunk.prompt_logprobs for chunk in chunks]
    assert [(part.start, len(part)) for part in parts if part is not None] == [
        (1, PROMPT_TOKENS_AT_ONCE),
        (1 + PROMPT_TOKENS_AT_ONCE, PROMPT_TOKENS_AT_ONCE),
        (1 + 2 * PROMPT_TOKENS_AT_ONCE, 10),
    ]
    assert [list(chunk.token_ids) for chunk in chunks] == [[], [], [0]]
    assert [chunk.end is not None for chunk in chunks] == [False, False, True]
