"""A pass of which only the selected samples are differentiated: the same gradients, in a smaller graph."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dpl
from dpl.network import Network, rows
from dpl.network.norm import Batch, Chosen

IMAGES = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Two convolutions beside a connection around them."""

    def __init__(self, channels: int, inplace: bool) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        y += x
        return self.act(y)


def net(inplace: bool = True, first: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), first or nn.BatchNorm2d(8), nn.ReLU(inplace=inplace), Block(8, inplace),
        nn.MaxPool2d(2), Block(8, inplace), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 2)
    return module.eval()


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_SMALL", 0)


def gradients(network: Network, chosen: list[int], short: bool) -> list[Tensor]:
    out = network.selecting(IMAGES) if short else network(IMAGES)
    loss = out.z[chosen].square().sum() + out.logits[chosen].logsumexp(dim=1).sum()
    found = torch.autograd.grad(loss, list(network.module.parameters()), allow_unused=True)
    return [torch.zeros(()) if g is None else g for g in found]


@pytest.mark.parametrize("chosen", [[1, 4, 5], [7], [], list(range(8))])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradients_are_the_same(chosen: list[int], inplace: bool, layout: torch.memory_format) -> None:
    network = Network(net(inplace).to(memory_format=layout), needs_classifier=True)
    for ours, plain in zip(gradients(network, chosen, True), gradients(network, chosen, False), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inside", [[2, 4], [1, 4, 5], []])
def test_the_maps_of_a_watched_layer_take_part(inside: list[int]) -> None:
    network = Network(net(), needs_classifier=True)
    found = []
    for out in (network.selecting(IMAGES, watch="3"), network._watching(IMAGES, "3")):
        assert out.maps is not None
        loss = out.z[[1, 4]].square().sum() + out.maps[inside].square().sum()
        found.append(torch.autograd.grad(loss, list(network.module.parameters())[:-2]))
    for ours, plain in zip(*found, strict=True):
        assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)


class Counting(TorchDispatchMode):
    """Counts the samples of every convolution, forward and back."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[int] = []
        self.back: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.forward.append(len(args[0]))
        if func is torch.ops.aten.convolution_backward.default:
            self.back.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def convolved(network: Network, chosen: list[int]) -> tuple[list[int], list[int]]:
    """Return the numbers of samples convolved forward and back while the gradient is computed."""
    out = network.selecting(IMAGES)
    with Counting() as counted:
        out.logits[chosen].sum().backward()
    return counted.forward, counted.back


def test_a_repeated_pass_convolves_nothing_forward_and_only_the_selected_back() -> None:
    assert convolved(Network(net(), needs_classifier=True), [2, 5]) == ([], [2] * 5)


def test_outputs_that_are_overwritten_are_computed_again() -> None:
    network = Network(net(first=nn.Identity()), needs_classifier=True)  # the activation overwrites the convolution's
    assert convolved(network, [2, 5]) == ([2], [2] * 5)
    for ours, plain in zip(gradients(network, [2, 5], True), gradients(network, [2, 5], False), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_where_nearly_all_are_selected_the_first_pass_is_differentiated() -> None:
    assert convolved(Network(net(), needs_classifier=True), list(range(8))) == ([], [8] * 5)


class Mixing(nn.Module):
    """Looks at the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


def is_cut(network: Network) -> bool:
    node = network.selecting(IMAGES).logits.grad_fn
    return "_Selected" in type(node).__name__


def test_networks_that_mix_samples_are_left_alone() -> None:
    assert is_cut(Network(net(), needs_classifier=True))
    assert not is_cut(Network(net(first=Mixing()), needs_classifier=True))
    network = Network(net(), needs_classifier=True)
    with network.norm.using(Batch()):
        assert not is_cut(network)
    with network.norm.using(Chosen(0.1)):
        assert not is_cut(network)
    with network.norm.using(Chosen(0.0)):
        assert is_cut(network)


