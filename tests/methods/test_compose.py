"""`X+dpl` and its relatives: whose settings, which weight, and when neither part has anything to learn."""

import dataclasses

import pytest
import torch

import dpl
from dpl.methods import get_method
from nets import images, network

MEMBERS = ["dpl_o", "dpl_star", "dpl", "dpl_dagger"]


def loss_of(method: str, count: int = 8, **settings: object) -> float:
    model = dpl.adapt(network(), method, lr=0.0, **settings)
    model(images(count))
    return float(model.last.loss)


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
def test_the_losses_add_with_a_weight(member: str, weight: float) -> None:
    both = loss_of(f"tent+{member}", dpl_confidence=0.6, dpl_weight=weight)
    alone = loss_of(member, confidence=0.6, scope="affine", norm="batch")
    assert alone > 0
    assert both == pytest.approx(loss_of("tent") + weight * alone, abs=1e-5)


@pytest.mark.parametrize("base", ["tent", "shot_im", "sar", "eta", "roid", "cotta", "adacontrast"])
def test_the_style_variant_shows_restyled_copies_to_the_added_loss_only(base: str) -> None:
    small = {"queue_size": 64} if base == "adacontrast" else {}
    model = dpl.adapt(network(), f"{base}+dpl_dagger", norm="running", dpl_confidence=0.6, **small)
    rows: list[int] = []
    term = model.method.dpl
    seen, term.loss = term.loss, lambda out, labels: rows.append(len(out.logits) - out.originals) or seen(out, labels)
    logits = model(images())
    assert len(logits) == 8
    assert max(rows) > 0


def test_settings_of_the_added_loss_are_those_of_its_member() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(get_method("eata+dpl_dagger").settings_class)}
    assert fields["dpl_style"] == "two_pass"
    assert fields["dpl_weight"] == 1.0
    assert "dpl_lr" not in fields
    stars = {field.name for field in dataclasses.fields(get_method("tent+dpl_star").settings_class)}
    assert "dpl_momentum" not in stars


def test_where_neither_part_has_anything_to_learn_no_weight_moves() -> None:
    """SHOT-IM's two terms cancel on one image up to 1e-5, and one class has nothing to contrast."""
    model = dpl.adapt(network(), "shot_im+dpl", dpl_confidence=0.0)
    model(images())
    before = {name: p.clone() for name, p in model.model.named_parameters()}
    model(images(1))
    assert model.last.updated is False
    assert all(torch.equal(p, before[name]) for name, p in model.model.named_parameters())


def test_a_part_with_nothing_to_learn_adds_nothing() -> None:
    one_class = images(1).expand(4, -1, -1, -1) + 1e-3 * images(4, seed=1)
    steps = []
    for method in ("tent", "tent+dpl"):
        model = dpl.adapt(network(), method, norm="running")
        model(one_class)
        assert model.last.updated is True
        steps.append(model.model.layer1[1].weight.detach())
    torch.testing.assert_close(*steps, rtol=0, atol=0)
