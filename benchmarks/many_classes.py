"""Cost of the DPL loss for 21,843 classes against one ResNet-50 step of the same batch, in one process."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from dpl.methods.prototypes import DPLTerm, MemorySettings

from dpl.core.extras import optional
from dpl.core.random import Random

CLASSES, FEATURES, BATCH = 21_843, 2_048, 64


def best_of(count: int, run: Callable[[], None]) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    prototypes = torch.randn(CLASSES, FEATURES, requires_grad=True)
    term = DPLTerm(SimpleNamespace(prototypes=prototypes), MemorySettings(), Random(0, torch.device("cpu")))
    features = torch.randn(BATCH, FEATURES, requires_grad=True)
    labels = torch.randint(CLASSES, (BATCH,))
    loss = best_of(5, lambda: term.objective(features, labels, BATCH).value.backward())
    network = optional("timm", "bench").create_model("resnet50", num_classes=10)
    images = torch.rand(8, 3, 224, 224)
    step = best_of(3, lambda: network(images).sum().backward()) * BATCH / len(images)
    print(f"DPL loss and gradient, {CLASSES} classes, batch {BATCH}: {loss:.2f} s")
    print(f"ResNet-50 forward and backward, batch {BATCH} (8 at a time): {step:.2f} s; ratio {loss / step:.3f}")


if __name__ == "__main__":
    main()
