"""A run from its settings to its files: the protocol's numbers, what is kept, what is written."""

import hashlib
import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from data.make import make_pacs, make_vlcs
from dpl.backbones import create, load_weights
from dpl.core.errors import DataError, ModelError, SettingError
from dpl.data import batches, open_benchmark, square, training, training_batches
from dpl.streams import domainbed_split
from dpl.training import TrainSpec, train
from dpl.training.loop import SourceTrainer
from dpl.training.sources import open_sources

pytestmark = pytest.mark.filterwarnings("ignore::dpl.data.DataWarning")


def history_without_time(result):
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in result.history]


def test_learns_far_above_chance_and_keeps_the_best(spec, tmp_path):
    data = make_vlcs(tmp_path, per_class=30)  # five classes of five shapes: colours are jittered away in training
    made = spec(dataset="vlcs", target="VOC2007", steps=61, eval_every=20, per_domain=16, lr=5e-3)
    result = train(made, data=data, out=tmp_path / "run")
    assert [entry["step"] for entry in result.history] == [0, 20, 40, 60]
    assert result.mean > 40  # 90 images, chance is 20 %
    assert result.mean == max(entry["mean"] for entry in result.history)
    assert set(result.validation) == {"Caltech101", "LabelMe", "SUN09"}
    assert result.mean == pytest.approx(sum(result.validation.values()) / 3)
    assert result.history[-1]["loss"] < 0.8 * result.history[0]["loss"]


def test_best_weights_have_plain_names_and_the_accuracy_that_is_told(pacs, spec, tmp_path):
    result = train(spec(steps=31, eval_every=10), data=pacs, out=tmp_path / "run")
    network = create("debug_cnn", num_classes=7, weights=result.weights)
    photo = open_benchmark("PACS", pacs)["photo"]
    held_out = domainbed_split(len(photo), domain_index=2).outside
    (batch,) = batches(photo, held_out, square(32), len(held_out))
    with torch.inference_mode():
        correct = network(batch.images).argmax(dim=1) == batch.labels
    assert 100 * correct.float().mean().item() == pytest.approx(result.validation["photo"])


def test_of_equals_the_earliest_is_kept(pacs, spec):
    trainer = SourceTrainer(spec(), open_sources(spec(), pacs))
    trainer.history = [{"step": step, "mean": mean} for step, mean in enumerate([50.0, 70.0, 60.0, 70.0])]
    assert trainer.best()["step"] == 1


def test_the_update_is_adam_on_cross_entropy_of_all_domains(pacs, spec, tmp_path):
    """Two steps written out: batches of the in-splits, BatchNorm in training mode, no schedule, no decay."""
    made = spec(steps=2, eval_every=9)
    train(made, data=pacs, out=tmp_path / "run")
    benchmark = open_benchmark("PACS", pacs)
    sets = [image_set.subset(domainbed_split(len(image_set), domain_index=i).inside)
            for i, image_set in enumerate(benchmark.domains.values())][:3]  # fmt: skip
    torch.manual_seed(made.seed)
    network = create("debug_cnn", num_classes=7).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=made.lr, weight_decay=0)
    for _, batch in zip(range(2), training_batches(sets, training(32), per_domain=8, seed=0), strict=False):
        assert batch.domains.tolist() == [0] * 8 + [1] * 8 + [2] * 8
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(batch.images), batch.labels).backward()
        optimizer.step()
    found = load_file(tmp_path / "run" / "last" / "state.safetensors")
    for name, value in network.state_dict().items():
        torch.testing.assert_close(found[f"network.{name}"], value, rtol=0, atol=0.01 * made.lr)


