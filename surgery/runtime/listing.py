"""What is found by listing the packages of one name: formats, engines, ways of choosing and probes, in whichever package they
lie. So the core imports nothing else of it."""

import pkgutil
from importlib import import_module
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def listed(name: str) -> dict[str, str]:
    """The name of each file in the packages of that name -> its module: listed("formats")["hf"] is
    surgery.exporting.formats.hf."""
    packages = [f"{PACKAGE.name}.{place.parent.name}.{name}" for place in sorted(PACKAGE.glob(f"*/{name}"))]
    return {
        module.name: f"{package}.{module.name}"
        for package in packages
        for module in pkgutil.iter_modules(import_module(package).__path__)
    }
