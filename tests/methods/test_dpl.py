"""DPL where it has little to learn from: batches of one image or one class, and the memory that they still move."""

import pytest
import torch
from torch import Tensor

import dpl
from dpl.demo.digits import load_source_network, uci_digits
from nets import images, network

SCOPES = ["affine", "classifier", "features", "all"]
MEMBERS = ["dpl_o", "dpl_star", "dpl", "dpl_dagger"]


def accuracy(model: dpl.AdaptiveModel, batches: list[tuple[Tensor, Tensor]]) -> float:
    right = sum(int((model(pixels).argmax(1) == labels).sum()) for pixels, labels in batches)
    return 100 * right / sum(len(labels) for _, labels in batches)


def single_images() -> list[tuple[Tensor, Tensor]]:
    pixels, labels = (part[:300] for part in uci_digits())
    return list(zip(pixels.split(1), labels.split(1), strict=True))


def single_classes() -> list[tuple[Tensor, Tensor]]:
    """Batches of up to eight digits of which the source network predicts one class."""
    pixels, labels = (part[:600] for part in uci_digits())
    with torch.no_grad():
        predicted = load_source_network()[0](pixels).argmax(1)
    rows = [part for k in range(10) for part in (predicted == k).nonzero().flatten().split(8)]
    return [(pixels[part], labels[part]) for part in rows if len(part)]


@pytest.mark.parametrize("stream", [single_images, single_classes])
@pytest.mark.parametrize("scope", SCOPES)
def test_one_image_or_one_class_loses_no_accuracy(stream, scope: str) -> None:
    batches, source = stream(), load_source_network()[0]
    adapted = accuracy(dpl.adapt(source, "dpl", scope=scope, lr=1e-3), batches)
    assert adapted >= accuracy(dpl.adapt(source, "source"), batches) - 0.5


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", MEMBERS)
def test_one_class_does_not_move_weights_by_momentum(method: str, scope: str) -> None:
    model = dpl.adapt(network(), method, confidence=0.0, scope=scope)
    model(images())
    assert model.last.updated is True  # Adam has momentum now
    before = {name: p.clone() for name, p in model.model.named_parameters()}
    model(images(1).expand(4, -1, -1, -1))
    assert model.last.classes == 1
    assert all(torch.equal(p, before[name]) for name, p in model.model.named_parameters())


def test_the_memory_learns_from_one_class() -> None:
    model = dpl.adapt(network(), "dpl", confidence=0.0)
    start, label = model.method.term.memory.clone(), int(network()(images(1)).argmax())
    model(images(1))
    moved = (model.method.term.memory != start).any(dim=1).nonzero().flatten().tolist()
    assert moved == [label]


def regulariser_share(scale: float, memory: str) -> float:
    """The pull of Eq. 6 on the classifier's rows over that of Eq. 4, with all of the classifier scaled."""
    source = network().double()
    with torch.no_grad():
        source.fc.weight.mul_(scale)
        source.fc.bias.mul_(scale)  # the predicted classes stay
    pulls = []
    for weight in (0.0, 1.0):
        model = dpl.adapt(source, "dpl", confidence=0.0, optimizer="sgd", reg_weight=weight, memory=memory)
        model(images(16).double())
        pulls.append((model.model.fc.weight - source.fc.weight).detach())
    return float((pulls[1] - pulls[0]).norm() / pulls[0].norm())


def test_a_memory_of_directions_does_not_depend_on_the_length_of_the_rows() -> None:
    shares = [regulariser_share(scale, "directions") for scale in (1.0, 1e-3)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-4)
    shares = [regulariser_share(scale, "features") for scale in (1.0, 1e-3)]
    assert abs(shares[0] / shares[1] - 1) > 0.01  # features weigh more where rows are short


def test_a_memory_of_directions_starts_at_the_prototypes() -> None:
    model = dpl.adapt(network(), "dpl", memory="directions")
    rows = network().fc.weight.detach()
    torch.testing.assert_close(model.method.term.memory, rows / rows.norm(dim=1, keepdim=True))
