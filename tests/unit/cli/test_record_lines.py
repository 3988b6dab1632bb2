"""Each kind of record can be printed: one that can't would end `ftkit run` while the run continues."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

import pytest

from ftkit.cli.terminal.record_lines import checks_text, record_line
from ftkit.runs import records

PLAIN = {str: "word", float: 0.5, int: 3, bool: True}


def value_of(kind: Any) -> Any:
    """Return a value of a field's type."""
    origin = getattr(kind, "__origin__", None)
    if hasattr(kind, "__metadata__"):
        return value_of(get_args(kind)[0])
    if kind in PLAIN:
        return PLAIN[kind]
    if str(origin).endswith("Literal"):
        return get_args(kind)[0]
    return {dict: {}, tuple: ()}.get(origin)


@pytest.mark.parametrize("kind", get_args(records.Record))
def test_each_kind_of_record_can_be_printed(kind: type[Any]) -> None:
    types = get_type_hints(kind, vars(records))
    required = [field.name for field in fields(kind) if field.default is field.default_factory is MISSING]
    line = record_line(kind(**{name: value_of(types[name]) for name in required}))
    assert line
    assert "\n" not in line


def test_checks_are_printed_in_words_and_unknown_ones_as_they_are() -> None:
    checks = {"units": "3", "sharded layers": "2", "layers with checkpointing 'none'": "2", "quantized parameters": "0"}
    checks |= {"documents are": "packed", "documents isolated": "difference 0, gradient 0", "parameters": "363,040"}
    assert checks_text(checks) == (
        "363,040 parameters, 3 sharded units, 2 of them decoder layers, documents are packed, they do not attend to "
        "each other (difference 0, gradient 0), 2 layers with checkpointing 'none'"
    )
    ones = {"units": "1", "layers with checkpointing 'full'": "1", "fewest targets in a pack": "1"}
    assert checks_text(ones) == "1 sharded unit, at least 1 target in each pack, 1 layer with checkpointing 'full'"
