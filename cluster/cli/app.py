"""The ``pdserve`` command and its subcommands."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from cluster.cli import calibrate, chat, codecs, config, demo, generate, models, serve, status

HELP = """\
Serve a language model with separate pools of workers for prompts (prefill) and for answers (decode).

Examples:

  pdserve demo

  pdserve serve

  pdserve generate --chat "Why is the sky blue?"

  pdserve chat

  pdserve status

`pdserve COMMAND --help` has more of each.
"""

app = typer.Typer(
    name="pdserve",
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pdserve {metadata.version('pdserve')}")
        raise typer.Exit


app.command()(serve.serve)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(status.status)
app.command()(demo.demo)
app.command()(models.models)
app.command()(codecs.codecs)
app.command()(calibrate.calibrate)
app.command()(config.config)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and end.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options that need no command."""
