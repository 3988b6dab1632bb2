from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ftkit.errors import NotFoundError
from ftkit.model_folder import CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX, check_folder

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_must_hold_a_configuration_and_weights(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    with pytest.raises(NotFoundError, match=f"there is no folder {folder} on"):
        check_folder(folder)
    folder.mkdir()
    with pytest.raises(NotFoundError, match=r"has no config\.json and no model\.safetensors or"):
        check_folder(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(NotFoundError, match=r"has no model\.safetensors or"):
        check_folder(folder)
    (folder / WEIGHTS_FILE).touch()
    check_folder(folder)
    (folder / WEIGHTS_INDEX).write_text("half of")
    with pytest.raises(NotFoundError, match="has no readable model"):
        check_folder(folder)
    places = {"one": "a.safetensors", "two": WEIGHTS_FILE}
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(NotFoundError, match=r"has no a\.safetensors"):
        check_folder(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"can't read .*config\.json: Expecting value"),
        (b'{"model_type": "lla', r"can't read .*config\.json: Unterminated string"),
        (b"\xff\xfe", r"can't read .*config\.json: 'utf-8' codec"),
        (b"[]", r"config\.json has no model_type"),
        (b'{"hidden_size": 32}', r"config\.json has no model_type"),
        (b'{"model_type": 3}', r"config\.json has no model_type"),
    ],
)
def test_a_configuration_that_is_broken_or_of_no_model_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_FILE).touch()
    (tmp_path / CONFIG_FILE).write_bytes(content)
    with pytest.raises(NotFoundError, match=message) as caught:
        check_folder(tmp_path)
    assert caught.value.fix
