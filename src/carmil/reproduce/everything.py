"""`carmil reproduce all`: every recipe, one page. If a recipe cannot run, the page has the reason, and the others continue."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from carmil import __version__
from carmil.errors import CarmilError
from carmil.provenance import machine
from carmil.recording import out_of_memory
from carmil.report.paper import Section, write_paper
from carmil.reproduce.recipes import WHAT_THAT_IS, Recipe, Request


def reproduce_all(
    recipes: Sequence[Recipe],
    request: Request,
    page: Path,
    *,
    command: str,
    say: Callable[[str], None] = lambda line: None,
) -> list[Section]:
    """Run the recipes under request.out, and write the page again after each."""
    sections = [Section(one.name, one.of, one.title, one.needs) for one in recipes]
    for i, recipe in enumerate(recipes):
        say(f"{i + 1}/{len(recipes)} {recipe.name}: {recipe.title}")
        sections[i] = _run(recipe, sections[i], replace(request, out=request.out / recipe.name))
        if sections[i].trouble:
            say(f"{recipe.name} could not run: {sections[i].trouble}")
        write_paper(page, sections, fast=request.fast, command=command, facts=_facts(request))
    return sections


def _run(recipe: Recipe, section: Section, request: Request) -> Section:
    started = time.perf_counter()
    try:
        finding = recipe.reproduce(request)
    except CarmilError as error:
        return replace(section, trouble=str(error))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not out_of_memory(error):
            raise
        return replace(section, trouble=f"memory was not enough: {' '.join(str(error).split())[:200]}")
    return replace(section, finding=finding, took=f"{time.perf_counter() - started:.0f} s")


def _facts(request: Request) -> dict[str, str]:
    return {
        "carmil": __version__,
        "device": request.device,
        "seed": str(request.seed),
        **WHAT_THAT_IS,
        "times": "less where runs of another recipe, or of an earlier try, were there already",
        **machine(),
    }
