"""Read the configurations of other tools: YAML, JSON, shell scripts, Python and notebooks. No code is run."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ftkit.config.yaml_files import parse_bytes, parse_override
from ftkit.errors import ConfigError, NotFoundError, Problem, one_line
from ftkit.files import read_small

Settings = dict[str, Any]
"""Values by key. Nested keys are joined with dots, and items of lists have an index: `datasets[0].path`."""
_LAUNCHERS: Final = frozenset(
    ("accelerate", "accelerate-launch", "torchrun", "deepspeed", "trl", "axolotl", "llamafactory-cli", "tune",
     "automodel", "python", "python3")
)  # fmt: skip
_VARIABLE: Final = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_WHICH: Final = re.compile(r"\$\(which ([\w-]+)\)|`which ([\w-]+)`")
_COUNTS: Final = ("NNODES", "NPROC_PER_NODE")  # variables
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


class Code(str):
    """An expression whose value is known only when the program runs."""

    __slots__ = ()


def read_foreign(path: Path, calls: Mapping[str, Sequence[str]]) -> Settings:
    """Read a configuration in any format; `calls` are Python functions with the names of their positional arguments.

    Raises NotFoundError: the file can't be read; ConfigError: it is damaged.
    """
    try:
        data = read_small(path)
    except OSError as error:
        raise NotFoundError(f"can't read {path}: {error.strerror}", fix="check the path") from error
    try:
        text = data.decode("utf-8-sig")
        match path.suffix.lower():
            case ".yaml" | ".yml":
                return _resolved(dict(_flat(parse_bytes(data, str(path)).values)))
            case ".json":
                return dict(_flat(json.loads(text)))
            case ".ipynb":
                return _read_python(_notebook_code(json.loads(text)), str(path), calls)
            case ".py":
                return _read_python(text, str(path), calls)
            case _:
                return _read_commands(text)
    except (UnicodeDecodeError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        fix = "Is it complete, and is its suffix right?"
        raise ConfigError([Problem(str(path), "", f"can't be read: {one_line(error)}.", fix)]) from error


def _flat(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and (value or not prefix):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for index, each in enumerate(value):
            yield from _flat(each, f"{prefix}[{index}]")
    else:
        yield prefix, value


def _resolved(settings: Settings) -> Settings:
    """Replace `${key}`, as torchtune and NeMo do; other references are known only when the tool runs."""

    def fill(value: object, depth: int = 0) -> object:
        if not isinstance(value, str) or "${" not in value or depth > len(settings):
            return value
        if (whole := re.fullmatch(r"\$\{([\w.]+)\}", value)) and whole[1] in settings:
            return fill(settings[whole[1]], depth + 1)
        filled = re.sub(r"\$\{([\w.]+)\}", lambda found: str(settings.get(found[1], found[0])), value)
        return Code(value) if filled == value else fill(filled, depth + 1)

    return {key: fill(value) for key, value in settings.items()}


# --- Shell -----------------------------------------------------------------------------------------


def _read_commands(text: str) -> Settings:
    """Read the options of all commands that start training; `$NAME` is replaced if the script sets it.

    Raises ValueError: a quote is not closed.
    """
    settings: Settings = {}
    variables: dict[str, str] = {}
    pending = ""
    for line in _WHICH.sub(r"\1\2", text.replace("\\\n", " ")).splitlines():
        pending = f"{pending}\n{line}" if pending else line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # the quote ends on a later line
            continue
        pending = ""
        while words:
            end = next((i for i, word in enumerate(words) if word in {"&&", "||", ";", "|", "&"}), len(words))
            _read_command([_fill(word, variables) for word in words[:end]], variables, settings)
            words = words[end + 1 :]
    if pending:
        raise ValueError("a quote is not closed")
    return dict(_flat(settings))


def _fill(word: str, variables: Mapping[str, str]) -> str:
    filled = _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], found[0]), word)
    return Code(filled) if "$" in filled or "`" in filled else filled


def _read_command(words: list[str], variables: dict[str, str], settings: Settings) -> None:
    """Add the variables that a command sets, or its options if it starts training."""
    words = words[1:] if words[:1] == ["export"] else words
    num_given = next((i for i, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
    given = {name: value for name, _, value in (word.partition("=") for word in words[:num_given])}
    if num_given == len(words):
        variables |= given
    settings |= {key: value for key, value in given.items() if key.startswith(("CUDA_VISIBLE", "WANDB_PROJECT"))}
    settings |= {key: int(given[key]) for key in _COUNTS if given.get(key, "").isdecimal()}
    programs = [word for word in words[num_given:] if Path(word).name in _LAUNCHERS]
    if not programs or len(words) == num_given + 1:
        return
    settings.setdefault("program", Path(programs[0]).name)
    _read_options(words[num_given:], programs, settings)


def _read_options(words: list[str], programs: list[str], settings: Settings) -> None:
    """Add a command's options, its script or file, and its subcommand."""
    key = ""
    for previous, word in pairwise(["", *words]):
        name, equals, value = word.partition("=")
        if previous == "-m":  # a module, as `torchrun -m trl.scripts.sft`
            settings["script"] = f"{word.rpartition('.')[2]}.py"
        elif re.match("-[A-Za-z]", word) or word in programs:
            key = ""
        elif word.startswith("--") and len(word) > 2:  # noqa: PLR2004 - more than the dashes
            key = name[2:].replace("-", "_")
            settings[key] = _scalar(value, word) if equals else True
        elif word.endswith((".py", ".yaml", ".yml", ".json")) and settings.get(key) is not True:
            settings["script" if word.endswith(".py") else "config"], key = Path(word).name, ""
        elif key and settings[key] is True:
            settings[key] = _scalar(word, word)
        elif key and "=" not in word:  # an option with several values
            before = settings[key] if isinstance(settings[key], list) else [settings[key]]
            settings[key] = [*before, _scalar(word, word)]
        elif equals:
            settings[name] = _scalar(value, word)
        elif not word.startswith("-"):
            settings["command"] = word


