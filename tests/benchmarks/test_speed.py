"""The benchmark compares equal work, counts operations as documented, and writes its results; no time is asserted."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from benchmarks.speed import report, studies, timing
from benchmarks.speed.__main__ import commands, run_benchmark
from benchmarks.speed.arithmetic import abmil_operations, one_bag_loss, work
from benchmarks.speed.ours import MODEL
from benchmarks.speed.plain import PlainCAR, one_bag_loop, plain_twin
from benchmarks.speed.plan import Plan, Study, default_plan
from benchmarks.speed.results import Measurement, ratios
from benchmarks.speed.timing import DoesNotFitError, refuse_shortage, time_in_turn

from carmil.cli.app import main
from carmil.counterfactual import create_model
from carmil.models.pooling import Offsets

TINY = Plan(
    models=("mean",),
    instances=(20, 30),
    members=2,
    bag=24,
    population=3,
    together=2,
    lengths=(10, 40),
    counts=(1, 2),
    linear_models=1,
    linear_bag=10,
    crc_models=2,
    crc_every=20,
    store_bags=2,
    study=Study(folds=2, seeds=1, grid=2, slides=6, epochs=2),
    seconds=0.01,
)


@pytest.fixture(autouse=True)
def _no_long_rounds(monkeypatch):
    monkeypatch.setattr(timing, "SHORTEST_ROUND", 0.0)
    monkeypatch.setattr(timing, "MOST_ROUNDS", 3)
    monkeypatch.setattr(studies, "_product_speed", lambda *_: 1.0)
    monkeypatch.setattr(studies, "_copy_speed", lambda *_: 1.0)


def test_plain_module_has_the_same_loss_and_gradients_as_the_model():
    ours = create_model(MODEL, 1024, 2).eval()  # eval: their dropout masks would differ
    twin = plain_twin(ours.state_dict()).eval()
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in ours.parameters())
    bag, label = torch.randn(50, 1024), torch.tensor([1])
    loss = one_bag_loss(ours, bag, Offsets(torch.tensor([0, 50])), label)
    plain = twin.loss(bag, label)
    assert plain.item() == pytest.approx(loss.item(), abs=1e-5)
    loss.backward()
    plain.backward()
    gradients = plain_twin({name: p.grad for name, p in ours.named_parameters()})
    for (name, wanted), parameter in zip(gradients.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.detach(), atol=1e-5, rtol=1e-4, msg=name)


def test_plain_module_has_the_same_dropout_as_the_model():
    ours = [module.p for module in create_model(MODEL, 8, 2).modules() if type(module).__name__ == "Dropout"]
    plain = [module.p for module in PlainCAR(8).modules() if isinstance(module, torch.nn.Dropout)]
    assert [p for p in ours if p] == plain == [0.25]


def test_plain_loop_trains_on_one_bag_per_step():
    model = PlainCAR(8, 2)
    recorded = []

    def loss(bag, label):
        recorded.append((len(bag), label.item()))
        return model.loss(bag, label)

    before = model.classifier.weight.detach().clone()
    bags = [(torch.randn(5, 8), torch.tensor([0])), (torch.randn(7, 8), torch.tensor([1]))]
    step = one_bag_loop(model, loss, bags, "cpu")
    for _ in range(3):
        step()
    assert recorded == [(5, 0), (7, 1), (5, 0)]
    assert not torch.equal(before, model.classifier.weight)


def test_operation_formula_equals_count_by_hand():
    embedding = 2 * 1024 * 512  # multiply-adds per instance: forward and gradient of weights
    attention = 3 * 512 * 256  # V and U: forward, gradient of weights, gradient of input
    assert abmil_operations(10_000, gates=2) == 2 * 10_000 * (embedding + attention) == 28_835_840_000
    assert work(MODEL, 10_000).operations == 28_835_840_000
    assert work(MODEL, 10_000).counted_by == "formula"


@pytest.mark.parametrize("name", ["abmil", "abmil.gated", "car/abmil.gated"])
def test_operation_counter_slightly_exceeds_the_formula(name, monkeypatch):
    formula = work(name, 1000).operations
    monkeypatch.setattr("benchmarks.speed.arithmetic.GATES", {})
    work.cache_clear()
    assert formula < work(name, 1000).operations < 1.005 * formula
    work.cache_clear()


def test_operations_of_mean_pooling_equal_count_by_hand():
    n, embedding, head = 1000, 1024 * 512, 512 * 2
    assert work("mean", n).operations == 2 * n * (2 * embedding + 3 * head)


@pytest.mark.parametrize("name", ["acmil", "additive", "clam.mb", "car/dsmil", "max", "rrt", "transmil", "weno"])
def test_operations_of_every_kind_of_model_can_be_counted(name):
    assert work(name, 300).counted_by == "counter"
    assert work(name, 300).operations > 2 * 2 * 300 * 1024 * 256
    assert work(name, 300).kept >= 4 * 300 * 1024  # at least the features are kept for the backward pass


def test_every_section_is_measured_and_written(tmp_path):
    lines = []
    results = run_benchmark(TINY, tmp_path, device="cpu", log=lines.append)
    assert {record.section for record in results.records} == {"floors", *TINY.sections}
    for result in results.measurements:
        if result.note != "torchmil is not installed":
            assert result.ms > 0
            assert result.fastest_ms <= result.ms <= result.slowest_ms
            assert result.tflops == pytest.approx(result.floor_ms / result.ms)  # floors are 1 TFLOP/s
    facts = {(fact.section, fact.what): fact.value for fact in results.facts}
    differences = [value for (section, _), value in facts.items() if section == "agreement"]
    assert len(differences) == 4
    assert max(differences) < 1e-5
    assert facts["study", "4 models, 6 slides of 24, 2 epochs"] > 0
    assert facts["store", "read again, from the system's cache"] > 0
    written = json.loads((tmp_path / "benchmark.json").read_text())
    assert len(written["measurements"]) == len(results.measurements)
    assert written["machine"].startswith("cpu: python")
    assert all(ratio["times"] > 0 for ratio in written["ratios"])
    page = (tmp_path / "benchmark.md").read_text()
    for section in ("population", "one-bag", "models", "linearity", "crc"):
        assert f"## {section}" in page
    assert str(tmp_path) not in page + json.dumps(written)
    assert len(lines) > len(results.records)
    assert report.write_plot(results, tmp_path / "benchmark.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["benchmark.json", "benchmark.md", "benchmark.png"]


@pytest.mark.slow
def test_model_with_two_training_phases_is_measured(tmp_path):
    plan = replace(TINY, sections=("models",), models=("weno",), instances=(20,))
    ours, plain = run_benchmark(plan, tmp_path, device="cpu").measurements
    assert ours.ours and ours.ms > 0
    assert not plain.ours and plain.ms > 0


def test_ratios_compare_measurements_on_the_same_bags_only():
    def result(section, what, ms, *, instances=10, model="mean", ours=False):
        return Measurement(section, what, model, 1, 1, instances, ours=ours, ms=ms, fastest_ms=ms / 2)

    ours = result("population", "carmil", 2.0, ours=True)
    loop = result("one-bag", "plain", 8.0)
    others = [result("one-bag", "plain", 8.0, instances=20), result("models", "plain", 8.0), replace(loop, ms=None)]
    (ratio,) = ratios([ours, loop, *others])
    assert (ratio.times, ratio.at_best) == (4.0, 4.0)
    assert ratio.other is loop


def test_step_that_does_not_fit_into_memory_is_skipped_and_noted(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.speed.sections.available_memory", lambda device: 1)
    results = run_benchmark(replace(TINY, sections=("population",), through_fit=False), tmp_path, device="cpu")
    assert [result.ms for result in results.measurements] == [None] * 3
    assert all(result.note.startswith("would not fit") for result in results.measurements)


def test_out_of_memory_errors_are_recognised_when_chained():
    with pytest.raises(DoesNotFitError), refuse_shortage():
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(DoesNotFitError), refuse_shortage():
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("capture failed")
    with pytest.raises(RuntimeError, match="other"), refuse_shortage():
        raise RuntimeError("other")


def test_steps_are_timed_alternately():
    order = []
    builds = [lambda name=name: lambda: order.append(name) for name in "ab"]
    timings = time_in_turn(builds, device="cpu", seconds=100)
    assert "".join(order).endswith("ab" * 3)
    assert [timing.rounds for timing in timings] == [3, 3]


def test_default_plan_has_the_documented_sizes():
    gpu = default_plan("cuda", quick=False)
    assert (gpu.population, gpu.together, gpu.bag, gpu.instances) == (50, 16, 10_000, (1_000, 10_000, 50_000))
    assert (gpu.study.models, gpu.study.slides, gpu.study.epochs) == (225, 300, 20)
    assert default_plan("cpu", quick=False).crc_models == 25


@pytest.fixture
def run_benchmark_command(capsys, monkeypatch):
    """Return a function that runs `python -m benchmarks.speed` and returns exit status, stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["speed", *words])
        with pytest.raises(SystemExit) as left:
            main(commands)
        return (left.value.code or 0, *capsys.readouterr())

    return run


