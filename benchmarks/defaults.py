"""How good are the defaults? Cohorts x settings x methods: AUC, and what the default loses against the best of each cohort.

    python benchmarks/defaults.py --data DATA --out OUT [--device cuda]
    python benchmarks/defaults.py --bags FOLDER --labels CSV --out OUT

SETTINGS and METHODS are fixed before anything is trained, in a commit of their own. The best pair of a cohort is picked on seeds
0 to 4; **regret** is its AUC less the default's, both on seeds 5 to 9. The AUC of a seed is the mean over its folds.

Writes OUT/results.jsonl, one row per cohort, setting, method and seed, and goes on from it if it is there; OUT/defaults.md.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cohorts
import torch
from cohorts import Cohort

from carmil.models.pooling import bag_softmax, bag_sum
from carmil.runs.run import build
from carmil.runs.settings import Settings
from carmil.statistics.performance import bag_auc
from carmil.studies.train import grid_of, recipe_of
from carmil.training.population import Population
from carmil.training.predict import predict
from carmil.training.protocol import train_protocol
from carmil.training.scaling import fit_scales

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "0.1": {"preset": "0.1"},
    "scale own": {"scale": "own"},
    "scale common": {"scale": "common"},
    "init own": {"init": "own"},
    "lr 2e-4": {"lr": 2e-4},
    "decay 1e-4": {"weight_decay": 1e-4},
    "no smoothing": {"label_smoothing": 0.0},
}
METHODS = ("car/abmil.gated", "abmil.gated", "clam.sb", "dsmil", "transmil", "acmil", "mean", "max")
# Every method with the default settings and those of 0.1.0; every setting with these two.
EVERY_METHOD, EVERY_SETTING = ("default", "0.1"), ("car/abmil.gated", "abmil.gated")
PICK, JUDGE = range(5), range(5, 10)


def pairs() -> list[tuple[str, str]]:
    return [(s, m) for s in SETTINGS for m in METHODS if s in EVERY_METHOD or m in EVERY_SETTING]


def train_and_test(
    cohort: Cohort, words: dict[str, Any], method: str, seeds: Sequence[int], device: str
) -> Iterator[dict[str, float]]:
    """Trains all folds and seeds at once, as `carmil train` would; gives each seed's figures."""
    given = {"bags": "-", "out": "-", "model": method, **words}
    settings = Settings.of(given, where=method)
    divided = [cohort.roles(seed) for seed in seeds]
    roles, tested = torch.stack([role for role, _ in divided]), torch.cat([test for _, test in divided])
    assert cohort.bags.labels is not None
    width, labels = cohort.bags.width, cohort.bags.labels

    def prepare(population: Population, everyone: torch.Tensor) -> None:
        if settings.scale != "none":
            fit_scales(population, cohort.bags, everyone, settings.scale)

    trained = train_protocol(
        lambda: build(settings, width, cohort.bags.classes),
        cohort.bags,
        roles,
        recipe=recipe_of(settings),
        seeds=seeds,
        grid=grid_of(settings),
        prepare=prepare,
        device=device,
        precision=settings.precision,
    ).select()
    used = tested.any(0).nonzero().squeeze(-1)
    moved: list[torch.Tensor] = []
    answers = predict(
        trained.population,
        cohort.bags,
        chosen=used,
        maps=False,
        on_part=lambda prediction: moved.append(_moved(prediction)) if prediction.counterfactual else None,
    )
    distance = torch.cat(moved, dim=1) if moved else None
    folds = tested.shape[0] // len(seeds)
    for i in range(len(seeds)):
        rows = range(i * folds, (i + 1) * folds)
        aucs = [bag_auc(answers.probabilities[row][tested[row, used]], labels[tested[row]]) for row in rows]
        figures = {"auc": 100 * statistics.fmean(auc for auc in aucs if auc == auc)}
        if distance is not None:
            figures["moved"] = float(torch.cat([distance[row][tested[row, used]] for row in rows]).median())
        yield figures


def _moved(prediction: Any) -> torch.Tensor:
    """(r, b) sum |a_cf - a| of every bag, the first counterfactual map."""
    a = bag_softmax(prediction.scores, prediction.offsets)
    a_cf = bag_softmax(prediction.counterfactual.scores[..., 0, :], prediction.offsets)
    return bag_sum((a_cf - a).abs(), prediction.offsets).mean(-1).cpu()


