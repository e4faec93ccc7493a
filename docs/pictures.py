"""Draw the pictures of the documentation: python docs/pictures.py [FOLDER] [--png].

Pictures of losses and memories are computed with the package's own functions, not sketched.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the tools lie beside this file, not in the package
from tools.canvas import write
from tools.losses import doubtful_sample, pull_and_push, rows_and_columns
from tools.scenes import memory, one_step, style
from tools.soft import soft_dpl

PICTURES: dict[str, Callable[[], tuple[Any, str]]] = {
    "one-step": one_step,
    "rows-and-columns": rows_and_columns,
    "pull-and-push": pull_and_push,
    "doubtful-sample": doubtful_sample,
    "memory": memory,
    "style": style,
    "soft-dpl": soft_dpl,
}


def draw(folder: Path, suffix: str = ".svg") -> list[Path]:
    """Draw every picture into a folder and return the files."""
    files = []
    for name, picture in PICTURES.items():
        figure, alt = picture()
        files.append(folder / f"{name}{suffix}")
        write(figure, files[-1], alt)
    return files


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "images")
    parser.add_argument("--png", action="store_true", help="PNG files, to look at")
    args = parser.parse_args()
    for path in draw(args.folder, ".png" if args.png else ".svg"):
        print(path)


if __name__ == "__main__":
    main()
