"""``pdserve generate``: one request to a running cluster."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console

from cluster.cli.client import (
    DEFAULT_ADDRESS,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    connect_all,
    fail,
    failed_call,
    read_api_key,
)
from cluster.cli.logprobs import TokenTexts, logprob_tables, logprobs_to_dict
from cluster.cli.structured import structured_output
from cluster.timeline import Answer, samples_to_dict, timeline_tables
from protos import generation_pb2, generation_pb2_grpc


class Priority(StrEnum):
    """Classes of requests."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


_PRIORITIES = {
    None: generation_pb2.PRIORITY_UNSPECIFIED,
    Priority.INTERACTIVE: generation_pb2.PRIORITY_INTERACTIVE,
    Priority.STANDARD: generation_pb2.PRIORITY_STANDARD,
    Priority.BATCH: generation_pb2.PRIORITY_BATCH,
}


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; read from standard input if it is left out or is -.")
    ] = None,
    *,
    address: Annotated[
        str, typer.Option(help="HOST:PORT of a running cluster; of several routers, separated by commas.")
    ] = DEFAULT_ADDRESS,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message; use the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message before it; only with --chat.")] = None,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="The prompt is token ids, separated by spaces or commas.")
    ] = False,
    model: Annotated[str, typer.Option(help="Refuse to run on another model than this.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Output tokens at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens this much less likely than the likeliest.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat a sampled answer; drawn by the cluster if unset.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; may be repeated.")] = None,
    stop_token: Annotated[list[int] | None, typer.Option(help="End at this token id; may be repeated.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="No end before this many tokens.")] = None,
    n: Annotated[int | None, typer.Option("--n", "-n", help="Samples of the answer, 1 to 16.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end tokens.")] = False,
    json_schema: Annotated[
        Path | None, typer.Option(help="The output is JSON that fits the schema in this file.", metavar="FILE")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="The output is a JSON object.")] = False,
    regex: Annotated[str | None, typer.Option(help="The output matches this regular expression.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The output is this string; may be repeated.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="The output follows the EBNF in this file (Lark or GBNF).", metavar="FILE")
    ] = None,
    include_stop: Annotated[
        bool, typer.Option("--include-stop", help="Show the stop string or token that ended it.")
    ] = False,
    keep_special: Annotated[bool, typer.Option("--keep-special", help="Show special tokens in the text.")] = False,
    presence_penalty: Annotated[
        float | None, typer.Option(help="-2 to 2: against each token that was generated.")
    ] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="-2 to 2: the same, for each time it was.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: against each token of prompt and output.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Add BIAS to a token's logit; may be repeated.")
    ] = None,
    allowed_token: Annotated[
        list[int] | None, typer.Option(help="Sample only this token id; may be repeated.")
    ] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Never write this word; may be repeated.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Show each token's log-probability, and those of the K likeliest.", metavar="K")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for each prompt token but the first.", metavar="K")
    ] = None,
    kv_codec: Annotated[
        str, typer.Option(help="How the prompt's KV travels: auto or a codec; default: the cluster's setting.")
    ] = "",
    priority: Annotated[
        Priority | None, typer.Option(help="Class of the request; default: the tenant's.", case_sensitive=False)
    ] = None,
    tenant: Annotated[str, typer.Option(help="Whose request it is: limits and the queue policy fair go by it.")] = "",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with an API key; default: $PDSERVE_API_KEY.", metavar="FILE")
    ] = None,
    cache_salt: Annotated[str, typer.Option(help="Share cached prompts with requests of this salt only.")] = "",
    request_id: Annotated[str, typer.Option(help="Name of the request; made by the cluster if unset.")] = "",
    idempotency_key: Annotated[
        str, typer.Option(help="Refuse to run while another request with this key does, on any router.")
    ] = "",
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that the whole answer may take.")] = 600.0,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Show where the time went, on standard error.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end; do not stream.")] = False,
) -> None:
    """Generate text on a running cluster and stream it to the terminal; tables go to standard error.

    Exit codes: 0 done, 1 failed or nobody answers, 2 a bad flag or request, 75 try again later, 130 interrupted.

    Examples:

      pdserve generate --chat "Why is the sky blue?"

      cat essay.txt | pdserve generate --max-tokens 200 --temperature 0

      pdserve generate --chat "Is 91 prime?" --choice yes --choice no

      pdserve generate --n 3 --temperature 0.9 "Once upon a time"

      pdserve generate --token-ids "504 3575 282" --json --address 127.0.0.1:50051
    """
    if system is not None and not chat:
        raise fail("--system needs --chat: only a chat has a system message", EXIT_USAGE)
    if chat and token_ids:
        raise fail("--chat and --token-ids exclude each other", EXIT_USAGE)
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "min_tokens": min_tokens,
        "n": n,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    texts = {"--model": model, "--request-id": request_id, "--cache-salt": cache_salt, "--kv-codec": kv_codec}
    texts |= {"--tenant": tenant, "--idempotency-key": idempotency_key}
    texts |= {"--system": system or "", "the prompt": prompt or ""}
    texts |= {"--regex": regex or "", "--choice": "".join(choice or ())}
    texts |= {"--stop": "".join(stop or ()), "--bad-word": "".join(bad_word or ())}
    for name, text in texts.items():
        if not _is_text(text):
            raise fail(f"{name} is not valid UTF-8", EXIT_USAGE)
    request = generation_pb2.GenerateRequest(
        request_id=request_id,
        model=model,
        kv_codec=kv_codec,
        cache_salt=cache_salt,
        tenant=tenant,
        idempotency_key=idempotency_key,
        priority=_PRIORITIES[priority],
    )
    _set_input(request, _read_prompt(prompt), chat=chat, system=system, token_ids=token_ids)
    request.sampling.MergeFrom(
        generation_pb2.Sampling(
            stop=stop or [],
            ignore_eos=ignore_eos,
            include_stop_str_in_output=include_stop,
            skip_special_tokens=False if keep_special else None,
            bad_words=bad_word or [],
        )
    )
    structured = structured_output(json_schema, json_object, regex, choice, grammar)
    if structured is not None:
        request.sampling.structured_output.CopyFrom(structured)
    for entry in logit_bias or ():
        _set_bias(request.sampling, entry)
    for name, value in {**sampling, "stop_token": stop_token, "allowed_token": allowed_token}.items():
        if value is not None:
            _set_sampling(request.sampling, name, value)
    with connect_all(address, read_api_key(api_key_file)) as routers:
        answers, channel = _first_answers(routers, request, timeout=timeout, samples=n or 1, echo=not as_json)
        texts_of = TokenTexts(channel)
        shown = [] if as_json else [table for answer in answers for table in logprob_tables(answer, texts_of)]
    if as_json:

        def extra(answer: Answer) -> dict[str, object]:
            return {"token_ids": answer.token_ids, **logprobs_to_dict(answer)}

        one = len(answers) == 1
        found = {**answers[0].to_dict(), **extra(answers[0])} if one else samples_to_dict(answers, extra)
        print(json.dumps(found, indent=2))
    for table in shown:
        Console(stderr=True).print(table)
    for table in timeline_tables(answers) if timeline else ():
        Console(stderr=True).print(table)


