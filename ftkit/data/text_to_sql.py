"""The demo task: a deterministic generator of text-to-SQL examples.

Every example has its own table: its name, its columns, their names and their order are drawn, so
no question can be answered without reading the schema. The held-out part has other schemas than
the training part.
"""

import random
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from ftkit.data import text_to_sql_vocabulary as words
from ftkit.data.text_to_sql_query import Column, Condition, Query, Row, Table

NUM_ROWS = 8
LIMITS = (2, 3, 4)


@dataclass(frozen=True)
class Example:
    """A question on a schema, and the query that answers it.

    `sql_fixture` fills the tables for whoever executes the query; no model sees it.
    """

    sql_prompt: str
    sql_context: str
    sql: str
    sql_fixture: str = ""


class TextToSql(NamedTuple):
    """The parts of the task; no schema is in both."""

    train: list[Example]
    heldout: list[Example]


def generate(seed: int, num_train: int, num_heldout: int) -> TextToSql:
    """Draw the task; its held-out part depends on `seed` and `num_heldout` alone."""
    heldout = list(islice(_examples(random.Random(f"{seed} heldout")), num_heldout))
    schemas = {example.sql_context for example in heldout}
    train = _examples(random.Random(f"{seed} train"), other_than=schemas)
    return TextToSql(list(islice(train, num_train)), heldout)


def _examples(rng: random.Random, other_than: Collection[str] = ()) -> Iterator[Example]:
    seen = set()
    while True:
        example = _draw_example(rng)
        pair = (example.sql_context, example.sql_prompt)
        if example.sql_context not in other_than and pair not in seen:
            seen.add(pair)
            yield example


def _draw_example(rng: random.Random) -> Example:
    table = _draw_table(rng)
    ask = rng.choice(QUESTIONS)
    while True:
        rows = _draw_rows(rng, table)
        prompt, query = ask(rng, table, rows)
        fixture = table.insert_sql(rows)
        if _tells_apart(query, fixture):
            return Example(prompt, table.create_sql, query.sql, fixture)


