"""``pdserve generate``: one request to a running cluster."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console

from cluster.cli.answers import Stopped, limit_words, name_request, set_sampling, stats_line, stream_answers
from cluster.cli.client import (
    DEFAULT_ADDRESS,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    connect_all,
    fail,
    read_api_key,
    read_file,
)
from cluster.cli.logprobs import TokenTexts, logprob_tables, logprobs_to_dict
from cluster.cli.options import (
    PRIORITIES,
    Address,
    ApiKeyFile,
    CacheSalt,
    Model,
    RequestClass,
    Seed,
    Stop,
    Temperature,
    Tenant,
    Timeout,
    TopP,
    is_text,
)
from cluster.cli.structured import structured_output
from cluster.cli.tls import TlsCa, TlsCert, TlsKey, TlsName, client_tls
from cluster.timeline import Answer, samples_to_dict, timeline_tables
from pdcore.types import MAX_SAMPLES
from protos import generation_pb2, generation_pb2_grpc


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The prompt. If it is left out or is -, it is standard input, without one newline at its end."
        ),
    ] = None,
    *,
    address: Address = DEFAULT_ADDRESS,
    file: Annotated[
        Path | None,
        typer.Option(help="Read the prompt from this file, without one newline at its end.", metavar="FILE"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message; use the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message before it; only with --chat.")] = None,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="The prompt is token ids, separated by spaces or commas.")
    ] = False,
    model: Model = "",
    max_tokens: Annotated[int | None, typer.Option(help="Output tokens at most.")] = None,
    temperature: Temperature = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = None,
    top_p: TopP = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens this much less likely than the likeliest.")] = None,
    seed: Seed = None,
    stop: Stop = None,
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
    priority: RequestClass = None,
    tenant: Tenant = "",
    api_key_file: ApiKeyFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    cache_salt: CacheSalt = "",
    request_id: Annotated[str, typer.Option(help="Name of the request; made up if unset.")] = "",
    idempotency_key: Annotated[
        str, typer.Option(help="Refuse to run while another request with this key does, on any router.")
    ] = "",
    timeout: Timeout = 600.0,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show time to first token and tokens/s, on standard error.")
    ] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Show where the time went, on standard error.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end; do not stream.")] = False,
) -> None:
    """Generate text on a running cluster and stream it to the terminal; tables go to standard error.

    Exit codes: 0 done, 1 failed or nobody answers, 2 a bad flag or request, 75 try again later, 130 interrupted.

    Examples:

      pdserve generate --chat "Why is the sky blue?"

      pdserve generate --file essay.txt --max-tokens 200 --temperature 0 --stats

      cat essay.txt | pdserve generate

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
        if not is_text(text):
            raise fail(f"{name} is not valid UTF-8", EXIT_USAGE)
    request = generation_pb2.GenerateRequest(
        request_id=request_id,
        model=model,
        kv_codec=kv_codec,
        cache_salt=cache_salt,
        tenant=tenant,
        idempotency_key=idempotency_key,
        priority=PRIORITIES[priority],
    )
    name_request(request)
    _set_input(request, _read_prompt(prompt, file), chat=chat, system=system, token_ids=token_ids)
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
        set_sampling(request.sampling, name, value)
    tls = client_tls(tls_ca, tls_cert, tls_key, tls_name)
    with connect_all(address, read_api_key(api_key_file), tls) as routers:
        count = min(n or 1, MAX_SAMPLES)  # more are refused by the cluster
        answers = [Answer("request")] if count == 1 else [Answer(f"sample {i}", i) for i in range(count)]
        try:
            _, channel = stream_answers(routers, request, answers, timeout=timeout, echo=not as_json)
        except Stopped:
            raise fail(f"interrupted; request {request.request_id} is cancelled", EXIT_INTERRUPTED) from None
        if not as_json:  # which says why each answer ended
            _say_what_is_cut_off(answers, request, channel)
        texts_of = TokenTexts(channel)
        prompt_ids = [] if as_json or prompt_logprobs is None else _prompt_token_ids(request, channel)
        tables = (table for answer in answers for table in logprob_tables(answer, texts_of, prompt_ids))
        shown = [] if as_json else list(tables)
    if as_json:

        def extra(answer: Answer) -> dict[str, object]:
            assert answer.end is not None, answer.name
            used = {"request_id": request.request_id, "cached_tokens": answer.end.usage.cached_tokens}
            return {**used, "token_ids": answer.token_ids, **logprobs_to_dict(answer)}

        one = len(answers) == 1
        found = {**answers[0].to_dict(), **extra(answers[0])} if one else samples_to_dict(answers, extra)
        print(json.dumps(found, indent=2))
    for answer in answers if stats else ():
        name = f"{answer.name}: " if len(answers) > 1 else ""
        typer.echo(f"{name}{stats_line(answer)}", err=True)
    for table in shown:
        Console(stderr=True).print(table)
    for table in timeline_tables(answers) if timeline else ():
        Console(stderr=True).print(table)


