"""Locks: what the shipped ones have, and the environment in which they are resolved."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from ftkit import process
from ftkit.config.context import Context
from ftkit.config.load import find_image
from ftkit.errors import ImageError
from ftkit.images.build_context import read_lock, write_lock
from ftkit.images.inside import parse_pins

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("reference", ["olmo3:25.02", "gemma3:26.05", "gpt-oss:26.05"])
def test_images_that_train_have_the_package_that_reads_power_and_energy(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "nvidia-ml-py" in parse_pins(read_lock(find_image(reference, Context.here())))


def test_packages_beside_those_of_the_extended_definition_have_a_lock_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "containers" / "mine" / "1"
    folder.mkdir(parents=True)
    (folder / "image.yaml").write_text(
        'name: mine\ntag: "1"\nextends: ngc-26.05\ndescription: mine\nextra_packages: [sacrebleu==2.5.1]\n'
        "families: [olmo3]\ndefault_recipe: olmo3-7b-full\n"
    )
    definition = find_image("mine:1", Context.here())
    assert definition.lock_file == folder / "image.lock"
    assert {"sacrebleu", "transformers"} <= definition.spec.listed_packages


def test_scripts_of_peers_find_what_they_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"trl", "evaluate", "sentencepiece", "peft"} <= set(
        parse_pins(read_lock(find_image("peers:26.05", Context.here())))
    )


def test_packages_are_resolved_with_the_sites_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def resolve(*_: object, environment: dict[str, str], **__: Any) -> process.ProgramOutput:
        seen.update(environment)
        return process.ProgramOutput(1, "", "error: stopped")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("PIP_CERT", "/etc/site.pem")
    monkeypatch.setattr(process, "run", resolve)
    with pytest.raises(ImageError):
        write_lock(find_image("olmo3:25.02", Context.here()))
    assert seen["SSL_CERT_FILE"] == "/etc/site.pem"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.write_bytes(b"\xff")])
def test_a_lock_that_is_no_text_is_an_image_without_lock(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a.lock")
    with pytest.raises(ImageError, match="has no lock"):
        read_lock(find_image("olmo3:25.02", Context.here())._replace(lock_file=tmp_path / "a.lock"))
