"""`carmil explain`: the evidence of every slide as a table, and a summary.

OUT/explanation.json   what was asked, so that a killed command goes on and another one is refused
OUT/SLIDE.parquet      a row an instance; the slide's line of the summary is in the file's own metadata
OUT/thresholds.json    of Dice, where instances have a truth
OUT/summary.parquet    and summary.csv: a line a slide
OUT/summary.json       over the slides; written last
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carmil.bags.bags import Bags
from carmil.bags.store import Store, open_store
from carmil.csv_files import frame_text
from carmil.errors import CarmilError
from carmil.evidence.abilities import pools_by_attention
from carmil.files import safe_names, whole_file, write_text
from carmil.maps.evidence_files import ABOUT, TAKEN
from carmil.maps.tile_maps import logits_apart
from carmil.models.contract import BagModel
from carmil.progress import Log, counted
from carmil.provenance import plain
from carmil.runs.run import Run, read_run, weights_key
from carmil.runs.writing import begin, write_table
from carmil.studies.bag_evidence import BagEvidence, concentration_numbers, explain_bag
from carmil.studies.compute_once import compute_once
from carmil.studies.decisions import RULE, decision_of
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
from carmil.studies.summary import summary_of
from carmil.untrusted import parsed, read_json

if TYPE_CHECKING:
    import pandas as pd


_OF_MODELS = ("run", "weights", "thresholds")  # settings of an explanation that tell one run's models from another's


@dataclass(frozen=True, eq=False)
class Explanation:
    """What was explained: a line a slide, and what is said over all of them."""

    folder: Path
    methods: tuple[str, ...]
    frame: "pd.DataFrame"
    summary: dict[str, Any]
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
    """Explains the run's own slides by the models that were tested on them, or new ones (`bags`) by all its models.

    asked: the slides that messages are about, by default all.
    """
    import pandas as pd

    run = read_run(run_folder)
    check_complete(run)
    methods = explainers_for(run, methods, log=log)
    if searched and not pools_by_attention(run.model()):
        raise CarmilError(f"--searched needs attention pooling, which {run.settings.model!r} does not have")
    out = out or (run.folder / "evidence" if bags is None else Path("evidence"))
    _check_free(out)
    store, own = _store(run, bags, out, log, asked)
    subjects = own_subjects(run, store) if own else store_subjects(run, store)
    begin(out, {"settings": _asked(run, methods, searched), "data": store.fingerprint}, kind="explanation")
    if store.bags().instance_labels is not None and len(run.classes) > 2:
        log(f"agreement with the truth of instances is measured for two classes; here are {len(run.classes)}")
    population = run.population(device)
    members = [population.member(row) for row in range(len(run.models))]
    lines, written = _written(run, members, store.bags(), subjects, methods, out, searched)
    frame = pd.DataFrame(lines)
    thresholds = _thresholds(run, members, store, methods, out, device) if own else {}
    summary = summary_of(run, frame, store.bags(), subjects, out, methods, thresholds)
    write_table(out / "summary.parquet", frame)
    write_text(out / "summary.csv", frame_text(frame))
    write_text(out / "summary.json", json.dumps(plain(summary), indent=2))
    return Explanation(out, methods, frame, summary, written)


def check_same_run(folder: Path, run: Run, out: Path) -> None:
    """Refuse an `out` whose evidence, in `folder`, is by other models or thresholds than the run's."""
    path = folder / "explanation.json"
    if not path.exists():
        return
    advice = f"choose another --out, or remove {out}"
    facts = read_json(path, advice)
    parsed(facts, dict[str, Any], str(path), advice)
    settings = facts.get("settings")
    mine = _asked(run, (), searched=False)
    if not isinstance(settings, dict) or any(settings.get(name) != mine[name] for name in _OF_MODELS):
        raise CarmilError(f"{out} holds answers of another run than {run.folder}: {advice}")


def _check_free(out: Path) -> None:
    """A slide's file, or the summary, could have the name of one of a run's."""
    for kind in ("run", "sweep"):
        if (out / f"{kind}.json").exists():
            raise CarmilError(
                f"--out {out} holds a {kind}: choose another folder for the evidence, {out / 'evidence'} say"
            )


