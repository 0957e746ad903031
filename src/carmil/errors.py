"""The one error a user may see."""

import difflib
from collections.abc import Iterable

LONGEST = 2000  # characters of a message


class CarmilError(Exception):
    """What was given does not fit. The message is one line: what, where, what was expected, what to do.

    Names and libraries' messages in it may hold line breaks and terminal codes of a file: they are made visible, not passed on.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """The text on one line of at most LONGEST characters; what cannot be printed is written as an escape."""
    words = " ".join(text.split()) if "\n" in text or "\r" in text else text
    plain = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in words)
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 4]} ..."


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One line for a name that is not there: what was given, what is close, what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {kind} {name!r}; {hint}there is: {', '.join(known)}"
