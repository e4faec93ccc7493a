"""The conformance suite: what every method promises, checked on any network. It uses the public model alone.

from dpl.testing import check_method
check_method("my_method", network, batches)
"""

from dpl.testing.checks import CHECKS, Subject, check_method

__all__ = ["CHECKS", "Subject", "check_method"]
