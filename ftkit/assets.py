"""Paths of the shipped files, in an installed wheel or in a checkout. No other module knows them."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / "_assets"
_TOP = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent

RECIPES = _PACKAGE / "recipes"
EXAMPLES = _TOP / "examples"  # recipes with a task, and the tasks
CLUSTERS = _PACKAGE / "clusters"
ARCHITECTURES = _PACKAGE / "architectures"
OTHER_TOOLS = _PACKAGE / "other_tools"  # what other tools call the keys of a recipe
SHELL = _PACKAGE / "shell"  # scripts that run outside of job scripts
CONTAINERS = _TOP / "containers"
JOB_TEMPLATES = _TOP / "sbatch"
DOCKERFILE = _TOP / "Dockerfile"
