"""`carmil import`: a trained model of another tool as a run with one model.

Bags with labels, if they are given, are the run's cohort and its only test fold, so that every command works on it. It
is unknown whether the other tool trained its model on some of them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carmil.bags.splits import TEST
from carmil.errors import CarmilError
from carmil.files import write_text
from carmil.models.checkpoint_layouts import ForeignModel, recognise
from carmil.progress import Log
from carmil.runs.facts import Data, Imported
from carmil.runs.run import Run, build, pick_device, read_run
from carmil.runs.settings import Settings
from carmil.runs.writing import begin_run
from carmil.studies.card import card
from carmil.studies.cohort import Cohort, LabelsRead, label_cohort, open_bags
from carmil.studies.evaluate import read_labels_of
from carmil.studies.evaluate_folds import evaluate_imported
from carmil.studies.train import data_of
from carmil.targets import Classes
from carmil.torch_files import read_state_dicts
from carmil.training.population import Member, Population
from carmil.untrusted import describe_value, one_line_errors, parse_as, read_json
from carmil.words import plural


def import_checkpoint(
    checkpoint: Path,
    tool: str,
    out: Path,
    *,
    classes: Sequence[str] = (),
    config: Path | None = None,
    bags: Path | None = None,
    labels: Path | None = None,
    named: Mapping[str, str | None] | None = None,
    mapping: Mapping[str, str] | None = None,
    encoder: str | None = None,
    device: str = "auto",
    log: Log = lambda line: None,
) -> Run:
    """Read a checkpoint and write it as a run. Nothing in the checkpoint is executed.

    classes: in the order of the model's outputs. config: the tool's own file of settings, by default the one beside the
    checkpoint. named: columns of `labels`; mapping: from its labels to classes. encoder: the encoder of the features
    that the model was trained on.
    """
    found = recognise(tool, read_state_dicts(checkpoint), checkpoint)
    _check_settings(found, checkpoint, config, log)
    notes: list[str] = []

    def tell(line: str) -> None:
        notes.append(line)
        log(line)

    target = Classes(names=_class_names(found, classes, checkpoint, tell))
    if bags is None and labels is not None:
        raise CarmilError(f"--labels {labels} needs the features of its slides: give them with --bags")
    settings = Settings(
        bags=out / "cohort" if bags is None else bags,
        labels=labels,
        out=out,
        model=found.model,
        options=dict(found.options),
        scale="none",
        init="own",
        threshold="0.5" if found.classes == 2 else "balanced",
        dtype="float32",
    )
    cohort = None if bags is None else _cohort(found, target, settings, bool(classes), named or {}, mapping or {}, tell)
    origin = Imported(tool, found.architecture, checkpoint.name, _sha256(checkpoint))
    begin_run(out, settings, _data(found, target, cohort, encoder, origin), notes=notes)
    population = Population(lambda: build(settings, found.in_features, target), [Member()])
    population.load_state({name: value.unsqueeze(0) for name, value in found.weights.items()})
    evaluate_imported(settings, target, population.to(pick_device(device)), cohort)
    run = read_run(out)
    write_text(out / "card.md", card(run))
    return run


def _check_settings(found: ForeignModel, checkpoint: Path, config: Path | None, log: Log) -> None:
    """Compare the tool's own file of settings, if there is one, with the weights; refuse settings of another model."""
    beside = (checkpoint.with_suffix(".json"), checkpoint.with_name("args.json"))
    path = config or next((path for path in beside if path.is_file()), None)
    if path is None:
        return
    given = parse_as(read_json(path), dict[str, Any], f"{path}", "expected the settings that the tool wrote")
    known = {name: value for name, value in found.settings.items() if name in given}
    if not known and config is None:
        return
    if not known:
        raise CarmilError(f"{path} has no settings of {found.architecture}: expected {', '.join(found.settings)}")
    for name, value in known.items():
        if given[name] != value:
            raise CarmilError(
                f"{path}: {name} is {describe_value(given[name])}, but {checkpoint.name} holds {found.architecture} with "
                f"{describe_value(value)}: give the settings of this checkpoint with --config"
            )
    log(f"{path} agrees with the weights ({', '.join(f'{name} {value}' for name, value in known.items())})")


def _class_names(found: ForeignModel, classes: Sequence[str], checkpoint: Path, log: Log) -> tuple[str, ...]:
    if not classes:
        names = tuple(f"class_{number}" for number in range(found.classes))
        log(f"{checkpoint.name} does not name its classes: they are called {', '.join(names)}; --classes names them")
        return names
    if len(classes) != found.classes or len(set(classes)) < len(classes):
        raise CarmilError(
            f"--classes {','.join(classes)}: {checkpoint} has {plural(found.classes, 'output')}, expected as many different "
            "names, in the order of the outputs"
        )
    return tuple(classes)


def _cohort(
    found: ForeignModel,
    target: Classes,
    settings: Settings,
    ordered: bool,
    named: Mapping[str, str | None],
    mapping: Mapping[str, str],
    log: Log,
) -> Cohort:
    """Open the bags and join them with their labels. ordered: whether the user gave the order of the classes."""
    if not ordered:
        raise CarmilError(
            "--bags needs --classes, in the order of the model's outputs, which its checkpoint does not contain"
        )
    bags, out = settings.bags, settings.out
    read = partial(read_labels_of, target, str(out), named=named, mapping=mapping)
    given = None if settings.labels is None else read(settings.labels)  # refuse a table before anything is packed
    store = open_bags(bags, out / "cohort", dtype=settings.dtype, log=log)
    if store.width != found.in_features:
        raise CarmilError(
            f"{bags} has {store.width} features per tile, the model reads {found.in_features}: expected features of the "
            "encoder that it was trained on"
        )
    if given is None and store.labels is not None:
        given = read(store.labels)
    if given is None:
        raise CarmilError(
            f"{bags} came without labels: name a table with --labels, or leave --bags out and give the slides to "
            "`carmil explain` and `carmil predict`"
        )
    outcomes = np.array([target.names.index(label) for label in given.table.labels])  # the table may lack a class
    return label_cohort(store, LabelsRead(given.table, target, outcomes), one_bag=None, allow_duplicates=True, log=log)


def _data(found: ForeignModel, target: Classes, cohort: Cohort | None, encoder: str | None, origin: Imported) -> Data:
    if cohort is None:
        nothing = (0,) * found.classes
        return Data("", "", found.in_features, target.names, 0, 0, nothing, (), encoder=encoder, imported=origin)
    known = torch.zeros(len(cohort.bags), dtype=torch.bool).index_fill(0, cohort.known, True)
    data = data_of(cohort, (((TEST,) * len(cohort.known),),), known)
    if None not in (encoder, data.encoder) and encoder != data.encoder:
        raise CarmilError(f"--encoder {encoder}: the features were encoded by {data.encoder}, expected the same")
    return replace(data, encoder=encoder or data.encoder, imported=origin)


def _sha256(path: Path) -> str:
    with one_line_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
