"""Tensors find their place by name, or the message says why not and what to do."""

import pytest
import torch
from torch import nn

from dpl.backbones import create, load_weights
from dpl.core.errors import DataError


def twin(network):
    """Return the same architecture with other values."""
    torch.manual_seed(9)
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5))
    assert not torch.equal(other[0].weight, network[0].weight)
    return other


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


WRAPPERS = [
    lambda state: state,
    lambda state: {"state_dict": state},
    lambda state: {"model": state, "epoch": 1},
    lambda state: {"model": {"state_dict": state}},
    lambda state: {"model": "its name", "net": state},
]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("prefix", ["", "module.", "model.", "module.network."])
@pytest.mark.parametrize("zipped", [True, False])
def test_prefixes_and_wrappers_come_off(wrap, prefix, zipped, small, saved):
    state = {prefix + key: value for key, value in small.state_dict().items()}
    path = saved(wrap(state), _use_new_zipfile_serialization=zipped)
    target = twin(small)
    report = load_weights(target, path)
    assert same(target, small)
    assert report.loaded == len(state)


def test_a_prefix_that_is_the_networks_own_name_stays(saved):
    network = nn.ModuleDict({"model": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    path = saved({f"module.{key}": value + 1 for key, value in network.state_dict().items()})
    before = network["model"].weight.clone()
    load_weights(network, path)
    assert torch.equal(network["model"].weight, before + 1)


def test_two_tensors_for_one_place_are_refused(small, saved):
    state = small.state_dict()
    path = saved({**state, **{f"module.{key}": value for key, value in state.items()}})
    with pytest.raises(DataError, match="several versions"):
        load_weights(small, path)


def test_files_older_than_the_step_counter_load(small, saved):
    state = {k: v for k, v in small.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert load_weights(twin(small), saved(state)).missing == ()


def test_a_head_of_another_size_names_the_number_of_classes(saved):
    path = saved(create("debug_cnn", num_classes=7).state_dict())
    network = create("debug_cnn", num_classes=3)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    with pytest.raises(DataError, match=r"2 of another shape: fc.weight \[7, 32\].*num_classes=7"):
        load_weights(network, path)
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())
    report = load_weights(network, path, strict=False)
    assert report.mismatched == ("fc.weight", "fc.bias")
    assert torch.equal(network.fc.weight, before["fc.weight"])
    assert not torch.equal(network.layer1[0].weight, before["layer1.0.weight"])


def test_missing_and_unexpected_tensors_are_counted_and_named(small, saved):
    state = small.state_dict()
    del state["3.bias"]
    state["mu"] = torch.zeros(3)
    path = saved(state)
    with pytest.raises(DataError, match=r"1 missing: 3.bias; 1 not in the network: mu.*strict=False"):
        load_weights(small, path)
    report = load_weights(twin(small), path, strict=False)
    assert (report.missing, report.unexpected) == (("3.bias",), ("mu",))


def test_half_a_network_is_not_advised(saved):
    path = saved(create("cifar_resnet20").state_dict())
    with pytest.raises(DataError, match="another architecture"):
        load_weights(create("cifar_resnet32"), path)


def test_strict_false_still_wants_something_that_fits(small, saved):
    path = saved({"a": torch.zeros(2)})
    with pytest.raises(DataError, match="another architecture"):
        load_weights(small, path, strict=False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_values_that_are_not_finite_in_the_network_are_refused(bad, small, saved):
    state = {key: value.clone() for key, value in small.state_dict().items()}
    state["3.bias"] = state["3.bias"].double()
    state["3.bias"][0] = bad
    with pytest.raises(DataError, match=r"3\.bias holds non-finite values"):
        load_weights(twin(small), saved(state))


def test_other_dtypes_are_converted(small, saved):
    state = {key: value.half() if value.is_floating_point() else value for key, value in small.state_dict().items()}
    target = twin(small)
    load_weights(target, saved(state))
    assert target[0].weight.dtype == torch.float32
    torch.testing.assert_close(target[0].weight, small[0].weight, atol=1e-3, rtol=1e-3)
