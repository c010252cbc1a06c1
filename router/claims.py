"""The router's end of idempotency keys: claimed at the controller, renewed while the request runs, given back."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import grpc

from pdcore.clock import Clock
from pdcore.config import RouterConfig
from pdcore.errors import AlreadyRunning, RequestError, Unavailable
from pdcore.tracebacks import wordless
from protos import routers_pb2, routers_pb2_grpc
from router.channels import internal_channel_options
from security.internal import PLAIN, Internal

logger = logging.getLogger(__name__)

CLAIM_TIMEOUT_S = 2.0
"""How long a request waits for the controller's word on its key."""
RELEASE_WAIT_S = 1.0
"""How long the end of a request is held back so that its key is free when the client hears of the end."""
RENEWED_AT_ONCE = 1000
_MARGIN = 0.1  # share of the time to live that is left for ending what could not be renewed
_RETRY_S = 0.5


def claim_key(tenant: str, key: str) -> bytes:
    """What the controller knows of a key: 32 bytes that say nothing to those who read them."""
    scope = tenant.encode()
    return hashlib.sha256(b"%d:%b%b" % (len(scope), scope, key.encode())).digest()


def key_of(key: str, number: int) -> str:
    """The key of request `number` of several that one key was given for: its own, and the same when all are sent
    again. That of the first is the key as it is; empty if there is none."""
    return hashlib.sha256(f"{number}:{key}".encode()).hexdigest() if key and number else key


@dataclass(eq=False, slots=True)
class Claim:
    """A request's hold on its key, or its wish for one.

    `valid_until`: on the router's clock; the controller keeps it at least as long. `serial`: tells it from other
    claims of a request with this id. `answered`: it is known whether the key was to be had; `refused`: why not.
    """

    key: bytes
    request_id: str
    serial: int
    valid_until: float
    released: asyncio.Task[None] | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    refused: Callable[[], RequestError] | None = None


