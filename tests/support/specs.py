"""Requests for tests that drive workers directly."""

from __future__ import annotations

from pdcore.types import RequestKey, RequestSpec, SamplingParams

_ids = iter(range(10**6))


def spec_of(prompt: list[int], max_tokens: int = 12, window: int = 1000, **params: object) -> RequestSpec:
    fields: dict[str, object] = {"max_tokens": max_tokens, "temperature": 0.0}
    return RequestSpec(
        key=RequestKey(f"q{next(_ids)}", 0),
        prompt=tuple(prompt),
        params=SamplingParams(**(fields | params)),  # type: ignore[arg-type]
        token_window=window,
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(31 * i + 17 * seed + i * i) % 250 + 1 for i in range(length)]
