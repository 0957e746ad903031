"""Counts and lists of names in sentences."""

from collections.abc import Iterable


def plural(n: int, one: str, many: str | None = None) -> str:
    """Return "1 slide" or "2 slides"; `many` is for what does not end in s: plural(n, "patient has", "patients have")."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def examples(names: Iterable[str], most: int = 2) -> str:
    """Return "'a', 'b' and 7 more"; "nothing" where there are no names."""
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - most:,} more" if len(quoted) > most else ""
    return f"{', '.join(quoted[:most])}{more}" or "nothing"
