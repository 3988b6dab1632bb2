"""Output of image commands."""

from __future__ import annotations

import time
from io import StringIO

from rich.console import Console

from ftkit.cli.images import show
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.progress_view import ProgressView
from ftkit.config.image import BaseImageSpec, ImageSpec
from ftkit.config.image_reference import Digest
from ftkit.images.docker_engine import DockerImage
from ftkit.images.events import ProgressEvent
from ftkit.images.image_store import ImageStatus
from ftkit.images.squashfs import ImageConfig

SPEC = ImageSpec(
    name="olmo3",
    tag="25.02",
    description="OLMo 3 on a base",
    base=BaseImageSpec(reference="nvcr.io/nvidia/pytorch:25.02-py3"),
    families=("olmo3",),
    default_recipe="demo",
)


def screen(width: int) -> tuple[Terminal, StringIO]:
    """A terminal of a given width without colors, and its output."""
    terminal, output = Terminal(), StringIO()
    terminal.talk = terminal._out = Console(file=output, force_terminal=True, no_color=True, width=width, markup=False)
    return terminal, output


def test_the_place_of_an_imported_image_fits_80_columns() -> None:
    digest = Digest("sha256:" + "1" * 64)
    pushed = (("registry.example.com/team/olmo3", digest), ("127.0.0.1:5000/olmo3", digest))
    built = DockerImage(digest, 20 << 30, pushed, ImageConfig(created=int(time.time()) - 300))
    for width, has_description in ((80, False), (120, True)):
        terminal, output = screen(width)
        show([(SPEC, ImageStatus("olmo3:25.02", built, ()))], terminal)
        head, row = output.getvalue().splitlines()
        assert "IMPORTED" in head
        assert "20.0 GiB, 5 min ago" in row
        assert ("OLMo 3" in row) is has_description


def test_long_messages_keep_their_indentation() -> None:
    terminal, output = screen(40)
    with ProgressView(terminal) as view:
        view.report(ProgressEvent("pushing x", text="lost the connection to registry.example.com; trying again in 3 s"))
    said = [line for line in output.getvalue().splitlines() if "again" in line or "lost" in line]
    assert len(said) == 2
    assert all("  " in line[: line.index(word)] for line, word in zip(said, ("lost", "again"), strict=True))


def test_a_finished_item_is_no_longer_shown() -> None:
    terminal, _ = screen(80)
    with ProgressView(terminal) as view:
        view.report(ProgressEvent("pushing x", item="a1", text="a1 Pushing", done=1, total=2))
        view.report(ProgressEvent("pushing x", item="b2", text="b2 Mounted from y", is_over=True))
        assert list(view._tasks) == ["a1"]
        view.report(ProgressEvent("pushing x", item="a1", text="a1 Pushed", is_over=True))
        assert list(view._tasks) == []
