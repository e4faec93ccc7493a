"""Parts that were made faster, beside what they replace, in turns: processor time of one thread, best of several.

python benchmarks/small_parts.py
"""

import resource
import time
from collections.abc import Callable

import torch
from speed.measure import Contender, Here
from speed.networks import SUBJECTS, Subject, make_images, make_network
from speed.usual import authors_view

import dpl
from dpl.allocator import keep_freed_memory
from dpl.objectives.moments import variance_and_mean
from dpl.surgery.rows import _by_shifts
from dpl.surgery.winograd import convolve
from dpl.views import cotta_view, seeded


def main() -> None:
    """Print a line for each comparison."""
    torch.set_num_threads(1)
    count_page_faults()
    compare_depthwise()
    compare_winograd()
    maps = torch.rand(16, 64, 56, 56).contiguous(memory_format=torch.channels_last)
    compare(
        "mean and variance of 16 x 64 x 56 x 56, ms",
        {
            "torch.var_mean": lambda: torch.var_mean(maps, dim=(0, 2, 3)),
            "ours": lambda: variance_and_mean(maps, (0, 2, 3)),
        },
    )
    images, view = torch.rand(16, 3, 224, 224), seeded(cotta_view(), 0)
    theirs = authors_view(224)
    compare(
        "CoTTA's view of 16 images of 224 pixels, ms",
        {"as its authors": lambda: theirs(images), "ours": lambda: view(images)},
    )
    subject = Subject(SUBJECTS["efficientnet_lite0"].name, 128, 16)
    batch = make_images(subject)
    net = make_network(subject, batch)
    models = {
        f"{n} images at once": dpl.adapt(net, "cotta", lr=1e-8, threshold=1.0, views=8, together=n) for n in (16, 256)
    }
    compare("CoTTA with 8 views, EfficientNet-Lite0, ms", {name: lambda m=m: m(batch) for name, m in models.items()})
    for name, model in models.items():
        runner = Here(Contender(name, lambda m=model: m, keeps_memory=False), batch, "cpu", alone=False)
        print(f"  {name}: {runner.start()['peak']:.0f} MB beyond the model")


def count_page_faults() -> None:
    """Print the page faults of a step, first with the allocator as it is, then with freed memory kept."""
    subject = SUBJECTS["resnet18"]
    images = make_images(subject)
    model = dpl.adapt(make_network(subject, images), "tent", lr=1e-8)
    for setting, prepare in (("default allocator", lambda: None), ("freed memory kept", keep_freed_memory)):
        prepare()
        faults = []
        for _ in range(4):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            model(images)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        print(f"page faults of a step of TENT, ResNet-18, 32 images, {setting}: {faults[-1]}", flush=True)


def compare_depthwise() -> None:
    """Compare the weight gradients of a depthwise kernel that is larger than its maps."""
    x, gradient, weight = (
        torch.rand(shape).contiguous(memory_format=torch.channels_last)
        for shape in ((32, 1152, 4, 4), (32, 1152, 4, 4), (1152, 1, 5, 5))
    )
    fixed = ([1, 1], [2, 2], [1, 1], False, [0, 0], 1152, [False, True, False])
    compare(
        "weight gradient of 1152 kernels of 5 x 5 on 32 maps of 4 x 4, ms",
        {
            "the library's": lambda: torch.ops.aten.convolution_backward(gradient, x, weight, None, *fixed),
            "ours": lambda: _by_shifts(gradient, x, weight, (2, 2)),
        },
    )


@torch.no_grad()
def compare_winograd() -> None:
    """Compare a 3 x 3 convolution of frozen weights."""
    x, weight = (
        torch.randn(shape).contiguous(memory_format=torch.channels_last)
        for shape in ((32, 256, 14, 14), (256, 256, 3, 3))
    )
    compare(
        "3 x 3 convolution of 32 maps of 256 x 14 x 14, ms",
        {
            "the library's": lambda: torch.nn.functional.conv2d(x, weight, padding=1),
            "ours": lambda: convolve(x, weight),
        },
    )


def compare(title: str, runs: dict[str, Callable[[], object]], rounds: int = 5) -> None:
    """Print the best time of each."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            begun = time.process_time()
            run()
            best[name] = min(best[name], 1e3 * (time.process_time() - begun))
    print(f"{title}: " + ", ".join(f"{name} {ms:.1f}" for name, ms in best.items()), flush=True)


if __name__ == "__main__":
    main()
