"""A run that starts at a layer gives what the long way gives, and networks that cannot be run so are found out."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpl
from dpl.core.extras import optional
from dpl.network.replay import Replay
from nets import images, network


def median_confidence(net: nn.Module, batch: Tensor) -> float:
    with torch.no_grad():
        return float(net(batch).softmax(1).max(1).values.median())


def adapted(
    net: nn.Module, style: str, norm: str | float, *, replayed: bool, batches: list[Tensor]
) -> dpl.AdaptiveModel:
    alpha = median_confidence(net, batches[0])
    made = dpl.adapt(net, "dpl", style=style, norm=norm, confidence=alpha, lr=0.1, optimizer="sgd")
    if not replayed:
        made.method.styling.replay.possible = lambda _images: False
        made.method.styling.replay._plans = {batch.shape[1:]: None for batch in batches}
    for batch in batches:
        made(batch)
    return made


@pytest.mark.parametrize("kind", ["batch", "tokens", "group"])
@pytest.mark.parametrize("style", ["two_pass", "carry_over"])
def test_the_short_way_trains_as_the_long_way(kind: str, style: str) -> None:
    batches = [images(seed=seed) for seed in range(4)]
    short = adapted(network(kind), style, "running", replayed=True, batches=batches)
    long = adapted(network(kind), style, "running", replayed=False, batches=batches)
    assert short.method.styling.replay._plans[batches[0].shape[1:]] is not None
    changed = [not torch.equal(p, q) for p, q in zip(short.model.parameters(), network(kind).parameters(), strict=True)]
    assert any(changed)
    for own, other in zip(short.model.parameters(), long.model.parameters(), strict=True):
        assert torch.allclose(own, other, atol=1e-5)


@pytest.mark.parametrize("style", ["two_pass", "carry_over"])
@pytest.mark.parametrize("norm", ["batch", 0.3])
def test_the_restyled_features_are_the_same_with_statistics_of_the_batch(style: str, norm: str | float) -> None:
    """Gradients may differ here: the short way's also flow through the statistics of the layers before."""
    batches = [images(seed=seed) for seed in range(2)]
    made = [adapted(network(), style, norm, replayed=replayed, batches=batches[:1]) for replayed in (True, False)]
    for one, other in zip(made[0].model.parameters(), made[1].model.parameters(), strict=True):
        other.data.copy_(one.data)
    features = []
    for model in made:
        model.method.random.generator.manual_seed(1)
        styling = model.method.styling
        styling.carried = batches[0][:4]
        out = styling.first_pass(batches[1])
        labels = out.logits.argmax(dim=1).masked_fill(torch.arange(len(out.logits)) % 2 == 0, -1)
        features.append(styling.double(out, labels)[0])
    assert len(features[0]) > len(batches[1])
    assert torch.allclose(features[0], features[1], atol=1e-5)


@pytest.mark.parametrize("name", ["resnet18", "tf_efficientnet_lite0", "vit_tiny_patch16_224", "mobilenetv2_050"])
def test_common_networks_can_be_replayed(name: str) -> None:
    net = optional("timm", "bench").create_model(name, num_classes=5).eval()
    size = 224 if "vit" in name else 64
    layer = dpl.network.style_layer.find_style_layer(net)
    assert Replay(net, layer).possible(torch.rand(2, 3, size, size))


class Stages(nn.Module):
    """Two stages, with what the test puts between and around them."""

    def __init__(self, join: Callable[[Tensor, Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.stem, self.first, self.second = (nn.Conv2d(a, 4, 3, padding=1) for a in (3, 4, 4))
        self.head, self.join = nn.Linear(4, 5), join

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        return self.head(self.join(stem, self.first(stem), self.second).mean((2, 3)))


def straight(_stem: Tensor, maps: Tensor, rest: nn.Module) -> Tensor:
    return rest(F.relu(maps))


def around(stem: Tensor, maps: Tensor, rest: nn.Module) -> Tensor:
    return rest(maps) + stem  # the layer's output is not all that the rest sees


def overwritten(_stem: Tensor, maps: Tensor, rest: nn.Module) -> Tensor:
    return rest(F.relu(maps, inplace=True))


@pytest.mark.parametrize(("join", "possible"), [(straight, True), (around, False), (overwritten, False)])
def test_networks_that_cannot_be_replayed_take_the_long_way(join, possible: bool) -> None:
    torch.manual_seed(0)
    net, batch = Stages(join).eval(), torch.rand(8, 3, 6, 6)
    assert Replay(net, "first").possible(batch) is possible
    made = dpl.adapt(net, "dpl", style="two_pass", style_layer="first", confidence=median_confidence(net, batch))
    made(batch)
    assert made.last.updated


class InPlacePrefix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(self.stem(x).mul_(2)).mean((2, 3)))


def test_what_is_overwritten_before_the_layer_is_found_out() -> None:
    assert not Replay(InPlacePrefix().eval(), "first").possible(torch.rand(3, 3, 8, 8))


def test_modules_are_left_as_they_were() -> None:
    net = network()
    adapted(net, "two_pass", "running", replayed=True, batches=[images()])
    assert not any("forward" in vars(module) for module in net.modules())
    made = adapted(network(), "two_pass", "running", replayed=True, batches=[images()])
    assert not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in made.model.modules())
