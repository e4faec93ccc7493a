"""Memory that a step frees is kept for the next one, not handed back to the system and fetched again."""

import ctypes
import sys

__all__ = ["keep_freed_memory"]

# Parameters of glibc's mallopt, by their numbers in <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1  # hand the end of the heap back
_LARGE = 1 << 30
_LARGEST_ONCE = 1 << 25  # older versions of glibc refuse more for blocks of their own mapping


def keep_freed_memory() -> bool:
    """Let glibc hand no freed memory back; return whether this system can be told so.

    Every large activation is otherwise mapped and zeroed anew at each step, which costs a mobile network about a third
    of its time. It holds for the whole process, whose memory then stays at its peak, so a program decides on it and a
    library does not.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    mapped = mallopt(_MMAP_THRESHOLD, _LARGE) or mallopt(_MMAP_THRESHOLD, _LARGEST_ONCE)
    return bool(mapped and mallopt(_TRIM_THRESHOLD, _NEVER))
