"""Imports point in one direction; nothing that runs code from a file is used."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dpl
from dpl.backbones import create

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


def test_one_dpl_step_enters_few_functions() -> None:
    model, images = dpl.adapt(create("debug_cnn"), "dpl", confidence=0.1), torch.rand(16, 3, 32, 32)
    model(images)
    entered = set()

    def profile(frame: Any, event: str, _arg: object) -> None:
        code = frame.f_code
        if event == "call" and str(PACKAGE) in code.co_filename and "backbones" not in code.co_filename:
            entered.add((code.co_filename, code.co_qualname))

    sys.setprofile(profile)
    try:
        model(images)
    finally:
        sys.setprofile(None)
    assert model.last.updated
    assert len(entered) <= 25, sorted(entered)


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=str)
def test_every_room_says_what_lives_there(folder: Path) -> None:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert docstring, f"{folder.name}/__init__.py says nothing"


def test_lazy_imports_also_point_down() -> None:
    """`import_module("dpl....")` with a fixed name counts as an import."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                name = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
                part = name.split(".")[1] if name.startswith("dpl.") else part_of(path)
                assert LEVEL[part] <= LEVEL[part_of(path)], f"{path} imports {name}"
