"""The table of docs/results/auto.md from recordings (see auto_record.py): the automatic choice beside fixed presets.

python benchmarks/auto_table.py RECORDINGS
"""

import sys
from pathlib import Path

import numpy as np
from auto_streams import DESIGN, HELD_OUT, Stream

FIXED = {"source": "blend 0.0", "norm": "blend 1.0", "dpl, PACS": "dg", "dpl, CIFAR-C": "cifar"}


def accuracies(folder: Path) -> tuple[int, dict[str, float]]:
    """Return the rows of our run and every preset's accuracy in percent over those."""
    with np.load(folder / "ours.npz", allow_pickle=False) as own:
        rows = len(own["labels"])
    found = {}
    for title, name in (FIXED | {"ours": "ours"}).items():
        if (folder / f"{name}.npz").exists():
            with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
                right = file["logits"][:rows].argmax(axis=1) == file["labels"][:rows]
            found[title] = 100 * float(right.mean())
    return rows, found


def print_part(title: str, streams: list[Stream], recordings: Path) -> None:
    """Print the streams that were run, and their mean."""
    print(f"\n{title}\n\n| stream | images | {' | '.join(FIXED)} | oracle | ours |\n|---|{'---:|' * (len(FIXED) + 3)}")
    whole = []
    for stream in streams:
        if not (recordings / stream.name / "ours.npz").exists():
            continue
        rows, found = accuracies(recordings / stream.name)
        oracle = max(value for name, value in found.items() if name != "ours")
        cells = [f"{found[name]:.1f}" if name in found else "–" for name in FIXED]
        print(f"| {stream.name} | {rows} | {' | '.join(cells)} | {oracle:.1f} | **{found['ours']:.1f}** |")
        if len(found) > len(FIXED):
            whole.append([*(found[name] for name in FIXED), oracle, found["ours"]])
    if whole:
        means = " | ".join(f"{value:.1f}" for value in np.mean(whole, axis=0))
        print(f"| mean of the {len(whole)} whole rows | | {means} |")


def main() -> None:
    recordings = Path(sys.argv[1])
    print_part("Looked at while the rules were designed:", DESIGN, recordings)
    print_part("Not looked at before the end:", HELD_OUT, recordings)


if __name__ == "__main__":
    main()
