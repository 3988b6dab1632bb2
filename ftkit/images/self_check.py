"""Check inside an image that it matches its definition: `python3 -m ftkit.images.self_check`.

Standard library, `ftkit.process` and `ftkit.images.packages` only, and the modules that the definition lists.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path

from ftkit import process
from ftkit.images.packages import normalize_name, parse_pins

TRAINER = "ftkit.train.trainer"
"""An image with this module among its imports can train, and takes a training step in the check."""

PASSED = "ftkit: the image is as its definition says"
"""The last line of a check that passed. It never changes, as later releases read it from older images."""

_FOLDER = Path("/opt/ftkit")


def find_issues(folder: Path = _FOLDER) -> list[str]:
    """Return everything that differs from the definition."""
    image = json.loads((folder / "image.json").read_text(encoding="utf-8"))
    base = parse_pins((folder / "base-packages.txt").read_text(encoding="utf-8"))
    return [
        *_lock_issues((folder / "requirements.lock").read_text(encoding="utf-8")),
        *_base_issues(image["provided"], base),
        *_import_issues(image["imports"]),
        *(_training_issues() if TRAINER in image["imports"] else []),
    ]


def _lock_issues(lock: str) -> list[str]:
    issues = []
    for name, wanted in parse_pins(lock).items():
        found = _version(name)
        if found != wanted:
            issues.append(f"{name} is {found or 'not there'}, the lock says {wanted}")
    return issues


def _base_issues(provided: dict[str, str], base: dict[str, str]) -> list[str]:
    """Compare with the base's packages. Versions are compared by their beginning: NVIDIA's end in a build name."""
    issues = []
    for name, expected in provided.items():
        before, now = base.get(normalize_name(name)), _version(name)
        if before != now:
            issues.append(f"{name} of the base was replaced: it was {before or 'not there'}, now it is {now}")
        elif expected and not (now or "").startswith(expected):
            issues.append(f"{name} of the base is {now or 'not there'}, the definition says {expected}")
    return issues


def _import_issues(modules: list[str]) -> list[str]:
    issues = []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - any exception of an import is an issue of the image
            issues.append(f"import {module}: {type(error).__name__}: {error}")
    return issues


def _training_issues() -> list[str]:
    """Take a training step with each family."""
    done = process.run([sys.executable, "-m", "ftkit.train", "--self-check"], timeout_seconds=600)
    last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    return [] if done.returncode == 0 else [f"ftkit.train --self-check ended with {done.returncode}: {last}"]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    found = find_issues()
    print("\n".join(found) or PASSED)  # noqa: T201 - a program's answer
    sys.exit(1 if found else 0)
