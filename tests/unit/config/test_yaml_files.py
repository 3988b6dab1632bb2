"""Any input yields values or a ConfigError in bounded time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftkit.config.yaml_files import MAX_BYTES, MAX_VALUES, parse_bytes, parse_override, parse_yaml, read_yaml
from ftkit.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 30))
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 30))
DEEP = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 40))

REFUSED = {
    "a control character": ("a: 1\nb: \x07\n", 2),
    "NUL byte": ('a: "\\0"\n', 1),
    "half a character": ('a: "\\ud800"\n', 1),
    "an escape beyond Unicode": ('\na: "\\UFFFFFFFF"\n', 2),
    "a number of 4,300 digits": ("a: 1\nb: " + "9" * 4301, 2),
    "a tag": ("a: !!int x\n", 1),
    "a tag of a program": ("a: !!python/object:os.system [x]\n", 1),
    "a tag of a list": ("a: !!set {x, y}\n", 1),
    "an anchor that merges itself": ("a: &a\n  <<: *a\n", 2),
    "an anchor in itself": ("a: &a [*a]\n", 1),
    "an alias of nothing": ("a: *b\n", 1),
    "an anchor that is used again in itself": ("a: &a 1\nb: &a [*a]\n", 2),
    "a merge of a word": ("a: {<<: b}\n", 1),
    "an alias bomb": (BOMB, 10),
    "a merge bomb": (MERGE_BOMB, 10),
    "aliases of aliases of aliases": (DEEP, 32),
    "1,000 brackets": ("a: " + "[" * 1000, 1),
    "100,000 brackets": ("a: " + "[{" * 50_000, 1),
    "1,000 dashes": ("a:\n" + "- " * 1000, 2),
    "1,000 indentations": ("".join(f"{' ' * n}a:\n" for n in range(500)), 33),
    "too many keys": ("".join(f"k{n}: 1\n" for n in range(MAX_VALUES + 1)), MAX_VALUES),
    "a large comment": ("#" + "x" * 10_000_000, 1),
    "a second document": ("a: 1\n---\nb: 1\n", 2),
    "a key twice": ("a: 1\nb: 1\na: 2\n", 3),
    "a list as a key": ("? [a]\n: 1\n", 1),
    "a key without a name": (": 1\n", 1),
    "a key that moves the cursor": ('"\\e[2J": 1\n', 1),
    "a long key": (f"? {'k' * 2000}\n: 1\n", 1),
    "a list at the top": ("- 1\n", 1),
    "an open bracket": ("a: [1\n", 2),
}


@pytest.mark.parametrize(("text", "line"), REFUSED.values(), ids=REFUSED)
def test_hostile_yaml_is_rejected_with_file_and_line(text: str, line: int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text.encode(), "bad.yaml")
    (problem,) = caught.value.problems
    assert problem.where == f"bad.yaml:{line}"
    assert len(str(problem)) < 400
    assert str(problem).isprintable()


@pytest.mark.parametrize("data", [b"a: 1\nb: \xff\n", "a: 1\nb: ü\n".encode("latin-1"), "a: 1\n".encode("utf-16")])
def test_text_in_another_encoding_is_rejected(data: bytes) -> None:
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        parse_bytes(data, "bad.yaml")


def test_a_byte_order_mark_is_not_part_of_the_first_key() -> None:
    assert parse_bytes(b"\xef\xbb\xbfa: 1\n", "f").values == {"a": 1}


def test_only_the_beginning_of_an_oversized_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(10 * 2**30)  # sparse: reading it would take all memory
    with pytest.raises(ConfigError, match=f"larger than {MAX_BYTES // 1024} KiB"):
        read_yaml(path)


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=str(tmp_path)):
        read_yaml(tmp_path)


def test_anchors_and_merge_keys_keep_the_lines_of_values() -> None:
    text = (
        "base: &base\n  x: 1\n  y: 2\nother: &other {y: 5, z: 6}\nmine:\n  <<: [*base, *other]\n  x: 3\nsame: *base\n"
    )
    layers = parse_yaml(text, "f")
    assert layers.values["mine"] == {"x": 3, "y": 2, "z": 6}
    assert layers.values["same"] == {"x": 1, "y": 2}
    assert [layers.origin(("mine", key)) for key in "xyz"] == ["f:7", "f:3", "f:4"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ("~", None), ("True", True), ("no", "no"), ("0x1f", 31), ("0o17", 15), ("-3", -3), ("+7", 7),
        ("007", 7), ("1e-5", 1e-5), ("1.", 1.0), (".5", 0.5), ("-.inf", float("-inf")), ("2026-01-02", "2026-01-02"),
        ("12:00:00", "12:00:00"), ("1_000", "1_000"), ("!!str 5", "5"), ("! 5", "5"), ("'5'", "5"),
        ("9" * 18, 10**18 - 1),
    ],
)  # fmt: skip
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    found = parse_yaml(f"a: {text}\n", "f").values["a"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("Question: {q}", "Question: {q}"), ("a #b", "a #b"), ("*x", "*x"), ("&x", "&x"), ("!x", "!x"), ("- x", "- x"),
        ("line\nline", "line\nline"), ("'1'", "1"), ('"a\\tb"', "a\tb"), ("[a, {b: 1}]", ["a", {"b": 1}]), ("", None),
        ("~/data", "~/data"), ("%x", "%x"), ("@x", "@x"), ("|", "|"), ("a: b", "a: b"), (" 5 ", 5),
    ],
)  # fmt: skip
def test_an_overrides_value_is_text_unless_it_starts_a_list_a_mapping_or_a_quote(typed: str, value: object) -> None:
    assert parse_override(f"a={value if typed is None else typed}").values == {"a": value}


@pytest.mark.parametrize(
    "typed",
    ["a=[", "a='", "a={b", "a=" + "9" * 5000, "a=\udcff", "a=\0", "a=" + "[" * 1000, "a." * 100 + "b=1", "\x1b=1"],
)
def test_an_invalid_override_is_rejected_in_one_printable_line(typed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_override(typed)
    (problem,) = caught.value.problems
    assert problem.where.startswith("command line")
    assert len(str(problem)) < 600


def outcome(data: bytes) -> Any:
    try:
        return parse_bytes(data, "f").values
    except ConfigError as error:
        (problem,) = error.problems
        assert problem.where.startswith("f:")
        assert problem.message
        return error


PIECES = st.sampled_from(
    [
        "a: ", "b: ", "- ", "? ", ": ", "[", "]", "{", "}", ", ", "&x ", "*x", "<<: ", "!!int ", "! ", "|\n", ">-\n",
        "'", '"', "\\U", "\\u", "\\x", "#", "---\n", "...\n", "%YAML 1.2\n", "%TAG ! x\n", "\n", "\n  ", "\t", "1",
        "e5", ".inf", "~", "\0", "\x07", "\ufeff", "\u2028", "\x85", "é", "word",
    ]
)  # fmt: skip


@given(st.binary(max_size=200) | st.lists(PIECES, max_size=40).map("".join).map(str.encode))
@example(b"a: \xef\xbb\xbf")
def test_any_bytes_yield_values_or_an_error_with_a_location(data: bytes) -> None:
    outcome(data)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.text(st.characters(exclude_categories=["C"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), plain, max_size=4))
def test_json_is_yaml(values: dict[str, Any]) -> None:
    assert outcome(json.dumps(values, ensure_ascii=False).encode()) == values
