"""What makes each table and figure: run what can be run, put it beside the printed figures, write it down."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dpl.bench.section import load_file
from dpl.core.errors import DataError, SettingError, did_you_mean
from dpl.core.files import read_json
from dpl.core.settings import make_settings
from dpl.data import open_benchmark
from dpl.reproduce import embeddings, figures, paper
from dpl.reproduce.compare import compare, oracle
from dpl.reproduce.document import Document, Item, differences, how_measured, write
from dpl.reproduce.paper import Row, Table
from dpl.reproduce.plan import Request, Result, problem, run_experiment
from dpl.training.supervised import LOSSES, SupervisedSpec, train_supervised

__all__ = ["find_target", "make_document"]

# Of the comparison of cross-entropy with the DPL loss on true labels.
_QUICK: dict[str, Any] = {"network": "cifar_resnet20", "epochs": 1, "limit": 2000}
_UNSPECIFIED = (
    "The paper names the data set and the network; optimizer, schedule, augmentation, tau, eta and beta are ours."
)


def find_target(name: str) -> Callable[[Request], Result]:
    """Return what makes the table or figure of that name, or raise an error that names the nearest."""
    makers: dict[str, Callable[[Request], Result]] = {table: partial(_make_table, table) for table in paper.tables()}
    makers |= {
        "supervised": _make_supervised,
        "fig1": figures.make_figure1,
        "fig2": embeddings.make_figure2,
        "fig3": embeddings.make_figure3,
        "fig4": figures.make_figure4,
        "fig5": figures.make_figure5,
    }
    if name not in makers:
        raise SettingError(f"{name!r} is no table or figure that can be reproduced. {did_you_mean(name, makers)}")
    return makers[name]


def _make_table(name: str, request: Request) -> Result:
    """Run or resume a table's experiment and write the table."""
    table = paper.load(name)
    only = None if table.layout.open_rows else table.rows
    experiment = run_experiment(name, request, only, place=table.layout.place)
    document = make_document(table, experiment.rows, experiment.missing, request)
    return Result(write(document, request.out), document, experiment.missing, experiment.failed)


def make_document(table: Table, rows: Sequence[Row], missing: Sequence[Item], request: Request, **own: Any) -> Document:
    """Return the document of a table: a pure function of the printed figures, the measured rows and the request."""
    number = f"Table {table.name.removeprefix('table')}: " if table.name.startswith("table") else ""
    return request.document(
        rows, missing, name=table.name, title=f"{number}{table.title}",
        grids=tuple(filter(None, (compare(table, rows), oracle(table, rows)))),
        paper=tuple(Item(key, value) for key, value in table.protocol.items()),
        # Remarks on single cells are footnotes.
        notes=tuple(Item(note.row or "", note.text) for note in table.notes if note.column is None),
        **{"differences": differences(rows, table.layout), **(own or how_measured(rows))},
    )  # fmt: skip


def _make_supervised(request: Request) -> Result:
    """Train with either loss, or resume training, and write the comparison."""
    specs, missing = _specs(request), list[Item]()
    if request.run:
        name = specs[0].dataset
        found = (problem(name, open_benchmark, name, request.data, split=split) for split in ("train", "test"))
        missing = [item for item in found if item is not None][:1]
    if request.run and not missing:
        for spec in specs:
            tell = partial(_tell, spec, request)
            train_supervised(spec, data=request.data, out=_folder(spec, request), on_epoch=tell)
    records = {spec: read_json(_folder(spec, request) / "train.json") for spec in specs}
    runs = {spec: record for spec, record in records.items() if record.get("result")}
    missing = missing or [Item(_title(spec), "not run") for spec in specs if spec not in runs]
    if not runs:
        reasons = "".join(f"\n{item.lines()}" for item in missing)
        raise DataError(f"supervised: {request.store} holds no finished run{reasons}")
    document = _supervised_document(runs, missing, request)
    return Result(write(document, request.out), document, missing)


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


def _tell(spec: SupervisedSpec, request: Request, entry: dict[str, Any]) -> None:
    request.say(
        f"{_title(spec)}: epoch {entry['epoch'] + 1}/{spec.epochs}, loss {entry['loss']:.3f}, "
        f"test accuracy {entry['accuracy']:.1f} %, {entry['seconds']:.0f} s"
    )


def _supervised_document(runs: dict[SupervisedSpec, dict[str, Any]], missing: list[Item], request: Request) -> Document:
    table = paper.load("supervised")
    rows, protocol, settings, versions = [], [], [], dict[str, None]()
    for spec, record in runs.items():
        result, images, title = record["result"], record["data"], _title(spec)
        rows.append({
            "label": spec.loss, "section": "supervised", "dataset": spec.dataset, "domains": (spec.dataset,),
            "network": spec.network, "seed": spec.seed, "unit": title, "n": images["test"],
            "accuracy": result["accuracy"], "limit": spec.limit, "chosen": {}, "regenerated": False, "data_notes": (),
        })  # fmt: skip
        protocol.append(Item(title, (
            f"{images['training']:,} training images, {images['test']:,} test images, last epoch; "
            f"with cosines to the prototypes as scores {result['cosine_accuracy']:.1f} % are right"
        )))  # fmt: skip
        settings.append(Item(title, ", ".join(f"{name}={value}" for name, value in vars(spec).items())))
        words = "dpl {dpl}, torch {torch}, Python {python}, {machine}, {device}"
        versions |= dict.fromkeys(map(words.format_map, record["sessions"]))
    return make_document(
        table, rows, missing, request, differences=(_UNSPECIFIED, *differences(rows, table.layout)),
        protocol=tuple(protocol), settings=tuple(settings), versions=tuple(versions),
    )  # fmt: skip
