"""YAML as users write it: whatever is wrong with it is one clear line, and no key occurs twice."""

from typing import Any

import yaml

from surgery.errors import UserError
from surgery.records.reading import check_tree

MOST_PARTS = 100_000  # of a recipe: by aliases, a few lines can mean more than any memory holds


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last one in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        taken: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in taken:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{key.value}' is there twice", key.start_mark)
            taken |= {key.value} if isinstance(key, yaml.ScalarNode) and key.value != "<<" else set()
        return super().construct_mapping(node, deep)


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.position + 1}: {error.reason}"
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        begin = error.context_mark
        since = f" (begun in line {begin.line + 1})" if begin and begin.line != mark.line else ""
        context = f"{error.context}{since}, " if error.context else ""
        return f"line {mark.line + 1}, column {mark.column + 1}: {context}{error.problem}"
    return str(error) if isinstance(error, yaml.YAMLError | ValueError) else f"a value does not fit its tag ({error})"


def parse_yaml(text: str, what: str) -> Any:
    """The value of a YAML text. Raises UserError, in one line that begins with `what`, if it has none that can be used."""
    try:
        tree = yaml.load(text, _Loader)  # a SafeLoader
    except RecursionError as error:
        raise UserError(f"{what} is not YAML that can be read: it is nested too deeply") from error
    except Exception as error:  # besides its own errors, whatever a tag does to a value that it does not fit: !!timestamp x
        raise UserError(f"{what} is not YAML: {' '.join(_reason(error).split())}") from error
    check_tree(tree, what, MOST_PARTS)
    return tree
