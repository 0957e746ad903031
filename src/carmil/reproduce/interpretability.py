"""The paper's interpretability table, and ours: every explainer that a model can be asked for, on digit bags.

The models are table1's, in run folders of the same form: `--out` of a table1 run with the same settings is used again, and only
its maps are asked for. r models, b bags, n instances, k classes, p = b k (bag, class) pairs.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.datasets.digits import DigitStudy
from carmil.errors import CarmilError, unknown
from carmil.evidence import EXPLAINERS, explainers_of
from carmil.evidence.agreement import agreement_by_bag
from carmil.evidence.localisation import auroc, ndcg
from carmil.files import write_text
from carmil.models.pooling import Offsets
from carmil.progress import console
from carmil.reproduce import table1
from carmil.reproduce.digit_data import digits_of, training_of
from carmil.reproduce.digit_runs import Experiment, evidence_maps, known, population_of, scored
from carmil.reproduce.recipes import Finding, Request
from carmil.reproduce.table1 import DIGIT_TASKS, Row, Settings, figure
from carmil.runs.compute_once import compute_once
from carmil.statistics.resampling import mean_intervals
from carmil.tables import ResultTable
from carmil.training.runs import Run

MEASURES = {**table1.MEASURES, "auroc_both": "AUROC±", "ndcg": "NDCG"}
NEGATIVES = {"attention": ("counterfactual_attention",)}  # what the paper scores the negatives of a map by
SLOW = ("single", "integrated_gradients")  # many passes: left out where a grid has several points


def reproduce(request: Request) -> Finding:
    """ABMIL and CAR-MIL, asked by every explainer they can be asked by."""
    digits = digits_of(request, DIGIT_TASKS)
    settings = Settings(**training_of(request))
    rows, lines = run_interpretability(
        digits.studies, settings, digits.about, request.out, device=request.device, shared=request.digits
    )
    return Finding(tuple(tables(rows)), conditions=tuple(lines))


def run_interpretability(
    studies: Mapping[str, DigitStudy],
    settings: Settings,
    data: Mapping[str, Any],
    out: Path,
    *,
    explainers: Sequence[str] = (),
    device: str,
    shared: Path | None = None,
) -> tuple[list[Row], list[str]]:
    """Trains and asks what is not yet in `out`, and writes interpretability.md and .json there. Gives the rows and what they
    depend on.

    explainers: only these; none named, all that a model can be asked for.
    shared: where the trained models are, if not in `out`.
    """
    for name in explainers:
        if name not in EXPLAINERS:
            raise CarmilError(unknown("explainer", name, EXPLAINERS))
    experiments = table1.planned(studies, settings, data)
    _check_asked(experiments, studies, explainers)
    rows: list[Row] = []
    machines: list[str] = []
    for experiment, run in table1.trained(experiments, studies, shared or out, device):
        task, model = experiment.task.name, experiment.model
        points = settings.points(model)
        request = explainers or [name for name in EXPLAINERS if len(points) == 1 or name not in SLOW]
        test, place = studies[task].test.bags, out / "evidence" / task / model.replace("/", "-")
        found, where = _evidence(experiment, run, test, request, len(points), place, device)
        rows += rows_of(task, model, run, found, points)
        machines += [run.measured_on, *where]
    for task in studies:
        rows += table1.missing_rows(task, settings.models)
    lines = [*table1.conditions(settings, data, machines), *explanations(settings, explainers)]
    write_text(out / "interpretability.json", json.dumps(table1.as_json(rows, lines), indent=2))
    write_text(out / "interpretability.md", table1.markdown("Interpretability: digit bags", rows, lines, MEASURES))
    return rows, lines


def _check_asked(
    experiments: Sequence[Experiment], studies: Mapping[str, DigitStudy], explainers: Sequence[str]
) -> None:
    """Refuses, before any training, an explainer that no model of these can be asked for."""
    fitting = {
        experiment.model: explainers_of(experiment.build(studies[experiment.task.name].test.bags.width))
        for experiment in experiments
    }
    for name in explainers:
        if experiments and not any(name in found for found in fitting.values()):
            raise CarmilError(
                f"--explainers {name}: none of {', '.join(fitting)} can be asked for it; "
                f"{experiments[0].model} can be for {', '.join(fitting[experiments[0].model])}"
            )


def _evidence(
    experiment: Experiment, run: Run, bags: Bags, explainers: Sequence[str], points: int, folder: Path, device: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """How the maps of the run's models agree with the truth, explainer by explainer, each measured once; and where."""
    population = population_of(run, experiment, bags.width, device=device)
    found, machines = [], []
    for name in [name for name in explainers_of(population.member(0)) if name in explainers]:

        def measure(name: str = name) -> list[dict[str, Any]]:
            with console.status(f"{name} of {experiment.model} on {experiment.task.title}"):
                maps = evidence_maps(population, bags, [name, *NEGATIVES.get(name, ())])
                return agreement(maps, bags, points=points, device=device)

        request = {"config": experiment.config, "explainer": name, "measures": list(MEASURES)}
        rows, where = compute_once(folder / f"{name}.json", request, measure, device=device)
        found += [row for row in rows if row["evidence"] == name]
        machines.append(where)
    return found, machines


