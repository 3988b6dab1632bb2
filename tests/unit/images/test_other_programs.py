"""enroot, srun and apptainer, by stand-ins that record how they are called and make a file as they would."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftkit.errors import ConfigError, ImageError, PrerequisiteError
from ftkit.images import choosing, enroot
from ftkit.images.choosing import ImportWish, choose_source, name_of
from ftkit.images.importing import import_image
from ftkit.images.progress import say_nothing
from ftkit.images.root_filesystem import ImageConfig
from ftkit.images.sif import SifSource
from ftkit.images.sources import EnrootSource
from ftkit.images.store import ImageStore, read_manifest
from ftkit.specs.load import Surroundings, load_cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.images.packing import Made

SHIPPED_ONLY = Surroundings(Path("/nonexistent"), Path("/nonexistent"), {})
SLURM = load_cluster("slurm", SHIPPED_ONLY)
SQUASHFS = b"hsqs" + bytes(36) + (200).to_bytes(8, "little") + bytes(200)
RECORD = 'printf "%s\\n" "$@" >"$RECORD/${0##*/}"; env >"$RECORD/${0##*/}.env"\n'
ENROOT = RECORD + '[ -n "${SAYS-}" ] && { echo "$SAYS"; exit 1; }; cp "$RECORD/sqsh" "$3"\n'
SRUN = RECORD + 'while case $1 in -*) true ;; *) false ;; esac; do shift; done; exec "$@"\n'
APPTAINER = RECORD + (
    '[ -n "${SAYS-}" ] && { echo "$SAYS" >&2; exit 1; }\n'
    'echo "INFO: Starting build..." >&2\n'
    'printf "#!/usr/bin/env run-singularity\\n\\0SIF_MAGIC\\0rest" >"$2"\n'
)


class Known:
    """A source that knows what an image is."""

    image_id = "sha256:" + "a" * 64
    registry_digest = "sha256:" + "b" * 64
    config = ImageConfig(created=77)

    def describe(self) -> str:
        return "a registry"

    def make_file(self, *_: object) -> Made:
        raise AssertionError


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with stand-ins first on PATH, in which they record."""
    folder = tmp_path / "record"
    folder.mkdir()
    (folder / "sqsh").write_bytes(SQUASHFS)
    monkeypatch.setenv("RECORD", str(folder))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.defpath}")
    monkeypatch.setattr(choosing, "_registry_source", lambda *_: Known())
    return folder


