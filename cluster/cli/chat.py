"""``pdserve chat``: a conversation with a running cluster."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import grpc
import typer

from cluster.cli.answers import (
    Routers,
    Stopped,
    limit_words,
    name_request,
    set_sampling,
    stats_line,
    stream_answers,
)
from cluster.cli.chat_input import Turns, read_piped, read_typed
from cluster.cli.client import DEFAULT_ADDRESS, EXIT_FAILED, EXIT_USAGE, connect_all, fail, failed_call, read_api_key
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
from cluster.cli.terminal import unechoed
from cluster.cli.tls import TlsCa, TlsCert, TlsKey, TlsName, client_tls
from cluster.timeline import Answer
from protos import generation_pb2, generation_pb2_grpc, worker_pb2

if TYPE_CHECKING:
    from router.chat_history import ChatHistory

HELP = '''\
/help          show this
/reset         forget the conversation; the system message stays
/system TEXT   set the system message; without TEXT, remove it
/stats         show how fast each answer came, or no longer
/save FILE     write the conversation to a new file, as JSON messages
/quit          end, as Ctrl-D does
//TEXT         say /TEXT
A line that ends with \\ goes on in the next one; """ begins and ends a message of several lines;
what is pasted is one message, where the terminal can tell.
Ctrl-C stops an answer, which stays in the conversation as far as it came.'''


def chat(
    *,
    address: Address = DEFAULT_ADDRESS,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    model: Model = "",
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer at most.")] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    priority: RequestClass = None,
    tenant: Tenant = "",
    api_key_file: ApiKeyFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    cache_salt: CacheSalt = "",
    timeout: Timeout = 600.0,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show time to first token, tokens/s and cached tokens of each answer.")
    ] = False,
) -> None:
    """Talk to the model on a running cluster. Answers are streamed, and the conversation is kept; /help has more.

    From a pipe each line is a message, answers go to standard output and all else to standard error; the first
    failure ends it.

    Exit codes: 0 done, 1 failed or nobody answers, 2 a bad flag or request, 75 try again later.

    Examples:

      pdserve chat

      pdserve chat --system "Answer in one sentence." --temperature 0 --stats

      printf 'Why is the sky blue?\\nAnd at dusk?\\n' | pdserve chat --max-tokens 60
    """
    texts = {"--system": system, "--model": model, "--tenant": tenant, "--cache-salt": cache_salt}
    for name, text in {**texts, "--stop": "".join(stop or ())}.items():
        if not is_text(text):
            raise fail(f"{name} is not valid UTF-8", EXIT_USAGE)
    request = generation_pb2.GenerateRequest(
        model=model,
        tenant=tenant,
        cache_salt=cache_salt,
        priority=PRIORITIES[priority],
        sampling=generation_pb2.Sampling(stop=stop or []),
    )
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    for name, value in sampling.items():
        set_sampling(request.sampling, name, value)
    from router.chat_history import ChatHistory

    typed = sys.stdin.isatty()
    tls = client_tls(tls_ca, tls_cert, tls_key, tls_name)
    with connect_all(address, read_api_key(api_key_file), tls) as routers:
        served = _served(routers, request.model)
        if typed:
            _say(f"{served.name} at {routers[0][0]}; /help for what else there is, Ctrl-D to end")
        history = ChatHistory(system)
        conversation = _Conversation(routers, request, history, served, timeout=timeout, stats=stats, typed=typed)
        turns = Turns(read_typed if typed else read_piped)
        while True:
            try:
                turn = turns.next()
                if turn is None or not conversation.take(turn):
                    return
            except KeyboardInterrupt:
                if not typed:
                    raise
                typer.echo(err=True)
                _say("the message is discarded" if turns.in_message else "Ctrl-D ends the chat")
            except typer.Exit:  # its cause has been told
                if not typed:
                    raise


def _served(routers: Routers, model: str) -> worker_pb2.ModelDescription:
    """The model; ends the command if it cannot chat, or another one was asked for."""
    for number, (address, channel) in enumerate(routers, 1):
        try:
            request = generation_pb2.GetModelRequest(model=model)
            reply = generation_pb2_grpc.GenerationStub(channel).GetModel(request, timeout=10.0)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and number < len(routers):
                continue
            raise failed_call(error, address) from error
        if not reply.has_chat_template:
            raise fail(
                f"the model {reply.model.name} has no chat template: it was not made for conversations; "
                f"`pdserve generate` goes on with a text",
                EXIT_FAILED,
            )
        served: worker_pb2.ModelDescription = reply.model
        return served
    raise AssertionError("there is at least one router")


def _say(text: str) -> None:
    """To the person, not to whoever reads the answers."""
    typer.secho(text, err=True, dim=True)


class _Conversation:
    """Takes turns, commands among them.

    Args:
        request: with all that the requests of the turns have in common.
        served: the model that answers.
        typed: by somebody, who sees what is said.
    """

    def __init__(
        self,
        routers: Routers,
        request: generation_pb2.GenerateRequest,
        history: ChatHistory,
        served: worker_pb2.ModelDescription,
        *,
        timeout: float,
        stats: bool,
        typed: bool,
    ) -> None:
        self._routers = routers
        self._request = request
        self._timeout = timeout
        self._stats = stats
        self._typed = typed
        self._history = history
        self._served = served

    def take(self, turn: str) -> bool:
        """Answer a turn, or do what it says. False if that is to end. Ends the command if it fails."""
        if not is_text(turn):
            raise fail("that is not valid UTF-8", EXIT_USAGE)
        if turn.startswith("//"):
            self._answer(turn[1:])
        elif turn.startswith("/"):
            return self._command(turn)
        elif turn.strip():
            self._answer(turn)
        return True

    def _answer(self, question: str) -> None:
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        name_request(request)
        for message in self._history.ask(question):
            request.chat.messages.add(role=message["role"], content=message["content"])
        answer = Answer("answer")
        try:
            with unechoed() if self._typed else nullcontext():
                stream_answers(self._routers, request, [answer], timeout=self._timeout)
        except Stopped:
            if not self._typed:
                raise KeyboardInterrupt from None
            _say("stopped")
        if answer.text:
            self._history.answered(answer.text)
        if answer.end is None:
            return
        sampling = self._request.sampling
        unasked = not sampling.HasField("max_tokens")  # a pipe need not be told of the limit that it has given
        if answer.end.finish_reason == generation_pb2.FINISH_REASON_LENGTH and (self._typed or unasked):
            full = "no room is left for this conversation; /reset begins another one"
            length = self._served.max_model_len
            _say(f"cut off there: {limit_words(sampling, answer.end.usage, length, full=full)}")
        if self._stats:
            _say(stats_line(answer))

    def _command(self, turn: str) -> bool:
        name, _, argument = turn.strip().partition(" ")
        argument = argument.strip()
        if argument and name not in ("/system", "/save"):
            raise fail(f"{name} takes nothing after it, got {argument[:40]!r}", EXIT_USAGE)
        match name:
            case "/help":
                _say(HELP)
            case "/reset":
                self._history.clear()
                _say("the conversation is forgotten")
            case "/system":
                self._history.system = argument
                _say("the system message is set" if argument else "there is no system message now")
            case "/stats":
                self._stats = not self._stats
                _say(f"stats are {'on' if self._stats else 'off'}")
            case "/save":
                self._save(argument)
            case "/quit":
                return False
            case _:
                raise fail(f"{name[:40]} is not known; /help lists what is, and //TEXT says /TEXT", EXIT_USAGE)
        return True

    def _save(self, path: str) -> None:
        if not path:
            raise fail("/save needs a file, as in /save chat.json", EXIT_USAGE)
        try:
            with Path(path).expanduser().open("x", encoding="utf-8") as file:  # nothing is overwritten
                json.dump(self._history.messages, file, indent=2, ensure_ascii=False)
                file.write("\n")
        except (OSError, ValueError, RuntimeError) as error:  # such as a name with a NUL, or ~ of nobody
            why = getattr(error, "strerror", None) or error
            raise fail(f"/save: {path} cannot be written: {why}", EXIT_FAILED) from None
        _say(f"written to {path}")
