"""Image references and digests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from ftkit.config.image_reference import (
    AnyImage,
    Digest,
    ImageFile,
    NamedImage,
    RegistryImage,
    parse_image,
    parse_name,
    parse_reference,
)
from ftkit.errors import ConfigError

GOOD = "sha256:" + "0123456789abcdef" * 4


def test_a_digest_has_its_text_and_a_file_name() -> None:
    digest = Digest(GOOD)
    assert digest == GOOD
    assert json.dumps([digest]) == f'["{GOOD}"]'
    assert digest.file_name == GOOD.replace(":", "-")
    assert digest.hex == GOOD[7:]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sha256:",
        "../../.ssh/authorized_keys",
        "sha256:../../../../../../../../../../../../../../../../../../.bashrc",
        GOOD.upper(),
        "sha256:" + "A" * 64,
        GOOD + "\n",
        "\n" + GOOD,
        GOOD[:-1],
        GOOD + "0",
        "sha512:" + "a" * 128,
        "sha256:" + "a" * 63 + "/",
        "sha256:" + "٣" * 64,  # non-ASCII digits
        None,
        7,
        GOOD.encode(),
    ],
)
def test_invalid_digests_are_rejected(text: object) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        Digest(text)  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        TypeAdapter(Digest).validate_python(text)


def test_a_pydantic_field_validates_a_digest_and_serializes_it_as_text() -> None:
    adapter = TypeAdapter(dict[str, Digest])
    read = adapter.validate_json(json.dumps({"layer": GOOD}))
    assert type(read["layer"]) is Digest
    assert json.loads(adapter.dump_json(read)) == {"layer": GOOD}
    assert TypeAdapter(Digest).json_schema() == {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}


DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "whole", "uri"),
    [
        (
            "nvcr.io/nvidia/pytorch:25.02-py3",
            "nvcr.io/nvidia/pytorch:25.02-py3",
            "docker://nvcr.io#nvidia/pytorch:25.02-py3",
        ),
        ("docker://nvcr.io#nvidia/pytorch:1", "nvcr.io/nvidia/pytorch:1", "docker://nvcr.io#nvidia/pytorch:1"),
        ("docker://localhost:5000/a/b", "localhost:5000/a/b:latest", "docker://localhost:5000#a/b:latest"),
        ("ubuntu:24.04", "docker.io/library/ubuntu:24.04", "docker://registry-1.docker.io#library/ubuntu:24.04"),
        ("team/x", "docker.io/team/x:latest", "docker://registry-1.docker.io#team/x:latest"),
        ("index.docker.io/team/x:1", "docker.io/team/x:1", "docker://registry-1.docker.io#team/x:1"),
        (f"r.io/a/b:1@{DIGEST}", f"r.io/a/b:1@{DIGEST}", f"docker://r.io#a/b@{DIGEST}"),
    ],
)
def test_all_common_forms_of_a_reference_are_parsed(text: str, whole: str, uri: str) -> None:
    reference = parse_reference(text)
    assert (str(reference), reference.enroot_uri) == (whole, uri)


def test_a_digest_takes_precedence_over_a_tag() -> None:
    reference = parse_reference(f"r.io/a:1@{DIGEST}")
    assert reference.wanted == DIGEST
    assert reference.pinned == f"r.io/a@{DIGEST}"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("r.io/Team/x:1", "'Team/x'"),
        ("r.io/a b:1", "a b"),
        ("r.io/a\n:1", r"a\n"),
        ("r.io/", "'' is not"),
        ("r.io/a..b:1", "a..b"),
        ("r.io/a:-1", "a:-1"),
        ("r.io/a@sha256:12", "a@sha256:12"),
        ("r.io:65536/a:1", "'r.io:65536'"),
        ("docker://r.io:9999999#a:1", "'r.io:9999999'"),
        ("-r.io/a:1", "'-r.io'"),
    ],
)
def test_an_invalid_reference_is_rejected_with_the_wrong_part(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_reference(text)
    (problem,) = caught.value.problems
    assert wrong in problem.message.removeprefix(repr(text))


@pytest.mark.parametrize("name", ["olmo3:25.02", "a.b_c-d:V1.0_x-y", "0:_1", "a__b:1"])
def test_a_valid_name_is_accepted(name: str) -> None:
    parse_name(name)


@pytest.mark.parametrize("name", ["olmo3", "a/b:1", "A:1", "a:", ":1", "a:1:2", "a:1@" + DIGEST + "x", "-a:1", "a:.1"])
def test_an_invalid_name_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_name(name)


@pytest.mark.parametrize(
    ("text", "image"),
    [
        ("olmo3:25.02", NamedImage("olmo3:25.02")),
        ("foo.sif", ImageFile(Path("/here/foo.sif"))),
        ("./foo.sif", ImageFile(Path("/here/foo.sif"))),
        ("../images/foo.sqsh", ImageFile(Path("/images/foo.sqsh"))),
        ("images/foo.squashfs", ImageFile(Path("/here/images/foo.squashfs"))),
        ("/images/whatever", ImageFile(Path("/images/whatever"))),
        ("r.io/team/x:1", RegistryImage("r.io", "team/x", "1")),
        ("docker://r.io/team/x:1", RegistryImage("r.io", "team/x", "1")),
        ("docker://r.io#team/x:1", RegistryImage("r.io", "team/x", "1")),
        ("r.io#team/x:1", RegistryImage("r.io", "team/x", "1")),
    ],
)
def test_names_files_and_addresses_are_distinguished(text: str, image: AnyImage) -> None:
    assert parse_image(text, Path("/here")) == image
    assert parse_image(str(image), Path("/elsewhere")) == image


@pytest.mark.parametrize(
    "text", ["gs://bucket/x.sif", "dockerd://x:1", "~nobody-at-all/x.sif", "a" * 300 + ".sif", "a\0.sif"]
)
def test_an_image_that_no_runtime_supports_is_rejected_with_its_location(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_image(text, Path("/here"), "ftkit.yaml:3", "image")
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == ("ftkit.yaml:3", "image")
