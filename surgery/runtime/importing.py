"""To act as soon as another package's module has been imported, without importing it for that."""

import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[], None]
_waiting: list[tuple[str, Action]] = []
_depth = threading.local()
_lock = threading.Lock()  # of _waiting and the finder: imports may end in several threads at once


def after_import(name: str, action: Action) -> None:
    """Call `action` once the module `name` has been imported: now if it was, else when it will be.

    Modules import each other, and one that is half imported cannot be imported from. So the action waits until the outermost
    import that is under way, of this package or of the module's, has ended.
    """
    with _lock:
        if wait := name not in sys.modules:
            _waiting.append((name, action))
            if _FINDER not in sys.meta_path:
                sys.meta_path.insert(0, _FINDER)
    if not wait:
        action()


class _Finder:
    """Lets the other finders find a module, and has its loader tell when the module has been executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in _packages():
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    _watch(spec.loader)
                return spec
        return None


_FINDER: Any = _Finder()  # a meta path finder by what it does; its base class would only add an abstract method


def _packages() -> set[str]:
    return {name.partition(".")[0] for name in (__name__, *(name for name, _ in _waiting))}


def _watch(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        _depth.value = getattr(_depth, "value", 0) + 1
        try:
            execute(module)
        finally:
            _depth.value -= 1
        if not _depth.value:
            _act()

    loader.exec_module = exec_module


def _act() -> None:
    with _lock:
        due = [entry for entry in _waiting if entry[0] in sys.modules]
        for entry in due:
            _waiting.remove(entry)
        if not _waiting and _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
    for _, action in due:
        action()