def agreement(
    maps: Mapping[str, Tensor], bags: Bags, *, points: int = 1, device: str = "cpu", repeats: int = 2000
) -> list[dict[str, Any]]:
    """For each map (r, n, k) and rule the measures of every model, (r), and, point by point, the interval of AUPRC± over bags:
    of the mean over the point's models."""
    truth = known(bags.instance_labels).to(device)
    offsets = Offsets(bags.offsets, device)
    found: list[dict[str, Any]] = []
    pairs: list[Tensor] = []
    for evidence, rule, *two in scored(maps):
        supporting, refuting = (side.to(device) for side in two)
        positive, both = agreement_by_bag(supporting, refuting, truth, offsets)
        _, areas = agreement_by_bag(supporting, refuting, truth, offsets, auroc)
        gained = ndcg(supporting, truth + 1, offsets).where(~both.isnan(), torch.nan)
        kinds = {"auprc_pos": positive, "auprc_both": both, "auroc_both": areas, "ndcg": gained}
        measures = {name: values.nanmean((-2, -1)).tolist() for name, values in kinds.items()}
        found.append({"evidence": evidence, "negative": rule, "measures": measures, "intervals": []})
        pairs.append(both.unflatten(0, (points, -1)).mean(1).flatten(1).cpu())  # (points, p)
    bag_of_pair = torch.arange(len(bags)).repeat_interleave(truth.shape[1])
    for values in torch.stack(pairs, dim=-1):  # of each point, (p, maps and rules)
        _, low, high = mean_intervals(values, bag_of_pair, repeats=repeats)
        for i, one in enumerate(found):
            one["intervals"].append([float(low[i]), float(high[i])])
    return found


def rows_of(
    task: str, model: str, run: Run, found: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, float]]
) -> list[Row]:
    """A row for every map and rule at every point of the grid, ours and, where there is one point, the paper's."""
    repetitions = len(run.metrics["auc"]) // len(points)
    rows = []
    for i, point in enumerate(points):
        mine = slice(i * repetitions, (i + 1) * repetitions)
        for one in found:
            values = {"auc": run.metrics["auc"], **one["measures"]}
            low, high = one["intervals"][i]
            rows.append(
                Row(
                    task=task,
                    model=model,
                    evidence=one["evidence"],
                    negative=one["negative"],
                    ours={name: figure(values[name][mine]) for name in MEASURES},
                    paper=table1.papers(task, model, one["evidence"], one["negative"]) if len(points) == 1 else {},
                    note="control" if one["negative"] == "self" else "",
                    weights=table1.point_name(point) if len(points) > 1 else "",
                    interval=None if low is None else (100 * low, 100 * high),
                )
            )
    return rows


def explanations(settings: Settings, explainers: Sequence[str] = ()) -> list[str]:
    """What the further columns are, and which rows there could be more of."""
    grid = any(len(settings.points(model)) > 1 for model in settings.models)
    left_out = [name for name in EXPLAINERS if name not in explainers] if explainers else SLOW if grid else []
    return [
        "AUPRC+, AUPRC±, AUROC± and NDCG are means over (bag, class) pairs with instances of both kinds; AUROC± takes its "
        "negatives by the rule too, NDCG is of the map alone, with gains truth + 1",
        "AUPRC± interval: 95 % bootstrap over test bags of the mean over the initialisations",
        *(
            [f"explainers that were not asked{' in a grid' * (not explainers)}: {', '.join(left_out)}"]
            if left_out
            else []
        ),
    ]


def tables(rows: Sequence[Row]) -> list[ResultTable]:
    return table1.tables(rows, MEASURES)
