"""Prompts, and the caches of workers that compute them, for measuring a router's decisions: names, and no tokens."""

from __future__ import annotations

import random

from pdcore.hashing import HASH_BYTES

BLOCK_SIZE = 16
SYSTEM_PROMPT_TOKENS = (128, 512, 1024, 2048, 4096, 8192)

Name = bytes


def fresh(names: list[Name]) -> list[Name]:
    """Equal names in objects of their own, as they come out of a hash or a message."""
    whole = b"".join(names)
    return [whole[at : at + HASH_BYTES] for at in range(0, len(whole), HASH_BYTES)]


class SimulatedWorker:
    """A cache of `capacity` blocks: paths are used as a whole, and the one unused longest gives up its end first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.following = 0
        self._last_use: dict[Name, None] = {}

    def run(self, hashes: list[Name]) -> list[tuple[bool, Name]]:
        """Compute a prompt; returns what the worker announces."""
        added = [name for name in hashes if name not in self._last_use]
        for name in reversed(hashes):  # the beginning was used last
            self._last_use.pop(name, None)
            self._last_use[name] = None
        surplus = max(0, len(self._last_use) - self.capacity)
        oldest = iter(self._last_use)
        removed = [next(oldest) for _ in range(surplus)]
        for name in removed:
            del self._last_use[name]
        self.following += len(added) + surplus
        return [(True, name) for name in fresh(added)] + [(False, name) for name in fresh(removed)]


class Traffic:
    """Prompts of one length: a mix of conversations that go on, new ones behind a system prompt, and single ones."""

    def __init__(self, rng: random.Random, tokens: int) -> None:
        self._rng = rng
        self.tokens = tokens
        self._blocks = tokens // BLOCK_SIZE
        lengths = [min(tokens // 2, length) // BLOCK_SIZE for length in SYSTEM_PROMPT_TOKENS]
        self._system_prompts = [self._new(length) for length in lengths]
        self._conversations: list[list[Name]] = []

    def conversation(self) -> list[Name]:
        """The turns so far of a new conversation, which may go on later."""
        system_prompt = self._rng.choice(self._system_prompts)
        length = self._rng.randint(len(system_prompt) + 1, self._blocks - 1)
        turns = system_prompt + self._new(length - len(system_prompt))
        self._conversations.append(turns)
        return turns

    def prompt(self) -> list[Name]:
        kind = self._rng.random()
        if kind < 0.5:
            begun = self._rng.choice(self._conversations)
        elif kind < 0.8:
            begun = self._rng.choice(self._system_prompts)
        else:
            begun = []
        return fresh(begun + self._new(self._blocks - len(begun)))

    def _new(self, blocks: int) -> list[Name]:
        # Random names: nothing depends on what was hashed.
        names = self._rng.randbytes(blocks * HASH_BYTES)
        return [names[at : at + HASH_BYTES] for at in range(0, len(names), HASH_BYTES)]
