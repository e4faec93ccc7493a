"""A unit's records and predictions are what a plain loop over its images gives."""

from itertools import islice

import numpy as np
import pytest
import torch

import dpl
from bench.tiny import CORRUPTIONS, make_weights, unit_of, without_times
from data.make import make_cifar, make_pacs
from dpl.backbones import create
from dpl.bench import SourceData, run_unit
from dpl.bench.context import SourceBatches
from dpl.bench.images import UnitStream, streamed_image
from dpl.core.errors import DataError, SettingError
from dpl.data import ImageSet, open_benchmark
from dpl.data.corruptions import changing_corruptions, corrupt, corrupt_pair
from dpl.data.sets import joined
from dpl.data.transforms import make_transform
from dpl.streams import domainbed_split


def test_a_plain_loop_over_the_in_split_gives_the_same_predictions(everything):
    unit, context = unit_of(everything, "pacs", "tent", domains=("sketch",), part="inside", seed=4)
    outcome = run_unit(unit, context)
    sketch = open_benchmark("pacs", everything)["sketch"]
    split = domainbed_split(len(sketch), domain_index=3, trial_seed=4)
    order = outcome.arrays["sample"]
    assert sorted(order.tolist()) == sorted(split.inside.tolist())
    images = torch.stack([make_transform("unchanged")(sketch.load(int(i))) for i in order])
    network = create("debug_cnn", num_classes=7, weights=everything / "weights" / "pacs.safetensors")
    model = dpl.adapt(network.to(memory_format=torch.channels_last), "tent", **unit.settings)
    batches = images.contiguous(memory_format=torch.channels_last).split(8)
    predicted = torch.cat([model(batch).argmax(1) for batch in batches])
    np.testing.assert_array_equal(predicted.numpy(), outcome.arrays["prediction"])
    np.testing.assert_array_equal(sketch.labels[order], outcome.arrays["label"])
    (record,) = outcome.records
    assert record["accuracy"] == pytest.approx(100 * np.mean(predicted.numpy() == sketch.labels[order]))
    assert record["data"] == {"sketch": {"streamed": len(split.inside), "whole": len(sketch)}}
    assert record["trainable_tensors"] == len(model.trainable) == 6
    assert (record["output"], record["norm"], record["batches"]) == ("before", "batch", len(batches))


def test_the_same_unit_gives_the_same_figures_and_a_kept_model_changes_nothing(everything):
    unit, context = unit_of(everything, "cifar10_c", "dpl", domains=("fog",), severities=(5,))
    other, _ = unit_of(everything, "cifar10_c", "dpl", domains=("gaussian_noise",), severities=(5,))
    first = run_unit(unit, context)
    run_unit(other, context)
    again = run_unit(unit, context)
    fresh = run_unit(*unit_of(everything, "cifar10_c", "dpl", domains=("fog",), severities=(5,)))
    for outcome in (again, fresh):
        assert without_times(outcome.records) == without_times(first.records)
        for name, column in first.arrays.items():
            np.testing.assert_array_equal(column, outcome.arrays[name])


def test_mixed_domains_are_told_apart_image_by_image(everything):
    unit, context = unit_of(everything, "cifar10_c", domains=CORRUPTIONS, severities=(5,), protocol="mixed_domains")
    (record,), arrays = (lambda o: (o.records, o.arrays))(run_unit(unit, context))
    labels = open_benchmark("cifar10_c", everything, domains=CORRUPTIONS)["fog"].labels
    np.testing.assert_array_equal(arrays["label"], labels[arrays["sample"]])
    assert np.bincount(arrays["domain"]).tolist() == [24, 24]
    right = arrays["prediction"] == arrays["label"]
    by_domain = {f"{name}@5": 100 * right[arrays["domain"] == i].mean() for i, name in enumerate(CORRUPTIONS)}
    assert record["by_domain"] == pytest.approx(by_domain)
    single = {
        name: run_unit(*unit_of(everything, "cifar10_c", domains=(name,), severities=(5,))).records[0]["accuracy"]
        for name in CORRUPTIONS
    }
    assert {f"{name}@5": value for name, value in single.items()} == pytest.approx(by_domain)


@pytest.mark.parametrize(
    ("protocol", "options", "segments"),
    [
        ("continual", {}, ["gaussian_noise@5", "fog@5"]),
        ("correlated", {"delta": 0.1}, ["gaussian_noise@5", "fog@5"]),
        ("recurring", {"visits": 2}, ["gaussian_noise@5", "fog@5"] * 2),
        ("mixed_domains_correlated", {}, ["mixed@5"]),
        ("reset_each_shift", {"order": "python"}, ["gaussian_noise@5", "fog@5"]),
    ],
)
def test_every_protocol_reports_its_segments(everything, protocol, options, segments):
    unit, context = unit_of(
        everything, "cifar10_c", "tent", domains=CORRUPTIONS, severities=(5,), protocol=protocol, **options
    )
    outcome = run_unit(unit, context)
    assert [record["segment"] for record in outcome.records] == segments
    assert [record["n"] for record in outcome.records] == [48 if s == "mixed@5" else 24 for s in segments]
    assert np.unique(outcome.arrays["segment"]).tolist() == list(range(len(segments)))


