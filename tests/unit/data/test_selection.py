from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from ftkit.config.data import DataSpec, MessagesFormat
from ftkit.config.data_sources import FilesSource, GeneratedSource, TaskFile, ValidationSpec
from ftkit.data.selection import peek_rows, read_rows, split_of
from ftkit.errors import DataError, NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.data.rows import Row


def spec(source: object, **more: object) -> DataSpec:
    return DataSpec.model_validate({"source": source, "format": MessagesFormat(kind="messages"), **more})


def read(source: object, **more: object) -> dict[str, list[Row]]:
    """Return the rows of each split."""
    splits: dict[str, list[Row]] = {"train": [], "validation": []}
    for _, split, raw in read_rows(spec(source, **more)):
        row = raw.parse()
        if row is not None:
            splits[split or "by content"].append(row)
    return splits


def ids(rows: list[Row]) -> list[int]:
    return [row.columns["id"] for row in rows]


def write_lines(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"id": number}) + "\n" for number in range(count)))
    return str(path)


def test_validation_rows_are_not_trained_on(tmp_path: Path) -> None:
    source = FilesSource(kind="files", train=write_lines(tmp_path / "a.jsonl", 20), num_train=12, num_heldout=5)
    splits = read(source)
    train, validation = ({row.columns["id"] for row in part} for part in (splits["train"], splits["validation"]))
    assert (len(train), len(validation)) == (12, 5)
    assert not train & validation


def test_the_seed_determines_the_drawn_examples(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", 50)

    def draw(seed: int) -> list[int]:
        rows = read(FilesSource(kind="files", train=path, num_train=10, seed=seed))["train"]
        return [row.columns["id"] for row in rows]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_separate_file_is_the_entire_validation_split(tmp_path: Path) -> None:
    source = FilesSource(
        kind="files", train=write_lines(tmp_path / "a.jsonl", 9), heldout=write_lines(tmp_path / "b.jsonl", 3)
    )
    splits = read(source)
    assert (len(splits["train"]), len(splits["validation"])) == (9, 3)


def test_too_few_examples_are_rejected_with_both_numbers(tmp_path: Path) -> None:
    source = FilesSource(kind="files", train=write_lines(tmp_path / "a.jsonl", 4), num_train=4, num_heldout=1)
    with pytest.raises(DataError, match=r"4 examples.* 5"):
        read(source)


def test_a_too_short_training_file_is_rejected_even_with_a_validation_file(tmp_path: Path) -> None:
    train, heldout = write_lines(tmp_path / "a.jsonl", 4), write_lines(tmp_path / "b.jsonl", 0)
    with pytest.raises(DataError, match=r"4 examples.* 5"):
        read(FilesSource(kind="files", train=train, heldout=heldout, num_train=5))
    with pytest.raises(DataError, match=r"b\.jsonl"):
        read(FilesSource(kind="files", train=train, heldout=heldout, num_train=4))


def test_only_one_way_to_select_validation_examples_is_allowed() -> None:
    with pytest.raises(ValidationError, match=r"num_heldout \(3\)"):
        FilesSource(kind="files", train="a.jsonl", heldout="b.jsonl", num_heldout=3)


def test_the_first_examples_include_both_files_and_generated_ones(tmp_path: Path) -> None:
    train, heldout = write_lines(tmp_path / "a.jsonl", 2), write_lines(tmp_path / "b.jsonl", 1)
    rows = peek_rows(spec(FilesSource(kind="files", train=train, heldout=heldout)))
    assert [row.where for row in rows] == [f"{train}:1", f"{train}:2", f"{heldout}:1"]
    source = GeneratedSource(kind="generated", num_train=10_000_000)
    assert peek_rows(with_task(source, "raise SystemExit")) == []  # it is not run
    assert peek_rows(spec("org/data")) == []


@pytest.mark.parametrize("line", ["{", "[1]", '"text"'])
def test_a_malformed_line_is_reported_by_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"ok": 1}\n\n' + line + "\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:3: "):
        read(FilesSource(kind="files", train=str(path)))


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="can't read"):
        read(FilesSource(kind="files", train=str(tmp_path / "none.jsonl")))


def with_task(source: GeneratedSource, text: str) -> DataSpec:
    return DataSpec(source=source, task=TaskFile(file="/tasks/own.py", text=text))


OWN = """
def generate(seed, num_train, num_heldout, *, scale=1):
    return ({"n": seed + scale * i} for i in range(num_train)), [{"n": -1}] * num_heldout
"""


