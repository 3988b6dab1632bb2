from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ftkit.data.encoding import IGNORED
from ftkit.data.store import DataManifest, PackStore, PreparedData, new_prepared_data
from ftkit.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = DataManifest("f", 4, 1, 1, 3, 2, 0, 0, 0, 3)


def test_packs_are_read_back_with_their_targets(tmp_path: Path) -> None:
    packs = np.zeros((2, 3, 4), np.int32)
    packs[:, 1] = [[IGNORED, 1, 2, IGNORED], [IGNORED] * 4]
    PackStore.write(tmp_path / "train.npy", packs)
    store = PackStore(tmp_path / "train.npy")
    assert np.array_equal(store.packs, packs)
    assert store.num_targets.tolist() == [2, 0]


def test_a_folder_takes_its_name_when_it_is_complete(tmp_path: Path) -> None:
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


def test_the_second_of_two_that_prepare_the_same_yields(tmp_path: Path) -> None:
    with new_prepared_data(tmp_path / "f") as slow:
        with new_prepared_data(tmp_path / "f") as quick:
            quick.write_manifest(MANIFEST)
        slow.write_manifest(DataManifest("other", 4, 1, 1, 3, 2, 0, 0, 0, 3))
    assert PreparedData(tmp_path / "f").read_manifest() == MANIFEST


def test_data_that_is_not_prepared_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        PreparedData(tmp_path).read_manifest()
    assert "delete" in caught.value.fix


def test_what_killed_preparations_left_is_removed_but_not_what_may_be_at_work(tmp_path: Path) -> None:
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
def test_prepared_data_has_the_modes_of_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with new_prepared_data(tmp_path / "f") as folder:
            folder.write_manifest(MANIFEST)
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o777 & ~umask
