"""Files that others wrote: they may be cut short, damaged, or made to do harm.

Every reader goes through here, so that whatever a library raises leaves as one `CarmilError` that names the file, and a
header cannot ask for more memory than its file can fill.
"""

import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from carmil.errors import CarmilError

if TYPE_CHECKING:
    import pyarrow as pa

AGAIN = "it may be cut short or damaged; copy or extract it again"
MOST_UNFOLDED = 100  # features do not compress a hundredfold; a bomb does
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")  # an escape that is one only beside another: \ud83d\ude00
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
    if "int_max_str_digits" in words:
        words = "a whole number of too many digits"
    return f"{type(error).__name__}: {words[:160]}" if words else type(error).__name__


def must_hold(where: str, declared: int, limit: int) -> None:
    """Refuse `declared` bytes of values where the file can hold `limit` at most, before memory is taken."""
    if declared > limit:
        raise CarmilError(f"{where} declares {declared:,} bytes, and the file holds {limit:,} at most: {AGAIN}")


def read_json(path: Path, advice: str = AGAIN) -> Any:
    """The content of a JSON file, with or without a byte order mark."""
    with one_line_errors(path, advice):
        text = path.read_text(encoding="utf-8-sig")
        try:
            found = json.loads(text)
            if HALF_CHARACTER.search(text):
                json.dumps(found, ensure_ascii=False).encode()  # half a character is no text: no table can hold it
        except RecursionError:
            raise CarmilError(f"{path} is nested too deeply to be read: {advice}") from None
        return found


def read_parquet(path: Path, advice: str = AGAIN) -> "pa.Table":
    """The table of a Parquet file. Every column has a name of its own, and no lists or structs.

    A file repeats a value, or a word of its dictionary, as often as it likes: what that unfolds to is counted before memory is
    taken. What the file says of its column chunks is not looked at: pyarrow ends the process where that is damaged.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from pyarrow import types as kinds

    with one_line_errors(path, advice):
        limit = max(path.stat().st_size * MOST_UNFOLDED, SMALL)
        with pq.ParquetFile(path) as file:
            must_hold(str(path), 8 * file.metadata.num_rows * file.metadata.num_columns, limit)
            names = file.schema_arrow.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise CarmilError(f"{path} has the column {shown(twice)} twice: {advice}")
            for field in file.schema_arrow:
                if kinds.is_nested(field.type):
                    raise CarmilError(f"{path}: {field.name} holds {field.type}: expected numbers or words; {advice}")
            words = [field.name for field in file.schema_arrow if _is_words(field.type)]
        table = pq.read_table(path, read_dictionary=words)
        for at, field in enumerate(table.schema):
            if not kinds.is_dictionary(field.type) or not _is_words(field.type.value_type):
                continue
            column = table.column(at)
            lengths = [
                pc.sum(pc.binary_length(part.dictionary).take(part.indices)).as_py() or 0 for part in column.chunks
            ]
            must_hold(f"{path}: {field.name}", sum(lengths), limit)
            table = table.set_column(at, field.name, column.cast(field.type.value_type))
        table.validate(full=True)  # that words are UTF-8, among other things
        return table


def _is_words(kind: "pa.DataType") -> bool:
    from pyarrow import types as kinds

    return any(fits(kind) for fits in (kinds.is_string, kinds.is_large_string, kinds.is_binary, kinds.is_large_binary))


def check_type(value: Any, kind: Any, where: str, advice: str = "") -> None:
    """Refuse a value of JSON or YAML that is not of this type; `where` names its place in the message.

    Types: str, bool, int (of 64 bits), float (any finite number), None, list[...], dict[str, ...], Literal, unions, Any and
    TypedDict, whose unknown keys are ignored.
    """
    problem = _mismatch(value, kind)
    if problem is not None:
        place, found, expected = problem
        named = f"{where}: {place.lstrip('.') or 'its content'} is {found}: expected {expected}"
        raise CarmilError(f"{named}; {advice}" if advice else named)


def _mismatch(value: Any, kind: Any) -> tuple[str, str, str] | None:
    """The place of the first value that does not fit, what it is and what was expected; None where all fits."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (origin is Literal and value in arguments and not isinstance(value, list | dict)):
        return None
    if origin in (typing.Union, types.UnionType):
        problems = [_mismatch(value, one) for one in arguments]
        deepest = max(problems, key=lambda problem: len(problem[0]) if problem is not None else 0)
        return None if None in problems else deepest if deepest and deepest[0] else _found(value, kind)
    parts: list[tuple[str, Any, Any]]
    if origin is list and isinstance(value, list):
        parts = [(f"[{i}]", item, arguments[0]) for i, item in enumerate(value)]
    elif origin is dict and isinstance(value, dict) and all(isinstance(name, str) for name in value):
        parts = [(f".{name}", item, arguments[1]) for name, item in value.items()]
    elif typing.is_typeddict(kind) and isinstance(value, dict):
        missing = sorted(kind.__required_keys__ - set(value))
        if missing:
            return f".{missing[0]}", "missing", _type_name(typing.get_type_hints(kind)[missing[0]])
        parts = [(f".{name}", value[name], one) for name, one in typing.get_type_hints(kind).items() if name in value]
    else:
        fits = origin is None and not typing.is_typeddict(kind) and _is_plain(value, kind)
        return None if fits else _found(value, kind)
    for place, item, one in parts:
        problem = _mismatch(item, one)
        if problem is not None:
            return place + problem[0], problem[1], problem[2]
    return None


def _is_plain(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return value is None if kind in (None, types.NoneType) else isinstance(kind, type) and isinstance(value, kind)


def shown(value: Any) -> str:
    """A value for a message: words and numbers as they are, of anything else the kind."""
    if isinstance(value, int) and abs(value) >= 2**63:
        return "a whole number of too many digits"
    if isinstance(value, str | int | float | types.NoneType):
        return repr(value[:60] if isinstance(value, str) else value)
    return (
        "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
    )


def _found(value: Any, kind: Any) -> tuple[str, str, str]:
    return "", shown(value), _type_name(kind)


def _type_name(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType, Literal):
        return " or ".join(str(one) if origin is Literal else _type_name(one) for one in arguments)
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "null"}
    names |= {list: "a list", dict: "an object"}
    return names.get(origin or kind, "an object")