def test_a_task_generates_the_rows_of_both_splits() -> None:
    source = GeneratedSource(kind="generated", num_train=3, num_heldout=1, seed=5, options={"scale": 10})
    rows = [(row.split, row.row.content) for row in read_rows(with_task(source, OWN))]
    assert rows == [("train", {"n": 5}), ("train", {"n": 15}), ("train", {"n": 25}), ("validation", {"n": -1})]


@pytest.mark.parametrize(
    ("body", "place", "reason"),
    [
        ("    rows = []\n    return rows[7], []", "own.py:3: ", "IndexError"),
        ("    import sys\n    sys.exit('no')", "own.py:3: ", "SystemExit"),
        ("    return []", "own.py", "ValueError"),
        ("    return [{}], []", "own.py: ", "1 of 2 rows"),
        ("    return [{}, 'text'], []", "own.py: ", "not a dict"),
        ("    return [{}, ()], []", "own.py: ", "not a dict"),
    ],
)
def test_a_failure_inside_a_task_names_its_file_and_line(body: str, place: str, reason: str) -> None:
    source = GeneratedSource(kind="generated", num_train=2)
    with pytest.raises(DataError) as failure:
        list(read_rows(with_task(source, f"def generate(seed, num_train, num_heldout):\n{body}\n")))
    assert place in failure.value.what
    assert reason in failure.value.what


# --- Mixtures and the validation split -----------------------------------------------------------


def test_weights_set_the_share_of_each_source_and_the_scarce_one_is_used_up(tmp_path: Path) -> None:
    big, small = write_lines(tmp_path / "big.jsonl", 1000), write_lines(tmp_path / "small.jsonl", 60)
    mixed = [{"source": big, "weight": 3}, {"source": small, "weight": 1}]
    taken = [source for source, _, _ in read_rows(spec(mixed))]
    assert (taken.count(0), taken.count(1)) == (180, 60)
    assert all(25 <= taken[begin : begin + 40].count(0) <= 35 for begin in range(0, 240, 40))  # evenly interleaved


def test_counts_and_entire_sources_are_mixed_in_a_fixed_order(tmp_path: Path) -> None:
    first, second = write_lines(tmp_path / "a.jsonl", 50), write_lines(tmp_path / "b.jsonl", 20)
    mixed = [{"source": first, "num_train": 10}, second]
    rows = list(read_rows(spec(mixed)))
    assert [source for source, _, _ in rows].count(0) == 10
    assert rows == list(read_rows(spec(mixed)))


def test_a_validation_count_or_file_is_exact(tmp_path: Path) -> None:
    path, other = write_lines(tmp_path / "a.jsonl", 100), write_lines(tmp_path / "b.jsonl", 7)
    splits = read(path, validation={"count": 13})
    assert (len(splits["train"]), len(splits["validation"])) == (87, 13)
    splits = read(path, validation={"file": other})
    assert (len(splits["train"]), len(splits["validation"])) == (100, 7)
    with pytest.raises(DataError, match=r"100 examples, data\.validation\.count is 100"):
        read(path, validation={"count": 100})


def test_a_file_that_is_trained_on_is_refused_as_validation_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", 3)
    (tmp_path / "link.jsonl").symlink_to(path)
    for file in (path, str(tmp_path / "link.jsonl"), str(tmp_path / "*.jsonl")):
        with pytest.raises(DataError, match=r"data\.validation\.file: .*data\.source\.train"):
            read(path, validation={"file": file})
    with pytest.raises(DataError, match=r"data\.source\.heldout: "):
        peek_rows(spec(FilesSource(kind="files", train=path, heldout=path)))


def test_a_drawn_fraction_has_about_the_requested_size(tmp_path: Path) -> None:
    splits = read(write_lines(tmp_path / "a.jsonl", 2000), validation={"fraction": 0.1})
    assert 140 < len(splits["validation"]) < 260


def test_the_hash_of_a_row_determines_its_split_in_any_position_and_file_format() -> None:
    validation = ValidationSpec(fraction=0.3, by="hash")
    rows = [{"id": number, "text": "x"} for number in range(2000)]
    splits = [split_of(row, validation) for row in rows]
    assert 500 < splits.count("validation") < 700
    assert splits == [split_of({"text": "x", "id": row["id"]}, validation) for row in rows]


@pytest.mark.parametrize("given", [{}, {"count": 1, "fraction": 0.1}, {"count": 1, "by": "hash"}])
def test_conflicting_definitions_of_a_validation_split_are_rejected(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"count, fraction|by: hash"):
        ValidationSpec.model_validate(given)
    with pytest.raises(ValidationError, match="keep one"):
        spec({"kind": "files", "train": "a.jsonl", "num_heldout": 3}, validation={"count": 1})
