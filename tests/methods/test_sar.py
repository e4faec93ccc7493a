import torch

import dpl
from parity.tiny import clean_test_images, stream, tiny_network

GREY = torch.full((4, 3, 16, 16), 0.5, dtype=torch.float64)


def weights(adaptive: dpl.AdaptiveModel) -> list[torch.Tensor]:
    return [value.detach().clone() for value in adaptive.method.trainable.values()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_top_does_not_train() -> None:
    adaptive = dpl.adapt(tiny_network(), "sar", lr=0.02)
    assert not any("layer4" in name for name in adaptive.trainable)
    assert any("layer3" in name for name in adaptive.trainable)
    assert not any(p.requires_grad for p in adaptive.model.layer4.parameters())
    everything = dpl.adapt(tiny_network(), "sar", frozen_modules=())
    assert any("layer4" in name for name in everything.trainable)


def test_recovery_returns_to_the_source_and_forgets_momentum_and_average() -> None:
    adaptive = dpl.adapt(tiny_network(), "sar", lr=0.02)
    origin = adaptive.state_dict()
    adaptive(clean_test_images()[:32])
    assert adaptive.last.updated
    assert adaptive.last.recovered
    # statistics of recent batches are for an export; they describe the stream, not what was learned
    after = {name: value for name, value in adaptive.state_dict().items() if "target_statistics" not in name}
    assert after.keys() == {name for name in origin if "target_statistics" not in name}
    assert all(torch.equal(value, origin[name]) for name, value in after.items())


def test_recovery_as_the_authors_do_it_keeps_the_momentum() -> None:
    for authors, keeps_average in (("rmt", False), ("official", True)):
        adaptive = dpl.adapt(tiny_network(), "sar", lr=0.02, authors=authors)
        start = weights(adaptive)
        adaptive(clean_test_images()[:32])
        assert adaptive.last.recovered
        assert same(weights(adaptive), start)
        assert any(value.abs().sum() > 0 for value in adaptive.method.optimizer.state().values())
        assert (adaptive.method.average is not None) == keeps_average


def test_recovery_can_be_switched_off() -> None:
    adaptive = dpl.adapt(tiny_network(), "sar", recovery=0.0)
    start = weights(adaptive)
    adaptive(clean_test_images()[:32])
    assert not adaptive.last.recovered
    assert not same(weights(adaptive), start)


def test_a_batch_without_reliable_samples_moves_only_the_authors_weights() -> None:
    for authors, moves in (("no", False), ("rmt", True)):
        adaptive = dpl.adapt(tiny_network(), "sar", lr=0.02, authors=authors)
        adaptive(stream()[0])
        before, average = weights(adaptive), adaptive.method.average
        adaptive(GREY)
        assert adaptive.last.reliable == 0
        assert adaptive.last.updated == moves
        assert same(weights(adaptive), before) != moves
        assert torch.equal(adaptive.method.average, average)


def test_an_added_memory_learns_once_from_a_batch() -> None:
    sar, tent = dpl.adapt(tiny_network(), "sar+dpl", rho=0.0), dpl.adapt(tiny_network(), "tent+dpl")
    start = sar.method.dpl.memory.clone()
    sar(stream()[0])
    tent(stream()[0])
    assert not torch.equal(sar.method.dpl.memory, start)
    torch.testing.assert_close(sar.method.dpl.memory, tent.method.dpl.memory, rtol=1e-12, atol=1e-14)


def test_an_added_memory_returns_with_the_source() -> None:
    adaptive = dpl.adapt(tiny_network(), "sar+dpl", lr=0.02)
    start = adaptive.method.dpl.memory.clone()
    adaptive(clean_test_images()[:32])
    assert adaptive.last.recovered
    assert torch.equal(adaptive.method.dpl.memory, start)
