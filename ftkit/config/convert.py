"""Convert the configuration of another tool to a recipe, with a row for each of its keys, without reading files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any, Final

from ftkit.config.convert_data import DETECTED, set_datasets, set_heldout
from ftkit.config.convert_rows import ANOTHER, AS_HERE, DATASET, OBJECTIVE, Conversion, Row
from ftkit.config.foreign_files import Code, Settings
from ftkit.config.objectives import OPTIONS, DistillSpec
from ftkit.config.other_tools import TOOLS, read_tool, read_values
from ftkit.errors import ConfigError, Problem, plural
from ftkit.models.adapters import ALL_PROJECTIONS
from ftkit.spec import as_name

_DOCUMENTS: Final = (
    ", each one document there; a pack here has as many as fit, so a step trains more of them. To train as many, "
    "convert with --mean-length TOKENS, which 'ftkit data stats' prints"
)
_NO_LOWEST: Final = (
    "its lowest learning rate is not known: 0 here. transformers has no default: without min_lr or min_lr_rate in "
    "lr_scheduler_kwargs, training does not start"
)
_EVERY: Final = ("evaluation.every_steps", "training.checkpoint_every_steps", "training.log_every_steps")
_FILE_NAMES: Final = (".file_name", ".hf_hub_url", ".script_url")
"""Keys of the entries of `dataset_info.json`."""
_COLUMNS: Final = {".columns.prompt": "instruction", ".columns.query": "input", ".columns.response": "output"}
"""Their default columns."""
_PACKS: Final = "ftkit packs documents, which do not attend to each other; data.packing: off trains one per row, slower"


@dataclass(frozen=True)
class Converted:
    tool: str
    recipe: dict[str, Any]
    rows: list[Row]


def detect_tool(parts: Mapping[str, Settings]) -> str:
    """Return the tool with the most marks in the input. Raises ConfigError: the input has no tool's marks."""
    keys = {mark for part in parts.values() for key, value in part.items() for mark in (key, f"{key}={value}")}
    keys |= {f"*{key.rpartition('.')[2]}" for key in keys}
    marks = {tool: len(keys & read_tool(tool).marks) for tool in TOOLS}
    marks |= {tool: len(keys) for tool in TOOLS if {f"{key}!" for key in keys} & read_tool(tool).marks}
    if not any(marks.values()):
        fix = f"Set the tool with --tool {' | '.join(TOOLS)}. A program that reads its command line has no values: "
        fix += "convert the shell script that calls it."
        raise ConfigError([Problem(next(iter(parts)), "", "its keys are of no tool that ftkit knows.", fix)])
    return max(TOOLS, key=lambda tool: marks[tool])


def convert(
    parts: Mapping[str, Settings], tool: str, name: str, *, num_gpus: int | None = None, mean_length: int | None = None
) -> Converted:
    """Convert the parts of a configuration, by file: those of the tool and of its launcher.

    `name` and `num_gpus` are used if the input does not set them. `mean_length` is the mean number of tokens per
    document, which converts a batch of documents to packs.

    Raises ConfigError: the input uses an objective or a method that ftkit does not have.
    """
    it = Conversion(read_tool(tool))
    lists = {file: part for file, part in parts.items() if any(key.endswith(_FILE_NAMES) for key in part)}
    for file, part in parts.items():
        for key, value in part.items() if file not in lists else ():
            it.sort(Row(file, key, value), key)
    _find_named_datasets(it, lists)
    it.add_defaults()
    _set_method(it)
    _set_targets(it)
    _set_vision(it)
    _set_length(it)
    _set_batch(it, num_gpus, mean_length)
    _set_schedule(it)
    _set_data(it)
    _set_objective(it)
    _set_trackers(it)
    recipe = it.validated(as_name(name, "converted"))
    for row in it.rows:
        row.hide_secret()
    return Converted(it.tool.name, recipe, [row for row in it.rows if row.became or not row.is_default])


