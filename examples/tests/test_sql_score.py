"""Scoring SQL by execution: what matches, what does not, and what must not run."""

import tracemalloc
from itertools import count
from pathlib import Path

import pytest
import sql as task
from hypothesis import given, settings
from hypothesis import strategies as st
from sql import MATCH, MAX_RESULT_BYTES, PREDICTION_FAILED, REFERENCE_FAILED, WRONG_ROWS, execution_match, sql

CONTEXT = "CREATE TABLE cars (model TEXT, price INTEGER, weight REAL);"
FIXTURE = "INSERT INTO cars VALUES ('Nova', 30, 0.1), ('Echo', 10, 0.2), ('Delta', 20, 0.3), ('Echo', 40, NULL);"


def score(predicted_sql: str, reference_sql: str = "SELECT model FROM cars WHERE price > 15") -> str:
    return execution_match(CONTEXT, FIXTURE, reference_sql, predicted_sql)


def test_the_reference_itself_matches() -> None:
    assert score("SELECT model FROM cars WHERE price > 15") == MATCH


@pytest.mark.parametrize(
    "predicted_sql",
    [
        "select MODEL from CARS where 15 < price;",
        "SELECT c.model FROM cars AS c WHERE NOT c.price <= 15",
        "WITH dear AS (SELECT * FROM cars WHERE price > 15) SELECT model FROM dear",
        "SELECT model FROM cars WHERE price > 15 ORDER BY price DESC -- another order",
    ],
)
def test_a_different_query_with_the_same_rows_matches(predicted_sql: str) -> None:
    assert score(predicted_sql) == MATCH


@pytest.mark.parametrize(
    "predicted_sql",
    [
        "SELECT model FROM cars",
        "SELECT price FROM cars WHERE price > 15",
        "SELECT model, price FROM cars WHERE price > 15",
        "SELECT model FROM cars WHERE price > 1500",
    ],
)
def test_a_prediction_with_other_rows_does_not_match(predicted_sql: str) -> None:
    assert score(predicted_sql) == WRONG_ROWS


def test_a_row_returned_once_does_not_match_the_same_row_twice() -> None:
    reference = "SELECT model FROM cars WHERE model = 'Echo'"
    assert score("SELECT DISTINCT model FROM cars WHERE model = 'Echo'", reference) == WRONG_ROWS


def test_the_order_of_rows_counts_if_the_reference_has_order_by() -> None:
    reference = "SELECT model FROM cars ORDER BY price"
    assert score("SELECT model FROM cars ORDER BY price ASC", reference) == MATCH
    assert score("SELECT model FROM cars ORDER BY price DESC", reference) != MATCH


@pytest.mark.parametrize(
    "reference_sql",
    [
        "SELECT model FROM cars WHERE model <> 'order by'",
        "SELECT model FROM (SELECT model FROM cars ORDER BY price LIMIT 4)",
        "SELECT model FROM cars WHERE price IN (SELECT max(price) OVER (ORDER BY (price)) FROM cars)",
    ],
)
def test_order_by_in_strings_and_subqueries_does_not_count(reference_sql: str) -> None:
    assert score("SELECT model FROM cars ORDER BY price DESC", reference_sql) == MATCH


def test_sums_that_differ_in_their_last_digits_match() -> None:
    assert score("SELECT 0.2 + 0.1", "SELECT 0.3") == MATCH
    assert score("SELECT 0.3001", "SELECT 0.3") != MATCH


def test_an_integer_matches_the_same_number_as_a_float_but_not_as_a_text() -> None:
    assert score("SELECT 20", "SELECT avg(price) FROM cars WHERE price = 20") == MATCH
    assert score("SELECT '20'", "SELECT 20") != MATCH


def test_null_matches_null_only() -> None:
    reference = "SELECT weight FROM cars WHERE price = 40"
    assert score("SELECT NULL", reference) == MATCH
    assert score("SELECT 0", reference) != MATCH


@pytest.mark.parametrize(
    "predicted_sql",
    [
        "",
        "  ;",
        "-- nothing",
        "SELECT",
        "SELECT model FROM trucks",
        "I would select the model.",
        "SELECT ?",
        "SELECT '\0'",
    ],
)
def test_malformed_sql_fails_without_an_exception(predicted_sql: str) -> None:
    assert score(predicted_sql) == PREDICTION_FAILED


