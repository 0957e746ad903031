"""`carmil explain`: the evidence of every slide as a table, and a summary; `carmil.runs.evidence` lists the files."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from carmil.bags.bags import Bags
from carmil.bags.store import Store, open_store
from carmil.errors import CarmilError
from carmil.files import safe_names
from carmil.maps.tile_maps import logits_apart
from carmil.models.contract import Ability, BagModel
from carmil.progress import Log, count_progress
from carmil.provenance import to_json
from carmil.runs.compute_once import compute_once
from carmil.runs.evidence import EvidenceSummary, begin_explanation, write_summary
from carmil.runs.facts import Number
from carmil.runs.run import Run, read_run, weights_key
from carmil.runs.slide_evidence import TAKEN, Row, read_row, write_slide_evidence
from carmil.studies.bag_evidence import BagEvidence, concentration_numbers, explain_bag
from carmil.studies.decisions import RULE
from carmil.studies.evaluate import check_fits
from carmil.studies.localisation import dice_thresholds
from carmil.studies.subjects import (
    Subject,
    check_complete,
    explainers_for,
    match_run_store,
    open_run_store,
    own_subjects,
    pack_bags,
    store_subjects,
    validation_places,
)
from carmil.studies.summary import summarise_evidence

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Explanation:
    """frame: one row per slide; written: slides that were not explained before."""

    folder: Path
    methods: tuple[str, ...]
    frame: "pd.DataFrame"
    summary: EvidenceSummary
    written: int


def explain_run(
    run_folder: Path,
    out: Path | None,
    *,
    bags: Path | None,
    methods: tuple[str, ...],
    searched: bool,
    device: str,
    log: Log,
    asked: Collection[str] | None = None,
) -> Explanation:
    """Explain the run's own slides by the models that were tested on them, or new ones (`bags`) by all models.

    asked: the slides that messages are about, by default all.
    """
    import pandas as pd

    run = read_run(run_folder)
    check_complete(run)
    methods = explainers_for(run, methods, log=log)
    if searched and Ability.POOLS_BY_ATTENTION not in run.model().abilities:
        raise CarmilError(f"--searched needs attention pooling, which {run.settings.model!r} does not have")
    out = out or (run.folder / "evidence" if bags is None else Path("evidence"))
    store, own = _store(run, bags, out, log, asked)
    subjects = own_subjects(run, store) if own else store_subjects(run, store)
    begin_explanation(out, run, methods=methods, searched=searched, data=store.fingerprint)
    if store.bags().instance_labels is not None and len(run.classes) > 2:
        log(f"agreement with the truth of instances is measured for two classes; here are {len(run.classes)}")
    population = run.population(device)
    members = [population.member(row) for row in range(len(run.models))]
    rows, written = _explain_slides(run, members, store.bags(), subjects, methods, out, searched)
    frame = pd.DataFrame(rows)
    thresholds = _thresholds(run, members, store, methods, out, device) if own else {}
    summary = summarise_evidence(run, frame, store.bags(), subjects, out, methods, thresholds)
    write_summary(out, frame, summary)
    return Explanation(out, methods, frame, summary, written)


def _store(run: Run, bags: Path | None, out: Path, log: Log, asked: Collection[str] | None) -> tuple[Store, bool]:
    """The store of the slides to explain, and whether they are the run's own."""
    if bags is None:
        return open_run_store(run), True
    store = open_store(pack_bags(run, bags, out, log=log))
    own = match_run_store(run, store)
    if own is not None:
        log(f"{bags} is the cohort of the run: every slide is explained by the models that were tested on it")
        return own, True
    check_fits(run, store, bags, log, asked)
    return store, False


def _thresholds(
    run: Run, members: list[BagModel], store: Store, methods: tuple[str, ...], out: Path, device: str
) -> dict[str, list[float]]:
    """Thresholds of Dice by method and model, chosen once and kept."""
    request = {"run": run.key, "weights": weights_key(run), "methods": list(methods), "searched": False}
    request |= {"thresholds": run.thresholds, "data": store.fingerprint}

    def choose() -> dict[str, list[float]]:
        with count_progress("thresholds of Dice", "models") as on_model:
            return dice_thresholds(members, store.bags(), validation_places(run, store), methods, on_model)

    return compute_once(out / "thresholds.json", request, choose, device=device, kind=dict[str, list[Number]])[0]


def _explain_slides(
    run: Run,
    members: list[BagModel],
    bags: Bags,
    subjects: list[Subject],
    methods: tuple[str, ...],
    out: Path,
    searched: bool,
) -> tuple[list[Row], int]:
    """Return the rows of all slides, and how many were computed. Slides whose file is complete are read, the others written."""
    rows, computed = [], 0
    names = safe_names((subject.slide for subject in subjects), taken=TAKEN)
    with count_progress(f"explaining {run.name}", "slides") as on_slide:
        for done, subject in enumerate(subjects, 1):
            path = out / f"{names[subject.slide]}.parquet"
            row = read_row(path, subject.slide)
            if row is None:
                bag = bags[subject.place]
                models = [members[row] for row in subject.models]
                found = explain_bag(models, bag, methods, run.classes, searched=searched)
                row = _row(run, subject, found, bag, path.name) | {"explainer": methods[0]}
                write_slide_evidence(path, bag, found.columns, row)
                computed += 1
            rows.append(row)
            on_slide(done, len(subjects))
    return rows, computed


def _row(run: Run, subject: Subject, found: BagEvidence, bag: Bags, file: str) -> Row:
    """A slide's row: its names, the answer and its rule, and every number that was computed.

    A slide that the run was tested on has the probabilities that the run holds, so that rounding cannot change the answer.
    explained_class is the class whose evidence is shown: the answer, or without one the class that leads.
    """
    numbers, decision = dict(found.numbers), run.decision(subject.models)
    computed = numbers.pop("p").tolist()
    p = computed if subject.probabilities is None else list(subject.probabilities)
    leading = decision.leading_class(p)
    row: Row = {"slide": subject.slide, "file": file, "patient": subject.patient, "label": subject.label}
    row |= {"instances": int(bag.sizes[0]), "models": len(subject.models), "prediction": decision.answer(p)}
    row |= {RULE: decision.rule, "explained_class": leading}
    row |= {f"p_{name}": float(p[c]) for c, name in enumerate(run.classes)}
    for which, stored in (("counterfactual", subject.counterfactual), ("searched", None)):
        if f"{which}_p" in numbers:
            elsewhere = numbers.pop(f"{which}_p").tolist()
            row[f"{which}_prediction"] = decision.answer(elsewhere if stored is None else stored)
            row[f"{which}_grown"] = run.classes[int(numbers.pop(f"{which}_change").argmax())]
    numbers |= concentration_numbers(found, bag, leading)
    apart = logits_apart([found.columns[f"evidence_{name}"].numpy() for name in run.classes])
    row["logits_apart"] = apart
    return to_json(row | {name: float(value) for name, value in numbers.items()})
