"""The texts of this room's errors: tests/golden/errors/runs.txt. `FTKIT_UPDATE_GOLDEN=1` rewrites it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from error_texts import check_error_texts

from ftkit.planning.layout import RunLayout, Workspace
from ftkit.planning.plan import read_plan
from ftkit.runs.checkpoints import choose_step
from ftkit.runs.find import find_run, list_runs
from ftkit.runs.lease import Holder, held_lease
from ftkit.runs.manifest import build_manifest, record_start
from ftkit.runs.repeat import read_original, unpack, write_bundle
from ftkit.runs.signing import require_signing_key, verify_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest
    from conftest import RunMaker


def failures(make_run: RunMaker, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    layout = make_run("demo").layout
    workspace = Workspace(layout.root.parents[1])
    make_run("other")
    manifest = build_manifest(read_plan(layout), ["ftkit", "run", "demo"], folder)
    file = folder / "file"
    file.write_text("text")
    yield "a run that does not exist", lambda: find_run("dema", workspace)
    yield "a workspace that is a file", lambda: list_runs(Workspace(file))
    yield "a run without checkpoints", lambda: choose_step(layout, "best", [])
    yield "a run without evaluated checkpoints", lambda: choose_step(layout, "best", [10, 20])
    yield "a step that was deleted", lambda: choose_step(layout, "15", [10, 20])
    yield "a run that another process trains", lambda: hold_twice(layout)
    yield "a bundle of a run without manifest", lambda: write_bundle(layout, folder / "x.tar")
    yield "a bundle that is none", lambda: unpack(file, folder / "there")
    yield "an original that does not exist", lambda: read_original(str(folder / "none.tar"))
    yield "an original without manifest", lambda: read_original(str(folder))
    for name, values, data in (
        ("an image that is not the submitted one", {"image_lock_sha256": "ab" * 32}, {}),
        ("prepared data of another original", {"repeats": {"run": "first", "data": {"train": "a"}}}, {"train": "b"}),
    ):
        prepared = workspace.data / str(manifest["data_fingerprint"])
        yield name, lambda values=values, data=data, prepared=prepared: start(layout, manifest | values, data, prepared)
    yield "a key that is none", lambda: require_signing_key(file)
    yield "a file without signature", lambda: verify_beside(file, file, "ftkit-bundle")


def hold_twice(layout: RunLayout) -> None:
    holder = replace(Holder.here(), host="n1", pid=os.getpid(), job_id="7", since=0.0)
    layout.leases.mkdir()
    (layout.leases / "000001.json").write_text(json.dumps(asdict(holder)))
    with held_lease(layout, say=print, on_loss=print, pause=print):
        pass


def start(layout: RunLayout, manifest: dict[str, object], data: dict[str, str], prepared: Path) -> None:
    prepared.mkdir(parents=True, exist_ok=True)
    (prepared / "manifest.json").write_text(json.dumps({"digests": data}))
    layout.manifest.write_text(json.dumps(manifest))
    record_start(layout.manifest, prepared)


def test_error_texts(make_run: RunMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTKIT_CONTAINER_IMAGE", "/images/olmo3.sqsh")
    folder = tmp_path / "here"
    folder.mkdir()
    check_error_texts("runs", failures(make_run, folder), {str(folder): "/here", str(os.getpid()): "PID"})
