"""``/v1/completions``: what a request says, and what its answer looks like."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from pdcore.errors import InvalidRequest, RequestError
from pdcore.logprobs import MAX_LOGPROBS
from router.calls import Call
from router.openai.collected import Collected, Output, finish_reason
from router.openai.exchange import DONE
from router.openai.fields import UINT32, Count, GenerationFields, param_names, ranged
from router.openai.logprobs import CompletionLogprobs, TokenTexts, joined_pieces, prompt_entries, topped
from router.openai.plan import Headers, Plan, begin_plan, check_copies, numbered
from router.openai.usage import NO_USAGE, USAGE_COMES, RunningUsage, Usage
from router.stream import Chunk

MAX_PROMPTS = 128


def _prompts(value: object) -> list[str | list[int]]:
    """A prompt or several, as several."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_tokens(value):
            return [value]
        if all(isinstance(prompt, str) for prompt in value) or all(_is_tokens(prompt) for prompt in value):
            return value
    problem = "must be a string, a list of token ids, or a list of strings or of lists of token ids, and not empty"
    raise PydanticCustomError("prompt", "{problem}", {"problem": problem})


def _is_tokens(value: object) -> bool:
    return (
        isinstance(value, list)
        and all(type(token) is int and 0 <= token <= UINT32 for token in value)
        and bool(value)
    )


_TOKENS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": UINT32}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _TOKENS_SCHEMA,
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _TOKENS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


class CompletionRequest(GenerationFields):
    """Text goes on where a prompt ends."""

    prompt: Annotated[Any, BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)] = Field(
        description=f"Text or token ids, or at most {MAX_PROMPTS} of these."
    )
    echo: bool | None = Field(default=None, description="The text begins with the prompt.")
    logprobs: Count | None = ranged("Of each token, and of so many likeliest.", maximum=MAX_LOGPROBS)
    best_of: Count | None = Field(default=None, description="1 or n: nothing is chosen among more.")


def plan_completions(body: CompletionRequest, headers: Headers, served_name: str) -> Plan:
    """Raises InvalidRequest."""
    echo_only = bool(body.echo) and body.max_tokens == 0
    if body.best_of not in (None, 1, body.n or 1):
        raise InvalidRequest("best_of", f"must be 1 or n ({body.n or 1}), got {body.best_of}")
    if body.echo and body.stream and body.logprobs is not None:
        raise InvalidRequest("logprobs", "may not be set beside echo if stream is true")
    if len(body.prompt) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"must be at most {MAX_PROMPTS} prompts, got {len(body.prompt)}")
    plan, request = begin_plan(body, headers, served_name)
    if echo_only:
        request.sampling.max_tokens = 1  # the least that can be computed; left out of the answer
    if body.logprobs is not None:
        request.sampling.logprobs = body.logprobs
        if body.echo:
            request.sampling.prompt_logprobs = max(request.sampling.prompt_logprobs, body.logprobs)
    several = len(body.prompt) > 1
    if several:
        check_copies(request, len(body.prompt))
    for number, prompt in enumerate(body.prompt):
        own = numbered(request, number) if several else request
        if isinstance(prompt, str):
            own.prompt = prompt
        else:
            own.token_ids.ids.extend(prompt)
        plan.requests.append(own)
        name = f"prompt[{number}]" if several else "prompt"
        plan.names.append([("prompt", name), ("token_ids.ids", name), ("token_ids", name), *param_names(body)])
    return plan


class CompletionFormat:
    """How the answers to one request look.

    Args:
        echoes: the text that each prompt's answers begin with; empty without `echo`.
    """

    object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, body: CompletionRequest, plan: Plan, texts: TokenTexts, echoes: list[str]) -> None:
        self._plan = plan
        self._texts = texts
        self._echoes = echoes
        self._logprobs = body.logprobs
        self._prompt_logprobs = body.prompt_logprobs
        self._echo = bool(body.echo)
        self._no_output = self._echo and body.max_tokens == 0
        self._streamed: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()
        head = {
            "id": self.id_prefix + plan.request_id,
            "object": self.object,
            "created": plan.created,
            "model": plan.model,
        }
        self._head = json.dumps(head)[:-1]
        self._tail = USAGE_COMES if plan.with_usage else NO_USAGE
        self._running = RunningUsage() if plan.with_running_usage else None

    @property
    def discards(self) -> bool:
        """Whether what is generated is left out of the answer."""
        return self._no_output

    def event(self, number: int, sample: int, chunk: Chunk) -> str:
        """The event of a chunk of a prompt's sample; empty if there is nothing to tell."""
        index = number * self._plan.samples + sample
        tail = self._tail if self._running is None else self._running.add(number, sample, chunk)
        text = "" if self._no_output else chunk.text
        if self._echo and index not in self._begun:
            self._begun.add(index)
            text = self._echoes[number] + text
        logprobs = "null"
        if chunk.logprobs is not None and chunk.token_ids:
            state = self._streamed.get(index)
            if state is None:
                state = self._streamed[index] = CompletionLogprobs(self._texts, self._plan.skip_special)
            logprobs = json.dumps(state.of(chunk.token_ids, chunk.logprobs))
        ended = chunk.end is not None and chunk.end.outcome.error is None
        if not text and logprobs == "null" and not ended:
            return ""
        reason = "null" if not ended or chunk.end is None else f'"{finish_reason(chunk.end)}"'
        return (
            f'data: {self._head},"choices":[{{"index":{index},"text":{json.dumps(text)},'
            f'"logprobs":{logprobs},"finish_reason":{reason}}}]{tail}'
        )

    def begin(self, number: int, call: Call) -> None:
        """See `router.openai.exchange.Format`."""
        if self._running is not None:
            self._running.begin(number, call)

    def end(self, usage: Usage) -> str:
        """See `router.openai.exchange.Format`."""
        if not self._plan.with_usage:
            return DONE
        return f'data: {self._head},"choices":[],"usage":{json.dumps(usage.to_dict())}}}\n\n{DONE}'

    def failure(self, error: RequestError) -> str:
        """See `router.openai.exchange.Format`."""
        return ""

    def answer(self, collected: list[Collected], usage: Usage) -> bytes:
        """The whole answer, without a stream."""
        choices = [
            self._choice(number * self._plan.samples + sample, number, part, output)
            for number, part in enumerate(collected)
            for sample, output in enumerate(part.outputs)
        ]
        choices_json = json.dumps(choices)
        return f'{self._head},"choices":{choices_json},"usage":{json.dumps(usage.to_dict())}}}'.encode()

    def _choice(self, index: int, number: int, part: Collected, output: Output) -> dict[str, Any]:
        text = "" if self._no_output else output.text
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echoes[number] + text if self._echo else text,
            "logprobs": None,
            "finish_reason": output.finish_reason,
        }
        if self._logprobs is not None:
            state = CompletionLogprobs(self._texts, self._plan.skip_special)
            pieces = []
            if self._echo:
                pieces.append(state.of(part.prompt[:1], None))
                if part.prompt_logprobs is not None:
                    pieces.append(state.of(part.prompt[1:], topped(part.prompt_logprobs, self._logprobs)))
            if not self._no_output and output.logprobs is not None:
                pieces.append(state.of(output.token_ids, output.logprobs))
            choice["logprobs"] = joined_pieces(pieces)
        if self._prompt_logprobs is not None:
            known = part.prompt_logprobs
            known = None if known is None else topped(known, self._prompt_logprobs)
            choice["prompt_logprobs"] = prompt_entries(part.prompt, known, self._texts)
        return choice
