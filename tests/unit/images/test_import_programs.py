"""Imports through enroot, sbatch and apptainer, with stand-ins that record their calls and write a file."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from ftkit.config.context import Context
from ftkit.config.image_reference import Digest, parse_importable, parse_reference
from ftkit.config.load import load_cluster
from ftkit.errors import ConfigError, ImageError, PrerequisiteError
from ftkit.images import enroot, squashfs
from ftkit.images import import_image as importing
from ftkit.images.docker_engine import DockerImage
from ftkit.images.events import ignore_progress
from ftkit.images.image_store import ImageStore, read_manifest
from ftkit.images.import_image import (
    ImageSource,
    ImportRequest,
    by_enroot,
    docker_source,
    import_image,
    select_source,
)
from ftkit.images.squashfs import ImageConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.config.cluster import ClusterProfile

SHIPPED_ONLY = Context(Path("/nonexistent"), Path("/nonexistent"), {})
SLURM = load_cluster("slurm", SHIPPED_ONLY)
SQUASHFS = b"hsqs" + bytes(36) + (200).to_bytes(8, "little") + bytes(200)
RECORD = 'printf "%s\\n" "$@" >"$RECORD/${0##*/}"; env >"$RECORD/${0##*/}.env"\n'
ENROOT = (
    '[ "$1" = version ] && { echo "${RELEASE-4.1.2}"; exit; }\n'
    + RECORD
    + '[ -n "${SAYS-}" ] && { echo "$SAYS"; exit 1; }\ncp "$RECORD/sqsh" "$3"; >"$ENROOT_CACHE_PATH/${CONFIG-$OURS}"\n'
)
"""As the real one: it knows its release, and its cache has the configuration of the image that it imported."""
SBATCH = (
    RECORD
    + """for word; do
    case $word in
    --output=*) out=${word#*=}; exec >"${out//%%/%}" 2>&1 ;;
    --wrap=*) echo '#!/bin/sh' >"$RECORD/job"; echo "${word#*=}" >>"$RECORD/job" ;;
    esac
done
setsid sh "$RECORD/job" & echo $! >"$RECORD/pid"
wait $!
"""
)
SCANCEL = """echo "$@" >>"$RECORD/scancel"
case "$*" in *--signal=TERM*) kill -TERM "$(cat "$RECORD/pid")" ;; esac
"""
SQUEUE = 'if kill -0 "$(cat "$RECORD/pid")" 2>/dev/null; then echo 1 dev ftkit-import; fi\n'
APPTAINER = RECORD + (
    '[ -n "${SAYS-}" ] && { echo "$SAYS" >&2; exit 1; }\n'
    'echo "INFO: Starting build..." >&2\n'
    'printf "#!/usr/bin/env run-singularity\\n\\0SIF_MAGIC\\0rest" >"$2"\n'
)


def requested(text: str, registry: str | None, cluster: ClusterProfile, **options: Any) -> ImportRequest:
    return ImportRequest(parse_importable(text, Path.cwd()), registry, cluster, **options)


IMAGE_ID, REGISTRY_DIGEST = Digest("sha256:" + "a" * 64), Digest("sha256:" + "b" * 64)
KNOWN = ImageSource(
    origin="a registry",
    image_id=IMAGE_ID,
    config=ImageConfig(created=77),
    digests=(REGISTRY_DIGEST,),
    make_file=lambda *_: pytest.fail("made without a program"),
    address=enroot.address_in_registry(parse_reference("nvcr.io/team/olmo3:25.02"), REGISTRY_DIGEST, IMAGE_ID, ()),
)
"""A source with a known image configuration."""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with stand-ins first on PATH, in which they record their calls."""
    folder = tmp_path / "record"
    folder.mkdir()
    (folder / "sqsh").write_bytes(SQUASHFS)
    monkeypatch.setenv("RECORD", str(folder))
    monkeypatch.setenv("OURS", "a" * 64)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "77")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.defpath}")
    monkeypatch.setattr(importing, "_registry_source", lambda *_: KNOWN)
    return folder


