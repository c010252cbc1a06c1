"""Tools as a request describes them, and what it says of their use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments, which are an object.
        strict: arguments have to fit the schema.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


class Choice(StrEnum):
    """Whether tools are called."""

    AUTO = "auto"  # as the model likes
    NONE = "none"
    REQUIRED = "required"  # one call at least


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how they may be used.

    Attributes:
        only: names that may be called; empty: all. several: more than one call may be made.
    """

    tools: tuple[Tool, ...]
    choice: Choice = Choice.AUTO
    only: tuple[str, ...] = ()
    several: bool = True

    @property
    def allowed(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if not self.only or tool.name in self.only)
