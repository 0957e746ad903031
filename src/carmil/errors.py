"""The error for invalid input, whose message is displayed to users."""

import difflib
from collections.abc import Iterable

LONGEST = 2000  # characters of a message


class CarmilError(Exception):
    """Invalid input. The message is one line: what, where, what was expected, what to do.

    Line breaks and terminal codes, which may come from names in a file or from a library, are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """Return the text on one line of at most LONGEST characters, with escapes for what cannot be printed."""
    words = " ".join(text.split()) if "\n" in text or "\r" in text else text
    plain = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in words)
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 4]} ..."


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return one line about an unknown name: the name, the closest known one, and all known ones."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {kind} {name!r}; {hint}expected one of {', '.join(known)}"
