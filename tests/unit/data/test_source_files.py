from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkit.data.prepared_data import PreparedData
from ftkit.data.readers import READERS, read_lines
from ftkit.data.rows import Row
from ftkit.data.source_files import count_rows, find_files, read_file
from ftkit.errors import DataError, NotFoundError, PrerequisiteError
from ftkit.planning.layout import RunLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS = [{"id": str(number), "text": f"é\u2028 {number}"} for number in range(700)]


def read(path: Path) -> list[dict[str, Any]]:
    return [row.columns for raw in read_file(str(path)) if (row := raw.parse())]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_csv(path: Path) -> None:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text"], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(ROWS)


def write_zstd(path: Path) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(lines(ROWS))


def write_arrow(path: Path, make: Callable[..., Any]) -> None:
    table = pa.Table.from_pylist(ROWS)
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=99)


WRITERS: dict[str, Callable[[Path], object]] = {
    "rows.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + lines(ROWS)),
    "rows.data": lambda path: path.write_bytes(lines(ROWS)),
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(ROWS[:300])) + gzip.compress(lines(ROWS[300:]))),
    "rows.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(lines(ROWS))),
    "rows.jsonl.xz": lambda path: path.write_bytes(lzma.compress(lines(ROWS))),
    "rows.jsonl.zst": write_zstd,
    "rows.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "lines.json": lambda path: path.write_bytes(lines(ROWS)),
    "rows.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "rows.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=100),
    "rows.csv": write_csv,
    "rows.tsv": write_csv,
    "file.arrow": lambda path: write_arrow(path, pa.ipc.new_file),
    "stream.arrow": lambda path: write_arrow(path, pa.ipc.new_stream),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_file_format_yields_the_same_rows_in_order(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert read(tmp_path / name) == ROWS
    assert count_rows(str(tmp_path / name)) == len(ROWS)


@pytest.mark.parametrize(
    "name", [name for name in WRITERS if not name.endswith((".jsonl", ".data", "lines.json", "sv"))]
)
def test_a_truncated_file_is_an_error_with_its_name_and_never_fewer_rows(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(path) in caught.value.what


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=40)
@given(
    st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=4), max_size=8),
    st.booleans(),
    st.integers(0, 2),
)
def test_an_array_of_any_objects_is_read_element_by_element(rows: list[Any], escaped: bool, indent: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        path.write_text("\n " + json.dumps(rows, ensure_ascii=escaped, indent=indent or None), "utf-8", "surrogatepass")
        assert [raw.parse() for raw in read_file(str(path))] == [
            Row(row, f"{path}, element {number}") for number, row in enumerate(rows, start=1)
        ]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_number_may_be_cut_by_the_end_of_what_is_read_at_once(cut: int, tmp_path: Path) -> None:
    start, end = '{"data": [{"a": "', '"}], "version": -1.25e-10}'
    padding = "x" * ((1 << 20) - len(start) - end.index("-1") - cut)
    path = tmp_path / "a.json"
    path.write_text(start + padding + end)
    assert [row.parse().columns for row in read_file(str(path))] == [{"a": padding}]


def test_a_text_file_is_one_row_unless_it_is_json_lines(tmp_path: Path) -> None:
    book, rows = tmp_path / "book.md", tmp_path / "rows.txt"
    book.write_bytes("\ufeff# One\r\n\nü [\n".encode())
    assert read(book) == [{"text": "# One\r\n\nü [\n"}]
    rows.write_bytes(lines(ROWS[:3]))
    assert read(rows) == ROWS[:3]
    book.write_bytes(b" \n")
    assert read(book) == []
    book.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        read(book)


@pytest.mark.parametrize("rest", ["", ', "version": [1, {"a": "]"}], "license": "MIT"'])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_object_that_wraps_a_list_of_rows_is_read_as_the_list(indent: int | None, rest: str, tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b]}"}]
    text = json.dumps({"data": rows}, indent=indent)
    (tmp_path / "a.json").write_text(f"{text[:-1]}{rest}}}")
    assert read(tmp_path / "a.json") == rows


