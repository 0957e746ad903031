"""All methods on real histology with known instances: nuclei of colorectal cancer, one bag per patient (CRCHistoPhenotypes).

A bag is positive if any nucleus is cancerous. The cohort is an ordinary one, and every method an ordinary run on five folds.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from carmil.datasets.crc_nuclei import read_nuclei
from carmil.datasets.stand_in import make_cohort
from carmil.datasets.stand_in_slides import FULL
from carmil.datasets.study_cohort import ModelProtocol, Protocol, StudyCohort
from carmil.evidence import explainers_of
from carmil.reproduce.method_runs import Method, train_methods
from carmil.reproduce.paper import Figure, figure, figure_text
from carmil.reproduce.recipes import Finding, Request, write_finding
from carmil.reproduce.table1 import EVIDENCE
from carmil.runs.run import Run
from carmil.studies.agreement import run_agreement
from carmil.studies.train import check_model
from carmil.tables import ResultTable

ENCODER = "resnet50"
MODELS = (
    "mean,max,abmil.gated,car/abmil.gated,clam.sb,car/clam.sb,clam.mb,acmil,car/acmil,rrt,car/rrt,"
    "additive,dsmil,car/dsmil,transmil,car/transmil,targeted/abmil.gated,cia/abmil.gated"
)


def model_protocol(model: str) -> ModelProtocol:
    """ACMIL without masking: it hides 6 of a map's top 10 instances, which were tiles among thousands. Here they are nuclei in
    bags of 6 to 699, and its validation loss is much lower without; its authors say that this may be so."""
    return ModelProtocol({"masked_share": 0.0} if model.endswith("acmil") else {})


PROTOCOL = Protocol(patience=50, precision="float32", of_model=model_protocol)


@dataclass(frozen=True)
class Row:
    """A method and one of its maps: AUC of the bags and AUPRC+ of the map, mean and standard deviation over the folds."""

    model: str
    evidence: str
    auc: Figure
    auprc: Figure | None
    machine: str


def crc_cohort(folder: Path, request: Request, *, epochs: int = PROTOCOL.epochs, seeds: int = 1) -> StudyCohort:
    """crc's patients as a cohort, built from the nuclei in `folder` where it is not there yet."""
    home = request.shared / "cohorts" / "crc-nuclei"
    make_cohort("crc", read_nuclei(folder), home, ENCODER, size=FULL, seed=0)
    return StudyCohort(
        name="crc",
        title="CRC nuclei",
        bags=home / ENCODER,
        labels=home / "labels.csv",
        measures=("auc", "auprc_path"),
        encoder=ENCODER,
        protocol=replace(PROTOCOL, epochs=epochs, seeds=seeds),
        stand_in=True,
        folder=f"crc-nuclei-epochs{epochs}-seeds{seeds}-seed{request.seed}",
    )


def run_crc(folder: Path, models: Sequence[str], request: Request, *, epochs: int = PROTOCOL.epochs) -> Finding:
    """Train the models that are not there yet and write crc.md and crc.json."""
    for model in models:
        check_model(model)
    cohort = crc_cohort(folder, request, epochs=epochs)
    runs = train_methods([cohort], [Method(model, model) for model in dict.fromkeys(models)], request)
    rows = [row for one in runs for row in _rows(one.run, one.values("auc"), request.device)]
    lines = tuple((row.model, row.evidence, figure_text(row.auc), figure_text(row.auprc), row.machine) for row in rows)
    heads = ("model", "evidence", "AUC", "AUPRC+", "measured on")
    table = ResultTable("Five folds by patient", heads, lines, names=2)
    finding = Finding((table,), conditions=(*conditions(cohort, request.seed), AUPRC))
    return write_finding("crc", request, finding, {"rows": [asdict(row) for row in rows]}, heading="CRC nuclei")


def _rows(run: Run, aucs: Sequence[float], device: str) -> list[Row]:
    """One row per map of the model; one without a map if it has none."""
    model, auc, machine = run.settings.model, figure(aucs), measured_on(run)
    maps = [method for method in EVIDENCE if method in explainers_of(run.model())]
    if not maps:
        return [Row(model, "none", auc, None, machine)]
    return [
        Row(model, one.explainer, auc, figure(one.measures["auprc_plus"].nanmean((1, 2)).tolist()), machine)
        for one in run_agreement(run, maps, device=device)
    ]


def measured_on(run: Run) -> str:
    return ", ".join(f"{name} {value}" for name, value in run.machine.items())


AUPRC = "AUPRC+: average precision of the map for the positive class, over test bags with cancerous nuclei and others"


def conditions(cohort: StudyCohort, seed: int) -> tuple[str, ...]:
    """How the models are trained, one line each."""
    protocol = cohort.protocol
    several = f" --seeds {protocol.seeds}" if protocol.seeds > 1 else ""
    return (
        f"mean ± standard deviation over {'seeds' if several else 'folds'}, in per cent; {protocol.folds} folds by patient, "
        f"{protocol.seeds} initialisation{'s' * bool(several)} of each, split seed {seed}",
        f"Adam, learning rate {protocol.lr:g} falling by a cosine over {protocol.epochs} epochs, weight decay "
        f"{protocol.weight_decay:g}, one bag per step, no scaling; the epoch with the lowest cross-entropy on validation bags, "
        "15 % of the training folds; ACMIL without masking",
        f"the same as `carmil train --preset 0.1 --epochs {protocol.epochs} --patience {protocol.patience} --precision "
        f"{protocol.precision}{several} --seed {seed}` on this cohort; other settings, such as the defaults of `carmil train`, "
        "give other figures",
    )