def _say_what_is_cut_off(
    answers: Sequence[Answer], request: generation_pb2.GenerateRequest, channel: grpc.Channel
) -> None:
    """On standard error, unless it is by the limit that was asked for, and there is no form that may be broken."""
    structured = request.sampling.HasField("structured_output")
    if request.sampling.HasField("max_tokens") and not structured:
        return
    length = None
    for answer in answers:
        if answer.end is None or answer.end.finish_reason != generation_pb2.FINISH_REASON_LENGTH:
            continue
        if length is None:
            length = _max_model_len(channel)
        full = f"no room is left for more than the model's {length} tokens"
        words = limit_words(request.sampling, answer.end.usage, length, full=full)
        name = f"{answer.name}: " if len(answers) > 1 else ""
        broken = "; it may not have the form that was asked for" if structured else ""
        typer.secho(f"{name}cut off there: {words}{broken}", err=True, dim=True)


def _prompt_token_ids(request: generation_pb2.GenerateRequest, channel: grpc.Channel) -> list[int]:
    """Empty if nobody says."""
    if request.HasField("token_ids"):
        return list(request.token_ids.ids)
    asked = generation_pb2.TokenizeRequest(model=request.model)
    if request.HasField("chat"):
        asked.chat.CopyFrom(request.chat)
    else:
        asked.prompt = request.prompt
    try:
        return list(generation_pb2_grpc.GenerationStub(channel).Tokenize(asked, timeout=10.0).token_ids)
    except grpc.RpcError:
        return []


def _max_model_len(channel: grpc.Channel) -> int:
    """Tokens that the model takes; very many if nobody says."""
    try:
        request = generation_pb2.GetModelRequest()
        reply = generation_pb2_grpc.GenerationStub(channel).GetModel(request, timeout=10.0)
        return int(reply.model.max_model_len) or sys.maxsize
    except grpc.RpcError:
        return sys.maxsize


def _set_bias(message: generation_pb2.Sampling, entry: str) -> None:
    token_id, _, bias = entry.partition("=")
    try:
        message.logit_bias[int(token_id)] = float(bias)
    except (ValueError, TypeError) as error:
        raise fail(
            f"--logit-bias: {entry[:40]!r} is not allowed; allowed: a token id and a number, as in '504=-5'",
            EXIT_USAGE,
        ) from error


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None and prompt is not None:
        raise fail("a prompt and --file exclude each other", EXIT_USAGE)
    if file is not None:
        return _without_last_newline(read_file("--file", file))
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin.isatty():
        typer.echo("prompt (end with Ctrl-D):", err=True)
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError:
        raise fail("standard input is not valid UTF-8", EXIT_USAGE) from None
    if not is_text(text):  # in the C locale Python takes any bytes
        raise fail("standard input is not valid UTF-8", EXIT_USAGE)
    return _without_last_newline(text)


def _without_last_newline(text: str) -> str:
    """It ends the file, as editors and ``echo`` have it, and not the prompt: the model would go on differently."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


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