def _find_named_datasets(it: Conversion, lists: Mapping[str, Settings]) -> None:
    """Read the entries of LLaMA-Factory's `dataset_info.json` for the datasets in the configuration."""
    note = "see the rows of dataset_info.json" if lists else "dataset_info.json defines it: give that file, too"
    named = next((row.value for row in it.rows if row.key == "dataset_dir"), None)
    stage = next((row.value for row in it.rows if row.key == "stage"), "sft")
    used = [("info", row) for row in it.take(f"{DATASET}names", note)]
    used += [("held", row) for row in it.take("heldout_names", note)]
    for use, names in used:
        for index, name in enumerate(each.strip() for each in str(names.value).split(",")):
            for file, part in lists.items():
                folder = Path(named or Path(file).parent)
                given = {key.removeprefix(name): part[key] for key in part if key.startswith(f"{name}.")}
                for key, value in given.items():
                    path = str(folder / value) if key == ".file_name" else value
                    it.sort(Row(file, name + key, path, index=index), use + key)
                is_plain = given.get(".formatting", "alpaca") == "alpaca" and not given.get(".ranking")
                is_plain &= stage == "sft" and ".script_url" not in given
                if given and is_plain and not any(key.startswith(".columns.") for key in given):
                    for key, column in _COLUMNS.items():
                        it.sort(Row(file, name + key, column, is_default=True, index=index), use + key)
    for file, part in lists.items():
        if others := len({key.partition(".")[0] for key in part} - {row.key.partition(".")[0] for row in it.rows}):
            it.rows.append(Row(file, "(others)", others, note="datasets that this configuration does not use"))


def _set_method(it: Conversion) -> None:
    kinds = [*it.take("method", "off"), *it.take("lora", "off")]
    it.take("unsloth_model", "ftkit reads the model's class from its folder")
    wide = it.take("load_in_16bit", "as by default here, with training.method: lora")
    is_wide = "training.base_precision" in it.recipe or any(row.value is True for row in wide)
    bits = it.take("load_in_4bit", "off, or for 4 bits: training.method: qlora")
    bits = [row for row in bits if not (row.is_default and is_wide)]
    words = ["lora" if row.value is True else str(row.value).lower() for row in kinds if row.value is not False]
    has_adapters = any("lora" in word for word in words)
    is_4bit = any(row.value in {True, 4} for row in bits) or any("qlora" in word for word in words)
    method = ("qlora" if is_4bit else "lora") if has_adapters else "full"
    other = next((word for word in words if word not in {"full", "none"} and method == "full" and "." not in word), "")
    note = f"ftkit has no '{other}': it trains all weights, or LoRA" if other else ""
    used = [row for row in (*kinds, *bits) if row in kinds or (row.value and has_adapters)]
    it.put("training.method", method, *used, note=note, is_changed=bool(other))


def _set_targets(it: Conversion) -> None:
    rows = it.take("targets", "all linear layers, as by default here (in a mixture of experts: of attention only)")
    targets: list[str] = []
    for row in rows:
        value = row.value.split(",") if isinstance(row.value, str) and not set("(|") & set(row.value) else row.value
        if row.key.endswith("apply_lora_to_mlp"):
            value = ["gate_proj", "up_proj", "down_proj"] if value else []
        names = [str(name).strip() for name in (value if isinstance(value, list) else [value])]
        if {"all-linear", "all", "*", "True"} & set(names):
            return
        targets += [found for name in names for found in _match_projections(name)]
    if targets:
        note = "embeddings and the output projection are left out: they stay frozen here"
        is_changed = any(word in str(row.value) for row in rows for word in ("lm_head", "embed_tokens"))
        it.put("training.lora.targets", [*dict.fromkeys(targets)], *rows, note=note * is_changed, is_changed=is_changed)


def _set_vision(it: Conversion) -> None:
    for part, trained in (("vision_tower", "full"), ("vision_projector", "projector")):
        for row in it.take(part, "frozen, as by default here"):
            if row.value is False and it.recipe["training.method"] == "full":
                it.put("training.vision", trained, row)
            elif row.value is False:
                row.note = f"with adapters, the vision part is frozen here unless training.vision is set: {trained}"


def _set_length(it: Conversion) -> None:
    (steps, by_steps), (part, by_part) = it.number("max_steps"), it.number("max_steps_per_epoch")
    epochs, by_epochs = it.number("epochs", "the number of steps counts, there and here")
    if steps:
        it.put("training.max_steps", steps, *by_steps)
    elif part:
        note = f"{part:g} steps × {epochs or 1:g} epochs"
        it.put("training.max_steps", part * (epochs or 1), *by_part, *by_epochs, note=note)
    elif epochs:
        it.put("training.num_epochs", epochs, *by_epochs)
    total = it.recipe.get("training.max_steps")
    for key in _EVERY:  # below 1, transformers takes them as a fraction of all steps
        every = it.recipe.get(key)
        if total and isinstance(every, float) and 0 < every < 1:
            rows = it.sources[key]
            it.remove(key, "")
            it.put(key, ceil(every * total), *rows, note=f"{every:g} of {total:g} steps")