def test_splits_are_domainbeds(pacs, spec):
    sources = open_sources(spec(trial_seed=10), pacs)
    whole = open_benchmark("PACS", pacs)
    assert list(sources.training) == list(sources.validation) == ["art_painting", "cartoon", "photo"]
    for index, (name, images) in enumerate(sources.training.items()):
        split = domainbed_split(70, domain_index=index, trial_seed=10)
        image_set = whole[name]
        assert images.source.names == tuple(image_set.source.names[i] for i in split.inside)
        assert sources.validation[name].source.names == tuple(image_set.source.names[i] for i in split.outside)
    shuffled = np.arange(70)
    np.random.RandomState(736826616).shuffle(shuffled)  # seed_hash(10, 2), as published
    names = [whole["photo"].source.names[i] for i in shuffled[:14]]
    assert list(sources.validation["photo"].source.names) == names


def test_one_source_domain(pacs, spec, tmp_path):
    result = train(spec(target=None, source="Photo"), data=pacs, out=tmp_path / "run")
    assert list(result.validation) == ["photo"]
    about = json.loads((tmp_path / "run" / "train.json").read_text())
    assert about["settings"]["source"] == "photo"
    assert about["data"]["domains"] == {
        "photo": {"images": 70, "training": 56, "validation": 14, "split_seed": 1325548499}
    }


