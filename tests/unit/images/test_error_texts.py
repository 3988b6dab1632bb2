"""The texts of errors about images, as a user reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from error_texts import check_error_texts

from ftkit.config.context import Context
from ftkit.config.image_reference import parse_importable, parse_reference
from ftkit.config.load import find_image, load_cluster
from ftkit.images.build import follow_build
from ftkit.images.build_context import read_lock
from ftkit.images.events import ignore_progress
from ftkit.images.import_image import ImportRequest, select_source
from ftkit.images.oci.connection import Credentials, access_denied, explain_tls, from_user
from ftkit.images.oci.documents import Configuration, parse_json, read_document
from ftkit.images.squashfs import check_squashfs
from ftkit.images.transfer import explain_transfer
from ftkit.images.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

WANTED = parse_reference("registry.example.com/team/olmo3:25.02")
ALICE = Credentials("alice", "correct-horse")


def fail(error: Exception) -> None:
    raise error


def test_golden_error_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    ctx = Context(tmp_path, tmp_path / "user", {})
    slurm, local = load_cluster("slurm", ctx), load_cluster("local", ctx)
    lock = tmp_path / "image.lock"
    lock.write_text("torch==2.9\n")
    (tmp_path / "x.sqsh").write_bytes(b"hsqs" + bytes(36) + (200).to_bytes(8, "little") + bytes(100))

    def request(text: str, **options: object) -> ImportRequest:
        image = parse_importable(text, tmp_path)
        return ImportRequest(image, None, **{"cluster": slurm, **options})  # type: ignore[arg-type]

    failures: dict[str, Callable[[], object]] = {
        "no credentials": lambda: fail(access_denied(WANTED, None)),
        "wrong credentials": lambda: fail(access_denied(WANTED, ALICE)),
        "refused push": lambda: fail(explain_transfer("denied", WANTED, ALICE, pushes=True)),
        "no user name": lambda: from_user("r.example.com", None, "secret"),
        "unknown authority": lambda: fail(explain_tls("r.example.com", "self-signed certificate")),
        "missing from the registry": lambda: fail(explain_transfer("manifest unknown", WANTED, ALICE)),
        "lost connection": lambda: fail(explain_transfer("dial tcp: connection refused", WANTED, ALICE)),
        "not a registry": lambda: read_document(b"<html>", str(WANTED)),
        "an index and an image": lambda: read_document(b'{"manifests": [], "config": {}}', str(WANTED)),
        "invalid configuration": lambda: parse_json(Configuration, b'{"rootfs": {}}', f"{WANTED} has one that"),
        "failed step": lambda: follow_build(
            [{"stream": "Step 3/13 : RUN pip install"}, {"error": "no space left on device"}], ignore_progress
        ),
        "lock of another image": lambda: read_lock(find_image("olmo3:25.02", ctx)._replace(lock_file=lock)),
        "not built, no registry": lambda: select_source(request("olmo3:25.02"), ignore_progress),
        "no Slurm": lambda: select_source(request("olmo3:25.02", cluster=local, on_node=True), ignore_progress),
        "no signature to find": lambda: select_source(request("olmo3:25.02", public_key=lock), ignore_progress),
        "truncated file": lambda: check_squashfs(Path("x.sqsh")),
        "file of another program": lambda: verify(Path("x.sqsh")),
    }
    check_error_texts("images", failures.items(), {str(tmp_path): "FOLDER"})
