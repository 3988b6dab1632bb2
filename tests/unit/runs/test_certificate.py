"""Certificates of exports that are exported again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ftkit.errors import TrainingError
from ftkit.files import write_json
from ftkit.runs.certificate import (
    CERTIFICATE,
    Check,
    EngineResult,
    keep_certificate,
    make_certificate,
    require_certificate,
    settle_certificate,
)

if TYPE_CHECKING:
    from pathlib import Path


def export(folder: Path, weights: str) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_text(weights)
    (folder / "README.md").write_text("# A model\n")
    return folder


def certify(folder: Path) -> None:
    result = EngineResult("vllm", "0.33", "auto (bf16)", ("--x",), (Check("prompts", "4|5 equal", passed=True),))
    write_json(folder / CERTIFICATE, make_certificate(folder, "demo", 9, "model", [result]))
    (folder / f"{CERTIFICATE}.sig").write_text("signature")


def test_the_same_export_again_has_its_certificate_as_a_table_in_the_model_card(tmp_path: Path) -> None:
    certify(first := export(tmp_path / "first", "w"))
    keep_certificate(first, again := export(tmp_path / "again", "w"))
    settle_certificate(again)
    assert (again / f"{CERTIFICATE}.sig").is_file()
    *_, row = (again / "README.md").read_text().splitlines()
    assert row == "| vllm 0.33 | auto (bf16) | --x | prompts: 4\\|5 equal | passed |"


def test_an_export_of_other_weights_loses_the_certificate(tmp_path: Path) -> None:
    certify(first := export(tmp_path / "first", "w"))
    keep_certificate(first, other := export(tmp_path / "other", "v"))
    settle_certificate(other)
    assert sorted(path.name for path in other.iterdir()) == ["README.md", "model.safetensors"]


def test_an_export_without_a_certificate_stays_as_it_is(tmp_path: Path) -> None:
    settle_certificate(folder := export(tmp_path / "first", "w"))
    assert (folder / "README.md").read_text() == "# A model\n"


@pytest.mark.parametrize("name", ["hf_quant_config.json", "chat_template.jinja", "model-2.safetensors"])
def test_a_file_added_after_certification_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.runs.certificate.verify_beside", lambda *_: None)
    certify(folder := export(tmp_path / "first", "w"))
    for unread in ("README.md", "loss.svg", ".gitattributes"):
        (folder / unread).write_text("written later")
    assert require_certificate(folder, tmp_path / "key.pub") == ["vllm 0.33"]
    (folder / name).write_text("{}")
    with pytest.raises(TrainingError, match=f"of these files: {name}"):
        require_certificate(folder, tmp_path / "key.pub")
