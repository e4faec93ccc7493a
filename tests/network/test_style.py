"""Where style is transferred, and that both ways of doing it leave predictions alone."""

import pytest
import torch

import dpl
from dpl.core.errors import ModelError
from dpl.core.extras import optional
from dpl.network.style_layer import find_style_layer, prefix_tokens
from dpl.objectives import adain, style_statistics
from nets import images, network


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("resnet18", "layer1"),
        ("convnext_atto", "stages.0"),
        ("vit_tiny_patch16_224", "blocks.0"),
        ("mixer_s32_224", "blocks.0"),
    ],
)
def test_finds_the_first_stage(name: str, layer: str) -> None:
    assert find_style_layer(optional("timm", "bench").create_model(name)) == layer


def test_counts_tokens_that_are_not_patches() -> None:
    timm = optional("timm", "bench")
    assert prefix_tokens(timm.create_model("vit_tiny_patch16_224")) == 1
    assert prefix_tokens(timm.create_model("mixer_s32_224")) == 0
    assert prefix_tokens(network("tokens")) == 1


def test_a_given_layer_is_checked() -> None:
    with pytest.raises(ModelError, match="style_layer='layer9'"):
        dpl.adapt(network(), "dpl_dagger", style_layer="layer9")
    assert dpl.adapt(network(), "dpl_dagger", style_layer="layer2").method.term.styling.layer == "layer2"


@pytest.mark.parametrize("kind", ["batch", "tokens", "group"])
@pytest.mark.parametrize("style", ["two_pass", "carry_over"])
@pytest.mark.parametrize("norm", ["running", "batch", 0.3])
def test_predictions_are_those_without_style_transfer(kind: str, style: str, norm) -> None:
    """Before any update the same logits must come out, carried or restyled copies or not."""
    settings = {"confidence": 0.45, "norm": norm, "lr": 0.0}
    plain = dpl.adapt(network(kind), "dpl", **settings)
    styled = dpl.adapt(network(kind), "dpl", style=style, **settings)
    for seed in range(3):
        assert torch.allclose(plain(images(seed=seed)), styled(images(seed=seed)), atol=1e-5)


def middle_confidence(model_kind: str) -> float:
    """A threshold that makes half of the first batch confident."""
    return float(network(model_kind)(images()).detach().softmax(1).max(1).values.median())


@pytest.mark.parametrize("kind", ["batch", "tokens"])
def test_the_second_pass_shows_confident_samples_in_an_unconfident_style(kind: str) -> None:
    alpha = middle_confidence(kind)
    model = dpl.adapt(network(kind), "dpl_dagger", confidence=alpha)
    following = {"layer1": "layer2", "blocks.0": "blocks.1"}[model.method.term.styling.layer]
    _, seen = maps_around(model, model.method.term.styling.layer, following, images())
    first, content = seen[-2:]  # passes over one and two images confirm the network before
    confident = network(kind)(images()).softmax(1).max(1).values > alpha
    assert len(content) == int(confident.sum())
    skip = model.method.term.styling.prefix  # class tokens
    first, content = (maps[:, skip:] if maps.ndim == 3 else maps for maps in (first, content))
    assert all(made_by_adain(copy, own, first[~confident]) for copy, own in zip(content, first[confident], strict=True))


def maps_around(
    model: dpl.AdaptiveModel, layer: str, following: str, batch: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Adapt to a batch; return what the style layer gave out, and what the layer behind it was given."""
    given, taken = [], []
    first, second = model.model.get_submodule(layer), model.model.get_submodule(following)
    hooks = [
        first.register_forward_hook(lambda _m, _i, out: given.append(out.detach())),
        second.register_forward_pre_hook(lambda _m, inputs: taken.append(inputs[0].detach())),
    ]
    model(batch)
    for hook in hooks:
        hook.remove()
    return given, taken


def made_by_adain(copy: torch.Tensor, own: torch.Tensor, donors: torch.Tensor) -> bool:
    return any(torch.allclose(copy[None], adain(own[None], donor[None]), atol=1e-4) for donor in donors)


def styles_of(batch: torch.Tensor) -> torch.Tensor:
    """The means and deviations of the source model's maps at the style layer, [2, B, C, 1, 1]."""
    return torch.stack(style_statistics(network().layer1(batch)))


def is_confident(batch: torch.Tensor) -> torch.Tensor:
    return network()(batch).softmax(1).max(1).values > middle_confidence("batch")


def test_the_next_batch_takes_the_styles_of_the_last() -> None:
    model = dpl.adapt(network(), "dpl", style="carry_over", confidence=middle_confidence("batch"), lr=0.0)
    model(images())
    torch.testing.assert_close(model.method.term.styling.carried, styles_of(images()))
    _, taken = maps_around(model, "layer1", "layer2", images(seed=1))
    originals, copies = taken[0], taken[-1]
    confident = is_confident(images(seed=1))
    assert 0 < len(copies) == int(confident.sum())
    donors = network().layer1(images()[~is_confident(images())]).detach()
    assert all(made_by_adain(c, o, donors) for c, o in zip(copies, originals[confident], strict=True))


@pytest.mark.parametrize("source", ["unconfident", "all", "confident"])
def test_style_from_chooses_the_donors(source: str) -> None:
    alpha = middle_confidence("batch")
    model = dpl.adapt(network(), "dpl", style="carry_over", style_from=source, confidence=alpha, lr=0.0)
    model(images())
    confident = is_confident(images())
    expected = {"unconfident": ~confident, "all": confident | True, "confident": confident}[source]
    assert torch.equal(model.method.term.styling.carried_lends, expected)


@pytest.mark.parametrize("style", ["two_pass", "carry_over"])
@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_without_donors_or_without_confident_samples_it_is_plain_dpl(style: str, confidence: float) -> None:
    plain = dpl.adapt(network(), "dpl", confidence=confidence)
    styled = dpl.adapt(network(), "dpl", style=style, confidence=confidence)
    for seed in range(3):
        assert torch.allclose(plain(images(seed=seed)), styled(images(seed=seed)), atol=1e-6)


def test_styles_carry_over_to_another_image_size() -> None:
    model = dpl.adapt(network(), "dpl", style="carry_over", confidence=middle_confidence("batch"))
    model(images())
    assert model(images(4, size=12)).shape == (4, 5)


def test_a_style_layer_that_is_not_used_is_refused() -> None:
    unused = network()
    unused.aside = torch.nn.Conv2d(3, 8, 1)
    with pytest.raises(ModelError, match="style_layer='aside' was not used"):
        dpl.adapt(unused, "dpl_dagger", style_layer="aside")(images())


def test_tracked_statistics_are_those_of_the_real_images() -> None:
    """Restyled copies are normalised as their batch was and do not move the running statistics."""
    settings = {"confidence": middle_confidence("batch"), "norm": "track", "lr": 0.0}
    models = [dpl.adapt(network(), name, **settings) for name in ("dpl", "dpl_dagger")]
    for model in models:
        model(images())
    plain, styled = (model.model.layer2[1].running_mean for model in models)
    assert not torch.equal(plain, network().layer2[1].running_mean)
    torch.testing.assert_close(plain, styled)
