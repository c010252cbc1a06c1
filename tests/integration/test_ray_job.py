"""``ray job submit --working-dir . -- python -m cluster serve``, from a copy of what git would put into a clone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY
from tests.support.tiny_model import tiny_llama

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

# `ray stop` and a head's ports concern the whole host, so that the test gets a host of its own. Without the empty
# resolv.conf Ray spends a minute on looking up names.
NAMESPACE = ("unshare", "--net", "--pid", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc")
PREPARE = (
    "ip link set lo up && mount --bind /dev/null /etc/resolv.conf && mkdir -p /tmp/ray && "
    "mount -t tmpfs tmpfs /tmp/ray && "
)


def namespace_problem() -> str:
    """Why this host cannot give the test a namespace; empty if it can."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "unshare or ip is not installed"
    done = subprocess.run(
        [*NAMESPACE, "bash", "-c", PREPARE + "true"], capture_output=True, text=True, timeout=20, check=False
    )
    return done.stderr.strip() if done.returncode else ""


def clone(target: Path) -> None:
    """Copy what a clone would have: every file that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        source = REPOSITORY / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def test_job_serves_and_drains_when_stopped(tmp_path: Path) -> None:
    problem = namespace_problem()
    if problem:
        pytest.skip(f"needs a namespace of its own: {problem}")
    model = tiny_llama(tmp_path / "tiny")
    clone(tmp_path / "clone")
    report = tmp_path / "report.json"
    # The shell stays: as process 1 of the namespace it collects orphans, which Ray would wait for otherwise.
    command = f"{sys.executable} -m tests.support.ray_job {report} {model}; exit $?"
    done = subprocess.run(
        [*NAMESPACE, "bash", "-c", PREPARE + command],
        cwd=tmp_path / "clone", capture_output=True, text=True, timeout=360, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(report.read_text())
    print(result["logs"])
    assert result["first"]["completion_tokens"] == 20
    assert result["first"]["kv"]["raw_bytes"] > 0
    # The code that ran is the uploaded copy, not an installed one.
    assert len(result["folders"]) == 2
    assert all("working_dir_files" in folder for folder in result["folders"])
    # The stop drained: the running request finished, and serve ended by itself rather than by SIGKILL.
    assert result["running_code"] == 0
    assert result["running"]["completion_tokens"] == 1200
    assert result["status"] == "STOPPED"
    assert "\ndrained" in result["logs"], result["logs"]
    assert result["logs"].rstrip().endswith("stopped"), result["logs"]
    assert result["actors_left"] == []