def tables(rows: list[dict[str, Any]]) -> str:
    """AUC of every pair, mean and deviation over all seeds; and the regret of the default with each method that is asked about."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    moved: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        key = row["cohort"], row["setting"], row["method"]
        found.setdefault(key, {})[row["seed"]] = row["auc"]
        if "moved" in row:
            moved.setdefault(key, []).append(row["moved"])
    names = list(dict.fromkeys(row["cohort"] for row in rows))
    lines = [
        "## AUC, mean over the seeds ± their deviation",
        "",
        _line("settings", "method", *names),
        _line(*["---"] * (2 + len(names))),
    ]
    for setting, method in pairs():
        cells = [_cell(found.get((name, setting, method), {})) for name in names]
        if any(cells):
            lines.append(_line(setting, method, *cells))
    lines += ["", "## Regret of the default settings: best pair on seeds 0 to 4, measured on seeds 5 to 9", ""]
    lines += [
        _line("cohort", "best pair", "its AUC", *METHODS[:2], *(f"regret of {m}" for m in METHODS[:2])),
        _line(*["---"] * 7),
    ]
    regrets: dict[str, list[float]] = {method: [] for method in METHODS[:2]}
    for name in names:
        mine = {pair: found.get((name, *pair), {}) for pair in pairs()}
        whole = {pair: seeds for pair, seeds in mine.items() if all(s in seeds for s in (*PICK, *JUDGE))}
        if len(whole) < 2:
            continue
        best = max(whole, key=lambda pair: statistics.fmean(whole[pair][s] for s in PICK))
        judged = {pair: statistics.fmean(whole[pair][s] for s in JUDGE) for pair in whole}
        own = [judged.get(("default", method), float("nan")) for method in METHODS[:2]]
        for method, value in zip(METHODS[:2], own, strict=True):
            regrets[method].append(judged[best] - value)
        lines.append(
            _line(
                name,
                f"{best[0]}, {best[1]}",
                f"{judged[best]:.1f}",
                *(f"{v:.1f}" for v in own),
                *(f"{judged[best] - v:.1f}" for v in own),
            )
        )
    means = [f"{statistics.fmean(values):.2f}" if values else "" for values in regrets.values()]
    lines += [
        _line("mean", "", "", "", "", *means),
        "",
        "## Attention moved by CAR: median of sum |a_cf - a| over test bags, of 2",
        "",
    ]
    lines += [_line("settings", *names), _line(*["---"] * (1 + len(names)))]
    for setting, method in pairs():
        if method.startswith("car/"):
            cells = [
                f"{statistics.fmean(moved[key]):.2f}" if (key := (name, setting, method)) in moved else ""
                for name in names
            ]
            lines.append(_line(setting, *cells))
    return "\n".join(lines) + "\n"


def _cell(seeds: dict[int, float]) -> str:
    values = list(seeds.values())
    return f"{statistics.fmean(values):.1f} ± {statistics.pstdev(values):.1f}" if values else ""


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with crc, mil and mnist")
    parser.add_argument("--bags", type=Path, help="a folder of bags of your own, with --labels")
    parser.add_argument("--labels", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cohorts", default=",".join(cohorts.NAMES))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so many")
    parser.add_argument("--fast", action="store_true", help="small cohorts and 2 epochs: a look at the machinery")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    results, begun = asked.out / "results.jsonl", time.monotonic()
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(row["cohort"], row["setting"], row["method"], row["seed"]) for row in rows}
    for name in [asked.bags.name] if asked.bags else asked.cohorts.split(","):
        cohort = None
        for setting, method in pairs():
            seeds = [s for s in range(asked.seeds) if (name, setting, method, s) not in done]
            wanted = setting in asked.settings.split(",") and method in asked.methods.split(",")
            if not (seeds and wanted) or time.monotonic() - begun > asked.seconds:
                continue
            if cohort is None:
                cohort = (
                    cohorts.from_folder(asked.bags, asked.labels)
                    if asked.bags
                    else cohorts.load(name, asked.data, fast=asked.fast)
                )
            started = time.monotonic()
            words = SETTINGS[setting] | ({"epochs": 2} if asked.fast else {})
            made = [
                {"cohort": name, "setting": setting, "method": method, "seed": seed, **figures}
                for seed, figures in zip(seeds, train_and_test(cohort, words, method, seeds, asked.device), strict=True)
            ]
            rows += made
            with results.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in made)
            mean = statistics.fmean(row["auc"] for row in made)
            print(f"{name}, {setting}, {method}: AUC {mean:.1f}, {time.monotonic() - started:.0f} s", flush=True)
            (asked.out / "defaults.md").write_text(tables(rows))
    print(tables(rows))


if __name__ == "__main__":
    main()
