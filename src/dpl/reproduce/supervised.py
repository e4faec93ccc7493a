"""The paper's comparison with true labels: cross-entropy against the DPL loss."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from dpl.bench.section import load_file
from dpl.core.errors import DataError, SettingError
from dpl.core.settings import make_settings
from dpl.reproduce import paper
from dpl.reproduce.document import Document, Item
from dpl.reproduce.plan import open_quietly
from dpl.reproduce.render import write
from dpl.reproduce.tables import make_document
from dpl.reproduce.targets import Request, Result
from dpl.training.supervised import LOSSES, EpochReport, SupervisedSpec, train_supervised

__all__ = ["make_supervised"]

_QUICK: dict[str, Any] = {"network": "cifar_resnet20", "epochs": 1, "limit": 2000}
_UNSPECIFIED = (
    "The paper names the data set and the network; optimizer, schedule, augmentation, tau, eta and beta are ours."
)

Runs = dict[SupervisedSpec, dict[str, Any]]
"""Finished trainings: what was asked for, and what it wrote."""


def make_supervised(request: Request) -> Result:
    """Train with either loss, or resume training, and write the comparison."""
    specs = _specs(request)
    missing = _absence(specs[0], request.data) if request.run else []
    if request.run and not missing:
        for spec in specs:
            _train(spec, request)
    runs = {spec: record for spec in specs if (record := _finished(_folder(spec, request))) is not None}
    missing = missing or [Item(_title(spec), "not run") for spec in specs if spec not in runs]
    if not runs:
        reasons = "".join(f"\n{item.lines()}" for item in missing)
        raise DataError(f"supervised: {request.store} holds no finished run{reasons}")
    document = _make_document(runs, missing, request)
    return Result(write(document, request.out), document, missing=tuple(missing))


def _title(spec: SupervisedSpec) -> str:
    return f"{spec.loss}, seed {spec.seed}"


def _specs(request: Request) -> list[SupervisedSpec]:
    """Return one run for each loss and seed, with the settings of the file that was named."""
    values = _QUICK if request.quick else {}
    if request.config is not None:
        values = values | load_file(request.config)
    if request.limit is not None:
        values = values | {"limit": min(request.limit, values.get("limit") or request.limit)}
    for name in ("loss", "seed"):
        if name in values:
            raise SettingError(f"{request.config}: {name}: leave it out; both losses are trained, --seeds N times")
    runs = [{"loss": loss, "seed": seed} for seed in range(request.seeds or 1) for loss in LOSSES]
    return [make_settings(SupervisedSpec, str(request.config), values | run) for run in runs]


def _folder(spec: SupervisedSpec, request: Request) -> Path:
    limit = "" if spec.limit is None else f"_{spec.limit}"
    group = f"{spec.dataset}_{spec.network.replace('/', '_')}{limit}_{spec.epochs}"
    return request.store / "supervised" / group / f"{spec.loss}_{spec.seed}"


def _absence(spec: SupervisedSpec, data: Path) -> list[Item]:
    try:
        for split in ("train", "test"):
            open_quietly(spec.dataset, data, split=split)
    except DataError as error:
        return [Item.of_error(spec.dataset, error)]
    return []


def _train(spec: SupervisedSpec, request: Request) -> None:
    def tell(report: EpochReport) -> None:
        request.say(
            f"{_title(spec)}: epoch {report.epoch + 1}/{spec.epochs}, loss {report.loss:.3f}, "
            f"test accuracy {report.accuracy:.1f} %, {report.seconds:.0f} s"
        )

    train_supervised(spec, data=request.data, out=_folder(spec, request), on_epoch=tell)


def _finished(folder: Path) -> dict[str, Any] | None:
    path = folder / "train.json"
    if not path.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: damaged ({error}); remove its folder to train again") from error
    return record if record.get("result") else None


def _make_document(runs: Runs, missing: list[Item], request: Request) -> Document:
    rows = [_row(spec, record["result"]) for spec, record in runs.items()]
    sessions = dict.fromkeys(
        f"dpl {s['dpl']}, torch {s['torch']}, Python {s['python']}, {s['machine']}, {s['device']}"
        for record in runs.values()
        for s in record["sessions"]
    )
    document = make_document(
        paper.load("supervised"), rows, missing, request,
        protocol=tuple(Item(_title(spec), _outcome(record["result"])) for spec, record in runs.items()),
        settings=tuple(Item(_title(spec), _settings(spec)) for spec in runs),
        versions=tuple(sessions),
    )  # fmt: skip
    found = (_UNSPECIFIED, *document.differences, *_shortened(next(iter(runs))))
    return dataclasses.replace(document, differences=found)


def _row(spec: SupervisedSpec, result: dict[str, Any]) -> dict[str, Any]:
    """Return a run as the row that the tables are made of."""
    return {
        "label": spec.loss, "section": "supervised", "dataset": spec.dataset, "domains": (spec.dataset,),
        "network": spec.network, "seed": spec.seed, "unit": f"{spec.loss} {spec.seed}", "n": result["test_images"],
        "accuracy": result["accuracy"], "limit": None, "chosen": {}, "regenerated": False, "data_notes": (),
    }  # fmt: skip


def _outcome(result: dict[str, Any]) -> str:
    return (
        f"{result['training_images']:,} training images, {result['test_images']:,} test images, last epoch; "
        f"with cosines to the prototypes as scores {result['cosine_accuracy']:.1f} % are right"
    )


def _settings(spec: SupervisedSpec) -> str:
    return ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(spec).items() if name != "loss")


def _shortened(spec: SupervisedSpec) -> list[str]:
    """Return in what the training was cut short."""
    found = [f"At most {spec.limit:,} images were used for training and for the test."] if spec.limit else []
    if spec.epochs != SupervisedSpec.epochs:
        found.append(f"{spec.epochs} epochs; the recipe is made for {SupervisedSpec.epochs}.")
    return found
