"""Other packages of the ecosystem, each in its own words, on the real package and without a network connection."""

from pathlib import Path

import pytest
import torch

import dpl
from nets import CLASSES, images, network


def test_hugging_face_models_adapt() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    config = transformers.ResNetConfig(**sizes, id2label={0: "cat", 1: "dog", 2: "owl"})
    source = transformers.AutoModelForImageClassification.from_config(config)
    model = dpl.adapt(source, "tent")
    before = model.predict(images(size=32))
    assert model(images(size=32)).shape == (8, 3)
    assert not torch.equal(model.predict(images(size=32)), before)
    assert model.model.config.id2label[2] == "owl"


def test_a_hugging_face_model_is_exported_as_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    source = transformers.AutoModelForImageClassification.from_config(transformers.ResNetConfig(**sizes, num_labels=3))
    model = dpl.adapt(source, "tent")
    model(images(size=32))
    program = torch.export.load(model.export(tmp_path / "out", "torch_export").path).module()
    assert program(images(3, size=32)).shape == (3, 3)


def test_snapshots_are_folders_that_the_hub_takes(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    model = dpl.adapt(network(), "tent")
    model(images())
    folder = model.save(tmp_path / "snapshot")
    operations = [
        hub.CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=path) for path in sorted(folder.iterdir())
    ]
    for operation in operations:  # what an upload sends and a download writes, without the network between
        with operation.as_file() as file:
            (tmp_path / "down").mkdir(exist_ok=True)
            (tmp_path / "down" / operation.path_in_repo).write_bytes(file.read())
    again = dpl.load(tmp_path / "down", network())
    assert torch.equal(again.predict(images()), model.predict(images()))


def test_tensorboard_takes_what_a_step_records(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    writer, steps = tensorboard.SummaryWriter(tmp_path), iter(range(100))

    def log(last: dpl.Last) -> None:
        step = next(steps)
        for name, value in last.items():
            if isinstance(value, (bool, int, float)):
                writer.add_scalar(f"dpl/{name}", value, step)

    model = dpl.adapt(network(), "tent", on_step=log)
    model(images())
    model(images(seed=1))
    writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("dpl/loss")] == [0, 1]


def test_torchmetrics_takes_predictions() -> None:
    metrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    metric, model = metrics.Accuracy(task="multiclass", num_classes=CLASSES), dpl.adapt(network(), "tent")
    labels = model.predict(images()).argmax(dim=1)
    metric.update(model(images()), labels)
    assert float(metric.compute()) == 1.0
