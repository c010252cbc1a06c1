"""The flags of every command that starts a cluster, and what they mean in the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from cluster.cli.client import EXIT_USAGE, fail
from cluster.config import ClusterConfig
from cluster.config_file import YAML_ERRORS, load_config
from pdcore.errors import ConfigError


def read_settings(config: Path | None, flags: Mapping[str, object], assignments: Sequence[str] = ()) -> ClusterConfig:
    """The cluster's configuration from a file, flags (None: not given) and ``--set KEY=VALUE``, the last winning.

    Ends the command with an error if a key or value is wrong.
    """
    overrides = {key: value for key, value in flags.items() if value is not None}
    try:
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals or not key:
                raise ConfigError("--set", assignment, "KEY=VALUE, e.g. router.max_queue=64")
            try:
                overrides[key] = yaml.safe_load(text)
            except YAML_ERRORS as error:
                raise ConfigError(f"--set {key}", text, "a value in YAML") from error
        return load_config(config, overrides)
    except ConfigError as error:
        raise fail(str(error), EXIT_USAGE) from error
