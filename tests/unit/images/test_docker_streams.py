"""Messages of the docker engine, and the errors made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ftkit.config.image_reference import parse_reference
from ftkit.errors import ImageError
from ftkit.images.build import follow_build
from ftkit.images.docker_engine import image_config
from ftkit.images.oci.documents import RunConfig
from ftkit.images.transfer import transfer

if TYPE_CHECKING:
    from ftkit.images.events import ProgressEvent

DIGEST = "sha256:" + "d" * 64


def test_a_long_step_is_shortened_to_a_narrow_screen() -> None:
    seen: list[ProgressEvent] = []
    steps = [{"stream": "Step 8/13 : RUN python3 -m pip install " + "--option " * 20}, {"aux": {"ID": DIGEST}}]
    assert follow_build(steps, seen.append) == DIGEST
    assert len(seen[0].text) == 76
    assert seen[0].text.endswith("…")


def test_a_failed_step_is_shown_without_dockers_colors_and_blank_lines() -> None:
    events = [
        {"stream": "Step 3/13 : RUN python3"},
        {"stream": "\x1b[91m/bin/sh: 1: python3: not found\n\x1b[0m"},
        {"error": "The command returned a non-zero code: 127"},
    ]
    with pytest.raises(ImageError) as caught:
        follow_build(events, lambda _: None)
    assert caught.value.what.splitlines() == [
        "the build failed in Step 3/13 : RUN python3",
        "    /bin/sh: 1: python3: not found",
        "    The command returned a non-zero code: 127",
    ]


def test_only_layers_of_a_transfer_are_shown() -> None:
    seen: list[ProgressEvent] = []
    events = [
        {"status": "The push refers to repository [r.io/x]"},
        {"status": "Pushing", "id": "a1", "progressDetail": {"current": 1, "total": 2}},
        {"status": "Mounted from team/y", "id": "b2", "progressDetail": {}},
        {"status": "1: digest: sha256:d size: 3"},
        {"aux": {"Digest": DIGEST}},
    ]
    assert transfer(lambda **_: events, "pushing", seen.append, parse_reference("r.io/x:1"), None) == DIGEST
    assert [(progress.text, progress.is_over) for progress in seen] == [
        ("a1 Pushing", False),
        ("b2 Mounted from team/y", True),
    ]


@pytest.mark.parametrize("told", ["", "sha256:d", "../x", None, 7, {"a": 1}])
def test_an_invalid_digest_counts_as_missing(told: object) -> None:
    reference = parse_reference("r.io/x:1")
    assert transfer(lambda **_: [{"aux": {"Digest": told}}], "pushing", lambda _: None, reference, None) is None
    with pytest.raises(ImageError, match="without an image"):
        follow_build([{"aux": {"ID": told}}], lambda _: None)


@pytest.mark.parametrize(
    ("created", "seconds"),
    [
        ("1970-01-02T00:00:00Z", 86_400),
        ("1970-01-02T00:00:00.123456789Z", 86_400),
        ("1970-01-02T02:00:00+02:00", 86_400),
        ("1970-01-02T02:00:00.123456789+02:00", 86_400),
        ("1970-01-02T00:00:00", 86_400),
        ("0001-01-01T00:00:00Z", 0),
        ("9999-12-31T23:59:59Z", (1 << 32) - 1),
        ("yesterday", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_the_time_of_a_build_may_have_any_offset(created: object, seconds: int) -> None:
    assert image_config(RunConfig(), created).created == seconds
