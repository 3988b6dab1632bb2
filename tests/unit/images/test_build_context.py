"""Inputs of a build (context, wheel, lock), and programs inside the image."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from ftkit.config.context import Context, list_images
from ftkit.config.image import BaseImageSpec
from ftkit.config.load import ImageDefinition, find_image
from ftkit.errors import ImageError
from ftkit.images import inside
from ftkit.images.build_context import assemble, definition_file, inputs_digest, read_lock
from ftkit.images.inside import make_sbom, parse_pins
from ftkit.wheel import make_wheel

CHECKOUT = Path(__file__).parents[3]
SHIPPED_ONLY = Context(Path("/nonexistent"), Path("/nonexistent"), {})
IMAGES = list_images(SHIPPED_ONLY)
TRAINING_IMAGES = [name for name in IMAGES if find_image(name, SHIPPED_ONLY).spec.purpose == "training"]


@pytest.fixture(autouse=True)
def no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def definition(tmp_path: Path) -> ImageDefinition:
    """A definition with a lock in a temporary folder."""
    found = find_image("olmo3:25.02", SHIPPED_ONLY)
    lock = tmp_path / "image.lock"
    lock.write_text(found.lock_file.read_text())
    return found._replace(lock_file=lock)


@pytest.mark.parametrize("reference", IMAGES)
def test_every_shipped_lock_matches_its_definition_and_replaces_no_package_of_the_base(reference: str) -> None:
    found = find_image(reference, SHIPPED_ONLY)
    locked = parse_pins(read_lock(found))
    assert {"transformers", "accelerate", "click"} <= set(locked) or found.spec.purpose == "serving"
    assert "rich" in locked
    assert not {"torch", "triton", "pytorch-triton", "numpy"} & set(locked)
    is_of_base = ("nvidia-cublas", "nvidia-cuda", "nvidia-cudnn-cu", "nvidia-cufft", "nvidia-cus", "nvidia-nccl")
    assert not [name for name in locked if name.startswith(is_of_base)]


@pytest.mark.parametrize("reference", TRAINING_IMAGES)
def test_every_base_of_a_training_image_is_an_nvidia_release(reference: str) -> None:
    found = find_image(reference, SHIPPED_ONLY)
    assert found.spec.base.reference == f"nvcr.io/nvidia/pytorch:{found.spec.tag}-py3"


def test_images_of_one_release_share_their_lock() -> None:
    locks = {find_image(f"{name}:25.02", SHIPPED_ONLY).lock_file for name in ("olmo3", "gemma3", "llama3", "qwen3")}
    assert len(locks) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text + "torch==2.9.0 \\\n    --hash=sha256:00\n", "would replace torch"),
        (lambda text: text + "PyTorch_Triton==3.1.0 \\\n    --hash=sha256:00\n", "would replace pytorch-triton"),
        (lambda text: text + "left-pad==1.0\n", "no hash for left-pad"),
        (lambda text: text.replace("# inputs: sha256:", "# inputs: sha256:0"), "was not made from"),
    ],
)
def test_a_lock_that_does_not_match_is_rejected(definition: ImageDefinition, change: object, message: str) -> None:
    assert callable(change)
    definition.lock_file.write_text(change(definition.lock_file.read_text()))
    with pytest.raises(ImageError, match=message):
        read_lock(definition)


def test_a_missing_lock_is_reported(definition: ImageDefinition) -> None:
    definition.lock_file.unlink()
    with pytest.raises(ImageError, match="has no lock"):
        read_lock(definition)


def test_changed_packages_of_the_base_change_the_locks_inputs(definition: ImageDefinition) -> None:
    changed = definition.spec.model_copy(update={"provided": {"torch": "2.9"}})
    assert inputs_digest(changed) != inputs_digest(definition.spec)


def test_the_same_inputs_give_the_same_context(definition: ImageDefinition) -> None:
    first, second = assemble(definition), assemble(definition)
    assert first.archive({"a": "b"}).getvalue() == second.archive({"a": "b"}).getvalue()
    assert first.digest("base") == second.digest("base") != first.digest("other base")


def test_a_context_contains_what_the_dockerfile_copies(definition: ImageDefinition) -> None:
    archive = assemble(definition).archive({"some.label": 'quo"ted $x'})
    with tarfile.open(fileobj=archive) as tar:
        names = set(tar.getnames())
        text = tar.extractfile("Dockerfile")
        assert text is not None
        assert text.read().endswith(b'LABEL some.label="quo\\"ted \\$x"\n')
    assert {"Dockerfile", "requirements.lock", "image.json"} < names
    assert sum(name.endswith(".whl") for name in names) == 1


def test_an_index_with_a_password_is_rejected(definition: ImageDefinition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://alice:hush@pypi.example.com/simple")
    with pytest.raises(ImageError, match="PIP_INDEX_URL") as caught:
        assemble(definition)
    assert "hush" not in str(caught.value)


def test_a_sites_certificates_are_included(
    definition: ImageDefinition, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_text("certificate")
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "ca.pem"))
    context = assemble(definition)
    assert context.files["certificates.crt"] == b"certificate"
    assert context.arguments["PIP_CERT"] == "/opt/ftkit/certificates.crt"


def test_the_wheel_is_complete_and_contains_no_timestamps() -> None:
    data = make_wheel()
    assert make_wheel() == data
    with zipfile.ZipFile(BytesIO(data)) as wheel:
        names = wheel.namelist()
        record = wheel.read(next(name for name in names if name.endswith("/RECORD"))).decode()
        for line in record.splitlines():
            name, digest, _ = line.rsplit(",", 2)
            if digest:
                found = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).rstrip(b"=").decode()
                assert digest == f"sha256={found}"
    assert {line.rsplit(",", 2)[0] for line in record.splitlines()} == set(names)
    assert {"ftkit/__main__.py", "ftkit/_assets/Dockerfile", "ftkit/_assets/containers/ngc-25.02.lock"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]


def test_the_singularity_definition_has_the_dockerfiles_steps(definition: ImageDefinition) -> None:
    text = definition_file(definition)
    assert text.startswith("# olmo3:25.02, as ftkit defines it. UNPINNED")
    assert "\nFrom: nvcr.io/nvidia/pytorch:25.02-py3\n" in text
    assert text.count("python3 -m pip install") == 2
    assert "requirements.lock /opt/ftkit/requirements.lock" in text


def test_the_singularity_definition_has_the_digest_of_the_base_from_any_source(definition: ImageDefinition) -> None:
    digest = "sha256:" + "1" * 64
    for reference in ("nvcr.io/nvidia/pytorch:25.02-py3", f"nvcr.io/nvidia/pytorch:25.02-py3@{digest}"):
        base = BaseImageSpec(reference=reference, digest=digest)
        changed = definition._replace(spec=definition.spec.model_copy(update={"base": base}))
        assert f"\nFrom: nvcr.io/nvidia/pytorch@{digest}\n" in definition_file(changed)


# --- What runs inside the image ------------------------------------------------------------------


def test_the_bill_of_materials_lists_python_and_debian_packages(tmp_path: Path) -> None:
    status, release = tmp_path / "status", tmp_path / "os-release"
    status.write_text(
        "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9+deb12u1\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n"
    )
    release.write_text('NAME="Debian"\nID=debian\n')
    document = make_sbom(status, release)
    urls = [component["purl"] for component in document["components"]]
    assert "pkg:deb/debian/libc6@2.36-9%2Bdeb12u1?arch=amd64" in urls
    assert not [url for url in urls if "gone" in url]
    assert any(url.startswith("pkg:pypi/pydantic@") for url in urls)
    assert document["bomFormat"] == "CycloneDX"
    assert make_sbom(status, release) == document


def test_the_dockerfiles_command_writes_the_bill_of_materials_with_only_the_standard_library(tmp_path: Path) -> None:
    written = tmp_path / "sbom.json"
    subprocess.run(
        [sys.executable, "-S", "-m", "ftkit.images.inside", "--sbom", str(written)], cwd=CHECKOUT, check=True
    )
    assert json.loads(written.read_text())["bomFormat"] == "CycloneDX"


def check(folder: Path, *, lock: str = "", base: str = "", **image: object) -> list[str]:
    (folder / "requirements.lock").write_text(lock)
    (folder / "base-packages.txt").write_text(base)
    (folder / "image.json").write_text(json.dumps({"provided": {}, "imports": [], **image}))
    return inside.find_issues(folder)


def test_an_image_that_matches_its_definition_has_no_faults(tmp_path: Path) -> None:
    pydantic, click = inside._version("pydantic"), inside._version("click")
    lock, base = f"pydantic=={pydantic} \\\n    --hash=sha256:0\n", f"click=={click}\n"
    assert check(tmp_path, lock=lock, base=base, provided={"click": str(click)[:2]}, imports=["json"]) == []


def test_each_fault_of_an_image_is_reported(tmp_path: Path) -> None:
    issues = check(
        tmp_path,
        lock="pydantic==0.1\nno-such-package==1\n",
        base="click==0.0.1\n",
        provided={"click": "", "rich": "0.0"},
        imports=["no_such_module"],
    )
    assert [fault.partition(" ")[0] for fault in issues] == ["pydantic", "no-such-package", "click", "rich", "import"]
    assert "0.0.1," in issues[2]