def _tells_apart(query: Query, fixture: str) -> bool:
    """Whether executing the query shows every near miss to be wrong."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(query.table.create_sql + fixture)

        def rows(query: Query) -> list[Row]:
            return sorted(database.execute(query.sql))

        right = rows(query)
        return bool(right) and all(rows(wrong) != right for wrong in query.near_misses())


def _draw_table(rng: random.Random) -> Table:
    domain = rng.choice(words.DOMAINS)
    label = _draw_column(rng, domain.label)
    categories = rng.sample(domain.categories, rng.randint(1, 2))
    quantities = rng.sample(domain.quantities, rng.randint(1, 2))
    columns = [label, *(_draw_column(rng, concept) for concept in [*categories, *quantities])]
    rng.shuffle(columns)
    return Table(rng.choice(domain.tables), rng.choice(domain.nouns), label, tuple(columns))


def _draw_column(rng: random.Random, concept: words.Concept) -> Column:
    return Column(rng.choice(concept.names), concept.phrases, concept.values)


def _draw_rows(rng: random.Random, table: Table) -> list[Row]:
    """Draw rows with few values in each category, and no value twice in the other columns."""
    cells = []
    for column in table.columns:
        if column in table.categories:
            cells.append(rng.choices(rng.sample(column.values, 3), k=NUM_ROWS))
        else:
            cells.append(rng.sample(column.values, NUM_ROWS))
    return list(zip(*cells, strict=True))


def _draw_conditions(rng: random.Random, table: Table, rows: list[Row], num: int) -> tuple[Condition, ...]:
    """Draw conditions that at least one row meets."""
    row = dict(zip(table.columns, rng.choice(rows), strict=True))
    filterable = [column for column in table.columns if column != table.label]
    return tuple(
        Condition(c, rng.choice(list(words.OPERATOR_PHRASES)) if c.is_integer else "=", row[c])
        for c in rng.sample(filterable, num)
    )


def _things(rng: random.Random, table: Table, conditions: tuple[Condition, ...]) -> str:
    """Name the rows that meet the conditions, as in "cars whose price is above 20"."""
    if not conditions:
        return table.noun
    start, is_ = rng.choice((("with", ""), ("whose", " is"), ("where", " is")))
    tests = []
    for condition in conditions:
        how = ""
        if condition.operator in words.OPERATOR_PHRASES:
            how = f" {rng.choice(words.OPERATOR_PHRASES[condition.operator])}"
        tests.append(f"{_phrase(rng, condition.column)}{is_}{how} {condition.value}")
    return f"{table.noun} {start} {' and '.join(tests)}"


def _phrase(rng: random.Random, column: Column) -> str:
    return rng.choice(column.phrases)


def _ask_list(rng: random.Random, table: Table, rows: list[Row]) -> tuple[str, Query]:
    conditions = _draw_conditions(rng, table, rows, rng.randint(1, 2))
    column = rng.choice([c for c in table.columns if c not in {t.column for t in conditions}])
    prompt = rng.choice(words.LIST_TEMPLATES).format(
        column=_phrase(rng, column), things=_things(rng, table, conditions)
    )
    return prompt, Query(table, column, conditions=conditions)


def _ask_distinct(rng: random.Random, table: Table, rows: list[Row]) -> tuple[str, Query]:
    conditions = _draw_conditions(rng, table, rows, rng.randint(0, 1))
    column = rng.choice(table.categories)
    prompt = rng.choice(words.DISTINCT_TEMPLATES).format(
        column=_phrase(rng, column), things=_things(rng, table, conditions)
    )
    return prompt, Query(table, column, is_distinct=True, conditions=conditions)


def _ask_count(rng: random.Random, table: Table, rows: list[Row]) -> tuple[str, Query]:
    conditions = _draw_conditions(rng, table, rows, rng.randint(0, 2))
    prompt = rng.choice(words.COUNT_TEMPLATES).format(things=_things(rng, table, conditions))
    return prompt, Query(table, function="COUNT", conditions=conditions)


def _ask_aggregate(rng: random.Random, table: Table, rows: list[Row]) -> tuple[str, Query]:
    conditions = _draw_conditions(rng, table, rows, rng.randint(0, 1))
    column = rng.choice(table.quantities)
    function = rng.choice(list(words.FUNCTION_PHRASES))
    prompt = rng.choice(words.AGGREGATE_TEMPLATES).format(
        function=rng.choice(words.FUNCTION_PHRASES[function]),
        column=_phrase(rng, column),
        things=_things(rng, table, conditions),
    )
    return prompt, Query(table, column, function, conditions=conditions)


def _ask_top(rng: random.Random, table: Table, rows: list[Row]) -> tuple[str, Query]:
    conditions = _draw_conditions(rng, table, rows, rng.randint(0, 1))
    column, order_by = rng.choice((table.label, *table.categories)), rng.choice(table.quantities)
    direction, limit = rng.choice(list(words.ORDER_PHRASES)), rng.choice(LIMITS)
    prompt = rng.choice(words.TOP_TEMPLATES).format(
        column=_phrase(rng, column),
        things=_things(rng, table, conditions),
        limit=limit,
        order=rng.choice(words.ORDER_PHRASES[direction]),
        order_column=_phrase(rng, order_by),
    )
    query = Query(table, column, conditions=conditions, order_by=order_by, direction=direction, limit=limit)
    return prompt, query


def _ask_group_count(rng: random.Random, table: Table, rows: list[Row]) -> tuple[str, Query]:
    conditions = _draw_conditions(rng, table, rows, rng.randint(0, 1))
    group_by = rng.choice(table.categories)
    prompt = rng.choice(words.GROUP_COUNT_TEMPLATES).format(
        group=_phrase(rng, group_by), things=_things(rng, table, conditions)
    )
    return prompt, Query(table, function="COUNT", conditions=conditions, group_by=group_by)


def _ask_group_aggregate(rng: random.Random, table: Table, rows: list[Row]) -> tuple[str, Query]:
    column, group_by = rng.choice(table.quantities), rng.choice(table.categories)
    function = rng.choice(list(words.FUNCTION_PHRASES))
    prompt = rng.choice(words.GROUP_AGGREGATE_TEMPLATES).format(
        function=rng.choice(words.FUNCTION_PHRASES[function]),
        column=_phrase(rng, column),
        things=table.noun,
        group=_phrase(rng, group_by),
    )
    return prompt, Query(table, column, function, group_by=group_by)


QUESTIONS: tuple[Callable[[random.Random, Table, list[Row]], tuple[str, Query]], ...] = (
    _ask_list,
    _ask_distinct,
    _ask_count,
    _ask_aggregate,
    _ask_top,
    _ask_group_count,
    _ask_group_aggregate,
)
