"""What is found by listing the packages of one name: families, probes, formats, readers, engines and ways of choosing, in
whichever package they lie. So the core imports nothing else of what stands around it."""

import pkgutil
from importlib import import_module
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def listed(name: str) -> dict[str, str]:
    """The name of each file in the packages of that name -> its module, in the order of the names. listed("formats")["hf"] is
    surgery.exporting.formats.hf; listed("families") has the files of surgery/families and of surgery/more/families."""
    places = [PACKAGE / name, *sorted(PACKAGE.glob(f"*/{name}"))]
    packages = [".".join(place.relative_to(PACKAGE.parent).parts) for place in places if place.is_dir()]
    found = [(each.name, package) for package in packages for each in pkgutil.iter_modules(import_module(package).__path__)]
    return {module: f"{package}.{module}" for module, package in sorted(found)}
