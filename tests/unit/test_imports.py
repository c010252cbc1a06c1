"""What each import leaves in `sys.modules`: the boundaries that keep processes small and parts separate."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = (
    "simulator",
    "cluster",
    "prefill_worker",
    "decode_worker",
    "router",
    "worker",
    "engine",
    "kv_transfer",
    "security",
    "protos",
)
WIRE = ("grpc", "google.protobuf")
SERVING = ("ray", "pydantic", "typer")
HEAVY = ("torch", "transformers", "triton")

PDCORE = (
    "addresses",
    "clock",
    "config",
    "config_json",
    "costs",
    "errors",
    "faults",
    "grpc_log",
    "logprobs",
    "native_build",
    "objective",
    "queueing",
    "security",
    "step_time",
    "types",
)


def others(*allowed: str) -> tuple[str, ...]:
    return tuple(package for package in OURS if package not in allowed)


CASES = [
    *[(f"pdcore.{name}", (*OURS, *WIRE, *SERVING, *HEAVY, "numpy")) for name in PDCORE],
    *[
        (f"engine.{name}", (*others("engine"), *WIRE, *SERVING, *HEAVY))
        for name in (
            "sequence",
            "blocks",
            "scheduler",
            "step",
            "budget",
            "displacement",
            "step_log",
            "preemption",
            "snapshot",
            "swap",
            "token_rules",
            "scoring",
            "row_sizes",
        )
    ],
    *[
        (f"kv_transfer.{name}", (*others("kv_transfer"), *WIRE, *SERVING, *HEAVY))
        for name in ("frames", "manifest", "session", "tickets")
    ],
    *[
        (f"router.{name}", (*others("router"), *WIRE, *SERVING, *HEAVY))
        for name in ("policy", "admission", "tracker", "client_retry", "chat_history", "connection_words")
    ],
    ("cluster.claims", (*others("cluster"), *WIRE, *SERVING, *HEAVY)),
    ("engine.engine", (*others("engine"), *WIRE, *SERVING)),
    ("engine.loader", (*others("engine"), *WIRE, *SERVING)),
    # A model is found without torch: the process that serves a cluster never needs it.
    ("engine.model_store", (*others("engine"), *WIRE, *SERVING, *HEAVY)),
    ("security.internal", (*others("security"), *SERVING, *HEAVY)),
    ("kv_transfer.sender", (*others("kv_transfer", "security", "protos"), *SERVING)),
    ("kv_transfer.receiver", (*others("kv_transfer", "security", "protos"), *SERVING)),
    ("router.service", (*others("router", "security", "protos"), *SERVING, "torch", "triton")),
    # A client's program stays small, and starts at once.
    (
        "router.client",
        (*others("router", "security", "protos"), *SERVING, *HEAVY, "numpy", "tokenizers", "fastapi", "yaml"),
    ),
    ("worker.runtime", (*others("worker", "engine", "kv_transfer", "security", "protos"), *SERVING)),
    ("worker.hosted", (*others("worker", "security"), *SERVING, *HEAVY)),
    (
        "prefill_worker.worker",
        (*others("prefill_worker", "worker", "engine", "kv_transfer", "security", "protos"), *SERVING),
    ),
    (
        "decode_worker.worker",
        (*others("decode_worker", "worker", "engine", "kv_transfer", "security", "protos"), *SERVING),
    ),
    # The shells bring Ray, and torch only once an actor is made: the driver stays small. gRPC comes later too, after
    # it has been told to be quiet.
    ("prefill_worker.actor", (*others("prefill_worker"), "grpc", *HEAVY)),
    ("decode_worker.actor", (*others("decode_worker"), "grpc", *HEAVY)),
    ("cluster.cores", (*others("cluster"), *WIRE, *SERVING, *HEAVY)),
    ("cluster.config", (*others("cluster"), *WIRE, "ray", "typer", *HEAVY)),
    ("cluster.membership", (*others("cluster", "worker", "security", "protos"), *SERVING, *HEAVY)),
    ("cluster.controller", ("simulator", "engine", "kv_transfer", "torch", "triton")),
    # `pdserve --help` and the client commands answer at once.
    ("cluster.cli.app", (*others("cluster", "security", "protos"), "ray", *HEAVY)),
]


# One process for all modules that must leave out the same: what all of them together leave out, each does.
GROUPS: dict[tuple[str, ...], list[str]] = {}
for _module, _forbidden in CASES:
    GROUPS.setdefault(_forbidden, []).append(_module)


@pytest.mark.parametrize(("forbidden", "modules"), GROUPS.items(), ids=[modules[0] for modules in GROUPS.values()])
def test_imports_leave_out(forbidden: tuple[str, ...], modules: list[str]) -> None:
    script = (
        f"import sys, importlib\nforbidden = {forbidden!r}\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
        "    brought = {name for name in sys.modules for f in forbidden if (name + '.').startswith(f + '.')}\n"
        "    if brought: sys.exit(f'import {module} brings {sorted(brought)}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_package_files_are_empty() -> None:
    packages = [path for path in ROOT.glob("*/__init__.py")] + [path for path in ROOT.glob("*/*/__init__.py")]
    filled = [str(path.relative_to(ROOT)) for path in packages if path.stat().st_size]
    assert not filled


def test_packages_say_that_they_are_typed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    assert project["tool"]["setuptools"]["package-data"]["*"] == ["py.typed"]
    assert not [package for package in packages if not (ROOT / package / "py.typed").is_file()]


def test_ray_decorates_actor_files_only() -> None:
    users = [
        str(path.relative_to(ROOT))
        for package in (*OURS, "pdcore")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "actor.py" and "@ray.remote" in path.read_text()
    ]
    assert not users
