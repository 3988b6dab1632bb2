"""Packages: those that a lock pins, and all of an image as an SBOM (CycloneDX JSON).

The Dockerfile runs `python3 -m ftkit.images.packages FILE` in the image. Only the standard library is imported, because
the self-check uses this module.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import ftkit

_DPKG = Path("/var/lib/dpkg/status")
_OS_RELEASE = Path("/etc/os-release")
_PYPI = "pkg:pypi/"
_PIN: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)


def make_sbom(dpkg: Path = _DPKG, os_release: Path = _OS_RELEASE) -> dict[str, Any]:
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


def _python_packages() -> list[dict[str, Any]]:
    found = {}
    for package in metadata.distributions():
        fields = package.metadata  # parsed at each access
        if fields["Name"]:
            found[f"{_PYPI}{normalize_name(fields['Name'])}@{quote(fields['Version'], safe='')}"] = fields
    return [
        _component(url, fields["Name"], fields["Version"], fields.json.get("license_expression"))
        for url, fields in found.items()
    ]


def _debian_packages(status: Path, os_release: Path) -> list[dict[str, Any]]:
    if not status.is_file():
        return []
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', _read(os_release), re.MULTILINE))
    found = []
    for block in _read(status).split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", block, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed") and "Version" in fields:
            name, version = fields["Package"], fields["Version"]
            url = (
                f"pkg:deb/{release.get('ID', 'debian')}/{name}@{quote(version, safe='')}"
                f"?arch={fields.get('Architecture', 'all')}"
            )
            found.append(_component(url, name, version, None))
    return found


def _component(url: str, name: str, version: str, license_expression: object) -> dict[str, Any]:
    component: dict[str, Any] = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
    if isinstance(license_expression, str) and license_expression:
        component["licenses"] = [{"expression": license_expression}]
    return component


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def parse_pins(text: str) -> dict[str, str]:
    """Return the pinned packages of a lock, or of `pip list --format freeze`, with their versions."""
    return {normalize_name(name): version for name, version in _PIN.findall(text)}


def normalize_name(name: str) -> str:
    """Normalize the name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(make_sbom(), indent=1) + "\n", encoding="utf-8")
