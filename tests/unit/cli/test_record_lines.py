"""Each kind of record can be printed: one that can't would end `ftkit run` while the run continues."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

import pytest

from ftkit.cli.terminal.record_lines import checks_text, pair_texts, record_line
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


@pytest.mark.parametrize("kind", records.Record.__subclasses__())
def test_each_kind_of_record_can_be_printed(kind: type[Any]) -> None:
    types = get_type_hints(kind, vars(records))
    required = [field.name for field in fields(kind) if field.default is field.default_factory is MISSING]
    line = record_line(kind(**{name: value_of(types[name]) for name in required}))
    assert line
    assert "\n" not in line


def checks(**given: int | str) -> str:
    return checks_text(records.VerificationRecord(0.0, {name.replace("_", " "): each for name, each in given.items()}))


def test_checks_are_printed_in_words_and_unknown_ones_as_they_are() -> None:
    recomputed = {"layers with checkpointing 'full'": 2, "layers with checkpointing 'selective'": 78}
    assert checks(
        units=3, sharded_layers=2, **recomputed, offloaded_layers=42, quantized_parameters=0, parameters=363040,
        documents_are="packed", documents_isolated="difference 0, gradient 0", novelties=7,
    ) == (
        "363,040 parameters, 3 sharded units, 2 of them decoder layers, 78 layers with checkpointing 'selective', 2 "
        "layers with checkpointing 'full', 42 layers with activations in host memory, documents are packed, they do "
        "not attend to each other (difference 0, gradient 0), 7 novelties"
    )  # fmt: skip
    assert checks(units=1, **{"layers with checkpointing 'full'": 1}, fewest_targets_in_a_pack=1) == (
        "1 sharded unit, 1 layer with checkpointing 'full', at least 1 target in each pack"
    )


def test_accuracy_is_left_out_while_all_margins_are_zero() -> None:
    untrained = {"accuracy": 0.0, "margin": 0.0, "log_prob_chosen": -18.0, "log_prob_rejected": -30.0}
    assert not [text for text in pair_texts(untrained) if text.startswith("accuracy")]
    for known in (untrained | {"margin": -0.5}, {key: untrained[key] for key in untrained if key != "margin"}):
        assert pair_texts(known)[0] == "accuracy 0%"


def test_the_reference_point_of_kto_is_told_from_the_divergence() -> None:
    texts = pair_texts({"accuracy": 1.0, "log_prob_chosen": -18.0, "kl_per_token": 0.262, "kl": 0.0})
    assert texts[-2:] == ["log-ratio per token 0.262", "reference point 0"]
