"""The conformance suite: what every method promises, checked on any network. It uses the public model alone.

    from dpl.testing import check_method
    check_method("my_method", network, batches)

`checks` has the promises on a CPU, `operations` those on any other device and of a call that fails.
"""

from dpl.testing.checks import CHECKS, Subject, check_method
from dpl.testing.operations import HostReads, run_on_meta

__all__ = ["CHECKS", "HostReads", "Subject", "check_method", "run_on_meta"]