def test_gradual_walks_the_ladder(everything):
    unit, context = unit_of(everything, "cifar10_c", domains=("fog",), severities=(1, 2, 3, 4, 5), protocol="gradual")
    assert [r["severity"] for r in run_unit(unit, context).records] == [1, 2, 3, 4, 5, 4, 3, 2, 1]


def test_a_limit_takes_the_same_images_under_every_corruption(everything):
    taken = []
    for name, severity, seed in (("fog", 5, 0), ("gaussian_noise", 5, 0), ("fog", 1, 1)):
        unit, context = unit_of(everything, "cifar10_c", domains=(name,), severities=(severity,), limit=7, seed=seed)
        taken.append(set(run_unit(unit, context).arrays["sample"].tolist()))
    assert taken[0] == taken[1] == taken[2]
    assert len(taken[0]) == 7


def test_an_unreadable_image_is_left_out_and_counted(tmp_path):
    make_pacs(tmp_path)
    make_weights(tmp_path / "weights" / "pacs.safetensors", 7)
    victim = tmp_path / "PACS" / "photo" / "dog" / "pic_000_000.jpg"
    victim.write_bytes(victim.read_bytes()[:200])
    unit, context = unit_of(tmp_path, "pacs", domains=("photo",))
    (record,) = run_unit(unit, context).records
    assert (record["n"], record["unreadable"]) == (20, 1)
    assert "pic_000_000.jpg" in record["unreadable_first"][0]


def test_corruptions_made_here_are_those_of_the_library_and_are_kept(tmp_path):
    make_cifar(tmp_path, "npz", count=20)
    make_weights(tmp_path / "weights" / "cifar10.safetensors", 10)
    unit, context = unit_of(tmp_path, "cifar10", domains=("fog",), severities=(3,), corrupt=5, limit=6)
    (part,) = UnitStream(unit, context).parts
    clean = open_benchmark("cifar10", tmp_path)["test"]
    whole = corrupt(clean.source.pixels, "fog", 3, seed=5)
    np.testing.assert_array_equal(part.images.source.pixels, whole[part.positions])
    (kept,) = (tmp_path / "cache" / "regenerated").iterdir()
    before = kept.stat().st_mtime_ns
    (record,) = run_unit(unit, context).records
    assert kept.stat().st_mtime_ns == before
    assert record["regenerated"] is True
    assert any("instead of 10,000" in note for note in record["data_notes"])


def test_source_images_of_eata_are_those_outside_the_stream(tmp_path):
    make_cifar(tmp_path, "npz", count=20)
    make_weights(tmp_path / "weights" / "cifar10.safetensors", 10)
    rest = SourceData(dataset="cifar10", part="rest", batch_size=4)
    fields = {"domains": ("fog",), "severities": (3,), "corrupt": 0, "source": rest}
    unit, context = unit_of(tmp_path, "cifar10", "eata", limit=6, **fields)
    assert run_unit(unit, context).records[0]["source_data"] == "14 images of CIFAR-10/test"
    unit, context = unit_of(tmp_path, "cifar10", "eata", **fields)
    with pytest.raises(DataError, match="no image of CIFAR-10/test is left over"):
        run_unit(unit, context)


def test_source_images_of_a_domain_benchmark_are_its_training_part(everything):
    source = SourceData(dataset="pacs", domains=("photo", "cartoon"), part="inside", batch_size=5)
    unit, context = unit_of(everything, "pacs", "eata", domains=("sketch",), part="inside", source=source)
    (record,) = run_unit(unit, context).records
    assert record["source_data"] == "34 images of PACS/photo + PACS/cartoon"  # 21 each, 4 held out


def test_source_batches_come_in_the_same_random_order_each_time(everything):
    pacs = open_benchmark("pacs", everything)
    batches = SourceBatches(joined([pacs["photo"], pacs["sketch"]]), "unchanged", 5, seed=1)
    one, two = ([labels.tolist() for _, labels in batches] for _ in range(2))
    assert one == two
    assert len(one) == 9
    flat = [label for batch in one for label in batch]
    assert flat != sorted(flat)
    assert sorted(flat) == sorted([*pacs["photo"].labels, *pacs["sketch"].labels])


def test_joined_sets_keep_order_and_names():
    sets = [
        ImageSet.from_array(n, np.full((2, 8, 8, 3), v, dtype=np.uint8), [0, 1], ("a", "b"))
        for n, v in (("x", 1), ("y", 2))
    ]
    both = joined(sets).subset([3, 0])
    assert [both.location(i) for i in range(2)] == ["y[1]", "x[0]"]
    assert [np.asarray(both.load(i)).max() for i in range(2)] == [2, 1]
    assert both.labels.tolist() == [1, 0]


