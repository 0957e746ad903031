"""All methods on real histology with known instances: nuclei of colorectal cancer, one bag per patient (CRCHistoPhenotypes).

A bag is positive if any nucleus is cancerous. The cohort is an ordinary one, and every method an ordinary run on five folds.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from carmil.datasets.crc_nuclei import read_nuclei
from carmil.datasets.stand_in import make_cohort
from carmil.datasets.stand_in_slides import FULL
from carmil.datasets.study_cohort import ModelProtocol, Protocol, StudyCohort
from carmil.report.paper import Finding
from carmil.reproduce.method_runs import Method, measured_on, train_methods
from carmil.reproduce.recipes import Request, write_finding
from carmil.reproduce.table1 import EVIDENCE, agreement_rows, row_table
from carmil.studies.train import check_model

ENCODER = "resnet50"
MEASURES = {"auc": "AUC", "auprc_plus": "AUPRC+"}
MODELS = (
    "mean,max,abmil.gated,car/abmil.gated,clam.sb,car/clam.sb,clam.mb,acmil,car/acmil,rrt,car/rrt,"
    "additive,dsmil,car/dsmil,transmil,car/transmil,targeted/abmil.gated,cia/abmil.gated"
)


def model_protocol(model: str) -> ModelProtocol:
    """Return the protocol of a model; ACMIL is trained without masking.

    Masking hides 6 of a map's top 10 instances, which in ACMIL's paper are tiles among thousands, but here nuclei in
    bags of 6 to 699. The validation loss is much lower without masking, as its authors say may happen."""
    return ModelProtocol({"masked_share": 0.0} if model.endswith("acmil") else {})


PROTOCOL = Protocol(patience=50, precision="float32", of_model=model_protocol)


def crc_cohort(folder: Path, request: Request, *, epochs: int = PROTOCOL.epochs, seeds: int = 1) -> StudyCohort:
    """Return crc's patients as a cohort, built from the nuclei in `folder` unless it exists."""
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
    """Train the missing models and write crc.md and crc.json."""
    for model in models:
        check_model(model)
    cohort = crc_cohort(folder, request, epochs=epochs)
    runs = train_methods([cohort], [Method(model, model) for model in dict.fromkeys(models)], request)
    rows = [row for one in runs for row in agreement_rows(one, EVIDENCE, request)]
    return write_finding(
        "crc",
        request,
        {"rows": rows},
        tables=(row_table(cohort, rows, MEASURES),),
        conditions=(*crc_conditions(cohort, request.seed), AUPRC, measured_on([one.run for one in runs])),
        heading="CRC nuclei",
    )


AUPRC = "AUPRC+: average precision of the map for the positive class, over test bags with cancerous nuclei and others"


def crc_conditions(cohort: StudyCohort, seed: int) -> tuple[str, ...]:
    """Describe how the models are trained, one line each."""
    protocol = cohort.protocol
    several = f" --seeds {protocol.seeds}" if protocol.seeds > 1 else ""
    return (
        f"mean ± standard deviation over {'seeds' if several else 'folds'}, in per cent; {protocol.folds} folds by patient, split "
        f"seed {seed}, seeds of each: {protocol.seeds}",
        f"trained as by `carmil train --preset 0.1 --epochs {protocol.epochs} --patience {protocol.patience} --precision "
        f"{protocol.precision}{several} --seed {seed}` on this cohort (the epoch with the lowest cross-entropy on validation "
        "bags), ACMIL without masking; other settings, such as the defaults of `carmil train`, give other figures",
    )
