"""The DomainNet-126 source network of AdaContrast (Chen et al., 2022), by the parameter names of its files."""

from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from dpl.core.extras import optional

__all__ = ["BottleneckResNet50"]


class BottleneckResNet50(nn.Module):
    """ResNet-50, a bottleneck 2048 -> 256 with BN, and a classifier whose weight is direction times length."""

    def __init__(self, num_classes: int, *, features: int = 256) -> None:
        super().__init__()
        resnet: nn.Module = optional("torchvision", "bench").models.resnet50(weights=None)
        resnet.fc = nn.Linear(2048, features)
        self.encoder = nn.Sequential(resnet, nn.BatchNorm1d(features))
        self.fc = weight_norm(nn.Linear(features, num_classes), dim=0)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, C] for images [B, 3, H, W]."""
        logits: Tensor = self.fc(self.encoder(images))  # features [B, 256]
        return logits
