"""``pdserve config``: the configuration, with every default filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.settings import read_settings
from cluster.config_file import to_yaml


def config(
    config: Annotated[Path | None, typer.Option(help="YAML file to check and complete.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one key; may be repeated.")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Say what each key does, and leave what comes of the objective commented out, for a file to edit.",
        ),
    ] = False,
) -> None:
    """Print the whole configuration as YAML that --config takes.

    With --explain it is a file to go on from: another `objective` in it sets other defaults. Without, all values
    count as given, the objective's as well.

    Examples:

      pdserve config --explain > cluster.yaml

      pdserve config --config cluster.yaml --set decode.workers=2
    """
    typer.echo(to_yaml(read_settings(config, {}, assignments or ()), explain=explain), nl=False)
