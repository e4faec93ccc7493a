"""The one online loop: what it yields for each batch, and what is collected of a labelled stream."""

import numpy as np
import pytest
import torch

import dpl
from dpl.runs.costs import Work
from dpl.runs.online import evaluate, online, send
from nets import RecordedImages, images, network

LABELS = torch.arange(8) % 3


def stream(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(images(8, seed=number), LABELS) for number in range(count)]


def test_each_batch_is_predicted_before_the_model_adapts_to_it() -> None:
    model, by_hand = (dpl.adapt(network(), "tent", lr=0.1) for _ in range(2))
    for step, (batch, _) in zip(online(model, stream(3)), stream(3), strict=True):
        confidences, predictions = by_hand(batch).softmax(dim=1).max(dim=1)
        assert step.predictions == predictions.tolist()
        assert step.confidences == confidences.tolist()
        assert step.skipped_because is None
        assert step.batch is LABELS


def test_a_batch_is_fetched_only_when_the_one_before_was_taken() -> None:
    fetched = []

    def lazily():
        for number, pair in enumerate(stream(3)):
            fetched.append(number)
            yield pair

    steps = online(dpl.adapt(network(), "source"), lazily())
    next(steps)
    assert fetched == [0]
    next(steps)
    assert fetched == [0, 1]


def test_a_result_counts_updates_reasons_and_hits() -> None:
    seen = []
    result = evaluate(dpl.adapt(network(), "source"), stream(3), lambda r: seen.append(len(r.labels)))
    assert seen == [8, 16, 24]
    assert (result.batches, result.updates, sum(result.reasons.values())) == (3, 0, 3)
    hits = [p == int(label) for p, label in zip(result.predictions, LABELS.repeat(3), strict=True)]
    assert result.accuracy == pytest.approx(100 * sum(hits) / 24)
    assert result.cumulative()[-1] == pytest.approx(result.accuracy)
    assert result.tail(8) == pytest.approx(100 * sum(hits[-8:]) / 8)
    assert result.work.gflops_per_image > 0


def test_the_likelihood_of_the_true_class_is_collected() -> None:
    model = dpl.adapt(network(), "source")
    labels = torch.tensor([0, 1, 2, -1, 0, 1, 2, 0])
    result = evaluate(model, [(images(8), labels)])
    expected = model.predict(images(8)).log_softmax(dim=1)[torch.arange(8), labels.clamp(min=0)]
    assert np.asarray(result.log_likelihoods)[result.known] == pytest.approx(expected[labels >= 0].numpy())


@pytest.mark.parametrize(("device", "calls"), [("cpu", [("cpu", False)]), ("cuda", ["pin_memory", ("cuda", True)])])
def test_a_copy_to_a_gpu_starts_from_pinned_memory_and_does_not_block(device: str, calls: list[object]) -> None:
    recorded = RecordedImages()
    send(recorded, torch.device(device))  # type: ignore[arg-type]
    assert recorded.calls == calls


def test_images_that_are_on_the_device_are_not_copied() -> None:
    batch = images(2)
    assert send(batch, torch.device("cpu")) is batch


def test_operations_are_counted_where_they_are_asked_for() -> None:
    work = Work()
    list(online(dpl.adapt(network(), "source"), stream(2), work))
    assert work.gflops_per_image > 0


def test_an_empty_stream_has_no_accuracy() -> None:
    assert str(evaluate(dpl.adapt(network(), "source"), []).accuracy) == "nan"
