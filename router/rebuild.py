"""What becomes of a request whose KV transfer has failed: the last step of the transfer's failure policy. Pure.

The steps before it are the sender's: a damaged frame is sent again (`transfer.max_frame_retries` times), then by
every other transport that the pair has. Each is bounded in number, and all of them by `transfer.send_timeout_s`
without progress. What then fails comes here::

    tokens delivered                         rebuild: prompt and tokens are computed on the decode side
    the second failure of this request       rebuild
    no other pair of workers                 rebuild
    computing there is faster than           rebuild
      computing elsewhere and sending
    else                                     elsewhere: prefill and transfer again, by another pair

`router.max_replays` bounds them all together.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdcore.costs import CodecCost, TransferSnapshot, transfer_or_recompute
from pdcore.types import KvTransferStats, Role
from router.fleet import Fleet

FIRST_HANDOVER_MS = 10.0
"""What handing over is taken to cost until it has been seen."""
_NEWS = 0.2
"""Weight of the newest measurement in a mean: a handful of requests decide."""
_FREE_BYTES_S = 1e12
"""Codec speed: what the codec costs is in the transfers' measured times already."""
_FRAME_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class FailedTransfer:
    """A request whose transfer has failed.

    Attributes:
        failures: its transfers that have failed, this one included. delivered: tokens that the client has.
        tokens: to compute again.
        elsewhere: another pair of workers could take it.
        again: what another transfer would be, by the transfers so far; None if nothing is known.
        prefill_tokens_s: that a decode worker computes; None if that is not known.
    """

    failures: int
    delivered: int
    tokens: int
    elsewhere: bool
    again: TransferSnapshot | None = None
    prefill_tokens_s: float | None = None


@dataclass(frozen=True, slots=True)
class NextTry:
    """A decision. `rebuild`: on the decode side, without a transfer. `reason` is for people."""

    rebuild: bool
    reason: str


def after_failed_transfer(failed: FailedTransfer) -> NextTry:
    """Where the request goes on; see above."""
    if failed.delivered:
        return NextTry(True, "tokens were delivered")
    if failed.failures > 1:
        return NextTry(True, f"{failed.failures} transfers failed")
    if not failed.elsewhere:
        return NextTry(True, "no other pair of workers")
    if failed.again is not None and failed.prefill_tokens_s is not None:
        choice = transfer_or_recompute(failed.again, tokens=failed.tokens, prefill_tokens_s=failed.prefill_tokens_s)
        if choice.recompute:
            return NextTry(True, choice.reason)
    return NextTry(False, "another pair of workers")


def another_pair(failed: frozenset[str], fleet: Fleet) -> bool:
    """Some prefill and decode worker could do it that are not both of the failed pair's."""
    others = fleet.prefillers + fleet.decode_workers
    for worker_id in failed:
        number = fleet.number_of.get(worker_id)
        if number is not None:
            others -= int(fleet.prefill[number] or fleet.decode[number])
    return fleet.prefillers > 0 and fleet.decode_workers > 0 and others > 0


class TransferRates:
    """What finished prefills and transfers say of the next ones: means in which old news fade."""

    def __init__(self) -> None:
        self._prefill: dict[Role, float] = {}  # tokens/s
        self._link_bytes_s: float | None = None
        self._ratio = 1.0
        self._token_bytes = 0.0
        self._exposed_s: float | None = None

    def prefilled(self, role: Role, tokens: int, seconds: float) -> None:
        """A worker of this role has computed so many prompt tokens."""
        if tokens > 0 and seconds > 0:
            self._prefill[role] = _mean(self._prefill.get(role), tokens / seconds)

    def transferred(self, stats: KvTransferStats, tokens: int) -> None:
        """KV of so many tokens has come.

        Its time holds whatever the link waited for, so a link is never thought faster than it is.
        """
        if tokens > 0 and stats.seconds > 0 and stats.wire_bytes > 0:
            self._link_bytes_s = _mean(self._link_bytes_s, stats.wire_bytes / stats.seconds)
            self._ratio = stats.raw_bytes / stats.wire_bytes
            self._token_bytes = stats.raw_bytes / tokens

    def exposed(self, seconds: float, tokens: int) -> None:
        """KV of so many tokens was there so long after the prompt was computed.

        What the link itself takes longer than computing does is known by `token_ms`, and is not counted twice.
        """
        pace = self._prefill.get(Role.PREFILL)
        behind_s = 0.0 if pace is None else max(0.0, tokens * (self.token_ms / 1000 - 1 / pace))
        self._exposed_s = _mean(self._exposed_s, max(0.0, seconds - behind_s))

    def again(self, tokens: int) -> TransferSnapshot | None:
        """Prefill and transfer of so many tokens; None if too little is known."""
        pace = self._prefill.get(Role.PREFILL)
        raw_bytes = int(tokens * self._token_bytes)
        if pace is None or self._link_bytes_s is None or not raw_bytes:
            return None
        seen = CodecCost("measured", self._ratio, _FREE_BYTES_S, _FREE_BYTES_S)
        return TransferSnapshot(
            raw_bytes=raw_bytes,
            frame_bytes=_FRAME_BYTES,
            link_bytes_s=self._link_bytes_s,
            codecs=(seen,),
            hidden_s=tokens / pace,
        )

    @property
    def token_ms(self) -> float:
        """Milliseconds that the KV of one token was on its way; 0 until one has come."""
        if self._link_bytes_s is None:
            return 0.0
        return 1000 * self._token_bytes / self._ratio / self._link_bytes_s

    @property
    def handover_ms(self) -> float:
        """Milliseconds from a computed prompt to KV that is there, where computing hides the rest of the transfer."""
        return FIRST_HANDOVER_MS if self._exposed_s is None else 1000 * self._exposed_s

    @property
    def decode_side_tokens_s(self) -> float | None:
        """Prompt tokens per second where decode workers compute; that of the prefill pool until one has."""
        return self._prefill.get(Role.DECODE, self._prefill.get(Role.PREFILL))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - _NEWS) * old + _NEWS * new
