"""Read YAML files of settings, which have plain values, unique keys and a bounded size."""

import re
from pathlib import Path
from typing import Any

import yaml

from carmil.errors import CarmilError
from carmil.untrusted import describe_value, one_line_errors

LARGEST = 2**17  # bytes; PyYAML reads about 100 kB in a second
DEEPEST = 20  # levels of nested lists and mappings
MOST_DIGITS = 18  # digits of a whole number


def read_yaml(path: Path, *, expected: str) -> Any:
    """Return the content of a YAML file. Refuse repeated keys, deep nesting, ambiguous or very long numbers, and large files."""
    with one_line_errors(path, f"expected {expected}", streams=True):
        with path.open("rb") as stream:
            content = stream.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise CarmilError(f"{path} is larger than {LARGEST:,} bytes: expected {expected}")
        try:
            return yaml.load(content.decode("utf-8-sig"), _PlainLoader)  # a subclass of SafeLoader
        except _RefusedYAMLError as error:
            raise CarmilError(f"{path}, line {error.line}: {error}: expected {expected}") from None


class _RefusedYAMLError(Exception):
    def __init__(self, problem: str, node: Any) -> None:
        super().__init__(problem)
        self.line = node.start_mark.line + 1


class _PlainLoader(yaml.SafeLoader):
    """A safe loader with stricter rules than PyYAML's.

    PyYAML keeps the last of several values of a key, reads 010 as 8 and 1:30 as 90, and takes time proportional to
    the square of the nesting depth.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise _RefusedYAMLError(f"nested deeper than {DEEPEST} levels", self.peek_event())
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in lines:
                raise _RefusedYAMLError(
                    f"the key {describe_value(key.value)} is given already in line {lines[name]}", key
                )
            lines[name] = key.start_mark.line + 1
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if sum(sign.isalnum() for sign in node.value) > MOST_DIGITS:
            raise _RefusedYAMLError(f"a whole number of more than {MOST_DIGITS} digits", node)
        if re.match(r"[-+]?0[\d_]", node.value):
            raise _RefusedYAMLError(
                f"{node.value} begins with 0, which makes it octal in YAML; remove the leading 0", node
            )
        _refuse_base_60(node)
        return super().construct_yaml_int(node)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        _refuse_base_60(node)
        return super().construct_yaml_float(node)


def _refuse_base_60(node: yaml.ScalarNode) -> None:
    if ":" in node.value:
        problem = f"{describe_value(node.value)} is a number in base 60 in YAML; put quotation marks around text"
        raise _RefusedYAMLError(problem, node)


_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_yaml_int)
_PlainLoader.add_constructor("tag:yaml.org,2002:float", _PlainLoader.construct_yaml_float)
