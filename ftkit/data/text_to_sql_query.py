"""Tables and queries of the text-to-SQL demo task, and how both are written in SQL."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

Cell = str | int
Row = tuple[Cell, ...]

FUNCTIONS = ("AVG", "SUM", "MAX", "MIN")
OPPOSITES = {">": "<", "<": ">", ">=": "<=", "<=": ">=", "DESC": "ASC", "ASC": "DESC"}


@dataclass(frozen=True)
class Column:
    """A column of one table: its name there, what questions call it, and what it may hold."""

    name: str
    phrases: tuple[str, ...]
    values: Sequence[str] | range

    @property
    def is_integer(self) -> bool:
        return isinstance(self.values, range)


@dataclass(frozen=True)
class Table:
    """A table; `label` tells its rows apart, and questions call them `noun`."""

    name: str
    noun: str
    label: Column
    columns: tuple[Column, ...]

    @property
    def categories(self) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if not c.is_integer and c != self.label)

    @property
    def quantities(self) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if c.is_integer)

    @property
    def create_sql(self) -> str:
        columns = (f"{c.name} {'INTEGER' if c.is_integer else 'TEXT'}" for c in self.columns)
        return f"CREATE TABLE {self.name} ({', '.join(columns)});"

    def insert_sql(self, rows: Sequence[Row]) -> str:
        values = (f"({', '.join(map(_literal, row))})" for row in rows)
        return f"INSERT INTO {self.name} VALUES {', '.join(values)};"


@dataclass(frozen=True)
class Condition:
    column: Column
    operator: str
    value: Cell

    @property
    def sql(self) -> str:
        return f"{self.column.name} {self.operator} {_literal(self.value)}"


@dataclass(frozen=True)
class Query:
    """A SELECT from one table; a clause that is empty is not there."""

    table: Table
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
        parts += ["FROM", self.table.name]
        if self.conditions:
            parts += ["WHERE", " AND ".join(condition.sql for condition in self.conditions)]
        if self.group_by:
            parts += ["GROUP BY", self.group_by.name]
        if self.order_by:
            parts += ["ORDER BY", self.order_by.name, self.direction, "LIMIT", str(self.limit)]
        return " ".join(parts)

    @property
    def _selected(self) -> str:
        selected = self.column.name if self.column else "*"
        if self.function:
            selected = f"{self.function}({selected})"
        return f"{self.group_by.name}, {selected}" if self.group_by else selected

    def near_misses(self) -> Iterator["Query"]:
        """The queries with one mistake, each of which must give other rows than this one."""
        for clause in ("column", "group_by", "order_by"):
            for other in self._similar(getattr(self, clause)):
                yield replace(self, **{clause: other})
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
        return tuple(
            c for c in self.table.columns if c != column and c.is_integer == column.is_integer
        )


def _literal(value: Cell) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
