from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from ftkit.planning.plan import plan_to_json, read_plan
from ftkit.runs.manifest import build_manifest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest
    from conftest import Result, RunMaker


def test_a_dry_run_lists_the_differences_and_refuses_unknown_parts(
    ftkit: Callable[..., Result], make_run: RunMaker, tmp_path: Path
) -> None:
    run = make_run(scheduler="local")
    plan = replace(read_plan(run.layout), ftkit_version="0.0.1")
    run.layout.plan.write_text(plan_to_json(plan))
    run.layout.manifest.write_text(json.dumps(build_manifest(plan, ["ftkit"], tmp_path)))
    done = ftkit("rerun", run.id, "--dry-run")
    assert (done.code, done.out.startswith("#!")) == (0, True), done.err
    assert "versions: ftkit is " in done.err  # another version than the original's
    refused = ftkit("rerun", run.id, "--dry-run", "--allow", "dta")
    assert (refused.code, refused.out) == (3, "")
    assert "data, image, code" in refused.err


def test_a_rerun_says_that_changed_weights_of_a_local_folder_are_not_noticed(
    ftkit: Callable[..., Result], make_run: RunMaker, tmp_path: Path
) -> None:
    run = make_run(scheduler="local")
    manifest = build_manifest(read_plan(run.layout), ["ftkit"], tmp_path)
    told = []
    for model in ({"weights": "random"}, {"weights": "/models/tiny", "revision": None}):
        run.layout.manifest.write_text(json.dumps(manifest | {"model": model}))
        done = ftkit("rerun", run.id, "--dry-run")
        assert done.code == 0, done.err
        told.append("no digest of the weights in /models/tiny: ftkit does not notice" in " ".join(done.err.split()))
    assert told == [False, True]


def test_a_folder_with_the_name_of_a_run_does_not_hide_the_run(
    ftkit: Callable[..., Result], make_run: RunMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(scheduler="local")
    run.layout.manifest.write_text(json.dumps(build_manifest(read_plan(run.layout), ["ftkit"], tmp_path)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    done = ftkit("rerun", "demo", "--dry-run")
    assert (done.code, done.out.startswith("#!")) == (0, True), done.err
    refused = ftkit("rerun", "./demo", "--dry-run")
    assert "./demo has no manifest of a run" in refused.err
