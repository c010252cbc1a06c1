"""What a KV transfer costs, and the decisions that follow from it: which codec, and whether to transfer at all. Pure.

A transfer is a pipeline. Frames of equal size go through four stages, each of which takes one frame at a time, in
order::

    computed by the prefill --> encoded --> on the link --> decoded
         hidden_s / n            f / e      f / (r * b)      f / d       seconds a frame

    n frames of f bytes; e, d encoder's and decoder's bytes/s, r ratio, b link's bytes/s; bytes are raw, uncompressed

The slowest stage governs, and the last frame goes through the stages that are left one after the other. What comes
after the prefill's end is *exposed*: the client waits for it between the first token and the second. Other transfers
may be ahead in the encoder's queue or on the link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

AUTO = "auto"
"""Name of the choice that `choose_codec` makes, wherever a codec's name is expected."""
RAW = "raw"
ASKED_FOR = "asked for"
"""Reason of a `CodecChoice` that was none."""

BETTER_THAN_ZSTD = ("bexp-zstd", "bexp3")
"""Where one of these can be used, plain zstd is worse in ratio and speed, and never chosen by itself."""

RAW_MARGIN = 0.02
"""Compression must save this share of the exposed time, else KV goes raw: it costs both ends' cores."""
STAY_MARGIN = 0.04
"""While KV goes raw already, compression must save this share: an estimate that trembles must not flip the choice."""
WORTH_S = 0.0005
"""Savings below this are not worth a core either, whatever their share."""
FRAME_S = 0.01
"""A raw frame should not be on the link for longer: the last one is what a client waits for behind a prefill."""
LEAST_FRAME_BYTES = 64 * 1024
"""Below this a frame's own work outweighs what it carries."""
TRANSFER_MARGIN = 0.1
"""Recomputing must be this much faster than a transfer: it takes the place of other work here."""


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What a codec does to the pipeline. Rates are raw bytes per second, all of a stage's work included.

    Attributes:
        ratio: raw bytes to bytes on the wire.
        encode_bytes_s: reading the cache, encoding, checksums. decode_bytes_s: checking, decoding, writing the cache.
        lossless: the numbers arrive as they were.
        correction: exposed time of late transfers over what this model made of them: stages that share cores slow
            each other down, which it knows nothing of.
    """

    name: str
    ratio: float
    encode_bytes_s: float
    decode_bytes_s: float
    lossless: bool = True
    correction: float = 1.0


@dataclass(frozen=True, slots=True)
class TransferSnapshot:
    """A transfer before its first frame.

    Attributes:
        raw_bytes: KV to send, > 0. frame_bytes: raw bytes of a frame, about.
        link_bytes_s: bandwidth. link_measured: it was measured, not assumed.
        codecs: what both ends can use, in no order.
        hidden_s: seconds until the prefill has computed the last of it; it becomes ready evenly over that time.
        encoder_queue_bytes: raw bytes of other transfers that are ready and will be encoded before.
        link_queue_bytes: bytes that are on the link already and not acknowledged.
        asked: the codec that was asked for, or `AUTO`.
        last: the codec of the last transfer over this link; empty if there is none.
    """

    raw_bytes: int
    frame_bytes: int
    link_bytes_s: float
    codecs: tuple[CodecCost, ...]
    hidden_s: float = 0.0
    encoder_queue_bytes: int = 0
    link_queue_bytes: int = 0
    asked: str = AUTO
    last: str = ""
    link_measured: bool = True


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds that a codec is expected to leave exposed."""

    codec: str
    exposed_s: float


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A decision. `reason` is for people, one line. `alternatives`: what else was looked at, best first."""

    codec: str
    reason: str
    exposed_s: float
    alternatives: tuple[Prediction, ...] = ()


@dataclass(frozen=True, slots=True)
class RebuildChoice:
    """Whether to compute KV again here instead of having it sent. Seconds from now until it can be used."""

    recompute: bool
    reason: str
    transfer_s: float
    recompute_s: float


def frame_bytes_for(link_bytes_s: float, most: int) -> int:
    """Raw bytes of a frame on a link of so many bytes/s: `FRAME_S` of it, within `LEAST_FRAME_BYTES` and `most`."""
    return min(most, max(LEAST_FRAME_BYTES, int(FRAME_S * link_bytes_s)))


def exposed_seconds(transfer: TransferSnapshot, codec: CodecCost) -> float:
    """Seconds from the end of the prefill until the last byte is decoded, `correction` aside.

    Exact for the pipeline above with frames of equal size. A stage that starts late (the link, behind what is on it)
    may be the one that everything waits for, so the last frame is done at the latest of the ways to it::

        compute the first frame, then the slowest of all stages for each further one, then the stages behind it
        encode the queue and all frames at the pace of the slowest stage from the encoder on
        empty the link, then send queue and frames at the pace of link or decoder
    """
    count = math.ceil(transfer.raw_bytes / transfer.frame_bytes)
    frame = transfer.raw_bytes / count
    queued = transfer.encoder_queue_bytes / frame
    encode = frame / codec.encode_bytes_s
    send = frame / (codec.ratio * transfer.link_bytes_s)
    decode = frame / codec.decode_bytes_s
    compute = transfer.hidden_s / count
    slowest = max(encode, send, decode)
    link_free = transfer.link_queue_bytes / transfer.link_bytes_s
    done = max(
        compute + encode + send + decode + (count - 1) * max(compute, slowest),
        encode + send + decode + (count + queued - 1) * slowest,
        link_free + send + decode + (count + queued - 1) * max(send, decode),
    )
    return done - transfer.hidden_s


def choose_codec(transfer: TransferSnapshot) -> CodecChoice:
    """The codec for a transfer: the one asked for, else the lossless one that leaves the least time exposed.

    Raw unless compression pays, see `RAW_MARGIN` and `WORTH_S`; the choice is never worse than the best by more than
    `STAY_MARGIN` and `WORTH_S`. A codec that was asked for and cannot be used asked for compression all the same
    (unless it is raw), and for a codec at all, so the choice is made as if nothing had been asked for. A codec that
    changes numbers is never chosen by itself.
    """
    predictions = {
        codec.name: Prediction(codec.name, exposed_seconds(transfer, codec) * codec.correction)
        for codec in transfer.codecs
    }
    if transfer.asked in predictions:
        return CodecChoice(transfer.asked, ASKED_FOR, predictions[transfer.asked].exposed_s)
    prefix = "" if transfer.asked == AUTO else f"{transfer.asked} was asked for and cannot be used here; "
    names = {codec.name for codec in transfer.codecs if codec.lossless}
    if not names.isdisjoint(BETTER_THAN_ZSTD):
        names.discard("zstd")
    lossless = [predictions[name] for name in names]
    assert lossless, "raw is always among them"
    ranked = sorted(lossless, key=lambda prediction: (prediction.exposed_s, prediction.codec))
    chosen = _pick(ranked, transfer.last)
    others = tuple(prediction for prediction in ranked if prediction is not chosen)
    return CodecChoice(chosen.codec, prefix + _reason(transfer, chosen, others), chosen.exposed_s, others)


def _pick(ranked: Sequence[Prediction], last: str) -> Prediction:
    best = ranked[0]
    by_name = {prediction.codec: prediction for prediction in ranked}
    raw = by_name.get(RAW)
    if raw is not None:
        margin = STAY_MARGIN if last == RAW else RAW_MARGIN
        if raw.exposed_s <= (1 + margin) * best.exposed_s + WORTH_S:
            return raw
    stay = by_name.get(last)
    if stay is not None and stay.exposed_s <= (1 + RAW_MARGIN) * best.exposed_s:
        return stay
    return best


def _reason(transfer: TransferSnapshot, chosen: Prediction, others: Sequence[Prediction]) -> str:
    if not others:
        return "no other lossless codec in common"
    # Raw is what everybody knows; the best of the others is what it has to compare with.
    other = next((prediction for prediction in others if prediction.codec == RAW), others[0])
    link = f"{_gbit(transfer.link_bytes_s)} Gbit/s{'' if transfer.link_measured else ' assumed'}"
    hidden = f", prefill hides {_ms(transfer.hidden_s)}" if transfer.hidden_s > 0 else ""
    small = ", too little to gain" if chosen.codec == RAW and other.exposed_s < chosen.exposed_s else ""
    return (
        f"{chosen.codec} leaves {_ms(chosen.exposed_s)} exposed, {other.codec} {_ms(other.exposed_s)}{small} "
        f"({link}{hidden})"
    )


def transfer_or_recompute(
    transfer: TransferSnapshot, *, tokens: int, prefill_tokens_s: float, queued_tokens: int = 0
) -> RebuildChoice:
    """Whether the worker that needs KV should compute it itself, for less than it takes to fetch it.

    Args:
        transfer: the fetch; `hidden_s` is how long the other side still computes.
        tokens: that would be computed here. queued_tokens: that this worker computes before.
        prefill_tokens_s: tokens per second that this worker computes beside its other work.
    """
    choice = choose_codec(transfer)
    transfer_s = transfer.hidden_s + choice.exposed_s
    recompute_s = (tokens + queued_tokens) / prefill_tokens_s
    recompute = recompute_s * (1 + TRANSFER_MARGIN) < transfer_s
    return RebuildChoice(
        recompute,
        f"{tokens} tokens take {_ms(recompute_s)} to compute here, {_ms(transfer_s)} to fetch by {choice.codec} "
        f"({_gbit(transfer.link_bytes_s)} Gbit/s)",
        transfer_s,
        recompute_s,
    )


def codec_break_even(transfer: TransferSnapshot, codec: str, against: str = RAW) -> float | None:
    """Link speed, bytes/s, below which `codec` leaves less exposed than `against`.

    Searched from 1 kbit/s to 10 Tbit/s, `transfer.link_bytes_s` aside. None if it never does; infinite if it does at
    every speed. Both codecs must be among `transfer.codecs`.
    """
    costs = {cost.name: cost for cost in transfer.codecs}

    def pays(link_bytes_s: float) -> bool:
        here = replace(transfer, link_bytes_s=link_bytes_s)
        return exposed_seconds(here, costs[codec]) < exposed_seconds(here, costs[against])

    return _last_true(pays)


def rebuild_break_even(transfer: TransferSnapshot, *, tokens: int, prefill_tokens_s: float) -> float | None:
    """Link speed, bytes/s, below which `transfer_or_recompute` recomputes; None and infinite as for codecs."""

    def recomputes(link_bytes_s: float) -> bool:
        here = replace(transfer, link_bytes_s=link_bytes_s)
        return transfer_or_recompute(here, tokens=tokens, prefill_tokens_s=prefill_tokens_s).recompute

    return _last_true(recomputes)


_SLOWEST_LINK = 1e3 / 8
_FASTEST_LINK = 1e13 / 8
_STEPS_PER_DECADE = 8


def _last_true(holds: Callable[[float], bool]) -> float | None:
    """The speed below which `holds` is true, above which it is false: to a thousandth, between the bounds above."""
    if holds(_FASTEST_LINK):
        return math.inf
    low = high = _FASTEST_LINK
    while low > _SLOWEST_LINK and not holds(low):
        low, high = low / 10 ** (1 / _STEPS_PER_DECADE), low
    if not holds(low):
        return None
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class TableRow:
    """The choice at one link speed (bytes/s) and number of tokens, and what every lossless codec leaves exposed."""

    link_bytes_s: float
    tokens: int
    codec: str
    exposed_s: tuple[Prediction, ...]


def break_even_table(
    codecs: Sequence[CodecCost],
    *,
    bytes_per_token: int,
    frame_bytes: int,
    links_bytes_s: Sequence[float],
    token_counts: Sequence[int],
    prefill_tokens_s: float | None = None,
) -> list[TableRow]:
    """What `choose_codec` chooses at every link speed and number of tokens, on an idle link.

    Args:
        prefill_tokens_s: the speed of the prefill that hides the transfer; None if nothing does, as when the prefill
            worker has the whole prompt in its cache.
    """
    rows = []
    for link in links_bytes_s:
        for tokens in token_counts:
            transfer = TransferSnapshot(
                raw_bytes=tokens * bytes_per_token,
                frame_bytes=frame_bytes,
                link_bytes_s=link,
                codecs=tuple(codec for codec in codecs if codec.lossless),
                hidden_s=0.0 if prefill_tokens_s is None else tokens / prefill_tokens_s,
            )
            predictions = tuple(Prediction(codec.name, exposed_seconds(transfer, codec)) for codec in transfer.codecs)
            rows.append(TableRow(link, tokens, choose_codec(transfer).codec, predictions))
    return rows


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _gbit(bytes_s: float) -> str:
    return f"{8e-9 * bytes_s:.3g}"
