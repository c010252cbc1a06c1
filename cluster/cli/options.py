"""Flags that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pdcore.addresses import DEFAULT_PORT
from protos import generation_pb2


class Priority(StrEnum):
    """Classes of requests."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


PRIORITIES = {
    None: generation_pb2.PRIORITY_UNSPECIFIED,
    Priority.INTERACTIVE: generation_pb2.PRIORITY_INTERACTIVE,
    Priority.STANDARD: generation_pb2.PRIORITY_STANDARD,
    Priority.BATCH: generation_pb2.PRIORITY_BATCH,
}

Address = Annotated[
    str,
    typer.Option(help=f"HOST[:PORT] of a running cluster, port {DEFAULT_PORT} if unset; several routers by commas."),
]
Model = Annotated[str, typer.Option(help="Refuse to run on another model than this.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")]
Seed = Annotated[int | None, typer.Option(help="Repeat a sampled answer; drawn by the cluster if unset.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this string; may be repeated.")]
RequestClass = Annotated[
    Priority | None, typer.Option(help="Class of the request; default: the tenant's.", case_sensitive=False)
]
Tenant = Annotated[str, typer.Option(help="Whose request it is: limits and the queue policy fair go by it.")]
ApiKeyFile = Annotated[
    Path | None, typer.Option(help="File with an API key; default: $PDSERVE_API_KEY.", metavar="FILE")
]
CacheSalt = Annotated[str, typer.Option(help="Share cached prompts with requests of this salt only.")]
Timeout = Annotated[float, typer.Option(min=0.001, help="Seconds that the whole answer may take.")]


def is_text(text: str) -> bool:
    """False for arguments whose bytes are no UTF-8: Python keeps those as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
