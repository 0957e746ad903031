"""CUDA streams of a thread's own.

torch hands out the same 32 streams again and again. Threads that took a new one for every purpose would meet on one, and what one
of them asks for would become part of what the other records.
"""

import threading

import torch

_MINE = threading.local()


def own_stream(use: str) -> "torch.cuda.Stream":
    """This thread's stream for `use` on the present GPU: always the same."""
    mine: dict[tuple[str, int], torch.cuda.Stream] = _MINE.__dict__.setdefault("streams", {})
    key = (use, torch.cuda.current_device())
    if key not in mine:
        mine[key] = torch.cuda.Stream()
    return mine[key]
