"""`ftkit verify`: verify an imported image against its manifest, or an export against the trained model."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import complete_image, current_workspace, image_store, json_option, require_signature_option
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import gib, short_path

if TYPE_CHECKING:
    from ftkit.config.image_reference import AnyImage
    from ftkit.evaluate.vllm import EngineName


@click.command(
    "verify",
    cls=ExamplesCommand,
    short_help="Verify an imported image, or an export.",
    examples=("ftkit verify olmo3:25.02", "ftkit verify /shared/images/olmo3+25.02.sqsh --deep",
              "ftkit verify ./my-model --engine transformers"),
)  # fmt: skip
@click.argument("wanted", metavar="NAME:TAG|FILE|URI|DIR", shell_complete=complete_image)
@click.option("--deep", is_flag=True, help="An image: also run the self-check inside it.")
@require_signature_option("a file")
@click.option(
    "--engine", type=click.Choice(["auto", "transformers", "vllm"]), default="auto",
    help="An export: with vllm, also load it with vLLM's engine; auto, the default, does so on GPUs where it is "
    "installed.",
)  # fmt: skip
@json_option
def command(wanted: str, *, deep: bool, public_key: Path | None, engine: EngineName, as_json: bool) -> None:
    """Verify an imported image, or DIR, an export. Lists every difference.

    Of an image, the digests are computed again and compared with its manifest (exit code 10). An export is loaded with
    transformers (and peft), and compared with the record that 'ftkit export' wrote: its logits equal the trained
    model's and differ from the base model's, generation stops at each end token, and the chat template renders as in
    training (exit code 9).
    """
    if Path(wanted).is_dir():
        _verify_export(Path(wanted).resolve(), engine, as_json=as_json)
    else:
        _verify_image(wanted, public_key, deep=deep, as_json=as_json)


def _verify_image(wanted: str, public_key: Path | None, *, deep: bool, as_json: bool) -> None:
    from ftkit.cli.terminal.progress_view import ProgressView
    from ftkit.config.image_reference import ImageFile, parse_image
    from ftkit.images.signatures import require_beside
    from ftkit.images.verify import require_intact, verify, verify_inside

    terminal = Terminal()
    image = parse_image(wanted, Path.cwd(), key="NAME:TAG|FILE|URI|DIR")
    file = _file(image)
    with ProgressView(terminal) as view:
        if public_key:
            require_beside(file, public_key)
        result = verify(file, view.report, name="NAME:TAG" if isinstance(image, ImageFile) else wanted)
        require_intact(result)
        left = verify_inside(file, result.manifest, view.report) if deep else ""
    manifest = result.manifest
    facts = {
        "file": str(file),
        "image": f"{manifest.reference}, {manifest.image_id}",
        "sha256": manifest.sha256,
        "size": gib(manifest.size / 2**30),
        "from": manifest.source,
    }
    if as_json:
        terminal.json({**facts, "size": manifest.size, "signed_by": str(public_key) if public_key else None})
    else:
        terminal.facts(tuple(facts.items()), is_data=True)
    terminal.say(Styled("the file matches its manifest", "green"))
    if public_key:
        terminal.say(Styled(f"the manifest is signed, by {short_path(public_key)}", "green"))
    if left:
        terminal.say(left)


def _verify_export(folder: Path, engine: EngineName, *, as_json: bool) -> None:
    os.environ.setdefault("HF_HOME", str(current_workspace().hub_home))
    from ftkit.data.imports import import_transformers

    import_transformers()
    from transformers.utils import logging

    from ftkit.evaluate.source import ModelFolder
    from ftkit.evaluate.verify_export import read_record, require_passed, verify_export
    from ftkit.evaluate.vllm import takes_vllm

    logging.disable_progress_bar()
    terminal = Terminal()
    has_vllm = takes_vllm(ModelFolder(folder, str(folder)), engine)  # report a missing vLLM before a model is loaded
    checks = verify_export(folder, terminal.say)
    if has_vllm:
        from ftkit.evaluate.verify_vllm import verify_with_vllm

        terminal.say("loading the model with vLLM")
        checks += verify_with_vllm(folder, read_record(folder))
    if as_json:
        terminal.json([asdict(check) for check in checks])
    else:
        facts = [(check.name, check.found if check.passed else Styled(check.found, "red")) for check in checks]
        terminal.facts(facts, is_data=True)
    require_passed(folder, checks)


def _file(image: AnyImage) -> Path:
    from ftkit.config.image_reference import ImageFile, RegistryImage, parse_name

    if isinstance(image, ImageFile):
        return image.path
    named = parse_name((image.named if isinstance(image, RegistryImage) else image).reference)
    store = image_store()
    sqsh, sif = store.link(named.reference, "sqsh"), store.link(named.reference, "sif")
    return sif if sif.exists() and not sqsh.exists() else sqsh
