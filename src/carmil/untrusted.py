"""Safe reading of files from others, which may be truncated, damaged or malicious.

Every reader uses this module: any error of a library becomes one `CarmilError` that names the file, and no header can
request more memory than its file can fill.
"""

import difflib
import json
import re
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from carmil.errors import CarmilError

if TYPE_CHECKING:
    import pyarrow as pa
    from pydantic import ValidationError

T = TypeVar("T")

AGAIN = "it may be truncated or damaged; copy or extract it again"
MOST_UNFOLDED = 100  # largest compression ratio; features do not compress a hundredfold, but a decompression bomb does
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")  # one half of a surrogate pair: \ud83d\ude00
SMALL = 64 * 2**20  # bytes that are always allowed, e.g. labels that are all zero


@contextmanager
def one_line_errors(path: Path, advice: str = AGAIN, *, streams: bool = False) -> Iterator[None]:
    """Turn every error raised while a library reads `path` into one `CarmilError`.

    Pipes and devices, on which a reader might wait forever, are refused unless `streams` is true.

    The libraries do not document the errors that they raise on invalid files (observed: OSError, KeyError, ValueError,
    RuntimeError, EOFError, IndexError, OverflowError, AssertionError, BadZipFile, SafetensorError, zlib.error,
    SyntaxError, ...). Wrap only the call of the library, not our own code.
    """
    try:
        if not streams:
            check_not_stream(path)
        yield
    except CarmilError:
        raise
    except FileNotFoundError as error:
        raise CarmilError(f"{path} does not exist: it was moved or deleted, or is a broken link") from error
    except PermissionError as error:
        raise CarmilError(f"{path} is not readable by this user: change its permissions (chmod u+r)") from error
    except IsADirectoryError as error:
        raise CarmilError(f"{path} is a folder: expected a file; name one in it") from error
    except MemoryError as error:
        raise CarmilError(f"{path} needs more memory than is available: {advice}") from error
    except Exception as error:
        raise CarmilError(f"{path} cannot be read ({short_message(error)}): {advice}") from error


def check_not_stream(path: Path) -> None:
    """Refuse a pipe, socket or device; a missing file passes."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise CarmilError(f"{path} is a pipe, socket or device: expected a file; save the data to one")


def short_message(error: BaseException) -> str:
    """Return the message of a library on one line of bounded length."""
    words = " ".join(str(error).split())
    if "int_max_str_digits" in words:
        words = "a whole number of too many digits"
    return f"{type(error).__name__}: {words[:160]}" if words else type(error).__name__


def check_declared_size(where: str, declared: int, limit: int) -> None:
    """Refuse `declared` bytes of values if the file can hold at most `limit`, before memory is allocated."""
    if declared > limit:
        raise CarmilError(f"{where} declares {declared:,} bytes, but the file holds at most {limit:,}: {AGAIN}")


def read_json(path: Path, advice: str = AGAIN) -> Any:
    """Return the content of a JSON file, with or without a byte order mark."""
    with one_line_errors(path, advice):
        text = path.read_text(encoding="utf-8-sig")
        try:
            found = json.loads(text, parse_int=_whole_number)
            if HALF_CHARACTER.search(text):
                json.dumps(
                    found, ensure_ascii=False
                ).encode()  # half a surrogate pair is not text, and no table can store it
        except RecursionError:
            raise CarmilError(f"{path} is nested too deeply: {advice}") from None
        return found


def _whole_number(digits: str) -> int:
    """Parse a 64-bit integer: no library accepts longer ones, and some take minutes to read them."""
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**63:
        raise ValueError("a whole number of too many digits")
    return number


def read_parquet(path: Path, advice: str = AGAIN) -> "pa.Table":
    """Return the table of a Parquet file. Column names must be unique, and no column may hold lists or structs.

    A file can repeat a value or a dictionary word any number of times, so the decoded size is checked before memory is allocated.
    The statistics of column chunks are not used: pyarrow aborts the process if they are damaged.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from pyarrow import types as kinds

    with one_line_errors(path, advice):
        limit = max(path.stat().st_size * MOST_UNFOLDED, SMALL)
        with pq.ParquetFile(path) as file:
            check_declared_size(str(path), 8 * file.metadata.num_rows * file.metadata.num_columns, limit)
            names = file.schema_arrow.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise CarmilError(f"{path} has the column {describe_value(twice)} twice: {advice}")
            for field in file.schema_arrow:
                if kinds.is_nested(field.type):
                    raise CarmilError(f"{path}: {field.name} holds {field.type}: expected numbers or text; {advice}")
            words = [field.name for field in file.schema_arrow if _is_words(field.type)]
        table = pq.read_table(path, read_dictionary=words)
        for at, field in enumerate(table.schema):
            if not kinds.is_dictionary(field.type) or not _is_words(field.type.value_type):
                continue
            column = table.column(at)
            lengths = [
                pc.sum(pc.binary_length(part.dictionary).take(part.indices)).as_py() or 0 for part in column.chunks
            ]
            check_declared_size(f"{path}: {field.name}", sum(lengths), limit)
            table = table.set_column(at, field.name, column.cast(field.type.value_type))
        table.validate(full=True)  # among other things, that text is UTF-8
        return table