@pytest.mark.parametrize("text", ["", "square", "square -3", "resize 256", "crop 3", "square 3 crop"])
def test_a_transform_that_is_none_is_refused(text):
    with pytest.raises(SettingError, match="transform"):
        make_transform(text)


def test_outliers_change_the_stream_but_not_what_is_scored(everything):
    plain, context = unit_of(everything, "pacs", "source", domains=("sketch",))
    for outliers in ("noise", "vlcs"):
        mixed, _ = unit_of(everything, "pacs", "source", domains=("sketch",), outliers=outliers, outlier_ratio=0.5)
        expected, outcome = run_unit(plain, context), run_unit(mixed, context)
        for name, column in expected.arrays.items():
            np.testing.assert_array_equal(column, outcome.arrays[name])
        before, after = expected.records[0], outcome.records[0]
        assert after["accuracy"] == before["accuracy"]
        assert after["batches"] > before["batches"]
        assert before["outlier_auroc"] is None
        assert 0 <= after["outlier_auroc"] <= 100


def test_the_likelihood_of_the_true_class_is_kept_beside_the_confidence(everything):
    outcome = run_unit(*unit_of(everything, "pacs", domains=("sketch",)))
    arrays, (record,) = outcome.arrays, outcome.records
    right = arrays["prediction"] == arrays["label"]
    likelihood = np.exp(arrays["log_likelihood"].astype(float))
    np.testing.assert_allclose(likelihood[right], arrays["confidence"][right], rtol=5e-3)
    assert (likelihood[~right] <= 1 - arrays["confidence"][~right] + 1e-3).all()
    assert record["nll"] == pytest.approx(-arrays["log_likelihood"].astype(float).mean(), rel=1e-3)
    assert record["nll"] > 0


def test_corruptions_that_change_follow_the_stream(tmp_path):
    make_cifar(tmp_path, "npz", count=20)
    make_weights(tmp_path / "weights" / "cifar10.safetensors", 10)
    names = ("fog", "contrast", "brightness")
    fields = {"domains": names, "severities": (5,), "corrupt": 3, "protocol": "continual", "seed": 2, "changing": 4}
    unit, context = unit_of(tmp_path, "cifar10", **fields)
    stream = UnitStream(unit, context)
    (segment,) = stream.segments
    assert (segment.name, len(segment)) == ("changing@5", 20)
    clean = open_benchmark("cifar10", tmp_path)["test"].source.pixels
    pairs = list(islice(changing_corruptions(names, seed=2), 5))
    order = stream.parts[0].positions[segment.indices[:, 1]]
    expected = [
        corrupt_pair(clean[None, sample], pairs[place // 4], seed=3, start=place)[0]
        for place, sample in enumerate(order.tolist())
    ]
    found = torch.cat([batch.images for batch in stream.batches(segment)])
    np.testing.assert_array_equal((found * 255).round().permute(0, 2, 3, 1).to(torch.uint8), np.stack(expected))
    again, _, _ = streamed_image(unit, context, 0, int(order[7]))
    np.testing.assert_array_equal(np.asarray(again), expected[7])
    (record,), plain = run_unit(unit, context).records, unit_of(tmp_path, "cifar10", **(fields | {"changing": None}))[0]
    assert (record["segment"], record["n"], record["regenerated"]) == ("changing@5", 20, True)
    assert plain.key != unit.key


def test_label_shift_streams_fewer_images(everything):
    plain, context = unit_of(everything, "pacs", "source", domains=("sketch",))
    shifted, _ = unit_of(everything, "pacs", "source", domains=("sketch",), imbalance=3.0)
    counts = run_unit(shifted, context).records[0]["per_class_n"]
    assert max(counts) == 3 * min(counts)
    assert shifted.key != plain.key


def test_a_fast_stream_leaves_no_time_to_adapt(everything):
    waiting, context = unit_of(everything, "pacs", "tent", domains=("sketch",))
    fast, _ = unit_of(everything, "pacs", "tent", domains=("sketch",), stream_speed=1.0)
    slow, rushed = run_unit(waiting, context).records[0], run_unit(fast, context).records[0]
    assert slow["updates"] == slow["batches"] == rushed["batches"]
    assert rushed["updates"] == (rushed["batches"] + 1) // 2  # a TENT step costs about two predictions
    assert rushed["skipped_because"] == {"the stream did not wait": rushed["skipped"]}


def test_a_network_that_was_checked_on_the_cpu_is_made_again_for_another_device(everything) -> None:
    unit, context = unit_of(everything, "pacs", domains=("photo",))
    checked = context.source_network(unit, 7)
    assert context.source_network(unit, 7) is checked
    context.device = "meta"
    assert {parameter.device.type for parameter in context.source_network(unit, 7).parameters()} == {"meta"}
