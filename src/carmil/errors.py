"""The one error a user may see."""

import difflib
from collections.abc import Iterable


class CarmilError(Exception):
    """What was given does not fit. The message is one line: what, where, what was expected, what to do."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One line for a name that is not there: what was given, what is close, what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {kind} {name!r}; {hint}there is: {', '.join(known)}"
