"""The key of a unit names its stored results: renaming or adding a setting must not change it."""

import pytest

from dpl.bench.unit import SourceData, Unit, resolved_settings

KEYS = {  # recorded before settings were first renamed; those of dpl since one class alone moves nothing
    ("dpl", ("mixed_only", False)): "a82f19c039110e135769de5e",
    ("tent", ("lr", 1e-3), ("adapt_every", 2)): "711795301f683ec53bdd80ca",
    ("eata",): "492e7f6e0d9d79c147f13000",
    ("note",): "d71d268fed8f6c5ec8b44e5a",
    ("sar+dpl",): "65680f53d030178a54eb949b",
}


def unit(method: str, **settings: float) -> Unit:
    source = SourceData(dataset="pacs", domains=("photo",)) if method == "eata" else None
    values = resolved_settings(method, settings)
    stream = {"dataset": "pacs", "domains": ("sketch",), "batch_size": 32, "seed": 0, "weights": "0" * 64}
    return Unit(**stream, network="tf_efficientnet_lite0", method=method, settings=values, source=source)


@pytest.mark.parametrize("work", KEYS, ids=lambda work: work[0])
def test_keys_are_those_of_the_first_version(work: tuple) -> None:
    method, *settings = work
    assert unit(method, **dict(settings)).key == KEYS[work]


def test_a_setting_that_changes_the_result_changes_the_key() -> None:
    assert unit("dpl").key != unit("dpl", confidence=0.8).key
    assert unit("dpl").key != unit("dpl", mixed_only=False).key
    assert unit("dpl", norm="auto").key == unit("dpl", norm="auto", mixed_only=False).key, "auto sees it itself"