class Claims:
    """Every claim of this router. Runs on one event loop.

    ::

        held() --Claim--> granted --the request ends--> Release, tried again until the controller forgets by itself
                   |         '- renewed four times in its time to live; `on_lost` if that fails for nearly as long,
                   |            or the controller says that it is another's
                   '- AlreadyRunning | Unavailable

    Args:
        on_lost: called with a request that must end, and why: somebody else may get its key.
    """

    def __init__(
        self,
        config: RouterConfig,
        incarnation: str,
        clock: Clock,
        on_lost: Callable[[str, RequestError], None],
        internal: Internal = PLAIN,
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._clock = clock
        self._on_lost = on_lost
        self._ttl_s = config.claim_ttl_s
        self._asking: dict[bytes, Claim] = {}
        self._live: dict[bytes, Claim] = {}
        self._serial = 0
        self._releases: set[asyncio.Task[None]] = set()
        self._first = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._internal = internal
        self._channel: grpc.aio.Channel | None = None
        self._version = 0  # of the certificates that the channel was made with
        self._closing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._renew_all(), name="claims")

    async def stop(self) -> None:
        """Give back what is held, within `RELEASE_WAIT_S`. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for claim in list(self._live.values()):
            self._release(claim)
        if self._releases:
            await asyncio.wait(self._releases, timeout=RELEASE_WAIT_S)
        for release in self._releases:
            release.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    @property
    def held_keys(self) -> int:
        return len(self._live)

    @asynccontextmanager
    async def held(self, tenant: str, key: str, request_id: str) -> AsyncIterator[Claim | None]:
        """Hold a key for as long as the block runs; None for a request without a key.

        On the way out of the block it waits a moment for the controller to know that the key is free.

        Raises:
            AlreadyRunning: another request of the tenant has the key.
            Unavailable: the controller does not answer in time, or gives no keys at present.
        """
        if not key:
            yield None
            return
        claim = await self._claim(claim_key(tenant, key), request_id)
        try:
            yield claim
        finally:
            await self.give_back(claim)

    async def give_back(self, claim: Claim | None) -> None:
        """The request has ended. Returns when the controller knows, or after `RELEASE_WAIT_S`. Idempotent."""
        if claim is None:
            return
        release = claim.released or self._release(claim)
        await asyncio.wait([release], timeout=RELEASE_WAIT_S)

    # -- with the controller -----------------------------------------------------------------------------------

    @property
    def _stub(self) -> routers_pb2_grpc.RoutersStub:
        """Of a channel with the certificates as they are now."""
        version = self._internal.version
        if self._channel is None or version != self._version:
            if self._channel is not None:
                closing = asyncio.get_running_loop().create_task(self._channel.close(CLAIM_TIMEOUT_S))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            options = internal_channel_options(self._config.max_message_bytes)
            self._channel = self._internal.aio_channel(self._config.controller, options)
            self._version = version
        return routers_pb2_grpc.RoutersStub(self._channel)

    async def _claim(self, key: bytes, request_id: str) -> Claim:
        while (first := self._asking.get(key)) is not None:  # whether that one gets it is not known yet
            await first.answered.wait()
            if first.refused is not None:
                raise first.refused()
            if first.released is not None:  # it has gone, and the controller may have yet to hear of it
                await asyncio.wait([first.released], timeout=RELEASE_WAIT_S)
        mine = self._live.get(key)
        if mine is not None:
            raise _already_running(mine.request_id, self._config.router_id)
        self._serial += 1
        claim = Claim(key, request_id, self._serial, self._clock.now() + self._ttl_s)
        request = routers_pb2.ClaimRequest(key=key, holder=self._holder(claim), ttl_s=self._ttl_s)
        self._asking[key] = claim
        try:
            reply = await self._stub.Claim(request, timeout=CLAIM_TIMEOUT_S, metadata=self._internal.metadata)
        except grpc.aio.AioRpcError as error:
            self._release(claim)  # it may have been granted all the same
            claim.refused = partial(Unavailable, f"the idempotency key cannot be claimed: {_words(error)}")
            raise claim.refused() from error
        except BaseException:
            self._release(claim)
            raise
        else:
            if reply.HasField("held_by"):
                claim.refused = partial(_already_running, reply.held_by.request_id, reply.held_by.router_id)
                raise claim.refused()
            self._live[key] = claim
        finally:
            del self._asking[key]
            claim.answered.set()
        self._first.set()
        return claim

    def _release(self, claim: Claim) -> asyncio.Task[None]:
        self._forget(claim)
        if claim.released is None:
            claim.released = asyncio.get_running_loop().create_task(self._give_back(claim), name="claim-release")
            self._releases.add(claim.released)
            claim.released.add_done_callback(self._releases.discard)
        return claim.released

    async def _give_back(self, claim: Claim) -> None:
        request = routers_pb2.ReleaseClaimRequest(key=claim.key, holder=self._holder(claim))
        while self._clock.now() < claim.valid_until:
            try:
                await self._stub.Release(request, timeout=RELEASE_WAIT_S, metadata=self._internal.metadata)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    return
            except grpc.aio.UsageError:  # the channel is closed
                return
            await asyncio.sleep(_RETRY_S)

    async def _renew_all(self) -> None:
        failing = False
        while True:
            if not self._live:
                self._first.clear()
                await self._first.wait()
            await asyncio.sleep(min(_RETRY_S, self._ttl_s / 20) if failing else self._ttl_s / 4)
            try:
                self._end_expired()  # first: if this process stood still, they are another's now
                claims = list(self._live.values())
                for start in range(0, len(claims), RENEWED_AT_ONCE):
                    await self._renew(claims[start : start + RENEWED_AT_ONCE])
                failing = False
            except grpc.aio.AioRpcError as error:
                if not failing:
                    logger.warning("%d idempotency keys are not renewed: %s", len(claims), _words(error))
                failing = True
            except Exception as error:
                logger.exception("idempotency keys are not renewed", exc_info=wordless(error))
                failing = True

    async def _renew(self, claims: list[Claim]) -> None:
        valid_until = self._clock.now() + self._ttl_s  # from before it is sent: the controller counts from later on
        request = routers_pb2.RenewClaimsRequest(
            router_id=self._config.router_id,
            incarnation=self._incarnation,
            ttl_s=self._ttl_s,
            claims=[routers_pb2.HeldClaim(key=c.key, request_id=c.request_id, serial=c.serial) for c in claims],
        )
        reply = await self._stub.Renew(request, timeout=self._ttl_s / 8, metadata=self._internal.metadata)
        lost = set(reply.lost)
        for claim in claims:
            if claim.released is not None:
                # The renewal may have come after the release, and to life again what had ended.
                self._release(Claim(claim.key, claim.request_id, claim.serial, valid_until))
            elif claim.key in lost:
                self._lose(claim, "another request has got its idempotency key")
            else:
                claim.valid_until = valid_until

    def _end_expired(self) -> None:
        limit = self._clock.now() + _MARGIN * self._ttl_s
        for claim in [claim for claim in self._live.values() if claim.valid_until <= limit]:
            self._lose(claim, f"its idempotency key could not be renewed for {(1 - _MARGIN) * self._ttl_s:.1f} s")

    def _lose(self, claim: Claim, reason: str) -> None:
        self._forget(claim)
        logger.warning("request %s ends: %s", claim.request_id, reason, extra={"request_id": claim.request_id})
        self._on_lost(claim.request_id, Unavailable(f"the request was ended, for {reason}"))

    def _forget(self, claim: Claim) -> None:
        if self._live.get(claim.key) is claim:
            del self._live[claim.key]

    def _holder(self, claim: Claim) -> routers_pb2.ClaimHolder:
        return routers_pb2.ClaimHolder(
            router_id=self._config.router_id,
            incarnation=self._incarnation,
            request_id=claim.request_id,
            serial=claim.serial,
        )


def _already_running(request_id: str, router_id: str) -> AlreadyRunning:
    return AlreadyRunning(
        f"idempotency_key: the request {request_id!r} on {router_id} has this key and has not ended", request_id
    )


def _words(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the controller does not answer within {CLAIM_TIMEOUT_S:g} s"
    return str(error.details())
