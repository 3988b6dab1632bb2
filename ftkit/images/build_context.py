"""The inputs of an image build: the lock, the build context, and a Singularity definition with the same steps.

A lock lists all packages that an image adds to its base, with hashes. Packages that the base provides (torch, triton,
numpy) are excluded from the resolution or pinned to the base's version. The build refuses a lock that contains one of
them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from ftkit import assets, process
from ftkit.config.image_reference import parse_reference
from ftkit.errors import ImageError, PrerequisiteError, one_line
from ftkit.files import digest_of, read_small, write_file
from ftkit.images.docker_engine import REFERENCE_LABEL
from ftkit.images.inside import normalize_name, parse_pins
from ftkit.images.oci.tar import END, FILE, Member, write_member, write_padding
from ftkit.wheel import WHEEL_NAME, make_wheel

if TYPE_CHECKING:
    from ftkit.config.image import ImageSpec
    from ftkit.config.load import ImageDefinition

_TIMEOUT_SECONDS: Final = 900
_EXCLUDED: Final = "sys_platform == 'never'"
_INPUTS: Final = "# inputs: sha256:"
_HASHED: Final = re.compile(r"^(\S+==[^\n]*)\\\n +--hash=sha256:", re.MULTILINE)
_PLATFORM: Final = "x86_64-manylinux_2_28"
_CERTIFICATES: Final = "certificates.crt"
_RUN: Final = re.compile(r"^RUN ((?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)


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
        # numpy is pinned to the base's version. No index has versions of the others such as NVIDIA's pre-releases.
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
        bundle = os.environ.get("PIP_CERT")  # uv reads another variable
        environment = ({"SSL_CERT_FILE": bundle} if bundle else {}) | dict(os.environ)
        done = process.run(command, timeout_seconds=_TIMEOUT_SECONDS, environment=environment)
    if done.returncode != 0:
        message = done.stderr.strip().removeprefix("error: ")
        raise ImageError(
            f"the packages of {spec.reference} can't be resolved:\n    {message}",
            meaning="a package does not exist, two need different versions of a third, or the index can't be reached",
            fix=f"change the packages in {definition.lock_file.with_suffix('.yaml')}",
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
    unhashed = sorted(set(parse_pins(text)) - set(parse_pins("\n".join(_HASHED.findall(text)))))
    if unhashed:
        raise ImageError(f"{path} has no hash for {', '.join(unhashed)}", fix=fix)
    return text


def inputs_digest(spec: ImageSpec) -> str:
    provided = [f"{name}={version}" for name, version in sorted(spec.provided.items())]
    return hashlib.sha256("\n".join([spec.python, *_requirements(spec), "--", *provided]).encode()).hexdigest()


def _requirements(spec: ImageSpec) -> list[str]:
    own = [line for line in metadata.requires("ftkit") or () if "extra ==" not in line]
    return sorted({*spec.all_packages, *own})


@dataclass(frozen=True)
class BuildContext:
    """The input of a build: files by name, values of the Dockerfile's ARGs, and the digest of the lock."""

    files: dict[str, bytes]
    arguments: dict[str, str]
    lock_sha256: str

    def digest(self, base: str) -> str:
        """Return a digest of everything that the image depends on; `base` identifies the base."""
        return digest_of({**self.files, "base": base.encode()})

    def archive(self, labels: dict[str, str]) -> io.BytesIO:
        """Return the files as a tar archive, with the labels as the Dockerfile's last step."""
        words = " ".join(f"{name}={_quoted(value)}" for name, value in sorted(labels.items()))
        files = {**self.files, "Dockerfile": self.files["Dockerfile"] + f"LABEL {words}\n".encode()}
        output = io.BytesIO()
        for name, data in sorted(files.items()):
            write_member(output, Member(name.encode(), FILE, size=len(data)))
            output.write(data)
            write_padding(output, len(data))
        output.write(END)
        output.seek(0)
        return output


def assemble(definition: ImageDefinition) -> BuildContext:
    lock = read_lock(definition).encode()
    keys = {"name", "tag", "description", "families", "default_recipe", "provided", "imports"}
    image = definition.spec.model_dump(mode="json", include=keys)
    files = {
        "Dockerfile": _dockerfile(definition.spec).encode(),
        "requirements.lock": lock,
        WHEEL_NAME: make_wheel(),
        "image.json": (json.dumps(image, indent=1, sort_keys=True) + "\n").encode(),
    }
    arguments = {}
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        if not (value := os.environ.get(variable)):
            continue
        if any(urlsplit(url).password or urlsplit(url).username for url in value.split()):
            raise ImageError(
                f"{variable} has a user name or password, which would stay in the image",
                meaning="build arguments can be read by everyone who has the image",
                fix=f"unset {variable}, or use an index that needs none",
            )
        arguments[variable] = value
    bundle = os.environ.get("PIP_CERT")
    if bundle and Path(bundle).is_file():
        files[_CERTIFICATES] = Path(bundle).read_bytes()
        arguments["PIP_CERT"] = f"/opt/ftkit/{_CERTIFICATES}"
    return BuildContext(files, arguments, hashlib.sha256(lock).hexdigest())


def _dockerfile(spec: ImageSpec) -> str:
    lines = [f"ENV {name}={_quoted(value)}\n" for name, value in sorted(spec.environment.items())]
    return assets.DOCKERFILE.read_text(encoding="utf-8") + "".join(lines)


def _quoted(value: str) -> str:
    return '"' + re.sub(r'(["\\$])', r"\\\1", value) + '"'


def definition_file(definition: ImageDefinition, files: Path | None = None) -> str:
    """Return the Singularity definition of an image: the Dockerfile's steps, with copies from the folder `files`."""
    spec, context = definition.spec, assemble(definition)
    base = replace(parse_reference(spec.base.reference), digest=spec.base.digest)
    folder = f"{files}/" if files else ""
    certificate = context.arguments.get("PIP_CERT")
    variables = {"PYTHONUNBUFFERED": "1", **spec.environment}
    sections = {
        "%files": [f"{folder}{name} /opt/ftkit/{name}" for name in sorted(context.files) if name != "Dockerfile"],
        "%post": [
            "set -eu",
            *([f"export PIP_CERT={shlex.quote(certificate)}"] if certificate else []),
            *(line for step in _RUN.findall(_dockerfile(spec)) for line in step.splitlines()),
        ],
        "%environment": [f"export {name}={shlex.quote(value)}" for name, value in variables.items()],
        "%labels": [f"{REFERENCE_LABEL} {spec.reference}", f"ftkit.lock-sha256 {context.lock_sha256}"],
        "%test": ["python3 -m ftkit.images.inside"],
    }
    warning = "" if spec.base.digest else " UNPINNED: the base has no digest, so its tag may be another image later."
    head = f"# {spec.reference}, as ftkit defines it.{warning}\nBootstrap: docker\nFrom: {base.pinned}\n"
    return head + "".join(
        f"\n{title}\n" + "".join(f"    {line}\n" for line in lines) for title, lines in sections.items()
    )


def write_files(definition: ImageDefinition, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in assemble(definition).files.items():
        if name != "Dockerfile":
            (folder / name).write_bytes(data)
