"""``pdserve codecs``: what every KV codec saves, costs and changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cluster.cli.breakeven import print_break_even
from cluster.cli.calibrate import check_dtype, make_calibration
from cluster.cli.client import EXIT_FAILED, EXIT_USAGE, fail
from cluster.cli.output import check_output, write_json
from cluster.cli.progress import reporting
from pdcore.config import CODECS
from pdcore.errors import ConfigError, PdserveError

if TYPE_CHECKING:
    from cluster.codec_quality.measuring import Quality
    from kv_transfer.codecs.base import Codec


def codecs(
    context: typer.Context,
    *,
    model: Annotated[str, typer.Option(help="Short name, model folder, GGUF file or hub id.")] = "smollm2-135m",
    chosen: Annotated[str, typer.Option("--codecs", help="Codecs, separated by commas; default: all.")] = "",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts at most; the built-in texts have about 50.")] = 48,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are scored after each prompt.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of the served model: bfloat16 or float16.")] = "bfloat16",
    calibration: Annotated[
        Path | None, typer.Option(help="File for tc4; default: the newest of this user, made now if there is none.")
    ] = None,
    breakeven: Annotated[
        bool, typer.Option("--breakeven", help="Show instead from which link speed on each lossless codec pays.")
    ] = False,
    link_gbit: Annotated[
        list[float] | None, typer.Option(help="Link speed for --breakeven; may be repeated.")
    ] = None,
    prefill_tokens_s: Annotated[
        float | None, typer.Option(help="Speed of the prefill that hides the wire, for --breakeven; default: none.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the table as data.")] = None,
) -> None:
    """Measure the KV codecs on a model: ratio, speed, and what the lossy ones do to its answers.

    Runs in this process, without a cluster. A codec is compared with the same computation on the same KV without it;
    the line "control" is what computing in 16 bits instead of 32 costs, with no codec at all.

    Exit codes: 0 done, 1 failed, 2 a bad flag.

    Examples:

      pdserve codecs

      pdserve codecs --codecs q8,k6v4 --prompts 10

      pdserve codecs --model ./my-model --json build/codecs.json

      pdserve codecs --breakeven --link-gbit 1 --link-gbit 10 --prefill-tokens-s 5000
    """
    names = [name.strip() for name in chosen.split(",")] if chosen else []
    for name in names:
        if name not in CODECS:
            raise fail(f"--codecs: {name!r} is not allowed; allowed: {', '.join(CODECS)}", EXIT_USAGE)
    if breakeven:
        for parameter in ("prompts", "tokens", "calibration"):
            source = context.get_parameter_source(parameter)
            if source is not None and source.name != "DEFAULT":
                raise fail(f"--{parameter} has no meaning with --breakeven, which measures no model", EXIT_USAGE)
        print_break_even(
            model,
            dtype,
            links_gbit=link_gbit,
            codecs=names,
            prefill_tokens_s=prefill_tokens_s,
            json_file=json_file,
        )
        return
    if link_gbit or prefill_tokens_s is not None:
        raise fail("--link-gbit and --prefill-tokens-s need --breakeven", EXIT_USAGE)
    from worker.openmp import share_cores

    share_cores()  # before numpy is imported
    check_dtype(dtype)
    check_output("--json", json_file)
    console = Console()
    unfit = _unfit(names or CODECS, dtype)
    if names and unfit:
        raise fail(f"--codecs: {', '.join(unfit)} cannot pack {dtype}", EXIT_USAGE)
    if unfit:
        console.print(f"left out, since they cannot pack {dtype}: {', '.join(unfit)}", highlight=False)
    names = [name for name in names or CODECS if name not in unfit]
    try:
        results, counted = _measured(
            model, dtype, names, prompts=prompts, tokens=tokens, calibration=calibration, console=console
        )
    except ConfigError as error:
        raise fail(str(error), EXIT_USAGE) from error
    except PdserveError as error:
        raise fail(str(error), EXIT_FAILED) from error
    console.print(quality_table(results))
    console.print(
        f"{counted} prompts of the built-in texts, {tokens} tokens scored after each. Speeds are of one core.\n"
        "KL: mean over the tokens, in nats. top-1: points by which the likeliest token is right more often,\n"
        "and its 95% interval over prompts. same: share of tokens whose greedy choice stays.",
        highlight=False,
    )
    write_json(json_file, [dataclasses.asdict(line) for line in results], console)


def _measured(
    model: str,
    dtype: str,
    names: Sequence[str],
    *,
    prompts: int,
    tokens: int,
    calibration: Path | None,
    console: Console,
) -> tuple[list[Quality], int]:
    """The figures, and of how many prompts they are. Raises `PdserveError`."""
    from cluster.codec_quality.measuring import PROMPT_TOKENS, measure
    from cluster.codec_quality.samples import cut_windows, evaluation_texts, load_tokenizer
    from engine.model_store import resolve_model
    from pdcore.errors import ModelError

    folder = resolve_model(model).path
    usable = _codecs(model, folder, dtype, names, calibration=calibration, console=console)
    size = PROMPT_TOKENS + tokens + 1
    windows = cut_windows(list(evaluation_texts().values()), load_tokenizer(folder), size, prompts)
    if not windows:
        raise ModelError(f"the built-in texts are shorter than {size} tokens; take fewer with --tokens")
    with reporting(Console(stderr=True)) as report:
        return measure(folder, dtype, windows, usable, report), len(windows)


def _codecs(
    model: str, folder: Path, dtype: str, names: Sequence[str], *, calibration: Path | None, console: Console
) -> list[Codec]:
    """These codecs, which can pack `dtype`; tc4 with a calibration that is made here if need be."""
    from cluster.codec_quality.calibrations import CALIBRATION_FILES, default_calibration_dir, find_calibration
    from cluster.codec_quality.model_runs import model_geometry
    from kv_transfer.codecs.calibration import load_calibration, save_calibration
    from kv_transfer.codecs.registry import STANDARD
    from kv_transfer.codecs.tc4 import Tc4Codec

    known: dict[str, Codec] = {codec.name: codec for codec in STANDARD}
    if "tc4" in names:
        geometry, kept = model_geometry(folder, dtype), default_calibration_dir()
        found = find_calibration(geometry, kept) if calibration is None else None
        if calibration is not None:
            known["tc4"] = Tc4Codec(load_calibration(calibration, geometry, key="--calibration"))
        elif found is not None:
            console.print(f"tc4 with {found[0]}", highlight=False, soft_wrap=True)
            known["tc4"] = Tc4Codec(found[1])
        else:
            others = len(list(kept.glob(CALIBRATION_FILES)))
            console.print("tc4 is not calibrated for this model yet; that comes first (some minutes)")
            if others:
                console.print(f"({others} in {kept} are of other models)", highlight=False, soft_wrap=True)
            path, made = make_calibration(model, dtype, [], Console(stderr=True))
            save_calibration(made, path)
            console.print(f"calibration kept in {path}", highlight=False, soft_wrap=True)
            known["tc4"] = Tc4Codec(made)
    return [known[name] for name in names]


def _unfit(names: Sequence[str], dtype: str) -> list[str]:
    """Those codecs that cannot pack `dtype`."""
    from kv_transfer.codecs.registry import STANDARD
    from kv_transfer.codecs.tc4 import Tc4Codec

    dtypes = {codec.name: codec.dtypes for codec in (*STANDARD, Tc4Codec)}
    return [name for name in names if dtype not in dtypes[name]]


def quality_table(results: Sequence[Quality]) -> Table:
    """Fits 80 columns."""
    from cluster.codec_quality.measuring import CONTROL

    control = next(line for line in results if line.codec == CONTROL)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("codec", no_wrap=True)
    for name in ("ratio", "enc.\nGB/s", "dec.\nGB/s", "KL", "KL /\ncontrol", "top-1,\n95% interval", "same\n%"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in results:
        is_control = line.codec == CONTROL
        table.add_row(
            line.codec,
            "-" if is_control else f"{line.ratio:.2f}",
            _speed(line.encode_gb_s),
            _speed(line.decode_gb_s),
            f"{line.kl:.1e}" if line.kl else "0",
            f"{line.kl / control.kl:.2f}" if control.kl else "-",
            f"{line.top1:+.2f} [{line.top1_low:+.2f}, {line.top1_high:+.2f}]",
            f"{100 * line.exact_match:.2f}",
            end_section=is_control,
        )
    return table


def _speed(gb_s: float | None) -> str:
    return "-" if gb_s is None else f"{gb_s:.2f}"
