"""What the guard copies and puts back, on networks with unusual state."""

import torch
from torch import Tensor, nn

import dpl


class Unusual(nn.Module):
    """A buffer that is not saved, and one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm2d(3)
        self.mix = nn.Linear(3, 3)
        self.again = self.mix
        self.head = nn.Linear(3, 5)
        self.register_buffer("positions", torch.arange(3), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(images).mean(dim=(2, 3))[:, self.positions]
        logits: Tensor = self.head(self.again(self.mix(features)))
        return logits


def images(seed: int) -> Tensor:
    return torch.rand(8, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def test_an_undone_step_leaves_every_bit_of_an_unusual_network() -> None:
    """Adaptation has moved all weights; then a step goes wrong, and what was learnt before must still be there."""
    model = dpl.adapt(Unusual().eval(), "pl", guard=True, confidence=0.0, lr=0.1, layout="as_is")
    model(images(0))
    before = model.model.state_dict()
    before = {key: value.clone() for key, value in before.items()}
    act = model.method.step

    def step(batch: Tensor) -> Tensor:
        logits = act(batch)
        with torch.no_grad():
            model.model.mix.weight.fill_(torch.nan)
        return logits

    model.method.step = step  # type: ignore[method-assign]
    assert torch.isfinite(model(images(1))).all()
    assert model.guard is not None
    assert model.guard.counts["undo"] == 1
    after = model.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not torch.equal(before["mix.weight"], Unusual().state_dict()["mix.weight"]), "nothing had been learnt"
