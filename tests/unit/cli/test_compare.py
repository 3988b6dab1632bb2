"""`ftkit compare`, `ftkit runs checkpoints`, `ftkit rm`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.cli.arguments import get_run_step
from ftkit.files import write_json
from ftkit.runs.checkpoints import FORMAT_VERSION, MARKER, Marker, SavedFile, TrainState
from ftkit.runs.gpu_samples import GpuSample, NodeSample, to_line
from ftkit.runs.manifest import record_start
from ftkit.runs.repeat import original_to_json, read_original

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import FakePrograms, Result, RunMaker

    from ftkit.runs.job import SubmittedRun


def save(run: SubmittedRun, step: int) -> Path:
    """Write a checkpoint with one file."""
    folder = run.layout.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "shard").write_bytes(b"tensor")
    files = {"shard": SavedFile.of(folder / "shard")}
    write_json(folder / MARKER, Marker(FORMAT_VERSION, TrainState(step, "x"), 2, files))
    return folder


def complete(run: SubmittedRun, records: Any) -> None:
    records.write(run, records.end())
    run.layout.job_exit_code(run.job_id).write_text("0")


def test_equal_runs_are_reported_as_equal(ftkit: Callable[..., Result], make_run: RunMaker, records: Any) -> None:
    for name in ("one", "two"):
        records.write(make_run(name), records.step(1, 2.0), records.step(2, 1.0))
    result = ftkit("compare", "one", "two")
    assert result.code == 0
    assert "no differences in" in result.out
    assert "bit for bit (2" in result.out
    assert max(map(len, result.out.splitlines())) <= 80


def test_the_curves_of_compared_runs_are_drawn_on_the_same_axes(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    for name, scale in (("fast", 1.0), ("slow", 5.0)):
        records.write(make_run(name), *(records.step(n, scale / n) for n in range(1, 9)))
    lines = ftkit("compare", "fast", "slow").out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("loss, "))
    curves = [line for line in lines[at + 1 :] if line]
    assert [line.split()[:2] for line in curves[:6:3]] == [["A", "5"], ["B", "5"]]  # both reach from 0.125 to 5
    assert "0.125" in curves[2]
    assert max(map(len, curves[:6])) <= 80
    report = ftkit("report", "fast", "slow")
    assert "\n".join(curves[:6]) in report.err
    assert report.out == "comparison.html\n"


def test_runs_of_different_objectives_have_no_best_one_and_own_axes(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    for name, objective, scale in (("try-1", "dpo", 1.0), ("try-2", "simpo", 8.0)):
        run = make_run(name)
        plan = json.loads(run.layout.plan.read_text())
        plan["recipe"]["training"]["objective"] = objective
        plan["sweep"] = {"id": "try-new", "name": "try", "values": {}}
        run.layout.plan.write_text(json.dumps(plan))
        records.write(run, *(records.step(n, scale / n) for n in range(1, 9)))
        complete(run, records)
    out = ftkit("compare", "try").out
    reason = "training.objective is dpo and simpo"
    assert (out.count(reason), "is best:" in out, "by at most" in out) == (2, False, False)
    lines = out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("loss, "))
    assert [line.split()[1] for line in [line for line in lines[at + 1 :] if line][:6:3]] == ["1", "8"]
    found = json.loads(ftkit("compare", "try", "--json").out)
    assert (found["best"], found["different_objectives"]) == (None, reason)
    refused = ftkit("rm", "try@best", "--dry-run")
    assert (refused.code, reason in refused.err) == (4, True)
    assert ftkit("report", "try-1", "try-2", "-o", "both.html").code == 0
    assert re.findall("<h3>(.*?)</h3>", Path("both.html").read_text())[:2] == ["Loss of A", "Loss of B"]


def test_a_comparison_of_runs_on_different_documents_says_so(ftkit: Callable[..., Result], make_run: RunMaker) -> None:
    for name, kept in (("long", 500), ("other", 500), ("short", 170)):
        layout = make_run(name).layout
        data = layout.root.parents[1] / "data" / f"of-{name}"
        data.mkdir(parents=True)
        digests = {"train": name, "tokenizer": "t", "documents": str(kept)}
        numbers = {"num_train_documents": kept, "num_too_long": 500 - kept}
        (data / "manifest.json").write_text(json.dumps({"digests": digests} | numbers))
        layout.manifest.write_text(json.dumps({"data_fingerprint": data.name}))
        record_start(layout.manifest)
    output = ftkit("compare", "long", "other", "short").out
    assert "C trained on" in output
    assert "500 and 170 training documents" in " ".join(output.split())
    assert "B trained on" not in output
    against = json.loads(ftkit("compare", "long", "other", "short", "--json").out)["against_first"]
    assert [each["same_documents"] for each in against.values()] == [True, False]


def test_a_comparison_as_json_is_complete(ftkit: Callable[..., Result], make_run: RunMaker, records: Any) -> None:
    one, two = make_run("one"), make_run("two", scheduler="local")
    records.write(one, records.step(1, 2.0))
    records.write(two, records.step(1, float("nan")))
    found = json.loads(ftkit("compare", "one", "two", "--json").out)
    assert found["runs"] == [one.id, two.id]
    assert found["differences"] == [{"section": "cluster", "key": "scheduler", "values": ["slurm", "local"]}]
    assert found["results"][two.id]["loss"] is None
    assert found["losses"] == [{"tokens": 8192, "losses": [2.0, None]}]
    assert "8.19 k tokens" in ftkit("compare", "one", "two").out


def test_the_status_of_a_repetition_has_the_verdict(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    one, two = make_run("one"), make_run("two")
    for run in (one, two):
        records.write(run, records.step(1, 2.0))
    one.layout.manifest.write_text(json.dumps({"run": one.id}))
    two.layout.original.write_text(original_to_json(read_original(str(one.layout.root))))
    assert f"{one.id}, bit for bit" in " ".join(ftkit("status", "two").out.split())
    shown = [json.loads(ftkit("status", run.id, "--json").out)["repetition"] for run in (one, two)]
    assert (shown[0], shown[1]["is_repeated"]) == (None, True)


def test_the_reasons_of_restarts_are_counted(ftkit: Callable[..., Result], make_run: RunMaker, records: Any) -> None:
    one, two = make_run("one"), make_run("two")
    for run in (one, two):
        records.write(run, records.step(1, 2.0))
    failed = {"cause": "error", "detail": "rank 0 on n1: RuntimeError: no"}
    ends = [None, {"cause": "canceled", "detail": ""}, failed, {"cause": "canceled", "detail": ""}]
    two.layout.manifest.write_text(
        json.dumps({"starts": [{"time": float(n), "after": each} for n, each in enumerate(ends)]})
    )
    out = ftkit("compare", "one", "two").out
    assert "canceled (2), error\n" in out
    results = json.loads(ftkit("compare", "one", "two", "--json").out)["results"]
    assert [results[run.id]["restart_reasons"] for run in (one, two)] == [[], ends[1:]]


def test_power_and_energy_are_compared_if_sampled(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    runs = [make_run(name) for name in ("one", "two")]
    for run in runs:
        records.write(run, records.step(1, 2.0))
    samples = [NodeSample(float(10 * n), "n1", 0, (GpuSample(0, 90.0, power=720.0),)) for n in range(101)]
    runs[0].layout.gpu_samples.mkdir()
    (runs[0].layout.gpu_samples / "n1.jsonl").write_text("".join(map(to_line, samples)))
    out = ftkit("compare", "one", "two").out
    assert re.search(r"^GPU power +720 W +-$", out, re.MULTILINE)
    assert re.search(r"^energy +200 Wh +-$", out, re.MULTILINE)
    results = json.loads(ftkit("compare", "one", "two", "--json").out)["results"]
    assert [results[run.id]["energy_kwh"] for run in runs] == [0.2, None]


def test_a_comparison_needs_two_runs(ftkit: Callable[..., Result], make_run: RunMaker) -> None:
    make_run("one")
    assert ftkit("compare", "one", "one").code == 2


def test_verify_says_how_a_run_is_verified(ftkit: Callable[..., Result], make_run: RunMaker) -> None:
    run = make_run()
    result = ftkit("verify", run.id)
    assert result.code == 4
    assert f"ftkit export {run.id}" in result.err


def test_verify_of_a_part_of_an_export_names_its_folder(ftkit: Callable[..., Result], tmp_path: Path) -> None:
    folder = tmp_path / "project" / "made"
    folder.mkdir()
    (folder / "ftkit-export.json").touch()
    (folder / "run-q8_0.gguf").touch()
    for name in (f"{folder}/run-q8_0.gguf", f"{folder}/other.gguf", "made/other.gguf"):
        result = ftkit("verify", name)
        assert (result.code, f"ftkit verify {name.rpartition('/')[0]}" in result.err) == (2, True), result.err
    result = ftkit("verify", "./mode")
    assert (result.code, "made" in result.err, "ftkit import" in result.err) == (4, True, False), result.err


def test_checkpoints_are_listed_and_verified_by_digest(ftkit: Callable[..., Result], make_run: RunMaker) -> None:
    run = make_run()
    assert "no checkpoints yet" in ftkit("runs", "checkpoints", "last").err
    save(run, 10)
    folder = save(run, 20)
    assert [line.split()[0] for line in ftkit("runs", "checkpoints", "last").out.splitlines()] == ["STEP", "10", "20"]
    assert ftkit("runs", "checkpoints", "last", "--verify").out.count("verified") == 2
    (folder / "shard").write_bytes(b"tensoR")
    assert ftkit("runs", "checkpoints", "last").code == 0
    result = ftkit("runs", "checkpoints", "last", "--verify", "--json")
    assert result.code == 9
    assert [each["damage"] for each in json.loads(result.out)] == [[], ["shard"]]
    assert "of 2 damaged: step 20" in result.err
    (folder / "shard").unlink()
    assert ftkit("runs", "checkpoints", "last").code == 9


def test_a_run_is_removed_after_confirmation(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, kept = make_run(), make_run("kept")
    complete(run, records)
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    assert "nothing was changed" in ftkit("rm", run.id).err
    assert run.layout.root.is_dir()
    monkeypatch.setattr("click.confirm", lambda *_, **__: True)
    assert ftkit("rm", run.id).code == 0
    assert [path.name for path in run.layout.root.parent.iterdir()] == [kept.id]


@pytest.mark.usefixtures("no_privileges")
def test_nothing_of_a_read_only_run_is_removed(ftkit: Callable[..., Result], make_run: RunMaker, records: Any) -> None:
    run = make_run()
    complete(run, records)
    run.layout.logs.mkdir(exist_ok=True)
    run.layout.job_log.touch()
    run.layout.logs.chmod(0o500)
    result = ftkit("rm", run.id, "--yes")
    run.layout.logs.chmod(0o700)
    assert (result.code, run.layout.job_log.is_file(), run.layout.plan.is_file()) == (5, True, True)
    assert f"not change {run.layout.logs}" in result.err


@pytest.mark.parametrize(("method", "code"), [("lora", 6), ("full", 0)])
def test_a_run_is_not_removed_while_adapters_of_another_one_are_for_its_model(
    method: str, code: int, ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    base, adapters = make_run(), make_run("tuned")
    complete(base, records)
    complete(adapters, records)
    plan = json.loads(adapters.layout.plan.read_text())
    plan["recipe"]["model"]["weights"] = str(base.layout.export)
    plan["recipe"]["training"]["method"] = method
    adapters.layout.plan.write_text(json.dumps(plan))
    result = ftkit("rm", base.id, "--yes")
    assert (result.code, base.layout.root.exists()) == (code, code != 0)
    assert (adapters.id in result.err) == (code != 0)
    assert ftkit("rm", adapters.id, *([base.id] if code else []), "--yes").code == 0
    assert not base.layout.root.exists()


def test_a_run_that_may_still_train_is_not_removed(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms, squeue_line: Any
) -> None:
    run = make_run()
    assert ftkit("rm", run.id, "--yes").code == 6  # Slurm can't be asked
    programs.answer("squeue", squeue_line(run, "RUNNING"))
    result = ftkit("rm", run.id, "--yes")
    assert (result.code, run.layout.root.is_dir()) == (6, True)
    assert f"ftkit cancel {run.id}" in result.err


def test_a_run_that_slurm_forgot_is_removed(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms
) -> None:
    run = make_run()
    programs.answer("squeue")
    programs.answer("sacct")
    assert ftkit("rm", run.id, "--yes").code == 0
    assert not run.layout.root.exists()


def test_the_runs_of_a_sweep_are_found_by_its_name_in_order(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    sweeps = {"old-1": "old", "try-10": "new", "try-2": "new", "try-1": "new", "alone": None}
    for name, sweep in sweeps.items():
        run = make_run(name)
        plan = json.loads(run.layout.plan.read_text())
        values = {"cluster": "slurm", "training.seed": name.rpartition("-")[2]}
        plan["sweep"] = sweep and {"id": f"try-{sweep}", "name": "try", "values": values}
        run.layout.plan.write_text(json.dumps(plan))
        records.write(run, records.step(1, 2.0))
        complete(run, records)
    order = [row.split()[:3:2] for row in ftkit("runs", "try").out.splitlines()]
    assert order == [["NAME", "SEED"], ["try-1", "1"], ["try-2", "2"], ["try-10", "10"]]
    assert ftkit("runs", "try").out.splitlines()[0].split().count("CLUSTER") == 1
    assert ftkit("status", "try-new").out == ftkit("runs", "try").out
    assert [row["values"] for row in json.loads(ftkit("runs", "try-old", "--json").out)] == [
        {"cluster": "slurm", "training.seed": "1"}
    ]
    compared = json.loads(ftkit("compare", "try", "--json").out)
    assert [run.rpartition("-2")[0] for run in compared["runs"]] == ["try-1", "try-2", "try-10"]
    assert ftkit("compare", "try-new", "alone", "--json").code == 0
    missing = ftkit("runs", "nothing")
    assert (missing.code, "sweep 'nothing'" in missing.err) == (4, True)


def test_the_best_run_of_a_sweep_comes_first_and_commands_take_it(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    runs = [make_run(f"try-{number}") for number in (1, 2, 3)]
    for run, loss in zip(runs, (2.0, 1.0, 1.5), strict=True):
        plan = json.loads(run.layout.plan.read_text())
        plan["sweep"] = {"id": "try-new", "name": "try", "values": {}}
        plan["recipe"]["training"]["learning_rate"] = loss
        run.layout.plan.write_text(json.dumps(plan))
        records.write(run, records.step(1, loss))
        complete(run, records)
    lines = ftkit("compare", "try").out.splitlines()
    assert "B is best: training loss 1.0000, 0.5000 (33.3%) below C" in lines[3:5]
    assert json.loads(ftkit("compare", "try", "--json").out)["best"]["run"] == runs[1].id
    for words in (("status", "try@best"), ("rm", "try@best", "--dry-run"), ("resume", "try-new@best")):
        result = ftkit(*words)
        assert runs[1].id in result.out + result.err
    assert get_run_step("try@best")[0].id == runs[1].id  # as `ftkit export` and others do, which import torch
    wrong = ftkit("rm", "try-2@best", "--dry-run")
    assert (wrong.code, "is a step of" in wrong.err) == (2, True)


def test_no_run_is_best_among_equal_ones(ftkit: Callable[..., Result], make_run: RunMaker, records: Any) -> None:
    for number in (1, 2):
        run = make_run(f"same-{number}")
        plan = json.loads(run.layout.plan.read_text())
        plan["recipe"]["training"]["checkpoint_every_steps"] = number
        run.layout.plan.write_text(json.dumps(plan))
        records.write(run, records.step(1, 2.0))
        complete(run, records)
    out = ftkit("compare", "same-1", "same-2").out
    assert "is best" not in out
    assert "the runs are equally good: training loss 2.0000" in out


def test_a_sweep_is_canceled_and_its_logs_are_printed_by_its_name(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any, programs: FakePrograms
) -> None:
    first, second, third = (make_run(f"try-{number}") for number in (1, 2, 3))
    for run in (first, second, third):
        plan = json.loads(run.layout.plan.read_text())
        run.layout.plan.write_text(json.dumps(plan | {"sweep": {"id": "try-new", "name": "try", "values": {}}}))
    complete(first, records)
    first.layout.job_log.write_text("one\ntwo\n")
    third.layout.submission.unlink()
    assert ftkit("logs", "try").out == f"==> {first.id} <==\none\ntwo\n==> {second.id} <==\n==> {third.id} <==\n"
    assert ftkit("logs", "try", "--follow").code == 4
    programs.answer("squeue", f"{second.submission.job_id}|RUNNING|None\n")
    programs.answer("scancel")
    canceled = ftkit("cancel", "try-new")
    assert f"{first.id} has already" in canceled.err
    assert f"ftkit resume {second.id}" in canceled.err
    assert (canceled.code, f"{third.id} was never submitted" in canceled.err) == (4, True)
    assert [call.split()[-1] for call in programs.calls("scancel")] == [second.submission.job_id]


@pytest.mark.usefixtures("quick")
def test_a_sweep_is_followed_with_one_question_for_all_of_its_runs(
    ftkit: Callable[..., Result], make_run: RunMaker, sacct_line: Callable[..., str], programs: FakePrograms
) -> None:
    runs = [make_run(f"try-{number}", job_id=f"7{number}") for number in (1, 2)]
    for run in runs:
        plan = json.loads(run.layout.plan.read_text())
        run.layout.plan.write_text(json.dumps(plan | {"sweep": {"id": "try-new", "name": "try", "values": {}}}))
    programs.answer("squeue")
    programs.answer("sacct", "".join(map(sacct_line, runs, ("COMPLETED", "TIMEOUT"))))
    followed = ftkit("status", "try", "--follow")
    assert (followed.code, [f"{run.id}: " in followed.err for run in runs]) == (7, [True, True])
    assert "1 of 2 runs did not complete" in followed.err
    assert [call.split()[-1] for call in programs.calls("squeue")] == ["--jobs=71,72"]


@pytest.mark.usefixtures("quick")
def test_a_sweep_is_followed_while_slurm_knows_one_of_its_runs(
    ftkit: Callable[..., Result], make_run: RunMaker, squeue_line: Callable[..., str],
    sacct_line: Callable[..., str], programs: FakePrograms, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("ftkit.cli.follow._LOST_SECONDS", 0)
    known, lost = [make_run(f"try-{number}", job_id=f"7{number}") for number in (1, 2)]
    for run in (known, lost):
        plan = json.loads(run.layout.plan.read_text())
        run.layout.plan.write_text(json.dumps(plan | {"sweep": {"id": "try-new", "name": "try", "values": {}}}))
    programs.add("squeue", f'if mkdir "{programs.folder}/asked"; then echo "$RUNNING"; fi')
    monkeypatch.setenv("RUNNING", squeue_line(known, "RUNNING").strip())
    programs.answer("sacct", sacct_line(known, "COMPLETED"))
    followed = ftkit("status", "try", "--follow")
    assert followed.code == 7
    assert f"{known.id}: completed" in followed.err
    assert f"lost track of {lost.id}" in followed.err


def test_a_run_that_may_have_a_job_is_not_said_to_have_none_while_slurm_does_not_answer(
    ftkit: Callable[..., Result], make_run: RunMaker, programs: FakePrograms
) -> None:
    run = make_run()
    run.layout.submission.unlink()
    programs.answer("squeue", stderr="slurm_load_jobs error: Socket timed out on send/recv operation\n", code=1)
    assert "has a job is unknown" in ftkit("status", run.id).err
    canceled = ftkit("cancel", run.id)
    assert (canceled.code, "never submitted" in canceled.err, "timed out" in canceled.err) == (14, False, True)
