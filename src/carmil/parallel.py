"""Several trainings on one GPU at once.

A population of small models leaves a GPU idle between small operations, during which operations of other trainings
can run. Each training has its own thread and stream; its results do not depend on the others.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

from carmil import progress
from carmil.recording import out_of_memory, thread_stream

Result = TypeVar("Result")

ON_A_GPU = 4  # more trainings would wait for Python, which launches the operations of all


def run_parallel(jobs: Sequence[Callable[[], Result]], device: str, at_once: int | None = None) -> list[Result]:
    """Return the results of the jobs in order. On a CPU jobs run one after the other, unless `at_once` is given.

    A job that runs out of memory beside others is started again after they have ended.
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
            results = [future.result() for future in under_way]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            progress.interrupt_trainings()
            raise
    return [job() if one is None else one[0] for job, one in zip(jobs, results, strict=True)]
