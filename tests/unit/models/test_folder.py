from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ftkit.errors import NotFoundError
from ftkit.models.folder import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    check_adapters,
    check_folder,
    holds_adapters,
    read_model_config,
    read_processor,
)
from ftkit.models.weight_files import CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX, readable_tensors, tensors_of_model

NO_TENSORS = b"\x02\0\0\0\0\0\0\0{}"


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tensor.kind[1] for name, tensor in tensors_of_model(folder).items()}


def test_a_model_folder_must_contain_a_configuration_and_weights(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    with pytest.raises(NotFoundError, match=f"folder {folder} on"):
        check_folder(folder)
    folder.mkdir()
    with pytest.raises(NotFoundError, match=r"config\.json .* model\.safetensors"):
        check_folder(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(NotFoundError, match=r"no model\.safetensors"):
        check_folder(folder)
    (folder / WEIGHTS_FILE).write_bytes(NO_TENSORS)
    check_folder(folder)
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_INDEX).write_text("half of")
    with pytest.raises(NotFoundError, match="readable model"):
        check_folder(folder)
    places = {"one": "a.safetensors", "two": WEIGHTS_FILE}
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(NotFoundError, match=r"has no a\.safetensors"):
        check_folder(folder)


@pytest.mark.parametrize("file", ["pytorch_model_fsdp_0/.metadata", "zero_to_fp32.py"])
def test_shards_of_a_trainer_are_rejected_with_how_to_merge_them(file: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text('{"model_type": "llama"}')
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(NotFoundError) as caught:
        check_folder(tmp_path)
    assert "accelerate merge-weights" in caught.value.fix
    assert "zero_to_fp32.py" in caught.value.fix


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
    with pytest.raises(NotFoundError, match=r"'up\.weight' as I8"):
        check_folder(tmp_path)
    file.rename(tmp_path / "one.safetensors")
    index.write_text(json.dumps({"weight_map": {"up.weight": "one.safetensors", "down.weight": "one.safetensors"}}))
    with pytest.raises(NotFoundError, match=r"lists down\.weight"):
        check_folder(tmp_path)
    (tmp_path / "one.safetensors").rename(tmp_path / "pytorch_model.bin")
    index.unlink()
    with pytest.raises(NotFoundError, match=r"pytorch_model\.bin") as caught:
        check_folder(tmp_path)
    assert "save_pretrained" in str(caught.value.fix)
    with pytest.raises(NotFoundError, match=str(tmp_path / CONFIG_FILE)):
        check_folder(tmp_path / CONFIG_FILE)


def test_an_index_left_beside_one_file_has_no_effect_as_in_transformers(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text('{"model_type": "llama"}')
    (tmp_path / WEIGHTS_FILE).write_bytes(safetensors.numpy.save({"norm.weight": np.ones(3)}))
    (tmp_path / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": {"norm.weight": "model-1.safetensors"}}))
    check_folder(tmp_path)
    assert stored_shapes(tmp_path) == {"norm.weight": (3,)}
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(NotFoundError, match=r"has no model-1\.safetensors"):
        check_folder(tmp_path)


def test_the_header_of_a_weight_file_is_read_once_as_long_as_the_file_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real_open = os.open

    def count(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(Path(path).name)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", count)
    (tmp_path / CONFIG_FILE).write_text('{"model_type": "llama", "tie_word_embeddings": true}')
    file = tmp_path / WEIGHTS_FILE
    file.write_bytes(safetensors.numpy.save({"model.embed_tokens.weight": np.zeros((4, 2), np.float32)}))
    opened.clear()
    for _ in range(2):
        check_folder(tmp_path)
        read_model_config(tmp_path)
        assert stored_shapes(tmp_path) == {"model.embed_tokens.weight": (4, 2)}
        assert {tensor.kind[0] for tensor in readable_tensors(file).values()} == {"F32"}
    assert opened.count(WEIGHTS_FILE) == 1
    file.write_bytes(safetensors.numpy.save({"model.embed_tokens.weight": np.zeros((5, 2), np.float32)}))
    assert stored_shapes(tmp_path) == {"model.embed_tokens.weight": (5, 2)}


def test_a_model_in_gguf_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for place in (tmp_path / "model.gguf", tmp_path):
        with pytest.raises(NotFoundError, match=r"model\.gguf .*GGUF"):
            check_folder(place)


def test_a_file_that_belongs_to_no_model_suggests_no_folder(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_FILE).write_bytes(NO_TENSORS)
    with pytest.raises(NotFoundError) as caught:
        check_folder(tmp_path / WEIGHTS_FILE)
    assert "model.weights=" not in caught.value.fix
    (tmp_path / CONFIG_FILE).touch()
    with pytest.raises(NotFoundError, match=f"model.weights={tmp_path}$"):
        check_folder(tmp_path / WEIGHTS_FILE)


def test_the_output_folder_of_a_trainer_suggests_its_newest_checkpoint(tmp_path: Path) -> None:
    for name in ("checkpoint-90", "checkpoint-1000", "logs"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-90", "checkpoint-1000"):
        (tmp_path / name / ADAPTER_CONFIG).touch()
    with pytest.raises(NotFoundError, match="checkpoint-90, checkpoint-1000") as caught:
        check_folder(tmp_path)
    assert caught.value.fix.endswith(f"model.weights={tmp_path / 'checkpoint-1000'}")


def test_adapters_with_the_models_configuration_are_adapters_and_with_its_weights_ambiguous(tmp_path: Path) -> None:
    (tmp_path / ADAPTER_CONFIG).write_text("{}")
    (tmp_path / CONFIG_FILE).write_text('{"model_type": "llama"}')
    assert holds_adapters(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(NO_TENSORS)
    assert not holds_adapters(tmp_path)
    with pytest.raises(NotFoundError, match=r"\(adapter_config\.json\)"):
        check_folder(tmp_path)


def test_the_weights_of_adapters_must_be_complete_safetensors(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no adapter_model\.safetensors"):
        check_adapters(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(NotFoundError, match=r"adapter_model\.bin"):
        check_adapters(tmp_path)
    (tmp_path / ADAPTER_FILE).write_bytes(NO_TENSORS[:-1])
    with pytest.raises(NotFoundError, match=r"incomplete adapter_model\.safetensors"):
        check_adapters(tmp_path)
    (tmp_path / ADAPTER_FILE).write_bytes(NO_TENSORS)
    check_adapters(tmp_path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/model.safetensors", "a/../../b", "x" * 5000, "a\0b"])
def test_an_index_may_list_only_files_of_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text('{"model_type": "llama"}')
    (tmp_path / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(NotFoundError, match=re.escape(repr(name[:80]))):
        check_folder(tmp_path)


@pytest.mark.parametrize("header", ["[" * 50_000, '{"a": ' * 50_000, "1" * 100_000])
def test_a_header_that_no_program_writes_counts_as_damage(header: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text('{"model_type": "llama"}')
    (tmp_path / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(NotFoundError, match="incomplete"):
        check_folder(tmp_path)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX])
def test_a_pipe_in_a_model_folder_is_not_waited_for(name: str, tmp_path: Path) -> None:
    if name != CONFIG_FILE:
        (tmp_path / CONFIG_FILE).write_text('{"model_type": "llama"}')
    os.mkfifo(tmp_path / name)
    with pytest.raises(NotFoundError):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("part", "sizes"), [({"size": 4, "max_pixels": 8}, {"size": 2, "max_pixels": 8}), (None, {"size": 2})]
)
def test_a_processor_has_its_own_file_before_its_part_of_the_common_one(
    tmp_path: Path, part: object, sizes: dict[str, int]
) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": part}))
    (tmp_path / "preprocessor_config.json").write_text('{"size": 2}')
    assert read_processor(tmp_path) == sizes | {"image_processor": part}
