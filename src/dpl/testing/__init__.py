"""The conformance suite: what every method promises, checked on any network. It uses the public model alone.

    from dpl.testing import check_method
    check_method("my_method", network, batches)

`checks` has the promises on a CPU, `devices` those on any other device, proven without one.
"""

from dpl.testing.checks import (
    CHECKS,
    Subject,
    caller_is_untouched,
    check_method,
    continue_from,
    copies_are_independent,
    last_is_filled,
    predict_changes_nothing,
    reset_is_exact,
    resumes_exactly,
    rolls_back,
    selected_samples_suffice,
    stays_finite,
)
from dpl.testing.devices import DeviceRun, HostReads, run_on_meta

__all__ = [
    "CHECKS", "DeviceRun", "HostReads", "Subject", "caller_is_untouched", "check_method", "continue_from",
    "copies_are_independent", "last_is_filled", "predict_changes_nothing", "reset_is_exact", "resumes_exactly",
    "rolls_back", "run_on_meta", "selected_samples_suffice", "stays_finite",
]  # fmt: skip
