"""`ftkit data upload`: the copy of a data set gives the same rows in the same order."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.cli.main import main
from ftkit.config.data import DataSpec, MessagesFormat
from ftkit.config.data_sources import FilesSource, HubSource, MixtureSource, ValidationSpec
from ftkit.data.selection import read_rows
from ftkit.data.upload import upload_data
from ftkit.errors import PrerequisiteError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.train


def write_rows(path: Path, count: int) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"id": f"{path.stem} {number}"}) + "\n" for number in range(count)))
    return str(path)


def spec(source: object, **more: object) -> DataSpec:
    return DataSpec.model_validate({"source": source, "format": MessagesFormat(kind="messages"), **more})


def rows_of(data: DataSpec) -> list[tuple[str | None, Any]]:
    return [(split, row.columns) for _, split, raw in read_rows(data) if (row := raw.parse())]


def changed(data: DataSpec, changes: dict[str, Any]) -> DataSpec:
    """Return the data of a recipe after overrides."""
    source, validation = changes["data.source"], data.validation
    if isinstance(source, list):
        source = {"kind": "mixture", "sources": source}
    if file := changes.get("data.validation.file"):
        validation = ValidationSpec(file=file)
    return spec(source, validation=validation)


def test_a_copy_of_each_kind_of_source_gives_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    one, two = write_rows(tmp_path / "data" / "one.jsonl", 30), write_rows(tmp_path / "data" / "two.jsonl", 20)
    held, place = write_rows(tmp_path / "held.jsonl", 3), str(tmp_path / "copies")
    files = FilesSource(kind="files", train=one, num_train=9, num_heldout=4, seed=3)
    hub = HubSource(kind="hub", dataset=str(tmp_path / "data"), num_train=25, num_heldout=5, seed=2)
    cases = {
        "file": spec(files),
        "folder": spec(FilesSource(kind="files", train=str(tmp_path / "data"))),
        "pattern": spec(FilesSource(kind="files", train=f"{tmp_path}/data/t*.jsonl", heldout=held)),
        "hub": spec(hub),
        "mixture": spec(MixtureSource(kind="mixture", sources=(files, FilesSource(kind="files", train=two)))),
        "validation": spec(FilesSource(kind="files", train=two), validation=ValidationSpec(file=held)),
    }
    for name, data in cases.items():
        copy = changed(data, upload_data(data, f"{place}/{name}", lambda _: None))
        assert rows_of(copy) == rows_of(data), name
        assert all(file.startswith(place) for _, file in copy.files), name


def test_copies_are_not_copied_again_and_other_files_are_not_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    data = spec(FilesSource(kind="files", train=write_rows(tmp_path / "rows.jsonl", 5)))
    upload_data(data, str(tmp_path / "copies"), said.append)
    assert len(said) == 1
    upload_data(data, str(tmp_path / "copies"), said.append)
    assert len(said) == 1
    write_rows(tmp_path / "rows.jsonl", 6)
    with pytest.raises(PrerequisiteError):
        upload_data(data, str(tmp_path / "copies"), said.append)
    assert len((tmp_path / "copies" / "rows.jsonl").read_text().splitlines()) == 5


def test_the_command_prints_an_override_that_a_plan_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi!"}]}
    (tmp_path / "my chats.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nmodel: {weights: random, architecture: olmo3-7b, tokenizer: {source: trained, vocab_size: 300}}\n"
        "data: {source: {kind: files, train: my chats.jsonl, num_train: 2}, chat_template: chatml}\n"
        "training: {sequence_length: 128, global_batch_size: 8, num_epochs: 1, learning_rate: 1e-4}\n"
    )
    assert main(["data", "upload", "mine.yaml", "--to", "copies"]) == 0
    (override,) = shlex.split(capsys.readouterr().out)
    assert main(["plan", "mine.yaml", override, "--cluster", "slurm", "--image", "olmo3:25.02"]) == 0
    assert str(tmp_path / "copies" / "my chats.jsonl") in override


def test_rows_that_a_task_generates_are_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "upload", "demo", "--to", str(tmp_path)]) == 8
    assert not list(tmp_path.iterdir())
    assert "generates" in capsys.readouterr().err