@pytest.fixture
def stand_in(tmp_path: Path) -> Callable[[str, str], None]:
    def write(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/bash\n" + script)
        path.chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("release", "asked"),
    [
        ("3.5.0", "docker://nvcr.io#team/olmo3:25.02"),
        ("4.0.0", f"docker://nvcr.io#team/olmo3@{REGISTRY_DIGEST}"),
        ("10.1.0", f"docker://nvcr.io#team/olmo3@{REGISTRY_DIGEST}"),
    ],
)
def test_enroot_imports_by_digest_if_supported_with_the_right_options(
    record: Path,
    stand_in: Callable[[str, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    asked: str,
) -> None:
    stand_in("enroot", ENROOT)
    monkeypatch.setenv("RELEASE", release)
    request = requested("docker://nvcr.io/team/olmo3:25.02", None, SLURM, method="enroot")
    imported = import_image("olmo3:25.02", select_source(request, ignore_progress), ImageStore(tmp_path / "images"))
    words = (record / "enroot").read_text().split()
    assert (words[0], words[-1]) == ("import", asked)
    variables = (record / "enroot.env").read_text()
    assert "ENROOT_SQUASH_OPTIONS=-comp zstd -Xcompression-level 3 -b 1M -exit-on-error\n" in variables
    assert "SOURCE_DATE_EPOCH" not in variables
    assert "ENROOT_ALLOW_HTTP" not in variables
    assert imported.manifest.source == f"enroot, docker://nvcr.io#team/olmo3@{REGISTRY_DIGEST}"
    assert imported.link.resolve().name == "sha256-" + "a" * 64 + ".v2.sqsh"
    assert not [path.name for path in imported.file.parent.iterdir() if "partial" in path.name]


def test_an_image_other_than_the_requested_one_is_rejected(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("enroot", ENROOT)
    monkeypatch.setenv("RELEASE", "3.5.0")
    monkeypatch.setenv("CONFIG", "c" * 64)
    store = ImageStore(tmp_path / "images")
    with pytest.raises(ImageError, match=r"docker://nvcr\.io#team/olmo3@sha256"):
        import_image("olmo3:25.02", by_enroot(KNOWN), store)
    assert (record / "enroot").exists()
    assert [path.name for path in store.root.iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.parametrize(("host", "is_plain"), [("127.0.0.1:5000", True), ("localhost", True), ("r.io", False)])
def test_a_local_registry_is_accessed_without_tls(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path, host: str, is_plain: bool
) -> None:
    stand_in("enroot", ENROOT)
    address = enroot.address_in_registry(parse_reference(f"{host}/a:1"), REGISTRY_DIGEST, IMAGE_ID, ())
    enroot.import_to(tmp_path / "x.sqsh", address)
    assert ("ENROOT_ALLOW_HTTP=yes\n" in (record / "enroot.env").read_text()) == is_plain


@pytest.mark.parametrize(("has_tool", "origin"), [(True, "a registry"), (False, "enroot, docker")])
def test_enroot_is_used_only_if_ftkit_cannot_pack_the_image(
    record: Path,
    stand_in: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    has_tool: bool,
    origin: str,
) -> None:
    stand_in("enroot", ENROOT)
    monkeypatch.setattr(squashfs, "find_tool", lambda: object() if has_tool else None)
    source = select_source(requested("docker://r.io/a:1", None, SLURM), ignore_progress)
    assert source.origin.startswith(origin)
    assert record.is_dir()


@pytest.mark.parametrize(("release", "can_pack"), [("4.4", False), ("4.5.1", True), ("4.10", True), ("5.0", True)])
def test_a_mksquashfs_without_tar_support_is_not_used(
    record: Path, stand_in: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, release: str, can_pack: bool
) -> None:
    stand_in("mksquashfs", f'echo "mksquashfs version {release} (2022/03/17)"')
    monkeypatch.setattr("shutil.which", lambda name: name if name == "mksquashfs" else None)
    assert (squashfs.find_tool() is not None) == can_pack
    assert record.is_dir()


def test_enroot_uses_the_local_disk_on_a_node(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path
) -> None:
    stand_in(
        "enroot", '[ "$1" = version ] || echo "$ENROOT_TEMP_PATH $ENROOT_CACHE_PATH" >"$RECORD/folders"\n' + ENROOT
    )
    stand_in("sbatch", SBATCH)
    local = tmp_path / "local disk"
    import_on(local, tmp_path / "100% it's")
    words = (record / "sbatch").read_text().splitlines()
    assert {
        "--wait",
        "--no-requeue",
        "--nodes=1",
        "--ntasks=1",
        "--partition=gpu",
        "--account=me",
        "--exclusive",
    } <= set(words)
    temp, cache = (record / "folders").read_text().strip().split(f" {local}", 1)
    assert temp.startswith(f"{local}/ftkit-import-")
    assert (temp.rpartition("/")[2], cache.rpartition("/")[2]) == ("temp", "cache")
    assert list(local.iterdir()) == []


def import_on(local: Path, tmp_path: Path) -> None:
    cluster = SLURM.model_copy(update={"node_local_dir": str(local), "partition": "gpu", "account": "me"})
    request = requested("olmo3:25.02", "r.io/team", cluster, on_node=True)
    import_image("olmo3:25.02", select_source(request, ignore_progress), ImageStore(tmp_path / "images"))


def test_enroot_errors_on_a_node_are_explained(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("enroot", ENROOT)
    stand_in("sbatch", SBATCH)
    monkeypatch.setenv("SAYS", "[INFO] Authenticating with user: alice")
    with pytest.raises(ImageError, match=r"in to nvcr\.io"):
        import_on(tmp_path / "local", tmp_path / "100% it's")
    assert not [path.name for path in (tmp_path / "100% it's" / "images").iterdir() if "partial" in path.name]
    assert record.is_dir()


def test_an_import_that_ends_with_its_node_is_told_from_a_failure_of_enroot(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path
) -> None:
    power_cut = (
        'echo "[INFO] Downloading"; until [ -s "$RECORD/pid" ]; do sleep 0.01; done; kill -KILL $(<"$RECORD/pid")'
    )
    stand_in("enroot", f'[ "$1" = version ] && {{ echo 4.1.2; exit; }}\n{power_cut}')
    stand_in("sbatch", SBATCH)
    with pytest.raises(ImageError, match="sacct --name=ftkit-import"):
        import_on(tmp_path / "local", tmp_path)
    assert not [path.name for path in (tmp_path / "images").iterdir() if "partial" in path.name]
    (tmp_path / "file").touch()
    with pytest.raises(ImageError, match="enroot failed: mkdir"):  # it did not begin, and says why
        import_on(tmp_path / "file", tmp_path)
    assert record.is_dir()


def test_the_next_import_removes_temporary_files_of_a_killed_one_on_a_node(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path
) -> None:
    stand_in("enroot", ENROOT)
    stand_in("sbatch", SBATCH)
    gone = subprocess.Popen(["true"])
    gone.wait()
    local, host = tmp_path / "local", socket.gethostname()
    mine = f"ftkit-import-{os.getuid()}-{host}"
    kept = {f"{mine}-{os.getpid()}", f"ftkit-import-{os.getuid()}-elsewhere-{gone.pid}", "another"}
    for name in (*kept, f"{mine}-{gone.pid}"):
        (local / name / "temp").mkdir(parents=True)
    import_on(local, tmp_path)
    assert {path.name for path in local.iterdir()} == kept
    assert record.is_dir()


INTERRUPTED = """
from pathlib import Path
import signal
import sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, tests hand on that it is ignored
from ftkit import process
from ftkit.images import enroot
address = enroot.Address("docker://r.io#a@sha256:1", "docker://r.io#a:1")
node = enroot.ComputeNode((), sys.argv[2]) if len(sys.argv) > 2 else None
with process.exit_on_termination():
    enroot.import_to(Path(sys.argv[1]), address, node)
"""
AT_WORK = (
    '[ "$1" = version ] && { echo 4.1.2; exit; }\n'
    'if [ -n "${ENROOT_TEMP_PATH-}" ]; then\n'
    '    setsid bash -c \'while echo x >"$0/$RANDOM"; do sleep 0.01; done\' "$ENROOT_TEMP_PATH" &\n'
    "fi\n"
    'touch "$RECORD/at-work"; sleep 600\n'
)
"""Stops during an import; on a node, with a program of another process group that continues to write."""


@pytest.mark.parametrize(
    ("where", "number"), [("here", signal.SIGINT), ("here", signal.SIGHUP), ("node", signal.SIGTERM)]
)
def test_an_interrupted_import_cancels_its_job_and_leaves_nothing(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path, number: signal.Signals, where: str
) -> None:
    stand_in("enroot", AT_WORK)
    stand_in("sbatch", SBATCH)
    stand_in("scancel", SCANCEL)
    stand_in("squeue", SQUEUE)
    local = tmp_path / "local"
    local.mkdir()
    words = [str(tmp_path / "x.sqsh"), *([str(local)] if where == "node" else [])]
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, *words], stderr=subprocess.PIPE) as process:
        wait_until(lambda: (record / "at-work").exists() or process.poll() is not None)
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode in (128 + number, -number)
    assert list(local.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"record", "bin", "local"}
    if where == "node":
        name = next(word for word in (record / "sbatch").read_text().split() if word.startswith("--job-name="))
        name = name.replace("--job-name", "--name")
        expected = [f"--state=PENDING {name}", f"--full --signal=TERM {name}"]
        assert (record / "scancel").read_text().splitlines() == expected


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("[INFO] Authenticating with user: alice", ("could not log in to r.io:5000", "machine r.io login")),
        ("tar: opt/null: Cannot mknod: Operation not permitted", ("has device files", "--with ftkit")),
        ("tar: a/b: Cannot write: No space left on device", ("disk is full: tar: a/b", "--with ftkit")),
        ("Error response from daemon: No command specified", ("neither CMD nor ENTRYPOINT", "--with ftkit")),
    ],
)
def test_enroot_errors_are_explained(
    record: Path,
    stand_in: Callable[[str, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    expected: tuple[str, str],
) -> None:
    stand_in("enroot", ENROOT)
    monkeypatch.setenv("SAYS", says)
    address = enroot.address_in_registry(parse_reference("r.io:5000/a/b:1"), REGISTRY_DIGEST, IMAGE_ID, ())
    with pytest.raises(ImageError) as caught:
        enroot.import_to(tmp_path / "x.sqsh", address)
    assert expected[0] in caught.value.what
    assert expected[1] in caught.value.fix
    assert record.is_dir()


@pytest.mark.parametrize(
    ("program", "text", "expected"),
    [
        ("zstd", "echo other", "the layers of docker://r.io#a/b@sha256:b+ are not those"),
        (
            "unsquashfs",
            "echo 'brw-rw---- root/disk 7, 0 2020-01-01 squashfs-root/dev/loop0'",
            r"files \(dev/loop0\)",
        ),
    ],
)
def test_other_layers_and_devices_are_refused(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path, program: str, text: str, expected: str
) -> None:
    stand_in("enroot", f'{ENROOT}>"$ENROOT_CACHE_PATH/{"c" * 64}"\n')
    stand_in("zstd", "printf layer")
    stand_in("unsquashfs", "")
    stand_in(program, text)
    layer = Digest(f"sha256:{'c' * 64}"), Digest(f"sha256:{sha256(b'layer').hexdigest()}")
    address = enroot.address_in_registry(parse_reference("r.io/a/b:1"), REGISTRY_DIGEST, IMAGE_ID, (layer,))
    with pytest.raises(ImageError, match=expected):
        enroot.import_to(tmp_path / "x.sqsh", address)
    assert (record / "enroot").exists()


@pytest.mark.parametrize("program", ["apptainer", "singularity"])
def test_a_sif_file_is_made_by_whichever_program_is_installed(
    record: Path,
    stand_in: Callable[[str, str], None],
    tmp_path: Path,
    program: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stand_in(program, APPTAINER)
    said: list[str] = []
    store = ImageStore(tmp_path / "images")
    request = requested("docker://r.io/team/olmo3:25.02", None, SLURM, format="sif")
    source = select_source(request, ignore_progress)
    imported = import_image("olmo3:25.02", source, store, report=lambda progress: said.append(progress.text))
    assert "INFO: Starting build..." in said
    assert capfd.readouterr() == ("", "")
    assert imported.link == store.root / "olmo3+25.02.sif"
    manifest = read_manifest(imported.link.resolve())
    assert manifest is not None
    assert (manifest.format, manifest.made_by) == ("sif", program)
    words = (record / program).read_text().split()
    assert words[-1] == "docker://r.io/team/olmo3@sha256:" + "b" * 64  # the tag may have moved since
    assert not import_image("olmo3:25.02", source, store).is_new


def test_a_sif_file_is_made_from_the_id_of_an_engine_image(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("apptainer", APPTAINER)
    image = DockerImage(IMAGE_ID, size=1, repo_digests=(), config=KNOWN.config)
    monkeypatch.setattr(importing, "_docker_source", lambda _: docker_source("ftkit/a:1", image))
    store = ImageStore(tmp_path / "images")
    import_image("a:1", select_source(requested("a:1", None, SLURM, format="sif"), ignore_progress), store)
    assert (record / "apptainer").read_text().split()[-1] == f"docker-daemon:{IMAGE_ID}"


def test_another_manifest_yields_another_sif_file(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path
) -> None:
    stand_in("apptainer", APPTAINER)
    store = ImageStore(tmp_path / "images")
    source = select_source(requested("docker://r.io/a:1", None, SLURM, format="sif"), ignore_progress)
    import_image("a:1", source, store)
    moved = replace(source, digests=(Digest("sha256:" + "d" * 64),))
    again = import_image("a:1", moved, store)
    assert (again.is_new, again.manifest.registry_digest) == (True, moved.registry_digest)
    assert record.is_dir()


def test_a_sif_build_that_fails_shows_the_output(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("apptainer", APPTAINER)
    monkeypatch.setenv("SAYS", "FATAL: manifest unknown")
    request = requested("docker://r.io/a:1", None, SLURM, format="sif")
    with pytest.raises(ImageError, match="manifest unknown"):
        import_image("a:1", select_source(request, ignore_progress), ImageStore(tmp_path / "images"))
    assert json.dumps(sorted(path.name for path in (tmp_path / "images").iterdir())).count("sif") == 1  # only its lock
    assert record.is_dir()


def test_enroot_is_never_used_for_a_sif_file(record: Path, stand_in: Callable[[str, str], None]) -> None:
    stand_in("enroot", ENROOT)
    request = requested("docker://r.io/a:1", None, SLURM, format="sif")
    assert select_source(request, ignore_progress).origin == "a registry"
    with pytest.raises(ConfigError, match="--on-node"):
        select_source(replace(request, on_node=True), ignore_progress)
    assert list(record.glob("enroot*")) == []


def test_missing_apptainer_is_reported_for_sif(record: Path, tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="apptainer"):
        import_image(
            "a:1",
            select_source(requested("docker://r.io/a:1", None, SLURM, format="sif"), ignore_progress),
            ImageStore(tmp_path),
        )
    assert record.is_dir()


def test_a_truncated_file_written_by_enroot_is_detected(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path
) -> None:
    (record / "sqsh").write_bytes(SQUASHFS[:150])
    stand_in("enroot", ENROOT)
    store = ImageStore(tmp_path / "images")
    with pytest.raises(ImageError, match="truncated"):
        import_image("a:1", by_enroot(KNOWN), store)
    assert [path.name for path in store.root.iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.parametrize(
    ("wanted", "name"),
    [("olmo3:25.02", "olmo3:25.02"), ("docker://r.io#a/b/c:1", "c:1"), ("dockerd://x:2", "x:2")],
)
def test_an_import_is_named_after_the_last_part_of_its_address(wanted: str, name: str) -> None:
    assert requested(wanted, None, SLURM).name.reference == name
    assert shlex.quote(name) == name
