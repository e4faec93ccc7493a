"""Source weights by a pattern, and a check that they were trained without what they are now tested on."""

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpl.core.errors import DataError, SettingError, did_you_mean
from dpl.data.sets import normalise_name

__all__ = ["check_training", "fill_pattern"]


def fill_pattern(pattern: str, words: Mapping[str, Any]) -> Path:
    """Return the path with every `{word}` filled in; an unknown word is an error that names the nearest."""
    for _, name, _, _ in string.Formatter().parse(pattern):
        if name is not None and name not in words:
            raise SettingError(f"weights: unknown word {{{name}}}. {did_you_mean(name, words)}")
    path = Path(pattern.format_map(dict(words)))
    if not path.is_file():
        raise DataError(f"no source weights at {path}; `dpl train` makes them, --weights names their folder")
    return path


def check_training(
    weights: Path, *, network: str, trained_on: Mapping[str, str | None], trial_seed: int | None
) -> None:
    """Compare with the `train.json` that `dpl train` leaves beside its weights; weights from elsewhere pass.

    A model trained on the target, or whose held-out images were others, would give figures that are worth nothing.
    """
    path = weights.parent / "train.json"
    if not path.is_file():
        return
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
        found = {key: settings[key] for key in ("network", "trial_seed", "dataset", "target", "source")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}); train the source model again") from error
    wanted = {"network": network, **trained_on} | ({} if trial_seed is None else {"trial_seed": trial_seed})
    for key, value in wanted.items():
        if normalise_name(str(found[key])) != normalise_name(str(value)):
            raise DataError(
                f"{weights} was trained with {key}={found[key]!r}; this experiment needs {key}={value!r}. Train it "
                "so, or change the experiment"
            )
