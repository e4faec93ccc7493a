"""Differences from the source state are bitwise exact."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpl.serve.live import SourceState, same_bits

ORIGIN = {
    "model.weight": torch.tensor([1.0, 0.0, -2.0]),
    "model.count": torch.tensor(3),
    "method.memory": torch.zeros(2, 2),
    "generator": torch.arange(16, dtype=torch.uint8),
}


def test_what_is_the_same_is_left_out_and_the_rest_comes_back() -> None:
    source = SourceState(ORIGIN)
    assert source.difference(ORIGIN) == {}
    state = dict(ORIGIN)
    del state["method.memory"]
    state["model.weight"] = torch.tensor([1.0, -0.0, -2.0])  # equal numbers, other bits
    state["optimizer.weight/step"] = torch.tensor(1.0)
    difference = source.difference(state)
    assert set(difference) == {"model.weight", "optimizer.weight/step", "method.memory"}
    assert difference["method.memory"] is None
    back = source.restored(difference)
    assert set(back) == set(state)
    assert all(same_bits(back[key], state[key]) for key in state)


def test_drift_is_relative_to_the_weights() -> None:
    source = SourceState(ORIGIN)
    moved = ORIGIN | {"model.weight": ORIGIN["model.weight"] * 1.1, "method.memory": torch.full((2, 2), 1e9)}
    assert abs(source.drift(source.difference(moved)) - 0.1) < 1e-6
    assert source.drift({}) == 0


def test_other_types_and_shapes_are_differences() -> None:
    zero = torch.zeros(4)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, zero.view(2, 2))
    assert same_bits(torch.tensor(float("nan")), torch.tensor(float("nan")))


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*ORIGIN, "extra.a", "extra.b"]),
        st.lists(st.floats(width=32), min_size=0, max_size=4).map(lambda v: torch.tensor(v, dtype=torch.float32)),
    )
)
def test_any_state_comes_back(changes: dict[str, torch.Tensor]) -> None:
    source = SourceState(ORIGIN)
    state = {key: value for key, value in ORIGIN.items() if len(changes.get(key, "x"))} | changes
    back = source.restored(source.difference(state))
    assert set(back) == set(state)
    assert all(same_bits(back[key], state[key]) for key in state)
