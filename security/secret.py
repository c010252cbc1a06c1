"""The secret that every call inside a cluster comes with, so that no stranger's worker gets requests, no stranger's
router gets workers, and no stranger's KV gets into a cache.

It says who belongs to the cluster, and encrypts nothing: on a network that others can read, TLS must be on.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from pdcore.errors import ConfigError
from pdcore.security import InternalSecurity

SECRET_METADATA = "x-pdserve-secret"
SECRET_VARIABLE = "PDSERVE_CLUSTER_SECRET"
MIN_SECRET_CHARS = 16
MAX_SECRET_CHARS = 512
_HEALTH = "/grpc.health.v1.Health/"
"""Anybody may ask whether a worker is well, as Kubernetes does; nothing else is said."""

Metadata = tuple[tuple[str, str], ...]


def new_secret() -> str:
    """A secret for a cluster that has none of its operator's."""
    return secrets.token_urlsafe(32)


def read_secret(security: InternalSecurity) -> str:
    """The cluster's secret; empty if there is none. Raises ConfigError, which shows nothing of it."""
    if security.secret:
        return _checked(security.secret, "secret")
    if not security.secret_file:
        return ""
    try:
        with Path(security.secret_file).open(encoding="utf-8") as file:
            text = file.read(2 * MAX_SECRET_CHARS)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError("secret_file", security.secret_file, f"a readable file ({why})") from None
    return _checked(text.strip(), "secret_file")


def with_secret_of(security: InternalSecurity, environment: Mapping[str, str]) -> InternalSecurity:
    """`security` with the secret that the environment has, if no file has it."""
    secret = environment.get(SECRET_VARIABLE, "").strip()
    if not secret or security.secret or security.secret_file:
        return security
    return replace(security, secret=_checked(secret, f"${SECRET_VARIABLE}"))


def secret_metadata(secret: str) -> Metadata:
    """What goes with every call; nothing without a secret."""
    return ((SECRET_METADATA, secret),) if secret else ()


def _checked(secret: str, source: str) -> str:
    if not MIN_SECRET_CHARS <= len(secret) <= MAX_SECRET_CHARS or not secret.isascii() or not secret.isprintable():
        allowed = (
            f"{MIN_SECRET_CHARS} to {MAX_SECRET_CHARS} printable ASCII characters without a line break "
            "(`openssl rand -hex 32` makes a good one)"
        )
        raise ConfigError(source, "(not shown)", allowed)
    return secret


class _Gate:
    """Whether a call comes with the secret. The comparison takes the same time whatever is given."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def open_to(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        if method.startswith(_HEALTH):
            return True
        given = [value for name, value in metadata or () if name == SECRET_METADATA]
        if len(given) != 1:
            return False
        value = given[0]
        return hmac.compare_digest(value if isinstance(value, bytes) else value.encode(), self._secret)


_REFUSAL = (
    "the cluster's secret is missing or not the right one: every process of a cluster needs the same "
    f"(secret_file, or ${SECRET_VARIABLE})"
)


class SecretInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the secret, with UNAUTHENTICATED, before anything of theirs is read, in `grpc.server`."""

    def __init__(self, secret: str) -> None:
        self._gate = _Gate(secret)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        if self._gate.open_to(details.method, details.invocation_metadata):
            return continuation(details)
        # As a stream both ways, whatever the method is: so nothing is waited for.
        return grpc.stream_stream_rpc_method_handler(_refuse)


class AioSecretInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """`SecretInterceptor` for `grpc.aio.server`."""

    def __init__(self, secret: str) -> None:
        self._gate = _Gate(secret)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if self._gate.open_to(details.method, details.invocation_metadata):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse_aio)


def _refuse(request_iterator: object, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)


async def _refuse_aio(request_iterator: object, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)
