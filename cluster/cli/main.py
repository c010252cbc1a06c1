"""The ``pdserve`` command; ``python -m cluster`` is the same."""

from __future__ import annotations

import sys

import typer

from cluster.cli import config, demo, generate, models, serve, status

app = typer.Typer(
    name="pdserve",
    help="Serve a language model with separate pools of workers for prompts (prefill) and for answers (decode).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve.serve)
app.command()(generate.generate)
app.command()(status.status)
app.command()(demo.demo)
app.command()(models.models)
app.command()(config.config)


def main() -> None:
    """Entry of the command."""
    try:
        app(prog_name="pdserve")
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; nothing is left to say to it
        sys.exit(1)
