"""One family per mechanism through the whole path: load, verify, train, adapt, quantize, export."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from family_matrix import try_family

from ftkit.train.private_apis.transformers import CONVERTS_WEIGHTS

if TYPE_CHECKING:
    from ftkit.train.world import World

pytestmark = [
    pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="families of transformers 5"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    # peft applies the ranks of experts' parameters, and yet warns.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]

PACKED = {
    "gemma3n_text": "square roots, with infinite gradients where the embedding of padding is zero",
    "gpt2": "matrices that its class stores transposed",
    "gpt_oss": "experts with biases, attention sinks, masks that its class builds without positions",
    "laguna": "biases of routers that its class keeps frozen",
    "llama4": "a decoder that `get_decoder` does not find",
    "mixtral": "experts that files have one by one",
    "modernbert-decoder": "layers between decoder and output projection",
    "olmo_hybrid": "layers of two classes, states along the row",
}
PADDED = {
    "biogpt": "an output projection of another name, tied to the embedding",
    "bloom": "no positions, attention of its own",
    "camembert": "an output projection that comes before the embedding that it is tied to",
    "kimi_linear": "states along the row, without a function for packs",
}


@pytest.mark.parametrize("family", [*PACKED, *PADDED])
def test_a_family_trains_and_is_exported(family: str, world: World) -> None:
    results = try_family(family, world, use_dora=family == "gpt2").results
    packed = results.pop("packed")
    assert (packed == "yes") == (family in PACKED), packed
    assert set(results.values()) == {"yes"}, results
