from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftkit.data.packing import pack_at


@given(st.integers(1, 200), st.integers(0, 5), st.integers(0, 5))
def test_each_epoch_holds_each_pack_once(num_packs: int, seed: int, epoch: int) -> None:
    indices = range(epoch * num_packs, (epoch + 1) * num_packs)
    assert sorted(pack_at(index, num_packs, seed) for index in indices) == list(range(num_packs))


def test_the_order_differs_between_epochs_and_seeds() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [pack_at(epoch * 50 + position, 50, seed) for position in range(50)]

    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) == order(0, 0)


def test_the_order_is_the_same_on_every_machine() -> None:
    assert [pack_at(index, 6, 7) for index in range(8)] == [5, 2, 0, 4, 1, 3, 3, 0]
