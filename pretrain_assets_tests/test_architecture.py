"""The shape of the code: who imports whom, what a GPU node needs, how long a module may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pretrain_assets

PACKAGE = Path(pretrain_assets.__file__).parent
ROOT = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))

BASE = {"compiled", "config", "convert", "errors", "plural", "progress", "recipes"}
"""Modules beside the rooms, importable from everywhere."""
MAY_IMPORT: dict[str, set[str]] = {
    "config": {"convert", "errors"},
    "convert": {"errors"},
    "recipes": {"config", "errors"},
    "compiled": set(),
    "errors": set(),
    "plural": set(),
    "progress": set(),
    "table": BASE,
    "ingest": BASE | {"table"},
    "curate": BASE | {"table"},
    "tokenize": BASE | {"table"},
    "loader": BASE | {"table"},
    "train": BASE | {"table", "loader", "launch.contract", "launch.guard"},  # both sides of the job contract
    "forensics": BASE | {"table", "curate", "tokenize", "loader", "train", "launch.contract"},
    "launch": {"config", "errors", "plural"},
}
LAZILY = {"train": {"tokenize"}}
"""Rooms that may be imported inside a function only: the trainer decodes its final sample."""
TOP = {"assets", "definitions", "cli", "demo"}
"""Rooms that may import everything, assets included."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def room_of(path: Path) -> str:
    return name_of(path).split(".")[0]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module, and whether at module level; imports under TYPE_CHECKING count."""
    tree = ast.parse(path.read_text())
    inside = {n for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node not in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = str(node.module)
            yield from ((f"{module}.{alias.name}", node not in inside) for alias in node.names)


def allowed(target: str, names: set[str]) -> bool:
    return any(target == name or target.startswith(f"{name}.") for name in names)


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_what_lies_before_it(room: str) -> None:
    wrong = []
    for path in (p for p in MODULES if room_of(p) == room):
        for imported, at_module_level in imports(path):
            top, _, target = imported.partition(".")
            names = {room} | MAY_IMPORT[room] | (set() if at_module_level else LAZILY.get(room, set()))
            if top == "pretrain_assets" and target != "__version__" and not allowed(target, names):
                wrong.append(f"{name_of(path)} imports {target}")
    assert wrong == []


def test_nobody_imports_assets_and_only_assets_import_dagster() -> None:
    wrong = [
        f"{name_of(path)} imports {imported}"
        for path in MODULES
        if room_of(path) not in {"assets", "definitions"}
        for imported, _ in imports(path)
        if imported.split(".")[0] == "dagster"
        or (allowed(imported, {"pretrain_assets.assets"}) and room_of(path) not in TOP)
    ]
    assert wrong == []


def test_every_room_is_known_here() -> None:
    rooms = {room_of(path) for path in MODULES if path.parent != PACKAGE}
    assert rooms - {"assets", "cli", "report"} <= set(MAY_IMPORT)


BLOCKED = """
import sys
blocked = {"dagster", "ray", "geneva"} | set(sys.argv[1].split(","))
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(f"{name} is not installed on this node")
sys.meta_path.insert(0, Blocked())
import importlib, pkgutil, pretrain_assets
for room in sys.argv[2:]:
    package = importlib.import_module(f"pretrain_assets.{room}")
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print("torch" in sys.modules)
"""

BARE = """
import sys
from importlib.metadata import packages_distributions
kept = {"torch", "numpy", "pyarrow", "typing_extensions", "torchgen", "functorch", "sympy", "mpmath", "networkx"}
kept |= {"jinja2", "markupsafe", "filelock"}  # which PyTorch itself needs; fsspec it does without
blocked = set(packages_distributions()) - kept - {"pretrain_assets"}
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(f"{name} is not installed on this node")
sys.meta_path.insert(0, Blocked())
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
BARE_MODULES = [
    *(f"train.{name}" for name in ("engine", "feed", "model", "attention", "optim", "parallel", "distributed")),
    *("train.flops", "train.device", "train.pauses", "loader.sample", "recipes"),
]
"""What trains blocks from memory, with PyTorch, numpy and pyarrow alone: what `benchmarks/gpu.sh` runs."""


def imported_without_dagster(*rooms: str, blocked: str = "") -> str:
    done = subprocess.run([sys.executable, "-c", BLOCKED, blocked, *rooms], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_gpu_node_needs_neither_dagster_nor_ray_nor_geneva() -> None:
    imported_without_dagster("train", "loader", "table")


def test_the_trainer_loads_without_lance() -> None:
    imported_without_dagster("train", blocked="lance,lancedb")


def test_the_engine_needs_nothing_but_torch_numpy_and_pyarrow() -> None:
    modules = [f"pretrain_assets.{name}" for name in BARE_MODULES]
    modules += [f"benchmarks.{name}" for name in ("gpu", "gpu_ladder", "gpu_speed")]
    done = subprocess.run([sys.executable, "-c", BARE, *modules], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_light_rooms_load_without_torch() -> None:
    assert imported_without_dagster("table", "ingest", "curate", "tokenize", "loader", "launch") == "False"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_is_short_and_opens_with_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    assert len(ast.get_docstring(ast.parse(text)) or "") >= 20


REGISTRY_HOST = re.compile(r"https?://[^\s\"')>]*(pypi|pythonhosted|artifactory|nexus|devpi)[^\s\"')>]*", re.IGNORECASE)


def test_no_file_names_this_machine_or_a_package_registry() -> None:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    wrong = []
    for name in listed.splitlines():
        path = ROOT / name
        if path.suffix in {".parquet", ".png"} or not path.is_file() or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        wrong += [f"{name}: {found}" for found in (str(ROOT), str(Path.home())) if f"{found}/" in text]
        wrong += [f"{name}: {match.group()}" for match in REGISTRY_HOST.finditer(text)]
    assert wrong == []
