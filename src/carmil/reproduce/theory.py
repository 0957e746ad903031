"""The paper's appendix on trained models: does u_cf - u follow -g, and by how much? On digit bags, for both distances."""

from collections.abc import Sequence

from carmil.progress import console
from carmil.reproduce.branch_outputs import models_of_run
from carmil.reproduce.digits import TASKS, Point, digit_cohorts, training_lines
from carmil.reproduce.method_runs import train_methods
from carmil.reproduce.recipes import Finding, Picture, Request, write_finding
from carmil.reproduce.theory_picture import Row, draw_theory
from carmil.reproduce.theory_reading import MEASURES, RIVALS, TENTH, Followed, followed
from carmil.tables import ResultTable

MAIN = "all others"  # of RIVALS: it needs no choice
DISTANCES = {"l1": "L1", "cosine": "cosine"}


def reproduce(request: Request, *, tasks: Sequence[str] = TASKS) -> Finding:
    """Both distances; of more than two classes every way to name the rival."""
    cohorts = digit_cohorts(request, tasks)
    found = train_methods(cohorts, [Point(distance=distance).method for distance in DISTANCES], request)
    rows: list[Row] = []
    with console.status("comparing u_cf - u with -g"):
        for one in found:
            several, distance = len(one.run.classes) > 2, DISTANCES[one.run.settings.distance or "l1"]
            for rival in RIVALS if several else [MAIN]:
                following = followed(*models_of_run(one.run, request.device), rival=rival, seed=request.seed)
                rows.append(Row(one.cohort.title, distance, rival, following, several))
    main = [row for row in rows if row.rival == MAIN]
    picture = draw_theory(main, request.out / "theory.png")
    caption = (
        "Each task a row. The correlation in each bag, dotted where u_cf - u is shuffled; then for each distance the density of "
        "the instances of all test bags and models, -g across and u_cf - u up, both centred and scaled in their bag, and the "
        "margin's change against what the first order promises, a dot a bag."
    )
    lines = [
        *(_said(row) for row in main),
        *(_rival_said(row) for row in rows if row.rival != MAIN),
    ]
    conditions = [
        "a constant added to all scores of a bag changes no attention: g sums to zero by itself, u_cf - u is taken less its mean "
        "where it is correlated (a cosine is then the same as Pearson's correlation) and less its median where its length counts",
        "g is the gradient of the margin F_y - F_k by the scores at u, exact for these classifiers with a hidden layer too; y is "
        f"the bag's class, k {RIVALS[MAIN]}",
        f"share on the largest g: of the L1 length of u_cf - u what lies on one instance of {TENTH} with the largest |g|; the "
        "optimum under an L1 budget has all of it on the single largest. Share of the best gain: -g . (u_cf - u) of what that "
        "optimum of the same length gains, from -1 to 1",
        "Pearson with u: where it is near 1 or -1, u_cf is u on another scale, which a cosine distance does not see",
        "mean over all test bags and initialisations, in brackets its 95 % interval: bootstrap over bags and initialisations "
        "together; shuffled: u_cf - u at other instances of its bag",
        "the branch is trained for a mean over training bags and by one attention module for all bags, and its L1 term weighs "
        "the length rather than bounding it: that it should be the optimum bag by bag is not claimed",
        *training_lines(cohorts, [one.run for one in found]),
    ]
    finding = Finding(tuple(_tables(rows)), (Picture(picture, caption),), tuple(lines), tuple(conditions))
    return write_finding("theory", request, finding, {"rows": [_facts(row) for row in rows]})


def _tables(rows: list[Row]) -> list[ResultTable]:
    names = ("task", "distance", "rival")
    return [
        ResultTable(
            "u_cf - u against -g, bag by bag",
            (*names, *(head for title in MEASURES.values() for head in (title, "shuffled"))),
            tuple(
                (*_names(row), *(_bounds(row.found, name, shuffled) for name in MEASURES for shuffled in (False, True)))
                for row in rows
            ),
            names=3,
        ),
        ResultTable(
            "The margin's change, and what -g . (u_cf - u) promises: mean ± standard deviation over initialisations",
            (*names, "R2 of the promise", "slope", "mean change", "mean promise"),
            tuple((*_names(row), *_first_order(row.found)) for row in rows),
            names=3,
        ),
    ]


def _names(row: Row) -> tuple[str, str, str]:
    return row.task, row.distance, row.rival if row.several else "the other class"


def _bounds(found: Followed, name: str, shuffled: bool) -> str:
    mean, low, high = found.interval(name, shuffled=shuffled)
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def _first_order(found: Followed) -> tuple[str, ...]:
    r2, slope = found.explained()
    means = (found.margin.mean(1).tolist(), found.promised.mean(1).tolist())
    return tuple(_spread(values) for values in (r2, slope, *means))


def _spread(values: list[float]) -> str:
    import numpy as np

    known = np.array([value for value in values if value == value])
    if not len(known):
        return "–"
    return f"{known.mean():.2f}" + (f" ± {known.std(ddof=1):.2f}" if len(known) > 1 else "")


def _said(row: Row) -> str:
    """In words, from the figures: does it follow, does the first order hold, is it concentrated?"""
    found = row.found
    mean, low, high = found.interval("pearson")
    by_chance = found.interval("pearson", shuffled=True)[0]
    if low > 0.5:
        word = "follows -g"
    elif low > 0:
        word = "leans towards -g, and no more"
    elif high < 0:
        word = "goes against -g"
    else:
        word = "cannot be told from chance"
    _, slopes = found.explained()
    share, gain = found.interval("on_largest"), found.interval("efficiency")
    chance, with_u = found.interval("on_largest", shuffled=True)[0], found.interval("with_u")[0]
    scale = f". It is mostly u on another scale: its correlation with u is {with_u:.2f}" if abs(with_u) > 0.9 else ""
    return (
        f"{row.task}, {row.distance}: u_cf - u {word}: correlation {mean:.2f} [{low:.2f}, {high:.2f}] in a bag, shuffled "
        f"{by_chance:.2f}. The first order promises the margin's change with R2 {_first_order(found)[0]} and slope "
        f"{_spread(slopes)}. {share[0]:.0%} of the change lies on the tenth of largest |g| ({chance:.0%} by chance), and it gains "
        f"{gain[0]:.0%} of what the L1 optimum of its length would{scale}"
    )


def _rival_said(row: Row) -> str:
    mean, low, high = row.found.interval("pearson")
    return f"{row.task}, {row.distance}, against {RIVALS[row.rival]}: correlation {mean:.2f} [{low:.2f}, {high:.2f}]"


def _facts(row: Row) -> dict[str, object]:
    r2, slope = row.found.explained()
    return {
        "task": row.task,
        "distance": row.distance,
        "rival": row.rival,
        **{name: row.found.interval(name) for name in MEASURES},
        **{f"{name}_shuffled": row.found.interval(name, shuffled=True) for name in MEASURES},
        "r2": r2,
        "slope": slope,
    }