def test_an_object_over_several_lines_is_one_row(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}], "data": "x"}
    (tmp_path / "a.json").write_text(json.dumps(row, indent=2))
    assert read(tmp_path / "a.json") == [row]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"id,text\n1,a\n2,b,c\n", r"a\.csv:3: more columns"),
        ("a.csv", b"id,text\n1,a\n2\n", r"a\.csv:3: fewer columns"),
        ("a.csv", b'id,text\n1,"a\nb"\n\n2,"c\nd",3\n', r"a\.csv:5: more columns"),
        ("a.csv", b'id,text\n1,"a\nb"\n2,"c', r"a\.csv: after line 3: not valid CSV"),
        ("a.csv", b"id,text\n1,\xff\n", r"a\.csv: after line 1: not UTF-8"),
        ("a.json", b'[{"a": 1}, 2]', r"a\.json, element 2: not a JSON object"),
        ("a.json", b'[{"a": 1} {"a": 2}]', r"a\.json"),
        ("a.json", b'[{"a": 1}] [', r"a\.json .*text after the end"),
        ("a.json", b'{"data": [{"a": 1}], "data": [{"a": 2}]}', "duplicate key 'data'"),
        ("a.json", b'{"data": 5, "data": [{"a": 2}]}', "duplicate key 'data'"),
        ("a.json", b'[{"a": 1},]', "no element after the last comma"),
        ("a.json", b'[{"a": 1, "a": 2}]', r"a\.json, element 1: .*duplicate key 'a'"),
        ("a.json", rb'[{"a": "\ud83d"}]', r"a\.json, element 1: \\ud83d is a lone surrogate"),
        ("a.json", b'{"data": [{"a": 1}],\n "rows": [{"a": 2}]}', "rows under 'data', and others under 'rows'"),
        ("a.csv", b"text,text\n1,2\n", r"a\.csv: there are two columns 'text'"),
        ("a.csv", b"id;text\n1;a\n", r"a\.csv: the columns are separated by ';'"),
        ("a.csv", b"id,text\n1,a\0\n", r"a\.csv:2: NUL bytes"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), r"a\.jsonl is compressed by gzip, not JSON Lines"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", r"only a Git LFS pointer\n.*git lfs pull"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", r"only a Git LFS pointer\n.*git lfs pull"),
        ("a.jsonl.gz", b"version https://git-lfs.github.com/spec/v1\n", r"only a Git LFS pointer\n.*git lfs pull"),
        ("a.csv", b"version https://git-lfs.github.com/spec/v1\n", r"only a Git LFS pointer\n.*git lfs pull"),
        ("a.jsonl", b"PAR1\x15", r"a\.jsonl is a Parquet file, not JSON Lines"),
        ("a.jsonl", b'{"a"\0: 1}', r"a\.jsonl:1: not valid JSON: a NUL byte at position 5"),
        ("a.feather", b"FEA1\0\0\0\0", r"a\.feather is a Feather version 1 file"),
        ("a.parquet", b"PAR1", r"a\.parquet can't be read to its end"),
        ("a.parquet", b"", r"a\.parquet can't be read to its end"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz can't be read to its end"),
        ("a.jsonl.gz", gzip.compress(bytes(99), mtime=0)[:10] + b"\xff" * 20, r"a\.jsonl\.gz can't be read to its end"),
        ("a.jsonl.zst", b"no zstd", r"a\.jsonl\.zst can't be read to its end"),
    ],
)
def test_a_damaged_file_is_reported_with_the_location(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.zip", b"PK\x03\x04 one row" + lines(ROWS), r"a\.zip is a ZIP archive"),
        (
            "a.tar.gz",
            gzip.compress(b"rows.jsonl".ljust(257, b"\0") + b"ustar\0" + lines(ROWS)),
            "is a tar archive, not",
        ),
        ("a.json.gz", b"<!DOCTYPE html><html>sign in", r"a\.json\.gz is a web page"),
        ("a.csv", b"\xef\xbb\xbf\n<HTML>\n<p>\n", r"a\.csv is a web page, not CSV"),
        ("a.parquet", b"<html>", r"a\.parquet is a web page, not Parquet"),
        (
            "a.parquet",
            b"ARROW1\0\0",
            r"(?s)an Arrow file, not Parquet\n.*mv \S+a\.parquet …\.arrow",
        ),
        ("a.arrow", b"PAR1", r"(?s)a Parquet file, not Arrow\n.*mv \S+a\.arrow …\.parquet"),
        ("a.jsonl.lz4", b"\x04\x22\x4d\x18", r"compressed by lz4"),
        ("a.db", b"SQLite format 3\0", r"a\.db is an SQLite database"),
        ("a.pkl", pickle.dumps(ROWS[:2]), r"a\.pkl is a Python pickle, not JSON Lines"),
    ],
)
def test_a_file_of_another_kind_is_refused_as_a_whole_rather_than_row_by_row(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        next(read_file(str(tmp_path / name)))


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl .* pipe"):
        next(read_file(str(tmp_path / "rows.jsonl")))
    with pytest.raises(DataError, match="/dev/null is a device"):
        next(read_file("/dev/null"))


def test_a_table_with_a_time_that_python_cannot_represent_has_one_bad_row(tmp_path: Path) -> None:
    times = pa.array([0, 2**62], pa.timestamp("us"))
    pq.write_table(pa.table({"text": ["a", "b"], "time": times}), tmp_path / "a.parquet")
    good, bad = read_file(str(tmp_path / "a.parquet"))
    assert good.parse()
    with pytest.raises(DataError, match=r"a\.parquet, row 2: "):
        bad.parse()


def test_a_later_row_with_another_schema_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(ROWS) + b"\n[1, 2]\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:702: "):
        read(path)