@pytest.fixture
def stand_in(tmp_path: Path) -> Callable[[str, str], None]:
    def write(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/bash\n" + script)
        path.chmod(0o755)

    return write


def test_enroot_is_given_its_address_and_the_right_options(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path
) -> None:
    stand_in("enroot", ENROOT)
    wish = ImportWish("docker://nvcr.io/team/olmo3:25.02", None, SLURM)
    imported = import_image("olmo3:25.02", choose_source(wish, say_nothing), ImageStore(tmp_path / "images"))
    words = (record / "enroot").read_text().split()
    assert (words[0], words[-1]) == ("import", "docker://nvcr.io#team/olmo3:25.02")
    variables = (record / "enroot.env").read_text()
    assert "ENROOT_SQUASH_OPTIONS=-comp zstd -Xcompression-level 3 -b 1M\n" in variables
    assert "SOURCE_DATE_EPOCH=77\n" in variables
    assert imported.manifest.source == "enroot, docker://nvcr.io#team/olmo3:25.02"
    assert imported.link.resolve().name == "sha256-" + "a" * 64 + ".sqsh"


def test_on_a_node_enroot_works_on_the_node_s_own_disk(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path
) -> None:
    stand_in("enroot", 'echo "$ENROOT_TEMP_PATH" >"$RECORD/temp"; ls -d "$ENROOT_CACHE_PATH" || exit 9\n' + ENROOT)
    stand_in("srun", SRUN)
    local = tmp_path / "local disk"
    cluster = SLURM.model_copy(update={"node_local_dir": str(local), "partition": "gpu", "account": "me"})
    wish = ImportWish("olmo3:25.02", "r.io/team", cluster, on_node=True)
    import_image("olmo3:25.02", choose_source(wish, say_nothing), ImageStore(tmp_path / "images"))
    words = (record / "srun").read_text().splitlines()
    assert {"--nodes=1", "--ntasks=1", "--partition=gpu", "--account=me", "--exclusive"} <= set(words)
    assert (record / "temp").read_text().startswith(f"{local}/ftkit-import-")
    assert list(local.iterdir()) == []


def test_enroot_s_silence_about_credentials_is_explained(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("enroot", ENROOT)
    monkeypatch.setenv("SAYS", "[INFO] Authenticating with user: alice")
    with pytest.raises(ImageError, match=r"could not log in to r\.io:5000") as caught:
        enroot.import_to(tmp_path / "x.sqsh", "docker://r.io:5000#a/b:1", created=0)
    assert "machine r.io login" in caught.value.fix
    assert record.is_dir()


@pytest.mark.parametrize("program", ["apptainer", "singularity"])
def test_a_sif_file_is_made_by_whichever_program_there_is(
    record: Path,
    stand_in: Callable[[str, str], None],
    tmp_path: Path,
    program: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stand_in(program, APPTAINER)
    said: list[str] = []
    store = ImageStore(tmp_path / "images")
    wish = ImportWish("docker://r.io/team/olmo3:25.02", None, SLURM)
    source = SifSource(wish, say_nothing)
    imported = import_image("olmo3:25.02", source, store, report=lambda progress: said.append(progress.text))
    assert "INFO: Starting build..." in said
    assert capfd.readouterr() == ("", "")
    assert imported.link == store.root / "olmo3+25.02.sif"
    manifest = read_manifest(imported.link.resolve())
    assert manifest is not None
    assert (manifest.format, manifest.made_by) == ("sif", program)
    words = (record / program).read_text().split()
    assert words[-1] == "docker://r.io/team/olmo3:25.02"
    assert not import_image("olmo3:25.02", source, store).is_new


def test_a_sif_build_that_fails_shows_what_was_said(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("apptainer", APPTAINER)
    monkeypatch.setenv("SAYS", "FATAL: manifest unknown")
    wish = ImportWish("docker://r.io/a:1", None, SLURM)
    with pytest.raises(ImageError, match="manifest unknown"):
        import_image("a:1", SifSource(wish, say_nothing), ImageStore(tmp_path / "images"))
    assert json.dumps(sorted(path.name for path in (tmp_path / "images").iterdir())).count("sif") == 1  # its lock
    assert record.is_dir()


def test_a_sif_file_is_never_left_to_enroot(record: Path, stand_in: Callable[[str, str], None]) -> None:
    stand_in("enroot", ENROOT)
    wish = ImportWish("docker://r.io/a:1", None, SLURM)
    assert SifSource(wish, say_nothing).describe() == "a registry"
    with pytest.raises(ConfigError, match="--on-node"):
        SifSource(replace(wish, on_node=True), say_nothing)
    assert list(record.glob("enroot*")) == []


def test_without_apptainer_sif_says_so(record: Path, tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="neither 'apptainer' nor 'singularity'"):
        import_image("a:1", SifSource(ImportWish("docker://r.io/a:1", None, SLURM), say_nothing), ImageStore(tmp_path))
    assert record.is_dir()


def test_an_enroot_that_makes_half_a_file_is_found_out(
    record: Path, stand_in: Callable[[str, str], None], tmp_path: Path
) -> None:
    (record / "sqsh").write_bytes(SQUASHFS[:150])
    stand_in("enroot", ENROOT)
    store = ImageStore(tmp_path / "images")
    with pytest.raises(ImageError, match="truncated"):
        import_image("a:1", EnrootSource(Known(), "docker://r.io#a:1"), store)  # type: ignore[arg-type]
    assert [path.name for path in store.root.iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.parametrize(
    ("wanted", "name"),
    [("olmo3:25.02", "olmo3:25.02"), ("docker://r.io#a/b/c:1", "c:1"), ("dockerd://x:2", "x:2")],
)
def test_an_import_is_called_by_the_last_part_of_its_address(wanted: str, name: str) -> None:
    assert name_of(wanted) == name
    assert shlex.quote(name) == name
