from __future__ import annotations

import numpy as np
import pytest

from ftkit.data.pictures import from_record, to_record


def test_a_record_has_the_arrays_of_all_types_and_shapes() -> None:
    arrays = {
        "pixel_values": np.arange(30, dtype=np.uint8).reshape(2, 3, 5),
        "image_grid_thw": np.array([[1, 2, 3]]),
        "mask": np.zeros((0, 4), bool),
        "big-endian": np.array([1.5, 2], ">f4"),
        "scalar": np.array(7, np.int32),
    }
    record = to_record(arrays)
    found = from_record(record)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        assert found[name].dtype == array.dtype.newbyteorder("<")
        assert np.array_equal(found[name], array)
    with pytest.raises(ValueError, match="read-only"):
        found["scalar"][...] = 1
    aligned = from_record(memoryview(bytes(8) + record)[8:])
    assert all(array.ctypes.data % 8 == 0 for array in aligned.values())
