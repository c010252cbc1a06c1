"""Where the rest of a prompt is computed if a decode worker holds its beginning. Pure."""

from __future__ import annotations


def run_rest_here(rest_tokens: int, held_tokens: int, queued_prefill_tokens: int, local_prefill_tokens: int) -> bool:
    """Whether a decode worker should compute the rest of a prompt itself instead of having its KV sent.

    Sending means that a prefill worker computes the whole prompt (or holds the same beginning), and a hop. For less
    than a chunk of prompt that costs more than the decode worker's running requests lose by a slightly longer step,
    as long as such rests do not pile up: together they must stay within one chunk.

    Args:
        rest_tokens: prompt tokens that the worker does not hold (>= 1).
        held_tokens: those that it holds. A prompt of which it holds nothing is the router's to place.
        queued_prefill_tokens: tokens that the worker has yet to compute for other prompts.
        local_prefill_tokens: size of a chunk that the worker computes beside its decodes; 0 is never.
    """
    return held_tokens > 0 and rest_tokens + queued_prefill_tokens <= local_prefill_tokens
