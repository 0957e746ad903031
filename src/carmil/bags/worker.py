"""A process that works for another one: `python -m carmil.bags.worker`, started by `workers` and by nobody else.

It imports what the work needs and nothing of the script that asked for it. A request and its answer are one line of JSON each,
over the pipes of its standard input and output; when the input ends, so does the process.
"""

import importlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from carmil.errors import CarmilError

MODULE = __name__
READY = "ready"


def as_line(value: object) -> str:
    """One line of JSON. Values are those of JSON, tuples, paths, errors of ours, and dataclasses and functions of a module."""
    return json.dumps(_plain(value)) + "\n"


def of_line(line: str) -> Any:
    """What `as_line` was given."""
    return _rebuilt(json.loads(line))


def _plain(value: object) -> object:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return {"kind": type(value).__name__, "items": [_plain(item) for item in value]}
    if isinstance(value, Path):
        return {"kind": "path", "path": os.fspath(value)}
    if isinstance(value, CarmilError):
        return {"kind": "error", "message": str(value)}
    if is_dataclass(value) and not isinstance(value, type):
        members = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"kind": "dataclass", "of": _place(type(value)), "members": members}
    if callable(value):
        return {"kind": "named", "of": _place(value)}
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _rebuilt(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    match value["kind"]:
        case "list":
            return [_rebuilt(item) for item in value["items"]]
        case "tuple":
            return tuple(_rebuilt(item) for item in value["items"])
        case "path":
            return Path(value["path"])
        case "error":
            return CarmilError(value["message"])
        case "dataclass":
            return _found(value["of"])(**{name: _rebuilt(item) for name, item in value["members"].items()})
        case _:
            return _found(value["of"])


def _place(of: Any) -> str:
    if of.__module__ == "__main__" or "<" in of.__qualname__:
        raise TypeError(f"{of.__qualname__} is not in a module that another process could import")
    return f"{of.__module__}:{of.__qualname__}"


def _found(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def answer(work: Callable[..., Any], arguments: tuple[Any, ...]) -> object:
    """What the work gives, or a CarmilError instead of what it raises."""
    try:
        return work(*arguments)
    except CarmilError as error:
        return error
    except Exception as error:
        return CarmilError(f"{type(error).__name__}: {error}")


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not come between answers
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    line = as_line(READY)
    while True:
        try:
            answers.write(line)
            answers.flush()
        except BrokenPipeError:
            os._exit(1)
        line = as_line(answer(*of_line(requests.get())))


def _listen(requests: "queue.Queue[str]") -> None:
    """Ends the process, whatever it is at, when nobody is there any more who could ask."""
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
