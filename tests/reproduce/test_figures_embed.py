"""Measures of features and styles, computed before t-SNE bends the distances."""

import numpy as np
import pytest

from dpl.reproduce.embeddings import nearest_distance, neighbour_accuracy, on_one_scale, subset, tsne


def test_neighbours_vote_for_the_class():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 20)
    apart = (np.eye(3)[labels] + rng.normal(0, 0.05, (60, 3))).astype(np.float32)
    assert neighbour_accuracy(apart, labels) == 100
    mixed = rng.normal(size=(600, 3)).astype(np.float32)
    assert neighbour_accuracy(mixed, np.repeat(np.arange(3), 200)) == pytest.approx(33, abs=8)


def test_neighbours_by_hand():
    points = np.array([[1, 0], [1, 0.1], [0, 1]], dtype=np.float32)
    assert neighbour_accuracy(points, np.array([0, 0, 1])) == pytest.approx(100 / 3 * 2)


def test_nearest_distance_is_the_mean_over_five():
    rng = np.random.default_rng(1)
    points, others = rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=(9, 3)).astype(np.float32)
    expected = [np.sort(np.linalg.norm(others - point, axis=1))[:5].mean() for point in points]
    assert nearest_distance(points, others) == pytest.approx(expected, rel=1e-4)


def test_styles_are_put_on_one_scale_and_a_constant_dimension_stays_zero():
    groups = {"photo": [[1, 5]], "confident": [[3, 5]], "unconfident": np.zeros((0, 2))}
    scaled = on_one_scale({name: np.array(group, np.float32) for name, group in groups.items()})
    assert {name: group.tolist() for name, group in scaled.items()} == {
        "photo": [[-1, 0]], "confident": [[1, 0]], "unconfident": []
    }  # fmt: skip


def test_the_same_images_are_drawn_for_every_method():
    assert subset(5, 10).tolist() == [0, 1, 2, 3, 4]
    assert subset(100, 10).tolist() == subset(100, 10).tolist()
    assert len(set(subset(100, 10).tolist())) == 10


def test_tsne_keeps_clusters_together():
    rng = np.random.default_rng(2)
    labels = np.repeat(np.arange(2), 30)
    points = (np.eye(2)[labels] @ rng.normal(0, 9, (2, 80)) + rng.normal(size=(60, 80))).astype(np.float32)
    placed = tsne(points)
    assert placed.shape == (60, 2)
    assert neighbour_accuracy((placed - placed.mean(0)).astype(np.float32), labels) > 95
