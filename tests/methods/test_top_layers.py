import pytest
from torch import nn

from dpl.core.errors import ModelError
from dpl.methods.parts.top_layers import TOP_LAYERS, below_top


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.ModuleDict({"norm": nn.LayerNorm(4)})
        self.blocks = nn.ModuleList([nn.ModuleDict({"norm1": nn.LayerNorm(4)}) for _ in range(12)])
        self.norm = nn.LayerNorm(4)


EXPECTED = {"patch_embed.norm", *(f"blocks.{i}.norm1" for i in range(9))}


@pytest.mark.parametrize(
    ("network", "prefix"),
    [
        (Transformer(), ""),
        (nn.Sequential(nn.Identity(), Transformer()), "1."),
        (nn.DataParallel(Transformer()), "module."),
    ],
)
def test_the_last_blocks_and_norm_of_a_transformer_are_frozen(network: nn.Module, prefix: str) -> None:
    kept = below_top(network, dict(network.named_parameters()), TOP_LAYERS)
    assert {name.rpartition(".")[0] for name in kept} == {prefix + name for name in EXPECTED}
    assert {name for name, p in network.named_parameters() if p.requires_grad} == set(kept)


def test_a_name_matches_whole_parts_only() -> None:
    network = Transformer()
    kept = below_top(network, dict(network.named_parameters()), ("blocks.1",))
    assert "blocks.10.norm1.weight" in kept
    assert "blocks.1.norm1.weight" not in kept


def test_a_single_name_is_accepted() -> None:
    network = Transformer()
    assert "norm.weight" not in below_top(network, dict(network.named_parameters()), "norm")


def test_nothing_left_is_an_error() -> None:
    network = Transformer()
    with pytest.raises(ModelError, match="frozen_modules="):
        below_top(network, dict(network.named_parameters()), ("patch_embed", "blocks", "norm"))
