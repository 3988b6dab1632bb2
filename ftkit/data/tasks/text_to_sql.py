"""The demo task: a deterministic generator of text-to-SQL examples.

Every example has its own schema: the columns of its tables, their order, and all names are drawn, so that no question
can be answered without reading the schema. The schemas of the validation split are not in the training split.
"""

import random
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from ftkit.data.tasks.text_to_sql_query import Column, Condition, Kind, Query, Row, Schema, Table
from ftkit.data.tasks.text_to_sql_vocabulary import (
    DOMAINS,
    PARENT_CATEGORIES,
    PHRASES,
    SHAPES,
    Concept,
    Shape,
)

NUM_ROWS = 8
NUM_PARENT_ROWS = 4
NUM_SHARED_VALUES = 3
PARENT_PROBABILITY = 0.35
LIMITS = (2, 3, 4)


@dataclass(frozen=True)
class Example:
    """A question on a schema, and the query that answers it.

    `sql_fixture` fills the tables to execute the query; no model sees it.
    """

    sql_prompt: str
    sql_context: str
    sql: str
    sql_fixture: str = ""


class TextToSql(NamedTuple):
    """The splits of the task; no schema is in both."""

    train: list[Example]
    heldout: list[Example]


def generate(seed: int, num_train: int, num_heldout: int) -> TextToSql:
    """Generate the task; its validation split depends only on `seed` and `num_heldout`."""
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
    schema, shape = _draw_schema(rng), rng.choice(SHAPES)
    while True:
        rows = _draw_rows(rng, schema.table, NUM_ROWS)
        parent_rows = _draw_rows(rng, schema.parent, NUM_PARENT_ROWS) if schema.parent else []
        query = _draw_query(rng, schema, shape, _draw_joined_row(rng, rows, parent_rows))
        fixture = schema.table.insert_sql(rows)
        if schema.parent:
            fixture += " " + schema.parent.insert_sql(parent_rows)
        if _is_distinguishable(query, fixture):
            return Example(_draw_prompt(rng, query, shape), schema.create_sql, query.sql, fixture)


def _is_distinguishable(query: Query, fixture: str) -> bool:
    """Return whether executing the query distinguishes it from every near miss."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(query.schema.create_sql + fixture)

        def rows(query: Query) -> list[tuple[object, ...]]:
            return sorted(database.execute(query.sql))

        right = rows(query)
        return bool(right) and all(rows(wrong) != right for wrong in query.near_misses())


def _draw_schema(rng: random.Random) -> Schema:
    domain = rng.choice(DOMAINS)
    name = rng.choice(domain.tables)
    columns = [
        _draw_column(rng, name, Kind.LABEL, domain.label),
        *_draw_columns(rng, name, Kind.CATEGORY, domain.categories),
        *_draw_columns(rng, name, Kind.QUANTITY, domain.quantities),
    ]
    parent = None
    if rng.random() < PARENT_PROBABILITY:
        parent_name, noun = rng.choice(domain.parents)
        parent = _draw_parent(rng, parent_name, asked_as=rng.choice(domain.parents)[1])
        columns.append(_key_column(name, f"{noun}_id", Kind.REFERENCE))
    rng.shuffle(columns)
    return Schema(Table(name, rng.choice(domain.nouns), tuple(columns)), parent)


def _draw_parent(rng: random.Random, name: str, asked_as: str) -> Table:
    """Draw a parent table, whose columns are, for example, "author city" in questions."""
    categories = (
        replace(column, phrases=tuple(f"{asked_as} {phrase}" for phrase in column.phrases))
        for column in _draw_columns(rng, name, Kind.CATEGORY, PARENT_CATEGORIES)
    )
    return Table(name, asked_as, (_key_column(name, "id", Kind.KEY), *categories))


def _draw_columns(rng: random.Random, table: str, kind: Kind, concepts: tuple[Concept, ...]) -> list[Column]:
    chosen = rng.sample(concepts, rng.randint(1, 2))
    return [_draw_column(rng, table, kind, concept) for concept in chosen]


def _draw_column(rng: random.Random, table: str, kind: Kind, concept: Concept) -> Column:
    return Column(table, rng.choice(concept.names), kind, concept.phrases, concept.values)


def _key_column(table: str, name: str, kind: Kind) -> Column:
    return Column(table, name, kind, (), range(1, NUM_PARENT_ROWS + 1))


def _draw_rows(rng: random.Random, table: Table, num_rows: int) -> list[Row]:
    """Draw rows that share values in categories and references, but nowhere else."""
    cells = {}
    for column in table.columns:
        if column.kind in {Kind.CATEGORY, Kind.REFERENCE}:
            cells[column] = rng.choices(rng.sample(column.values, NUM_SHARED_VALUES), k=num_rows)
        else:
            cells[column] = rng.sample(column.values, num_rows)
    return [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]


def _draw_joined_row(rng: random.Random, rows: list[Row], parent_rows: list[Row]) -> Row:
    row = rng.choice(rows)
    references = {row[column] for column in row if column.kind is Kind.REFERENCE}
    parents = (parent for parent in parent_rows if references & set(parent.values()))
    return row | next(parents, {})


def _draw_query(rng: random.Random, schema: Schema, shape: Shape, row: Row) -> Query:
    """Draw a query of a shape; `row` meets its conditions."""
    table = schema.table
    column = rng.choice(table.columns_of(*shape.columns)) if shape.columns else None
    group_by = rng.choice(table.columns_of(Kind.CATEGORY)) if shape.is_grouped else None
    others = [c for c in schema.columns_of(Kind.CATEGORY, Kind.QUANTITY) if c not in {column, group_by}]
    tested = rng.sample(others, min(len(others), rng.choice(shape.num_conditions)))
    return Query(
        schema,
        column,
        rng.choice(shape.functions) if shape.functions else "",
        shape.is_distinct,
        tuple(_draw_condition(rng, column, row) for column in tested),
        group_by,
        rng.choice(table.columns_of(Kind.QUANTITY)) if shape.directions else None,
        rng.choice(shape.directions) if shape.directions else "",
        rng.choice(LIMITS) if shape.directions else 0,
    )


def _draw_condition(rng: random.Random, column: Column, row: Row) -> Condition:
    operator = rng.choice(("<", ">", "<=", ">=")) if column.kind is Kind.QUANTITY else "="
    return Condition(column, operator, row[column])


def _draw_prompt(rng: random.Random, query: Query, shape: Shape) -> str:
    def phrase(column: Column | None) -> str:
        return rng.choice(column.phrases) if column else ""

    def word(keyword: str) -> str:
        return rng.choice(PHRASES.get(keyword, ("",)))

    return rng.choice(shape.templates).format(
        things=_draw_things(rng, query),
        column=phrase(query.column),
        function=word(query.function),
        group_by=phrase(query.group_by),
        order_by=phrase(query.order_by),
        direction=word(query.direction),
        limit=query.limit,
    )


def _draw_things(rng: random.Random, query: Query) -> str:
    """Describe the rows of a query, as in "cars whose price is above 20"."""
    table = query.schema.table
    start, is_ = rng.choice((("with", ""), ("whose", " is"), ("where", " is")))
    tests = []
    for condition in query.conditions:
        how = f" {rng.choice(PHRASES[condition.operator])}" if condition.operator in PHRASES else ""
        tests.append(f"{rng.choice(condition.column.phrases)}{is_}{how} {condition.value}")
    return f"{table.noun} {start} {' and '.join(tests)}" if tests else table.noun
