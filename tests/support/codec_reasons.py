"""What a codec's reason says, taken apart."""

from __future__ import annotations

import re


def codecs_of(reason: str) -> set[str]:
    """The codecs that a transfer with this reason of ``auto`` used: the last choice, and what it began with if it was
    decided anew when the link had been measured."""
    match = re.match(r"(?:began with (\S+); )?(\S+) leaves \S.* exposed", reason)
    assert match is not None, reason
    return {codec for codec in match.groups() if codec is not None}
