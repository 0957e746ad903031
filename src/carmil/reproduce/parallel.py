"""Several trainings on one GPU at once.

A population of small models leaves most of a GPU idle while it waits for the next small operation; another's operations fit
in between. A thread and a stream for each; what a training computes does not depend on the others.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

from carmil import progress
from carmil.recording import out_of_memory, thread_stream

Result = TypeVar("Result")

ON_A_GPU = 4  # more would wait for Python, which asks for the operations of all


def run_parallel(jobs: Sequence[Callable[[], Result]], device: str, at_once: int | None = None) -> list[Result]:
    """What each job gives, in their order. On a CPU, unless `at_once` says otherwise, one after the other.

    A job for which memory does not suffice beside others is begun again when they have ended.
    """
    on_gpu = torch.device(device).type == "cuda"
    at_once = at_once or (ON_A_GPU if on_gpu else 1)
    if at_once == 1 or len(jobs) < 2:
        return [job() for job in jobs]

    def run(job: Callable[[], Result]) -> tuple[Result] | None:
        with torch.cuda.stream(thread_stream("training")) if on_gpu else nullcontext():
            try:
                return (job(),)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                return None

    with ThreadPoolExecutor(at_once, thread_name_prefix="carmil-training") as pool:
        under_way = [pool.submit(run, job) for job in jobs]
        try:
            found = [future.result() for future in under_way]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            progress.interrupt_trainings()
            raise
    return [job() if one is None else one[0] for job, one in zip(jobs, found, strict=True)]
