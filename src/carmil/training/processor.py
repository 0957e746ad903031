"""Settings of the processor and its memory that training on a CPU lives by."""

import ctypes
import sys

import torch

_MAPPED_BLOCKS, _KEPT_WHEN_FREED = -4, -1  # mallopt's M_MMAP_MAX and M_TRIM_THRESHOLD


def settle() -> None:
    """Keeps freed memory, and rounds numbers below 1e-38 to zero. Called again, it changes nothing.

    Every step of a population frees and wants the same large blocks; getting each anew from the system, page by page, takes
    longer than what is computed in them. (Without effect where the C library is not glibc.) And numbers too small for the
    ordinary form, of which attention weights and Adam's averages of squares have more and more as training goes on, are
    many times slower to compute with. Threads take this over from the one that starts them: call it early.
    """
    torch.set_flush_denormal(True)
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MAPPED_BLOCKS, 0)
            mallopt(_KEPT_WHEN_FREED, 2**31 - 1)
