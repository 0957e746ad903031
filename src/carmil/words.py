"""Counts in sentences."""


def plural(n: int, one: str, many: str | None = None) -> str:
    """Return "1 slide" or "2 slides"; `many` is for what does not end in s: plural(n, "patient has", "patients have")."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
