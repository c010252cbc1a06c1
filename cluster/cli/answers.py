"""Requests to a running cluster, and their answers as they come."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence

import grpc

from cluster.cli.client import EXIT_USAGE, fail, failed_call
from cluster.cli.waiting import Waiting
from cluster.timeline import Answer, finish_reason
from protos import generation_pb2, generation_pb2_grpc

Routers = Sequence[tuple[str, grpc.Channel]]


class Stopped(Exception):
    """Ctrl-C was pressed while an answer came; its request is cancelled."""


class _NextRouter(Exception):
    """A router is unavailable, and nothing has come from it."""


def name_request(request: generation_pb2.GenerateRequest) -> None:
    """Give it an id, unless it has one: every error is to name it, also where nothing came back."""
    request.request_id = request.request_id or uuid.uuid4().hex


def set_sampling(message: generation_pb2.Sampling, name: str, value: float | list[int] | None) -> None:
    """Set a field from its flag, if that is given. Ends the command if the value does not fit in the field's type."""
    if value is None:
        return
    try:
        if isinstance(value, list):
            getattr(message, f"{name}_ids").extend(value)
        else:
            setattr(message, name, value)
    except (ValueError, TypeError) as error:
        flag = f"--{name.replace('_', '-')}"
        raise fail(f"{flag}: {value} is not allowed; allowed: what fits in its type ({error})", EXIT_USAGE) from error


def stream_answers(
    routers: Routers,
    request: generation_pb2.GenerateRequest,
    answers: Sequence[Answer],
    *,
    timeout: float,
    echo: bool = True,
) -> tuple[str, grpc.Channel]:
    """Fill `answers`, one a sample, from the first router that is available; returns which one that was.

    A single answer is written as it comes, several as they are done.

    Raises:
        Stopped: by Ctrl-C; `answers` have what came until then.

    Ends the command with an error if the request fails.
    """
    for number, (address, channel) in enumerate(routers, 1):
        try:
            more = number < len(routers)
            _stream(channel, request, answers, address=address, timeout=timeout, echo=echo, others=more)
        except _NextRouter:
            continue
        return address, channel
    raise AssertionError("there is at least one router")


def _stream(
    channel: grpc.Channel,
    request: generation_pb2.GenerateRequest,
    answers: Sequence[Answer],
    *,
    address: str,
    timeout: float,
    echo: bool,
    others: bool,
) -> None:
    """See `stream_answers`. `others`: there are other routers; raises _NextRouter for them."""
    from router.failover import bounded  # with what errors mean, which is not needed to answer --help

    alone = len(answers) == 1
    call = generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=bounded(timeout))
    begun = False

    def end_line() -> None:
        if echo and alone and answers[0].text:
            sys.stdout.write("\n")
            sys.stdout.flush()

    waiting = Waiting(echo)
    try:
        with waiting:
            for event in call:
                waiting.end()
                begun = True
                answer = answers[event.sample]
                answer.add(event)
                if echo and alone:
                    sys.stdout.write(event.text)
                elif echo and answer.end is not None:
                    sys.stdout.write(f"--- {answer.name}\n{answer.text}\n")
                sys.stdout.flush()
    except grpc.RpcError as error:
        if others and not begun and error.code() is grpc.StatusCode.UNAVAILABLE:
            raise _NextRouter from error
        end_line()
        raise failed_call(error, address, request.request_id) from error
    except KeyboardInterrupt:
        end_line()
        raise Stopped from None
    finally:
        call.cancel()
    if any(answer.end is None for answer in answers):
        end_line()
        raise fail(
            f"{address} ended the stream before the answer was complete (request {request.request_id}); try again"
        )
    if echo and alone:
        sys.stdout.write("\n")
        sys.stdout.flush()


def limit_words(
    sampling: generation_pb2.Sampling, usage: generation_pb2.Usage, max_model_len: int, *, full: str
) -> str:
    """Which limit an answer has come to that was cut off by its length. `full`: what to say of the model's own."""
    if sampling.HasField("max_tokens"):  # the router takes none for which there is no room
        return "--max-tokens is reached"
    if usage.prompt_tokens + usage.completion_tokens >= max_model_len:
        return full
    # As a rule its default; workers with little memory may have less room than the model.
    return (
        f"the cluster gives this answer {usage.completion_tokens} tokens at most, as no --max-tokens is given "
        f"(see router.default_max_tokens)"
    )


def stats_line(answer: Answer) -> str:
    """How fast an answer came, as the router measured it, and why it ended."""
    assert answer.end is not None, answer.name
    usage, timeline = answer.end.usage, answer.end.timeline
    rate = f"{1000 / timeline.tpot_ms:,.1f} tokens/s" if timeline.tpot_ms else "one step"
    return (
        f"first token after {timeline.ttft_ms:,.1f} ms, {rate}, {usage.completion_tokens} tokens; "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached; "
        f"finish reason: {finish_reason(answer.end)}"
    )
