"""Copies of runs and exports: in a local S3 server and in folders."""

from __future__ import annotations

import socket
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from object_storage import BUCKET, KEYS, found_by_programs, s3_server

from ftkit.cli.main import main
from ftkit.data.prepare import prepare
from ftkit.errors import NotFoundError, PrerequisiteError
from ftkit.files import write_json
from ftkit.models.folder import EXPORT_RECORD
from ftkit.planning.layout import RunLayout, Workspace
from ftkit.planning.plan import read_plan
from ftkit.runs import storage as store_module
from ftkit.runs.checkpoints import find_damage, read_marker
from ftkit.runs.manifest import build_manifest
from ftkit.runs.repeat import read_original
from ftkit.runs.storage import Store, push
from ftkit.runs.sync import RunCopy, check_destination, fetch_run, read_status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Run

pytest.importorskip("moto", reason="needs the extra dev-storage")
PART = 5 * 2**20
"""The smallest part that S3 takes."""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Any]]:
    with s3_server() as server:
        yield server


@pytest.fixture
def client(server: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    address, client = server
    with found_by_programs(address, monkeypatch):
        yield client


def quiet(_: object) -> None:
    pass


def make_export(folder: Path, content: bytes = b"weights") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content * (2 * PART // 7 + 1000))  # three parts
    (folder / "chat").mkdir()
    (folder / "chat" / "template.jinja").write_text("{{ messages }}")
    (folder / EXPORT_RECORD).write_bytes(content)
    return folder


@pytest.mark.parametrize("where", ["s3", "folder"])
def test_a_push_resumes_compares_digests_and_does_not_overwrite_another_export(
    where: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_PART_BYTES", PART)
    export = make_export(tmp_path / "export")
    address = f"s3://{BUCKET}/models/demo" if where == "s3" else str(tmp_path / "copies" / "demo")
    copied: list[str] = []
    push(export, address, EXPORT_RECORD, copied.append)
    names = ["chat/template.jinja", "model.safetensors", EXPORT_RECORD]
    assert copied == [f"copying {name}" for name in names]
    assert Store(address).sizes() == {name: (export / name).stat().st_size for name in names}
    if where == "s3":
        tag = client.head_object(Bucket=BUCKET, Key="models/demo/model.safetensors")["ETag"]
        assert tag.strip('"') == store_module._etag(export / "model.safetensors", print)
        assert tag.endswith('-3"')
    damaged = tmp_path / "damaged"
    content = bytearray((export / "model.safetensors").read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    Store(address).put(damaged, "model.safetensors")  # of the same size
    copied.clear()
    push(export, address, EXPORT_RECORD, copied.append)
    assert copied == ["copying model.safetensors"]
    with pytest.raises(PrerequisiteError, match=str(address)):
        push(make_export(tmp_path / "other", b"waights"), address, EXPORT_RECORD, quiet)
    assert Store(address).holds("model.safetensors", export / "model.safetensors")


@pytest.mark.usefixtures("client")
def test_a_run_resumes_on_another_machine_from_its_copy_with_the_same_result(finished_run: Run, tmp_path: Path) -> None:
    stopped = finished_run.copy_to("copied-20260102T030405Z-ab12")
    stopped.forget_after(10)
    layout = stopped._write_plan().parent
    write_json(stopped.layout.manifest, build_manifest(stopped.plan, ["ftkit", "run"], tmp_path))
    status = RunCopy(RunLayout(layout), f"s3://{BUCKET}/runs", quiet).update()
    assert (status.error, status.done, status.waiting) == (None, ("checkpoints/step-000010",), ())
    again = RunCopy(RunLayout(layout), f"s3://{BUCKET}/runs", pytest.fail).update()  # nothing is copied twice
    assert again.done == status.done

    assert read_original(status.destination).run.id == stopped.plan.id  # as 'ftkit rerun s3://...' does

    elsewhere = Workspace(tmp_path / "elsewhere")
    plan = fetch_run(status.destination, elsewhere, quiet)
    assert plan.layout.root == elsewhere.runs / "copied-20260102T030405Z-ab12"
    assert read_plan(plan.layout) == plan
    marker = read_marker(plan.layout.checkpoint(10), 10)
    assert find_damage(plan.layout.checkpoint(10), marker, marker.files) == []
    fetch_run(status.destination, elsewhere, pytest.fail)  # the checkpoint is not copied again
    recipe = plan.recipe.model_copy(update={"sync": str(tmp_path / "backup")})
    continued = replace(stopped, plan=replace(plan, recipe=recipe))
    prepare(continued.plan, quiet)
    continued.train()
    model = "model.safetensors"
    assert (plan.layout.export / model).read_bytes() == (finished_run.layout.export / model).read_bytes()

    beside = read_status(plan.layout)
    assert beside is not None
    assert (beside.error, beside.waiting) == (None, ())
    assert beside.done == ("checkpoints/step-000010", "checkpoints/step-000020", "export")
    copy = tmp_path / "backup" / plan.id
    assert (copy / "export" / model).read_bytes() == (plan.layout.export / model).read_bytes()
    assert (copy / "metrics.jsonl").read_bytes() == plan.layout.metrics.read_bytes()


def test_names_of_a_copy_cannot_leave_the_folder_of_the_run(finished_run: Run, client: Any, tmp_path: Path) -> None:
    status = RunCopy(finished_run.layout, f"s3://{BUCKET}/leaving", quiet).update()
    prefix = status.destination.removeprefix(f"s3://{BUCKET}/")
    outside = tmp_path / "outside" / "evil"
    for name in (
        "checkpoints/step-000020/../../../../evil",
        f"checkpoints/step-000020/{outside}",
        "code/../../../evil",
        f"code/{outside}",
    ):
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=b"")
    fetch_run(status.destination, Workspace(tmp_path / "workspace"), quiet)
    assert list(tmp_path.rglob("evil")) == []


def test_a_damaged_copy_is_not_resumed(finished_run: Run, client: Any, tmp_path: Path) -> None:
    status = RunCopy(finished_run.layout, f"s3://{BUCKET}/damaged", quiet).update()
    prefix = status.destination.removeprefix(f"s3://{BUCKET}/")
    damaged = [f"{prefix}/checkpoints/step-0000{step}/__0_0.distcp" for step in (20, 10)]
    client.put_object(Bucket=BUCKET, Key=damaged[0], Body=b"no")
    older, said = Workspace(tmp_path / "older"), list[str]()
    fetch_run(status.destination, older, said.append)
    assert any("step 20 at " in line and "__0_0.distcp" in line for line in said)
    layout = RunLayout(older.runs / finished_run.layout.root.name)
    assert [step for step, _ in layout.list_checkpoints()] == [10]
    client.put_object(Bucket=BUCKET, Key=damaged[1], Body=b"no")
    workspace = Workspace(tmp_path / "none")
    with pytest.raises(PrerequisiteError, match=r"step 10 .*__0_0\.distcp"):
        fetch_run(status.destination, workspace, quiet)
    assert RunLayout(workspace.runs / finished_run.layout.root.name).list_checkpoints() == []
    RunCopy(finished_run.layout, f"s3://{BUCKET}/damaged", quiet).update()  # sees the sizes
    fetch_run(status.destination, workspace, quiet)
    with pytest.raises(NotFoundError, match=r"s3://"):
        fetch_run(f"s3://{BUCKET}/nothing", workspace, quiet)
    with pytest.raises(NotFoundError, match=r"s3://"):
        read_original(f"s3://{BUCKET}/damaged")


def test_the_users_code_is_copied_and_fetched(finished_run: Run, tmp_path: Path) -> None:
    run = finished_run.copy_to("with-code-20260102T030405Z-ab12")
    module = run.layout.code / "with-mine" / "mine.py"
    module.parent.mkdir(parents=True)
    module.write_text("VALUE = 1\n")
    status = RunCopy(run.layout, str(tmp_path / "copies"), quiet).update()
    assert (status.error, status.waiting) == (None, ())
    elsewhere = Workspace(tmp_path / "elsewhere")
    fetch_run(status.destination, elsewhere, quiet)
    fetched = RunLayout(elsewhere.runs / run.layout.root.name).code / "with-mine" / "mine.py"
    assert fetched.read_text() == "VALUE = 1\n"


def test_a_failing_store_is_reported_and_retried(finished_run: Run, tmp_path: Path) -> None:
    run = finished_run.copy_to("failing-20260102T030405Z-ab12")
    in_the_way = tmp_path / "backup"
    in_the_way.write_text("a file")
    copy, pauses = RunCopy(run.layout, str(in_the_way), quiet), []
    asked = iter([False, False, True])

    def wait(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            in_the_way.unlink()

    copy_of = f"{in_the_way}/{run.layout.root.name}"
    status = copy.follow(lambda: next(asked), wait)
    assert pauses == [20, 40]
    assert status.error is None
    assert status.done == ("checkpoints/step-000010", "checkpoints/step-000020", "export")
    assert status.destination == copy_of


@contextmanager
def silent_server() -> Iterator[str]:
    """Accept connections and never respond, like a hanging store or proxy."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_an_unresponsive_store_is_reported_and_blocks_neither_a_push_nor_the_end_of_a_run(
    finished_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_PATIENCE_SECONDS", 0.6)
    run = finished_run.copy_to("hanging-20260102T030405Z-ab12")
    with silent_server() as address, found_by_programs(address, monkeypatch):
        with pytest.raises(PrerequisiteError, match=rf"s3://{BUCKET}/hung: no answer for 1 s"):
            push(make_export(tmp_path / "export"), f"s3://{BUCKET}/hung", EXPORT_RECORD, quiet)
        status = RunCopy(run.layout, f"s3://{BUCKET}/runs", quiet).follow(lambda: True, pytest.fail)
    assert f"{status.destination}: no answer for 1 s; " in str(status.error)
    assert status.waiting == ("checkpoints/step-000020", "checkpoints/step-000010", "export")
    assert read_status(run.layout) == status


def test_a_slow_call_that_makes_progress_does_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_PATIENCE_SECONDS", 0.4)

    def work(progress: store_module.Progress) -> str:
        for _ in range(6):
            time.sleep(0.1)
            progress()
        return "done"

    assert store_module.call_patiently(work) == "done"


@pytest.mark.usefixtures("client")
def test_a_run_without_credentials_is_rejected_before_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import s3fs

    check_destination(f"s3://{BUCKET}/runs")
    s3fs.S3FileSystem.clear_instance_cache()
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FTKIT_WORKSPACE", str(tmp_path))
    assert (
        main(["run", "demo", f"sync=s3://{BUCKET}/runs", "--cluster", "local", "--no-follow"])
        == PrerequisiteError.exit_code
    )
    assert "AWS_PROFILE" in capfd.readouterr().err
    assert not list(tmp_path.glob("runs/*"))
