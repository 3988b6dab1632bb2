import base64
import io

from PIL import Image
from reading import SIDE, generate


def test_pictures_of_numbers_are_the_same_for_a_seed_and_none_occurs_twice() -> None:
    train, heldout = generate(1, 200, 50)
    assert (train, heldout) == generate(1, 200, 50)
    assert generate(1, 10, 50)[1] == heldout
    pictures = [row["image"] for row in (*train, *heldout)]
    assert len(set(pictures)) == 250
    for row in heldout:
        image = Image.open(io.BytesIO(base64.b64decode(row["image"].partition(",")[2])))
        assert (image.size, image.mode) == ((SIDE, SIDE), "RGB")
        assert 10 <= int(row["answer"]) < 100
        assert min(image.convert("L").tobytes()) < 110  # a dark digit on a light ground
