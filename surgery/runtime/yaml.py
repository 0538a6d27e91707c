"""YAML as users write it: whatever is wrong with it is one line, and a small text stays small when it is read.

`no`, `on`, `1:30`, `010`, `1e-3` and dates are texts, which settings that are numbers take where they can be read so; only
true, false, null and plain numbers are more. YAML 1.1 takes the first four for False, True, 90 and 8.
"""

import re
from typing import Any

import yaml

from surgery.errors import UserError

LARGEST = 2**20  # characters of a text
WORDS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
}


class _Loader(yaml.SafeLoader):
    """Refuses aliases and merge keys, by which a few lines can fill any memory, and a key that is there twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not read here", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: Any) -> None:
        taken = set()
        for key, _ in node.value:
            if key.value == "<<":
                raise yaml.constructor.ConstructorError(None, None, "merge keys (<<) are not read here", key.start_mark)
            if isinstance(key, yaml.ScalarNode) and key.value in taken:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{key.value}' is there twice", key.start_mark)
            taken.add(key.value if isinstance(key, yaml.ScalarNode) else None)


for _kind, (_pattern, _first) in WORDS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), list(_first))


def parse_yaml(text: str, what: str) -> Any:
    """The value of a YAML text. what: names it in the message. Raises UserError for a text without one."""
    if len(text) > LARGEST:
        raise UserError(f"{what} is too long: {len(text):,} characters; at most {LARGEST:,} are read")
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except RecursionError as error:
        raise UserError(f"{what} is nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(f"{what} is not YAML: {place}{error.problem}") from error
    except Exception as error:  # whatever a tag does to a value that it does not fit
        raise UserError(f"{what} is not YAML: {' '.join(str(error).split())}") from error
