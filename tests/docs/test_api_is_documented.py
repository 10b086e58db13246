"""Whatever `relax_core` makes public says what it is: the reference pages are built from nothing else.

Read from the source, since a docstring below a constant or a field is not there at run time.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.copied import ROOT

CORE = ROOT / "relax_core"
MODULES = sorted(CORE.rglob("*.py"))
RECORDS = CORE / "algorithms"
"""What an algorithm's record is, its module's docstring says."""


def undocumented(source: str) -> list[str]:
    """Names of what is public in a module and has no docstring; `module` for the module itself."""
    tree = ast.parse(source)
    return [*([] if ast.get_docstring(tree) else ["module"]), *_undocumented(tree, prefix="")]


def _undocumented(owner: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for node, below in zip(owner.body, [*owner.body[1:], None], strict=True):
        name = _name(node)
        if name is None or (name.startswith("_") and name != "__call__"):
            continue
        if not (_has_docstring(node) or _is_text(below) or _told_by(owner, name, node)):
            yield prefix + name
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(node, prefix=f"{name}.")


def _name(node: ast.stmt) -> str | None:
    """The name that a statement gives to a function, class, constant or field."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)):
            return name
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if not _calls(value, "TypeVar", "ParamSpec"):
            return name
    return None


def _has_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and bool(ast.get_docstring(node))


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _told_by(owner: ast.Module | ast.ClassDef, name: str, node: ast.stmt) -> bool:
    """A field told in its class's docstring, or by the help text that its flag has."""
    if isinstance(owner, ast.Module):
        return False
    told = f"\n    {name}: " in (ast.get_docstring(owner) or "").partition("Attributes:")[2]
    return told or (isinstance(node, ast.AnnAssign) and _calls(node.value, "hyperparameter"))


def _calls(value: ast.expr | None, *functions: str) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in functions


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_everything_public_has_a_docstring(path: Path) -> None:
    found = undocumented(path.read_text(encoding="utf-8"))
    assert [name for name in found if path.parent != RECORDS or not name.isupper()] == []


def test_what_has_none_is_found() -> None:
    source = '''
from typing import TypeVar
T = TypeVar("T")
_HIDDEN = 1
BARE = 2
TOLD = 3
"""A constant."""
def bare(x): ...
async def waits(): ...
def _helper(x): ...
def told(x):
    """A function."""
class Bare:
    """A class.

    Attributes:
        told: a field.
    """
    told: int
    bare: int
    below: int
    """A field."""
    flag: int = hyperparameter(1, "A field.")
    @property
    def size(self): ...
    def __len__(self): ...
    def __call__(self): ...
class Naked:
    pass
'''
    assert undocumented(source) == [
        "module",
        "BARE",
        "bare",
        "waits",
        "Bare.bare",
        "Bare.size",
        "Bare.__call__",
        "Naked",
    ]
    assert undocumented('"""A module."""') == []
