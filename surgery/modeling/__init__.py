"""One file a family: configuration, mixer, model. Importing this package registers all of them with transformers."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

MODULES = {module.name: import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)}
FAMILIES = {name: module.FAMILY for name, module in MODULES.items() if hasattr(module, "FAMILY")}
if wrong := [name for name, family in FAMILIES.items() if family.model_type != name]:
    raise ImportError(f"modeling/{wrong[0]}.py is named after no model type; its FAMILY has {FAMILIES[wrong[0]].model_type}")


def family_of(config: Any) -> Any:
    """The Family (hybrid.py) of a base's or a hybrid's configuration, or None."""
    kind = config.model_type  # a base's own may end like a hybrid's: olmo_hybrid
    return FAMILIES.get(kind, FAMILIES.get(kind.removesuffix("_hybrid")))
