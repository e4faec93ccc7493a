"""Finding the classifier, the scopes, the norm modes: on every kind of network, on a copy, reversible."""

import pytest
import torch
from torch import nn

import dpl
from dpl.core.errors import InputError, ModelError
from dpl.core.extras import optional
from dpl.methods.parts.norm_rules import BatchStatistics, BlendedStatistics, RunningStatistics, parse_norm
from dpl.network import Network
from dpl.network.norm_control import install, uninstall
from dpl.network.split import select_parameters
from nets import CLASSES, images, network

KINDS = ["batch", "group", "bottleneck", "weight_norm", "parametrized", "tokens", "late", "wrapped"]


@pytest.mark.parametrize("kind", KINDS)
def test_finds_the_layer_that_makes_the_logits(kind: str) -> None:
    wrapped = Network(network(kind))
    wrapped.confirm(images())
    out = wrapped(images())
    assert wrapped.classifier.out_features == CLASSES
    assert torch.allclose(out.z @ wrapped.prototypes.T + wrapped.classifier.bias, out.logits, atol=1e-5)


def test_a_forward_pass_corrects_a_wrongly_guessed_classifier() -> None:
    wrapped = Network(network("late"))
    assert wrapped.classifier_name == "project"
    assert wrapped.confirm(images()) is False
    assert wrapped.classifier_name == "head"


def test_images_that_the_network_cannot_run_are_refused_with_their_shape() -> None:
    with pytest.raises(InputError, match=r"the network refused images of shape \(2, 4, 8, 8\): .*channels"):
        Network(network()).confirm(torch.rand(2, 4, 8, 8))
    with pytest.raises(InputError, match="refused images of shape"):  # source images show the classifier
        dpl.adapt(network(), "rmt", source=(torch.rand(2, 4, 8, 8), torch.tensor([0, 1])))


def test_the_memory_fits_the_classifier_found_in_the_first_forward_pass() -> None:
    model = dpl.adapt(network("late"), "dpl", confidence=0.2)
    model(images())
    assert model.method.term.memory.shape == (CLASSES, 12)
    model.reset()
    assert torch.allclose(model.predict(images()), network("late")(images()), atol=1e-6)


@pytest.mark.parametrize(
    "name", ["resnet18", "vit_tiny_patch16_224", "mixer_s32_224", "convnext_atto", "mobilenetv3_small_050"]
)
def test_timm_networks(name: str) -> None:
    made = optional("timm", "bench").create_model(name, num_classes=3).eval()
    size = 224 if name.startswith(("vit", "mixer")) else 64
    batch = images(2, size=size)
    wrapped = Network(made)
    assert wrapped.confirm(batch)
    out = wrapped(batch)
    assert torch.allclose(out.z @ wrapped.prototypes.T + wrapped.classifier.bias, out.logits, atol=1e-4)
    assert torch.allclose(out.logits, made(batch), atol=1e-4)


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "resnet18"])
def test_torchvision_networks(name: str) -> None:
    made = getattr(optional("torchvision.models", "bench"), name)(num_classes=3).eval()
    model = dpl.adapt(made, "dpl", confidence=0.1)
    assert model(images(2, size=64)).shape == (2, 3)


def test_hugging_face_style_outputs() -> None:
    class Answer(dict):
        @property
        def logits(self) -> torch.Tensor:
            return self["logits"]

    class Hugging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network("batch")

        def forward(self, x: torch.Tensor) -> Answer:
            return Answer(logits=self.net(x))

    assert dpl.adapt(Hugging(), "dpl", confidence=0.2)(images()).shape == (8, CLASSES)


def test_a_network_without_a_linear_layer_is_refused_with_what_was_looked_for() -> None:
    convolutional = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ModelError, match=r"no nn\.Linear found"):
        dpl.adapt(convolutional, "dpl")
    assert dpl.adapt(convolutional, "tent")(images()).shape == (8, 4)


