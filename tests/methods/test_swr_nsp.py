"""SWR & NSP: what is measured on the source, what is held, what learns from which term."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import dpl
from dpl.methods.parts.norm_rules import RunningStatistics
from parity.tiny import source_images, stream, tiny_network

QUICK = {"probes": 6, "epochs": 2}


def source(count: int = 96) -> list[tuple[Tensor, Tensor]]:
    images, labels = source_images()
    return list(zip(images[:count].split(32), labels[:count].split(32), strict=True))


def darker(images: Tensor) -> Tensor:
    return 0.6 * images + 0.2


def adapted(**settings: object) -> dpl.AdaptiveModel:
    return dpl.adapt(tiny_network(), "swr_nsp", source=source(), **(QUICK | {"augment": darker} | settings))


def test_a_missing_or_empty_source_is_an_error_that_names_shot_im() -> None:
    with pytest.raises(dpl.SettingError, match="'shot_im'"):
        dpl.adapt(tiny_network(), "swr_nsp")
    with pytest.raises(dpl.SettingError, match="no batch"):
        dpl.adapt(tiny_network(), "swr_nsp", source=[], classifier="fc")


def test_weights_are_squared_scaled_cosines_of_gradients() -> None:
    method, network = adapted().method, tiny_network()
    (images, labels), *_ = source()
    cosines: dict[str, list[float]] = {}
    for x, y in zip(images[:6], labels[:6], strict=True):
        gradients = []
        for version in (x, darker(x)):
            network.zero_grad()
            torch.nn.functional.cross_entropy(network(version[None]), y[None]).backward()
            gradients.append({name: p.grad.flatten().clone() for name, p in network.named_parameters()})
        for layer in dict.fromkeys(name.rpartition(".")[0] for name in gradients[0]):
            a, b = (torch.cat([g for n, g in grads.items() if n.rpartition(".")[0] == layer]) for grads in gradients)
            cosines.setdefault(layer, []).append(float(a @ b / (a.norm() * b.norm())))
    del cosines["fc"]
    mean = torch.tensor([sum(values) / len(values) for values in cosines.values()], dtype=torch.float64)
    expected = ((mean - mean.min()) / (mean.max() - mean.min())).square()
    torch.testing.assert_close(method.penalty.weights, expected, rtol=1e-6, atol=1e-8)


def test_prototypes_classify_the_source() -> None:
    adaptive = adapted(epochs=20)
    images, labels = source_images()
    with torch.no_grad(), adaptive.network.norm.using(RunningStatistics()):
        near = adaptive.method.nearest.logits(adaptive.network(images[200:300]).z)
    assert (near.argmax(dim=1) == labels[200:300]).double().mean() > 0.9


def test_the_classifier_learns_from_the_main_loss_alone() -> None:
    heads = []
    for weights in ({"aux_weight": 0.0, "reg_weight": 0.0}, {"aux_weight": 5.0, "reg_weight": 50.0}):
        adaptive = adapted(**weights)
        adaptive(stream()[0])
        heads.append(adaptive.model.fc.weight.detach().clone())
    torch.testing.assert_close(heads[0], heads[1], rtol=0, atol=1e-9)


def test_a_penalty_holds_the_layers_near_the_source() -> None:
    drifts = []
    for weight in (0.0, 1000.0):
        adaptive = adapted(reg_weight=weight)
        for images in stream()[:6]:
            adaptive(images)
        drifts.append(adaptive.last.penalty)
    assert 0 < drifts[1] < 0.5 * drifts[0]


def test_projection_and_prototypes_stay_and_one_image_changes_nothing() -> None:
    adaptive = adapted()
    before = adaptive.method.state()
    adaptive(stream()[0])
    assert adaptive.last.updated
    own = {key: value for key, value in adaptive.method.state().items() if not key.startswith("target_statistics")}
    assert all(torch.equal(value, before[key]) for key, value in own.items())
    adaptive(stream()[0][:1])
    assert not adaptive.last.updated


def test_snapshot_needs_no_source(tmp_path: Path) -> None:
    adaptive = dpl.adapt(tiny_network(), "swr_nsp", source=source(), **QUICK)
    start = adaptive(stream()[0])
    adaptive.save(tmp_path / "snapshot")
    loaded = dpl.load(tmp_path / "snapshot", tiny_network())
    assert torch.equal(loaded(stream()[1]), adaptive(stream()[1]))
    loaded.reset()
    assert torch.equal(loaded(stream()[0]), start)


def test_a_scope_without_layers_before_the_classifier_is_an_error() -> None:
    with pytest.raises(dpl.ModelError, match="before the classifier"):
        adapted(scope="classifier")
