"""Settings of the process that training lives by."""

import ctypes
import sys

import torch

_MAPPED_BLOCKS, _KEPT_WHEN_FREED = -4, -1  # mallopt's M_MMAP_MAX and M_TRIM_THRESHOLD


def configure_process() -> None:
    """Keeps freed memory, rounds numbers below 1e-38 to zero, and attends without cuDNN. Called again, it changes nothing.

    Every step of a population frees and wants the same large blocks; getting each anew from the system, page by page, takes
    longer than what is computed in them. (Without effect where the C library is not glibc.) And numbers too small for the
    ordinary form, of which attention weights and Adam's averages of squares have more and more as training goes on, are
    many times slower to compute with. Threads take this over from the one that starts them: call it early.

    On a GPU, cuDNN's attention plans for a quarter of a second whenever a bag has a size it has not met, in every thread anew:
    for a cohort of slides that is longer than ten epochs of TransMIL. torch has other kernels for the same, which do not plan.
    """
    torch.set_flush_denormal(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MAPPED_BLOCKS, 0)
            mallopt(_KEPT_WHEN_FREED, 2**31 - 1)