def test_what_is_written_tells_how_to_repeat_the_run(pacs, spec, tmp_path):
    torch.manual_seed(3)
    weights = tmp_path / "start.safetensors"
    save_file(create("debug_cnn", num_classes=10).state_dict(), weights)
    made = spec(weights=weights, max_val=5)
    result = train(made, data=pacs, out=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "train.json").read_text())
    assert about["settings"]["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert about["settings"]["lr"] == 1e-2
    assert about["data"]["domains"]["cartoon"]["validation"] == 5
    assert about["result"]["step"] == result.step
    assert about["result"]["mean"] == result.mean
    assert about["result"]["best_sha256"] == hashlib.sha256(result.weights.read_bytes()).hexdigest()
    (session,) = about["sessions"]
    assert (session["torch"], session["from_step"], session["threads"]) == (torch.__version__, 0, 1)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log == result.history
    assert [entry["step"] for entry in log] == [0, 3, 6]
    assert set(log[0]) == {"step", "loss", "mean", "validation", "seconds"}


def test_workers_change_nothing(pacs, spec, tmp_path):
    plain = train(spec(), data=pacs, out=tmp_path / "a", workers=0)
    other = train(spec(), data=pacs, out=tmp_path / "b", workers=2)
    assert plain.weights.read_bytes() == other.weights.read_bytes()
    assert history_without_time(plain) == history_without_time(other)


def test_seeds_matter(pacs, spec, tmp_path):
    runs = [train(spec(**seeds), data=pacs, out=tmp_path / str(i)).weights.read_bytes()
            for i, seeds in enumerate([{}, {"seed": 1}, {"trial_seed": 1}])]  # fmt: skip
    assert len(set(runs)) == 3


def test_the_callers_random_numbers_are_left_alone(pacs, spec, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(spec(steps=1), data=pacs, out=tmp_path / "run")
    assert torch.equal(torch.rand(3), expected)


def test_every_step_is_reported(pacs, spec, tmp_path):
    reports = []
    result = train(spec(), data=pacs, out=tmp_path / "run", on_step=lambda *report: reports.append(report))
    assert [step for step, _, _ in reports] == list(range(7))
    assert all(loss > 0 for _, loss, _ in reports)
    means = [entry["mean"] for entry in result.history]
    assert [mean for _, _, mean in reports] == [means[i] for i in (0, 0, 0, 1, 1, 1, 2)]


def test_a_head_for_other_classes_is_replaced_and_the_body_kept(pacs, spec, tmp_path):
    torch.manual_seed(3)
    start = create("debug_cnn", num_classes=10)
    save_file(start.state_dict(), tmp_path / "start.safetensors")
    result = train(spec(weights=tmp_path / "start.safetensors", steps=1, lr=1e-12), data=pacs, out=tmp_path / "run")
    found = load_file(result.weights)
    assert found["fc.weight"].shape == (7, 32)
    torch.testing.assert_close(found["layer2.0.weight"], start.state_dict()["layer2.0.weight"])


@pytest.mark.skipif(find_spec("timm") is None, reason="timm has networks whose heads start with large weights")
def test_a_new_head_starts_small_whatever_the_network_would_do(pacs, tmp_path):
    save_file(create("tf_efficientnet_lite0", num_classes=10).network.state_dict(), tmp_path / "start.safetensors")
    made = TrainSpec(dataset="PACS", target="sketch", network="tf_efficientnet_lite0", size=32,
                     weights=tmp_path / "start.safetensors")  # fmt: skip
    trainer = SourceTrainer(made, open_sources(made, pacs))
    assert trainer.state()["network.classifier.weight"].abs().max() < 1280**-0.5


def test_a_head_for_the_same_classes_is_kept(pacs, spec, tmp_path):
    torch.manual_seed(3)
    start = create("debug_cnn", num_classes=7)
    save_file(start.state_dict(), tmp_path / "start.safetensors")
    result = train(spec(weights=tmp_path / "start.safetensors", steps=1, lr=1e-12), data=pacs, out=tmp_path / "run")
    torch.testing.assert_close(load_file(result.weights)["fc.weight"], start.fc.weight.detach())
    assert load_weights(create("debug_cnn", num_classes=7), result.weights).loaded > 0


def test_weights_of_another_network_are_refused(pacs, spec, tmp_path):
    save_file(create("wrn28_1").state_dict() | create("debug_cnn").state_dict(), tmp_path / "both.safetensors")
    with pytest.raises(DataError, match="do not fit the network"):
        train(spec(weights=tmp_path / "both.safetensors"), data=pacs, out=tmp_path / "run")
    with pytest.raises(DataError, match=r"gone\.safetensors: cannot be read"):
        train(spec(weights=tmp_path / "gone.safetensors"), data=pacs, out=tmp_path / "run")


def test_a_size_that_the_network_cannot_take_is_told_at_once(pacs, spec, tmp_path):
    with pytest.raises(ModelError, match="cifar100_resnet32 cannot take images of 48 pixels"):
        train(spec(network="cifar100_resnet32", size=48), data=pacs, out=tmp_path / "run")


def test_a_diverging_run_stops_with_a_reason(pacs, spec, tmp_path):
    with pytest.raises(SettingError, match=r"lr=1e\+30: the loss is nan at step 1; lower"):
        train(spec(lr=1e30), data=pacs, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"target": None}, "expected one of them"),
        ({"source": "photo"}, "expected one of them"),
        ({"steps": 0}, "steps=0: expected a whole number of at least 1"),
        ({"per_domain": 2.5}, r"per_domain=2.5 \(float\): expected a whole number"),
        ({"seed": -1}, "seed=-1: expected"),
        ({"max_val": 0}, "max_val=0: expected"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": -1.0}, "lr=-1.0: expected a number of at least"),
    ],
)
def test_impossible_settings(spec, changed, words):
    with pytest.raises(SettingError, match=words):
        spec(**changed)


def test_defaults_are_domainbeds():
    made = TrainSpec(dataset="PACS", target="sketch")
    assert (made.steps, made.lr, made.per_domain, made.eval_every, made.size) == (5001, 5e-5, 32, 300, 224)


def test_unknown_domain_and_device(pacs, spec, tmp_path):
    with pytest.raises(SettingError, match="Did you mean 'sketch'"):
        train(spec(target="sketsh"), data=pacs, out=tmp_path / "run")
    with pytest.raises(SettingError, match="device='toaster'"):
        train(spec(), data=pacs, out=tmp_path / "run", device="toaster")


def test_a_damaged_image_stops_the_run_by_name(spec, tmp_path):
    root = make_pacs(tmp_path / "data", per_class=2)
    bad = next((root / "PACS" / "photo" / "dog").iterdir())
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match=bad.name):
        train(spec(steps=20, target=None, source="photo"), data=root, out=tmp_path / "run")
