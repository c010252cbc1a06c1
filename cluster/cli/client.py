"""What every command that talks to a running cluster shares: the channel, and errors that say what to do."""

from __future__ import annotations

import math
import os
import re
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import typer

from cluster.cli.flag_names import with_flags
from pdcore.addresses import DEFAULT_PORT, split_addresses
from pdcore.api_key import key_metadata
from pdcore.errors import ConfigError
from pdcore.security import ClientTls
from protos import generation_pb2, generation_pb2_grpc
from security.client import client_channels
from security.probe import Mistake, tls_problem

DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
CONNECT_S = 3.0
MAX_MESSAGE_BYTES = 16 << 20
API_KEY_VARIABLE = "PDSERVE_API_KEY"

EXIT_FAILED = 1  # nobody answers, or the request failed
EXIT_USAGE = 2  # the caller's mistake: a flag, a key, a parameter
EXIT_TRY_AGAIN = 75  # shed or no worker at present; the same call may work later
EXIT_INTERRUPTED = 130

_EXIT_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: EXIT_USAGE,
    grpc.StatusCode.NOT_FOUND: EXIT_USAGE,
    grpc.StatusCode.UNAUTHENTICATED: EXIT_USAGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: EXIT_TRY_AGAIN,
    grpc.StatusCode.ALREADY_EXISTS: EXIT_TRY_AGAIN,
    grpc.StatusCode.UNAVAILABLE: EXIT_TRY_AGAIN,
    grpc.StatusCode.CANCELLED: EXIT_INTERRUPTED,
}
_ADVICE = {
    grpc.StatusCode.INVALID_ARGUMENT: "change the request and try again",
    grpc.StatusCode.NOT_FOUND: "leave --model out to use the one that is served",
    grpc.StatusCode.UNAUTHENTICATED: f"give a key in ${API_KEY_VARIABLE}, or a file with one by --api-key-file",
    grpc.StatusCode.ALREADY_EXISTS: "try again when that request has ended, or with another --idempotency-key",
    grpc.StatusCode.UNAVAILABLE: "`pdserve status` shows the workers; try again when one is ready",
    grpc.StatusCode.DEADLINE_EXCEEDED: "give more --timeout, or ask for fewer tokens",
    grpc.StatusCode.INTERNAL: "the cluster's log has the details under the request id",
    grpc.StatusCode.UNIMPLEMENTED: "something else than pdserve listens there; check --address",
}
_NO_CONNECTION_ADVICE = "try again; `pdserve status` shows whether it is there"

_TLS_FLAGS = {"tls.ca_file": "--tls-ca", "tls.cert_file": "--tls-cert", "tls.key_file": "--tls-key"}
TLS_VARIABLES = {"--tls-ca": "PDSERVE_TLS_CA", "--tls-cert": "PDSERVE_TLS_CERT", "--tls-key": "PDSERVE_TLS_KEY"}
_TLS_ADVICE = {
    Mistake.PLAIN_TEXT: "give the file of its authority by --tls-ca FILE, or an https:// address if that is a "
    "usual one",
    Mistake.AUTHORITY: "give the file of the authority that it is from by --tls-ca FILE",
    Mistake.NAME: "call it by a name that the certificate has, or say that name by --tls-name NAME",
    Mistake.CERTIFICATE: "give one that it knows by --tls-cert FILE and --tls-key FILE",
    Mistake.NONE: "who runs the cluster has to mend that",
}


def fail(message: str, code: int = EXIT_FAILED) -> typer.Exit:
    """Print an error and return the exception that ends the command: ``raise fail(...)``."""
    typer.secho(f"error: {message}", err=True, fg="red")
    return typer.Exit(code)


