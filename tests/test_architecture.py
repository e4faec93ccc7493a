"""Imports point in one direction; nothing that runs code from a file is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dpl

PACKAGE = Path(dpl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# A part may import itself and everything in earlier rows.
LAYERS = [
    {"core"},
    {"objectives"},
    {"memory", "network", "views"},
    {"methods"},
    {"guard", "snapshot"},
    {"auto"},
    {"model"},
    {"streams", "data", "backbones", "testing"},
    {"training", "runs"},
    {"bench"},
    {"reproduce", "demo"},
    {"report", "serve"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dpl":
            below = node.module.split(".")[1:2]
            parts |= set(below) if below else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            parts |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("dpl.")}
    return parts & set(LEVEL)


@pytest.mark.parametrize("path", [f for f in FILES if f.parent != PACKAGE or f.name != "__init__.py"], ids=str)
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    assert part in LEVEL, f"give {part} a place in LAYERS"
    upward = {other for other in imported_parts(path) if other != part and LEVEL[other] >= LEVEL[part]}
    siblings = {other for other in upward if LEVEL[other] == LEVEL[part]}
    assert not upward - siblings, f"{path.name} imports {upward - siblings}, which lie above {part}"
    assert not any(part in imported_parts(f) for other in siblings for f in FILES if part_of(f) == other), "a cycle"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_nothing_runs_code_from_a_file(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {a.name for a in node.names} | {getattr(node, "module", None)}
            assert not names & {"pickle", "dill", "shelve", "marshal", "joblib"}, path
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {
                "eval",
                "exec",
                "yaml.load",
                "yaml.unsafe_load",
                "np.load",
            } or "allow_pickle=False" in ast.unparse(node)
            if called == "torch.load":
                assert "weights_only=True" in ast.unparse(node), path


def test_the_core_needs_the_core_alone() -> None:
    code = (
        "import sys, dpl; dpl.list_methods(); print([m for m in sys.modules if m.split('.')[0] in "
        + repr({"timm", "torchvision", "kornia", "sklearn", "matplotlib", "rich", "scipy", "fastapi", "ray", "pandas"})
        + "])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_every_public_name_exists() -> None:
    assert all(hasattr(dpl, name) for name in dpl.__all__)
