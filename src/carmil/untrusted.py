"""Files that others wrote: they may be cut short, damaged, or made to do harm.

Every reader goes through here, so that whatever a library raises leaves as one `CarmilError` that names the file, and a
header cannot ask for more memory than its file can fill.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from carmil.errors import CarmilError

AGAIN = "it may be cut short or damaged; copy or extract it again"
MOST_UNFOLDED = 100  # features do not compress a hundredfold; a bomb does
SMALL = 64 * 2**20  # bytes that may unfold from next to nothing, e.g. labels that are all zero


@contextmanager
def one_line_errors(path: Path, advice: str = AGAIN) -> Iterator[None]:
    """Turn every error raised while a library reads `path` into one `CarmilError`.

    The libraries document no list of what they raise on garbage (observed: OSError, KeyError, ValueError, RuntimeError,
    EOFError, IndexError, OverflowError, AssertionError, BadZipFile, SafetensorError, zlib.error, SyntaxError, ...).
    Wrap the library's call in it, not our own logic.
    """
    try:
        yield
    except CarmilError:
        raise
    except FileNotFoundError as error:
        raise CarmilError(f"{path} is not there: it was moved or deleted, or a link leads nowhere") from error
    except PermissionError as error:
        raise CarmilError(f"{path} may not be read by this user: change its permissions (chmod u+r)") from error
    except MemoryError as error:
        raise CarmilError(f"{path} asks for more memory than there is: {advice}") from error
    except Exception as error:
        raise CarmilError(f"{path} cannot be read ({short(error)}): {advice}") from error


def short(error: BaseException) -> str:
    """The library's own message on one line of bounded length."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:160]}" if words else type(error).__name__


def must_hold(where: str, declared: int, limit: int) -> None:
    """Refuse `declared` bytes of values where the file can hold `limit` at most, before memory is taken."""
    if declared > limit:
        raise CarmilError(f"{where} declares {declared:,} bytes, and the file holds {limit:,} at most: {AGAIN}")


def read_json(path: Path, advice: str = AGAIN) -> Any:
    """The content of a JSON file, with or without a byte order mark."""
    with one_line_errors(path, advice):
        try:
            return json.loads(path.read_text(encoding="utf-8-sig"))
        except RecursionError:
            raise CarmilError(f"{path} is nested too deeply to be read: {advice}") from None
