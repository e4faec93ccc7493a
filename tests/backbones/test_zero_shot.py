"""A zero-shot classifier scores by scaled cosine similarity and adapts like any other network."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpl
from dpl.core.errors import ModelError, SettingError

SCALE = 50.0


class Encoder(nn.Module):
    """A small image encoder with BatchNorm."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.projection = nn.Linear(8, width)

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(self.body(images).flatten(1))


def made() -> tuple[Encoder, Tensor, Tensor]:
    """Return an encoder, texts that describe the first five images, so that several classes occur, and images."""
    torch.manual_seed(0)
    encoder, images = Encoder().eval(), torch.rand(16, 3, 8, 8) * torch.rand(16, 3, 1, 1)
    return encoder, encoder(images[:5]).detach(), images


def cosines(encoder: nn.Module, texts: Tensor, images: Tensor) -> Tensor:
    with torch.no_grad():
        return F.normalize(encoder(images), dim=1) @ F.normalize(texts, dim=1).T


def test_logits_are_scaled_cosines():
    encoder, texts, images = made()
    logits = dpl.zero_shot(encoder, texts, scale=SCALE)(images)
    torch.testing.assert_close(logits, SCALE * cosines(encoder, texts, images), rtol=1e-5, atol=1e-5)


def test_prototypes_are_the_text_embeddings():
    encoder, texts, images = made()
    model = dpl.adapt(dpl.zero_shot(encoder, texts, scale=SCALE), "dpl")
    model.predict(images)
    directions = F.normalize(model.network.prototypes.detach(), dim=1)
    torch.testing.assert_close(directions, F.normalize(texts, dim=1))


@pytest.mark.parametrize("method", ["dpl", "dpl_star", "tent", "t3a", "shot_im", "pl"])
def test_methods_adapt_it_and_reset_is_exact(method):
    encoder, texts, images = made()
    settings = {"confidence": 0.0} if method in ("dpl", "dpl_star", "pl") else {}
    model = dpl.adapt(dpl.zero_shot(encoder, texts, scale=SCALE), method, **settings)
    before = model.predict(images)
    model(images)
    assert model.last["updated"]
    model.reset()
    assert model.predict(images).equal(before)


def test_network_has_the_type_of_its_encoder():
    encoder, texts, images = made()
    network = dpl.zero_shot(encoder.double(), texts)
    assert network(images.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("texts", "scale", "message"),
    [
        (torch.zeros(3, 12), 100.0, "zero or not finite"),
        (torch.ones(12), 100.0, "expected a tensor"),
        (torch.ones(3, 12), 0.0, "scale=0.0"),
        (torch.ones(3, 12), float("nan"), "scale=nan"),
    ],
)
def test_wrong_arguments_are_refused(texts, scale, message):
    with pytest.raises(SettingError, match=message):
        dpl.zero_shot(Encoder(), texts, scale=scale)


def test_an_encoder_of_another_width_is_refused():
    with pytest.raises(ModelError, match=r"expected \[batch, 7\]"):
        dpl.zero_shot(Encoder(), torch.ones(3, 7))(torch.rand(2, 3, 8, 8))


def test_open_clip_model_is_taken_without_its_text_encoder():
    pytest.importorskip("torchvision")
    open_clip = pytest.importorskip("open_clip", reason="open_clip_torch is not installed")
    torch.manual_seed(0)
    vision = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}
    text = {"context_length": 8, "vocab_size": 32, "width": 16, "heads": 2, "layers": 1}
    clip = open_clip.CLIP(embed_dim=12, vision_cfg=vision, text_cfg=text).eval()
    images = torch.rand(8, 3, 16, 16)
    texts = clip.encode_image(images[:5]).detach()
    network = dpl.zero_shot(clip, texts, scale=SCALE)
    expected = SCALE * F.normalize(clip.encode_image(images), dim=1) @ F.normalize(texts, dim=1).T
    torch.testing.assert_close(network(images), expected, rtol=1e-4, atol=1e-4)
    assert not any("text" in name or "token" in name for name, _ in network.named_parameters())
    model = dpl.adapt(network, "dpl", confidence=0.0)
    model(images)
    assert model.last["updated"]


def test_transformers_model_is_taken():
    pytest.importorskip("torchvision")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config=sizes | {"vocab_size": 32, "max_position_embeddings": 8},
        vision_config=sizes | {"image_size": 16, "patch_size": 8},
        projection_dim=12,
    )
    clip, images = transformers.CLIPModel(config).eval(), torch.rand(8, 3, 16, 16)
    with torch.no_grad():
        embedded = clip.visual_projection(clip.vision_model(pixel_values=images).pooler_output)
    texts = embedded[:5]
    network = dpl.zero_shot(clip, texts, scale=SCALE)
    expected = SCALE * F.normalize(embedded, dim=1) @ F.normalize(texts, dim=1).T
    torch.testing.assert_close(network(images), expected, rtol=1e-4, atol=1e-4)
    model = dpl.adapt(network, "dpl", confidence=0.0)
    model(images)
    assert model.last["updated"]
