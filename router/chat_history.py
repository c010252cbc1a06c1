"""A conversation as a client keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class ChatHistory:
    """Questions and answers so far, in the form that `router.client.Client` takes.

    ::

        history = ChatHistory("Answer in one sentence.")
        for question in ("Why is the sky blue?", "And at dusk?"):
            answer = client.complete(history.ask(question))
            history.answered(answer.text)

    A question becomes part of it with its answer: after a call that failed, ask again or something else.

    Args:
        system: the message that stands before all others; empty for none. It may be set at any time.
        messages: to begin with, in turn those of user and assistant.
    """

    def __init__(self, system: str = "", messages: Iterable[Mapping[str, str]] = ()) -> None:
        self.system = system
        self._turns = [dict(message) for message in messages]
        self._question: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """All that was said, the system message first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *(dict(message) for message in self._turns)]

    def ask(self, text: str) -> list[dict[str, str]]:
        """The messages to send for the next answer."""
        self._question = text
        return [*self.messages, {"role": "user", "content": text}]

    def answered(self, text: str) -> None:
        """The question that was asked last has this answer. Raises ValueError if there is none."""
        if self._question is None:
            raise ValueError("nothing was asked")
        self._turns += [{"role": "user", "content": self._question}, {"role": "assistant", "content": text}]
        self._question = None

    def clear(self) -> None:
        """Forget all but the system message."""
        self._turns, self._question = [], None

    def __len__(self) -> int:
        """Questions that have an answer."""
        return len(self._turns) // 2
