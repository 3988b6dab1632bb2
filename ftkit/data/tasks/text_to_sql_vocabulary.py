"""The words of the text-to-SQL demo task: values of tables, and phrases of questions."""

from collections.abc import Sequence
from dataclasses import dataclass

from ftkit.data.tasks.text_to_sql_query import AGGREGATES, TEXTS, Cell, Kind

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
    """A subject of tables. A table has the label, some categories and some quantities.

    `parents` are tables that its rows may belong to: the name, and the word for one row.
    """

    tables: tuple[str, ...]
    nouns: tuple[str, ...]
    label: Concept
    categories: tuple[Concept, ...]
    quantities: tuple[Concept, ...]
    parents: tuple[tuple[str, str], ...]


NAME = Concept(("name", "full_name"), ("name",), PEOPLE)
TITLE = Concept(("title", "name"), ("title", "name"), TITLES)
CITY = Concept(("city", "town"), ("city", "town"), CITIES)
COUNTRY = Concept(("country", "nation"), ("country", "nation"), COUNTRIES)
COLOR = Concept(("color", "paint"), ("color",), COLORS)
LANGUAGE = Concept(("language", "tongue"), ("language",), LANGUAGES)
AGE = Concept(("age", "years"), ("age",), range(18, 80))
PRICE = Concept(("price", "cost"), ("price", "cost"), range(10, 1000))
YEAR = Concept(("year", "released"), ("year",), range(1960, 2025))
RATING = Concept(("rating", "score"), ("rating", "score"), range(10, 100))
WEIGHT = Concept(("weight", "mass"), ("weight",), range(10, 500))
STOCK = Concept(("stock", "quantity"), ("stock", "quantity"), range(10, 500))
DURATION = Concept(("duration", "minutes"), ("duration", "length"), range(20, 240))
PARENT_CATEGORIES = (CITY, COUNTRY)


def _category(names: tuple[str, ...], *values: str) -> Concept:
    return Concept(names, names, values)


DOMAINS = (
    Domain(
        ("employees", "staff", "workers"),
        ("employees", "workers"),
        NAME,
        (CITY, _category(("department", "team"), "Sales", "Legal", "Finance", "Support", "Design")),
        (AGE, Concept(("salary", "pay"), ("salary", "pay"), range(100, 1000))),
        (("offices", "office"), ("branches", "branch")),
    ),
    Domain(
        ("students", "pupils", "learners"),
        ("students", "pupils"),
        NAME,
        (CITY, COUNTRY, _category(("subject", "course"), "Math", "History", "Physics", "Music")),
        (AGE, RATING, Concept(("absences", "missed"), ("absences",), range(10, 60))),
        (("schools", "school"), ("colleges", "college")),
    ),
    Domain(
        ("cars", "vehicles", "autos"),
        ("cars", "vehicles"),
        Concept(("model", "name"), ("model", "name"), TITLES),
        (COLOR, COUNTRY, _category(("fuel", "energy"), "petrol", "diesel", "electric", "hybrid")),
        (PRICE, YEAR, WEIGHT, Concept(("power", "horsepower"), ("power",), range(50, 500))),
        (("dealers", "dealer"), ("sellers", "seller")),
    ),
    Domain(
        ("books", "novels", "volumes"),
        ("books", "novels"),
        TITLE,
        (LANGUAGE, _category(("genre", "category"), "fantasy", "crime", "poetry", "romance")),
        (PRICE, YEAR, Concept(("pages", "length"), ("pages",), range(50, 900))),
        (("authors", "author"), ("writers", "writer")),
    ),
    Domain(
        ("movies", "films", "pictures"),
        ("movies", "films"),
        TITLE,
        (LANGUAGE, COUNTRY, _category(("genre", "category"), "drama", "comedy", "horror", "action")),
        (YEAR, RATING, DURATION, Concept(("budget", "cost"), ("budget",), range(10, 300))),
        (("directors", "director"), ("studios", "studio")),
    ),
    Domain(
        ("hotels", "lodgings", "resorts"),
        ("hotels", "resorts"),
        Concept(("name", "hotel"), ("name",), TITLES),
        (CITY, COUNTRY, _category(("view", "outlook"), "sea", "garden", "street", "lake")),
        (PRICE, RATING, Concept(("rooms", "capacity"), ("rooms", "capacity"), range(10, 400))),
        (("owners", "owner"), ("chains", "chain")),
    ),
    Domain(
        ("products", "items", "goods"),
        ("products", "items"),
        Concept(("name", "product"), ("name",), TITLES),
        (COLOR, _category(("brand", "maker"), "Acme", "Zenith", "Vertex", "Nimbus", "Orion")),
        (PRICE, STOCK, WEIGHT),
        (("suppliers", "supplier"), ("vendors", "vendor")),
    ),
    Domain(
        ("players", "athletes", "members"),
        ("players", "athletes"),
        NAME,
        (COUNTRY, _category(("position", "role"), "keeper", "defender", "forward", "captain")),
        (AGE, WEIGHT, Concept(("goals", "points"), ("goals", "points"), range(10, 200))),
        (("clubs", "club"), ("squads", "squad")),
    ),
    Domain(
        ("flights", "trips", "journeys"),
        ("flights", "trips"),
        Concept(("pilot", "captain"), ("pilot", "captain"), PEOPLE),
        (Concept(("destination", "city"), ("destination",), CITIES),
         _category(("status", "state"), "early", "delayed", "canceled", "landed")),
        (PRICE, DURATION, Concept(("seats", "places"), ("seats",), range(40, 400))),
        (("airlines", "airline"), ("carriers", "carrier")),
    ),
    Domain(
        ("pets", "animals", "dogs"),
        ("pets", "animals"),
        Concept(("name", "nickname"), ("name",), PEOPLE),
        (COLOR, CITY, _category(("food", "diet"), "meat", "fish", "rice", "corn")),
        (Concept(("age", "months"), ("age",), range(10, 200)), WEIGHT),
        (("owners", "owner"), ("keepers", "keeper")),
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
