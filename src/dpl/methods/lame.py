"""LAME: change the predictions of a batch, not the network, so that similar images get similar labels.

Boudiaf et al., Parameter-free Online Test-time Adaptation, CVPR 2022.

    minimise over Y  sum_i KL(y_i || p_i) - sum_ij w_ij <y_i, y_j>,  by  y_i <- softmax(log p_i + sum_j w_ij y_j)

w_ij is the affinity of two images of the batch, from their L2-normalised features:
    "rbf"     exp(-|f_i - f_j|² / 2 sigma²), sigma: mean distance to the `neighbours`-th nearest, itself counted
    "knn"     1 for the `neighbours` nearest of i, else 0
    "linear"  <f_i, f_j>

Updates: nothing; no state is carried, so `predict` and a step are the same. Needs: a linear classifier, and batches
in which few classes meet: it is made for streams where classes come in runs, and on a shuffled stream it can merge
classes and end far below the source. Output: log y, so that softmax gives y back (the authors return y). BatchNorm
uses the source's statistics.

Departures: sigma is kept above zero, so that one image, or equal ones, do not give NaN; "knn" never counts an image
as its own neighbour (theirs drops the nearest, which among equal images may be another).
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpl.core.numerics import full_precision
from dpl.core.settings import setting
from dpl.methods.base import Method
from dpl.methods.registry import register
from dpl.methods.settings import Settings

__all__ = ["LAME", "LAMESettings", "affinity_matrix", "laplacian_labels"]

AFFINITIES = ("rbf", "knn", "linear")
_EPS = 1e-10


@dataclass(frozen=True, kw_only=True)
class LAMESettings(Settings):
    """Settings of LAME; the default values are those of the authors' configuration."""

    affinity: Literal["rbf", "knn", "linear"] = setting("rbf", "how similarity is measured", choices=AFFINITIES)
    neighbours: int = setting(5, "how many nearest images set the width (rbf) or are linked (knn)", low=1)
    symmetric: bool = setting(False, "average the affinity with its transpose (matters for knn)")
    iterations: int = setting(100, "most fixed-point iterations for each batch", low=1)
    tolerance: float = setting(1e-8, "relative change of the energy at which the iterations stop", low=0)


@register(
    "lame",
    paper="Boudiaf et al., Parameter-free Online Test-time Adaptation, CVPR 2022",
    updates="nothing (predictions of a batch are made consistent)",
    passes="1 forward",
    needs_classifier=True,
)
class LAME(Method[LAMESettings]):
    """Laplacian adjusted maximum-likelihood estimation."""

    settings_class = LAMESettings
    predicts_jointly = True
    no_export = "it changes the predictions of a batch together, so no network that sees one image can give them"

    def step(self, images: Tensor) -> Tensor:
        """Predict; nothing is carried to the next batch."""
        self.facts = {"updated": False, "reason": "only the predictions of the batch are adjusted"}
        return self.predict(images)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Predict a batch together."""
        s, out = self.settings, self.network(images)
        affinity = affinity_matrix(out.z, s.affinity, s.neighbours)
        if s.symmetric:
            affinity = (affinity + affinity.T) / 2
        return laplacian_labels(out.logits, affinity, s.iterations, s.tolerance).to(out.logits.dtype)


@full_precision
def affinity_matrix(features: Tensor, kind: str, neighbours: int) -> Tensor:
    """Return the affinities of the rows of `features` [B, d] to each other, [B, B]."""
    features = F.normalize(features, dim=1)
    if kind == "linear":
        return features @ features.T
    # Differences instead of a matrix product: near zero the latter's rounding would be the distance.
    distance = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
    if kind == "rbf":
        width = distance.topk(min(neighbours, len(features)), dim=1, largest=False).values[:, -1].mean()
        return torch.exp(-distance.square() / (2 * width.square()).clamp(min=_EPS))
    linked = distance.fill_diagonal_(torch.inf).topk(min(neighbours, len(features) - 1), dim=1, largest=False).indices
    return torch.zeros_like(distance).scatter(1, linked, 1.0)


@full_precision
def laplacian_labels(logits: Tensor, affinity: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Return log Y after the fixed-point iterations, [B, C]; they stop when the energy does."""
    log_p = torch.log(logits.softmax(dim=1) + _EPS)
    labels, exponent = log_p.softmax(dim=1), log_p
    energy, done = logits.new_tensor(torch.inf), torch.zeros((), dtype=torch.bool, device=logits.device)
    for i in range(iterations):
        exponent = torch.where(done, exponent, torch.addmm(log_p, affinity, labels))
        log_y = exponent.log_softmax(dim=1)
        labels = log_y.exp()
        # sum_c y (log y - exponent): the difference is the same for all classes, and the labels sum up to one
        last, energy = energy, (log_y[:, 0] - exponent[:, 0]).sum()
        if i > 1:
            done = done | ((energy - last).abs() <= tolerance * last.abs())
            if done.device.type == "cpu" and bool(done):  # elsewhere a look would make the device wait
                break
    return exponent.log_softmax(dim=1)
