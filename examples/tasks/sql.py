"""Text to SQL: a deterministic generator of questions with their queries, and a metric that executes them.

Every example has its own schema: the columns of its table, their order, and all names are drawn, so that no question
can be answered without reading the schema. The schemas of the validation split are not in the training split.

A tiny model should learn it in a minute on two CPUs. So names are between spaces, and texts in quotes, wherever they
occur: each is the same token in the schema, the question, and the query, which copies it.

This file has three parts: what ftkit calls, the generator, and the words of its questions.
"""

import random
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from itertools import islice
from typing import Any

Cell = str | int

# --- What ftkit calls ------------------------------------------------------------------------------


def generate(
    seed: int, num_train: int, num_heldout: int, *, careless: float = 0.0, pairs: bool = False
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Draw examples to train and to validate on; those of the validation split depend only on seed and number.

    Columns: sql_prompt, sql_context, sql, sql_fixture, which fills the table to execute the query, and those of
    `Example`. Queries of the training split are not executed: whether its rows tell them from others is not checked.

    Of the training split, the fraction `careless` has its careless queries as sql. With `pairs`, it has only examples
    whose sql and confused_sql return other rows.
    """
    heldout = list(islice(_examples(random.Random(f"{seed} heldout"), _is_distinguishable), num_heldout))
    schemas = {example.sql_context for example in heldout}
    train = _examples(random.Random(f"{seed} train"), other_than=schemas)
    chosen = islice(filter(_is_pair, train) if pairs else train, num_train)
    draw = random.Random(f"{seed} careless")
    written = [replace(each, sql=each.careless_sql) if draw.random() < careless else each for each in chosen]
    return [asdict(example) for example in written], [asdict(example) for example in heldout]


def _is_pair(example: "Example") -> bool:
    return not sql(asdict(example), example.confused_sql)


def sql(row: dict[str, Any], completion: str) -> bool | None:
    """Execute the completion and the row's query on the row's tables, and compare the rows that they return."""
    if any(row.get(name) is None for name in ("sql_prompt", "sql_context", "sql")):
        return None
    return (
        execution_match(str(row["sql_context"]), str(row.get("sql_fixture") or ""), str(row["sql"]), completion)
        == MATCH
    )


# --- Executing queries -----------------------------------------------------------------------------

# Far above the needs of a question on small tables, far below an unacceptable wait or a node's memory.
MAX_INSTRUCTIONS = 1_000_000
MAX_SECONDS = 5.0
"""CPU seconds of this thread, since one instruction may search a long text; wall time would depend on the load."""
INSTRUCTIONS_PER_CHECK = 100
MAX_VALUE_BYTES = 10_000
"""Maximum size of a text, a blob or a row. Sorting keeps all rows that the instructions make, but few in memory."""
MAX_COLUMNS = 256
MAX_ROWS = 10_000
MAX_RESULT_BYTES = 1_000_000

Results = list[tuple[object, ...]]

_SQL_ERRORS = (sqlite3.Error, sqlite3.Warning, ValueError)
_READ_ACTIONS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
# VACUUM INTO needs ATTACH too: without it no statement can access a file.
_FILE_ACTIONS = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA}
MATCH, WRONG_ROWS, PREDICTION_FAILED, REFERENCE_FAILED = "match", "wrong rows", "prediction failed", "reference failed"


def execution_match(context: str, fixture: str, reference_sql: str, predicted_sql: str) -> str:
    """Return the outcome of a prediction; bad SQL never raises.

    The order of rows counts only if the reference sorts them.
    """
    with closing(sqlite3.connect(":memory:")) as database:
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        database.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, MAX_COLUMNS)
        try:
            _limit_work(database)
            database.set_authorizer(_deny_files)
            database.executescript(f"{context}\n;{fixture}")
            reference = _select(database, reference_sql)
        except _SQL_ERRORS:
            return REFERENCE_FAILED
        try:
            predicted = _select(database, predicted_sql)
        except _SQL_ERRORS:
            return PREDICTION_FAILED
    is_same = _same_rows(predicted, reference, is_ordered=_has_order_by(reference_sql))
    return MATCH if is_same else WRONG_ROWS


def _select(database: sqlite3.Connection, sql: str) -> Results:
    _limit_work(database)
    database.set_authorizer(_allow_reading)
    cursor = database.execute(sql)
    if cursor.description is None:
        raise sqlite3.ProgrammingError("not a SELECT")
    rows: Results = []
    num_bytes = 0
    for row in cursor:
        rows.append(row)
        num_bytes += sum(len(cell) if isinstance(cell, str | bytes) else 8 for cell in row)
        if len(rows) > MAX_ROWS or num_bytes > MAX_RESULT_BYTES:
            raise sqlite3.DataError(f"more than {MAX_ROWS:,} rows or {MAX_RESULT_BYTES:,} bytes")
    return rows


def _limit_work(database: sqlite3.Connection) -> None:
    """Interrupt statements of this connection that run for too long from now on."""
    checks = iter(range(MAX_INSTRUCTIONS // INSTRUCTIONS_PER_CHECK))
    end = time.thread_time() + MAX_SECONDS

    def is_too_long() -> bool:
        return next(checks, None) is None or time.thread_time() > end

    database.set_progress_handler(is_too_long, INSTRUCTIONS_PER_CHECK)


def _deny_files(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_DENY if action in _FILE_ACTIONS else sqlite3.SQLITE_OK


def _allow_reading(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _READ_ACTIONS else sqlite3.SQLITE_DENY


def _same_rows(rows: Results, others: Results, *, is_ordered: bool) -> bool:
    left, right = (([tuple(map(_rounded, row)) for row in r]) for r in (rows, others))
    return left == right if is_ordered else Counter(left) == Counter(right)


def _rounded(cell: object) -> object:
    """Round away the digits that depend on sqlite's order of summation."""
    return float(f"{cell:.9g}") if isinstance(cell, float) else cell


def _has_order_by(sql: str) -> bool:
    """Return whether there is an ORDER BY outside of texts, subqueries and window functions."""
    sql = re.sub(r"'(?:[^']|'')*'", "", sql)
    num_removed = 1
    while num_removed:
        sql, num_removed = re.subn(r"\([^()]*\)", "", sql)
    return re.search(r"\border\s+by\b", sql, re.IGNORECASE) is not None


# --- Schemas and queries ---------------------------------------------------------------------------

AGGREGATES = ("AVG", "SUM", "MAX", "MIN")
OPPOSITES = {">": "<", "<": ">", ">=": "<=", "<=": ">=", "DESC": "ASC", "ASC": "DESC"}


class Kind(Enum):
    """Role of a column."""

    LABEL = auto()
    CATEGORY = auto()
    QUANTITY = auto()


TEXTS = (Kind.LABEL, Kind.CATEGORY)


@dataclass(frozen=True)
class Column:
    """A column of one table: its name there, its name in questions, and its possible values."""

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
        return f"CREATE TABLE {self.name} ( {columns} );"

    def insert_sql(self, rows: Sequence[Row]) -> str:
        """Return the statement that inserts rows."""
        values = (f"({', '.join(_literal(row[column]) for column in self.columns)})" for row in rows)
        return f"INSERT INTO {self.name} VALUES {', '.join(values)};"  # noqa: S608 our own words, on purpose

    def columns_of(self, *kinds: Kind) -> list[Column]:
        """Return the columns of some kinds."""
        return [column for column in self.columns if column.kind in kinds]

    def similar_columns(self, column: Column) -> list[Column]:
        """Return the columns that could be mistaken for this one."""
        kinds = TEXTS if column.kind in TEXTS else (Kind.QUANTITY,)
        return [other for other in self.columns_of(*kinds) if other != column]


@dataclass(frozen=True)
class Condition:
    """A test of a row, such as `price > 20`."""

    column: Column
    operator: str
    value: Cell


@dataclass(frozen=True)
class Query:
    """A SELECT from a table. Empty clauses are omitted."""

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
        """The query in SQL."""
        parts = ["SELECT", *(["DISTINCT"] if self.is_distinct else []), self._selected, "FROM", self.table.name]
        if self.conditions:
            tests = (f"{each.column.name} {each.operator} {_literal(each.value)}" for each in self.conditions)
            parts += ["WHERE", " AND ".join(tests)]
        if self.group_by:
            parts += ["GROUP BY", self.group_by.name]
        if self.order_by:
            parts += ["ORDER BY", self.order_by.name, self.direction, "LIMIT", str(self.limit)]
        return " ".join(parts)

    @property
    def _selected(self) -> str:
        selected = self.column.name if self.column else "*"
        if self.function:
            selected = f"{self.function}( {selected} )"
        return f"{self.group_by.name}, {selected}" if self.group_by else selected

    @property
    def careless(self) -> "Query":
        """The query as many would write it: without DISTINCT, with strict bounds, and the highest first."""
        return self._rewritten("{}", "DESC")

    @property
    def confused(self) -> "Query":
        """The query that is taken for this one: the careless one, or one of which this is the careless one."""
        return self.careless if self.careless != self else self._rewritten("{}=", "ASC")

    def _rewritten(self, bound: str, direction: str) -> "Query":
        conditions = tuple(
            replace(each, operator=bound.format(each.operator[0])) if each.operator in OPPOSITES else each
            for each in self.conditions
        )
        return replace(self, is_distinct=False, conditions=conditions, direction=self.direction and direction)

    def near_misses(self) -> Iterator["Query"]:
        """Yield the query with one mistake: another column, function, operator or limit, or a missing clause."""
        if self.column:
            yield from (replace(self, column=c) for c in self.table.similar_columns(self.column))
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
            yield from (replace(self, group_by=c) for c in self.table.similar_columns(self.group_by))
        if self.order_by:
            yield from (replace(self, order_by=c) for c in self.table.similar_columns(self.order_by))
            yield replace(self, direction=OPPOSITES[self.direction])
            yield replace(self, limit=self.limit + 1)

    def _wrong_conditions(self, condition: Condition) -> Iterator[Condition]:
        yield from (replace(condition, column=c) for c in self.table.similar_columns(condition.column))
        if condition.operator in OPPOSITES:
            yield replace(condition, operator=OPPOSITES[condition.operator])


def _literal(value: Cell) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


# --- Words -----------------------------------------------------------------------------------------

CITIES = ("Paris", "London", "Tokyo", "Madrid", "Oslo", "Cairo", "Lima", "Delhi", "Rome", "Dublin")
COUNTRIES = ("France", "Japan", "Spain", "Norway", "Egypt", "Peru", "India", "Italy", "Canada")
PEOPLE = (
    "Alice", "Bob", "Carla", "David", "Emma", "Frank", "Grace", "Hugo", "Irene", "Jack", "Karen",
    "Liam", "Maria", "Nina", "Oscar", "Paula",
)  # fmt: skip
COLORS = ("red", "blue", "green", "black", "white", "silver", "yellow", "orange")
LANGUAGES = ("English", "French", "German", "Spanish", "Hindi", "Arabic", "Korean")
TITLES = (
    "Aurora", "Beacon", "Cascade", "Delta", "Echo", "Falcon", "Galaxy", "Harbor", "Island",
    "Jupiter", "Kingdom", "Lagoon", "Meridian", "Nova", "Orbit", "Phoenix",
)  # fmt: skip


@dataclass(frozen=True)
class Concept:
    """Possible values of a column; its name is one of `names` in schemas, one of `phrases` in questions."""

    names: tuple[str, ...]
    phrases: tuple[str, ...]
    values: Sequence[Cell]


@dataclass(frozen=True)
class Domain:
    """A subject of tables. A table has the label, some categories and some quantities."""

    tables: tuple[str, ...]
    nouns: tuple[str, ...]
    label: Concept
    categories: tuple[Concept, ...]
    quantities: tuple[Concept, ...]


def _category(names: tuple[str, ...], *values: str) -> Concept:
    return Concept(names, names, values)


def _quantity(names: tuple[str, ...], *phrases: str) -> Concept:
    return Concept(names, phrases or names, range(10, 100))


NAME = Concept(("name", "person"), ("name",), PEOPLE)
TITLE = Concept(("title", "name"), ("title", "name"), TITLES)
CITY = Concept(("city", "town"), ("city", "town"), CITIES)
COUNTRY = Concept(("country", "nation"), ("country", "nation"), COUNTRIES)
COLOR = Concept(("color", "paint"), ("color",), COLORS)
LANGUAGE = Concept(("language", "tongue"), ("language",), LANGUAGES)
AGE = _quantity(("age", "years"), "age")
PRICE = _quantity(("price", "cost"))
MILEAGE = _quantity(("mileage", "distance"), "mileage")
REVIEWS = _quantity(("reviews", "comments"), "reviews")
RATING = _quantity(("rating", "score"))
WEIGHT = _quantity(("weight", "mass"), "weight")
STOCK = _quantity(("stock", "quantity"))
DURATION = _quantity(("duration", "minutes"), "duration", "length")

DOMAINS = (
    Domain(
        ("employees", "staff", "workers"),
        ("employees", "workers"),
        NAME,
        (CITY, _category(("department", "team"), "Sales", "Legal", "Finance", "Support", "Design")),
        (AGE, _quantity(("salary", "pay"))),
    ),
    Domain(
        ("students", "pupils", "learners"),
        ("students", "pupils"),
        NAME,
        (CITY, COUNTRY, _category(("subject", "course"), "Math", "History", "Physics", "Music")),
        (AGE, RATING, _quantity(("absences", "missed"), "absences")),
    ),
    Domain(
        ("cars", "vehicles", "autos"),
        ("cars", "vehicles"),
        Concept(("model", "name"), ("model", "name"), TITLES),
        (COLOR, COUNTRY, _category(("fuel", "energy"), "petrol", "diesel", "electric", "hybrid")),
        (PRICE, MILEAGE, WEIGHT, _quantity(("power", "horsepower"), "power")),
    ),
    Domain(
        ("books", "novels", "volumes"),
        ("books", "novels"),
        TITLE,
        (LANGUAGE, _category(("genre", "category"), "fantasy", "crime", "poetry", "romance")),
        (PRICE, REVIEWS, _quantity(("pages", "length"), "pages")),
    ),
    Domain(
        ("movies", "films", "pictures"),
        ("movies", "films"),
        TITLE,
        (LANGUAGE, COUNTRY, _category(("genre", "category"), "drama", "comedy", "horror", "action")),
        (REVIEWS, RATING, DURATION, _quantity(("budget", "cost"), "budget")),
    ),
    Domain(
        ("hotels", "lodgings", "resorts"),
        ("hotels", "resorts"),
        Concept(("name", "hotel"), ("name",), TITLES),
        (CITY, COUNTRY, _category(("view", "outlook"), "sea", "garden", "street", "lake")),
        (PRICE, RATING, _quantity(("rooms", "capacity"))),
    ),
    Domain(
        ("products", "items", "goods"),
        ("products", "items"),
        Concept(("name", "product"), ("name",), TITLES),
        (COLOR, _category(("brand", "maker"), "Acme", "Zenith", "Vertex", "Nimbus", "Orion")),
        (PRICE, STOCK, WEIGHT),
    ),
    Domain(
        ("players", "athletes", "members"),
        ("players", "athletes"),
        NAME,
        (COUNTRY, _category(("position", "role"), "keeper", "defender", "forward", "captain")),
        (AGE, WEIGHT, _quantity(("goals", "points"))),
    ),
    Domain(
        ("flights", "trips", "journeys"),
        ("flights", "trips"),
        Concept(("pilot", "captain"), ("pilot", "captain"), PEOPLE),
        (Concept(("destination", "city"), ("destination",), CITIES),
         _category(("status", "state"), "early", "delayed", "canceled", "landed")),
        (PRICE, DURATION, _quantity(("seats", "places"), "seats")),
    ),
    Domain(
        ("pets", "animals", "dogs"),
        ("pets", "animals"),
        Concept(("name", "nickname"), ("name",), PEOPLE),
        (COLOR, CITY, _category(("food", "diet"), "meat", "fish", "rice", "corn")),
        (_quantity(("age", "months"), "age"), WEIGHT),
    ),
)  # fmt: skip

PHRASES = {
    ">": ("above", "over", "greater than", "more than"),
    "<": ("below", "under", "less than"),
    ">=": ("at least",),
    "<=": ("at most",),
    "AVG": ("average", "mean"),
    "SUM": ("total", "combined"),
    "MAX": ("highest", "maximum"),
    "MIN": ("lowest", "minimum"),
    "DESC": ("highest", "largest"),
    "ASC": ("lowest", "smallest"),
}


@dataclass(frozen=True)
class Shape:
    """A kind of question: its phrasings, and the clauses of its query.

    An empty tuple means that the query has no such clause.
    """

    templates: tuple[str, ...]
    num_conditions: tuple[int, ...] = (0, 1)
    columns: tuple[Kind, ...] = ()
    functions: tuple[str, ...] = ()
    is_distinct: bool = False
    is_grouped: bool = False
    directions: tuple[str, ...] = ()


SHAPES = (
    Shape(
        (
            "List the {column} of {things}.",
            "Show the {column} of all {things}.",
            "What is the {column} of {things}?",
            "Give me the {column} for {things}.",
        ),
        num_conditions=(1, 2),
        columns=(*TEXTS, Kind.QUANTITY),
    ),
    Shape(
        (
            "List the different {column} values of {things}.",
            "Show each distinct {column} of {things}.",
            "Which unique {column} values do we have for {things}?",
        ),
        columns=(Kind.CATEGORY,),
        is_distinct=True,
    ),
    Shape(
        ("How many {things} are there?", "Count the {things}.", "What is the number of {things}?"),
        num_conditions=(1, 2),
        functions=("COUNT",),
    ),
    Shape(
        (
            "What is the {function} {column} of {things}?",
            "Find the {function} {column} of {things}.",
            "Tell me the {function} {column} for {things}.",
        ),
        num_conditions=(0, 1, 2),
        columns=(Kind.QUANTITY,),
        functions=AGGREGATES,
    ),
    Shape(
        (
            "List the {column} of {things}, only the {limit} with the {direction} {order_by}.",
            "Among {things}, which {limit} have the {direction} {order_by}? Give the {column}.",
            "Show the {column} of the {limit} {things} by {direction} {order_by}.",
        ),
        columns=TEXTS,
        directions=("DESC", "ASC"),
    ),
    Shape(
        (
            "How many {things} are there for each {group_by}?",
            "Count the {things} per {group_by}.",
            "Show each {group_by} with the number of {things}.",
        ),
        functions=("COUNT",),
        is_grouped=True,
    ),
    Shape(
        (
            "What is the {function} {column} of {things} for each {group_by}?",
            "Find the {function} {column} of {things} per {group_by}.",
            "Show each {group_by} with the {function} {column} of {things}.",
        ),
        num_conditions=(0,),
        columns=(Kind.QUANTITY,),
        functions=AGGREGATES,
        is_grouped=True,
    ),
)


# --- Drawing examples ------------------------------------------------------------------------------

NUM_ROWS = 8
NUM_SHARED_VALUES = 3
LIMITS = (2, 3, 4)


@dataclass(frozen=True)
class Example:
    """A question on a schema, and the query that answers it; no model sees `sql_fixture`.

    Attributes:
        prompt: schema and question.
        careless_sql: the query as many would write it.
        confused_sql: a query that is easily taken for the right one.
    """

    sql_prompt: str
    sql_context: str
    sql: str
    sql_fixture: str
    prompt: str
    careless_sql: str
    confused_sql: str


def _examples(
    rng: random.Random, accepts: Callable[[Query, str], bool] = lambda *_: True, other_than: Collection[str] = ()
) -> Iterator[Example]:
    seen = set()
    while True:
        example = _draw_example(rng, accepts)
        pair = (example.sql_context, example.sql_prompt)
        if example.sql_context not in other_than and pair not in seen:
            seen.add(pair)
            yield example


def _draw_example(rng: random.Random, accepts: Callable[[Query, str], bool]) -> Example:
    table, shape = _draw_table(rng), rng.choice(SHAPES)
    while True:
        rows = _draw_rows(rng, table)
        query, fixture = _draw_query(rng, table, shape, rng.choice(rows)), table.insert_sql(rows)
        if accepts(query, fixture):
            question, schema = _draw_prompt(rng, query, shape), table.create_sql
            others = (query.careless.sql, query.confused.sql)
            return Example(question, schema, query.sql, fixture, f"{schema}\n{question}", *others)


def _is_distinguishable(query: Query, fixture: str) -> bool:
    """Return whether executing the query distinguishes it from every near miss."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(query.table.create_sql + fixture)

        def rows(query: Query) -> list[tuple[object, ...]]:
            return sorted(database.execute(query.sql))

        right = rows(query)
        return bool(right) and all(rows(wrong) != right for wrong in query.near_misses())


def _draw_table(rng: random.Random) -> Table:
    domain = rng.choice(DOMAINS)
    columns = [
        _draw_column(rng, Kind.LABEL, domain.label),
        *_draw_columns(rng, Kind.CATEGORY, domain.categories),
        *_draw_columns(rng, Kind.QUANTITY, domain.quantities),
    ]
    rng.shuffle(columns)
    return Table(rng.choice(domain.tables), rng.choice(domain.nouns), tuple(columns))


def _draw_columns(rng: random.Random, kind: Kind, concepts: tuple[Concept, ...]) -> list[Column]:
    return [_draw_column(rng, kind, concept) for concept in rng.sample(concepts, rng.randint(1, 2))]


def _draw_column(rng: random.Random, kind: Kind, concept: Concept) -> Column:
    return Column(rng.choice(concept.names), kind, concept.phrases, concept.values)


def _draw_rows(rng: random.Random, table: Table) -> list[Row]:
    """Draw rows that share values in categories, but nowhere else."""
    cells = {}
    for column in table.columns:
        if column.kind is Kind.CATEGORY:
            cells[column] = rng.choices(rng.sample(column.values, NUM_SHARED_VALUES), k=NUM_ROWS)
        else:
            cells[column] = rng.sample(column.values, NUM_ROWS)
    return [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]


def _draw_query(rng: random.Random, table: Table, shape: Shape, row: Row) -> Query:
    """Draw a query of a shape; `row` meets its conditions."""
    column = rng.choice(table.columns_of(*shape.columns)) if shape.columns else None
    group_by = rng.choice(table.columns_of(Kind.CATEGORY)) if shape.is_grouped else None
    others = [each for each in table.columns_of(Kind.CATEGORY, Kind.QUANTITY) if each not in {column, group_by}]
    tested = rng.sample(others, min(len(others), rng.choice(shape.num_conditions)))
    return Query(
        table,
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
    start, is_ = rng.choice((("with", ""), ("whose", " is"), ("where", " is")))
    tests = []
    for condition in query.conditions:
        how = f" {rng.choice(PHRASES[condition.operator])}" if condition.operator in PHRASES else ""
        tests.append(f"{rng.choice(condition.column.phrases)}{is_}{how} {_literal(condition.value)}")
    return f"{query.table.noun} {start} {' and '.join(tests)}" if tests else query.table.noun
