"""The demo task: deterministic, with disjoint splits; on validation rows, only the correct query returns their rows."""

import hashlib
import json
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sql import DOMAINS, MATCH, SHAPES, WRONG_ROWS, Domain, Example, execution_match
from sql import generate as generate_rows


def generate(seed: int, num_train: int, num_heldout: int, **options: Any) -> tuple[list[Example], list[Example]]:
    train, heldout = generate_rows(seed, num_train, num_heldout, **options)
    return [Example(**row) for row in train], [Example(**row) for row in heldout]


def match(example: Example, sql: str) -> str:
    return execution_match(example.sql_context, example.sql_fixture, example.sql, sql)


@cache
def task() -> tuple[list[Example], list[Example]]:
    return generate(seed=0, num_train=100, num_heldout=300)


def examples() -> list[Example]:
    return [*task()[0], *task()[1]]


def outcomes(change: dict[str, str]) -> Counter[str]:
    """Score every reference whose text differs after a change."""
    pattern = re.compile("|".join(map(re.escape, change)))
    predictions = ((e, pattern.sub(lambda found: change[found[0]], e.sql)) for e in task()[1])
    return Counter(match(e, sql) for e, sql in predictions if sql != e.sql)


def test_the_task_has_the_requested_sizes() -> None:
    assert (len(task()[0]), len(task()[1])) == (100, 300)
    assert generate(seed=0, num_train=0, num_heldout=0) == ([], [])


def test_the_same_seed_gives_the_same_examples_on_every_machine() -> None:
    names = ("sql_prompt", "sql_context", "sql", "sql_fixture")
    text = json.dumps([{name: getattr(example, name) for name in names} for example in examples()])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "0c2f02c1c4459c7b"


def test_another_seed_gives_other_examples() -> None:
    assert not {*generate(seed=1, num_train=20, num_heldout=20)[0]} & {*task()[0]}


def test_the_validation_split_does_not_depend_on_the_size_of_the_training_split() -> None:
    assert generate(seed=0, num_train=1, num_heldout=300)[1] == task()[1]


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(), num_train=st.integers(0, 100), num_heldout=st.integers(0, 100))
def test_no_validation_schema_is_in_the_training_split(seed: int, num_train: int, num_heldout: int) -> None:
    train, heldout = generate(seed, num_train, num_heldout)
    assert not {e.sql_context for e in train} & {e.sql_context for e in heldout}


def test_no_pair_of_schema_and_question_is_repeated() -> None:
    pairs = [(e.sql_context, e.sql_prompt) for e in examples()]
    assert len(set(pairs)) == len(pairs)


def test_every_reference_returns_rows_and_matches_itself() -> None:
    for example in task()[1]:
        assert match(example, example.sql) == MATCH
        assert match(example, "SELECT 1 WHERE FALSE") != MATCH


def test_the_models_input_contains_no_table_rows() -> None:
    assert not any("INSERT" in example.sql_context for example in examples())


@pytest.mark.parametrize(
    "change",
    [
        {" > ": " < ", " < ": " > ", " >= ": " <= ", " <= ": " >= "},
        {"MAX(": "MIN(", "MIN(": "MAX("},
        {"AVG(": "SUM(", "SUM(": "AVG("},
        {"DISTINCT ": ""},
        {" DESC ": " ASC ", " ASC ": " DESC "},
        {" LIMIT 2": " LIMIT 3", " LIMIT 3": " LIMIT 4", " LIMIT 4": " LIMIT 5"},
    ],
)
def test_no_query_with_one_wrong_word_returns_the_same_rows(change: dict[str, str]) -> None:
    assert {*outcomes(change)} == {WRONG_ROWS}


def test_no_query_without_its_where_clause_returns_the_same_rows() -> None:
    filtered = [e for e in task()[1] if " WHERE " in e.sql]
    assert len(filtered) > len(task()[1]) / 3
    for example in filtered:
        unfiltered = re.sub(r" WHERE .*?(?= GROUP BY| ORDER BY|$)", "", example.sql)
        assert match(example, unfiltered) == WRONG_ROWS


def test_no_query_on_another_column_returns_the_same_rows() -> None:
    for example in task()[1]:
        columns = re.findall(r"(\w+) (TEXT|INTEGER)", example.sql_context)
        for asked, asked_type in columns:
            for other, other_type in columns:
                wrong = re.sub(rf"(SELECT (?:\w+\( )?){asked}\b", rf"\g<1>{other}", example.sql)
                if other != asked and other_type == asked_type and wrong != example.sql:
                    assert match(example, wrong) == WRONG_ROWS


def test_all_question_templates_occur_about_equally_often() -> None:
    features = (
        "WHERE",
        " AND ",
        "COUNT( * )",
        "AVG(",
        "SUM(",
        "MAX(",
        "MIN(",
        "GROUP BY",
        "ORDER BY",
        "DISTINCT",
    )
    shares = {feature: sum(feature in e.sql for e in examples()) / len(examples()) for feature in features}
    assert all(share > 0.03 for share in shares.values()), shares


def test_the_same_question_has_different_queries_on_different_schemas() -> None:
    queries: dict[str, set[str]] = {}
    for example in generate(seed=0, num_train=1000, num_heldout=0)[0]:
        queries.setdefault(example.sql_prompt, set()).add(example.sql)
    assert sum(len(q) > 1 for q in queries.values()) > 10


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda domain: domain.tables[0])
def test_no_two_columns_of_a_domain_share_a_name_or_a_phrase(domain: Domain) -> None:
    concepts = (domain.label, *domain.categories, *domain.quantities)
    for words in ([c.names for c in concepts], [c.phrases for c in concepts]):
        flat = [word for group in words for word in group]
        assert len(set(flat)) == len(flat)


def test_every_value_is_safe_inside_quotes() -> None:
    for domain in DOMAINS:
        for concept in (domain.label, *domain.categories):
            assert all(str(value).isalpha() for value in concept.values)


def test_every_template_mentions_what_it_asks_for() -> None:
    assert all("{things}" in template for shape in SHAPES for template in shape.templates)


def test_careless_queries_replace_some_and_pairs_return_other_rows() -> None:
    careless = generate(seed=0, num_train=100, num_heldout=300, careless=0.5)
    assert careless[1] == task()[1]
    changed = [one for one, right in zip(careless[0], task()[0], strict=True) if one.sql != right.sql]
    assert 5 < len(changed) < 40
    assert all(each.sql == each.careless_sql for each in changed)
    pairs, heldout = generate(seed=0, num_train=100, num_heldout=300, pairs=True)
    assert heldout == task()[1]
    assert {match(each, each.confused_sql) for each in pairs} == {WRONG_ROWS}
    assert 0 < sum(each.sql == each.careless_sql for each in pairs) < 100
