"""What an installed package consists of; `make dist` builds, checks and tries the real one."""

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import dpl
from dpl.bench.section import SHIPPED, read_sections

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["project"]["version"] == dpl.__version__
    assert f"version: {dpl.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    package = ROOT / "src" / "dpl"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["dpl"]
    files = [path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()]
    data = [name for name in files if not name.endswith((".py", ".pyc"))]
    missing = [name for name in data if not any(fnmatchcase(f"/{name}", f"*{p.removeprefix('**')}") for p in patterns)]
    assert not missing


def test_a_shipped_experiment_is_found_by_its_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (SHIPPED / "table5.yaml").is_file()
    title, sections = read_sections(Path("configs/table5.yaml"))
    assert title
    assert sections