def _is_words(kind: "pa.DataType") -> bool:
    from pyarrow import types as kinds

    return any(fits(kind) for fits in (kinds.is_string, kinds.is_large_string, kinds.is_binary, kinds.is_large_binary))


def parse_as(value: Any, kind: type[T], where: str, advice: str = "") -> T:
    """Return a value of JSON or YAML as `kind`, a dataclass, TypedDict or plain type; refuse it if it is invalid.

    The message begins with `where` and names the first invalid value and what was expected. Types are strict (true is not a number,
    1 is not text), numbers are finite, and unknown keys are ignored.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        raise CarmilError(f"{where}: it contains NaN or an infinite number{_then(advice)}") from None
    except TypeError:
        problem = _foreign(value) or "a key that is not text"
        expected = "expected text, numbers, lists and objects"
        raise CarmilError(f"{where}: {expected}, and found {problem}{_then(advice)}") from None
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise CarmilError(f"{where}: {_problem(error, value)}{_then(advice)}") from None


def validated(value: Mapping[str, Any], kind: type[T], where: str) -> T:
    """Return settings written by a user as `kind`, a dataclass; as `parse_as`, but text is accepted for numbers and booleans."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise CarmilError(f"{where}: {_problem(error, value)}") from None


def read_json_as(path: Path, kind: type[T], words: str = "cannot be read", advice: str = AGAIN) -> T:
    """Return the content of a JSON file as `kind`, see `parse_as`; `words` describe the problem of the file."""
    return parse_as(read_json(path, advice), kind, f"{path} {words}", advice)


def _foreign(value: Any) -> str:
    """Describe the first value of YAML that JSON does not have, such as a date."""
    if isinstance(value, dict):
        return next((_foreign(item) for item in value.values() if _foreign(item)), "")
    if isinstance(value, list):
        return next((_foreign(item) for item in value if _foreign(item)), "")
    return "" if isinstance(value, str | int | float | types.NoneType) else describe_value(value)


def _then(advice: str) -> str:
    return f"; {advice}" if advice else ""


def _problem(error: "ValidationError", value: Any) -> str:
    """Describe the first problem: its place, the value, and what was expected (for a union, any of its types)."""
    problems: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for one in error.errors(include_url=False):
        place, there = "", value
        for part in one["loc"]:
            if isinstance(there, list) and isinstance(part, int) and part < len(there):
                place, there = f"{place}[{part}]", there[part]
            elif isinstance(there, dict) and part in there:
                place, there = f"{place}.{part}", there[part]
            elif one["type"] == "missing":
                place, there = f"{place}.{part}", one
                break
        values.setdefault(place, "missing" if there is one else describe_value(there))
        if one["type"] == "literal_error":
            problems.setdefault(place, []).append(_choice(one["ctx"]["expected"], there))
        else:
            problems.setdefault(place, []).append(_EXPECTED.get(one["type"], "") or _lowered(one["msg"]))
    place, expected = next(iter(problems.items()))
    if values[place] == "missing":
        return f"{place.lstrip('.')} is missing"
    return f"{place.lstrip('.') or 'its content'} is {values[place]}: expected {' or '.join(dict.fromkeys(expected))}"


def _choice(expected: str, value: Any) -> str:
    """Return the values allowed by pydantic, and the nearest to the given value."""
    known = re.findall(r"'([^']*)'", expected)
    close = difflib.get_close_matches(str(value), known, n=1)
    return f"one of {', '.join(known)}" + (f"; did you mean {close[0]!r}?" if close else "")


def _lowered(message: str) -> str:
    """Convert a message of pydantic into the words after "expected"."""
    for begin in ("Input should be ", "Value error, ", "Input should "):
        message = message.removeprefix(begin)
    return message[:1].lower() + message[1:]


_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "too_short": "a list of at least one number",
    "none_required": "null",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
}


def describe_value(value: Any) -> str:
    """Describe a value in a message: text and numbers themselves, otherwise the type."""
    if isinstance(value, int) and abs(value) >= 2**63:
        return "a whole number of too many digits"
    if isinstance(value, str | int | float | types.NoneType):
        return repr(value[:60] if isinstance(value, str) else value)
    return (
        "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
    )
