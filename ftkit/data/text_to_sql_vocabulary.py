"""The words of the text-to-SQL demo task: what tables hold, and how questions ask for it."""

from collections.abc import Sequence
from dataclasses import dataclass

CITIES = ("Paris", "London", "Tokyo", "Madrid", "Oslo", "Cairo", "Lima", "Delhi", "Rome", "Dublin")
COUNTRIES = ("France", "Japan", "Spain", "Norway", "Egypt", "Peru", "India", "Italy", "Canada")
PEOPLE = (
    "Alice", "Bob", "Carla", "David", "Emma", "Frank", "Grace", "Hugo", "Irene", "Jack", "Karen",
    "Liam", "Maria", "Nina", "Oscar", "Paula",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "black", "white", "silver", "yellow", "orange")
LANGUAGES = ("English", "French", "German", "Spanish", "Hindi", "Arabic", "Korean")
TITLES = (
    "Aurora", "Beacon", "Cascade", "Delta", "Echo", "Falcon", "Galaxy", "Harbor", "Island",
    "Jupiter", "Kingdom", "Lagoon", "Meridian", "Nova", "Orbit", "Phoenix",
)  # fmt: skip


@dataclass(frozen=True)
class Concept:
    """What a column may hold; schemas call it one of `names`, questions one of `phrases`."""

    names: tuple[str, ...]
    phrases: tuple[str, ...]
    values: Sequence[str] | range


@dataclass(frozen=True)
class Domain:
    """A subject of tables. A table has the label and some categories and quantities."""

    tables: tuple[str, ...]
    nouns: tuple[str, ...]
    label: Concept
    categories: tuple[Concept, ...]
    quantities: tuple[Concept, ...]


NAME = Concept(("name", "full_name"), ("name",), PEOPLE)
TITLE = Concept(("title", "name"), ("title", "name"), TITLES)
CITY = Concept(("city", "town"), ("city", "town"), CITIES)
COUNTRY = Concept(("country", "nation"), ("country", "nation"), COUNTRIES)
COLOUR = Concept(("color", "paint"), ("color",), COLOURS)
LANGUAGE = Concept(("language", "tongue"), ("language",), LANGUAGES)
AGE = Concept(("age", "years"), ("age",), range(18, 80))
PRICE = Concept(("price", "cost"), ("price", "cost"), range(10, 1000))
YEAR = Concept(("year", "released"), ("year",), range(1960, 2025))
RATING = Concept(("rating", "score"), ("rating", "score"), range(10, 100))
WEIGHT = Concept(("weight", "mass"), ("weight",), range(10, 500))
STOCK = Concept(("stock", "quantity"), ("stock", "quantity"), range(10, 500))
DURATION = Concept(("duration", "minutes"), ("duration", "length"), range(20, 240))


def _category(names: tuple[str, ...], *values: str) -> Concept:
    return Concept(names, names, values)


