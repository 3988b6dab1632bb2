"""Schemas and queries of the text-to-SQL demo task, and their SQL."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

AGGREGATES = ("AVG", "SUM", "MAX", "MIN")
OPPOSITES = {">": "<", "<": ">", ">=": "<=", "<=": ">=", "DESC": "ASC", "ASC": "DESC"}

Cell = str | int


class Kind(Enum):
    """Role of a column. A reference contains a key of the parent table."""

    LABEL = auto()
    CATEGORY = auto()
    QUANTITY = auto()
    KEY = auto()
    REFERENCE = auto()


TEXTS = (Kind.LABEL, Kind.CATEGORY)


@dataclass(frozen=True)
class Column:
    """A column of one table: its name there, its name in questions, and its possible values."""

    table: str
    name: str
    kind: Kind
    phrases: tuple[str, ...]
    values: Sequence[Cell]

    @property
    def sql_type(self) -> str:
        """The column's type in SQL."""
        return "TEXT" if self.kind in TEXTS else "INTEGER"


Row = dict[Column, Cell]


@dataclass(frozen=True)
class Table:
    """A table, and the word for its rows in questions."""

    name: str
    noun: str
    columns: tuple[Column, ...]

    @property
    def create_sql(self) -> str:
        """The statement that creates the table."""
        columns = ", ".join(f"{column.name} {column.sql_type}" for column in self.columns)
        return f"CREATE TABLE {self.name} ({columns});"

    def insert_sql(self, rows: Sequence[Row]) -> str:
        """Return the statement that inserts rows."""
        values = (f"({', '.join(_literal(row[column]) for column in self.columns)})" for row in rows)
        return f"INSERT INTO {self.name} VALUES {', '.join(values)};"  # noqa: S608 our own words, on purpose

    def columns_of(self, *kinds: Kind) -> list[Column]:
        """Return the columns of some kinds."""
        return [column for column in self.columns if column.kind in kinds]


@dataclass(frozen=True)
class Schema:
    """The table of the questions and, in some schemas, the parent that its rows belong to."""

    table: Table
    parent: Table | None = None

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables of the schema."""
        return (self.table, self.parent) if self.parent else (self.table,)

    @property
    def create_sql(self) -> str:
        """The statements that create the tables."""
        return " ".join(table.create_sql for table in self.tables)

    def columns_of(self, *kinds: Kind) -> list[Column]:
        """Return the columns of some kinds in all tables."""
        return [column for table in self.tables for column in table.columns_of(*kinds)]

    def similar_columns(self, column: Column) -> list[Column]:
        """Return the columns that could be mistaken for this one."""
        kinds = TEXTS if column.kind in TEXTS else (Kind.QUANTITY,)
        return [other for other in self.columns_of(*kinds) if other.table == column.table and other != column]


@dataclass(frozen=True)
class Condition:
    """A test of a row, such as `price > 20`."""

    column: Column
    operator: str
    value: Cell


@dataclass(frozen=True)
class Query:
    """A SELECT from a schema's main table, joined with the parent where a condition needs it.

    Empty clauses are omitted.
    """

    schema: Schema
    column: Column | None = None
    function: str = ""
    is_distinct: bool = False
    conditions: tuple[Condition, ...] = ()
    group_by: Column | None = None
    order_by: Column | None = None
    direction: str = ""
    limit: int = 0

    @property
    def sql(self) -> str:
        """The query in SQL."""
        parts = ["SELECT", *(["DISTINCT"] if self.is_distinct else []), self._selected, "FROM", self._source]
        if self.conditions:
            tests = (f"{self._name(c.column)} {c.operator} {_literal(c.value)}" for c in self.conditions)
            parts += ["WHERE", " AND ".join(tests)]
        if self.group_by:
            parts += ["GROUP BY", self._name(self.group_by)]
        if self.order_by:
            parts += ["ORDER BY", self._name(self.order_by), self.direction, "LIMIT", str(self.limit)]
        return " ".join(parts)

    @property
    def _selected(self) -> str:
        selected = self._name(self.column) if self.column else "*"
        if self.function:
            selected = f"{self.function}({selected})"
        return f"{self._name(self.group_by)}, {selected}" if self.group_by else selected

    @property
    def _source(self) -> str:
        table = self.schema.table.name
        if not self._is_joined:
            return table
        reference, key = self.schema.columns_of(Kind.REFERENCE, Kind.KEY)
        return f"{table} JOIN {key.table} ON {self._name(reference)} = {self._name(key)}"

    @property
    def _is_joined(self) -> bool:
        return any(condition.column.table != self.schema.table.name for condition in self.conditions)

    def _name(self, column: Column) -> str:
        return f"{column.table}.{column.name}" if self._is_joined else column.name

    def near_misses(self) -> Iterator["Query"]:
        """Yield the query with one mistake: another column, function, operator or limit, or a missing clause."""
        if self.column:
            yield from (replace(self, column=c) for c in self.schema.similar_columns(self.column))
        if self.function in AGGREGATES:
            yield from (replace(self, function=f) for f in AGGREGATES if f != self.function)
        if self.is_distinct:
            yield replace(self, is_distinct=False)
        for index, condition in enumerate(self.conditions):
            before, after = self.conditions[:index], self.conditions[index + 1 :]
            yield replace(self, conditions=before + after)
            for wrong in self._wrong_conditions(condition):
                yield replace(self, conditions=(*before, wrong, *after))
        if self.group_by:
            yield from (replace(self, group_by=c) for c in self.schema.similar_columns(self.group_by))
        if self.order_by:
            yield from (replace(self, order_by=c) for c in self.schema.similar_columns(self.order_by))
            yield replace(self, direction=OPPOSITES[self.direction])
            yield replace(self, limit=self.limit + 1)

    def _wrong_conditions(self, condition: Condition) -> Iterator[Condition]:
        yield from (replace(condition, column=c) for c in self.schema.similar_columns(condition.column))
        if condition.operator in OPPOSITES:
            yield replace(condition, operator=OPPOSITES[condition.operator])


def _literal(value: Cell) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
