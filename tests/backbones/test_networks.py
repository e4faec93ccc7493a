"""Every network of our own: the counts on its record, its shapes, and a round trip through a file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dpl.backbones import OWN, Normalized, create, load_weights

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")
DOCS = Path(__file__).parents[2] / "docs" / "networks.md"
ROWS = {line.split("`")[1]: line.split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("| `")}


@pytest.mark.parametrize("name", OWN)
def test_counts_shapes_and_round_trip(name, tmp_path):
    if "domainnet" in name:
        pytest.importorskip("torchvision")
    record = OWN[name]
    torch.manual_seed(0)
    network = create(name)
    parameters, features = (int(ROWS[name][column].replace(",", "")) for column in (1, 2))
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert isinstance(network, Normalized) == (record.normalise != "none")
    images = torch.rand(2, 3, record.input_size, record.input_size)
    with torch.no_grad():
        logits = network(images)
    assert logits.shape == (2, record.classes)
    assert logits.isfinite().all()
    classifier = [m for m in network.modules() if isinstance(m, nn.Linear)][-1]
    assert (classifier.in_features, classifier.out_features) == (features, record.classes)

    path = tmp_path / "weights.safetensors"
    save_file(network.state_dict(), path)
    torch.manual_seed(1)
    again = create(name, weights=path)
    path.unlink()  # up to 146 MB
    assert all(
        torch.equal(a, b) for a, b in zip(network.state_dict().values(), again.state_dict().values(), strict=True)
    )
    with torch.no_grad():
        assert torch.equal(again(images), logits)


@pytest.mark.parametrize("name", ["wrn28_1", "cifar_resnet20", "cifar100_resnet32", "debug_cnn"])
def test_every_parameter_gets_a_gradient(name):
    torch.manual_seed(0)
    network = create(name, num_classes=7).train()
    loss = network(torch.rand(4, 3, 32, 32)).logsumexp(1).sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())


def test_published_sizes():
    """He et al. (2016), Table 6, and Zagoruyko and Komodakis (2016) give these in millions."""
    published = {20: 0.27, 32: 0.46, 44: 0.66, 56: 0.85, 110: 1.7}
    for depth, millions in published.items():
        parameters = sum(p.numel() for p in create(f"cifar_resnet{depth}").parameters())
        assert parameters / 1e6 == pytest.approx(millions, abs=0.03)
    with torch.device("meta"):
        wide = create("wrn28_10")
    assert round(sum(p.numel() for p in wide.parameters()) / 1e6, 1) == 36.5


def test_option_a_shortcut_keeps_every_second_pixel_between_zero_channels():
    from dpl.backbones.cifar import CifarResNet

    block = CifarResNet(3, 10).layer2[0]
    nn.init.zeros_(block.bn2.weight)  # leaves the shortcut alone
    x = torch.rand(1, 16, 8, 8)
    out = block.eval()(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_weight_normed_classifier_can_be_copied_after_a_forward_pass():
    import copy

    pytest.importorskip("torchvision")
    network = create("domainnet126_resnet50", num_classes=3)
    network(torch.rand(1, 3, 32, 32))
    twin = copy.deepcopy(network)
    assert torch.equal(twin.network.fc.weight, network.network.fc.weight)


def test_the_page_lists_every_network_as_its_record_says():
    for name, record in OWN.items():
        assert int(ROWS[name][3]) == record.input_size
        assert record.checkpoints in ROWS[name][-1]


def test_loading_into_the_wrapper_or_the_inner_network_is_the_same(tmp_path):
    torch.manual_seed(0)
    source = create("cifar_resnet20")
    path = tmp_path / "w.safetensors"
    save_file(source.state_dict(), path)  # names begin with network.
    for normalise in ("imagenet", "none"):
        target = create("cifar_resnet20", normalise=normalise)
        assert load_weights(target, path).loaded == len(source.state_dict())
        inner = target.network if isinstance(target, Normalized) else target
        assert torch.equal(inner.linear.weight, source.network.linear.weight)
