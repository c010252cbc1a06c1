"""What a response looks like: its items, and the events that tell of them one by one.

::

    created, in_progress
    for each item:   output_item.added
      a message:       content_part.added, output_text.delta..., output_text.done, content_part.done
      a call:          function_call_arguments.delta..., function_call_arguments.done
                     output_item.done
    completed, incomplete or failed, with all of it
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from pdcore.errors import InvalidRequest, Overloaded, RequestError
from router.calls import Call
from router.openai.collected import Collected, finish_reason
from router.openai.logprobs import OutputTexts, PlacedLogprobs
from router.openai.plan import Plan
from router.openai.responses import LOGPROBS, ResponseRequest
from router.openai.usage import Usage
from router.stream import Chunk, Terminal
from router.tokenizer import Special
from router.tools.events import CallArguments, CallBegin, Content, Event, PlainText, ToolCallParser
from router.tools.formats import STAND_IN
from router.tools.plan import ToolPlan

Json = dict[str, Any]


class ResponseFormat:
    """How the answer to one request looks; see `router.openai.exchange.Format`."""

    discards = False

    def __init__(self, body: ResponseRequest, plan: Plan, texts: OutputTexts) -> None:
        self._plan = plan
        self._texts = texts
        self._wants_logprobs = LOGPROBS in (body.include or ())
        self._response = _response(body, plan)
        self._items = Items(plan.request_id, STAND_IN.new_id)
        self._parser: ToolCallParser = PlainText()
        self._sequence = 0
        self._end: Terminal | None = None

    def begin(self, number: int, call: Call) -> None:
        self._begin(call.request.tools, call.request.special)

    def _begin(self, tools: ToolPlan | None, special: Special) -> None:
        if self._wants_logprobs:
            self._items.logprobs = PlacedLogprobs(self._texts, special)
        if tools is not None:
            self._parser = tools.parser()
            self._items.new_call_id = tools.new_id

    def event(self, number: int, sample: int, chunk: Chunk) -> str:
        events: list[Json] = []
        if not self._sequence:
            if not chunk.token_ids and chunk.end is None:
                return ""
            events += [
                {"type": f"response.{name}", "response": self._response} for name in ("created", "in_progress")
            ]
        events += self._take(chunk)
        return "".join(map(self._written, events))

    def _take(self, chunk: Chunk) -> list[Json]:
        """Add what a chunk says, and tell of it."""
        placed = self._items.logprobs
        if placed is not None:
            if chunk.logprobs is not None:
                placed.add(chunk.token_ids, chunk.logprobs)
            if chunk.end is not None:
                placed.finish()
        said = self._parser.feed(chunk.text)
        if chunk.end is None or chunk.end.outcome.error is not None:
            return self._items.add(said)
        self._end = chunk.end
        complete = finish_reason(chunk.end) != "length"
        return [*self._items.add([*said, *self._parser.finish()]), *self._items.close(complete)]

    def end(self, usage: Usage) -> str:
        """Of a stream: the whole response once more."""
        response = self._finished(usage)
        return self._written({"type": f"response.{response['status']}", "response": response})

    def failure(self, error: RequestError) -> str:
        if isinstance(error, Overloaded):
            code = "rate_limit_exceeded"
        else:
            code = "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
        told = {"code": code, "message": str(error)}
        events = self._items.close(False)
        response = self._response | {"status": "failed", "error": told, "output": self._items.done}
        return "".join(map(self._written, [*events, {"type": "response.failed", "response": response}]))

    def answer(self, collected: list[Collected], usage: Usage) -> bytes:
        (part,) = collected
        (output,) = part.outputs
        self._begin(part.tools, part.special)
        self._take(Chunk(0, output.token_ids, output.text, output.end, output.logprobs))
        return json.dumps(self._finished(usage)).encode()

    def _finished(self, usage: Usage) -> Json:
        assert self._end is not None
        cut = finish_reason(self._end) == "length"
        return self._response | {
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items.done,
            "usage": usage.to_response_dict(),
        }

    def _written(self, event: Json) -> str:
        body = {"type": event["type"], "sequence_number": self._sequence, **event}
        self._sequence += 1
        return f"event: {event['type']}\ndata: {json.dumps(body)}\n\n"


class Items:
    """The items of a response as they come, and the events that tell of them.

    Attributes:
        done: those that are complete. logprobs: of all tokens; None if they are not wanted. Those of calls have no
            place in a response.
        new_call_id: a new id for a call that the model gave none.
    """

    def __init__(self, request_id: str, new_call_id: Callable[[], str]) -> None:
        self.done: list[Json] = []
        self.logprobs: PlacedLogprobs | None = None
        self.new_call_id = new_call_id
        self._request_id = request_id
        self._open: Json | None = None

    def add(self, said: list[Event]) -> list[Json]:
        """The events of what was said."""
        events: list[Json] = []
        for event in said:
            match event:
                case Content(text, start):
                    if self._open is None or self._open["type"] != "message":
                        events += self._close("completed") + self._begin_message()
                    scored = [] if self.logprobs is None else self.logprobs.take(start, start + len(text))
                    events.append(self._add_text(text, scored))
                case CallBegin(_, name, call_id):
                    events += self._close("completed") + self._begin_call(name, call_id)
                case CallArguments(_, text):
                    assert self._open is not None
                    self._open["arguments"] += text
                    events.append(self._event("function_call_arguments.delta", delta=text))
        return events

    def close(self, complete: bool) -> list[Json]:
        """No more is said. An answer that says nothing is an empty message."""
        events: list[Json] = []
        if self._open is None and not self.done:
            events += self._begin_message()
        return events + self._close("completed" if complete else "incomplete")

    def _begin_message(self) -> list[Json]:
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item: Json = {"type": "message", "role": "assistant", "status": "in_progress", "content": []}
        item["id"] = f"msg_{self._request_id}_{len(self.done)}"
        self._open = item
        added = self._event("output_item.added", item=_copy(item))
        item["content"].append(part)
        return [added, self._event("content_part.added", content_index=0, part=_copy(part))]

    def _add_text(self, text: str, scored: list[Json]) -> Json:
        assert self._open is not None
        (part,) = self._open["content"]
        part["text"] += text
        part["logprobs"] += scored
        return self._event("output_text.delta", content_index=0, delta=text, logprobs=scored)

    def _begin_call(self, name: str, call_id: str) -> list[Json]:
        self._open = {"type": "function_call", "status": "in_progress", "name": name, "arguments": ""}
        self._open["id"] = f"fc_{self._request_id}_{len(self.done)}"
        self._open["call_id"] = call_id or self.new_call_id()
        return [self._event("output_item.added", item=_copy(self._open))]

    def _close(self, status: str) -> list[Json]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            events = [
                self._event("output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]),
                self._event("content_part.done", content_index=0, part=_copy(part)),
            ]
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("function_call_arguments.done", **done)]
        events.append(self._event("output_item.done", item=_copy(item)))
        self.done.append(item)
        self._open = None
        return events

    def _event(self, kind: str, /, **fields: Any) -> Json:
        assert self._open is not None
        place: Json = {"type": f"response.{kind}", "output_index": len(self.done)}
        return place | fields if "item" in fields else place | {"item_id": self._open["id"]} | fields


def _copy(item: Json) -> Json:
    """As it is now: it goes on to change."""
    copied: Json = json.loads(json.dumps(item))
    return copied


def _response(body: ResponseRequest, plan: Plan) -> Json:
    """The response before anything is said."""
    form = body.text.format if body.text is not None and body.text.format is not None else None
    text = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": f"resp_{plan.request_id}",
        "object": "response",
        "created_at": plan.created,
        "status": "in_progress",
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": plan.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": text},
        "tool_choice": _told_choice(body),
        "tools": [_told_tool(tool.model_dump()) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0 if LOGPROBS in (body.include or ()) else None,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _told_tool(tool: Json) -> Json:
    return tool | {"strict": bool(tool["strict"])}


def _told_choice(body: ResponseRequest) -> object:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    mode = ("auto", "auto", "none", "required")[choice.mode]
    if not choice.names:
        return mode
    if mode == "required" and len(choice.names) == 1:
        return {"type": "function", "name": choice.names[0]}
    tools = [{"type": "function", "name": name} for name in choice.names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}