def test_folders_and_globs_expand_to_their_data_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/2.parquet", "a.jsonl.gz", "README.md", ".hidden.jsonl", "_SUCCESS", "c.jsonl"):
        (tmp_path / name).touch()
    names = [str(tmp_path / name) for name in ("a.jsonl.gz", "b/2.parquet", "c.jsonl")]
    assert find_files(str(tmp_path), "k") == names
    assert find_files(str(tmp_path / "**" / "*.parquet"), "k") == names[1:2]
    assert find_files(str(tmp_path / "none.jsonl"), "k") == [str(tmp_path / "none.jsonl")]
    with pytest.raises(NotFoundError, match=r"data\.source\.train: .*\*\.csv"):
        find_files(str(tmp_path / "*.csv"), "data.source.train")


@pytest.mark.parametrize("names", [("a.jsonl", "a.jsonl.gz"), ("sub/a.csv.GZ", "sub/a.csv.zst")])
def test_a_file_beside_its_compressed_copy_is_rejected(names: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in (*names, "sub/a.jsonl.bz2", "b.jsonl"):
        (tmp_path / name).touch()
    for place in (tmp_path, tmp_path / "**" / "*"):
        with pytest.raises(DataError) as caught:
            find_files(str(place), "data.source")
        assert caught.value.name == "compressed-copy"
    (tmp_path / names[0]).unlink()
    assert len(find_files(str(tmp_path), "data.source")) == 3


def test_a_csv_row_over_several_lines_is_located_at_its_first(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\n1,"a\nb\nc"\n\n2,d\n')
    assert [row.where for raw in read_file(str(path)) if (row := raw.parse())] == [f"{path}:2", f"{path}:6"]


def test_a_folder_or_file_whose_name_looks_like_a_pattern_is_read(tmp_path: Path) -> None:
    file = tmp_path / "chats [2026]" / "a[1].jsonl"
    file.parent.mkdir()
    file.touch()
    assert find_files(str(file.parent), "k") == find_files(str(file), "k") == [str(file)]


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    for name in ("real/1.jsonl", "data/0.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    for name, target in (("a", "../real"), ("b", "../real"), ("loop", ".")):
        (tmp_path / "data" / name).symlink_to(target)
    data = tmp_path / "data"
    assert find_files(str(data), "k") == [str(data / "0.jsonl"), str(data / "a" / "1.jsonl")]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_keys_that_a_table_adds_to_nested_objects_are_removed(tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, Any]] = [
        {"calls": [{"name": "f", "arguments": {"city": "Rome"}}], "note": None},
        {"calls": [{"name": "g", "arguments": {"days": [1, None]}}, {"name": "h"}], "note": "x"},
    ]
    table, path = pa.Table.from_pylist(rows), tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    assert [row.columns for raw in read_file(str(path)) if (row := raw.parse())] == rows


def test_hidden_folders_and_metadata_are_skipped_and_other_splits_are_rejected(tmp_path: Path) -> None:
    for name in ("train-0.parquet", ".cache/x.jsonl", "__MACOSX/train-0.jsonl", "dataset_info.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_files(str(tmp_path), "k") == [str(tmp_path / "train-0.parquet")]
    (tmp_path / "test-0.parquet").touch()
    with pytest.raises(DataError, match=r"test-0\.parquet"):
        find_files(str(tmp_path), "k")


def test_runs_and_prepared_data_of_ftkit_below_a_folder_are_left_out(tmp_path: Path) -> None:
    run, prepared = RunLayout(tmp_path / "w" / "runs" / "r"), PreparedData(tmp_path / "w" / "data" / "d")
    ours = (run.plan, run.manifest, run.metrics, prepared.manifest_path, prepared.validation_rows)
    ours += tuple(folder / "x.jsonl" for folder in (prepared.train, prepared.validation, prepared.tokenizer))
    theirs = [tmp_path / "data" / name for name in ("a.jsonl", "manifest.json", "train/b.jsonl")]
    for path in (*ours, *theirs):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
    assert find_files(str(tmp_path), "k") == list(map(str, theirs))
    assert find_files(str(prepared.train), "k") == [str(prepared.train / "x.jsonl")]


def test_an_overlong_line_is_one_invalid_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftkit.data.readers.MAX_LINE", 64)
    lines = [b'{"a": 1}', b'{"a": "' + b"x" * 1000 + b'"}', b'{"a": 2}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    first, long, last = read_file(str(tmp_path / "a.jsonl"))
    assert [row.parse() for row in (first, last)] == [
        Row({"a": value}, f"{tmp_path}/a.jsonl:{line}") for line, value in ((1, 1), (3, 2))
    ]
    with pytest.raises(DataError, match=r"a\.jsonl:2: "):
        long.parse()


def test_a_first_line_without_an_end_is_refused_without_reading_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.data.readers.MAX_LINE", 64)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\0" * 100_000)
    with path.open("rb") as file:
        first = next(read_lines(file, str(path)))
        assert file.tell() == 64
    with pytest.raises(DataError, match=f"{path}:1: "):
        first.parse()
    with path.open("rb") as file, pytest.raises(DataError, match=f"{path}:1: "):
        list(read_lines(file, str(path)))


@pytest.fixture
def _limit_of_csv() -> Iterator[None]:
    """Restore the limit of Python's csv, which a reader sets for the process."""
    limit = csv.field_size_limit()
    yield
    csv.field_size_limit(limit)


@pytest.mark.usefixtures("_limit_of_csv")
@pytest.mark.parametrize("start", ["text\n", 'text\n"', ""])
def test_a_csv_line_without_an_end_is_refused_without_reading_on(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.data.readers.MAX_LINE", 64)
    path = tmp_path / "a.csv"
    path.write_text(start + "x" * 1_000_000)
    with path.open("rb") as file:
        with pytest.raises(DataError, match=f"{path}:{start.count(chr(10)) + 1}: "):
            list(READERS[".csv"][1](file, str(path)))
        assert file.tell() < 100_000


def test_an_integer_of_thousands_of_digits_in_a_list_of_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": ' + "9" * 100_000 + "}]")
    with pytest.raises(DataError, match="limit"):
        read(tmp_path / "a.json")


def test_tables_with_duplicate_columns_or_another_encoding_are_rejected(tmp_path: Path) -> None:
    two = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(two, tmp_path / "two.parquet")
    with pytest.raises(DataError, match="two columns 'text'"):
        read(tmp_path / "two.parquet")
    offsets, letters = pa.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0])), pa.py_buffer(b"\xf6xab")
    pq.write_table(pa.table({"text": pa.StringArray.from_buffers(2, offsets, letters)}), tmp_path / "a.parquet")
    first, second = read_file(str(tmp_path / "a.parquet"))
    assert second.content == {"text": "ab"}
    with pytest.raises(DataError, match=r"a\.parquet, row 1: .*utf-8"):
        first.parse()


def test_an_address_without_its_package_or_credentials_suggests_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(scheme: str) -> object:
        raise ImportError(f"install something to read {scheme}")

    class Refusing:
        def isdir(self, _: str) -> bool:
            raise PermissionError("Unable to locate credentials")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(
        PrerequisiteError,
        match=r"source\.train: [\s\S]*ftkit\[storage\]",
    ):
        find_files("s3://bucket/rows.jsonl", "data.source.train")
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda _: Refusing)
    with pytest.raises(PrerequisiteError, match=r"s3://bucket/rows\.jsonl: [\s\S]*AWS_PROFILE"):
        find_files("s3://bucket/rows.jsonl", "data.source.train")


def test_rows_at_an_address_are_read_like_those_of_a_file() -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    for name in ("b.jsonl", "a.parquet"):
        with TemporaryDirectory() as folder:
            WRITERS[f"rows{Path(name).suffix}"](Path(folder, name))
            system.pipe_file(f"/bucket/{name}", Path(folder, name).read_bytes())
    files = find_files("memory://bucket", "k")
    assert files == ["memory:///bucket/a.parquet", "memory:///bucket/b.jsonl"]
    for file in files:
        assert [row.columns for raw in read_file(file) if (row := raw.parse())] == ROWS
