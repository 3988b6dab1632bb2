"""Code that runs inside an image: list its packages, and check that it matches its definition.

The Dockerfile runs `python3 -m ftkit.images.inside --sbom FILE`, which writes all packages as an SBOM (CycloneDX
JSON); without arguments it runs the check. It imports only the standard library, `ftkit.process`, and the modules that
the definition lists.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Final
from urllib.parse import quote

import ftkit
from ftkit import process

_DPKG = Path("/var/lib/dpkg/status")
_OS_RELEASE = Path("/etc/os-release")
_PYPI = "pkg:pypi/"
Component = dict[str, object]
_PIN: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)


def make_sbom(dpkg: Path = _DPKG, os_release: Path = _OS_RELEASE) -> Component:
    """Return the SBOM of this Python and this system, without a timestamp: the same packages give the same bytes."""
    components = [*_python_packages(), *_debian_packages(dpkg, os_release)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"tools": {"components": [{"type": "application", "name": "ftkit", "version": ftkit.__version__}]}},
        "components": sorted(components, key=lambda component: str(component["bom-ref"])),
    }


def python_packages(document: Path) -> frozenset[str] | None:
    """Return the normalized names of the Python packages in an SBOM; None if the file is missing or damaged."""
    try:
        urls = [str(component["purl"]) for component in json.loads(document.read_bytes())["components"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return frozenset(url.removeprefix(_PYPI).partition("@")[0] for url in urls if url.startswith(_PYPI)) or None


def _python_packages() -> list[Component]:
    found = {}
    for package in metadata.distributions():
        fields = package.metadata  # parsed at each access
        if fields["Name"]:
            found[f"{_PYPI}{normalize_name(fields['Name'])}@{quote(fields['Version'], safe='')}"] = fields
    return [
        _component(url, fields["Name"], fields["Version"], fields.json.get("license_expression"))
        for url, fields in found.items()
    ]


def _debian_packages(status: Path, os_release: Path) -> list[Component]:
    if not status.is_file():
        return []
    release = os_release.read_text(encoding="utf-8", errors="replace") if os_release.is_file() else ""
    system = re.search(r'^ID="?([^"\n]*)"?$', release, re.MULTILINE)
    found = []
    for block in status.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", block, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed") and "Version" in fields:
            name, version = fields["Package"], fields["Version"]
            package = f"pkg:deb/{system[1] if system else 'debian'}/{name}@{quote(version, safe='')}"
            found.append(_component(f"{package}?arch={fields.get('Architecture', 'all')}", name, version, None))
    return found


def _component(url: str, name: str, version: str, license_expression: object) -> Component:
    component: Component = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
    if isinstance(license_expression, str) and license_expression:
        component["licenses"] = [{"expression": license_expression}]
    return component


def parse_pins(text: str) -> dict[str, str]:
    """Return the pinned packages of a lock, or of `pip list --format freeze`, with their versions."""
    return {normalize_name(name): version for name, version in _PIN.findall(text)}


def normalize_name(name: str) -> str:
    """Normalize the name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


TRAINER = "ftkit.train.trainer"
"""An image whose definition lists this module under `imports` can train: its self-check takes training steps."""

PASSED = "ftkit: the image is as its definition says"
"""The last line of a check that passed. It must never change: later releases read it from older images."""

_INPUT_FOLDER = Path("/opt/ftkit")


def find_issues(folder: Path = _INPUT_FOLDER) -> list[str]:
    image = json.loads((folder / "image.json").read_text(encoding="utf-8"))
    base = parse_pins((folder / "base-packages.txt").read_text(encoding="utf-8"))
    issues = []
    for name, expected in parse_pins((folder / "requirements.lock").read_text(encoding="utf-8")).items():
        found = _version(name)
        if found != expected:
            issues.append(f"{name} is {found or 'missing'}, the lock says {expected}")
    for name, expected in image["provided"].items():
        before, now = base.get(normalize_name(name)) or "missing", _version(name) or "missing"
        if before != now:
            issues.append(f"{name} of the base was replaced: it was {before}, now it is {now}")
        elif not now.startswith(expected):  # NVIDIA's versions end in the name of a build
            issues.append(f"{name} of the base is {now}, the definition says {expected}")
    for module in image["imports"]:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - any exception of an import is an issue of the image
            issues.append(f"import {module}: {type(error).__name__}: {error}")
    if TRAINER in image["imports"]:  # a training step with each family
        done = process.run([sys.executable, "-m", "ftkit.train.self_check"], timeout_seconds=600)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            issues.append(f"ftkit.train.self_check ended with exit status {done.returncode}: {last}")
    return issues


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sbom"]:
        Path(sys.argv[2]).write_text(json.dumps(make_sbom(), indent=1) + "\n", encoding="utf-8")
    else:
        found = find_issues()
        print("\n".join(found) or PASSED)  # noqa: T201 - the program's output
        sys.exit(1 if found else 0)