class Tokens(nn.Module):
    """A transformer block on patches; with `first` tokens, not samples, come first, and `twice` applies it twice."""

    def __init__(self, first: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.first, self.twice = first, twice
        self.patches = nn.Conv2d(3, 12, 4, stride=4)
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=not first)
        self.up, self.down, self.fc = nn.Linear(12, 48), nn.Linear(48, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).permute(2, 0, 1) if self.first else self.patches(x).flatten(2).mT
        for _ in range(1 + self.twice):
            y = self.norm1(x)
            x = x + self.attention(y, y, y, need_weights=False)[0]
            x = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return self.fc(x.mean(dim=0 if self.first else 1))


@pytest.mark.parametrize("chosen", [[1, 4, 5], [7], [], list(range(8))])
@pytest.mark.parametrize("options", [{}, {"first": True}, {"twice": True}])
@pytest.mark.parametrize("size", [16, 8])  # 16 tokens, or 4
def test_transformers_have_the_same_gradients(chosen: list[int], options: dict[str, bool], size: int) -> None:
    torch.manual_seed(0)
    network, images = Network(Tokens(**options).eval(), needs_classifier=True), IMAGES[..., :size, :size]
    assert is_cut(network) or options.get("first")
    for ours, plain in zip(gradients(network, chosen, True), gradients(network, chosen, False), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)
    out = network.selecting(torch.cat([images, images]))  # with `first`, as many samples as there are tokens of 16
    loss, other = (o.z[chosen].square().sum() for o in (out, network(torch.cat([images, images]))))
    weight = network.module.down.weight
    assert torch.allclose(*(torch.autograd.grad(x, weight)[0] for x in (loss, other)), rtol=1e-5, atol=1e-6)


