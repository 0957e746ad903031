"""The one error a user may see."""


class CarmilError(Exception):
    """What was given does not fit. The message is one line: what, where, what was expected, what to do."""
