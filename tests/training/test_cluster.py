"""A study on a Ray cluster equals the local one: two nodes on this machine, one of which is killed."""

import contextlib
import json
import os
import secrets
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from carmil import Bags, create_model
from carmil.bags.building import build_store
from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.errors import CarmilError
from carmil.runs.settings import Settings
from carmil.studies.cohort import worker_bags
from carmil.studies.train import run_study
from carmil.training import TRAIN, UNUSED, VALIDATION, Recipe
from carmil.training import cluster as module
from carmil.training.checkpoint import Checkpoint
from carmil.training.cluster import Cluster, connected
from carmil.training.protocol import train_protocol

# Ray reads these on import: only this process can submit tasks, no usage statistics are written to the home folder, and
# nodes do not build their own environment when the tests run under `uv run`.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"

FOLDS, SEEDS, WIDTH, BAGS = 2, (0, 1, 2, 3), 6, 16
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
RECIPE = Recipe(epochs=60, batch=1, warmup=1, patience=100, shuffle=True, optimizer="adam")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Return a store of bags that every node can read."""
    folder = tmp_path_factory.mktemp("bags")
    generator = torch.Generator().manual_seed(0)
    for i in range(BAGS):
        features = torch.randn(5 + i % 4, WIDTH, generator=generator)
        features[0, 0] = 3.0 if i % 2 else -1.0
        write_bag(Bag(id=f"{i:02d}", features=features.numpy()), folder / "features", "npy")
    return build_store(folder / "features", folder / "store", dtype="float32", workers=1)


@pytest.fixture
def bags(store):
    return partial(worker_bags, store.path, store.fingerprint, torch.arange(BAGS) % 2)


def roles() -> torch.Tensor:
    result = torch.full((FOLDS, BAGS), TRAIN)
    result[0, :4], result[1, 4:8] = UNUSED, UNUSED
    result[:, 12:] = VALIDATION
    return result


def trained(bags: Bags, recipe=RECIPE, **how):
    build = partial(create_model, "car/abmil.gated", WIDTH, 2, hidden=32, attention=32, dropout=0.25)
    return train_protocol(build, bags, roles(), recipe=recipe, seeds=SEEDS, **how)


@pytest.fixture(scope="module")
def nodes():
    """Return a cluster with a head node that runs no tasks and two nodes with one core each."""
    pytest.importorskip("ray", reason="needs ray: carmil[cluster]")
    from ray.cluster_utils import Cluster as Nodes

    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": SOON, "object_store_memory": 10**8}
    started = Nodes(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            started.add_node(num_cpus=1, object_store_memory=10**8)
        yield started
    finally:
        started.shutdown()


def opened_together(bags, folder: Path, parts: int = 2):
    """Return a function that opens the bags on a node once all parts are about to, so that they train at the same time."""

    def open_bags() -> Bags:  # nested, so that it is sent to nodes that cannot import this file
        (folder / str(os.getpid())).touch()
        end = time.monotonic() + 120
        while len(list(folder.iterdir())) < parts and time.monotonic() < end:
            time.sleep(0.02)
        return bags()

    return open_bags


class Killer(threading.Thread):
    """Kill a node once both parts have started, and log the epochs recorded in their files."""

    def __init__(self, nodes, folder: Path) -> None:
        super().__init__(daemon=True)
        self.nodes, self.folder = nodes, folder
        self.epochs: dict[str, list[int]] = {}
        self.at_kill: dict[str, int] = {}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            for path in self.folder.glob("*.begun.safetensors"):
                with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
                    self.epochs.setdefault(path.name, []).append(json.loads(file.metadata()["carmil"])["epoch"])
            if not self.at_kill and len(self.epochs) == 2 and all(reports[-1] > 5 for reports in self.epochs.values()):
                assert not list(self.folder.glob("*.ended.safetensors"))
                self.at_kill = {name: reports[-1] for name, reports in self.epochs.items()}
                self.nodes.remove_node(next(iter(self.nodes.worker_nodes)), allow_graceful=False)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:9", "--cluster 127.0.0.1:9: no answer"),
        ("nowhere.invalid:6379", "--cluster nowhere.invalid:6379: no answer"),
        ("127.0.0.1:123456", "no answer"),
        ("ray://head:10001", "expected host:port"),
        ("head", "expected host:port"),
    ],
)
def test_unreachable_cluster_address_raises_an_error_naming_it(address, words):
    pytest.importorskip("ray", reason="needs ray: carmil[cluster]")
    with pytest.raises(CarmilError, match=words), connected(address):
        pass


QUICK = Recipe(epochs=1)


def test_error_on_a_cluster_node_is_reported_in_one_line(nodes, bags, store, tmp_path, monkeypatch):
    elsewhere = partial(worker_bags, tmp_path / "elsewhere", store.fingerprint, torch.arange(BAGS) % 2)
    other = partial(worker_bags, store.path, "another", torch.arange(BAGS) % 2)
    with connected(nodes.address) as ray:
        for opened, words in ((elsewhere, "elsewhere does not exist on this machine"), (other, "differs from that on")):
            with pytest.raises(CarmilError, match=words) as raised:
                trained(bags(), QUICK, at_most=4, engine=Cluster(ray, opened))
            assert "\n" not in str(raised.value)
            assert str(raised.value).startswith("node ")
        monkeypatch.setattr(module, "RETRIES", 0)
        with pytest.raises(CarmilError, match="the cluster lost a part 1 times") as raised:
            trained(bags(), QUICK, at_most=4, engine=Cluster(ray, partial(os._exit, 3)))
        assert "\n" not in str(raised.value)
        with pytest.raises(CarmilError, match="--device cuda: no node of the cluster has a GPU"):
            Cluster(ray, bags, device="cuda")


@pytest.mark.slow
def test_study_on_a_cluster_equals_local_study(nodes, store, tmp_path):
    (tmp_path / "labels.csv").write_text("slide,label\n" + "".join(f"{i:02d},{'ab'[i % 2]}\n" for i in range(BAGS)))
    folders = []
    for name, how in (("here", {}), ("there", {"cluster": nodes.address})):
        folders.append(tmp_path / name)
        run_study(
            Settings(
                bags=store.path,
                labels=tmp_path / "labels.csv",
                out=tmp_path / name,
                options={"hidden": 32, "attention": 32},
                folds=2,
                seeds=2,
                epochs=3,
                lr=[1e-3, 5e-3],
                device="cpu",
                **how,
            )
        )
    here, there = (load_file(folder / "weights.safetensors") for folder in folders)
    assert all(torch.equal(here[name], there[name]) for name in here)
    for name in ("models.json", "history.json", "metrics.json"):
        assert json.loads((folders[0] / name).read_text()) == json.loads((folders[1] / name).read_text())
    assert sorted(path.name for path in folders[0].iterdir()) == sorted(path.name for path in folders[1].iterdir())


@pytest.mark.slow
def test_killing_a_node_during_training_does_not_change_the_result(nodes, bags, tmp_path):
    where = Checkpoint(tmp_path / "checkpoint.safetensors", "mine", every=0.0)
    logged, counts = [], []
    lasting = replace(RECIPE, epochs=150, patience=150)  # both parts are still training when a node is killed
    local = trained(bags(), lasting)
    killer = Killer(nodes, where.parts)
    killer.start()
    try:
        with connected(nodes.address) as ray:
            arrived = tmp_path / "arrived"
            arrived.mkdir()
            cluster = Cluster(
                ray, opened_together(bags, arrived), log=logged.append, on_part=lambda *reports: counts.append(reports)
            )
            assert cluster.at_most(8) == 4
            result = trained(bags(), lasting, at_most=4, engine=cluster, checkpoint=where)
    finally:
        killer.over.set()
        killer.join()
    assert killer.at_kill, "no node was killed: the test would prove less"
    assert all(reports == sorted(reports) for reports in killer.epochs.values())  # no part started over
    assert all(reports[-1] > killer.at_kill[name] for name, reports in killer.epochs.items())
    assert torch.equal(result.population.weights, local.population.weights)
    assert torch.equal(result.history.validation, local.history.validation)
    assert torch.equal(result.history.best_epoch, local.history.best_epoch)
    assert result.select().models == local.select().models
    assert logged[0] == "training 2 parts on cpu; nodes in the cluster: 3"
    # Ray may report the lost node only after the last part has ended.
    assert logged[1:] in ([], ["nodes lost: 1 of 3; their parts resume elsewhere"])
    assert counts == [(0, 2), (1, 2), (2, 2)]


def test_missing_ray_raises_an_error_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    words = r"needs Ray, which is not installed: pip install 'carmil\[cluster\]'"
    with pytest.raises(CarmilError, match=words), connected("auto"):
        pass
