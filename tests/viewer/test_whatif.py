"""What-if answers equal the predictions of the models for the reduced bag."""

import numpy as np
import pytest
import torch

from carmil.bags.bags import Bags
from carmil.counterfactual import create_model
from carmil.runs.run import read_run
from carmil.targets import Classes
from carmil.training.population import Member, Population
from carmil.viewer.cases import Case, RunCases
from carmil.viewer.whatif import WhatIf, _CachedInstances, _ReducedBag, highest, inside

MODELS = {
    "abmil": {},
    "car/abmil": {},
    "car/abmil.gated": {"branch": "full"},
    "targeted/abmil": {},
    "car/clam.mb": {},
    "clam.sb": {},
    "car/acmil": {},
    "car/dsmil": {},
    "transmil": {"hidden": 16},
    "car/rrt": {},
    "additive": {},
    "mean": {},
    "max": {},
    "weno": {},
}


def run_of(model, instances, **options):
    """Return a run with two untrained models and one bag."""
    target = Classes(names=("a", "b") if model == "weno" else ("a", "b", "c"))
    classes = len(target.names)
    population = Population(
        lambda: create_model(model, 12, classes, **options), [Member(seed=seed) for seed in (1, 2)], device="cpu"
    )
    bags = Bags.from_list([torch.randn(instances, 12)])
    case = Case("one", 0, (0, 1), target.decision(), np.full(classes, 1 / classes))
    return RunCases("fresh", target, bags, (case,), population)


def by_hand(run, kept):
    """Return the mean factual and counterfactual probabilities of the reduced bag."""
    features, offsets = run.bags.features[kept], torch.tensor([0, len(kept)])
    with torch.no_grad():
        predictions = [model(features, offsets) for model in run.members(0)]
    factual = torch.stack([one.logits[0].double().softmax(-1) for one in predictions]).mean(0)
    if predictions[0].counterfactual is None:
        return factual, None
    return factual, torch.stack([one.counterfactual.logits[0, 0].double().softmax(-1) for one in predictions]).mean(0)


@pytest.mark.parametrize("model", MODELS)
def test_whatif_of_every_model_equals_prediction_for_the_reduced_bag(model):
    run = run_of(model, 100, **MODELS[model])
    removed = [0, 3, 17, 18, 99]
    kept = [j for j in range(100) if j not in removed]
    result = WhatIf(run).answer(0, removed)
    factual, counterfactual = by_hand(run, kept)
    assert result.factual == pytest.approx(factual.numpy(), abs=2e-5)
    if model.startswith("car/"):
        assert result.counterfactual == pytest.approx(counterfactual.numpy(), abs=2e-5)
    else:
        assert result.counterfactual is None


@pytest.mark.parametrize(
    ("model", "alone"), [("car/abmil", True), ("car/clam.mb", True), ("car/rrt", False), ("transmil", False)]
)
def test_instances_are_cached_only_for_instance_wise_models(model, alone):
    ready = WhatIf(run_of(model, 100, **MODELS[model])).prepare(0)
    assert all(isinstance(one, _CachedInstances if alone else _ReducedBag) for one in ready)


def test_removing_all_instances_is_rejected_but_one_may_remain(ask, number_of):
    n = 34
    whole = list(range(n))
    response = ask.post(f"/api/case/{number_of['s4']}/whatif", {"remove": whole[:-1]})
    assert response.status == 200 and response.json["removed"] == whole[:-1]
    same = ask.post(f"/api/case/{number_of['s4']}/whatif", {"keep": [33, 33]})
    assert same.json == response.json
    assert ask.post(f"/api/case/{number_of['s4']}/whatif", {"keep": []}).status == 422
    response = ask.post(f"/api/case/{number_of['s4']}/whatif", {"remove": whole})
    assert (response.status, response.json) == (422, {"error": "all 34 instances would be removed: keep at least one"})


def test_server_whatif_equals_python_computation(ask, study_folder, number_of):
    run = read_run(study_folder / "run")
    from carmil.studies.subjects import open_run_store, own_subjects

    store = open_run_store(run)
    (subject,) = [one for one in own_subjects(run, store) if one.slide == "s6"]
    features = store.bags()[subject.place].features
    removed = [0, 5, 35]
    left = torch.ones(len(features), dtype=torch.bool)
    left[removed] = False

    def answers(some):
        with torch.no_grad():
            predictions = [run.population().member(row)(some, torch.tensor([0, len(some)])) for row in subject.models]
        cf = torch.stack([one.counterfactual.logits[0, 0].double().softmax(-1) for one in predictions]).mean(0)
        return torch.stack([one.logits[0].double().softmax(-1) for one in predictions]).mean(0).tolist(), cf.tolist()

    response = ask.post(f"/api/case/{number_of['s6']}/whatif", {"remove": [35, 0, 5, 5]}).json
    assert response["removed"] == removed
    assert response["before"] == pytest.approx(answers(features)[0], abs=1e-5)
    after, counterfactual = answers(features[left])
    assert response["after"] == pytest.approx(after, abs=1e-5)
    assert response["counterfactual_after"] == pytest.approx(counterfactual, abs=1e-5)
    assert response["after"] != pytest.approx(response["before"], abs=1e-3)


@pytest.mark.finding(n=3)
def test_top_share_is_taken_from_the_shown_map(ask, number_of):
    number, taken = number_of["s6"], []
    for name in ("evidence", "factual", "counterfactual", "difference"):
        values = np.array(ask(f"/api/case/{number}/map/{name}?class=0").json["values"])
        response = ask.post(f"/api/case/{number}/whatif", {"top": 0.1, "map": name, "class": 0}).json
        assert response["removed"] == sorted(np.argsort(-values, kind="stable")[:3].tolist())
        same = ask.post(f"/api/case/{number}/whatif", {"remove": response["removed"]}).json
        assert same["after"] == response["after"]
        taken.append(response["removed"])
    assert taken[0] != taken[1]
    assert highest(torch.tensor([1.0, 3.0, 2.0]), 0.01) == [1]


def test_polygon_removes_tiles_with_their_centre_inside(ask, number_of):
    corners = [[64, 0], [64 * 3, 0], [64 * 3, 64], [64, 64]]  # the second and third tile of the first row
    response = ask.post(f"/api/case/{number_of['s0']}/whatif", {"polygon": corners}).json
    assert response["removed"] == [1, 2]
    nothing = ask.post(f"/api/case/{number_of['s0']}/whatif", {"polygon": [[0, 0], [9, 0], [0, 9]]}).json
    assert nothing["removed"] == [] and nothing["after"] == nothing["before"]


def test_self_overlapping_polygon_follows_the_even_odd_rule():
    from matplotlib.path import Path

    rng = np.random.default_rng(0)
    points, star = rng.uniform(0, 10, (500, 2)), np.array([[1, 1], [9, 2], [2, 8], [6, 0.5], [8, 9.5]])
    convex = np.array([[1, 1], [9, 2], [8, 9], [2, 8]])
    assert inside(points, convex).tolist() == np.flatnonzero(Path(convex).contains_points(points)).tolist()
    twice = np.concatenate([convex, convex])  # traced twice: nothing is inside
    assert inside(points, twice).tolist() == []
    assert 0 < len(inside(points, star)) < 500
