"""Memory that is used again and again."""

import ctypes
import sys

_MAPPED_BLOCKS, _KEPT_WHEN_FREED = -4, -1  # mallopt's M_MMAP_MAX and M_TRIM_THRESHOLD


def keep_freed_memory() -> None:
    """Asks the C library to keep what is freed instead of giving it back.

    Every step of a population frees and wants the same large blocks; getting each anew from the system, page by page, takes
    longer than what is computed in them. Without effect where the C library is not glibc.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MAPPED_BLOCKS, 0)
            mallopt(_KEPT_WHEN_FREED, 2**31 - 1)
