"""Training of the parts of a population as tasks of a Ray cluster, on more than one machine.

Ray runs one task per part wherever a GPU (or, when training on CPUs, enough cores) is free, and restarts it elsewhere
if its node is lost. A task's progress is stored in files that all nodes can read (carmil.training.partition), so that
another node can resume it. Features are not sent: every node opens the bags itself.
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

RETRIES = 5  # how often a part may be restarted on another node
_POLL = 2.0  # seconds between two checks of the nodes
OnPart = Callable[[int, int], None]  # called with the number of finished parts and of all parts


class Cluster:
    """A connected Ray cluster that trains the parts it is called with. `bags` opens the bags on a node.

    device: auto takes GPUs if the cluster has any. log: receives messages, such as nodes that were lost.
    """

    def __init__(
        self,
        ray: Any,
        bags: Callable[[], Bags],
        *,
        device: str = "auto",
        log: Callable[[str], None] = lambda line: None,
        on_part: OnPart = lambda done, total: None,
    ) -> None:
        self._ray, self._bags, self._log, self._on_part = ray, bags, log, on_part
        gpus = self._most("GPU")
        if device == "cuda" and not gpus:
            raise CarmilError("--device cuda: no node of the cluster has a GPU; start Ray on one that has, or use cpu")
        self.device = "cuda" if gpus and device != "cpu" else "cpu"
        self._kind = "GPU" if self.device == "cuda" else "CPU"
        if not self._most(self._kind):
            raise CarmilError("no node of the cluster provides a CPU: start Ray with --num-cpus of at least 1")
        # The number of threads determines how sums are split, and thereby their last bits: use the same number on every
        # node.
        self._threads = torch.get_num_threads()
        self._each = 1 if self.device == "cuda" else min(self._threads, int(self._most("CPU")))

    def at_most(self, models: int) -> int:
        """Return the largest part size with which every GPU (or group of cores) gets a part."""
        places = sum(int(free // self._each) for free in self._have(self._kind))
        return math.ceil(models / max(1, places))

    def __call__(self, parts: Sequence[Part]) -> Iterator[TrainedPart]:
        """Yield each part when its training is finished."""
        ray = self._ray
        needs = {"num_gpus": 1} if self.device == "cuda" else {"num_cpus": self._each}
        task = ray.remote(max_retries=RETRIES, retry_exceptions=False, **needs)(_train)
        running = [task.remote(part, self._bags, self.device, self._threads) for part in parts]
        self._on_part(0, len(parts))
        nodes = len(self._nodes())
        self._log(f"training {len(parts)} parts on {self.device}; nodes in the cluster: {nodes}")
        while running:
            finished, running = ray.wait(running, timeout=_POLL)
            for done in finished:
                yield self._result(done)
                self._on_part(len(parts) - len(running), len(parts))
            nodes = self._count_nodes(nodes)

    def _result(self, task: Any) -> TrainedPart:
        try:
            result = self._ray.get(task)
        except self._ray.exceptions.RayTaskError:
            raise  # a bug in carmil, with its traceback
        except self._ray.exceptions.RayError as error:
            raise CarmilError(
                f"the cluster lost a part {RETRIES + 1} times ({_first_line(error)}): finished parts are kept; run again to resume"
            ) from error
        if isinstance(result, CarmilError):
            raise result
        return result

    def _count_nodes(self, before: int) -> int:
        """Return the number of nodes now; log if some were lost."""
        now = len(self._nodes())
        if now < before:
            self._log(f"nodes lost: {before - now} of {before}; their parts resume elsewhere")
            if not self._most(self._kind):
                self._log(f"no node with a {self._kind} is left: waiting for one to join")
        return now

    def _nodes(self) -> list[dict[str, Any]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _have(self, kind: str) -> list[float]:
        return [node.get(kind, 0.0) for node in self._nodes()]

    def _most(self, kind: str) -> float:
        return max(self._have(kind), default=0.0)


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect Ray to the cluster at an address: host:port, `auto` for this machine's cluster, `local` for a new one."""
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
    """Train a part on a node. Errors in the input are returned, so that Ray adds no traceback."""
    configure_process()
    torch.set_num_threads(threads)
    try:
        return part.train(bags(), device)
    except CarmilError as error:
        return CarmilError(f"node {platform.node()}: {error}")


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0"
    )  # otherwise Ray sends the working directory to the nodes
    try:
        import ray
    except ModuleNotFoundError as error:
        raise CarmilError("--cluster needs Ray, which is not installed: pip install 'carmil[cluster]'") from error
    return ray


def _reach(address: str) -> None:
    """Refuse an address where nothing listens, as Ray would try to connect for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise CarmilError(f"--cluster {address}: expected host:port, as `ray start --head` prints it, or auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise CarmilError(
            f"--cluster {address}: no answer ({error}); check that `ray start --head` is running"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(".:")
