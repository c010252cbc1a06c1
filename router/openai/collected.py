"""What is kept of an answer that is sent as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdcore.errors import RequestCancelled
from pdcore.logprobs import Logprobs, joined
from pdcore.types import FinishReason
from router.calls import Call
from router.openai.usage import Usage
from router.stream import Chunk, Terminal
from router.tokenizer import Special
from router.tools.plan import ToolPlan

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def finish_reason(end: Terminal, *, called: bool = False) -> str:
    """As OpenAI calls it. `called`: tools are called.

    Raises RequestCancelled if the request was ended by its id, for which it has no name.
    """
    reason = _FINISH.get(end.outcome.finish)
    if reason is None:
        raise RequestCancelled("the request was cancelled by its id")
    return "tool_calls" if called and reason == "stop" else reason


@dataclass(slots=True)
class Output:
    """Of one sample."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scored: list[Logprobs] = field(default_factory=list)
    finish_reason: str = ""
    end: Terminal | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def logprobs(self) -> Logprobs | None:
        """Of `token_ids`; None if there are none."""
        return joined(self.scored) if self.scored else None


class Collected:
    """Takes the answer to one prompt; see `router.calls.Sink`. `prompt`: its tokens. `tools`: that may be called.
    `special`: how the text is made."""

    def __init__(self, samples: int, usage: Usage, *, discards: bool = False) -> None:
        self.prompt: tuple[int, ...] = ()
        self.tools: ToolPlan | None = None
        self.special = Special.HIDDEN
        self.outputs = [Output() for _ in range(samples)]
        self._scored: list[Logprobs] = []
        self._usage = usage
        self._discards = discards

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """Of the prompt's tokens but the first; None if there are none."""
        return joined(self._scored) if self._scored else None

    async def begin(self, call: Call) -> None:
        """See `router.calls.Sink`."""
        self.prompt = call.request.prompt
        self.tools = call.request.tools
        self.special = call.request.special

    async def write(self, sample: int, chunk: Chunk) -> None:
        """See `router.calls.Sink`. Raises RequestCancelled."""
        output = self.outputs[sample]
        output.pieces.append(chunk.text)
        output.token_ids.extend(chunk.token_ids)
        if chunk.logprobs is not None:
            output.scored.append(chunk.logprobs)
        if chunk.prompt_logprobs is not None:
            self._scored.append(chunk.prompt_logprobs)
        if chunk.end is not None and chunk.end.outcome.error is None:
            output.finish_reason = finish_reason(chunk.end)
            output.end = chunk.end
            self._usage.add(sample, chunk.end, discarded=self._discards)
