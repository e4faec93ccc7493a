"""`norm="auto"`: the effective size of a batch on streams whose answer is known, and what follows from it."""

import pytest
import torch
from torch import Tensor, nn

import dpl
from abuse import streams
from dpl.methods.parts.effective_batch import EffectiveBatch
from dpl.methods.parts.norm_rules import STREAM, AutoBlend, EarlyBatch, MeasuredShift
from dpl.network.norm_control import install
from dpl.testing import Subject, copies_are_independent, predict_changes_nothing, reset_is_exact, resumes_exactly
from nets import images, network

CLASSES = 5


def one_hots(labels: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(labels, CLASSES).float()


def rho_of(batches: list[Tensor]) -> list[float]:
    """rho after each batch of predictions."""
    measured, found = EffectiveBatch(AutoBlend(), torch.device("cpu")), []
    for batch in batches:
        measured._add(batch)
        found.append(float(measured.rho))
    return found


def slow_rho(batches: list[Tensor], margin: float) -> float:
    """The analysis of variance in loops, with every batch of the same weight."""
    mean, count = torch.cat(batches).mean(dim=0), len(batches)
    between = sum(len(b) * (b.mean(dim=0) - mean).square().sum() for b in batches) / (count - 1)
    within = sum((b - b.mean(dim=0)).square().sum() for b in batches) / sum(len(b) - 1 for b in batches)
    excess = max(0.0, float(between / within) - 1 - margin * (2 / (count - 1)) ** 0.5)
    return excess / (excess + sum(len(b) for b in batches) / count)


def test_rho_is_that_of_a_plain_analysis_of_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpl.methods.parts.effective_batch._MEMORY", 1e12)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 1, CLASSES, generator=generator)
    batches = [(centre + torch.randn(16, CLASSES, generator=generator)).softmax(dim=1) for centre in centres]
    assert rho_of(batches)[-1] == pytest.approx(slow_rho(batches, margin=2), rel=1e-3)
    assert rho_of(batches)[-1] > 0.1


def test_a_shuffled_stream_is_rarely_called_correlated() -> None:
    wrong = 0
    for seed in range(100):
        labels = torch.randint(CLASSES, (40, 16), generator=torch.Generator().manual_seed(seed))
        found = rho_of([one_hots(batch) for batch in labels])
        wrong += any(found)
        assert max(found) < 0.1
    assert wrong <= 15


@pytest.mark.parametrize("size", [2, 4, 16])
def test_a_stream_sorted_by_class_has_a_large_rho_once_the_class_changes(size: int) -> None:
    labels = torch.arange(CLASSES).repeat_interleave(8 * size).split(size)
    found = rho_of([one_hots(batch) for batch in labels])
    assert found[:8] == [0.0] * 8  # one class so far: nothing to compare with
    assert found[9] > 0.8
    assert found[-1] > 0.95


def test_a_stream_may_become_sorted_late() -> None:
    shuffled = torch.randint(CLASSES, (100, 16), generator=torch.Generator().manual_seed(0))
    in_order = torch.arange(CLASSES).repeat_interleave(16 * 20).view(-1, 16)
    found = rho_of([one_hots(batch) for batch in torch.cat([shuffled, in_order, shuffled, shuffled])])
    assert found[99] == 0
    assert found[199] > 0.3
    assert found[-1] < 0.05


def test_the_share_follows_the_effective_size() -> None:
    rule = AutoBlend()
    assert [round(float(rule.share(n)), 2) for n in (200, 32, 8, 1)] == [0.61, 0.20, 0.20, 0.20]
    rule.rho = torch.tensor(1.0)
    assert float(rule.share(200)) == pytest.approx(1 / 129)


class Bright(nn.Module):
    """The class is the brightest channel, behind a BatchNorm layer that knows the statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(CLASSES)
        self.fc = nn.Linear(CLASSES, CLASSES)
        with torch.no_grad():
            self.fc.weight.copy_(4 * torch.eye(CLASSES))
            self.fc.bias.zero_()
            self.norm.running_mean.fill_(1 / CLASSES)
            self.norm.running_var.fill_(1 / CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x).mean(dim=(2, 3)))


def pictures(labels: Tensor) -> Tensor:
    noise = torch.randn(len(labels), CLASSES, 2, 2, generator=torch.Generator().manual_seed(int(labels.sum())))
    return (one_hots(labels)[:, :, None, None] + 0.2 * noise).clamp(0, 1)


def sorted_stream() -> list[Tensor]:
    return [pictures(part) for part in torch.arange(CLASSES).repeat_interleave(64).split(16)]


@pytest.mark.parametrize("method", ["norm", "t3a", "tent", "dpl_soft", "rotta"])
def test_batches_of_one_class_keep_the_source_statistics(method: str) -> None:
    model = dpl.adapt(Bright(), method, norm="auto", layout="as_is")
    for batch in sorted_stream():
        model(batch)
    assert model.last["norm"] < 0.02


def test_what_was_learnt_is_dropped_once_when_the_stream_proves_sorted() -> None:
    model, source = dpl.adapt(Bright(), "dpl_soft", lr=0.1, layout="as_is"), Bright()
    first = {name: p.detach() for name, p in source.named_parameters()}
    steps = []
    for batch in sorted_stream()[:6]:
        before = model.method.effective_batch.correlated
        model(batch)
        steps.append(max(float((p.detach() - first[name]).abs().max()) for name, p in model.model.named_parameters()))
        if model.method.effective_batch.correlated > before:
            at = len(steps) - 1
    assert steps[at - 1] > 0.15  # learnt at nearly the full rate from batches that looked mixed
    assert steps[at] < 0.05  # back at the source, then one step at a rate of n_e / n
    assert model.method.effective_batch.correlated == 1


def test_a_frozen_model_still_knows_and_measures_the_stream() -> None:
    model = dpl.adapt(Bright(), "dpl_soft", guard=True, layout="as_is")
    for batch in sorted_stream():
        model(batch)
    measured = model.method.effective_batch
    rho, batches = float(measured.rho), measured.batches
    assert rho > 0.5
    model.guard._freeze(model.state, sorted_stream()[0], "by hand")
    assert (float(measured.rho), measured.batches) == (rho, batches)
    assert float(measured.rule.rho) == rho
    model(sorted_stream()[0])
    assert model.guard.frozen
    assert measured.batches > batches


@pytest.mark.parametrize(("size", "rate"), [(64, 0.5), (32, 0.5), (8, 0.125)])
@pytest.mark.parametrize("kind", ["batch", "group"])
def test_the_learning_rate_follows_the_effective_size(kind: str, size: int, rate: float) -> None:
    model = dpl.adapt(network(kind), "tent", norm="auto", norm_shift=0.0, lr=0.5, optimizer="sgd")
    model(images(size))
    assert float(model.method.optimizer.optimizer.param_groups[0]["lr"]) == rate


def test_a_sorted_stream_lowers_the_learning_rate() -> None:
    model = dpl.adapt(Bright(), "tent", norm="auto", lr=0.5)
    for batch in sorted_stream():
        model(batch)
    assert float(model.method.optimizer.optimizer.param_groups[0]["lr"]) < 0.02


@pytest.mark.parametrize("check", [reset_is_exact, resumes_exactly, copies_are_independent, predict_changes_nothing])
@pytest.mark.parametrize("method", ["norm", "tent", "dpl_soft"])
def test_it_is_part_of_the_state(method: str, check: object) -> None:
    check(Subject(method, Bright(), sorted_stream()[2:8], {"norm": "auto"}))  # type: ignore[operator]


def test_the_second_look_sees_the_source_model() -> None:
    model, batch = dpl.adapt(network(), "tent", norm="auto", lr=0.1, layout="as_is"), images(8)
    for _ in range(3):
        model(batch)
    seen = model.method.effective_batch._source_predictions(batch, MeasuredShift())
    assert torch.allclose(seen, network()(batch).softmax(dim=1).detach())


def in_fog(labels: Tensor) -> Tensor:
    """Pictures of little contrast, with more light in the channel of the first class."""
    x = 0.5 * pictures(labels)
    x[:, 0] += 0.5
    return x


def test_the_averages_of_the_stream_are_those_of_the_formula() -> None:
    model, mean, variance = dpl.adapt(Bright(), "norm", norm="auto", layout="as_is"), 1 / CLASSES, 1 / CLASSES
    for seed in range(4):
        x = mixed(seed)
        model(x)
        own, rate = x[:, 2].double(), len(x) / (len(x) + STREAM)
        variance = (1 - rate) * (variance + rate * (float(own.mean()) - mean) ** 2) + rate * float(own.var())
        mean += rate * (float(own.mean()) - mean)
    rule = model.method.norm_rule
    assert (float(rule.means[2]), float(rule.variances[2])) == pytest.approx((mean, variance), rel=1e-5)


def test_a_mixed_stream_does_not_use_them() -> None:
    model, other = (dpl.adapt(Bright(), "norm", norm="auto", layout="as_is") for _ in range(2))
    other.method.norm_rule.means.fill_(3.0)
    assert torch.equal(model(mixed(0)), other(mixed(0)))


def test_a_shifted_stream_in_class_order_is_mended_by_its_averages() -> None:
    """By the source statistics everything is of the first class, and by a batch's own statistics anything."""
    batches = torch.arange(CLASSES).repeat_interleave(800).roll(-800).split(16)
    right = {}
    for norm in ("running", "batch", "auto"):
        model = dpl.adapt(Bright(), "norm", norm=norm, layout="as_is")
        right[norm] = [int((model(in_fog(part)).argmax(dim=1) == part).sum()) for part in batches]
    last = {norm: sum(counts[-100:]) / 1600 for norm, counts in right.items()}  # of the last class and of the first
    assert last["running"] < 0.6
    assert last["batch"] < 0.6
    assert last["auto"] > 0.9


def at_home() -> Bright:
    """A network whose BatchNorm layer knows the statistics of mixed pictures exactly."""
    model, sample = Bright(), pictures(torch.arange(CLASSES).repeat(400))
    model.norm.running_mean.copy_(sample.mean(dim=(0, 2, 3)))
    model.norm.running_var.copy_(sample.var(dim=(0, 2, 3)))
    return model


def mixed(seed: int, size: int = 16) -> Tensor:
    return pictures(torch.randint(CLASSES, (size,), generator=torch.Generator().manual_seed(seed)))


def slow_shift(layer: nn.BatchNorm2d, x: Tensor) -> float:
    """The squared shift of a layer's means in loops."""
    total = 0.0
    for channel in range(CLASSES):
        means = [float(image[channel].mean()) for image in x]
        mean = sum(means) / len(means)
        chance = sum((value - mean) ** 2 for value in means) / (len(means) - 1) / len(means)
        distance = (mean - float(layer.running_mean[channel])) ** 2 - chance
        total += distance / (float(layer.running_var[channel]) + layer.eps)
    return total / CLASSES


def test_the_shift_is_the_excess_distance_of_the_means() -> None:
    source, batch = at_home(), mixed(0) + 0.3
    model = dpl.adapt(source, "norm", norm="auto", layout="as_is")
    model(batch)
    assert float(model.method.effective_batch.shift) == pytest.approx(slow_shift(source.norm, batch), rel=1e-4)


def test_images_of_the_source_keep_its_statistics() -> None:
    source, model = at_home(), dpl.adapt(at_home(), "norm", norm="auto", layout="as_is")
    shares = []
    for seed in range(40):
        model(mixed(seed))
        shares.append(float(model.last["norm"]))
    assert sum(share == 0 for share in shares) > 25  # 16 images have a mean of their own now and then
    model(mixed(40) + 1.0)
    assert float(model.last["norm"]) == pytest.approx(0.2, rel=0.01)
    assert torch.allclose(dpl.adapt(source, "norm", norm="auto", norm_shift=1e9)(mixed(0)), source.eval()(mixed(0)))


def test_a_small_batch_moves_the_shift_by_its_size() -> None:
    model = dpl.adapt(at_home(), "norm", norm="auto", layout="as_is")
    model(mixed(0, 16))
    before = model.method.effective_batch.shift
    model(mixed(1, 4) + 1.0)
    after, alone = model.method.effective_batch.shift, dpl.adapt(at_home(), "norm", norm="auto", layout="as_is")
    alone(mixed(1, 4) + 1.0)
    assert float(after) == pytest.approx(float(before.lerp(alone.method.effective_batch.shift, 0.25)), rel=1e-4)


def test_norm_shift_zero_leaves_the_share_to_the_batch() -> None:
    model = dpl.adapt(at_home(), "norm", norm="auto", norm_shift=0.0, layout="as_is")
    model(mixed(0))
    assert float(model.last["norm"]) == pytest.approx(0.2)


def test_without_a_shift_nothing_is_learnt() -> None:
    model = dpl.adapt(at_home(), "dpl_soft", norm_shift=1e9, lr=0.1, layout="as_is")
    for seed in range(3):
        model(mixed(seed))
    for name, value in at_home().named_parameters():
        assert torch.equal(model.model.get_parameter(name), value), name


def test_early_layers_follow_the_batch_and_the_last_third_the_source() -> None:
    layers = [nn.BatchNorm1d(2) for _ in range(6)]
    control = install(nn.Sequential(*layers))
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)) + 3
    with control.using(EarlyBatch()):
        followed = [torch.allclose(layer(x).mean(dim=0), torch.zeros(2), atol=1e-5) for layer in layers]
    assert followed == [True] * 4 + [False] * 2


