"""Images of the source: the guard lets the source model predict them."""

import pytest
import torch

import dpl
from abuse import streams
from dpl.demo.digits import load_source_network, mnist, uci_digits
from dpl.methods.parts.norm_rules import UNKNOWN


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        guesses = torch.cat([model(batch).argmax(dim=1) for batch in images.split(50)])
    return 100 * (guesses == labels).float().mean().item()


@pytest.mark.parametrize("method", ["tent", "norm"])
def test_source_images_are_predicted_as_by_the_source_model(method: str) -> None:
    network, _ = load_source_network()
    images, labels = (part[-600:] for part in mnist())
    model = dpl.adapt(network, method, guard=True)
    assert accuracy(model, images, labels) >= accuracy(network, images, labels) - 0.5
    assert float(model.watch.shift) < 0.01


def test_a_shift_that_follows_is_adapted_to() -> None:
    network, _ = load_source_network()
    at_home, (images, labels) = mnist()[0][-600:], (part[:1000] for part in uci_digits())
    model = dpl.adapt(network, "tent", guard=True)
    for batch in at_home.split(50):
        model(batch)
    assert accuracy(model, images, labels) > accuracy(network, images, labels) + 20
    assert float(model.watch.shift) > 0.02


def test_the_verdict_on_source_images_is_not_better() -> None:
    model = dpl.adapt(streams.network(), "tent", estimate=True)
    for batch, _ in streams.iid("easy", 512):
        model(batch)
    assert model.estimate().verdict != "better"


def test_predict_measures_nothing() -> None:
    model = dpl.adapt(streams.network(), "tent", guard=True)
    for batch, _ in streams.iid("easy", 64):
        model(batch)
    before = model.watch.shift.clone()
    model.predict(streams.iid("shifted", 64)[0][0])
    assert torch.equal(model.watch.shift, before)


@pytest.mark.filterwarnings("error")
def test_single_images_tell_no_shift() -> None:
    model = dpl.adapt(streams.network(), "tent", guard=True)
    for batch, _ in streams.iid("easy", 8, size=1):
        model(batch)
    assert model.watch.shift == UNKNOWN