def test_a_given_classifier_is_checked() -> None:
    with pytest.raises(ModelError, match=r"classifier='nope'.*fc"):
        dpl.adapt(network(), "dpl", classifier="nope")
    assert dpl.adapt(network("late"), "dpl", classifier="head").trainable


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("affine", {"layer1.1.weight", "layer1.1.bias", "layer2.1.weight", "layer2.1.bias"}),
        ("classifier", {"fc.weight", "fc.bias"}),
    ],
)
def test_a_scope_selects_the_trainable_parameters(scope: str, expected: set[str]) -> None:
    assert set(dpl.adapt(network(), "tent", scope=scope).trainable) == expected


def test_scopes_split_the_network() -> None:
    scopes = ("features", "classifier", "all")
    names = {scope: set(select_parameters(network("weight_norm"), scope, "fc")) for scope in scopes}
    assert names["features"] | names["classifier"] == names["all"]
    assert names["classifier"] == {"fc.bias", "fc.weight_g", "fc.weight_v"}


def test_a_scope_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="no affine normalisation layer"):
        dpl.adapt(network("none"), "tent")


@pytest.mark.parametrize("kind", ["batch", "bottleneck"])
def test_batch_statistics_equal_training_mode_and_leave_the_buffers(kind: str) -> None:
    wrapped = Network(network(kind))
    reference = network(kind)
    for module in reference.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    before = {k: v.clone() for k, v in wrapped.module.state_dict().items()}
    with wrapped.norm.using(BatchStatistics()), torch.no_grad():
        assert torch.allclose(wrapped(images()).logits, reference(images()), atol=1e-6)
    assert all(torch.equal(before[k], v) for k, v in wrapped.module.state_dict().items())


def test_a_blend_goes_from_source_to_batch() -> None:
    wrapped = Network(network())
    with torch.no_grad():
        ends = [
            wrapped_logits(wrapped, rule)
            for rule in (
                RunningStatistics(),
                BlendedStatistics(1e-9),
                BatchStatistics(),
                BlendedStatistics(1.0, correction=0),
            )
        ]
    assert torch.allclose(ends[0], ends[1], atol=1e-5)
    assert torch.allclose(ends[2], ends[3], atol=1e-5)
    assert not torch.allclose(ends[0], ends[2], atol=1e-2)


def wrapped_logits(wrapped: Network, rule) -> torch.Tensor:
    with wrapped.norm.using(rule):
        return wrapped(images()).logits


def test_gradients_flow_through_the_batch_part_of_a_blend() -> None:
    layer = nn.BatchNorm2d(2).double().eval()
    layer.running_mean.copy_(torch.tensor([0.3, -0.2]))
    control = install(layer)
    control.rule = BlendedStatistics(0.4)
    x = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: layer(y), (x,))


def test_groups_are_normalised_by_themselves() -> None:
    wrapped = Network(network())
    parts = [images(4, seed=1), images(4, seed=2) * 3]
    with torch.no_grad(), wrapped.norm.using(BatchStatistics(), groups=2):
        together = wrapped(torch.cat(parts)).logits
    with torch.no_grad(), wrapped.norm.using(BatchStatistics()):
        assert torch.allclose(together, torch.cat([wrapped(part).logits for part in parts]), atol=1e-5)


def test_controlled_norm_layers_can_be_given_their_class_back() -> None:
    module = network()
    expected, kinds = module(images()), [type(m) for m in module.modules()]
    install(module).rule = BatchStatistics()
    assert not torch.equal(module(images()), expected)
    uninstall(module)
    assert [type(m) for m in module.modules()] == kinds
    assert torch.equal(module(images()), expected)


@pytest.mark.parametrize("norm", ["bach", -0.1, 1.5, None, True])
def test_wrong_norm_modes_are_named(norm) -> None:
    with pytest.raises(dpl.SettingError, match="norm="):
        parse_norm(norm)
