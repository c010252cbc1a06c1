"""The codec of a transfer: what a sender has learned so far, put to `pdcore.costs.choose_codec`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from kv_transfer.codecs.base import Codec
from kv_transfer.codecs.registry import CodecRegistry
from kv_transfer.manifest import TicketRef
from kv_transfer.measuring import CODEC_HALF_LIFE_S, LinkMeter, PrefillPace, Quotient
from pdcore.costs import RAW, CodecChoice, CodecCost, TransferSnapshot, choose_codec, exposed_seconds, frame_bytes_for

ASSUMED_LINK_BYTES_S: Final[Mapping[str, float]] = {"shm": 4e9}
"""Bandwidth of a transport before it was measured; 10 Gbit/s of those that are not here."""
_ASSUMED_BYTES_S: Final = 1.25e9
_SLACK_S: Final = 0.001  # of any transfer: what is shorter says little about the model
_MOST_ADDRESSES: Final = 256  # that something is kept of; a cluster that grows and shrinks sees new ones for ever
_TRUST: Final = 4.0  # the model is not wrong by more than this factor


class Link:
    """The way to one receiver by one transport, and the receiver's speed. Under the sender's lock.

    Attributes:
        meter: its bandwidth. last: the codec that was chosen last.
    """

    def __init__(self, transport: str, decode: Mapping[str, Quotient]) -> None:
        self.meter = LinkMeter(ASSUMED_LINK_BYTES_S.get(transport, _ASSUMED_BYTES_S))
        self.last = ""
        self._decode = decode
        self._outcomes: dict[str, Quotient] = {}  # exposed time over what the model said, by codec
        self._frames: dict[tuple[TicketRef, int], tuple[str, int]] = {}  # codec and raw bytes of frames on their way

    def posted(self, ref: TicketRef, index: int, codec: str, *, raw_bytes: int, wire_bytes: int, now: float) -> None:
        """A frame was given to the transport."""
        self._frames[ref, index] = (codec, raw_bytes)
        self.meter.posted((ref, index), wire_bytes, now)

    def answered(self, ref: TicketRef, index: int, held_s: float, work_s: float, now: float) -> None:
        """The frame is acknowledged. The receiver held it for `held_s` seconds, and worked on it for `work_s`."""
        self.meter.answered((ref, index), held_s, now)
        codec, raw_bytes = self._frames.pop((ref, index), ("", 0))
        if codec in self._decode and work_s > 0:
            self._decode[codec].add(raw_bytes, work_s, now)

    def came_out(self, codec: str, forecast_s: float, exposed_s: float, now: float) -> None:
        """A transfer that the model said would leave `forecast_s` exposed left `exposed_s`."""
        outcome = self._outcomes.setdefault(codec, Quotient(1.0, CODEC_HALF_LIFE_S))
        outcome.add(exposed_s + _SLACK_S, forecast_s + _SLACK_S, now)

    def correction(self, codec: str, now: float) -> float:
        """What to multiply the model's word by. A codec that was not tried is taken to be as good as the best that
        was: what slows those down would slow it down too."""
        outcome = self._outcomes.get(codec)
        if outcome is not None:
            factor = outcome.value(now)
        else:
            factor = min((other.value(now) for other in self._outcomes.values()), default=1.0)
        return min(max(factor, 1 / _TRUST), _TRUST)

    def lost(self, ref: TicketRef, index: int) -> None:
        """The frame was refused, or has vanished."""
        self.meter.lost((ref, index))
        self._frames.pop((ref, index), None)

    def broken(self) -> None:
        """The stream is gone, and what was on it."""
        self.meter.reset()
        self._frames.clear()


@dataclass(frozen=True, slots=True)
class Chosen:
    """The codec of a transfer and why.

    `frame_bytes`: raw bytes of its frames. `final`: it need not be looked at again once the link has been measured.
    `forecast`: what the model alone says of the exposed time.
    """

    codec: Codec
    choice: CodecChoice
    frame_bytes: int
    final: bool
    forecast: Forecast

    @property
    def reason(self) -> str:
        return self.choice.reason


class Forecast(NamedTuple):
    """`seconds` exposed, said the model of a transfer over `link` by `codec`. `assumed`: of a link not measured."""

    link: Link
    codec: str
    seconds: float
    assumed: bool

    def came_out(self, exposed_s: float, now: float) -> None:
        """The transfer is over. What was said on an assumption that has turned out wrong meanwhile teaches nothing; a
        link that is still not measured was never waited for, and the assumption did no harm."""
        if not (self.assumed and self.link.meter.measured(now)):
            self.link.came_out(self.codec, self.seconds, exposed_s, now)


class CodecChooser:
    """Knows the speeds of one sender's codecs, prefills, links and receivers. Under the sender's lock.

    What is known of an address is kept when a stream breaks or a receiver starts anew, unless so many others were
    sent to since that it is the one of longest ago.

    Args:
        codecs: those that this worker has. dtype: of its cache.
        costs: by plain name, of every codec that can pack `dtype`; what is assumed until something is measured.

    Attributes:
        pace: of this worker's prefills.
    """

    def __init__(self, codecs: CodecRegistry, dtype: str, costs: Mapping[str, CodecCost]) -> None:
        self._codecs = codecs
        self._dtype = dtype
        self._costs = dict(costs)
        self._encode = {name: Quotient(cost.encode_bytes_s, CODEC_HALF_LIFE_S) for name, cost in costs.items()}
        self._ratio = {name: Quotient(cost.ratio, CODEC_HALF_LIFE_S) for name, cost in costs.items()}
        self._decode: dict[str, dict[str, Quotient]] = {}  # by address, then codec
        self._links: dict[tuple[str, str], Link] = {}
        self.pace = PrefillPace()

    # --- what happens ---------------------------------------------------------------------------------------------

    def link(self, address: str, transport: str) -> Link:
        """The way to a receiver by a transport."""
        name, decode = (address, transport), self._decode_of(address)
        if name not in self._links:
            self._links[name] = Link(transport, decode)
        return self._links[name]

    def told(self, address: str, rates: Iterable[tuple[str, float]]) -> None:
        """A receiver's welcome: decoded bytes per second by codec. What was measured counts for more."""
        decode = self._decode_of(address)
        for codec, bytes_s in rates:
            if codec in decode and 0 < bytes_s < float("inf"):
                decode[codec].assumed = bytes_s

    def broken(self, address: str) -> None:
        """The stream to a receiver is gone, and its lanes."""
        for (where, _), link in self._links.items():
            if where == address:
                link.broken()

    def encoded(self, codec: str, raw_bytes: int, wire_bytes: int, seconds: float, now: float) -> None:
        """A frame was read and packed in `seconds`."""
        if seconds > 0:
            self._encode[codec].add(raw_bytes, seconds, now)
        self._ratio[codec].add(raw_bytes, wire_bytes, now)

    # --- the choice -----------------------------------------------------------------------------------------------

    def choose(
        self,
        asked: str,
        accepted: Sequence[str],
        address: str,
        transport: str,
        *,
        raw_bytes: int,
        most_frame_bytes: int,
        hidden_s: float,
        encoder_queue_bytes: int,
        now: float,
    ) -> Chosen:
        """Choose the codec of a transfer that is about to begin, or has begun with a choice that was not final.

        Args:
            asked: a codec's plain name, or ``auto``. accepted: wire names of what the ticket accepts.
            most_frame_bytes: raw bytes of a frame at most; see `frame_bytes_for`.
            raw_bytes, hidden_s, encoder_queue_bytes: see `TransferSnapshot`.

        Raises:
            TransferError: no codec in common. Not retryable.
        """
        usable = self._codecs.usable(accepted, self._dtype)
        link, known = self.link(address, transport), self._decode_of(address)
        measured = link.meter.measured(now)
        frame_bytes = frame_bytes_for(link.meter.bytes_s(now), most_frame_bytes)
        encoders = {name: self._encode[name].value(now) for name in usable}
        decoders = {name: known[name].value(now) for name in usable}
        if RAW in usable:
            # It is part of the work of every other one: whatever is told of it, it is no slower than the fastest.
            encoders[RAW], decoders[RAW] = max(encoders.values()), max(decoders.values())
        costs = {
            name: replace(
                self._costs[name],
                ratio=self._ratio[name].value(now),
                encode_bytes_s=encoders[name],
                decode_bytes_s=decoders[name],
                correction=link.correction(name, now),
            )
            for name in usable
        }
        transfer = TransferSnapshot(
            raw_bytes=raw_bytes,
            frame_bytes=frame_bytes,
            link_bytes_s=link.meter.bytes_s(now),
            codecs=tuple(costs.values()),
            hidden_s=hidden_s,
            encoder_queue_bytes=encoder_queue_bytes,
            link_queue_bytes=link.meter.in_flight_bytes,
            asked=asked,
            last=link.last,
            link_measured=measured,
        )
        choice = choose_codec(transfer)
        if choice.alternatives:  # nobody asked for it by name
            link.last = choice.codec
        seconds = exposed_seconds(transfer, costs[choice.codec])
        forecast = Forecast(link, choice.codec, seconds, assumed=not measured)
        final = measured or not choice.alternatives
        return Chosen(usable[choice.codec], choice, frame_bytes, final=final, forecast=forecast)

    def _decode_of(self, address: str) -> dict[str, Quotient]:
        decode = self._decode.pop(address, None)
        if decode is None:
            if len(self._decode) == _MOST_ADDRESSES:
                self._forget(next(iter(self._decode)))
            decode = {name: Quotient(cost.decode_bytes_s, CODEC_HALF_LIFE_S) for name, cost in self._costs.items()}
        self._decode[address] = decode  # the one that was used last is at the end
        return decode

    def _forget(self, address: str) -> None:
        del self._decode[address]
        for name in [name for name in self._links if name[0] == address]:
            del self._links[name]
