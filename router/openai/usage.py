"""Token counts of an answer, as OpenAI's `usage`."""

from __future__ import annotations

from router.stream import Terminal


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
