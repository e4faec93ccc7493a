"""Methods written the usual way, for comparison: as in their authors' repositories, step by step, in default layout.

Each function takes a network and settings and returns a step: images in, logits out. They follow the shape of the
published implementations (networks in training mode or with emptied statistics, one forward for each view, deep
copies, loops over parameters and classes), not ours.
"""

from collections.abc import Callable
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpl.core.extras import optional
from dpl.network.split import find_classifier
from dpl.network.style_layer import find_style_layer

Step = Callable[[Tensor], Tensor]
LR = 1e-8  # too small to move the networks while they are timed


def use_batch_statistics(net: nn.Module) -> None:
    """Normalise by the batch."""
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.train()
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None


def train_affine(net: nn.Module) -> list[nn.Parameter]:
    """Train the affine parameters of normalisation layers alone, and return them."""
    net.requires_grad_(False)
    norms = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
    chosen = [p for layer in net.modules() if isinstance(layer, norms) for p in layer.parameters()]
    for parameter in chosen:
        parameter.requires_grad_(True)
    return chosen


def _entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def _features(net: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and the classifier's input."""
    kept: list[Tensor] = []
    hook = net.get_submodule(find_classifier(net)).register_forward_pre_hook(lambda _m, args: kept.append(args[0]))
    logits = net(images)
    hook.remove()
    return logits, kept[0]


def _learning(net: nn.Module, parameters: list[nn.Parameter], loss: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Step:
    optimizer = torch.optim.Adam(parameters, lr=LR)

    def step(images: Tensor) -> Tensor:
        value, logits = loss(images)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return logits.detach()

    return step


def source(net: nn.Module, _confidence: float) -> Step:
    """Plain inference."""

    @torch.no_grad()
    def step(images: Tensor) -> Tensor:
        return net(images)

    return step


def norm(net: nn.Module, _confidence: float) -> Step:
    """Batch statistics."""
    use_batch_statistics(net)
    return source(net, 0)


def tent(net: nn.Module, _confidence: float) -> Step:
    """Entropy through affine parameters."""
    parameters = train_affine(net)
    use_batch_statistics(net)

    def loss(images: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(images)
        return _entropy(logits).mean(), logits

    return _learning(net, parameters, loss)


def pl(net: nn.Module, confidence: float) -> Step:
    """Cross-entropy of confident pseudo-labels through everything."""

    def loss(images: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(images)
        top, labels = logits.softmax(1).max(1)
        kept = top > confidence
        return F.cross_entropy(logits[kept], labels[kept]), logits

    return _learning(net, list(net.parameters()), loss)


def shot_im(net: nn.Module, _confidence: float) -> Step:
    """Information maximisation through the features."""
    head = find_classifier(net)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.startswith(head))

    def loss(images: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(images)
        mean = logits.softmax(1).mean(0)
        return _entropy(logits).mean() + (mean * (mean + 1e-6).log()).sum(), logits

    return _learning(net, [p for p in net.parameters() if p.requires_grad], loss)


def eta(net: nn.Module, _confidence: float) -> Step:
    """Entropy of reliable samples, weighted."""
    parameters = train_affine(net)
    use_batch_statistics(net)

    def loss(images: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(images)
        entropies = _entropy(logits)
        kept = entropies[entropies < 3.0]
        return (kept * torch.exp(1.0 - kept.detach())).mean(), logits

    return _learning(net, parameters, loss)


def cpl(net: nn.Module, _confidence: float) -> Step:
    """Conjugate pseudo-labels, a linear system for each sample, and the answer of a second pass."""
    parameters = train_affine(net)
    use_batch_statistics(net)

    def loss(images: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(images)
        p, eye = logits.softmax(1), torch.eye(logits.shape[1])
        labels = torch.stack([torch.linalg.solve(eye, row) for row in p])  # epsilon is zero
        return -(labels * logits.log_softmax(1)).sum(1).mean(), logits

    learn = _learning(net, parameters, loss)

    def step(images: Tensor) -> Tensor:
        learn(images)
        with torch.no_grad():
            return net(images)

    return step


def sar(net: nn.Module, _confidence: float) -> Step:
    """Sharpness-aware entropy: two forward and two backward passes."""
    parameters = train_affine(net)
    use_batch_statistics(net)
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=0.9)

    def step(images: Tensor) -> Tensor:
        logits = net(images)
        _entropy(logits).mean().backward()
        size = torch.norm(torch.stack([p.grad.norm(2) for p in parameters if p.grad is not None]))
        moved = []
        for parameter in parameters:
            if parameter.grad is not None:
                moved.append((parameter, parameter.grad * (0.05 / (size + 1e-12))))
                parameter.data.add_(moved[-1][1])
        optimizer.zero_grad()
        _entropy(net(images)).mean().backward()
        for parameter, change in moved:
            parameter.data.sub_(change)
        optimizer.step()
        optimizer.zero_grad()
        return logits.detach()

    return step


def t3a(net: nn.Module, _confidence: float) -> Step:
    """Supports for each class, filtered by entropy in a loop over the classes."""
    head = net.get_submodule(find_classifier(net))
    supports = head.weight.data.clone()
    classes = len(supports)
    labels = F.one_hot(torch.arange(classes), classes).float()
    entropies = _entropy(head(supports)).detach()

    @torch.no_grad()
    def step(images: Tensor) -> Tensor:
        nonlocal supports, labels, entropies
        logits, z = _features(net, images)
        supports = torch.cat([supports, z])
        labels = torch.cat([labels, F.one_hot(logits.argmax(1), classes).float()])
        entropies = torch.cat([entropies, _entropy(logits)])
        names, rows = labels.argmax(1), []
        for label in range(classes):
            own = (names == label).nonzero().squeeze(1)
            rows.append(own[entropies[own].argsort()][:20])
        kept = torch.cat(rows)
        supports, labels, entropies = supports[kept], labels[kept], entropies[kept]
        weights = F.normalize(supports, dim=1).T @ labels
        return z @ F.normalize(weights, dim=0)

    return step


def lame(net: nn.Module, _confidence: float) -> Step:
    """Laplacian correction of the predictions."""

    @torch.no_grad()
    def step(images: Tensor) -> Tensor:
        logits, z = _features(net, images)
        unary = -(logits.softmax(1) + 1e-10).log()
        distance = torch.cdist(F.normalize(z, dim=1), F.normalize(z, dim=1))
        nearest = distance.topk(min(6, len(z)), largest=False).indices[:, 1:]
        kernel = torch.zeros(len(z), len(z)).scatter_(1, nearest, 1.0)
        y, energy = (-unary).softmax(1), float("inf")
        for _ in range(100):
            pairwise = kernel @ y
            y = (-unary + pairwise).softmax(1)
            new = float((unary * y - pairwise * y + y * y.clamp(1e-20).log()).sum())
            if abs(new - energy) <= 1e-8 * abs(energy):
                break
            energy = new
        return y

    return step


def authors_view(size: int) -> Callable[[Tensor], Tensor]:
    """The random view of CoTTA's code: jitter, then an affine map and a blur of the image padded to twice its size."""
    optional("torchvision", "bench")
    from torchvision.transforms import v2

    jitter = v2.ColorJitter(brightness=(0.6, 1.4), contrast=(0.7, 1.3), saturation=(0.5, 1.5), hue=(-0.06, 0.06))
    place = v2.Compose(
        [
            v2.Pad(size // 2, padding_mode="edge"),
            v2.RandomAffine(15, (1 / 16, 1 / 16), (0.9, 1.1), interpolation=v2.InterpolationMode.BILINEAR),
            v2.GaussianBlur(5, (0.001, 0.5)),
            v2.CenterCrop(size),
            v2.RandomHorizontalFlip(),
        ]
    )

    def view(images: Tensor) -> Tensor:
        gamma = float(torch.empty(()).uniform_(0.7, 1.3))
        jittered = jitter(images.clamp(0, 1)).clamp(1e-8, 1) ** gamma
        moved = place(jittered)
        return (moved + 0.005 * torch.randn_like(moved)).clamp(0, 1)

    return view


def cotta(net: nn.Module, _confidence: float) -> Step:
    """A view-averaged teacher, an anchor, loops over parameters to average and to restore."""
    teacher, anchor, initial = deepcopy(net), deepcopy(net), deepcopy(net.state_dict())
    for each in (net, teacher, anchor):
        use_batch_statistics(each)
    optimizer = torch.optim.Adam(net.parameters(), lr=LR)

    def step(images: Tensor) -> Tensor:
        logits = net(images)
        with torch.no_grad():
            sure = anchor(images).softmax(1).max(1)[0].mean()
            target = teacher(images)
            if sure < 1.1:  # views are averaged
                view = authors_view(images.shape[-1])
                target = torch.stack([teacher(view(images)) for _ in range(32)]).mean(0)
        loss = -(target.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for own, other in zip(teacher.parameters(), net.parameters(), strict=True):
            own.data[:] = 0.999 * own.data + 0.001 * other.data
        for name, parameter in net.named_parameters():
            mask = (torch.rand(parameter.shape) < 0.01).float()
            parameter.data = initial[name] * mask + parameter.data * (1 - mask)
        return target

    return step


def _star_by_class(z: Tensor, w: Tensor, labels: Tensor, tau: float = 0.1) -> Tensor:
    """Eq. 4 with a loop over the classes that are present."""
    cosine = F.normalize(w, dim=1) @ F.normalize(z, dim=1).T / tau
    total, present = torch.zeros(()), 0
    for k in labels.unique():
        own, others = cosine[k][labels == k], cosine[k][labels != k]
        if len(others):
            present += 1
            total = total + torch.cat([-own, others]).logsumexp(0)
    return total / max(present, 1)


def dpl(net: nn.Module, confidence: float, styled: bool = False) -> Step:
    """DPL (with `styled`, DPL-dagger by a second pass over the confident images)."""
    head = net.get_submodule(find_classifier(net))
    memory = head.weight.detach().clone()
    layer = net.get_submodule(find_style_layer(net))

    def restyled(images: Tensor, maps: Tensor, kept: Tensor) -> Tensor:
        donors = (~kept).nonzero().squeeze(1)
        lender = maps[donors[torch.randint(len(donors), (int(kept.sum()),))]]
        dims = (2, 3) if maps.ndim == 4 else (1,)

        def change(_module: nn.Module, _inputs: object, own: Tensor) -> Tensor:
            spread, mine = (maps.var(dims, keepdim=True).add(1e-6).sqrt() for maps in (lender, own))
            scale = spread / mine
            return scale * (own - own.mean(dims, keepdim=True)) + lender.mean(dims, keepdim=True)

        hook = layer.register_forward_hook(change)
        z = _features(net, images[kept])[1]
        hook.remove()
        return z

    def loss(images: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        hook = layer.register_forward_hook(lambda _m, _i, out: seen.append(out.detach()))
        logits, z = _features(net, images)
        hook.remove()
        top, labels = logits.softmax(1).max(1)
        kept = top > confidence
        features, classes = z[kept], labels[kept]
        for k in classes.unique():
            memory[k] = 0.9 * memory[k] + 0.1 * features[classes == k].mean(0).detach()
        if styled and bool((~kept).any()):
            features = torch.cat([features, restyled(images, seen[0], kept)])
            classes = torch.cat([classes, classes])
        cosine = F.normalize(head.weight, dim=1) @ F.normalize(memory, dim=1).T / 0.1
        regulariser = F.cross_entropy(cosine, torch.arange(len(memory)))
        return _star_by_class(features, head.weight, classes) + regulariser, logits

    return _learning(net, list(net.parameters()), loss)


def dpl_dagger(net: nn.Module, confidence: float) -> Step:
    """DPL with the second pass of style transfer."""
    return dpl(net, confidence, styled=True)


USUAL: dict[str, Callable[[nn.Module, float], Step]] = {
    f.__name__: f for f in (source, norm, tent, pl, shot_im, eta, cpl, sar, t3a, lame, cotta, dpl, dpl_dagger)
}
