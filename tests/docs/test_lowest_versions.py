"""The table of lowest versions in docs/interop.md is that of pyproject.toml."""

import re
import tomllib

from docs.pages import DOCS, ROOT


def declared() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"none": project["dependencies"], **project["optional-dependencies"]}
    del groups["dev"]
    return {extra: [re.sub(r"(\[.*\])?>=", " ", each) for each in needed] for extra, needed in groups.items()}


def test_the_page_lists_every_lowest_version() -> None:
    section = (DOCS / "interop.md").read_text().partition("## Lowest versions")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    assert {extra.strip("`"): versions.split(", ") for extra, versions, _ in rows} == declared()
    for _, _, tests in rows:
        assert all((ROOT / path).exists() for path in re.findall(r"(?:tests|docs)/[\w./]*\w", tests)), tests