def read_file(flag: str, path: Path) -> str:
    """The text of a file that a flag names. Ends the command if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise fail(f"{flag}: cannot read {path}: {why}", EXIT_USAGE) from None


def read_api_key(path: Path | None) -> str:
    """The key in a file, or in the environment; empty if there is none."""
    source, key = f"${API_KEY_VARIABLE}", os.environ.get(API_KEY_VARIABLE, "")
    if path is not None:
        source = "--api-key-file"
        key = read_file("--api-key-file", path)
        if not key.strip():
            raise fail(f"--api-key-file: {path} is empty", EXIT_USAGE)
    try:
        key_metadata(key.strip())
    except ValueError as error:
        raise fail(f"{source}: {error}", EXIT_USAGE) from None
    return key.strip()


class _CallDetails(
    namedtuple("_CallDetails", ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression")),
    grpc.ClientCallDetails,  # type: ignore[misc]
):
    """As grpc wants it of interceptors."""


class _WithKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    """Adds a key to each call."""

    def __init__(self, api_key: str) -> None:
        self._metadata = key_metadata(api_key)

    def _intercept(self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: object) -> Any:
        fields = {name: getattr(details, name, None) for name in _CallDetails._fields}
        fields["metadata"] = (*(details.metadata or ()), *self._metadata)
        return continuation(_CallDetails(**fields), request)

    intercept_unary_unary = intercept_unary_stream = _intercept


def wrong_file(error: ConfigError) -> typer.Exit:
    """The end of a command whose certificates are not right."""
    source = source_of(_TLS_FLAGS.get(error.key, error.key), str(error.value))
    unreadable = re.fullmatch(r"a readable file \((.*)\)", error.allowed)
    if unreadable is not None:
        return fail(f"{source}: cannot read {error.value}: {unreadable[1]}", EXIT_USAGE)
    return fail(str(ConfigError(source, error.value, error.allowed)), EXIT_USAGE)


def source_of(flag: str, value: str) -> str:
    """The flag that a value is from, or the variable of the environment that stands for it."""
    variable = TLS_VARIABLES.get(flag, "")
    return f"${variable}" if value and os.environ.get(variable) == value else flag


def _advice(mistake: Mistake, address: str, tls: ClientTls | None) -> str:
    """What to do about a mistake with TLS."""
    if mistake is not Mistake.TLS:
        return _TLS_ADVICE[mistake]
    tls = tls or ClientTls()
    files = {"--tls-ca": tls.ca_file, "--tls-cert": tls.cert_file, "--tls-key": tls.key_file}
    given = [source_of(flag, value) for flag, value in files.items() if value]
    given += ["--tls-name"] if tls.server_name else []
    given += [f"{address.partition('://')[0]}:// in the address"] if "://" in address else []
    return f"call it in plain text, without {' and '.join(given)}"


@contextmanager
def connect_all(
    address: str, api_key: str = "", tls: ClientTls | None = None
) -> Iterator[list[tuple[str, grpc.Channel]]]:
    """Each router of ``HOST:PORT[,HOST:PORT]`` and a channel to it, whose calls have the key, if there is one; those
    that answer already come first. `tls`: as of `router.client.Client`.

    Ends the command with an error within `CONNECT_S` if none answers.
    """
    options = (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    )
    try:
        names = split_addresses(address)
        channels = dict(zip(names, client_channels(names, tls, options), strict=True))
    except ValueError as error:
        raise fail(f"--{error}", EXIT_USAGE) from None
    except ConfigError as error:
        raise wrong_file(error) from None
    try:
        ready = _first_ready(channels)
        if not ready:
            raise _nobody_answers(channels, tls)
        routers = sorted(channels.items(), key=lambda item: item[0] not in ready)
        if api_key:
            routers = [(name, grpc.intercept_channel(channel, _WithKey(api_key))) for name, channel in routers]
        yield routers
    finally:
        for channel in channels.values():
            channel.close()


def _first_ready(channels: Mapping[str, grpc.Channel]) -> set[str]:
    """Those that are connected once one is; none if all have failed to connect, at once, or after `CONNECT_S`."""
    states: dict[str, grpc.ChannelConnectivity] = {}
    changed = threading.Condition()

    def watch(name: str) -> Callable[[grpc.ChannelConnectivity], None]:
        def seen(state: grpc.ChannelConnectivity) -> None:
            with changed:
                states[name] = state
                changed.notify_all()

        return seen

    def ready() -> set[str]:
        return {name for name, state in states.items() if state is grpc.ChannelConnectivity.READY}

    def failed() -> bool:
        failures = [state is grpc.ChannelConnectivity.TRANSIENT_FAILURE for state in states.values()]
        return len(failures) == len(channels) and all(failures)

    watching = {name: watch(name) for name in channels}
    for name, channel in channels.items():
        channel.subscribe(watching[name], try_to_connect=True)
    with changed:
        changed.wait_for(lambda: ready() or failed(), CONNECT_S)
        found = ready()
    for name, channel in channels.items():
        channel.unsubscribe(watching[name])
    return found


def _nobody_answers(channels: Mapping[str, grpc.Channel], tls: ClientTls | None) -> typer.Exit:
    from router.connection_words import NO_GRPC, NO_NAME, NOBODY_LISTENS

    for name in channels:
        try:
            problem = tls_problem(name, tls)
        except UnicodeError:  # no name that anybody could look up
            continue
        if problem is not None:
            return fail(f"no connection with {name}: {problem.words}; {_advice(problem.mistake, name, tls)}")
    advice = {
        NO_NAME: "check --address",
        NOBODY_LISTENS: "one that drains takes no new connections either: try again in a moment; otherwise start one "
        "with `pdserve serve`, or give what it printed behind grpc= as --address",
        NO_GRPC: "give what `pdserve serve` printed behind grpc= as --address (the URL behind http= is for OpenAI's "
        "clients)",
    }
    causes = [_no_connection(name, channel) for name, channel in channels.items()]
    fitting = [words for cause, words in advice.items() if any(cause in each for each in causes)]
    fitting = fitting or ["check --address, or start a cluster with `pdserve serve`"]
    return fail("; ".join([*causes, *fitting]))


def _no_connection(name: str, channel: grpc.Channel) -> str:
    """Why there is none with a router: a call on its channel fails at once with that."""
    from router.wire_errors import NO_CONNECTION, error_of

    try:
        generation_pb2_grpc.GenerationStub(channel).GetModel(generation_pb2.GetModelRequest(), timeout=0.1)
    except grpc.RpcError as error:
        meant = error_of(error)
        if meant.reason == NO_CONNECTION:
            return str(meant)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return f"no connection with {name}: {meant}"
    return f"no connection with {name}: no answer within {CONNECT_S:g} s"


def failed_call(error: grpc.RpcError, address: str, request_id: str = "") -> typer.Exit:
    """The end of a command whose call failed: what the cluster said, of which request, and what to do about it."""
    from pdcore.errors import DeadlineExceeded, Draining, InvalidRequest, Overloaded
    from router.wire_errors import NO_CONNECTION, error_of  # what errors mean is not needed to answer --help

    meant, status = error_of(error), error.code()
    code = status
    words = error.details() or "no details"
    if isinstance(meant, InvalidRequest):
        code = grpc.StatusCode.INVALID_ARGUMENT  # also what gRPC itself found to be too large
        words = with_flags(words, meant)
    advice = _ADVICE.get(code)
    if isinstance(meant, DeadlineExceeded):
        words = str(meant)
    if meant.reason == NO_CONNECTION:
        code, words, advice = grpc.StatusCode.UNAVAILABLE, str(meant), _NO_CONNECTION_ADVICE
    if isinstance(meant, Draining):
        advice = "this router is ending: try again in a moment, or at another router of the cluster"
    if isinstance(meant, Overloaded):
        advice = f"try again in {max(1, math.ceil(meant.retry_after_s))} s"
    name = meant.request_id or request_id
    where = f"{status.name.lower().replace('_', ' ')}, from {address}" + (f", request {name}" if name else "")
    # What has lines, as of a bad regular expression, may point with the last of them at a place in another.
    message = f"{words}{chr(10) if chr(10) in words else ' '}({where})"
    return fail(f"{message}; {advice}" if advice else message, _EXIT_CODES.get(code, EXIT_FAILED))
