"""Check inside an image that it matches its definition: `python3 -m ftkit.images.self_check`.

It imports only the standard library, `ftkit.process`, `ftkit.images.packages`, and the modules that the definition
lists.
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
"""An image whose definition lists this module under `imports` can train: its self-check takes training steps."""

PASSED = "ftkit: the image is as its definition says"
"""The last line of a check that passed. It must never change: later releases read it from older images."""

_INPUT_FOLDER = Path("/opt/ftkit")


def find_issues(folder: Path = _INPUT_FOLDER) -> list[str]:
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
    for name, expected in parse_pins(lock).items():
        found = _version(name)
        if found != expected:
            issues.append(f"{name} is {found or 'missing'}, the lock says {expected}")
    return issues


def _base_issues(provided: dict[str, str], base: dict[str, str]) -> list[str]:
    """Compare with the base's packages. The definition's version is a prefix: NVIDIA's end in the name of a build."""
    issues = []
    for name, expected in provided.items():
        before, now = base.get(normalize_name(name)), _version(name)
        if before != now:
            issues.append(
                f"{name} of the base was replaced: it was {before or 'missing'}, now it is {now or 'missing'}"
            )
        elif expected and not (now or "").startswith(expected):
            issues.append(f"{name} of the base is {now or 'missing'}, the definition says {expected}")
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
    return (
        [] if done.returncode == 0 else [f"ftkit.train --self-check ended with exit status {done.returncode}: {last}"]
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    found = find_issues()
    print("\n".join(found) or PASSED)  # noqa: T201 - the program's output
    sys.exit(1 if found else 0)
