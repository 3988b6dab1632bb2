from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.config.layers import Layers
from ftkit.config.yaml_files import parse_override, parse_yaml
from ftkit.errors import ConfigError

scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)


def test_scalars_follow_yaml_1_2() -> None:
    values = parse_yaml("rate: 1e-5\nanswer: no\nswitch: true\nnone: null\ntext: '1'\n", "f").values
    assert values == {"rate": 1e-5, "answer": "no", "switch": True, "none": None, "text": "1"}


def test_each_key_remembers_its_line() -> None:
    layers = parse_yaml("a: 1\nb:\n  c: 2\n  d: [1, 2]\n", "file.yaml")
    assert layers.origin(("a",)) == "file.yaml:1"
    assert layers.origin(("b", "d")) == "file.yaml:4"
    assert layers.origin(("b", "unknown")) == "file.yaml:2"


@pytest.mark.parametrize("text", ["a: 1\na: 2\n", "a: [1\n", "- 1\n", "a: b: c\n"])
def test_duplicate_or_non_mapping_yaml_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "file.yaml")
    assert caught.value.problems[0].where.startswith("file.yaml")


def test_an_empty_file_has_no_values() -> None:
    assert parse_yaml("# only a comment\n", "f").values == {}


def test_mappings_merge_and_lists_replace() -> None:
    below = parse_yaml("a: {x: 1, y: 2}\nb: [1, 2]\n", "below")
    above = parse_yaml("a: {y: 3}\nb: [4]\n", "above")
    merged = above.over(below)
    assert merged.values == {"a": {"x": 1, "y": 3}, "b": [4]}
    assert (merged.origin(("a", "x")), merged.origin(("a", "y"))) == ("below:1", "above:1")


def test_a_mapping_with_another_kind_replaces_the_previous_one() -> None:
    below = parse_yaml("source: {kind: hub, dataset: a, split: b}\n", "below")
    above = parse_yaml("source: {kind: files, train: c}\n", "above")
    assert above.over(below).values["source"] == {"kind": "files", "train": "c"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("a.b=1e-5", 1e-5), ("a.b=true", True), ("a.b=null", None), ("a.b=[1, x]", [1, "x"]), ("a.b=x=y", "x=y")],
)
def test_an_override_is_a_path_and_a_yaml_value(text: str, value: object) -> None:
    assert parse_override(text).values == {"a": {"b": value}}


@pytest.mark.parametrize("text", ["=1", "a..b=1", ".a=1"])
def test_an_override_without_a_path_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_override(text)


@given(st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), scalars, max_size=5))
def test_merging_with_an_empty_mapping_changes_nothing(values: dict[str, object]) -> None:
    layers = Layers(values, {})
    assert layers.over(Layers()).values == values
    assert Layers().over(layers).values == values


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=30))
def test_any_printable_value_is_parsed_or_rejected_without_a_crash(value: str) -> None:
    try:
        parse_override(f"a={value}")
    except ConfigError as error:
        assert error.problems  # noqa: PT017
