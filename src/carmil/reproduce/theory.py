"""The paper's appendix on trained models: agreement of delta = u_cf - u with -g, on digit bags, for both distances."""

from collections.abc import Sequence

from carmil.evidence.counterfactual_direction import SHUFFLED, TENTH, Followed, followed
from carmil.progress import console
from carmil.report.paper import Finding, Picture
from carmil.report.theory_figure import TheoryPanels, draw_theory
from carmil.reproduce.digits import TASKS, Point, digit_cohorts, training_lines
from carmil.reproduce.method_runs import models_of_run, train_methods
from carmil.reproduce.paper import figure, figure_text, interval_text
from carmil.reproduce.recipes import Request, write_finding
from carmil.tables import ResultTable

RIVALS = {
    "all others": "the mean of all other classes: -g is then the way that the loss L_diff falls steepest from u_cf = u",
    "runner-up": "the class with the next largest F(u), known before u_cf is looked at",
    "weighed most": "the class whose logit fell most beside the bag's own, which the appendix calls the most competitive; chosen "
    "after u_cf is known, as the one with the smallest margin",
}
WORDS = {
    "pearson": "Pearson",
    "spearman": "Spearman",
    "on_largest": "share on the largest g",
    "efficiency": "share of the best gain",
    "with_u": "Pearson with u",
}
MAIN = "all others"  # the rival, of RIVALS, that needs no choice
DISTANCES = {"l1": "L1", "cosine": "cosine"}
CAPTION = (
    "One row per task. The correlation in each bag, dotted where u_cf - u is shuffled; then for each distance the density of "
    "the instances of all test bags and models, -g across and u_cf - u up, both centred and scaled in their bag, and the "
    "margin's change against its first-order prediction, one dot per bag."
)
HOW = (
    "g: gradient of the margin F_y - F_k by the scores at u, y the bag's class, k the rival; exact for these classifiers. u_cf - u "
    "is taken less its mean where it is correlated and less its median where its length counts: a constant changes no attention",
    *(f"rival: {name}: {which}" for name, which in RIVALS.items()),
    f"share on the largest g: of the L1 length of u_cf - u what lies on one instance of {TENTH} with the largest |g|; the optimum "
    "under an L1 budget has all of it on the largest. Share of the best gain: of what that optimum gains, from -1 to 1",
    "Pearson with u: where it is near 1 or -1, u_cf is u on another scale, which a cosine distance does not see",
    "mean over all test bags and initialisations, in brackets its 95 % interval: bootstrap over bags and initialisations "
    "together; shuffled: u_cf - u at other instances of its bag",
    "the branch is trained for a mean over training bags, by one attention module for all bags, and its L1 term weighs the length "
    "rather than bounding it: that it should be the optimum bag by bag is not claimed",
)


def reproduce(request: Request, *, tasks: Sequence[str] = TASKS) -> Finding:
    """Test both distances and, with more than two classes, every definition of the rival."""
    cohorts = digit_cohorts(request, tasks)
    trained = train_methods(cohorts, [Point(distance=distance).method for distance in DISTANCES], request)
    results: dict[tuple[str, str, str], Followed] = {}  # by task, distance and rival
    with console.status("comparing u_cf - u with -g"):
        for one in trained:
            for rival in RIVALS if len(one.run.outputs) > 2 else [MAIN]:
                following = followed(*models_of_run(one.run, request.device), rival=rival, seed=request.seed)
                results[one.cohort.title, DISTANCES[one.run.settings.distance or "l1"], rival] = following
    panels = [
        TheoryPanels(
            task,
            distance,
            interval_text(*one.intervals["pearson"], ".2f"),
            one.measures["pearson"],
            one.measures["pearson" + SHUFFLED],
            one.instances,
            one.promised,
            one.margin,
        )
        for (task, distance, rival), one in results.items()
        if rival == MAIN
    ]
    picture = Picture(draw_theory(panels, request.out / "theory.png"), CAPTION)
    names = ("task", "distance", "rival")
    columns = {name + end: title + end.replace("_", ", ") for name, title in WORDS.items() for end in ("", SHUFFLED)}
    follows, first_order, rows = [], [], []
    for key, each in results.items():
        follows.append((*key, *(interval_text(*each.intervals[name], "+.3f") for name in columns)))
        spreads = (each.r2, each.slope, each.margin.mean(1), each.promised.mean(1))
        first_order.append((*key, *(figure_text(figure(values, 1), ".2f") for values in spreads)))
        rows.append(dict(zip(names, key, strict=True)) | each.intervals | {"r2": each.r2, "slope": each.slope})
    promise = "The margin's change, and the change that -g . (u_cf - u) promises: mean ± standard deviation over initialisations"
    heads = ("R2 of the promise", "slope", "mean change", "mean promise")
    tables = (
        ResultTable("u_cf - u against -g, bag by bag", (*names, *columns.values()), tuple(follows), names=3),
        ResultTable(promise, (*names, *heads), tuple(first_order), names=3),
    )
    conditions = (*HOW, *training_lines(cohorts, [one.run for one in trained]))
    return write_finding("theory", request, {"rows": rows}, tables=tables, pictures=(picture,), conditions=conditions)
