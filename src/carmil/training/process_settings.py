"""Process-wide settings that make training faster."""

import ctypes
import sys

import torch

_MAPPED_BLOCKS, _KEPT_WHEN_FREED = -4, -1  # mallopt's M_MMAP_MAX and M_TRIM_THRESHOLD


def configure_process() -> None:
    """Keep freed memory, flush denormal numbers to zero, and attend without cuDNN. Further calls have no effect.

    Every step of a population frees and allocates the same large blocks; getting them from the system page by page
    takes longer than the computation with them. (No effect unless the C library is glibc.) Computing with denormal
    numbers is many times slower; they become more frequent among attention weights and Adam's averages of squares as
    training proceeds. Threads inherit the setting from the thread that starts them: call this function early.

    On a GPU, cuDNN's attention spends a quarter of a second planning for every new bag size, in every thread: on a
    cohort of slides that is longer than ten epochs of TransMIL. torch has other kernels, which do not plan.
    """
    torch.set_flush_denormal(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MAPPED_BLOCKS, 0)
            mallopt(_KEPT_WHEN_FREED, 2**31 - 1)
