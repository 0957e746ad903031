"""Counts, lists of names, numbers and probabilities in text."""

import math
from collections.abc import Iterable


def plural(n: int, one: str, many: str | None = None) -> str:
    """Return "1 slide" or "2 slides"; `many` is for plurals that do not end in s: plural(n, "patient has", "patients have")."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def examples(names: Iterable[str], most: int = 2) -> str:
    """Return "'a', 'b' and 7 more"; "nothing" if there are no names."""
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - most:,} more" if len(quoted) > most else ""
    return f"{', '.join(quoted[:most])}{more}" or "nothing"


def probability_text(p: float, unit: str = " %") -> str:
    """Return a probability in per cent: "87.3 %", never "0 %" or "100 %", since no model is certain.

    The page of the viewer writes the same text (page/words.js). unit: empty in tables whose heading has it.
    """
    tenths = math.floor(1000 * p + 0.5)
    return ("> 99.9" if tenths > 999 else "< 0.1" if tenths < 1 else f"{tenths / 10:.1f}") + unit


def percent_text(share: float) -> str:
    """Return a share that was chosen, such as a level: "90 %", "97.5 %"."""
    return f"{100 * share:g} %"


def number_in(text: str) -> float | None:
    """Return the number that a text spells; None if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return None
