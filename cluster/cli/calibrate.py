"""``pdserve calibrate``: what the codec tc4 has to know of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cluster.cli.client import EXIT_FAILED, EXIT_USAGE, fail, read_file
from cluster.cli.output import check_output
from cluster.cli.progress import reporting
from pdcore.errors import PdserveError

if TYPE_CHECKING:
    from kv_transfer.codecs.calibration import Calibration

CALIBRATED_DTYPES = ("bfloat16", "float16")
_WINDOWS = 32


def calibrate(
    model: Annotated[str, typer.Option(help="Short name, model folder, GGUF file or hub id.")] = "smollm2-135m",
    texts: Annotated[
        list[Path] | None,
        typer.Option(help="Text file to calibrate on, like what will be served; may be repeated. Default: built in."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it; default: a cache folder of this user.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the served model: bfloat16 or float16.")] = "bfloat16",
) -> None:
    """Calibrate the KV codec tc4 for a model. Takes a few minutes for a small model.

    Prints the file's path. Give it to a cluster as transfer.calibration; all its workers need to see it.

    Exit codes: 0 done, 1 failed, 2 a bad flag.

    Examples:

      pdserve calibrate

      pdserve calibrate --model ./my-model --texts chats.txt --texts manual.txt --out my-model.tc4.safetensors

      pdserve serve --set transfer.codec=tc4 --set transfer.calibration=FILE
    """
    from worker.openmp import share_cores

    share_cores()  # before numpy is imported
    from kv_transfer.codecs.calibration import save_calibration

    check_dtype(dtype)
    check_output("--out", out)
    given = [read_file("--texts", path) for path in texts or ()]
    path = out
    try:
        kept, calibration = make_calibration(model, dtype, given, Console(stderr=True))
        path = out or kept
        save_calibration(calibration, path)
    except PdserveError as error:
        raise fail(str(error), EXIT_FAILED) from error
    except OSError as error:
        raise fail(f"cannot write {path}: {error.strerror}", EXIT_FAILED) from error
    print(path)


def check_dtype(dtype: str) -> None:
    """End the command if KV of `dtype` cannot be measured or calibrated on."""
    if dtype not in CALIBRATED_DTYPES:
        raise fail(f"--dtype: {dtype!r} is not allowed; allowed: {', '.join(CALIBRATED_DTYPES)}", EXIT_USAGE)


def make_calibration(model: str, dtype: str, texts: list[str], console: Console) -> tuple[Path, Calibration]:
    """A calibration of the model on `texts`, or on the built-in ones if there are none, and where to keep it.

    Raises:
        PdserveError: the model cannot be read, or the texts are too short.
    """
    from cluster.codec_quality.calibrations import default_calibration_dir
    from cluster.codec_quality.fitting import WINDOW_TOKENS, calibrate
    from cluster.codec_quality.samples import calibration_texts, cut_windows, load_tokenizer
    from engine.model_store import resolve_model
    from kv_transfer.codecs.calibration import file_name

    resolved = resolve_model(model)
    chosen = texts or list(calibration_texts().values())
    windows = cut_windows(chosen, load_tokenizer(resolved.path), WINDOW_TOKENS, _WINDOWS)
    with reporting(console) as report:
        calibration = calibrate(resolved.path, dtype, windows, report)
    return default_calibration_dir() / file_name(calibration, resolved.served_name), calibration
