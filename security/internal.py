"""The hops inside a cluster: channels and ports with what its configuration says of certificates and secret."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from pdcore.security import InternalSecurity
from security.credentials import NAME_OVERRIDE, channel_credentials, server_credentials
from security.files import PemFiles, Renewing
from security.secret import AioSecretInterceptor, Metadata, SecretInterceptor, read_secret, secret_metadata

ChannelOptions = Sequence[tuple[str, Any]]


class Internal:
    """What one process needs to call others of its cluster, and to be called. Thread-safe.

    Channels take up renewed certificates when they are made, ports at each handshake. So whoever lives long makes a
    new channel after a failure, rather than let an old one try again.

    Attributes:
        metadata: goes with every call.
    """

    def __init__(self, security: InternalSecurity) -> None:
        """Read certificates and secret. Raises ConfigError, see `PemFiles.read` and `read_secret`."""
        self._secret = read_secret(security)
        self.metadata: Metadata = secret_metadata(self._secret)
        self._tls = security.tls
        self._files: Renewing | None = None
        if security.tls is not None:
            tls = security.tls
            files = PemFiles("tls.internal", tls.cert_file, tls.key_file, tls.ca_file, own_name=tls.server_name)
            self._files = Renewing(files)

    @property
    def version(self) -> int:
        """Grows with renewed certificates: a channel that was made before has the old ones."""
        if self._files is None:
            return 0
        self._files.current()
        return self._files.version

    def channel(self, address: str, options: ChannelOptions) -> grpc.Channel:
        """A channel to ``host:port`` of another process of the cluster."""
        if self._files is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, channel_credentials(self._files.current()), options=self._named(options))

    def aio_channel(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        """`channel` for asyncio."""
        if self._files is None:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = channel_credentials(self._files.current())
        return grpc.aio.secure_channel(address, credentials, options=self._named(options))

    def interceptors(self) -> tuple[SecretInterceptor, ...]:
        """Of a server of the cluster, to refuse strangers."""
        return (SecretInterceptor(self._secret),) if self._secret else ()

    def aio_interceptors(self) -> tuple[AioSecretInterceptor, ...]:
        """`interceptors` for asyncio."""
        return (AioSecretInterceptor(self._secret),) if self._secret else ()

    def add_port(self, server: grpc.Server | grpc.aio.Server, address: str) -> int:
        """Let `server` listen on ``host:port``; returns the port. Raises RuntimeError if it cannot."""
        if self._files is None:
            port: int = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(self._files, mutual=True))
        return port

    def _named(self, options: ChannelOptions) -> ChannelOptions:
        """By a name that does not depend on the host, which is often an address of the moment."""
        assert self._tls is not None
        return (*options, (NAME_OVERRIDE, self._tls.server_name))


PLAIN = Internal(InternalSecurity())
"""Neither certificates nor a secret."""