def _count_gpus(it: Conversion, num_gpus: int | None) -> tuple[int, str, list[Row]]:
    note = "the number of processes counts"
    (total, rows), (per_node, by_node) = it.number("num_processes"), it.number("processes_per_node", note)
    nodes, by_nodes = it.number("nodes", note)
    devices = [row for row in it.take("devices", note) if not isinstance(row.value, Code)]
    if not total and per_node:
        total, rows = per_node * (nodes or 1), [*by_node, *by_nodes]
    if not total and devices:
        total, rows = len(str(devices[0].value).split(",")), devices[:1]
    assumed = "" if total or num_gpus else " (assumed: --gpus N)"
    return int(total or num_gpus or 1), assumed, rows


def _set_batch(it: Conversion, num_gpus: int | None, mean_length: int | None) -> None:
    (total, by_total), (each, by_each) = it.number("global_batch"), it.number("per_device_batch")
    accumulation, by_steps = it.number("accumulation")
    gpus, assumed, by_gpus = _count_gpus(it, num_gpus)
    packed = it.take("packed", _PACKS)
    if size := next((row for row in packed if type(row.value) is int and row.value > 1), None):
        it.remove("training.sequence_length", "the length of a pack counts")
        it.put("training.sequence_length", size.value, size)
    if not total and not each:
        return
    parallel = [it.recipe.get(f"training.{kind}_parallel") for kind in ("context", "tensor")]
    shared = prod(degree for degree in parallel if isinstance(degree, int) and degree > 0)
    if gpus < shared:
        gpus, assumed = shared, f" (assumed: at least {shared})"
    replicas = gpus // shared  # GPUs that share sequences are one process of a data-parallel group
    sequences = int(total or (each or 1) * (accumulation or 1) * replicas)
    factors = f"{each or 1:g} per GPU × {accumulation or 1:g} accumulation × {plural(gpus, 'GPU')}{assumed}"
    factors += f" / {shared} that share each sequence" * (shared > 1)
    note = f"{'over all GPUs' if total else factors} = {plural(sequences, 'sequence')}"
    size_here, length = sequences, it.recipe.get("training.sequence_length")
    is_packed = any(row.value and not isinstance(row.value, Code) for row in packed)
    if not is_packed and mean_length and isinstance(length, int):
        size_here = replicas * max(1, round(sequences * mean_length / max(1, length) / replicas))
        note += f", each one document: × {mean_length} tokens / {length} = {plural(size_here, 'pack')}"
        note += f", a multiple of {plural(replicas, 'GPU')}" * (replicas > 1)
    elif not is_packed:
        note += _DOCUMENTS
    rows = by_total or [*by_each, *by_steps, *by_gpus]
    is_changed = bool(assumed and not total) or not is_packed
    it.put("training.global_batch_size", size_here, *rows, note=note, is_changed=is_changed)


def _set_schedule(it: Conversion) -> None:
    steps, rows = it.number("warmup_steps", "the number of steps is not known yet; 'ftkit data stats' prints it: set "
                              "training.warmup_ratio, 0.03 until then, to these steps / all steps")  # fmt: skip
    total = it.recipe.get("training.max_steps", 0)
    if steps:
        it.remove("training.warmup_ratio", "the number of steps counts")
    if steps is not None and (steps < 1 or total):
        ratio, note = (steps, "") if steps < 1 else (min(1.0, round(steps / total, 4)), f"{steps:g} of {total} steps")
        is_cut = steps > max(total, 1)
        note += ": there, training ends before the learning rate is reached; here, it is reached at the end" * is_cut
        it.put("training.warmup_ratio", ratio, *rows, note=note, is_changed=is_cut)
    lowest, by_lowest = it.number("min_lr")
    highest = it.recipe.get("training.learning_rate")
    if lowest is not None and isinstance(highest, int | float) and highest > 0:
        ratio = min(1.0, round(lowest / highest, 6))
        it.put("training.min_learning_rate_ratio", ratio, *by_lowest, note=f"{lowest:g} / {highest:g}")
    for row in it.sources.get("training.schedule", ()):
        if "min_lr" in str(row.value) and "training.min_learning_rate_ratio" not in it.recipe:
            row.note, row.status = _NO_LOWEST, "changed"
    (beta1, by_1), (beta2, by_2) = it.number("beta1"), it.number("beta2")
    if beta1 is not None or beta2 is not None:
        betas = [0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2]
        it.put("training.betas", betas, *by_1, *by_2)
    for row in it.take("max_grad_norm"):
        it.put("training.max_grad_norm", row.value or 10**9, row, note="" if row.value else "no clipping")


