"""The parts of a population as tasks of a Ray cluster: more than one machine.

Ray starts a task for each part where there is a GPU (or, for a training on CPUs, cores) for it, and starts it again elsewhere
when its node is lost. What a task has done lies in files that all nodes see (carmil.training.partition), so that it goes on there.
Features do not travel: every node opens the bags by itself.
"""

import logging
import math
import os
import platform
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.training.partition import Part, TrainedPart
from carmil.training.process_settings import configure_process

RETRIES = 5  # how often a part may lose its node
_LOOK = 2.0  # seconds between two looks at the nodes
OnPart = Callable[[int, int], None]  # parts done, parts in all


class Cluster:
    """A Ray cluster one is connected to; called with parts, it trains them. `bags` is how a node opens them.

    device: auto takes GPUs if the cluster has any. say is told when nodes are lost, or none is left that could go on.
    """

    def __init__(
        self,
        ray: Any,
        bags: Callable[[], Bags],
        *,
        device: str = "auto",
        say: Callable[[str], None] = lambda line: None,
        on_part: OnPart = lambda done, total: None,
    ) -> None:
        self._ray, self._bags, self._say, self._on_part = ray, bags, say, on_part
        gpus = self._most("GPU")
        if device == "cuda" and not gpus:
            raise CarmilError("--device cuda: no node of the cluster has a GPU; start Ray on one that has, or use cpu")
        self.device = "cuda" if gpus and device != "cpu" else "cpu"
        self._kind = "GPU" if self.device == "cuda" else "CPU"
        if not self._most(self._kind):
            raise CarmilError("no node of the cluster has a CPU to give: start Ray with --num-cpus of at least 1")
        # The sums of a step are divided among threads: as many there as here, for the same last bits.
        self._threads = torch.get_num_threads()
        self._each = 1 if self.device == "cuda" else min(self._threads, int(self._most("CPU")))

    def at_most(self, models: int) -> int:
        """How many models a part may have for every GPU (or group of cores) to get one."""
        places = sum(int(free // self._each) for free in self._have(self._kind))
        return math.ceil(models / max(1, places))

    def __call__(self, parts: Sequence[Part]) -> Iterator[TrainedPart]:
        """Gives each part when it has ended."""
        ray = self._ray
        needs = {"num_gpus": 1} if self.device == "cuda" else {"num_cpus": self._each}
        task = ray.remote(max_retries=RETRIES, retry_exceptions=False, **needs)(_train)
        running = [task.remote(part, self._bags, self.device, self._threads) for part in parts]
        self._on_part(0, len(parts))
        nodes = len(self._nodes())
        self._say(f"parts to train: {len(parts)}, on {self.device}; nodes of the cluster: {nodes}")
        while running:
            ended, running = ray.wait(running, timeout=_LOOK)
            for one in ended:
                yield self._result(one)
                self._on_part(len(parts) - len(running), len(parts))
            nodes = self._watched(nodes)

    def _result(self, task: Any) -> TrainedPart:
        try:
            result = self._ray.get(task)
        except self._ray.exceptions.RayTaskError:
            raise  # an error of ours, with its traceback
        except self._ray.exceptions.RayError as error:
            raise CarmilError(
                f"the cluster lost a part {RETRIES + 1} times ({_first_line(error)}): what has ended is kept, start again"
            ) from error
        if isinstance(result, CarmilError):
            raise result
        return result

    def _watched(self, before: int) -> int:
        """How many nodes there are now; says so if some were lost."""
        now = len(self._nodes())
        if now < before:
            self._say(f"nodes lost: {before - now} of {before}; what they trained goes on elsewhere")
            if not self._most(self._kind):
                self._say(f"no node with a {self._kind} is left: waiting for one to join")
        return now

    def _nodes(self) -> list[dict[str, Any]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _have(self, kind: str) -> list[float]:
        return [node.get(kind, 0.0) for node in self._nodes()]

    def _most(self, kind: str) -> float:
        return max(self._have(kind), default=0.0)


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to the cluster at an address: host:port, `auto` for the one of this machine, `local` for a new one."""
    ray = _ray()
    _reach(address)
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise CarmilError(
            f"--cluster {address}: no connection ({_first_line(error)}); this machine must be a node too: "
            "`ray start --head`, or `ray start --address` of the head"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _train(part: Part, bags: Callable[[], Bags], device: str, threads: int) -> TrainedPart | CarmilError:
    """A task, on whichever node. What is wrong with the input comes back as it is, without a traceback of Ray's."""
    configure_process()
    torch.set_num_threads(threads)
    try:
        return part.train(bags(), device)
    except CarmilError as error:
        return CarmilError(f"node {platform.node()}: {error}")


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else it packs the folder one stands in for the nodes
    try:
        import ray
    except ModuleNotFoundError as error:
        raise CarmilError("--cluster needs Ray, which is not installed: pip install 'carmil[cluster]'") from error
    return ray


def _reach(address: str) -> None:
    """Refuses an address where nobody listens, at once; Ray would try for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise CarmilError(f"--cluster {address}: expected host:port, as `ray start --head` says it, or auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise CarmilError(
            f"--cluster {address}: nobody answers there ({error}); is `ray start --head` running?"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(".:")
