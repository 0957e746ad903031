"""The paper's interpretability table, and ours: every explainer that fits a model, on digit bags.

With the same --out and settings as table1, its runs are used again, and only maps are computed.
"""

from collections.abc import Sequence
from itertools import product

from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError
from carmil.evidence.explainers import EXPLAINERS, check_explainers, explainers_of
from carmil.progress import console
from carmil.report.paper import Finding
from carmil.reproduce import table1
from carmil.reproduce.digits import build, digit_cohorts, digit_methods
from carmil.reproduce.method_runs import Method, train_methods
from carmil.reproduce.recipes import Request
from carmil.reproduce.table1 import agreement_rows, digit_table

MODELS = ("abmil", "car/abmil")
MEASURES = {**table1.MEASURES, "auroc": "AUROC±", "ndcg": "NDCG"}
SLOW = ("single", "integrated_gradients")  # explainers with many passes: left out for a grid of several points
COLUMNS = (
    "AUPRC+, AUPRC±, AUROC± and NDCG are means over (bag, class) pairs with instances of both kinds; AUROC± takes its negatives "
    "by the rule too, NDCG is of the map alone, with gains truth + 1",
    "AUPRC± interval: 95 % bootstrap over test bags of the mean over the initialisations",
)


def reproduce(request: Request) -> Finding:
    """Evaluate ABMIL and CAR-MIL with every explainer that fits them."""
    return run_interpretability(digit_cohorts(request), digit_methods(MODELS), request)


def run_interpretability(
    cohorts: Sequence[StudyCohort], methods: Sequence[Method], request: Request, *, explainers: Sequence[str] = ()
) -> Finding:
    """Train and explain whatever is missing; write interpretability.md and interpretability.json.

    explainers: by default all that fit a model, without the slow ones if a model has several weights.
    """
    _check(cohorts, methods, explainers)
    several = len(methods) > len({method.model for method in methods})
    names = explainers or [name for name in EXPLAINERS if not several or name not in SLOW]
    runs, rows = train_methods(cohorts, methods, request), []
    for one in runs:
        with console.status(f"maps of {one.method.title} on {one.cohort.title}"):
            rows += agreement_rows(one, names, request, intervals=True)
    left_out = [name for name in EXPLAINERS if name not in names]
    lines = (
        [f"explainers that were not asked{' in a grid' * (not explainers)}: {', '.join(left_out)}"] if left_out else []
    )
    return digit_table("interpretability", cohorts, runs, rows, request, MEASURES, [*COLUMNS, *lines])


def _check(cohorts: Sequence[StudyCohort], methods: Sequence[Method], explainers: Sequence[str]) -> None:
    """Refuse, before any training, an explainer that is unknown or fits none of the models."""
    check_explainers(explainers)
    fitting = {method.model: explainers_of(build(method, cohort)) for cohort, method in product(cohorts, methods)}
    for name in explainers:
        if not any(name in names for names in fitting.values()):
            raise CarmilError(
                f"--explainers {name}: fits none of {', '.join(fitting)}; "
                f"{methods[0].model} has {', '.join(fitting[methods[0].model])}"
            )
