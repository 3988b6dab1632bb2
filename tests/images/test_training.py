"""A real training image with Debian, Python and torch: locked, built, imported, and used for training in docker."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Project
    from docker import APIClient

DEBIAN_PYTHON = "3.11"
OF_THE_BASE = (
    "filelock", "fsspec", "functorch", "jinja2", "markupsafe", "mpmath", "networkx", "numpy", "sympy", "torch",
    "torchgen", "typing_extensions",
)  # fmt: skip
DEFINITION = """name: trained
tag: "1"
description: Debian with torch for processors
base:
  reference: debian-torch:1
python: "{python}"
provided: {{numpy: "", torch: "2.", triton: ""}}
packages: [accelerate, datasets, safetensors, tokenizers, transformers]
imports: [torch, transformers, accelerate, datasets, ftkit.train.trainer]
families: [qwen3]
default_recipe: demo
"""


@pytest.fixture
def base_with_torch(client: APIClient, tmp_path: Path) -> None:
    """Debian with Python and the installed torch, in place of NVIDIA's base image."""
    here = f"{sysconfig.get_python_version()}"
    if here != DEBIAN_PYTHON:
        pytest.skip(f"uses torch of this Python, which is {here} and not Debian's {DEBIAN_PYTHON}")
    if not shutil.which("mmdebstrap"):
        subprocess.run(["apt-get", "install", "-y", "-qq", "mmdebstrap"], check=False, capture_output=True)
    if not shutil.which("mmdebstrap"):
        pytest.skip("needs mmdebstrap, which apt-get could not install")
    root = tmp_path / "root.tar"
    packages = "python3,python3-pip,python3-setuptools,python3-wheel"
    subprocess.run(
        ["mmdebstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root)],
        check=True,
        capture_output=True,
    )
    site = Path(sysconfig.get_path("purelib"))
    with tarfile.open(root, "a") as tar:
        for name in OF_THE_BASE:
            for path in (*site.glob(name), *site.glob(f"{name}.*"), *site.glob(f"{name}-*.dist-info")):
                tar.add(path, f"usr/local/lib/python{DEBIAN_PYTHON}/dist-packages/{path.name}", filter=_owned_by_root)
    client.import_image_from_file(str(root), repository="debian-torch", tag="1")
    root.unlink()


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.uid = entry.gid = 0
    return None if "__pycache__" in entry.name or "/torch/include" in entry.name else entry


@pytest.mark.usefixtures("base_with_torch")
def test_the_demo_trains_in_an_image_that_ftkit_locked_and_built(project: Project) -> None:
    folder = project.root / "containers" / "trained" / "1"
    folder.mkdir(parents=True)
    (folder / "image.yaml").write_text(DEFINITION.format(python=DEBIAN_PYTHON))
    project.ok("images", "lock", "trained:1")
    assert "torch==" not in (folder / "image.lock").read_text()
    project.ok("build", "trained:1", "--allow-unpinned")
    link = project.images / project.ok("import", "trained:1").stdout.strip()
    assert "matches its manifest" in project.ok("verify", "trained:1", "--deep").stderr
    packages = json.loads(Path(f"{link.resolve()}.sbom.json").read_text())["components"]
    kinds = {package["purl"].partition("/")[0] for package in packages}
    assert kinds == {"pkg:pypi", "pkg:deb"}

    small = (
        "training.max_steps=20", "training.log_every_steps=5", "training.checkpoint_every_steps=20",
        "data.source.num_train=300", "evaluation.generation=null",
    )  # fmt: skip
    run = project.ok("run", "demo", *small, "--image", "trained:1", "--cluster", "docker")
    assert "completed" in run.stderr
    folder = next((project.workspace / "runs").iterdir())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["image_id"] == "sha256:" + link.resolve().name.removeprefix("sha256-").removesuffix(".v2.sqsh")
    losses = [json.loads(line).get("loss") for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss]
    assert losses[-1] < losses[0]
