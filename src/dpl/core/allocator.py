"""Keep freed memory in the process, so that the next step does not have to request it again."""

import ctypes
import sys

__all__ = ["keep_freed_memory"]

# Parameters of glibc's mallopt, by their numbers in <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1  # return the end of the heap to the system
_LARGE = 1 << 30
_LARGEST_ONCE = 1 << 25  # older versions of glibc refuse larger values for mapped blocks


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory; return whether this system supports it.

    Otherwise every large activation is mapped and zeroed again at each step, which costs a mobile network about a third
    of its time. The setting applies to the whole process, whose memory then stays at its peak: the program decides on
    it, not the library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is None:  # another system or C library
        return False
    mapped = mallopt(_MMAP_THRESHOLD, _LARGE) or mallopt(_MMAP_THRESHOLD, _LARGEST_ONCE)
    return bool(mapped and mallopt(_TRIM_THRESHOLD, _NEVER))