def _scalar(text: str, source: str) -> object:
    if isinstance(source, Code):
        return Code(text)
    if text[:1] in "'\"" or (text[0] == "{" and not _is_json(text)):  # `{input}` is a template
        return text
    return parse_override(f"x={text}").values["x"]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# --- Python ----------------------------------------------------------------------------------------


def _notebook_code(notebook: Any) -> str:
    """Return the code of a notebook; IPython lines become `pass`, and cells in other languages are skipped."""
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    python = [cell for cell in cells if not cell.startswith("%%") or cell.startswith(("%%capture", "%%time"))]
    return re.sub(r"(?m)^([ \t]*)[%!].*", r"\1pass", "\n".join(python))


def _read_python(text: str, where: str, calls: Mapping[str, Sequence[str]]) -> Settings:
    """Read the arguments of calls in a program: `LoraConfig.r`; a second call of a function is `LoraConfig[1]`.

    Literals are read, also from variables that are assigned earlier; any other value is `Code`.

    Raises ConfigError: it is not Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        message = f"not valid Python: {error.msg}."
        raise ConfigError([Problem(f"{where}:{error.lineno}", "", message, "Correct it, and try again.")]) from error
    nodes = sorted(_walk(tree), key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))
    names: dict[str, ast.expr] = {}
    settings: Settings = {}
    numbers: dict[str, int] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            names |= dict(_assigned(node.targets[0], node.value))
        if not isinstance(node, ast.Call) or (name := _call_name(node.func, calls)) is None:
            continue
        owner = ast.unparse(node.func).rpartition(".")[0].rpartition(".")[2]
        settings |= {owner: True} if owner in calls else {}
        number = numbers[name] = numbers.get(name, -1) + 1
        name += f"[{number}]" if number else ""
        settings[name] = True
        positions = [*calls.get(name, ()), *(f"argument{index}" for index in range(len(node.args)))]
        arguments = [
            *zip(positions, node.args, strict=False),
            *((each.arg or "**", each.value) for each in node.keywords),
        ]
        for key, value in arguments:
            settings |= dict(_flat(_literal(value, names), f"{name}.{key}"))
    return settings


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    is_off = isinstance(node, ast.If) and isinstance(node.test, ast.Constant) and not node.test.value
    for child in node.orelse if isinstance(node, ast.If) and is_off else ast.iter_child_nodes(node):
        yield from _walk(child)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each, part in zip(target.elts, value.elts, strict=False):
            yield from _assigned(each, part)
    elif isinstance(target, ast.Name):
        yield target.id, value


def _call_name(function: ast.expr, calls: Mapping[str, Sequence[str]]) -> str | None:
    owner, _, name = ast.unparse(function).rpartition(".")
    if name == "from_pretrained" and ("Peft" in owner or "Model" not in owner):
        return None  # loads a tokenizer, or an adapter for inference
    if owner and name in calls.get("DatasetMethod", ()):
        return f"DatasetMethod.{name}"
    return name if name in calls or re.fullmatch(r"\w+Trainer", name) else None


def _literal(node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0) -> Any:
    """Return a literal's value, resolving names and dictionaries; `Code` for any other expression."""
    if isinstance(node, ast.Name) and node.id in names and depth < 10:  # noqa: PLR2004 - names that refer to each other
        value = _literal(names[node.id], names, depth + 1)
        return Code(node.id) if isinstance(value, Code) else value
    if isinstance(node, ast.Dict):
        keys = [str(_literal(key, names, depth)) if key else "**" for key in node.keys]
        return {key: _literal(value, names, depth) for key, value in zip(keys, node.values, strict=True)}
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
        return node.attr
    try:
        value = ast.literal_eval(node)
        return json.loads(json.dumps(value))  # a tuple becomes a list; bytes and sets are refused
    except (ValueError, TypeError, MemoryError, RecursionError):
        return Code(ast.unparse(node))
