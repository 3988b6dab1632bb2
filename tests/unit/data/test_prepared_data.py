from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.data.packing import IGNORED, Document, DocumentBatch, build_pack
from ftkit.data.pictures import to_record
from ftkit.data.prepared_data import DataManifest, PackStore, PackWriter, PreparedData, new_prepared_data
from ftkit.errors import DataError

MANIFEST = DataManifest("f", 4, 1, 1, 3, 2, 0, 0, 0, 3)


def test_packs_are_read_back_with_labels_positions_and_sources(tmp_path: Path) -> None:
    long = Document(np.array([5, 6, 7], np.int32), np.array([IGNORED, 7, IGNORED], np.int32))
    short = Document(np.array([8, 9], np.int32), np.array([9, IGNORED], np.int32))
    first, second = DocumentBatch.of([long, short], source=0), DocumentBatch.of([short], source=3)
    with PackWriter(tmp_path / "train") as writer:
        writer.write(first, [2])
        writer.write(DocumentBatch.join([second, first]), [1, 2])
    store = PackStore(tmp_path / "train", 8)
    assert (len(store), store.num_targets.tolist()) == (3, [2, 1, 2])
    both, one = store.read([2, 1])
    assert both[0].tolist() == [5, 6, 7, 8, 9, 5, 5, 5]
    assert both[1].tolist() == [IGNORED, 7, IGNORED, 9, IGNORED, IGNORED, IGNORED, IGNORED]
    assert both[2].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert one[0].tolist() == [8, 9, 8, 8, 8, 8, 8, 8]
    assert one[3].tolist() == [3, 3, 0, 0, 0, 0, 0, 0]


def _described(text: str, *pictures: object) -> Document:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    record = to_record({"pixel_values": np.array(pictures, np.uint8), "grid": np.arange(3)}) if pictures else b""
    return Document(ids, np.append(ids[1:], IGNORED).astype(np.int32), pictures=record)


def test_pictures_are_read_with_the_packs_that_documents_were_put_in(tmp_path: Path) -> None:
    first = DocumentBatch.of([_described("ab", 7), _described("cd"), _described("ef", 1, 2, 3)])
    second = DocumentBatch.of([_described("gh", 9, 9)])
    with PackWriter(tmp_path / "train") as writer:
        kept = DocumentBatch.join([writer.keep_pictures(first), writer.keep_pictures(second)])
        assert kept.pictures == b""
        writer.write(kept.take([3, 1, 0]), [2, 1])
        writer.write(DocumentBatch.join([first, second]).take([2]), [1])
    store = PackStore(tmp_path / "train", 8)
    assert store.has_pictures
    found = store.pictures([2, 0, 1])
    assert [arrays["pixel_values"].tolist() for arrays in found] == [[1, 2, 3], [9, 9], [7]]
    assert all(arrays["grid"].tolist() == [0, 1, 2] for arrays in found)
    (tmp_path / "train" / "pictures.bin").write_bytes(b"cut")
    with pytest.raises(DataError, match="different numbers"):
        PackStore(tmp_path / "train", 8)


def test_documents_without_pictures_have_no_files_of_them(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "train") as writer:
        writer.write(DocumentBatch.of([_described("ab")]), [1])
    store = PackStore(tmp_path / "train", 8)
    assert (store.has_pictures, store.pictures([0])) == (False, [])
    assert not list((tmp_path / "train").glob("pictures*"))


def test_files_have_their_types_whatever_those_of_the_documents(tmp_path: Path) -> None:
    batch = DocumentBatch.of([_described("ab")], source=3)
    wide: Any = {name: value.astype(np.int64) for name, value in vars(batch).items() if name != "pictures"}
    with PackWriter(tmp_path / "train") as writer:
        writer.write(replace(batch, **wide), [1])
    (pack,) = PackStore(tmp_path / "train", 8).read([0])
    assert (pack[0, 0], pack[3, 0]) == (int(batch.tokens[0]), 3)


