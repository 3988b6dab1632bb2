from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.numpy

from ftkit.errors import NotFoundError
from ftkit.model_folder import CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX, check_folder, read_model_config

if TYPE_CHECKING:
    from pathlib import Path


NO_TENSORS = b"\x02\0\0\0\0\0\0\0{}"


def test_a_model_folder_must_contain_a_configuration_and_weights(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    with pytest.raises(NotFoundError, match=f"there is no folder {folder} on"):
        check_folder(folder)
    folder.mkdir()
    with pytest.raises(NotFoundError, match=r"has no config\.json and no model\.safetensors or"):
        check_folder(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(NotFoundError, match=r"has no model\.safetensors or"):
        check_folder(folder)
    (folder / WEIGHTS_FILE).write_bytes(NO_TENSORS)
    check_folder(folder)
    (folder / WEIGHTS_INDEX).write_text("half of")
    with pytest.raises(NotFoundError, match="has no readable model"):
        check_folder(folder)
    places = {"one": "a.safetensors", "two": WEIGHTS_FILE}
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(NotFoundError, match=r"has no a\.safetensors"):
        check_folder(folder)


@pytest.mark.parametrize(
    ("file", "fix"),
    [
        ("pytorch_model_fsdp_0/.metadata", "accelerate merge-weights {0}/pytorch_model_fsdp_0 {0}"),
        ("zero_to_fp32.py", "python {0}/zero_to_fp32.py {0} {0} --safe_serialization"),
    ],
)
def test_shards_of_a_trainer_are_rejected_with_the_command_that_merges_them(
    file: str, fix: str, tmp_path: Path
) -> None:
    (tmp_path / CONFIG_FILE).write_text('{"model_type": "llama"}')
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(NotFoundError, match="in the shards of a trainer") as caught:
        check_folder(tmp_path)
    assert str(caught.value.fix).endswith(fix.format(tmp_path))


@pytest.mark.parametrize("names", [[WEIGHTS_FILE], ["a.safetensors", "b.safetensors"]])
def test_truncated_weights_are_rejected_wherever_they_end(names: list[str], tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text('{"model_type": "llama"}')
    if len(names) > 1:
        (tmp_path / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": dict(zip(["one", "two"], names, strict=True))}))
    whole = safetensors.numpy.save({"one": np.zeros(3), "two": np.ones((2, 2))}, {"format": "pt"})
    for name in names:
        (tmp_path / name).write_bytes(whole)
    check_folder(tmp_path)
    for damaged in (
        whole[:-1],
        whole[:20],
        whole[:4],
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        whole + b"1",
    ):
        (tmp_path / names[-1]).write_bytes(damaged)
        with pytest.raises(NotFoundError, match=f"has an incomplete {names[-1]}"):
            check_folder(tmp_path)


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
def test_an_invalid_configuration_is_reported(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_FILE).touch()
    (tmp_path / CONFIG_FILE).write_bytes(content)
    with pytest.raises(NotFoundError, match=message) as caught:
        check_folder(tmp_path)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("outer", "inner", "projection", "expected"),
    [
        (True, False, None, True),
        (False, True, None, True),
        (True, False, "own", False),
        (False, True, "own", False),
        (True, True, "own", False),
        (True, True, "copy", True),
        (None, True, None, True),
        (None, None, None, None),
        (None, None, "own", False),
        (False, None, "copy", False),
    ],
)
def test_the_files_decide_whether_embeddings_are_tied(
    outer: bool | None, inner: bool | None, projection: str | None, expected: bool | None, tmp_path: Path
) -> None:
    tie = "tie_word_embeddings"
    config = {
        "model_type": "mistral3",
        "text_config": {"model_type": "ministral3"} | ({} if inner is None else {tie: inner}),
    }
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | ({} if outer is None else {tie: outer})))
    embedding = np.arange(6.0).reshape(3, 2)
    tensors = {"language_model.model.embed_tokens.weight": embedding, "vision_tower.patch.weight": np.ones(2)}
    if projection is not None:
        tensors["language_model.lm_head.weight"] = embedding + (projection == "own")
    (tmp_path / WEIGHTS_FILE).write_bytes(safetensors.numpy.save(tensors))
    found = read_model_config(tmp_path)
    assert found.get(tie) == found["text_config"].get(tie) == expected


def test_missing_or_unexpectedly_quantized_weights_are_rejected(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text('{"model_type": "llama"}')
    file, index = tmp_path / WEIGHTS_FILE, tmp_path / WEIGHTS_INDEX
    weight = {"up.weight": np.ones((2, 2), np.int8)}
    file.write_bytes(safetensors.numpy.save(weight))
    with pytest.raises(NotFoundError, match=r"'up\.weight' as I8 without scales"):
        check_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"up.weight": WEIGHTS_FILE, "down.weight": WEIGHTS_FILE}}))
    with pytest.raises(NotFoundError, match=r"lists down\.weight, which its file lacks"):
        check_folder(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    index.unlink()
    with pytest.raises(NotFoundError, match=r"only as pytorch_model\.bin") as caught:
        check_folder(tmp_path)
    assert "save_pretrained" in str(caught.value.fix)
    with pytest.raises(NotFoundError, match="is a file"):
        check_folder(tmp_path / CONFIG_FILE)
