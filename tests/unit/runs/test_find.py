from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ftkit.errors import NotFoundError, PrerequisiteError
from ftkit.files import DamagedFileError, write_json
from ftkit.planning.layout import Workspace
from ftkit.planning.plan import read_plan
from ftkit.runs.find import find_run, list_runs
from ftkit.runs.history import read_history
from ftkit.runs.job import SubmittedRun, read_submission, read_submitted
from ftkit.runs.listing import ClusterEntry, PlanEntry, read_entry
from ftkit.runs.metrics_file import read_last_step

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunMaker


def test_runs_are_listed_newest_first_and_other_folders_ignored(make_run: RunMaker, workspace: Workspace) -> None:
    runs = [make_run("a-b"), make_run("demo"), make_run("a-b")]
    for name in (".unfinished-demo-20260102T030405Z-ab12", "notes", "demo-20269999T999999Z-ab12"):
        (workspace.runs / name).mkdir()
    listed = list_runs(workspace)
    assert [run.id for run in listed] == [run.id for run in reversed(runs)]
    assert [run.name for run in listed] == ["a-b", "demo", "a-b"]


def test_a_run_is_found_by_every_kind_of_reference(make_run: RunMaker, workspace: Workspace) -> None:
    old = make_run("demo", suffix="aaaa", job_id="500")
    new = make_run("demo", suffix="bbbb", job_id="501")
    other = make_run("other", suffix="cccc")
    for reference, run in {
        "demo": new,
        "other": other,
        "last": other,
        old.id: old,
        "aaaa": old,
        "500": old,
        "othe": other,
        old.id[:-2]: old,
        f"{old.layout.root}/": old,
    }.items():
        assert find_run(reference, workspace).id == run.id, reference


def test_a_run_is_found_by_its_previous_job_ids(make_run: RunMaker, workspace: Workspace) -> None:
    run = make_run(job_id="7")
    make_run()
    submission = read_submission(run.layout)
    assert submission is not None
    later = replace(submission, job_id="8", earlier_job_ids=("7",))
    write_json(run.layout.submission, later)
    assert find_run("7", workspace).id == run.id
    assert read_submitted(find_run("8", workspace).layout) == SubmittedRun(
        run.layout, read_submission(run.layout) or submission
    )


def test_an_ambiguous_reference_lists_the_runs(make_run: RunMaker, workspace: Workspace) -> None:
    runs = [make_run("demo") for _ in range(10)]
    with pytest.raises(NotFoundError, match="'de' matches 10 runs") as caught:
        find_run("de", workspace)
    assert runs[-1].id in caught.value.meaning
    assert "2 more" in caught.value.meaning


def test_an_unknown_reference_suggests_the_closest(make_run: RunMaker, workspace: Workspace) -> None:
    make_run("olmo3")
    make_run("gemma")
    with pytest.raises(NotFoundError) as caught:
        find_run("olmo4", workspace)
    assert caught.value.meaning == "closest: olmo3"
    with pytest.raises(NotFoundError) as caught:
        find_run("99999", workspace)
    assert caught.value.meaning == ""


def test_an_empty_workspace_suggests_a_first_command(workspace: Workspace) -> None:
    with pytest.raises(NotFoundError, match="no runs") as caught:
        find_run("last", workspace)
    assert "ftkit run demo" in caught.value.fix


DEEP = "[" * 100_000


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cluster": {}}', '{"cluster": "x", "num_steps": 1}', DEEP, "\udcff"])
def test_a_damaged_plan_is_reported_as_damage_without_an_error(
    make_run: RunMaker, workspace: Workspace, text: str
) -> None:
    run = make_run()
    (folder,) = list_runs(workspace)
    good = read_entry(folder)
    fingerprint = read_plan(run.layout).fingerprint
    assert (good.plan, good.damage) == (PlanEntry(ClusterEntry("local", "slurm"), None, 400, None, fingerprint), "")
    run.layout.plan.write_text(text, errors="surrogateescape")
    assert read_entry(folder).plan is None
    assert read_entry(folder).damage.startswith("plan.json can't be read: ")
    assert read_entry(folder).run == run


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"scheduler": "other", "job_id": "1"}', DEEP, "\udcff", '{"job_id": "1,2"}']
)
def test_a_damaged_submission_is_not_taken_for_a_run_that_was_never_submitted(
    make_run: RunMaker, workspace: Workspace, text: str
) -> None:
    run = make_run()
    run.layout.submission.write_text(text, errors="surrogateescape")
    with pytest.raises(DamagedFileError, match=r"submission\.json can't be read"):
        read_submission(run.layout)
    (folder,) = list_runs(workspace)
    assert read_entry(folder).damage.startswith("submission.json ")
    with pytest.raises(NotFoundError, match="'4711'"):
        find_run("4711", workspace)


def test_a_pipe_in_place_of_a_file_does_not_block(make_run: RunMaker) -> None:
    run = make_run()
    for path in (run.layout.submission, run.layout.metrics):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    with pytest.raises(DamagedFileError, match="regular file"):
        read_submission(run.layout)
    assert read_last_step(run.layout.metrics) is None
    assert read_history(run.layout).last_step is None


def test_an_unusable_workspace_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(PrerequisiteError, match="can't be used"):
            list_runs(Workspace(root))
    assert list_runs(Workspace(tmp_path / "to" / "be" / "made")) == []


def test_unknown_keys_of_a_later_versions_submission_are_ignored(make_run: RunMaker) -> None:
    run = make_run()
    text = run.layout.submission.read_text().replace("{", '{"novelty": 1,', 1)
    run.layout.submission.write_text(text)
    assert read_submission(run.layout) == run.submission
