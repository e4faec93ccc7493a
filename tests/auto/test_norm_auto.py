"""`norm="auto"`: what it chooses on streams whose answer is known, and that it is part of the state."""

import copy

import pytest
import torch
from torch import Tensor, nn

import dpl
from dpl.methods.parts.norm_choice import SHARES, BlendStatistics
from dpl.methods.parts.stream_statistics import ClassOrderStatistics, ImageShiftDetector
from nets import images, network

CLASSES, WIDTH = 4, 16


class Sorter(nn.Module):
    """Tells which quarter of the channels is bright, behind a BatchNorm layer that knows the clean statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(WIDTH, affine=False)
        self.fc = nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            self.fc.weight.copy_(2 * torch.eye(CLASSES).repeat_interleave(WIDTH // CLASSES, dim=1))
            self.fc.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x).mean(dim=(2, 3)))


def draw(labels: Tensor, seed: int = 0) -> Tensor:
    """Images whose class is a pattern over the channels."""
    noise = torch.randn(len(labels), WIDTH, 3, 3, generator=torch.Generator().manual_seed(seed))
    return noise + 2 * torch.eye(CLASSES).repeat_interleave(WIDTH // CLASSES, dim=1)[labels][:, :, None, None]


def mixed(count: int, seed: int) -> Tensor:
    return torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def source() -> nn.Module:
    model = Sorter().train()
    for seed in range(40):
        model(draw(mixed(64, seed), seed))
    return model.eval()


def shifted(x: Tensor) -> Tensor:
    """A shift that BatchNorm statistics undo: brighter, and another offset for the patterns of two classes."""
    return x + 1 + 2 * torch.tensor([1.0, 0.0, -1.0, 0.0]).repeat_interleave(WIDTH // CLASSES)[:, None, None]


def accuracy(model: dpl.AdaptiveModel, batches: list[tuple[Tensor, Tensor]]) -> float:
    return float(torch.cat([model(x).argmax(dim=1) == y for x, y in batches]).float().mean())


def stream(size: int, count: int, shift: bool, labels: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    labels = mixed(size * count, 99) if labels is None else labels
    parts = labels.split(size)
    return [(shifted(draw(y, i)) if shift else draw(y, i), y) for i, y in enumerate(parts)]


def test_accuracy_rises_under_a_shift_and_source_domain_data_keep_the_source_statistics(source: nn.Module) -> None:
    still, auto = (dpl.adapt(source, "norm", norm=norm, layout="as_is") for norm in (0.0, "auto"))
    batches = stream(32, 10, shift=True)
    assert accuracy(still, batches) < 0.6
    assert accuracy(auto, batches) > 0.85
    assert auto.last["norm"] >= 0.25
    at_home = dpl.adapt(source, "norm", norm="auto")
    assert accuracy(at_home, stream(32, 10, shift=False)) > 0.95
    assert at_home.last["norm"] == 0.0


@pytest.mark.parametrize("size", [4, 8, 32])
@pytest.mark.parametrize("order", ["sorted", "one class"])
def test_batches_of_one_class_keep_the_source_statistics(source: nn.Module, size: int, order: str) -> None:
    labels = torch.arange(CLASSES).repeat_interleave(96) if order == "sorted" else torch.zeros(256, dtype=torch.long)
    auto = dpl.adapt(source, "norm", norm="auto")
    assert accuracy(auto, stream(size, 0, shift=False, labels=labels)) > 0.95
    assert auto.last["norm"] == 0.0


def test_small_batches_of_a_mixed_stream_keep_the_source_statistics(source: nn.Module) -> None:
    auto = dpl.adapt(source, "norm", norm="auto")
    assert accuracy(auto, stream(4, 60, shift=False)) > 0.95
    assert auto.last["norm"] == 0.0


def test_it_follows_a_change(source: nn.Module) -> None:
    auto = dpl.adapt(source, "norm", norm="auto")
    accuracy(auto, stream(32, 20, shift=False))
    assert auto.last["norm"] == 0.0
    accuracy(auto, stream(32, 12, shift=True))
    assert auto.last["norm"] >= 0.25
    accuracy(auto, stream(32, 16, shift=False))
    assert auto.last["norm"] == 0.0


def test_the_automatic_choice_trains_nothing_on_source_domain_data(source: nn.Module) -> None:
    auto = dpl.adapt(source)
    accuracy(auto, stream(32, 8, shift=False))
    assert (auto.last["phase"], auto.last["method"], auto.last["updated"]) == ("hold", "source", False)


def test_the_choice_is_part_of_the_state(source: nn.Module, tmp_path) -> None:
    auto, batches = dpl.adapt(source, "norm", norm="auto"), stream(32, 8, shift=True)
    clean = batches[0][0]
    before = auto.predict(clean)
    accuracy(auto, batches[:2])
    middle = copy.deepcopy(auto.state_dict())
    auto.save(tmp_path / "snapshot")
    rest = [auto(x) for x, _ in batches[2:]]
    loaded = dpl.load(tmp_path / "snapshot", source)
    assert all(torch.equal(a, loaded(x)) for a, (x, _) in zip(rest, batches[2:], strict=True))
    auto.load_state_dict(middle)
    assert all(torch.equal(a, auto(x)) for a, (x, _) in zip(rest, batches[2:], strict=True))
    auto.reset()
    assert torch.equal(auto.predict(clean), before)


@pytest.mark.parametrize("method", ["tent", "dpl", "t3a", "cotta", "source"])
def test_every_method_takes_it(method: str) -> None:
    model = dpl.adapt(network(), method, norm="auto")
    model(images())
    assert model.last["norm"] in SHARES


def test_without_batch_norm_it_does_nothing() -> None:
    plain, auto = (dpl.adapt(network("group"), "dpl", norm=norm, confidence=0.3) for norm in ("running", "auto"))
    assert all(torch.equal(plain(images(seed=i)), auto(images(seed=i))) for i in range(3))
    assert "norm" not in auto.last


def test_information_is_that_of_the_stream_not_of_the_batch() -> None:
    """One-class batches of one candidate have no information each, but all of it together."""
    statistics, sure = BlendStatistics(), 20 * torch.eye(CLASSES)
    for label in range(CLASSES):
        right = sure[label].expand(8, CLASSES)
        statistics.add(torch.stack([right, *[torch.zeros(8, CLASSES)] * (len(SHARES) - 1)]))
    choice = statistics.choose(mixed=True, early=False)
    assert choice.information[0] == pytest.approx(torch.tensor(float(CLASSES)).log().item(), abs=0.1)
    assert choice.chosen == 0


def test_class_order_tells_sorted_from_mixed() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES).repeat_interleave(64)
    for order, expected in ((torch.arange(256), False), (torch.randperm(256, generator=generator), True)):
        seen = ClassOrderStatistics()
        for part in labels[order].split(16):
            seen.add(3 * torch.eye(CLASSES)[part] + torch.randn(16, CLASSES, generator=generator))
        assert seen.is_mixed(early=True) is expected


def test_the_shift_detector_tells_a_change_from_chance() -> None:
    detector = ImageShiftDetector()
    assert not any(detector.detect(images(16, seed=i)) for i in range(40))
    assert any(detector.detect(0.3 * images(16, seed=i)) for i in range(40, 48))