def _is_text(text: str) -> bool:
    """False for arguments whose bytes are no UTF-8: Python keeps those as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _set_sampling(message: generation_pb2.Sampling, name: str, value: float | list[int]) -> None:
    try:
        if isinstance(value, list):
            getattr(message, f"{name}_ids").extend(value)
        else:
            setattr(message, name, value)
    except (ValueError, TypeError) as error:
        flag = f"--{name.replace('_', '-')}"
        raise fail(f"{flag}: {value} is not allowed; allowed: what fits in its type ({error})", EXIT_USAGE) from error


def _set_bias(message: generation_pb2.Sampling, entry: str) -> None:
    token_id, _, bias = entry.partition("=")
    try:
        message.logit_bias[int(token_id)] = float(bias)
    except (ValueError, TypeError) as error:
        raise fail(
            f"--logit-bias: {entry[:40]!r} is not allowed; allowed: a token id and a number, as in '504=-5'",
            EXIT_USAGE,
        ) from error


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin.isatty():
        typer.echo("prompt (end with Ctrl-D):", err=True)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise fail(f"standard input is not text: {error}", EXIT_USAGE) from error


def _set_input(
    request: generation_pb2.GenerateRequest, prompt: str, *, chat: bool, system: str | None, token_ids: bool
) -> None:
    if chat:
        if system is not None:
            request.chat.messages.add(role="system", content=system)
        request.chat.messages.add(role="user", content=prompt)
    elif token_ids:
        request.token_ids.SetInParent()
        for word in re.split(r"[\s,]+", prompt.strip()):
            if not word.isascii() or not word.isdigit() or len(word) > 10 or int(word) >= 1 << 32:
                raise fail(
                    f"--token-ids: {word[:40]!r} is not allowed; allowed: numbers, as in '504, 3575'", EXIT_USAGE
                )
            request.token_ids.ids.append(int(word))
    else:
        request.prompt = prompt


class _NextRouter(Exception):
    """A router is unavailable, and nothing has come from it."""


def _first_answers(
    routers: Sequence[tuple[str, grpc.Channel]],
    request: generation_pb2.GenerateRequest,
    *,
    timeout: float,
    samples: int,
    echo: bool,
) -> tuple[list[Answer], grpc.Channel]:
    """The answers of the first router that is available, and the channel to it."""
    for number, (address, channel) in enumerate(routers, 1):
        more = number < len(routers)
        try:
            answers = _stream(channel, request, address, timeout=timeout, samples=samples, echo=echo, others=more)
        except _NextRouter:
            continue
        return answers, channel
    raise AssertionError("there is at least one router")


def _stream(
    channel: grpc.Channel,
    request: generation_pb2.GenerateRequest,
    address: str,
    *,
    timeout: float,
    samples: int,
    echo: bool,
    others: bool = False,
) -> list[Answer]:
    """The answers to a request, one a sample: a single one is written as it comes, several as they are done.

    `others`: there are other routers; raises _NextRouter for them.
    """
    answers = [Answer("request")] if samples == 1 else [Answer(f"sample {i}", i) for i in range(samples)]
    call = generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=timeout)
    begun = False
    try:
        for event in call:
            begun = True
            answer = answers[event.sample]
            answer.add(event)
            if echo and samples == 1:
                sys.stdout.write(event.text)
            elif echo and answer.end is not None:
                sys.stdout.write(f"--- {answer.name}\n{answer.text}\n")
            sys.stdout.flush()
    except grpc.RpcError as error:
        if others and not begun and error.code() is grpc.StatusCode.UNAVAILABLE:
            raise _NextRouter from error
        if echo and samples == 1 and answers[0].text:
            sys.stdout.write("\n")
        raise failed_call(error, address) from error
    except KeyboardInterrupt:
        call.cancel()
        if echo and samples == 1 and answers[0].text:
            sys.stdout.write("\n")
        raise fail("interrupted; the request is cancelled", EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        call.cancel()
        raise
    if any(answer.end is None for answer in answers):
        raise fail(f"{address} ended the stream before the answer was complete")
    if echo and samples == 1:
        sys.stdout.write("\n")
    return answers
