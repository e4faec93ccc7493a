"""FOA's own logic: no weight moves, other transformers, what it refuses; its evolution strategy."""

import pytest
import torch

import dpl
from dpl.core.errors import MissingExtraError, ModelError, SettingError
from dpl.core.extras import optional
from dpl.methods.parts.cma_es import CMAES
from nets import images, network

SOURCE = [(images(8, seed=i), torch.zeros(8, dtype=torch.int64)) for i in range(3)]


def test_the_strategy_finds_the_minimum_of_a_long_ellipsoid() -> None:
    strategy, generator = CMAES(10, 12, 0.5, torch.device("cpu")), torch.Generator().manual_seed(0)
    scales, target = torch.logspace(0, 2, 10, dtype=torch.float64), torch.arange(10, dtype=torch.float64) / 10
    for _ in range(250):
        tried = strategy.ask(torch.randn(12, 10, generator=generator, dtype=torch.float64))
        strategy.tell(tried, (scales * (tried - target) ** 2).sum(dim=1))
    assert (strategy.mean - target).abs().max() < 1e-4


def test_a_foreign_candidate_far_away_is_shortened() -> None:
    strategy = CMAES(4, 6, 1.0, torch.device("cpu"))
    tried = strategy.ask(torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    far = torch.full((1, 4), 1e6, dtype=torch.float64)
    strategy.tell(torch.cat([tried, far]), torch.tensor([1.0, 2, 3, 4, 5, 6, 0]), foreign=1)
    assert strategy.mean.abs().max() < 10


def test_no_weight_of_the_network_moves_and_the_prompts_do() -> None:
    model = dpl.adapt(network("tokens"), "foa", source=SOURCE, population=4)
    before, prompt = {k: v.clone() for k, v in model.model.state_dict().items()}, model.method.prompt.clone()
    for seed in range(3):
        model(images(8, seed=seed))
    assert all(torch.equal(value, before[key]) for key, value in model.model.state_dict().items())
    assert not torch.equal(model.method.prompt, prompt)
    assert model.last.updated


def test_prompts_of_zeros_are_no_prompts_for_the_shift_alone() -> None:
    model = dpl.adapt(network("tokens"), "foa", source=SOURCE, prompts=0)
    batch = images(8)
    assert torch.allclose(model(batch), network("tokens")(batch), atol=1e-5)
    assert not model.last.updated
    assert not torch.allclose(model(images(8, seed=1)), network("tokens")(images(8, seed=1)), atol=1e-5)


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_a_network_that_is_no_transformer_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match="class token"):
        dpl.adapt(network(kind), "foa", source=SOURCE)


def test_without_source_images_it_names_methods_that_need_none() -> None:
    with pytest.raises(SettingError, match="'lame'"):
        dpl.adapt(network("tokens"), "foa")


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_transformers_of_other_libraries_take_prompts(library: str) -> None:
    try:
        module = optional(library, "bench")
    except (MissingExtraError, ImportError) as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    if library == "timm":
        vit = module.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=5, depth=2)
    else:
        vit = module.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5)
        torch.nn.init.normal_(vit.heads.head.weight)
    source = [(images(4, seed=9, size=32), torch.zeros(4, dtype=torch.int64))]
    model = dpl.adapt(vit.eval(), "foa", source=source, population=4)
    first, second = model(images(4, size=32)), model(images(4, size=32))
    assert first.shape == (4, 5)
    assert not torch.equal(first, second)
