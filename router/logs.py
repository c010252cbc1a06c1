"""What a router's process writes to its log."""

from __future__ import annotations

import logging

PROMPTS = "router.prompts"
"""Its own logger, so that prompts are written if they are asked for, whatever else is."""


def set_levels(level: str, *, prompts: bool) -> None:
    """Let the router's loggers of this process write what is asked for, whatever the root logger's level is.

    Args:
        level, prompts: `RouterConfig.log_level` and `RouterConfig.log_prompts`.
    """
    logging.getLogger("router").setLevel(level.upper())
    if prompts:
        logging.getLogger(PROMPTS).setLevel(logging.INFO)
