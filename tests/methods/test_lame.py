"""LAME against a slow loop, its affinities, and the stream it is made for."""

import numpy as np
import pytest
import torch
from torch import Tensor

import dpl
from dpl.methods.lame import affinity_matrix, laplacian_labels
from parity.tiny import stream, tiny_network, trace


def slow_affinity(features: Tensor, kind: str, k: int) -> Tensor:
    rows = [row / row.norm() for row in features]
    distance = [[(a - b).norm().item() for b in rows] for a in rows]
    matrix = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    width = float(np.mean([sorted(line)[k - 1] for line in distance]))
    for i, line in enumerate(distance):
        nearest = sorted((d, j) for j, d in enumerate(line) if j != i)[:k]
        for j, d in enumerate(line):
            matrix[i, j] = {
                "rbf": np.exp(-(d**2) / (2 * width**2)),
                "knn": float(j in [other for _, other in nearest]),
                "linear": (rows[i] @ rows[j]).item(),
            }[kind]
    return matrix


def slow_labels(logits: Tensor, affinity: Tensor, iterations: int) -> Tensor:
    p = logits.softmax(1)
    unary = [(-(row + 1e-10).log()) for row in p]
    y = [(-u).softmax(0) for u in unary]
    last = float("inf")
    for step in range(iterations):
        pull = [sum(w * other for w, other in zip(line, y, strict=True)) for line in affinity]
        y = [(-u + m).softmax(0) for u, m in zip(unary, pull, strict=True)]
        energy = sum((a * u - a * m + a * a.log()).sum().item() for a, u, m in zip(y, unary, pull, strict=True))
        if step > 1 and abs(energy - last) <= 1e-8 * abs(last):
            break
        last = energy
    return torch.stack(y)


@pytest.mark.parametrize("kind", ["rbf", "knn", "linear"])
@pytest.mark.parametrize("iterations", [3, 100])
def test_equals_the_slow_loop(kind: str, iterations: int) -> None:
    generator = torch.Generator().manual_seed(0)
    features, logits = (torch.randn(9, n, generator=generator, dtype=torch.float64) for n in (6, 4))
    affinity = affinity_matrix(features, kind, 3)
    assert torch.allclose(affinity, slow_affinity(features, kind, 3), rtol=0, atol=1e-9)
    ours = laplacian_labels(logits, affinity, iterations, 1e-8)
    assert torch.allclose(ours.exp(), slow_labels(logits, affinity, iterations), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["rbf", "knn", "linear"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_images_and_small_batches_stay_finite(kind: str, count: int) -> None:
    model = dpl.adapt(tiny_network(torch.float32), "lame", affinity=kind)
    image = stream(torch.float32)[0][:1]
    assert model(image.expand(count, -1, -1, -1)).isfinite().all()
    assert model(torch.zeros_like(image).expand(count, -1, -1, -1)).isfinite().all()


def test_symmetric_averages_both_directions() -> None:
    out = dpl.adapt(tiny_network(), "lame").method.network(stream()[0])
    affinity = affinity_matrix(out.z, "knn", 5).detach()
    model = dpl.adapt(tiny_network(), "lame", affinity="knn", symmetric=True)
    wanted = laplacian_labels(out.logits.detach(), (affinity + affinity.T) / 2, 100, 1e-8)
    assert torch.allclose(model(stream()[0]), wanted)
    assert not torch.equal(affinity, affinity.T)


def test_an_image_is_never_its_own_neighbour() -> None:
    features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert affinity_matrix(features, "knn", 1).tolist()[:2] == [[0, 1, 0], [1, 0, 0]]


def test_helps_where_classes_come_in_runs() -> None:
    images = torch.cat(stream(torch.float32))
    labels = torch.from_numpy(trace("stream")["labels"]).long().flatten()
    runs = labels.argsort(stable=True).split(32)
    accuracy = {}
    for name in ("source", "lame"):
        model = dpl.adapt(tiny_network(torch.float32), name)
        accuracy[name] = np.mean([(model(images[run]).argmax(1) == labels[run]).float().mean().item() for run in runs])
    assert accuracy["lame"] > accuracy["source"] + 0.05


def test_nothing_is_carried_over() -> None:
    model = dpl.adapt(tiny_network(), "lame")
    first = model(stream()[0])
    model(stream()[1])
    assert torch.equal(model(stream()[0]), first)
    assert not model.last.updated
