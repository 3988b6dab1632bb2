"""build, push, import and verify with a real engine and a real registry."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import time
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftkit.images import docker_engine
from ftkit.images.image_store import ImageStore
from ftkit.images.import_image import docker_source, import_image

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Project
    from docker import APIClient


USER, SECRET = "alice", "correct-horse-4711"  # as conftest.py sets them up


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_build_yields_a_tagged_and_labeled_image(project: Project, bases: APIClient) -> None:
    done = project.ok("build", "tiny:1", "--allow-unpinned")
    found = bases.inspect_image("ftkit/tiny:1")
    labels = found["Config"]["Labels"]
    assert done.stdout.strip() == found["Id"]
    assert labels["ftkit.reference"] == labels["org.opencontainers.image.title"] == "tiny:1"
    assert labels["org.opencontainers.image.base.name"] == "docker.io/library/fake:1"
    assert labels["ftkit.base-unpinned"] == "true"
    assert len(labels["ftkit.lock-sha256"]) == 64
    assert labels["ftkit.source-date-epoch"].isdigit()


def test_the_engine_of_dockers_current_context_is_used(project: Project, tmp_path: Path) -> None:
    configuration = tmp_path / "docker-config"
    (configuration / "config.json").write_text('{"currentContext": "rootless"}')
    folder = configuration / "contexts" / "meta" / hashlib.sha256(b"rootless").hexdigest()
    folder.mkdir(parents=True)
    endpoints = {"docker": {"Host": project.environment["DOCKER_HOST"], "SkipTLSVerify": False}}
    (folder / "meta.json").write_text(json.dumps({"Name": "rootless", "Metadata": {}, "Endpoints": endpoints}))
    project.environment["DOCKER_HOST"] = ""
    assert "built ftkit/tiny:1" in project.ok("build", "tiny:1", "--allow-unpinned").stderr


def test_an_unchanged_definition_is_not_rebuilt(project: Project) -> None:
    first = project.ok("build", "tiny:1", "--allow-unpinned")
    second = project.ok("build", "tiny:1", "--allow-unpinned")
    assert second.stdout == first.stdout
    assert "up to date" in second.stderr
    assert "Step" not in second.stderr


def test_a_changed_definition_is_rebuilt(project: Project) -> None:
    first = project.ok("build", "tiny:1", "--allow-unpinned")
    project.define(more='environment: {GREETING: a "b" $c}\n'.replace("''", "'"))
    assert project.ok("build", "tiny:1", "--allow-unpinned").stdout != first.stdout


def test_images_on_the_same_base_share_layers(project: Project) -> None:
    project.define("second", "2")
    project.ok("build", "tiny:1", "--allow-unpinned")
    assert "Using cache" not in project.ok("build", "second:2", "--allow-unpinned").stderr.partition("pip install")[0]


def test_a_pushed_image_imported_elsewhere_has_the_same_files(
    project: Project, tmp_path: Path, bases: APIClient
) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    pushed = project.ok("push", "tiny:1").stdout.strip()
    project.ok("import", "tiny:1")
    project.environment["FTKIT_WORKSPACE"] = str(tmp_path / "elsewhere")
    bases.remove_image("ftkit/tiny:1", force=True)
    project.ok("import", "tiny:1")
    here, there = (tmp_path / place / "images" / "tiny+1.sqsh" for place in ("workspace", "elsewhere"))
    assert here.resolve().name == there.resolve().name
    manifest = json.loads(there.resolve().with_name(there.resolve().name + ".json").read_text())
    assert manifest["registry_digest"] == pushed.partition("@")[2]
    assert manifest["source"].startswith("registry, 127.0.0.1:")
    assert listing(here) == listing(there)


def test_an_unchanged_push_has_the_same_digest(project: Project) -> None:
    project.define(base="large:1")
    project.ok("build", "tiny:1", "--allow-unpinned")
    first = project.ok("push", "tiny:1")
    assert project.ok("push", "tiny:1").stdout == first.stdout


def listing(file: Path) -> list[str]:
    """Modes, sizes and names, without times and files that docker adds to an export."""
    done = subprocess.run(["unsquashfs", "-lls", str(file)], capture_output=True, text=True, check=True)
    rows = [line.split(maxsplit=5) for line in done.stdout.splitlines() if line.startswith(("-", "d", "l"))]
    ours = ("/dev", "/proc", "/sys", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab -> /proc/mounts")
    return sorted(
        f"{row[0]} {row[2] if row[0].startswith('-') else ''} {row[5]}"
        for row in rows
        if len(row) == 6 and row[5].removeprefix("squashfs-root") not in ours
    )


def test_flattened_layers_with_deletions_match_dockers_export(
    project: Project, bases: APIClient, registry: str, tmp_path: Path
) -> None:
    steps = (
        "FROM fake:1",
        "RUN mkdir -p /a/deep /b && echo one >/a/deep/one && echo two >/a/two && ln /a/two /a/link && echo x >/b/x",
        "RUN rm -r /a/deep && mkdir /a/deep && echo new >/a/deep/new && rm /b/x && echo changed >/a/two",
        "RUN rm -r /b && echo now-a-file >/b",
    )
    list(bases.build(fileobj=io.BytesIO("\n".join(steps).encode()), tag=f"{registry}/layers:1", rm=True))
    list(bases.push(f"{registry}/layers", tag="1", stream=True))
    project.ok("import", f"dockerd://{registry}/layers:1")
    project.environment["FTKIT_WORKSPACE"] = str(tmp_path / "elsewhere")
    project.ok("import", f"docker://{registry}#layers:1")
    here, there = (tmp_path / place / "images" / "layers+1.sqsh" for place in ("workspace", "elsewhere"))
    assert listing(here) == listing(there)
    assert any(row.endswith("/a/link") for row in listing(there))
    for path, expected in (("a/link", "two\n"), ("a/two", "changed\n"), ("b", "now-a-file\n")):
        for file in (here, there):
            shown = subprocess.run(["unsquashfs", "-cat", str(file), path], capture_output=True, text=True, check=True)
            assert shown.stdout == expected


def test_an_import_contains_the_files_that_enroot_requires(project: Project) -> None:
    project.define(more="environment: {GREETING: hello}\n")
    project.ok("build", "tiny:1", "--allow-unpinned")
    link = project.ok("import", "tiny:1").stdout.strip()
    environment, script = (
        subprocess.run(["unsquashfs", "-cat", link, path], capture_output=True, text=True, check=True).stdout
        for path in ("etc/environment", "etc/rc")
    )
    assert "GREETING=hello\n" in environment
    assert 'exec "$@"' in script
    assert "# ftkit.reference tiny:1" in script


def test_importing_the_same_image_is_reproducible_byte_for_byte(project: Project, tmp_path: Path) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    first = sha256(project.images / project.ok("import", "tiny:1").stdout.strip())
    time.sleep(1.1)
    project.environment["FTKIT_WORKSPACE"] = str(tmp_path / "elsewhere")
    assert sha256(project.images / project.ok("import", "tiny:1").stdout.strip()) == first


def test_an_existing_import_is_not_repeated(project: Project) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    project.ok("import", "tiny:1")
    again = project.ok("import", "tiny:1")
    assert "is already imported" in again.stderr
    assert "building squashfs" not in again.stderr


def test_an_import_has_a_manifest_and_a_package_list(project: Project) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    link = project.images / project.ok("import", "tiny:1").stdout.strip()
    final = link.resolve()
    manifest = json.loads(final.with_name(final.name + ".json").read_text())
    assert final.name == manifest["image_id"].replace(":", "-") + ".v2.sqsh"
    assert manifest["sha256"] == sha256(final)
    assert manifest["size"] == final.stat().st_size
    assert manifest["labels"]["ftkit.reference"] == "tiny:1"
    assert json.loads((final.parent / manifest["sbom"]).read_text())["bomFormat"] == "CycloneDX"


def test_verify_accepts_an_intact_file_and_can_run_the_self_check(project: Project) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    project.ok("import", "tiny:1")
    assert "matches its manifest" in project.ok("verify", "tiny:1", "--deep").stderr


def test_the_image_list_shows_where_each_image_is(project: Project, registry: str) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    project.ok("push", "tiny:1")
    project.ok("import", "tiny:1")
    shown = json.loads(project.ok("images", "--json").stdout)
    tiny = next(image for image in shown if image["reference"] == "tiny:1")
    assert tiny["is_imported"]
    assert tiny["built"]["id"] == tiny["imported"][0]["image_id"]
    assert tiny["pushed"][0].startswith(f"{registry}/team/tiny@sha256:")
    assert "unpinned" in project.ok("images").stdout


@pytest.fixture
def pushed_base(bases: APIClient, registry: str) -> Callable[[str], str]:
    """Push one of the bases as `base:1`; return its address."""

    def push(name: str) -> str:
        bases.tag(name, f"{registry}/base", "1")
        list(bases.push(f"{registry}/base", tag="1", stream=True))
        bases.remove_image(f"{registry}/base:1")
        return f"{registry}/base:1"

    return push


def test_the_digest_of_a_base_is_recorded_and_used_by_later_builds(
    project: Project, pushed_base: Callable[[str], str], bases: APIClient
) -> None:
    address = pushed_base("fake:1")
    lock = project.define(base=address).with_name("bases.lock")
    first = project.ok("build", "tiny:1")
    assert f"base {address}@sha256:" in first.stderr
    assert "bases.lock" in first.stderr
    recorded = lock.read_text()
    assert f"\n{address}@sha256:" in recorded
    labels = bases.inspect_image("ftkit/tiny:1")["Config"]["Labels"]
    assert f"{address}@{labels['org.opencontainers.image.base.digest']}\n" in recorded
    assert "ftkit.base-unpinned" not in labels
    assert "up to date" in project.ok("build", "tiny:1").stderr

    pushed_base("large:1")
    assert "up to date" in project.ok("build", "tiny:1").stderr
    again = project.ok("build", "tiny:1", "--no-cache")
    assert "another image" in again.stderr
    assert "--repin" in again.stderr
    assert lock.read_text() == recorded
    assert bases.inspect_image("ftkit/tiny:1")["Size"] < 20 << 20
    images = json.loads(project.ok("images", "--json").stdout)
    assert next(image for image in images if image["reference"] == "tiny:1")["is_pinned"]

    project.ok("build", "tiny:1", "--repin")
    assert lock.read_text() != recorded
    assert bases.inspect_image("ftkit/tiny:1")["Size"] > 60 << 20


def test_a_push_reads_a_password_from_standard_input(project: Project, private_registry: str) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    words = ("push", "tiny:1", "--registry", private_registry, "--username", USER, "--password-stdin")
    assert private_registry in project.ok(*words, given=SECRET + "\n").stdout


def test_credentials_are_read_from_dockers_configuration(
    project: Project, private_registry: str, bases: APIClient
) -> None:
    token = b64encode(f"{USER}:{SECRET}".encode()).decode()
    config = {"auths": {private_registry: {"auth": token}}}
    Path(project.environment["DOCKER_CONFIG"], "config.json").write_text(json.dumps(config))
    project.ok("build", "tiny:1", "--allow-unpinned")
    project.ok("push", "tiny:1", "--registry", f"{private_registry}/a")
    bases.remove_image("ftkit/tiny:1", force=True)
    project.ok("import", "tiny:1", "--registry", f"{private_registry}/a")


def test_credentials_are_read_from_a_helper(project: Project, private_registry: str, tmp_path: Path) -> None:
    helper = tmp_path / "bin" / "docker-credential-test"
    helper.parent.mkdir()
    helper.write_text(f'#!/bin/sh\necho \'{{"Username": "{USER}", "Secret": "{SECRET}"}}\'\n')
    helper.chmod(0o755)
    project.environment["PATH"] = f"{helper.parent}:{os.environ['PATH']}"
    config = {"credHelpers": {private_registry: "test"}}
    Path(project.environment["DOCKER_CONFIG"], "config.json").write_text(json.dumps(config))
    project.ok("build", "tiny:1", "--allow-unpinned")
    project.ok("push", "tiny:1", "--registry", f"{private_registry}/b")


@pytest.mark.parametrize(("name", "tag"), [("a", "1"), ("a.b_c-d", "V1.0_x-y"), ("0a", "9"), ("a__b", "1")])
def test_unusual_but_valid_names_work(project: Project, name: str, tag: str) -> None:
    project.define(name, tag)
    project.ok("build", f"{name}:{tag}", "--allow-unpinned")
    project.ok("push", f"{name}:{tag}")
    project.ok("import", f"{name}:{tag}")
    project.ok("verify", f"{name}:{tag}")


def test_gc_removes_unreferenced_files_after_confirmation(project: Project) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    project.ok("import", "tiny:1")
    old = (project.images / "tiny+1.sqsh").resolve()
    project.define(more="environment: {CHANGED: 'yes'}\n")
    project.ok("build", "tiny:1", "--allow-unpinned")
    project.ok("import", "tiny:1")
    refused = project.call("rm", "--unused", given="n\n")
    assert "points to it" in refused.stdout
    assert "nothing was changed" in refused.stderr
    assert old.exists()
    project.ok("rm", "--unused", "--yes")
    assert not old.exists()
    project.ok("verify", "tiny:1")


def test_the_other_packer_produces_the_same_files(
    project: Project, docker_host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project.ok("build", "tiny:1", "--allow-unpinned")
    project.ok("import", "tiny:1")
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    monkeypatch.setattr("shutil.which", lambda name: None if name == "tar2sqfs" else name)
    with docker_engine.connect() as client:
        image = docker_engine.inspect_required(client, "ftkit/tiny:1", "")
    store = ImageStore(tmp_path / "other")
    first = import_image("tiny:1", docker_source("ftkit/tiny:1", image), store)
    time.sleep(1.1)  # times are in seconds
    again = import_image("tiny:1", docker_source("ftkit/tiny:1", image), store, force=True)
    assert first.manifest.made_by.startswith("mksquashfs")
    assert first.manifest.sha256 == again.manifest.sha256
    assert listing(first.link) == listing(project.images / "tiny+1.sqsh")


# --- Requires Slurm with pyxis -------------------------------------------------------------------


def test_pyxis_starts_the_imported_file(project: Project) -> None:
    offers = shutil.which("srun") and subprocess.run(["srun", "--help"], capture_output=True, text=True, check=False)
    if not offers or "--container-image" not in offers.stdout:
        pytest.skip("Slurm with pyxis is not on this machine")
    project.ok("build", "tiny:1", "--allow-unpinned")
    link = project.ok("import", "tiny:1", "--with", "ftkit").stdout.strip()
    done = subprocess.run(["srun", f"--container-image={link}", "cat", "/etc/issue"], capture_output=True, check=True)
    assert done.stdout == b"fake\n"


def test_only_a_signed_image_is_imported_if_a_signature_is_required(
    project: Project, tmp_path: Path, bases: APIClient
) -> None:
    for name in ("ours", "theirs"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    wanted = ("import", "tiny:1", "--require-signature", str(tmp_path / "ours.pub"))
    project.ok("build", "tiny:1", "--allow-unpinned")
    project.ok("push", "tiny:1")
    unsigned = project.call(*wanted)
    assert unsigned.returncode == 10
    assert "is not signed" in unsigned.stderr
    assert not project.images.exists()
    project.ok("push", "tiny:1", "--sign", "--key", str(tmp_path / "theirs"))
    foreign = project.call(*wanted)
    assert foreign.returncode == 10
    assert "tiny:1 matches" in foreign.stderr
    pushed = project.ok("push", "tiny:1", "--sign", "--key", str(tmp_path / "ours"))
    link = project.ok(*wanted, "--sign", "--key", str(tmp_path / "ours")).stdout.strip()
    manifest = (project.root / link).resolve()
    manifest = manifest.with_name(f"{manifest.name}.json")
    assert json.loads(manifest.read_text())["registry_digest"] == pushed.stdout.strip().partition("@")[2]
    checked = ("verify", "tiny:1", "--require-signature")
    project.ok(*checked, str(tmp_path / "ours.pub"))
    assert project.call(*checked, str(tmp_path / "theirs.pub")).returncode == 10
    manifest.write_text(manifest.read_text().replace("tiny:1", "tiny:2"))
    assert project.call(*checked, str(tmp_path / "ours.pub")).returncode == 10
    bases.tag("fake:1", pushed.stdout.strip().partition("@")[0], "1", force=True)
    list(bases.push(pushed.stdout.strip().partition("@")[0], tag="1", stream=True))
    moved = project.call(*wanted)
    assert moved.returncode == 10
    assert "is not signed" in moved.stderr
