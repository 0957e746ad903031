"""YAML files of settings: plain values, each key once, and nothing that takes long to read."""

from pathlib import Path
from typing import Any

import yaml

from carmil.errors import CarmilError
from carmil.untrusted import one_line_errors, shown

LARGEST = 2**17  # bytes; PyYAML reads about 100 kB in a second
DEEPEST = 20  # lists and mappings inside one another
MOST_DIGITS = 18  # of a whole number


def read_yaml(path: Path, *, expected: str) -> Any:
    """Return the content of a YAML file. Refuse repeated keys, deep nesting, very long numbers and very large files."""
    with one_line_errors(path, f"expected {expected}", streams=True):
        with path.open("rb") as stream:
            content = stream.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise CarmilError(f"{path} is larger than {LARGEST:,} bytes: expected {expected}")
        try:
            return yaml.load(content.decode("utf-8-sig"), _PlainLoader)  # a SafeLoader
        except _RefusedYAMLError as error:
            raise CarmilError(f"{path}, line {error.line}: {error}: expected {expected}") from None


class _RefusedYAMLError(Exception):
    def __init__(self, problem: str, node: Any) -> None:
        super().__init__(problem)
        self.line = node.start_mark.line + 1


class _PlainLoader(yaml.SafeLoader):
    """PyYAML keeps the last of several values for one key, and its time grows with the square of the depth."""

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
                raise _RefusedYAMLError(f"the key {shown(key.value)} is there already, in line {lines[name]}", key)
            lines[name] = key.start_mark.line + 1
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if sum(sign.isalnum() for sign in node.value) > MOST_DIGITS:
            raise _RefusedYAMLError(f"a whole number of more than {MOST_DIGITS} digits", node)
        return super().construct_yaml_int(node)


_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_yaml_int)
