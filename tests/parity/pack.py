"""Pack full traces into small files: python tests/parity/pack.py FULL_TRACES_FOLDER."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from parity.tiny import DATA, project

KEPT = ("logits", "loss", "meta")
LEFT_OUT = re.compile(r"init/(mean|var)/(?!layer4)")  # ActMAD's statistics of every place, but for the last stage


def pack_trace(path: Path) -> dict[str, np.ndarray]:
    packed = {}
    with np.load(path, allow_pickle=False) as full:
        for key in full.files:
            kind, _, name = key.partition("/")
            if LEFT_OUT.match(key):
                continue
            if kind in ("state1", "final") and full[key].dtype.kind == "f" and name != "asked":
                packed[key] = project(name, full[key])
            elif kind in (*KEPT, "init", "batch", "final", "state1"):
                packed[key] = full[key]
    return packed


def pack_source(full: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    grey = {key: full[key][:, 0] for key in ("images", "clean_test_images")}  # three equal channels
    return {
        "images": grey["images"],
        "clean_test_images": grey["clean_test_images"][:96],
        "labels": full["labels"].astype(np.uint8),
    }


def main(folder: Path) -> None:
    DATA.mkdir(exist_ok=True)
    shutil.copy(folder / "model.safetensors", DATA)
    for path in sorted(folder.glob("*.npz")):
        if path.stem == "source":
            arrays = pack_source(dict(np.load(path, allow_pickle=False)))
        elif path.stem == "stream":
            arrays = dict(np.load(path, allow_pickle=False))
        else:
            arrays = pack_trace(path)
        np.savez_compressed(DATA / path.name, **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
