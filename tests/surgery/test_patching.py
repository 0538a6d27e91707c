"""What changes a live model from outside: in one module, and put back whatever happens."""

import ast
from pathlib import Path

import pytest
from torch import nn

from surgery.hybrids import patching
from surgery.models.pieces import computed_once

ROOT = Path(__file__).parent.parent.parent


class Louder(nn.Linear):
    pass


def own_forward(module: nn.Module) -> None:
    """As accelerate's hooks put one on a module."""
    vars(module)["forward"] = module.forward


@pytest.mark.parametrize("prepare", [lambda module: None, own_forward])
@pytest.mark.parametrize(
    "context",
    [
        lambda module: patching.replaced({module: str, (module, "extra_repr"): str}),
        lambda module: patching.with_class(module, Louder),
        lambda module: patching.hooked(lambda: [module.register_forward_hook(print), module.register_forward_pre_hook(print)]),
        computed_once,
    ],
)
def test_all_is_as_before_also_after_an_interrupt(context, prepare):
    module = nn.Linear(2, 2)
    prepare(module)

    def state():
        return type(module), dict(vars(module)), dict(module._forward_hooks), dict(module._forward_pre_hooks)

    before = state()
    with pytest.raises(KeyboardInterrupt), context(module):  # noqa: PT012
        assert state() != before
        raise KeyboardInterrupt
    assert state() == before


def patches(node: ast.AST) -> bool:
    """Whether it gives an object another class or forward, or writes to what it holds: vars(x)[...], x.__dict__[...]."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return any(map(patches, targets))
        case ast.Attribute(attr="__class__" | "forward"):
            return isinstance(node.ctx, ast.Store | ast.Del)
        case ast.Subscript(value=ast.Call(func=ast.Name("vars")) | ast.Attribute(attr="__dict__")):
            return isinstance(node.ctx, ast.Store | ast.Del)
        case ast.Call(func=ast.Attribute(value=value, attr="update" | "pop" | "setdefault")):
            return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "vars"
    return False


# What writes to an object that it made, or to its own.
OWN = {
    "locating/heads.py",  # a frozen dataclass: what it has computed
    "locating/ranking.py",  # a figure, which a notebook shows
    "hybrids/windows.py",  # a cache layer that it made
    "records/sections/locating.py",  # a section's default
    "costs/estimate.py",  # a field of that name: the time of a forward
}
# What is taken off, or put on, for transformers, accelerate and PEFT, which keep names of their own on a model.
OTHERS = {"tuning/steps.py", "tuning/lora.py"}


def test_nothing_else_patches():
    files = [file for file in (ROOT / "surgery").rglob("*.py") if "kernels" not in file.parts]
    found = {
        str(file.relative_to(ROOT / "surgery")) for file in files if any(map(patches, ast.walk(ast.parse(file.read_text()))))
    }
    assert found == {"hybrids/patching.py", *OWN, *OTHERS}
