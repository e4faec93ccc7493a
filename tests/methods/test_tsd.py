"""TSD: its loss against slow loops, its two variants, and BatchNorm's running statistics."""

import pytest
import torch

import dpl
from dpl.methods.tsd import self_distillation
from parity.tiny import stream, tiny_network


def random_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 5), (4, 5), (6, 4))
    features, prototypes, logits = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return features, prototypes, logits


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_loss_equals_a_slow_loop(variant: str) -> None:
    features, prototypes, logits = random_case()
    total = 0.0
    for z, h in zip(features, logits, strict=True):
        size = (lambda v: v.abs().sum()) if variant == "released" else torch.linalg.vector_norm
        q = torch.stack([(z / size(z)) @ (w / size(w)) for w in prototypes]).softmax(0)
        r = h.softmax(0).softmax(0) if variant == "released" else h.softmax(0)
        total += (q * (q / r).log()).sum().item()
    assert self_distillation(features, prototypes, logits, variant).item() == pytest.approx(total / 6, abs=1e-12)


def test_variants_give_different_logits() -> None:
    models = [dpl.adapt(tiny_network(), "tsd", variant=variant) for variant in ("released", "paper")]
    for images in stream()[:2]:
        released, paper = (model(images) for model in models)
    assert not torch.allclose(released, paper, atol=1e-4)


def test_classifier_gets_no_gradient_but_the_rest_moves() -> None:
    source, model = tiny_network(), dpl.adapt(tiny_network(), "tsd")
    model(stream()[0])
    adapted = dict(model.model.named_parameters())
    for name, parameter in source.named_parameters():
        assert torch.equal(parameter, adapted[name]) == name.startswith("fc")


def test_running_statistics_change_only_if_batch_statistics_are_used() -> None:
    source = tiny_network().bn1.running_mean
    tracked, still = dpl.adapt(tiny_network(), "tsd"), dpl.adapt(tiny_network(), "tsd", norm="running")
    tracked(stream()[0]), still(stream()[0])
    assert not torch.equal(tracked.model.bn1.running_mean, source)
    assert torch.equal(still.model.bn1.running_mean, source)


def test_batch_enters_the_supports_once_whatever_the_steps() -> None:
    model = dpl.adapt(tiny_network(), "tsd", steps=3)
    model(stream()[0])
    assert model.last.supports == 42
