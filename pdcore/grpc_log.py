"""gRPC's own log lines: off, unless somebody asks for them. Imports no gRPC itself."""

from __future__ import annotations

from collections.abc import MutableMapping


def quiet_grpc(environment: MutableMapping[str, str]) -> None:
    """Leave it to us to say what has gone wrong, unless gRPC is told to speak for itself.

    Its core writes to standard error by itself, a line for each handshake that fails, as of every client that comes
    in plain text where TLS is spoken. It reads this when it is imported, and knows no other way: so call it before.
    Child processes inherit it.
    """
    if "GRPC_TRACE" not in environment:
        environment.setdefault("GRPC_VERBOSITY", "NONE")