DOMAINS = (
    Domain(
        ("employees", "staff", "workers"),
        ("employees", "workers"),
        NAME,
        (CITY, _category(("department", "team"), "Sales", "Legal", "Finance", "Support", "Design")),
        (AGE, Concept(("salary", "pay"), ("salary", "pay"), range(100, 1000))),
    ),
    Domain(
        ("students", "pupils", "learners"),
        ("students", "pupils"),
        NAME,
        (CITY, COUNTRY, _category(("subject", "course"), "Math", "History", "Physics", "Music")),
        (AGE, RATING, Concept(("absences", "missed"), ("absences",), range(10, 60))),
    ),
    Domain(
        ("cars", "vehicles", "autos"),
        ("cars", "vehicles"),
        Concept(("model", "name"), ("model", "name"), TITLES),
        (COLOUR, COUNTRY, _category(("fuel", "energy"), "petrol", "diesel", "electric", "hybrid")),
        (PRICE, YEAR, WEIGHT, Concept(("power", "horsepower"), ("power",), range(50, 500))),
    ),
    Domain(
        ("books", "novels", "volumes"),
        ("books", "novels"),
        TITLE,
        (LANGUAGE, _category(("genre", "category"), "fantasy", "crime", "poetry", "romance")),
        (PRICE, YEAR, Concept(("pages", "length"), ("pages",), range(50, 900))),
    ),
    Domain(
        ("movies", "films", "pictures"),
        ("movies", "films"),
        TITLE,
        (LANGUAGE, COUNTRY, _category(("genre", "category"), "drama", "comedy", "horror", "action")),
        (YEAR, RATING, DURATION, Concept(("budget", "cost"), ("budget",), range(10, 300))),
    ),
    Domain(
        ("hotels", "lodgings", "resorts"),
        ("hotels", "resorts"),
        Concept(("name", "hotel"), ("name",), TITLES),
        (CITY, COUNTRY, _category(("view", "outlook"), "sea", "garden", "street", "lake")),
        (PRICE, RATING, Concept(("rooms", "capacity"), ("rooms", "capacity"), range(10, 400))),
    ),
    Domain(
        ("products", "items", "goods"),
        ("products", "items"),
        Concept(("name", "product"), ("name",), TITLES),
        (COLOUR, _category(("brand", "maker"), "Acme", "Zenith", "Vertex", "Nimbus", "Orion")),
        (PRICE, STOCK, WEIGHT),
    ),
    Domain(
        ("players", "athletes", "members"),
        ("players", "athletes"),
        NAME,
        (COUNTRY, _category(("position", "role"), "keeper", "defender", "forward", "captain")),
        (AGE, WEIGHT, Concept(("goals", "points"), ("goals", "points"), range(10, 200))),
    ),
    Domain(
        ("flights", "trips", "journeys"),
        ("flights", "trips"),
        Concept(("pilot", "captain"), ("pilot", "captain"), PEOPLE),
        (Concept(("destination", "city"), ("destination",), CITIES),
         _category(("status", "state"), "early", "delayed", "canceled", "landed")),
        (PRICE, DURATION, Concept(("seats", "places"), ("seats",), range(40, 400))),
    ),
    Domain(
        ("pets", "animals", "dogs"),
        ("pets", "animals"),
        Concept(("name", "nickname"), ("name",), PEOPLE),
        (COLOUR, CITY, _category(("food", "diet"), "meat", "fish", "rice", "corn")),
        (Concept(("age", "months"), ("age",), range(10, 200)), WEIGHT),
    ),
)  # fmt: skip

OPERATOR_PHRASES = {
    ">": ("above", "over", "greater than", "more than"),
    "<": ("below", "under", "less than"),
    ">=": ("at least",),
    "<=": ("at most",),
}
FUNCTION_PHRASES = {
    "AVG": ("average", "mean"),
    "SUM": ("total", "combined"),
    "MAX": ("highest", "maximum"),
    "MIN": ("lowest", "minimum"),
}
ORDER_PHRASES = {"DESC": ("highest", "largest"), "ASC": ("lowest", "smallest")}

LIST_TEMPLATES = (
    "List the {column} of {things}.",
    "Show the {column} of all {things}.",
    "What is the {column} of {things}?",
    "Give me the {column} for {things}.",
)
DISTINCT_TEMPLATES = (
    "List the different {column} values of {things}.",
    "Show each distinct {column} of {things}.",
    "Which unique {column} values do we have for {things}?",
)
COUNT_TEMPLATES = (
    "How many {things} are there?",
    "Count the {things}.",
    "What is the number of {things}?",
)
AGGREGATE_TEMPLATES = (
    "What is the {function} {column} of {things}?",
    "Find the {function} {column} of {things}.",
    "Tell me the {function} {column} for {things}.",
)
TOP_TEMPLATES = (
    "List the {column} of {things}, only the {limit} with the {order} {order_column}.",
    "Among {things}, which {limit} have the {order} {order_column}? Give the {column}.",
    "Show the {column} of the {limit} {things} by {order} {order_column}.",
)
GROUP_COUNT_TEMPLATES = (
    "How many {things} are there for each {group}?",
    "Count the {things} per {group}.",
    "Show each {group} with the number of {things}.",
)
GROUP_AGGREGATE_TEMPLATES = (
    "What is the {function} {column} of {things} for each {group}?",
    "Find the {function} {column} of {things} per {group}.",
    "Show each {group} with the {function} {column} of {things}.",
)