def test_linear_layers_multiply_only_the_selected_back_and_nothing_twice() -> None:
    network = Network(Tokens().eval(), needs_classifier=True)
    out, rows = network.selecting(IMAGES), []

    class Multiplied(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and any(48 in s for s in shapes):
                rows.append([n for s in shapes for n in s if n not in (12, 48)])
            return func(*args, **(kwargs or {}))

    with Multiplied():
        out.logits[[2, 5]].sum().backward()
    assert [set(each) for each in rows] == [{2 * 16}] * 4  # two layers: towards their inputs and towards their weights


class Twice(nn.Module):
    """Uses a layer first on a constant, which has no row for each sample, then on the images."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fc = nn.Linear(768, 768), nn.Linear(768, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.fc(self.layer(torch.ones(2, 768)).mean(dim=0) + self.layer(x))


def test_what_cannot_be_kept_leaves_a_gap() -> None:
    torch.manual_seed(0)
    network = Network(Twice().eval(), needs_classifier=True)
    for ours, plain in zip(gradients(network, [1, 2], True), gradients(network, [1, 2], False), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_a_gradient_of_zeros_is_no_missing_gradient() -> None:
    network = Network(net(), needs_classifier=True)
    found = torch.autograd.grad(network.selecting(IMAGES).logits.mul(0).sum(), list(network.module.parameters()))
    assert not any(gradient.any() for gradient in found)


def test_networks_whose_weights_are_elsewhere_are_left_alone() -> None:
    module = net()
    module.table = nn.Parameter(torch.zeros(10_000))
    assert not is_cut(Network(module, needs_classifier=True))


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("watch", [None, "3", "5"])
def test_a_frozen_beginning_is_not_run_again(inplace: bool, watch: str | None) -> None:
    network = Network(net(inplace), needs_classifier=True)
    network.train_only("all", start="5")
    parameters = [p for p in network.module.parameters() if p.requires_grad]
    called: list[int] = []
    network.module[3].conv1.register_forward_hook(lambda _layer, args, _output: called.append(len(args[0])))
    out, plain = network.selecting(IMAGES, watch=watch), network._watching(IMAGES, watch)
    found = []
    for given in (out, plain):
        called.clear()
        maps = torch.zeros(8) if given.maps is None else given.maps.flatten(1).sum(dim=1)
        loss = given.logits[[1, 4, 5]].logsumexp(dim=1).sum() + maps[[4, 5]].sum()
        found.append(torch.autograd.grad(loss, parameters))
        assert called == []
    assert is_cut(network)
    for ours, expected in zip(*found, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_what_was_overwritten_before_the_part_that_learns_is_computed_again() -> None:
    network = Network(net(first=nn.Identity()), needs_classifier=True)  # the activation overwrites the convolution's
    network.train_only("all", start="3")
    parameters = [p for p in network.module.parameters() if p.requires_grad]
    found = [
        torch.autograd.grad(out.logits[[2, 5]].logsumexp(dim=1).sum(), parameters)
        for out in (network.selecting(IMAGES), network(IMAGES))
    ]
    assert is_cut(network)
    for ours, expected in zip(*found, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_where_little_learns_nothing_is_repeated() -> None:
    network = Network(net(), needs_classifier=True)
    network.train_only("all", start="8")
    assert not is_cut(network)


def test_the_rule_of_the_first_pass_holds_for_the_second() -> None:
    network = Network(net(), needs_classifier=True)
    out = network.selecting(IMAGES)
    with network.norm.using(Batch()):
        ours = torch.autograd.grad(out.logits[1].sum(), list(network.module.parameters()))
    plain = torch.autograd.grad(network(IMAGES).logits[1].sum(), list(network.module.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, plain, strict=True))


def test_a_second_derivative_goes_through_the_whole_graph() -> None:
    network = Network(net().double(), needs_classifier=True)
    weight = network.module[0].weight

    def second(logits: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(logits[:2].square().sum(), weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    assert torch.allclose(second(network.selecting(IMAGES.double()).logits), second(network(IMAGES.double()).logits))


@pytest.mark.parametrize(
    "method", ["pl", "dpl", "arcface", "proxy_nca", "shot_im", "shot", "dpl_dagger:two_pass", "dpl_dagger:carry_over"]
)
@pytest.mark.parametrize("start", [None, "5"])
def test_methods_adapt_alike(method: str, start: str | None, monkeypatch) -> None:
    batches = torch.rand(4, 8, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        confidence = float(net()(batches[0]).softmax(dim=1).amax(dim=1).median())
    method, _, style = method.partition(":")
    settings: dict[str, Any] = {} if method.startswith("shot") else {"confidence": confidence}
    settings |= {"style": style, "style_layer": "3"} if style else {}
    short, plain = (dpl.adapt(copy.deepcopy(net()), method, lr=1e-3, start=start, **settings) for _ in range(2))
    monkeypatch.setattr(plain._network, "selecting", lambda images, watch=None: plain._network._watching(images, watch))
    for batch in batches:
        assert torch.allclose(short(batch), plain(batch), atol=1e-5)
    assert any(not torch.equal(a, b) for a, b in zip(short.model.parameters(), net().parameters(), strict=True))


@pytest.mark.parametrize("method", ["pl", "dpl", "dpl_dagger:two_pass", "dpl_dagger:carry_over", "eta", "sar", "deyo"])
def test_methods_adapt_transformers_alike(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = torch.rand(4, 8, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    module = Tokens().eval()
    with torch.no_grad():
        module.fc.weight.mul_(6)
        p = module(batches[0]).softmax(dim=1)
    half = {"confidence": float(p.amax(dim=1).median())}
    margin = float(-(p * p.log()).sum(dim=1).median() / torch.tensor(5.0).log())
    method, _, style = method.partition(":")
    settings: dict[str, Any] = half if method in ("pl", "dpl", "dpl_dagger") else {"margin": margin}
    settings |= {"drop": -1.0} if method == "deyo" else {"redundancy": 1.1} if method == "eta" else {}
    settings |= {"style": style, "style_layer": "patches"} if style else {}
    short, plain = (dpl.adapt(module, method, lr=1e-3, **settings) for _ in range(2))
    monkeypatch.setattr(plain._network, "selecting", lambda images, watch=None: plain._network._watching(images, watch))
    for batch in batches:
        assert torch.allclose(short(batch), plain(batch), atol=1e-5)
    assert any(not torch.equal(a, b) for a, b in zip(short.model.parameters(), module.parameters(), strict=True))
