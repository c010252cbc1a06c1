"""From which link speed on KV travels faster without compression: a report for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table

from pdcore.costs import (
    CodecCost,
    TableRow,
    TransferSnapshot,
    break_even_table,
    codec_break_even,
    rebuild_break_even,
)
from pdcore.types import KvGeometry

DEFAULT_LINKS_GBIT = (0.05, 0.25, 1.0, 2.5, 10.0, 25.0, 100.0, 400.0)
DEFAULT_TOKENS = (128, 512, 2048, 8192)
_LONG_TOKENS = 32_768  # of the break-even of a codec: so many that the first and the last frame do not count
_FASTEST_GBIT = 10_000.0  # what stands for "at every speed"


@dataclass(frozen=True, slots=True)
class BreakEven:
    """What `break_even` found. Link speeds in Gbit/s: 0 is never, 10000 always.

    Attributes:
        geometry: of the KV.
        codecs: costs and link speed below which each lossless codec beats raw.
        rows: the choice for each link and number of tokens.
        prefill_tokens_s: speed of the prefill behind which transfers hide; None: nothing hides them.
        rebuild: by number of tokens, the link speed below which the decode worker had better compute them itself, at
            `prefill_tokens_s`; empty if that is None.
    """

    geometry: KvGeometry
    codecs: tuple[tuple[CodecCost, float], ...]
    rows: tuple[TableRow, ...]
    prefill_tokens_s: float | None
    rebuild: tuple[tuple[int, float], ...]


def break_even(
    geometry: KvGeometry,
    costs: Mapping[str, CodecCost],
    *,
    frame_bytes: int,
    links_gbit: Sequence[float] = DEFAULT_LINKS_GBIT,
    token_counts: Sequence[int] = DEFAULT_TOKENS,
    prefill_tokens_s: float | None = None,
) -> BreakEven:
    """Work the table out for the lossless ones among `costs`, raw among them.

    Args:
        frame_bytes: raw bytes of a frame. prefill_tokens_s: see `BreakEven`.
    """
    lossless = tuple(cost for cost in costs.values() if cost.lossless)
    whole = TransferSnapshot(_LONG_TOKENS * geometry.bytes_per_token, frame_bytes, 1.0, lossless)
    rebuild = []
    if prefill_tokens_s is not None:
        for tokens in token_counts:
            part = replace(whole, raw_bytes=tokens * geometry.bytes_per_token)
            bound = rebuild_break_even(part, tokens=tokens, prefill_tokens_s=prefill_tokens_s)
            rebuild.append((tokens, _gbit(bound)))
    return BreakEven(
        geometry=geometry,
        codecs=tuple(
            (cost, 0.0 if cost.name == "raw" else _gbit(codec_break_even(whole, cost.name))) for cost in lossless
        ),
        rows=tuple(
            break_even_table(
                lossless,
                bytes_per_token=geometry.bytes_per_token,
                frame_bytes=frame_bytes,
                links_bytes_s=[125e6 * gbit for gbit in links_gbit],
                token_counts=token_counts,
                prefill_tokens_s=prefill_tokens_s,
            )
        ),
        prefill_tokens_s=prefill_tokens_s,
        rebuild=tuple(rebuild),
    )


def to_dict(report: BreakEven) -> dict[str, object]:
    """The report as plain data."""
    return {
        "bytes_per_token": report.geometry.bytes_per_token,
        "dtype": report.geometry.dtype,
        "prefill_tokens_s": report.prefill_tokens_s,
        "codecs": [
            {
                "codec": cost.name,
                "ratio": cost.ratio,
                "encode_gb_s": round(cost.encode_bytes_s / 1e9, 4),
                "decode_gb_s": round(cost.decode_bytes_s / 1e9, 4),
                "break_even_gbit": round(gbit, 4),
            }
            for cost, gbit in report.codecs
        ],
        "choices": [
            {
                "link_gbit": round(row.link_bytes_s / 125e6, 6),
                "tokens": row.tokens,
                "codec": row.codec,
                "exposed_ms": {item.codec: round(1000 * item.exposed_s, 4) for item in row.exposed_s},
            }
            for row in report.rows
        ],
        "rebuild": [{"tokens": tokens, "break_even_gbit": round(gbit, 4)} for tokens, gbit in report.rebuild],
    }


def show(report: BreakEven, console: Console) -> None:
    """Print the report for people."""
    console.print(
        f"KV of {report.geometry.bytes_per_token:,} bytes per token ({report.geometry.dtype}), codec speeds of one "
        "core of this machine, ratios of real KV",
        highlight=False,
    )
    codecs = _table(("codec", "ratio", "encode GB/s", "decode GB/s", "faster than raw below"))
    for cost, gbit in report.codecs:
        bound = "-" if cost.name == "raw" else _words(gbit)
        codecs.add_row(
            cost.name,
            f"{cost.ratio:.2f}",
            f"{cost.encode_bytes_s / 1e9:.2f}",
            f"{cost.decode_bytes_s / 1e9:.2f}",
            bound,
        )
    console.print()
    console.print(codecs)
    console.print()
    hidden = "nothing" if report.prefill_tokens_s is None else f"a prefill of {report.prefill_tokens_s:g} tokens/s"
    console.print(f"What auto takes while {hidden} hides the wire, and the exposed time it saves:", highlight=False)
    console.print()
    console.print(_choices(report))
    if report.rebuild:
        console.print()
        rebuild = _table(("tokens", "computed again on the decode worker below"))
        for tokens, gbit in report.rebuild:
            rebuild.add_row(f"{tokens:,}", _words(gbit))
        console.print(rebuild)


def _choices(report: BreakEven) -> Table:
    tokens = list(dict.fromkeys(row.tokens for row in report.rows))
    table = _table(("link", *(f"{count:,} tokens" for count in tokens)))
    for link in dict.fromkeys(row.link_bytes_s for row in report.rows):
        cells = []
        for row in report.rows:
            if row.link_bytes_s == link:
                times = {item.codec: item.exposed_s for item in row.exposed_s}
                saved = f" -{1 - times[row.codec] / times['raw']:.0%}" if row.codec != "raw" else ""
                cells.append(f"{row.codec}{saved}")
        table.add_row(f"{link / 125e6:g} Gbit/s", *cells)
    return table


def _table(headers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left", overflow="fold")
    return table


def _gbit(bytes_s: float | None) -> float:
    if bytes_s is None:
        return 0.0
    return _FASTEST_GBIT if math.isinf(bytes_s) else bytes_s / 125e6


def _words(gbit: float) -> str:
    if gbit == 0:
        return "never"
    return "at every speed" if gbit >= _FASTEST_GBIT else f"{gbit:.3g} Gbit/s"
