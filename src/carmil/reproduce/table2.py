"""Table 2: five pathology tasks, all methods; and its claim that no attention-based method does significantly better than CAR."""

from collections.abc import Mapping, Sequence

from carmil.reproduce.method_runs import Method, train_methods
from carmil.reproduce.paper_slides import TABLE2, paper_table
from carmil.reproduce.recipes import Finding, Request, write_finding
from carmil.reproduce.slide_cohorts import cohorts_in
from carmil.reproduce.slide_table import (
    ABMIL,
    CAR_COSINE,
    CAR_L1,
    MEASURES,
    READ,
    Difference,
    as_json,
    conditions,
    difference_table,
    differences,
    figures_table,
    in_words,
    pairs_of,
    picked,
    there,
    uninformed,
)
from carmil.tables import ResultTable

METHODS = (
    Method("Mean", "mean"),
    Method("Max", "max"),
    Method("CLAM", "clam.sb"),
    Method("AddMIL", "additive"),
    Method("DSMIL", "dsmil"),
    Method("TransMIL", "transmil"),
    Method("ACMIL", "acmil"),
    Method("RRT-MIL", "rrt"),
    Method("CIA-MIL", "cia/abmil.gated"),
    ABMIL,
    CAR_L1,
    CAR_COSINE,
)
ATTEND_NOT = METHODS[:2]
CHAMPIONS = (CAR_L1, CAR_COSINE, ABMIL)  # the last, who has no CAR, shows what the claim is worth
SURE = 0.05


def reproduce(request: Request, *, models: Sequence[str] = ()) -> Finding:
    """models: some of METHODS, by model or title; all without."""
    methods = picked(METHODS, models)
    found = cohorts_in(request)
    rows = train_methods(there(found), methods, request)
    beside = differences(pairs_of(rows, (CAR_L1, CAR_COSINE), (ABMIL,)))
    rivals = [one for one in methods if one not in (*ATTEND_NOT, CAR_L1, CAR_COSINE)]
    claims = {
        one.title: differences(pairs_of(rows, (one,), [other for other in rivals if other != one])) for one in CHAMPIONS
    }
    tables = [figures_table(rows), *([difference_table(beside)] if beside else []), *claim_tables(claims)]
    finding = Finding(
        (*tables, paper_table(TABLE2)),
        lines=(*in_words(beside), *uninformed(rows), *claim_lines(claims)),
        conditions=(*READ, *conditions(rows, found, request)),
    )
    every = [*beside, *(one for claim in claims.values() for one in claim)]
    return write_finding("table2", request, finding, as_json(rows, every))


def claim_tables(claims: Mapping[str, Sequence[Difference]]) -> list[ResultTable]:
    """Who does better than each champion: by the paper's test, and by the interval over test cases."""
    shown = {champion: found for champion, found in claims.items() if found}
    keys = {(one.cohort.title, one.measure): None for found in shown.values() for one in found}
    lines = tuple(
        (
            title,
            MEASURES[measure],
            *(
                _named([one for one in found if one.informed and (one.cohort.title, one.measure) == (title, measure)])
                for found in shown.values()
            ),
        )
        for title, measure in keys
    )
    heads = ("cohort", "measure", *(f"better than {champion}" for champion in shown))
    title = "Attention-based methods that do better: by paired t (5 %, Holm); by the 95 % interval over test cases (not corrected)"
    return [ResultTable(title, heads, lines, names=2 + len(shown))] if lines else []


def claim_lines(claims: Mapping[str, Sequence[Difference]]) -> list[str]:
    """The paper's claim as our runs have it, for each champion."""
    lines = []
    for champion, found in claims.items():
        if not found:
            continue
        counted = [one for one in found if one.informed]
        by_t, by_cases = ([one for one in counted if _better(one, test)] for test in ("t", "cases"))
        told = ", ".join(f"{one.found.second} on {one.cohort.title} by {MEASURES[one.measure]}" for one in by_t)
        idle = f" ({len(found) - len(counted)} more, of two whose probabilities tell nothing, are left out)"
        lines.append(
            f"of {len(counted)} comparisons of {champion} with attention-based methods{idle if len(counted) < len(found) else ''} "
            "the paired t-test, corrected, finds "
            f"{f'in {len(by_t)} the other better ({told})' if by_t else 'in none the other better'}; the interval over test "
            f"cases, which is not corrected, in {len(by_cases) or 'none'}"
        )
    if claims.get(ABMIL.title) and any(claims[one.title] for one in (CAR_L1, CAR_COSINE)):
        lines.append(
            "ABMIL stands in that table beside CAR as a control: where nothing does significantly better than ABMIL either, the "
            "claim tells what these tests can see, not what CAR is worth"
        )
    return lines


def _better(one: Difference, test: str) -> bool:
    """Is the second method surely better?"""
    return (one.found.holm_t < SURE and one.found.difference < 0) if test == "t" else one.found.high < 0


def _named(found: Sequence[Difference]) -> str:
    names = [", ".join(one.found.second for one in found if _better(one, test)) or "none" for test in ("t", "cases")]
    return f"{names[0]}; {names[1]}" if found else "–"
