"""The parameter names and shapes of published checkpoints, written down in expected/, fit our networks.

Sources: RobustBench's WideResNet (depth 28, widen factor 10) and CifarResNeXt (29, 4 x 32d), AdaContrast's
Classifier (ResNet-50, bottleneck 256, weight norm over dimension 0); the last two save with the prefix `module.`.
"""

from pathlib import Path

import pytest
import torch

from dpl.backbones import Normalized, create, load_weights
from dpl.core.errors import DataError

EXPECTED = Path(__file__).parent / "expected"
CASES = [("wrn28_10", "", 155), ("resnext29", "module.", 188), ("domainnet126_resnet50", "module.", 328)]


def published(name: str) -> dict[str, torch.Size]:
    lines = (EXPECTED / f"{name}.txt").read_text().split("\n")
    pairs = [line.split() for line in lines if line]
    return {key: torch.Size([] if shape == "scalar" else map(int, shape.split("x"))) for key, shape in pairs}


@pytest.mark.parametrize(("name", "prefix", "entries"), CASES)
def test_a_file_with_the_published_names_loads_completely(name, prefix, entries, saved):
    if "domainnet" in name:
        pytest.importorskip("torchvision")
    shapes = published(name)
    assert len(shapes) == entries
    generator = torch.Generator().manual_seed(0)
    tensors = {
        prefix + key: torch.ones((), dtype=torch.long) if not shape else torch.rand(shape, generator=generator) + 0.5
        for key, shape in shapes.items()
    }
    path = saved({"epoch": 3, "model": "a name", "state_dict": tensors, "optimizer": {"state": {}}}, "best.pth.tar")
    network = create(name)
    report = load_weights(network, path)
    path.unlink()
    assert (report.loaded, report.missing, report.unexpected) == (entries, (), ())
    bare = network.network if isinstance(network, Normalized) else network
    state = bare.state_dict()
    assert len(state) == entries
    unchanged_names = [key for key in shapes if key in state]
    assert len(unchanged_names) == entries - (2 if "domainnet" in name else 0)  # weight_g and weight_v
    assert all(torch.equal(state[key], tensors[prefix + key]) for key in unchanged_names)


def test_weight_norm_of_either_spelling_gives_length_times_direction(saved):
    pytest.importorskip("torchvision")
    network = create("domainnet126_resnet50", num_classes=4)
    state = {f"module.{key}": value for key, value in network.network.state_dict().items()}
    length, direction = torch.rand(4, 1) + 1, torch.randn(4, 256)
    for key in [key for key in state if "parametrizations" in key]:
        del state[key]
    state |= {"module.fc.weight_g": length, "module.fc.weight_v": direction}
    path = saved({"state_dict": state})
    load_weights(network, path)
    path.unlink()
    torch.testing.assert_close(network.network.fc.weight, length * direction / direction.norm(dim=1, keepdim=True))


def test_new_spelling_loads_into_hooks(saved):
    new = torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2)))
    with pytest.warns(FutureWarning):
        old = torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Linear(3, 2)))
    load_weights(old, saved(new.state_dict()))
    images = torch.rand(4, 3)
    torch.testing.assert_close(old(images), new(images))


def test_a_published_file_of_another_architecture_is_refused(saved):
    tensors = {key: torch.zeros(shape) for key, shape in published("resnext29").items()}
    path = saved(tensors)
    with pytest.raises(DataError, match=r"does not fit.*188 not in the network.*another architecture"):
        load_weights(create("cifar_resnet20"), path)
