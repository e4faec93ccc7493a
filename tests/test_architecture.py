"""Imports point in one direction; nothing that runs code from a file is used."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dpl
from nets import images, network

PACKAGE = Path(dpl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# A part may import itself and everything in earlier rows.
LAYERS = [
    {"core"},
    {"objectives"},
    {"memory", "network", "views"},
    {"methods"},
    {"estimate", "snapshot"},
    {"guard"},
    {"model"},
    {"streams", "data", "backbones", "testing"},
    {"training", "runs"},
    {"bench"},
    {"reproduce", "demo"},
    {"report", "serve"},
    {"cli"},
    {"__main__"},
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


UNSAFE_MODULES = {"pickle", "dill", "shelve", "marshal", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load"}
SAFE_ONLY_WITH = {"np.load": "allow_pickle=False", "torch.load": "weights_only=True"}


def runs_code(node: ast.AST) -> bool:
    """Whether a statement or call can run code that a file contains."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return bool(({alias.name for alias in node.names} | {getattr(node, "module", None)}) & UNSAFE_MODULES)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        return called in UNSAFE_CALLS or SAFE_ONLY_WITH.get(called, "") not in ast.unparse(node)
    return False


@pytest.mark.parametrize("path", FILES, ids=str)
def test_nothing_runs_code_from_a_file(path: Path) -> None:
    found = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if runs_code(node)]
    assert not found, path


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from marshal import loads", "eval(x)", "yaml.load(f)", "np.load(f)", "torch.load(f)"],
)
def test_code_that_runs_a_file_is_found(line: str) -> None:
    assert any(runs_code(node) for node in ast.walk(ast.parse(line)))


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
    model, batch = dpl.adapt(network(), "dpl", confidence=0.3), images(16)
    model(batch)
    entered = set()

    def profile(frame: Any, event: str, _arg: object) -> None:
        code = frame.f_code
        if event == "call" and str(PACKAGE) in code.co_filename and "backbones" not in code.co_filename:
            entered.add((code.co_filename, code.co_qualname))

    sys.setprofile(profile)
    try:
        model(batch)
    finally:
        sys.setprofile(None)
    assert model.last.updated
    assert len(entered) <= 27, sorted(entered)


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=str)
def test_every_room_says_what_lives_there(folder: Path) -> None:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert docstring, f"{folder.name}/__init__.py says nothing"


def test_lazy_imports_also_point_down() -> None:
    """`import_module("dpl....")` with a fixed name counts as an import."""
    imports = [(path, name) for path in FILES for name in lazily_imported(path)]
    for path, name in imports:
        assert LEVEL[name.split(".")[1]] <= LEVEL[part_of(path)], f"{path} imports {name}"


def lazily_imported(path: Path) -> list[str]:
    """The modules of the package that a file imports by `import_module` with a fixed name."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    first = [call.args[0] for call in calls if ast.unparse(call.func).endswith("import_module")]
    return [name.value for name in first if isinstance(name, ast.Constant) and name.value.startswith("dpl.")]