def test_a_documents_digest_has_its_pictures() -> None:
    batch = DocumentBatch.of([_described("ab", 1), _described("ab", 2), _described("ab"), _described("ab", 1)])
    first, second, third, same = batch.digests
    assert len({first, second, third}) == 3
    assert first == same


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=9), min_size=1, max_size=6
    )
)
def test_a_stored_pack_equals_the_pack_of_its_documents(tokens: list[list[tuple[int, bool]]]) -> None:
    documents = []
    for document in tokens:
        ids = np.array([token for token, _ in document], np.int32)
        counts = np.array([counted for _, counted in document])
        documents.append(Document(ids, np.append(np.where(counts[1:], ids[1:], IGNORED), IGNORED).astype(np.int32)))
    with TemporaryDirectory() as folder:
        with PackWriter(Path(folder, "train")) as writer:
            writer.write(DocumentBatch.of(documents), [len(documents)])
        (pack,) = PackStore(Path(folder, "train"), 60).read([0])
    assert np.array_equal(pack[:3], build_pack(documents, 60))


def test_a_missing_file_of_prepared_data_suggests_a_fix(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokens\.u32") as caught:
        PackStore(tmp_path / "f" / "train", 8)
    assert f"delete {tmp_path / 'f'}" in caught.value.fix


def test_prepared_data_appears_only_when_complete(tmp_path: Path) -> None:
    final = tmp_path / "data" / "f"
    with new_prepared_data(final) as folder:
        assert not final.exists()
        folder.write_manifest(MANIFEST)
    assert PreparedData(final).read_manifest() == MANIFEST
    assert [path.name for path in final.parent.iterdir()] == ["f"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), new_prepared_data(tmp_path / "f"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_slower_of_two_concurrent_preparations_is_discarded(tmp_path: Path) -> None:
    with new_prepared_data(tmp_path / "f") as slow:
        with new_prepared_data(tmp_path / "f") as quick:
            quick.write_manifest(MANIFEST)
        slow.write_manifest(DataManifest("other", 4, 1, 1, 3, 2, 0, 0, 0, 3))
    assert PreparedData(tmp_path / "f").read_manifest() == MANIFEST


def test_data_prepared_by_another_version_has_another_identity() -> None:
    assert MANIFEST.identity != replace(MANIFEST, preparation_version=7).identity


def test_what_a_model_computes_is_next_to_its_data_unless_that_is_another_users_and_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run, weights = PreparedData(tmp_path / "data"), tmp_path / "run", tmp_path / "weights"
    for folder in (data.root, weights):
        folder.mkdir()
    data.write_manifest(MANIFEST)
    (weights / "model.safetensors").write_bytes(b"1")

    def folder(*facts: object) -> Path:
        return data.folder_of("references", str(weights), facts, ["train.f32", "validation.f32"], run)

    own = folder("bf16")
    assert own.parent == data.root / "references"
    assert folder("fp32") != own
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert folder("bf16") == run / "references" / own.name
    own.mkdir(parents=True)
    (own / "train.f32").touch()
    assert folder("bf16") == run / "references" / own.name
    (own / "validation.f32").touch()
    assert folder("bf16") == own
    (weights / "model.safetensors").write_bytes(b"22")
    assert folder("bf16").name != own.name


def test_unprepared_data_suggests_a_fix(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        PreparedData(tmp_path).read_manifest()
    assert "delete" in caught.value.fix


def test_partial_data_of_killed_preparations_is_removed_and_that_of_active_ones_is_kept(tmp_path: Path) -> None:
    for name in (".f-old", ".other-old", ".f-young", "finished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.npy").touch()
    for path in (tmp_path / ".f-old", tmp_path / ".other-old", tmp_path / ".f-young", tmp_path / "finished"):
        os.utime(path, (0, 0))
    for name in (".f-old", ".other-old", "finished"):
        os.utime(tmp_path / name / "train.npy", (0, 0))
    with new_prepared_data(tmp_path / "f") as folder:
        folder.write_manifest(MANIFEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".f-young", "f", "finished"]


@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_prepared_data_follows_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with new_prepared_data(tmp_path / "f") as folder:
            folder.write_manifest(MANIFEST)
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.parametrize("name", ["tokens.u32", "documents.i64", "sources.u16", "packs.i64", "targets.i64"])
def test_an_emptied_file_of_prepared_data_is_refused(tmp_path: Path, name: str) -> None:
    document = Document(np.array([5, 6], np.int32), np.array([6, IGNORED], np.int32))
    (tmp_path / "f").mkdir()
    with PackWriter(tmp_path / "f" / "train") as writer:
        writer.write(DocumentBatch.of([document]), [1])
    (tmp_path / "f" / "train" / name).write_bytes(b"")
    with pytest.raises(DataError) as caught:
        PackStore(tmp_path / "f" / "train", 8)
    assert f"delete {tmp_path / 'f'}" in caught.value.fix
