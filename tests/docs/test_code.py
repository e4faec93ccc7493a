"""The code of the pages runs as it stands there."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import dpl
from docs.pages import DOCS, ROOT, blocks, prose
from dpl.backbones import create
from dpl.cli import COMMANDS, main
from dpl.methods import get_method, registry
from dpl.snapshot import SnapshotStore

pytest.importorskip("sklearn", reason="needs the demo extra")
pytest.importorskip("mlxtend", reason="needs the demo extra")


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pages write into a folder of their own, and a method registered by one is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    registry._load_all()
    known = dict(registry._methods)
    yield
    registry._methods.clear()
    registry._methods.update(known)


def run(page: Path, given: dict[str, Any] | None = None, replace: dict[str, str] | None = None) -> dict[str, Any]:
    """Run the Python blocks of a page one after the other; return what they defined, and what they printed."""
    names: dict[str, Any] = {"__name__": "page", **(given or {})}
    printed = io.StringIO()
    for block in blocks(page, "python"):
        if block.runs:
            text = block.text
            for old, new in (replace or {}).items():
                text = text.replace(old, new)
            code = compile("\n" * block.line + text, str(page), "exec")  # line numbers of the page
            with contextlib.redirect_stdout(printed):
                exec(code, names)
    return names | {"printed": printed.getvalue()}


def test_getting_started() -> None:
    page = DOCS / "getting-started.md"
    names = run(page)
    assert names["adapted"] > names["before"] + 50, "adapting should gain a lot on this stream"
    told = [float(figure) for figure in re.findall(r"`source ([\d.]+) %, adapting ([\d.]+) %`", page.read_text())[0]]
    measured = [names["before"] / 3.2, names["adapted"] / 3.2]
    assert told == pytest.approx(measured, abs=3), "the page shows other figures than the code prints"
    assert "updated=" in names["printed"]


def test_getting_started_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its commands, with a network that needs no download in place of resnet50."""
    generator = torch.Generator().manual_seed(0)
    for kind in ("cat", "dog"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for number in range(4):
            pixels = torch.randint(256, (32, 32, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / "photos" / kind / f"{number}.png")
    save_file(create("debug_cnn").state_dict(), tmp_path / "weights.safetensors")
    commands = [block.text.splitlines() for block in blocks(DOCS / "getting-started.md", "bash") if block.runs]
    assert sum(map(len, commands)) == 4
    for line in [line for lines in commands for line in lines]:
        words = shlex.split(line.replace("resnet50 --pretrained", "debug_cnn --weights weights.safetensors"))
        assert main(words[1:]) == 0, line
    out = capsys.readouterr().out
    assert "8 images predicted" in out
    assert "resumed" in out
    assert len(Path("predictions.csv").read_text().splitlines()) == 9


def test_readme() -> None:
    """The ten lines, with a smaller network at random in place of a download, and a short stream of small images."""
    stream = [torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    names = run(ROOT / "README.md", {"stream": stream}, {'"resnet50", pretrained=True': '"resnet18"'})
    assert isinstance(names["model"], dpl.AdaptiveModel)
    source = names["network"].state_dict()
    assert all(torch.equal(value, source[key]) for key, value in names["model"].model.state_dict().items()), "reset"
    assert isinstance(dpl.load("snapshots/today", names["network"]), dpl.AdaptiveModel)


def test_front_page() -> None:
    names = run(DOCS / "index.md", {"network": create("debug_cnn"), "images": torch.rand(4, 3, 32, 32)})
    assert names["logits"].shape == (4, 10)


def test_adding_a_method() -> None:
    """The worked example passes the conformance suite, alone and with the DPL loss added."""
    names = run(DOCS / "adding-a-method.md")
    assert "balanced_entropy" in dpl.list_methods()
    assert names["model"].last.updated
    assert names["model"].last.selected == 1.0


def test_the_promise_that_the_page_breaks_on_purpose_is_noticed() -> None:
    page = DOCS / "adding-a-method.md"
    told = " ".join(page.read_text().split())
    with pytest.raises(AssertionError) as error:
        run(page, replace={"self.declare(average=None)": "self.average = None"})
    assert f'"{error.value}"' in told


def test_tutorial_own_model() -> None:
    names = run(DOCS / "tutorial-own-model.md")
    assert names["adapted"] > names["source"] + 10
    assert names["end"] > names["source"] + 10
    assert names["risky"].guard.frozen, "the guard stops the collapse of pl"
    assert [step["updated"] for step in names["steps"]] == [1.0, 1.0, 1.0]


def test_recipe_drifting_camera() -> None:
    names = run(DOCS / "recipes/drifting-camera.md")
    assert len(names["history"]) == 8
    assert len(names["store"].all()) == 2


def test_recipe_scanner_change() -> None:
    names = run(DOCS / "recipes/scanner-change.md")
    assert names["before"].accuracy > 90, "MNIST is what the network was trained on"
    assert names["after"].low <= names["after"].accuracy <= names["after"].high
    assert names["after"].accuracy < names["before"].accuracy


def test_recipe_new_hospital() -> None:
    names = run(DOCS / "recipes/new-hospital.md")
    assert names["adapted"] > names["source"] + 5
    assert names["exported"].agreement == 1.0


def test_recipe_night_and_day() -> None:
    names = run(DOCS / "recipes/night-and-day.md")
    night, day = names["evening"]["night"], names["evening"]["day"]
    assert not torch.equal(night, day), "two states"


def test_recipe_fleet() -> None:
    names = run(DOCS / "recipes/fleet.md")
    sample = names["digits"][:8]
    assert torch.equal(names["back"].predict(sample), names["fleet"]["south"].predict(sample))
    assert len(names["printed"].splitlines()) == 4


def test_tutorial_compare() -> None:
    names = run(DOCS / "tutorial-compare.md")
    right = {name: _accuracy(logits, names["truth"]) for name, logits in names["logits"].items()}
    assert right["dpl"] > right["source"] + 0.1
    assert right["dpl"] > right["pl"]
    assert all(names["printed"].count(f"\n{name} ") == 2 for name in names["candidates"] if name != "source")


def _accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float((logits.argmax(dim=1) == labels).float().mean())


def test_readme_mentions_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert not [command for command in COMMANDS if not re.search(rf"`dpl {command}\b|make {command}\b", text)]


NAMING_SETTINGS = [
    *("index", "getting-started", "choosing-a-method", "networks-howto", "saving", "performance", "troubleshooting"),
    *("how-dpl-works", "dpl", "dpl-soft", "internals/speed"),
]


@pytest.mark.parametrize("page", NAMING_SETTINGS)
def test_settings_named_in_the_text_exist(page: str) -> None:
    """A setting that was renamed must not live on in a sentence such as `norm="batch", lr=1e-3`."""
    settings = {field.name for name in dpl.list_methods() for field in fields(get_method(name).settings_class)}
    known = settings | {field.name for field in fields(registry.MethodInfo)} | set(signature(dpl.adapt).parameters)
    known |= set(signature(dpl.AdaptiveModel.export).parameters)
    known |= set(signature(SnapshotStore).parameters) | {"updated", "reason"}
    spans = re.findall(r"`([^`\n]+)`", prose(DOCS / f"{page}.md", spans=True))
    named = {name for span in spans for name in re.findall(r"(?<![\w.-])([a-z_]+)=", span) if "--" not in span}
    named = {name.removeprefix("dpl_") for name in named}  # X+dpl has the settings of dpl with this prefix
    assert named <= known, f"{page}.md names {sorted(named - known)}"
