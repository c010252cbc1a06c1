"""What every command that talks to a running cluster shares: the channel, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import typer

DEFAULT_ADDRESS = "127.0.0.1:50051"
CONNECT_S = 3.0
MAX_MESSAGE_BYTES = 16 << 20

EXIT_FAILED = 1  # nobody answers, or the request failed
EXIT_USAGE = 2  # the caller's mistake: a flag, a key, a parameter
EXIT_TRY_AGAIN = 75  # shed or no worker at present; the same call may work later
EXIT_INTERRUPTED = 130

_EXIT_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: EXIT_USAGE,
    grpc.StatusCode.NOT_FOUND: EXIT_USAGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: EXIT_TRY_AGAIN,
    grpc.StatusCode.UNAVAILABLE: EXIT_TRY_AGAIN,
    grpc.StatusCode.CANCELLED: EXIT_INTERRUPTED,
}
_ADVICE = {
    grpc.StatusCode.INVALID_ARGUMENT: "change the request and try again",
    grpc.StatusCode.NOT_FOUND: "leave --model out to use the one that is served",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "try again later",
    grpc.StatusCode.UNAVAILABLE: "`pdserve status` shows the workers; try again when one is ready",
    grpc.StatusCode.DEADLINE_EXCEEDED: "give more --timeout, or ask for fewer tokens",
    grpc.StatusCode.INTERNAL: "the cluster's log has the details under the request id",
    grpc.StatusCode.UNIMPLEMENTED: "something else than pdserve listens there; check --address",
}


def fail(message: str, code: int = EXIT_FAILED) -> typer.Exit:
    """Print an error and return the exception that ends the command: ``raise fail(...)``."""
    typer.secho(f"error: {message}", err=True, fg="red")
    return typer.Exit(code)


@contextmanager
def connect(address: str) -> Iterator[grpc.Channel]:
    """A channel that is connected. Ends the command with an error within `CONNECT_S` if nobody answers."""
    channel = grpc.insecure_channel(
        address,
        options=(
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ),
    )
    try:
        grpc.channel_ready_future(channel).result(timeout=CONNECT_S)
    except grpc.FutureTimeoutError:
        channel.close()
        raise fail(
            f"no pdserve cluster answers at {address} within {CONNECT_S:g} s; start one with `pdserve serve`, or "
            f"give the address that it printed with --address HOST:PORT"
        ) from None
    try:
        yield channel
    finally:
        channel.close()


def failed_call(error: grpc.RpcError, address: str) -> typer.Exit:
    """The end of a command whose call failed: what the cluster said, and what to do about it."""
    code = error.code()
    advice = _ADVICE.get(code)
    message = f"{error.details() or 'no details'} ({code.name.lower().replace('_', ' ')}, from {address})"
    return fail(f"{message}; {advice}" if advice else message, _EXIT_CODES.get(code, EXIT_FAILED))