def _store(run: Run, bags: Path | None, out: Path, log: Log, asked: Collection[str] | None) -> tuple[Store, bool]:
    """The slides to explain, and whether they are the run's own."""
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
    """Of Dice, chosen once and kept; NaN comes back from JSON as None."""
    asked = _asked(run, methods, searched=False) | {"data": store.fingerprint}

    def choose() -> dict[str, list[float]]:
        with counted("thresholds of Dice", "models") as on_model:
            return dice_thresholds(members, store.bags(), validation_places(run, store), methods, on_model)

    kept, _ = compute_once(out / "thresholds.json", asked, choose, device=device)
    return {method: [float("nan") if at is None else at for at in found] for method, found in kept.items()}


def _asked(run: Run, methods: tuple[str, ...], searched: bool) -> dict[str, Any]:
    asked = {"run": run.key, "weights": weights_key(run), "methods": list(methods), "searched": searched}
    return asked | {"thresholds": run.thresholds}


def _written(
    run: Run,
    members: list[BagModel],
    bags: Bags,
    subjects: list[Subject],
    methods: tuple[str, ...],
    out: Path,
    searched: bool,
) -> tuple[list[dict[str, Any]], int]:
    """The lines of all slides; those whose file is there whole are read, the others computed, one bag after the other."""
    lines, computed = [], 0
    names = safe_names((subject.slide for subject in subjects), taken=TAKEN)
    with counted(f"explaining {run.name}", "slides") as on_slide:
        for done, subject in enumerate(subjects, 1):
            path = out / f"{names[subject.slide]}.parquet"
            line = _line_in(path, subject.slide)
            if line is None:
                bag = bags[subject.place]
                models = [members[row] for row in subject.models]
                found = explain_bag(models, bag, methods, run.classes, searched=searched)
                line = _line(run, subject, found, bag, path.name) | {"explainer": methods[0]}
                _write_slide(path, bag, found, line)
                computed += 1
            lines.append(line)
            on_slide(done, len(subjects))
    return lines, computed


def _line(run: Run, subject: Subject, found: BagEvidence, bag: Bags, file: str) -> dict[str, Any]:
    """A slide's line: who it is, what is answered by which rule, and every number that was found.

    Of a slide that the run was tested on the probabilities are those that the run holds, so that no rounding makes another
    answer. explained_class is the class whose evidence is shown: the answer, or where there is none the class that leads.
    """
    numbers, decision = dict(found.numbers), decision_of(run, subject.models)
    computed = numbers.pop("p").tolist()
    p = computed if subject.probabilities is None else list(subject.probabilities)
    leading = decision.leading_class(p)
    line: dict[str, Any] = {"slide": subject.slide, "file": file, "patient": subject.patient, "label": subject.label}
    line |= {"instances": int(bag.sizes[0]), "models": len(subject.models), "prediction": decision.answer(p)}
    line |= {RULE: decision.rule, "explained_class": leading}
    line |= {f"p_{name}": float(p[c]) for c, name in enumerate(run.classes)}
    for which, held in (("counterfactual", subject.counterfactual), ("searched", None)):
        if f"{which}_p" in numbers:
            elsewhere = numbers.pop(f"{which}_p").tolist()
            line[f"{which}_prediction"] = decision.answer(elsewhere if held is None else held)
            line[f"{which}_grown"] = run.classes[int(numbers.pop(f"{which}_change").argmax())]
    numbers |= concentration_numbers(found, bag, leading)
    apart = logits_apart([found.columns[f"evidence_{name}"].numpy() for name in run.classes])
    line["logits_apart"] = float("nan") if apart is None else apart
    return plain(line | {name: float(value) for name, value in numbers.items()})


def _write_slide(path: Path, bag: Bags, found: BagEvidence, line: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {"instance": range(int(bag.sizes[0]))}
    if bag.coordinates is not None:
        columns |= {"x": bag.coordinates[:, 0].numpy(), "y": bag.coordinates[:, 1].numpy()}
    columns |= {name: values.float().numpy() for name, values in found.columns.items()}
    told = {"line": line, "coordinate_unit": bag.units[0]}
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    with whole_file(path) as aside:
        pq.write_table(table.replace_schema_metadata({ABOUT: json.dumps(told).encode()}), aside)


def _line_in(path: Path, slide: str) -> dict[str, Any] | None:
    """The slide's line in a file that was written whole, for this slide and under this name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        line = json.loads(pq.read_schema(path).metadata[ABOUT])["line"]
        return line if (line["slide"], line["file"]) == (slide, path.name) and "logits_apart" in line else None
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None