def _set_data(it: Conversion) -> None:
    set_datasets(it)
    set_heldout(it)
    for row in it.take("validation", "no validation split"):
        if isinstance(row.value, int | float) and row.value > 0:
            it.put("data.validation", {"fraction": row.value} if row.value < 1 else {"count": int(row.value)}, row)
    note = "there is no validation split here: set data.validation, for example {fraction: 0.02}, and this key"
    for key in [key for key in it.recipe if key.startswith("evaluation.") and "data.validation" not in it.recipe]:
        it.remove(key, note)


def _set_objective(it: Conversion) -> None:
    named = {fact.removeprefix(OBJECTIVE): it.take(fact) for fact in [*it.facts] if fact.startswith(OBJECTIVE)}
    name = next((each for each in named if each not in {"dpo", "cpo"}), "dpo" if named else "")
    if "cpo" in named and name != "simpo":
        row = named["cpo"][0]
        problem = Problem(row.file, row.key, "ftkit has no CPO, but simpo.", "Convert with loss_type: simpo.")
        raise ConfigError([problem])
    weight, by_weight = it.number("cpo_alpha", "a part of CPO's losses alone")
    by_weight = by_weight if weight and name == "simpo" else []
    note = f"there, {weight:g} × the chosen completion's next-token loss is added (cpo_alpha)" if by_weight else ""
    if name:
        by_name = [row for rows in named.values() for row in rows]
        it.put("training.objective", name, *by_name, *by_weight, note=note, is_changed=bool(note))
        for row in [row for row in it.rows if row.note == AS_HERE]:
            row.note = ANOTHER
    if name not in {"", "distill"}:
        it.remove("data.train_on", "completions are trained")
        if not (isinstance(form := it.recipe.get("data.format"), dict) and form["kind"] == "preferences"):
            it.remove("data.format", DETECTED)
        if it.recipe.get("data.too_long") == "truncate":
            rows = it.sources["data.too_long"]
            it.remove("data.too_long", "")
            it.put("data.too_long", "drop", *rows, note="a completion is never cut", is_changed=True)
    for key in [key for key in it.recipe if key.startswith("objective.")]:
        value, rows, option = it.recipe[key], it.sources[key], key.removeprefix("objective.")
        it.remove(key, f"objective {name or 'next_token'} has no such option")
        if name and option in {**OPTIONS, "distill": DistillSpec}[name].model_fields:
            it.put(f"training.{name}.{option}", value, *rows)


def _set_trackers(it: Conversion) -> None:
    table, sinks, used = read_values()["trackers"], [], []
    for row in it.take("tracker", "ftkit writes metrics.jsonl, and sends it to tensorboard, wandb, mlflow, or none"):
        value = row.key.removeprefix("use_") if row.value is True else row.value
        words = value if isinstance(value, list) else [value]
        found = [table.get(str(word).rpartition(".")[2].lower()) for word in words]
        sinks += [sink for sink in found if sink]
        used += [row] if any(found) else []
    for row in it.take("wandb_project"):
        it.put("tracking.project", row.value, row)
        sinks.append("wandb")
    if sinks:
        it.put("tracking.sinks", list(dict.fromkeys(sinks)), *used)


def _match_projections(name: str) -> list[str]:
    """Return the linear layers that a name, a pattern with `*`, or a regular expression selects."""
    last = {"output_proj": "o_proj"}.get(name, name.rpartition(".")[2].lstrip("*"))
    if re.fullmatch(r"[A-Za-z]\w*", last):
        return [] if last in {"lm_head", "embed_tokens", "output", "False", "None"} else [last]
    pattern = name if set("(|[\\") & set(name) else re.escape(name).replace(r"\*", ".*")
    paths = {f"{model}.layers.0.{'self_attn' if each[0] in 'qkvo' else 'mlp'}.{each}": each
             for model in ("model", "model.language_model") for each in ALL_PROJECTIONS}  # fmt: skip
    try:
        return [each for path, each in paths.items() if re.fullmatch(pattern, path)]
    except re.error:
        return []
