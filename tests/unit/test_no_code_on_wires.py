"""Nothing that comes from elsewhere is ever run: what Python offers for that is not used in the packages."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Modules that make objects of anything, and functions that run text. `torch.load` and `numpy.load` unpickle unless
# told not to; a YAML loader that is not a safe one calls what the text names.
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
TORCH_RPC = {"all_gather_object", "broadcast_object_list", "send_object_list", "recv_object_list", "gather_object"}
SAFE_LOADERS = {"SafeLoader", "CSafeLoader", "_UniqueKeyLoader"}


def packages() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return sorted({name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]})


def misuses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and what is wrong there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.lineno, str(node.module)
        elif isinstance(node, ast.Call):
            problem = _call(node)
            if problem:
                yield node.lineno, problem


def _call(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Name):
        return function.id if function.id in BUILTINS else ""
    if not isinstance(function, ast.Attribute):
        return ""
    owner, name = ast.unparse(function.value), function.attr
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name in TORCH_RPC:
        return f"{owner}.{name}"
    if owner == "torch" and name == "load" and given.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if owner in ("np", "numpy") and name == "load" and given.get("allow_pickle") != "False":
        return "numpy.load without allow_pickle=False"
    if owner == "yaml" and name in ("unsafe_load", "full_load", "load_all", "full_load_all", "unsafe_load_all"):
        return f"yaml.{name}"
    if owner == "yaml" and name in ("load", "compose") and given.get("Loader", "").split(".")[-1] not in SAFE_LOADERS:
        return f"yaml.{name} without a safe loader"
    if (owner == "subprocess" and given.get("shell") == "True") or (owner, name) in (
        ("os", "system"),
        ("os", "popen"),
    ):
        return "a shell"
    return ""


@pytest.mark.parametrize("package", packages())
def test_nothing_from_elsewhere_is_run(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
        for line, what in misuses(ast.parse(path.read_text()))
    ]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as c",
        "eval(x)",
        "exec(x)",
        "__import__(x)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "np.load(x)",
        "np.load(x, allow_pickle=True)",
        "yaml.load(x, Loader=yaml.Loader)",
        "yaml.load(x)",
        "yaml.unsafe_load(x)",
        "torch.distributed.broadcast_object_list(x)",
        "subprocess.run(x, shell=True)",
        "os.system(x)",
    ],
)
def test_it_would_be_found(line: str) -> None:
    assert list(misuses(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(x, weights_only=True)",
        "np.load(x, allow_pickle=False)",
        "yaml.safe_load(x)",
        "yaml.load(x, Loader=yaml.SafeLoader)",
        "re.compile(x)",
        "model.eval()",
        "json.loads(x)",
    ],
)
def test_what_is_harmless_is_not(line: str) -> None:
    assert not list(misuses(ast.parse(line)))
