"""YAML as users write it: whatever is wrong with it is one line, and a small text stays small when it is read."""

from typing import Any

import yaml

from surgery.errors import UserError

LARGEST = 2**20  # characters of a text


class _Loader(yaml.SafeLoader):
    """Refuses aliases and merge keys, by which a few lines can fill any memory, and a key that is there twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not read here", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: Any) -> None:
        taken = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "merge keys (<<) are not read here", key.start_mark)
            if isinstance(key, yaml.ScalarNode) and key.value in taken:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{key.value}' is there twice", key.start_mark)
            taken.add(key.value if isinstance(key, yaml.ScalarNode) else None)


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
