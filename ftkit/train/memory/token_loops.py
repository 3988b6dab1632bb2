"""Layers whose code loops over the tokens of a pack: a compiler would unroll the loop into a graph that takes minutes.

They are found in the code of their classes, because tracing them takes as long.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn

_COUNTS_TOKENS = re.compile(r"seq|chunk|num_blocks|shape\[1\]")
"""Ends of loops that grow with the number of tokens, as transformers writes them."""
_FAMILIES = "transformers.models."
"""Packages with the code of model families."""


def find_token_loop(layer: nn.Module) -> str | None:
    """Return the class or function of a layer that loops over tokens or chunks of them; None if there is none.

    Functions with a decorator are not looked at: transformers decorates those that `choose_token_mixers` replaces.
    """
    kinds = {
        kind for module in layer.modules() for kind in type(module).__mro__ if kind.__module__.startswith(_FAMILIES)
    }
    found = (_loop_of_class(kind) for kind in sorted(kinds, key=lambda kind: kind.__qualname__))
    return next((name for name in found if name is not None), None)


@cache
def _loop_of_class(kind: type) -> str | None:
    functions, classes = _definitions(sys.modules[kind.__module__])
    definition = classes.get(kind.__name__)
    if definition is None:
        return None
    methods = [one for one in definition.body if isinstance(one, ast.FunctionDef) and one.name != "__init__"]
    if any(map(_loops_over_tokens, methods)):
        return kind.__name__
    called: set[str] = set()
    waiting: list[ast.AST] = [definition]
    while waiting:
        names = {node.id for node in ast.walk(waiting.pop()) if isinstance(node, ast.Name)} & set(functions) - called
        called |= names
        waiting += [functions[name] for name in names]
    return next((name for name in sorted(called) if _loops_over_tokens(functions[name])), None)


@cache
def _definitions(file: ModuleType) -> tuple[dict[str, ast.FunctionDef], dict[str, ast.ClassDef]]:
    """Return the functions without a decorator, and the classes, of a file."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(file))))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and not node.decorator_list]
    return {node.name: node for node in functions}, {
        node.name: node for node in nodes if isinstance(node, ast.ClassDef)
    }


def _loops_over_tokens(function: ast.FunctionDef) -> bool:
    loops = (node.iter for node in ast.walk(function) if isinstance(node, ast.For))
    return any(text.startswith("range(") and _COUNTS_TOKENS.search(text) for text in map(ast.unparse, loops))
