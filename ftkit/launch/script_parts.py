"""Parts of job scripts that a project overrides: files in its `sbatch/` folder with the names of shipped templates."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from jinja2 import BaseLoader, Environment, TemplateNotFound, nodes

from ftkit import assets
from ftkit.errors import ConfigError, Problem, one_line
from ftkit.files import read_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def find_overrides(project: Path) -> list[str]:
    """Return the names of the shipped templates that a project overrides, such as `parts/run.sh.j2`."""
    names = (str(path.relative_to(assets.JOB_TEMPLATES)) for path in assets.JOB_TEMPLATES.rglob("*.j2"))
    return sorted(name for name in names if _override(project, name))


def _override(project: Path, name: str) -> Path | None:
    folder = project / "sbatch"
    if not os.path.lexists(folder / name) or folder.resolve() == assets.JOB_TEMPLATES.resolve():  # ftkit's own checkout
        return None
    return folder / name


class PartLoader(BaseLoader):
    """Loads a template from a project's `sbatch/` folder if it overrides the shipped one of that name."""

    def __init__(self, project: Path) -> None:
        self._project = project

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        """Return a template's text, its path, and whether that text is still current.

        Raises:
            ConfigError: the project's part can't be read, or lacks a placeholder that the shipped part always fills in.
            TemplateNotFound: there is no template of that name.
        """
        shipped = assets.JOB_TEMPLATES / template
        if ".." in template or not shipped.is_file():
            raise TemplateNotFound(template)
        text = shipped.read_text(encoding="utf-8")
        path = _override(self._project, template)
        if path is None:
            return text, str(shipped), lambda: _override(self._project, template) is None
        own = _read(path)
        _check_placeholders(environment, path, own, text)
        return own, str(path), lambda: False


def _read(path: Path) -> str:
    try:
        return read_small(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("", str(path), f"can't be read: {one_line(error)}.")]) from error


def _check_placeholders(environment: Environment, path: Path, own: str, shipped: str) -> None:
    needed = set(_placeholders(environment.parse(shipped)))
    left = set(_placeholders(environment.parse(own, path.name)))
    if lost := sorted(needed - left):
        what = f"lacks placeholders of the part it overrides: {', '.join(lost)}."
        fix = "Copy the lines that have them from the shipped part, or remove the file."
        raise ConfigError([Problem("", str(path), what, fix)])


def _placeholders(node: nodes.Node) -> Iterator[str]:
    """Yield the dotted names that a template fills in, and the parts that it includes.

    Names in conditions are omitted, and what is filled in only if it is set: a site without accounts needs no account.
    """
    if isinstance(node, nodes.If):
        optional = set(_placeholders(node.test))
        for child in (*node.body, *node.elif_, *node.else_):
            yield from (name for name in _placeholders(child) if name not in optional)
        return
    if isinstance(node, nodes.Include) and isinstance(node.template, nodes.Const):
        yield f"include {node.template.value}"
    name = _dotted(node)
    if "." in name:
        yield name
        return
    for child in node.iter_child_nodes():
        yield from _placeholders(child)


def _dotted(node: nodes.Node) -> str:
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr):
        base = _dotted(node.node)
        return f"{base}.{node.attr}" if base else ""
    return ""