@pytest.mark.parametrize(
    "predicted_sql",
    [
        "DELETE FROM cars",
        "DROP TABLE cars",
        "INSERT INTO cars SELECT * FROM cars RETURNING model",
        "CREATE TABLE trucks AS SELECT 1",
        "PRAGMA table_info(cars)",
        "ATTACH ':memory:' AS other",
        "VACUUM",
        "BEGIN",
        "SELECT model FROM cars WHERE price > 15; DROP TABLE cars",
        "SELECT model FROM cars; SELECT model FROM cars WHERE price > 15",
    ],
)
def test_only_a_single_read_only_select_may_run(predicted_sql: str) -> None:
    assert score(predicted_sql) == PREDICTION_FAILED


@pytest.mark.parametrize(
    "predicted_sql",
    [
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
        "SELECT hex(zeroblob(1000000000))",
    ],
)
def test_a_prediction_that_never_ends_or_exhausts_memory_is_stopped(predicted_sql: str) -> None:
    assert score(predicted_sql) == PREDICTION_FAILED


def test_a_context_with_its_own_rows_needs_no_fixture() -> None:
    found = [execution_match(f"{CONTEXT} {FIXTURE}", "", "SELECT COUNT(*) FROM cars", f"SELECT {n}") for n in (4, 0)]
    assert found == [MATCH, WRONG_ROWS]


@pytest.mark.parametrize("context", ["CREATE TABLE t (a SERIAL[]) ENGINE=X;", "no SQL at all", ""])
def test_an_example_unsupported_by_sqlite_is_distinguished_from_a_wrong_prediction(context: str) -> None:
    assert execution_match(context, "", "SELECT COUNT(*) FROM t", "SELECT 0") == REFERENCE_FAILED


@pytest.mark.parametrize("statement", ["ATTACH '{}' AS other", "VACUUM INTO '{}'"])
def test_a_context_cannot_access_files(statement: str, tmp_path: Path) -> None:
    context = f"{CONTEXT} {statement.format(tmp_path / 'file.db')};"
    assert execution_match(context, "", "SELECT 1", "SELECT 1") == REFERENCE_FAILED
    assert not list(tmp_path.iterdir())


def test_a_fixture_is_a_separate_statement_even_if_the_context_lacks_a_semicolon() -> None:
    context, fixture = "CREATE TABLE t (a INTEGER)", "INSERT INTO t VALUES (7)"
    assert execution_match(context, fixture, "SELECT a FROM t", "SELECT 7") == MATCH


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_arbitrary_text_does_not_raise(predicted_sql: str) -> None:
    assert isinstance(score(predicted_sql), str)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.sampled_from(["SELECT", "model", "price", "FROM", "cars", "WHERE", "(", ")", ",", "=", "'x'", "*", "1"])
    )
)
def test_arbitrary_sequences_of_sql_keywords_do_not_raise(words: list[str]) -> None:
    assert isinstance(score(" ".join(words)), str)


def from_numbers(select: str, condition: str = "") -> str:
    clauses = ["WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)", select, "FROM n", condition]
    return " ".join(clauses)


def columns(count: int) -> str:
    return "SELECT " + ", ".join(["zeroblob(9999)"] * count)


@pytest.mark.parametrize(
    "predicted_sql",
    [
        from_numbers("SELECT zeroblob(999999)"),
        from_numbers(columns(200)),
        from_numbers("SELECT hex(zeroblob(4000)) || i", "ORDER BY 1"),
        from_numbers("SELECT i", "LIMIT 20000"),
        columns(2000),
    ],
    ids=["long values", "long rows", "sorted", "many rows", "many columns"],
)
def test_results_are_bounded_in_rows_and_bytes(predicted_sql: str) -> None:
    score("SELECT 1")  # warm up imports and caches first
    tracemalloc.start()
    try:
        verdict = score(predicted_sql)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert verdict == PREDICTION_FAILED
    assert peak < 8 * MAX_RESULT_BYTES


def test_a_reference_with_too_many_rows_is_distinguished_from_a_wrong_prediction() -> None:
    verdict = score("SELECT 1", from_numbers("SELECT i", "LIMIT 20000"))
    assert verdict == REFERENCE_FAILED


def test_slow_instructions_are_stopped_by_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count()
    monkeypatch.setattr(task.time, "thread_time", lambda: next(seconds))
    assert score(from_numbers("SELECT count(*)", "LIMIT 1")) == PREDICTION_FAILED


def test_the_metric_applies_to_rows_with_a_question_and_its_tables() -> None:
    row = {"sql_prompt": "How many?", "sql_context": CONTEXT, "sql": "SELECT COUNT(*) FROM cars", "id": 3}
    assert sql(row, "SELECT 0")
    assert not sql(row | {"sql_fixture": FIXTURE}, "SELECT 0")
    assert sql(row | {"sql_fixture": None}, "nothing") is False
    assert sql(row | {"sql": None}, "SELECT 0") is None
