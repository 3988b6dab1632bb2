"""Private names of libraries are used only in the modules `private_apis`, with their versions and alternatives."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import ftkit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

UNDOCUMENTED = {"transformers.conversion_mapping", "transformers.core_model_loading", "accelerate.commands"}
"""Modules whose names are private in all but spelling."""
DOCUMENTED = {"_current_frames", "_exit", "_replace"}
"""Public names of `sys`, of `os` and of named tuples."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def defined_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that a module gives its own functions, classes, attributes and parameters."""
    names = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def used_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of libraries that a module uses."""
    nodes = list(ast.walk(tree))
    own = defined_names(nodes)
    for node in nodes:
        match node:
            case ast.Attribute(attr=name) if is_private(name) and name not in own:
                yield ast.unparse(node)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(value=name), *_]):
                if is_private(name):
                    yield f"{ast.unparse(owner)}.{name}"
            case ast.ImportFrom(module=str(module), names=names):
                is_undocumented = module in UNDOCUMENTED
                yield from (f"{module}.{each.name}" for each in names if is_undocumented or is_private(each.name))
            case ast.Import(names=names):
                yield from (each.name for each in names if any(map(is_private, each.name.split("."))))


def test_no_other_module_uses_a_private_name_of_a_library() -> None:
    root = Path(ftkit.__file__).parent
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in root.rglob("*.py")}
    used = {path.relative_to(root) for path, tree in trees.items() if any(used_names(tree))}
    assert {str(path) for path in used if path.parent != Path("train/private_apis")} == {"data/private_apis.py"}


def test_private_names_are_found_however_they_are_reached() -> None:
    code = "import a._b\nfrom a import _c\na._d\ngetattr(a, '_e')\nclass K(a):\n    def f(self): self._g = self._h"
    assert list(used_names(ast.parse(code))) == ["a._b", "a._c", "a._d", "a._e", "self._h"]
