"""Lock files: all packages that an image adds to its base, with hashes.

A lock has none of the packages that the base provides (torch, triton, numpy): these are excluded from the resolution,
or pinned to the base's version. The build refuses a lock that has one of them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ftkit import process
from ftkit.errors import ImageError, PrerequisiteError, one_line
from ftkit.files import read_small, write_file
from ftkit.images.inside import normalize_name, parse_pins

if TYPE_CHECKING:
    from ftkit.config.image import ImageSpec
    from ftkit.config.load import ImageDefinition

_TIMEOUT_SECONDS: Final = 900
_EXCLUDED: Final = "sys_platform == 'never'"
_INPUTS: Final = "# inputs: sha256:"
_HASHED: Final = re.compile(r"^(\S+==[^\n]*)\\\n +--hash=sha256:", re.MULTILINE)
_PLATFORM: Final = "x86_64-manylinux_2_28"


def write_lock(definition: ImageDefinition) -> dict[str, str]:
    """Resolve the packages of an image and write its lock; return the pinned versions."""
    spec = definition.spec
    own = Path(sys.executable).with_name("uv")
    uv = str(own) if own.is_file() else shutil.which("uv")
    if not uv:
        raise PrerequisiteError(
            "the program 'uv' was not found",
            meaning="locks are made with uv, because it can resolve for another version of Python than this one",
            fix="pip install 'ftkit[images]'",
        )
    with tempfile.TemporaryDirectory() as folder:
        requirements, overrides = Path(folder, "packages.in"), Path(folder, "overrides.txt")
        requirements.write_text("".join(f"{line}\n" for line in _requirements(spec)), encoding="utf-8")
        # numpy is pinned to the base's version. Of the others no index has versions such as NVIDIA's pre-releases.
        provided = (f"{name}=={version}" if name == "numpy" and re.fullmatch(r"\d+(\.\d+)+", version)
                    else f"{name}; {_EXCLUDED}" for name, version in sorted(spec.provided.items()))  # fmt: skip
        overrides.write_text("".join(f"{line}\n" for line in provided), encoding="utf-8")
        command = [
            uv, "pip", "compile", str(requirements), "--override", str(overrides), "--generate-hashes", "--quiet",
            "--python-version", spec.python, "--python-platform", _PLATFORM,
            "--no-header", "--no-annotate", "--no-emit-index-url",
        ]  # fmt: skip
        for name in sorted(spec.provided):
            command += ["--no-emit-package", name]
        bundle = os.environ.get("PIP_CERT")  # uv has another name for it
        environment = ({"SSL_CERT_FILE": bundle} if bundle else {}) | dict(os.environ)
        done = process.run(command, timeout_seconds=_TIMEOUT_SECONDS, environment=environment)
    if done.returncode != 0:
        message = done.stderr.strip().removeprefix("error: ")
        raise ImageError(
            f"the packages of {spec.reference} can't be resolved:\n    {message}",
            meaning="a package does not exist, two need different versions of a third, or the index can't be reached",
            fix=f"change 'packages:' in {definition.lock_file.with_suffix('.yaml')}",
        )
    head = (
        f"# Packages that ftkit adds to {spec.base.reference}; written by 'ftkit images lock {spec.reference}'.\n"
        f"{_INPUTS}{inputs_digest(spec)}\n"
    )
    write_file(definition.lock_file, (head + done.stdout).encode())
    return parse_pins(done.stdout)


def read_lock(definition: ImageDefinition) -> str:
    spec, path = definition.spec, definition.lock_file
    fix = f"write it: ftkit images lock {spec.reference}"
    try:
        text = read_small(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"{spec.reference} has no lock: can't read {path}: {one_line(error)}", fix=fix) from error
    replaced = sorted(set(parse_pins(text)) & {normalize_name(name) for name in spec.provided})
    if replaced:
        raise ImageError(
            f"{path} would replace {', '.join(replaced)} of the base",
            meaning="the base's own builds match its CUDA version; those of the package index don't",
            fix=fix,
        )
    if f"{_INPUTS}{inputs_digest(spec)}\n" not in text:
        raise ImageError(
            f"{path} was not made from the packages that {spec.reference} lists now",
            meaning="'packages:', 'provided:' or 'python:' changed, or ftkit's own dependencies did",
            fix=fix,
        )
    hashed = parse_pins("\n".join(_HASHED.findall(text)))
    unhashed = sorted(set(parse_pins(text)) - set(hashed))
    if unhashed:
        raise ImageError(f"{path} has no hash for {', '.join(unhashed)}", fix=fix)
    return text


def inputs_digest(spec: ImageSpec) -> str:
    provided = [f"{name}={version}" for name, version in sorted(spec.provided.items())]
    return hashlib.sha256("\n".join([spec.python, *_requirements(spec), "--", *provided]).encode()).hexdigest()


def _requirements(spec: ImageSpec) -> list[str]:
    own = [line for line in metadata.requires("ftkit") or () if "extra ==" not in line]
    return sorted({*spec.packages, *own})
