from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from ftkit.data.encoding import IGNORED
from ftkit.data.store import DataManifest, PackStore, PreparedData, building
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
    with building(final) as folder:
        assert not final.exists()
        folder.write_manifest(MANIFEST)
    assert PreparedData(final).read_manifest() == MANIFEST
    assert [path.name for path in final.parent.iterdir()] == ["f"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), building(tmp_path / "f"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_second_of_two_that_prepare_the_same_yields(tmp_path: Path) -> None:
    with building(tmp_path / "f") as slow:
        with building(tmp_path / "f") as quick:
            quick.write_manifest(MANIFEST)
        slow.write_manifest(DataManifest("other", 4, 1, 1, 3, 2, 0, 0, 0, 3))
    assert PreparedData(tmp_path / "f").read_manifest() == MANIFEST


def test_data_that_is_not_prepared_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        PreparedData(tmp_path).read_manifest()
    assert "delete" in caught.value.fix
