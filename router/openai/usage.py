"""Token counts of an answer, as OpenAI's `usage`."""

from __future__ import annotations

import json
from collections import Counter

from router.calls import Call
from router.stream import Chunk, Terminal

NO_USAGE = "}\n\n"
USAGE_COMES = ',"usage":null}\n\n'
"""How an event ends whose stream has no usage, or has it in the end."""


class Usage:
    """Adds up the ends of an answer's samples. A prompt is computed once for all of its samples, and counts once."""

    def __init__(self) -> None:
        self._prompt = 0
        self._cached = 0
        self._completion = 0

    def add(self, sample: int, end: Terminal, *, discarded: bool = False) -> None:
        """The end of sample number `sample` of a prompt. `discarded`: nobody sees what it has generated."""
        if not discarded:
            self._completion += end.completion_tokens
        if sample == 0:
            self._prompt += end.prompt_tokens
            self._cached += end.timeline.cached_tokens

    def to_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }

    def to_response_dict(self) -> dict[str, object]:
        """As ``/v1/responses`` has it."""
        return {
            "input_tokens": self._prompt,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens": self._completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._prompt + self._completion,
        }


class RunningUsage:
    """The tokens so far, which each event of a stream tells of its choice: `continuous_usage_stats`."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._tokens: Counter[tuple[int, int]] = Counter()

    def begin(self, number: int, call: Call) -> None:
        """Prompt `number` has been let in."""
        self._prompts[number] = len(call.request.prompt)

    def add(self, number: int, sample: int, chunk: Chunk) -> str:
        """Count a chunk's tokens; returns how its events end."""
        self._tokens[number, sample] += len(chunk.token_ids)
        prompt, tokens = self._prompts[number], self._tokens[number, sample]
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        return f',"usage":{json.dumps(usage)}}}\n\n'
