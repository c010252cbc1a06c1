"""``pdserve codecs --breakeven``: from which link speed on KV had better travel as it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cluster.cli.client import EXIT_FAILED, EXIT_USAGE, fail
from cluster.cli.output import check_output, write_json
from pdcore.errors import ModelError
from pdcore.types import DTYPE_BYTES


def print_break_even(
    model: str,
    dtype: str,
    *,
    links_gbit: Sequence[float] | None = None,
    token_counts: Sequence[int] | None = None,
    codecs: Sequence[str] | None = None,
    prefill_tokens_s: float | None = None,
    json_file: Path | None = None,
) -> None:
    """Print the break-even table of a model's KV, with the codec speeds of this machine.

    Args:
        model: as ``--model`` takes it. dtype: of the KV.
        links_gbit, token_counts: what to look at; None or empty for a choice of our own.
        codecs: lossless ones, between which and raw the choice is; None or empty for all.
        prefill_tokens_s: see `cluster.break_even.BreakEven`.
        json_file: where to write the table as data.

    Ends the command with an error if the model or a number is no good, or the file cannot be written.
    """
    from cluster.break_even import DEFAULT_LINKS_GBIT, DEFAULT_TOKENS, break_even, show, to_dict
    from cluster.kv_shape import kv_shape
    from engine.model_store import resolve_model
    from kv_transfer.codec_speed import quick_costs
    from kv_transfer.codecs.registry import STANDARD, CodecRegistry
    from pdcore.config import TransferConfig

    if dtype not in DTYPE_BYTES:
        raise fail(f"--dtype: {dtype!r} is not allowed; allowed: {', '.join(DTYPE_BYTES)}", EXIT_USAGE)
    for flag, numbers in (
        ("--link-gbit", links_gbit or ()),
        ("--tokens", token_counts or ()),
        ("--prefill-tokens-s", () if prefill_tokens_s is None else (prefill_tokens_s,)),
    ):
        for number in numbers:
            if not 0 < number < float("inf"):
                raise fail(f"{flag}: {number:g} is not allowed; allowed: a number > 0", EXIT_USAGE)
    lossless = [codec.name for codec in STANDARD if codec.lossless]
    for name in codecs or ():
        if name not in lossless:
            allowed = f"{', '.join(lossless)} with --breakeven, which compares lossless ones"
            raise fail(f"--codecs: {name!r} is not allowed; allowed: {allowed}", EXIT_USAGE)
    check_output("--json", json_file)
    try:
        geometry = kv_shape(resolve_model(model).path, dtype)
    except ModelError as error:
        raise fail(str(error), EXIT_FAILED) from error
    compared = CodecRegistry(codec for codec in STANDARD if not codecs or codec.name in ("raw", *codecs))
    report = break_even(
        geometry,
        quick_costs(compared, geometry),
        frame_bytes=TransferConfig().frame_bytes,
        links_gbit=links_gbit or DEFAULT_LINKS_GBIT,
        token_counts=token_counts or DEFAULT_TOKENS,
        prefill_tokens_s=prefill_tokens_s,
    )
    console = Console()
    show(report, console)
    write_json(json_file, to_dict(report), console)
