"""The flags of ``pdserve generate`` that say which form the output must have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.cli.client import EXIT_USAGE, fail, read_file
from protos import worker_pb2


def structured_output(
    json_schema: Path | None, json_object: bool, regex: str | None, choice: Sequence[str] | None, grammar: Path | None
) -> worker_pb2.StructuredOutput | None:
    """The message for what was asked; None if nothing was. Ends the program if it is more than one thing."""
    flags = {
        "--json-schema": json_schema,
        "--json-object": json_object or None,
        "--regex": regex,
        "--choice": choice or None,
        "--grammar": grammar,
    }
    asked = [flag for flag, value in flags.items() if value is not None]
    if not asked:
        return None
    if len(asked) > 1:
        raise fail(f"{' and '.join(asked)} exclude each other", EXIT_USAGE)
    if json_schema is not None:
        return worker_pb2.StructuredOutput(json_schema=read_file("--json-schema", json_schema))
    if grammar is not None:
        return worker_pb2.StructuredOutput(grammar=read_file("--grammar", grammar))
    if regex is not None:
        return worker_pb2.StructuredOutput(regex=regex)
    if choice:
        return worker_pb2.StructuredOutput(choice=worker_pb2.Choice(choices=choice))
    return worker_pb2.StructuredOutput(json_object=True)
