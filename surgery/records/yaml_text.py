"""YAML as users write it: whatever is wrong with it is one clear line, and no key stands twice."""

from typing import Any

import yaml

from surgery.errors import UserError


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last one in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        taken: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in taken:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{key.value}' is there twice", key.start_mark)
            taken |= {key.value} if isinstance(key, yaml.ScalarNode) and key.value != "<<" else set()
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, what: str) -> Any:
    """The value of a YAML text. Raises UserError, in one line that begins with `what`, if it has none."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: a date or a number that is none
        raise UserError(f"{what} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(f"{what} is not YAML that can be read: it is nested too deeply") from error