def test_benchmark_command_writes_files_and_prints_results(tmp_path, run_benchmark_command):
    words = ["--quick", "--only", "population,one-bag", "--bag", "16", "--population", "2", "--device", "cpu"]
    status, out, err = run_benchmark_command(*words, "--out", str(tmp_path / "b"))
    assert status == 0
    assert "slides/s" in out
    assert "torch defaults" in out
    assert "measured on cpu: python" in out
    assert "measuring population" in err
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"benchmark.json", "benchmark.md", "benchmark.png"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--only", "populations"], "unknown section 'populations'; did you mean 'population'?"),
        (["--models", "carabmil"], "unknown model 'carabmil'; did you mean 'car/abmil'?"),
        (["--instances", "many"], "--instances many: expected whole numbers, separated by commas"),
        (["--instances", "0"], "bags of 0 instances: expected at least 1"),
        (["--bag", "0"], "Invalid value for '--bag': Input should be greater than or equal to 1"),
        (["--population", "-2"], "Invalid value for '--population': Input should be greater than or equal to 1"),
        (["--study-epochs", "0"], "Invalid value for '--study-epochs': Input should be greater than or equal to 1"),
        (["--crc", "nowhere"], "--crc nowhere has no features.npy"),
        (["--out", "file/x"], "--out file/x cannot be written"),
    ],
)
def test_invalid_benchmark_options_exit_with_one_line_and_write_nothing(
    tmp_path, monkeypatch, run_benchmark_command, words, expected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    status, out, err = run_benchmark_command("--device", "cpu", *words)
    assert (status, out) == (2, "")
    assert err.startswith("carmil: ")
    assert expected in err
    assert len(err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