@pytest.mark.parametrize("size", [32, 128])
def test_one_batch_shows_that_it_has_one_class(size: int) -> None:
    made = streams.one_class("noise", size, size=size), streams.iid("noise", size, size=size)
    for batches, is_mixed in zip(made, (False, True), strict=True):
        model = dpl.adapt(streams.network(), "dpl_soft", layout="as_is")
        model(batches[0][0])
        assert (float(model.method.effective_batch.rho) == 0) == is_mixed


def test_a_stream_of_one_class_is_predicted_nearly_as_the_source_model_does() -> None:
    """The first batch already; batch statistics alone lose most of it."""
    batches = streams.one_class("noise", 320)
    found = {}
    for norm in ("running", "auto", "batch"):
        model = dpl.adapt(streams.network(), "dpl_soft", norm=norm, loss="none", layout="as_is")
        found[norm] = sum(int((model(images).argmax(dim=1) == labels).sum()) for images, labels in batches)
    assert found["auto"] >= found["running"] - 6
    assert found["batch"] < found["running"] - 100


def test_a_batch_is_looked_at_by_itself_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looks = dpl.adapt(streams.network(), "norm", norm="auto", layout="as_is"), []
    measured = model.method.effective_batch.model
    plain = measured.source_logits
    monkeypatch.setattr(measured, "source_logits", lambda x, rule: looks.append(type(rule).__name__) or plain(x, rule))
    for images_, _ in streams.iid("noise", 16 * 40, size=16):
        model(images_)
    assert looks.count("EarlyBatch") == looks.count("BatchStatistics") == 6  # after 1, 2, 4, 8, 16 and 32 batches
    before = len(looks)
    model(streams.iid("noise", 8, size=8)[0][0])
    assert looks[before:] == ["MeasuredShift"], "a batch of eight tells nothing by itself"
