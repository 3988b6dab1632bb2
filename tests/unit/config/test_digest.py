"""The type of every digest."""

from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter, ValidationError

from ftkit.config.digest import Digest

GOOD = "sha256:" + "0123456789abcdef" * 4


def test_a_digest_is_its_text_and_a_file_name() -> None:
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
        "sha256:" + "٣" * 64,  # digits, but not these
        None,
        7,
        GOOD.encode(),
    ],
)
def test_anything_else_is_none(text: object) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        Digest(text)  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        TypeAdapter(Digest).validate_python(text)


def test_a_field_of_this_type_holds_one_and_is_written_as_text() -> None:
    adapter = TypeAdapter(dict[str, Digest])
    read = adapter.validate_json(json.dumps({"layer": GOOD}))
    assert type(read["layer"]) is Digest
    assert json.loads(adapter.dump_json(read)) == {"layer": GOOD}
    assert TypeAdapter(Digest).json_schema() == {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}
