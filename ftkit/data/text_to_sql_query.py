"""Schemas and queries of the text-to-SQL demo task, and how both are written in SQL."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

Cell = str | int

FUNCTIONS = ("AVG", "SUM", "MAX", "MIN")
OPPOSITES = {">": "<", "<": ">", ">=": "<=", "<=": ">=", "DESC": "ASC", "ASC": "DESC"}


@dataclass(frozen=True)
class Column:
    """A column of one table: its name there, what questions call it, and what it may hold."""

    table: str
    name: str
    phrases: tuple[str, ...]
    values: Sequence[str] | range

    @property
    def is_integer(self) -> bool:
        return isinstance(self.values, range)


Row = dict[Column, Cell]


@dataclass(frozen=True)
class Table:
    """A table, in the order of its columns; `key`, if there, numbers rows and is never asked for."""

    name: str
    noun: str
    columns: tuple[Column, ...]
    label: Column
    key: Column | None = None

    @property
    def categories(self) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if not c.is_integer and c != self.label)

    @property
    def quantities(self) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if c.is_integer and c != self.key)

    @property
    def create_sql(self) -> str:
        columns = (f"{c.name} {'INTEGER' if c.is_integer else 'TEXT'}" for c in self.columns)
        return f"CREATE TABLE {self.name} ({', '.join(columns)});"

    def insert_sql(self, rows: Sequence[Row]) -> str:
        values = (f"({', '.join(_literal(row[column]) for column in self.columns)})" for row in rows)
        return f"INSERT INTO {self.name} VALUES {', '.join(values)};"

    def similar_columns(self, column: Column) -> tuple[Column, ...]:
        """The other columns that could be mistaken for this one."""
        columns = self.quantities if column.is_integer else (self.label, *self.categories)
        return tuple(c for c in columns if c != column)


@dataclass(frozen=True)
class Schema:
    """The table that questions are about and, maybe, a parent: `table.key` points to `parent.key`."""

    table: Table
    parent: Table | None = None

    @property
    def tables(self) -> tuple[Table, ...]:
        return (self.table, self.parent) if self.parent else (self.table,)

    @property
    def create_sql(self) -> str:
        return " ".join(table.create_sql for table in self.tables)


@dataclass(frozen=True)
class Condition:
    """A test of a row, such as `price > 20`."""

    column: Column
    operator: str
    value: Cell


@dataclass(frozen=True)
class Query:
    """A SELECT on a schema's main table, joined with the parent if a condition asks for that.

    A clause that is empty is not there.
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
        parts = ["SELECT", *(["DISTINCT"] if self.is_distinct else []), self._selected]
        parts += ["FROM", self.schema.table.name, *self._join]
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
    def _join(self) -> list[str]:
        keys = [table.key for table in self.schema.tables if table.key]
        if not self._is_joined:
            return []
        child, parent = map(self._name, keys)
        return ["JOIN", keys[1].table, "ON", child, "=", parent]

    @property
    def _is_joined(self) -> bool:
        return any(condition.column.table != self.schema.table.name for condition in self.conditions)

    def _name(self, column: Column) -> str:
        return f"{column.table}.{column.name}" if self._is_joined else column.name

    def near_misses(self) -> Iterator["Query"]:
        """The queries with one mistake, each of which must give other rows than this one."""
        yield from (replace(self, column=other) for other in self._similar(self.column))
        yield from (replace(self, group_by=other) for other in self._similar(self.group_by))
        yield from (replace(self, order_by=other) for other in self._similar(self.order_by))
        for index, condition in enumerate(self.conditions):
            before, after = self.conditions[:index], self.conditions[index + 1 :]
            yield replace(self, conditions=before + after)
            for wrong in self._wrong(condition):
                yield replace(self, conditions=(*before, wrong, *after))
        if self.function in FUNCTIONS:
            yield from (replace(self, function=f) for f in FUNCTIONS if f != self.function)
        if self.is_distinct:
            yield replace(self, is_distinct=False)
        if self.order_by:
            yield replace(self, direction=OPPOSITES[self.direction])
            yield replace(self, limit=self.limit + 1)

    def _wrong(self, condition: Condition) -> Iterator[Condition]:
        for other in self._similar(condition.column):
            yield replace(condition, column=other)
        if condition.operator in OPPOSITES:
            yield replace(condition, operator=OPPOSITES[condition.operator])

    def _similar(self, column: Column | None) -> tuple[Column, ...]:
        if column is None:
            return ()
        return next(t.similar_columns(column) for t in self.schema.tables if t.name == column.table)


def _literal(value: Cell) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
