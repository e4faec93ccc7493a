"""Small networks for tests: every kind of normalisation and of classifier, milliseconds on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 5


class SmallNet(nn.Module):
    """Two convolutions with a given normalisation, then a linear classifier."""

    def __init__(self, norm: str = "batch", head: str = "plain") -> None:
        super().__init__()
        make = {
            "batch": nn.BatchNorm2d,
            "group": lambda width: nn.GroupNorm(4, width),
            "none": lambda width: nn.Identity(),
        }[norm]
        self.layer1 = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), make(8), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), make(16), nn.ReLU())
        self.bottleneck = (
            nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12)) if head == "bottleneck" else nn.Identity()
        )
        self.fc = nn.Linear(12 if head == "bottleneck" else 16, CLASSES)
        if head == "weight_norm":
            self.fc = nn.utils.weight_norm(self.fc, dim=0)
        if head == "parametrized":
            self.fc = nn.utils.parametrizations.weight_norm(self.fc, dim=0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(x)).mean(dim=(2, 3))
        return self.fc(self.bottleneck(x))


class SmallTokens(nn.Module):
    """A class token and patches through one transformer block: LayerNorm, tokens at the style layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class LateHead(nn.Module):
    """The classifier is registered first: only watching a pass finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, CLASSES)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.project = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.project(self.body(x).mean(dim=(2, 3)))))


class Wrapped(nn.Module):
    """A network behind a normaliser, as many users have it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.full((1, 3, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.network((x - self.mean) / 0.25)


def network(kind: str = "batch", seed: int = 0) -> nn.Module:
    """Return a small network with statistics and weights as after training, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: nn.Module = {
            "batch": SmallNet,
            "group": lambda: SmallNet("group"),
            "none": lambda: SmallNet("none"),
            "bottleneck": lambda: SmallNet(head="bottleneck"),
            "weight_norm": lambda: SmallNet(head="weight_norm"),
            "parametrized": lambda: SmallNet(head="parametrized"),
            "tokens": SmallTokens,
            "late": LateHead,
            "wrapped": lambda: Wrapped(SmallNet()),
        }[kind]()
        layers = [layer for layer in made.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        with torch.no_grad():
            for momentum in (1.0, 0.1):  # the statistics of these images, with the usual momentum afterwards
                for layer in layers:
                    layer.momentum = momentum
                made.train()(torch.rand(64, 3, 8, 8))
            head = next(m for m in made.modules() if isinstance(m, nn.Linear) and m.out_features == CLASSES)
            logits = made.eval()(torch.rand(64, 3, 8, 8))
            head.bias.sub_(logits.mean(dim=0))  # several classes are predicted, some of them with confidence
            for parameter in head.parameters():
                parameter.mul_(2 / logits.std(dim=0).mean())
    return made.eval()


def images(count: int = 8, seed: int = 0, size: int = 8) -> Tensor:
    """Random images; the same seed gives the same ones."""
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


class RecordedImages:
    """Stands for images in the memory of this process, and records where they go: a test machine may have no GPU."""

    is_cuda = False

    def __init__(self) -> None:
        self.calls: list[object] = []

    def pin_memory(self) -> "RecordedImages":
        self.calls.append("pin_memory")
        return self

    def to(self, where: torch.device | torch.dtype, non_blocking: bool = False) -> "RecordedImages":
        self.calls.append((str(where), non_blocking))
        return self
