import pytest
import torch
from torch import nn

from dpl.backbones import Normalized, create
from dpl.core.errors import SettingError


def test_normalises_each_channel():
    network = Normalized(nn.Identity(), (0.5, 0.25, 0.0), (0.5, 0.25, 1.0))
    out = network(torch.ones(2, 3, 4, 4))
    assert torch.equal(out[:, :, 0, 0], torch.tensor([[1.0, 3.0, 1.0]] * 2))


def test_statistics_follow_dtype_but_stay_out_of_the_state_dict():
    network = create("debug_cnn", normalise="cifar").double()
    assert network.mean.dtype == torch.float64
    assert all(name.startswith("network.") for name in network.state_dict())
    assert network(torch.rand(2, 3, 32, 32, dtype=torch.float64)).dtype == torch.float64


def test_the_wrapper_equals_normalising_by_hand():
    torch.manual_seed(0)
    mean, std = [0.4, 0.5, 0.6], [0.1, 0.2, 0.3]
    network = create("debug_cnn", normalise=[mean, std])
    images = torch.rand(3, 3, 32, 32)
    by_hand = (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.equal(network(images), network.network(by_hand))


def test_none_gives_the_bare_network():
    assert not isinstance(create("cifar_resnet20", normalise="none"), Normalized)
    assert isinstance(create("cifar_resnet20"), Normalized)


@pytest.mark.parametrize(
    "wrong",
    [
        "imagnet",
        (0.5, 0.5),
        ((0.5,) * 3,),
        ((0.5,) * 3, (0.5,) * 2),
        ((), ()),
        ((0.5,), (0.0,)),
        ((0.5,), (float("nan"),)),
    ],
)
def test_a_wrong_normalisation_is_refused_by_name(wrong):
    with pytest.raises(SettingError, match="normalise="):
        create("debug_cnn", normalise=wrong)
