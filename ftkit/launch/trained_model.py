"""Trained models to continue from: an earlier run's export, one of its checkpoints, or peft adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftkit.errors import ConfigError, NotFoundError, Problem
from ftkit.files import read_json_if_valid, sha256_of
from ftkit.models.architecture import ArchitectureFields, ModelPlan, ModelSpec, TokenizerSpec, TrainedWeights
from ftkit.models.folder import ADAPTER_CONFIG, ADAPTER_FILE, EXPORT_RECORD, check_adapters, read_adapter_config
from ftkit.models.parameters import count_model
from ftkit.models.weight_files import readable_tensors
from ftkit.planning.layout import RunLayout, Workspace
from ftkit.planning.plan import read_plan
from ftkit.runs.checkpoints import MARKER, choose_step
from ftkit.runs.compare import find_run_step
from ftkit.spec import RUN

if TYPE_CHECKING:
    from ftkit.config.recipe import RecipePlan
    from ftkit.models.adapters import LoraSpec

_LORA_KEYS = {"rank": "r", "alpha": "lora_alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}
"""Keys of `training.lora`, and their names in peft."""
_WITHOUT_EFFECT = frozenset(
    [
        "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "inference_mode", "lora_dropout", "lora_ga_config", "loftq_config", "megatron_core", "peft_type",
        "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    ]
)  # fmt: skip
"""Keys of adapter_config.json about the adapters' origin or initialization, and keys that are compared separately."""
_INIT_KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mini_ca")
"""Values of `init_lora_weights` that do not change the base model's weights."""


class Continued(NamedTuple):
    """The model of a recipe that continues from a trained one."""

    model: ModelSpec  # the model to load, in the form of a recipe's `model`
    adapter: str | None = None  # folder of the adapters on it
    trained: TrainedWeights | None = None  # run and step of the trained weights
    plan: ModelPlan | None = None  # the model in the plan of an earlier run, if its checkpoint is not exported yet


def continue_run(model: ModelSpec, workspace: Workspace) -> Continued:
    """Resolve `run:NAME` or `run:NAME@STEP`.

    A checkpoint is exported during data preparation, into a folder whose name contains its digest.
    """
    run, wanted = find_run_step(model.weights.removeprefix(RUN), workspace)
    layout = run.layout
    base = read_plan(layout).recipe
    trained = _checkpoint_of(layout, wanted) if wanted else _export_of(layout)
    if base.training.adapters is not None:
        return Continued(_on_base(model, base.model, trained.folder), trained.folder, trained)
    plan = None if Path(trained.folder).is_dir() else _plan_of_export(model, base.model, trained)
    return Continued(model.model_copy(update={"weights": trained.folder}), None, trained, plan)


def _export_of(layout: RunLayout) -> TrainedWeights:
    export, name = layout.export, layout.root.name
    if not export.is_dir():
        fix = f"see its progress: ftkit status {name}; to finish it: ftkit resume {name}"
        if steps := ", ".join(str(step) for step, _ in layout.list_checkpoints()):
            fix = f"train on one of its checkpoints (steps {steps}): run:{name}@last"
        raise NotFoundError(
            f"model.weights: run {name} has no export",
            meaning="a run exports its model after the last step: this run has not finished, or it failed",
            fix=fix,
        )
    step = (read_json_if_valid(export / EXPORT_RECORD, dict[str, Any]) or {}).get("step")
    if not isinstance(step, int):
        raise NotFoundError(
            f"model.weights: {export} has no {EXPORT_RECORD}",
            meaning="the file was deleted or changed, or ftkit did not export this folder",
            fix=f"export the run again: ftkit export {name}",
        )
    return TrainedWeights(run=name, step=step, sha256=sha256_of(export / EXPORT_RECORD), folder=str(export))


def _checkpoint_of(layout: RunLayout, wanted: str) -> TrainedWeights:
    steps = dict(layout.list_checkpoints())
    step = choose_step(layout, wanted, steps)
    checkpoint = steps[step]
    if not (checkpoint / MARKER).is_file():
        raise NotFoundError(
            f"model.weights: checkpoint {checkpoint} has no {MARKER}",
            meaning="some of its files were deleted or moved",
            fix=f"give another step: ftkit runs checkpoints {layout.root.name} lists them",
        )
    digest = sha256_of(checkpoint / MARKER)
    folder = layout.exports / f"step-{step:06d}-{digest[:12]}"
    return TrainedWeights(run=layout.root.name, step=step, sha256=digest, folder=str(folder))


def _on_base(model: ModelSpec, base: ModelPlan, folder: str) -> ModelSpec:
    if base.weights == "random":
        what = "these are adapters on random weights, which exist only in that run."
        fix = "Continue that run itself: ftkit resume RUN training.max_steps=N."
        raise ConfigError([Problem("", "model.weights", what, fix)])
    shape = model.architecture
    if base.architecture.rope_scaling is not None and not shape.model_fields_set:
        positions = {"rope_scaling", "max_position_embeddings"}
        shape = ArchitectureFields.model_validate(base.architecture.model_dump(include=positions))
    tokenizer = TokenizerSpec(source=folder) if model.tokenizer.source == "model" else model.tokenizer
    fields = {"weights": base.weights, "revision": base.revision, "architecture": shape, "tokenizer": tokenizer}
    return ModelSpec.model_validate(fields | {"added_tokens": model.added_tokens})


def _plan_of_export(model: ModelSpec, base: ModelPlan, trained: TrainedWeights) -> ModelPlan:
    """Return the plan of a model that is not exported yet; its shape is that of the trained model."""
    if changed := [key for key in ("architecture", "added_tokens") if key in model.model_fields_set]:
        what = f"can't be changed before the checkpoint of step {trained.step} is exported."
        fix = f"Export it first: ftkit export {trained.run} --step {trained.step} --to {trained.folder}"
        raise ConfigError([Problem("", f"model.{key}", what, fix) for key in changed])
    update = {name: field.get_default() for name, field in ModelPlan.model_fields.items() if not field.is_required()}
    shape = base.architecture.model_copy(update={"rope_scaling": None})  # the export has its own
    own = {"weights": trained.folder, "architecture": shape, "tokenizer": model.tokenizer}
    return base.model_copy(update=update | own)


# --- Adapters from elsewhere ---------------------------------------------------------------------


def continue_adapters(model: ModelSpec) -> Continued:
    """Return the base model of a folder of peft adapters.

    Raises `ConfigError` if ftkit does not train this kind of adapters, or if their configuration lacks the base model;
    `NotFoundError` if the configuration can't be read.
    """
    folder = Path(model.weights)
    stored, where = read_adapter_config(folder), str(folder / ADAPTER_CONFIG)
    problems = [Problem(where, key, what, fix) for key, what, fix in _unsupported_options(stored)]
    base = stored.get("base_model_name_or_path")
    if not isinstance(base, str) or not base or base == "random":
        fix = "Set it to the hub id or the folder of the model that the adapters were trained on."
        problems.append(Problem(where, "base_model_name_or_path", "does not specify the adapters' base model.", fix))
    if problems:
        raise ConfigError(problems)
    tokenizer = model.tokenizer
    if tokenizer.source == "model" and (folder / "tokenizer_config.json").is_file():
        tokenizer = TokenizerSpec(source=str(folder))
    base_folder = Path(str(base))
    weights = str(base_folder.resolve()) if base_folder.is_dir() else base
    fields = {"weights": weights, "revision": model.revision or stored.get("revision"), "tokenizer": tokenizer}
    given = {"architecture": model.architecture, "added_tokens": model.added_tokens}
    return Continued(ModelSpec.model_validate(fields | given), str(folder))


def _unsupported_options(stored: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield peft options that ftkit does not support: key, problem, fix."""
    merge = "Merge the adapters into their model with peft, and give model.weights that folder."
    if stored.get("peft_type") != "LORA":
        yield "peft_type", f"these are adapters of kind {stored.get('peft_type')}; ftkit trains LORA.", merge
        return
    known = {*_LORA_KEYS.values(), *_WITHOUT_EFFECT, "target_parameters"}
    known |= {"rank_pattern", "alpha_pattern"} if _has_joined_experts(stored) else set()
    for key, value in stored.items():
        if key == "target_modules":
            if isinstance(value, str):
                yield key, "ftkit does not train adapters of layers that a regular expression selects.", merge
        elif key == "init_lora_weights":
            if value not in _INIT_KEEPS_BASE:
                yield key, f"'{value}' changed the base model's weights when training began.", merge
        elif key not in known and value and value != "none":
            yield key, f"ftkit does not train adapters with {key}.", merge


def _has_joined_experts(stored: Mapping[str, Any]) -> bool:
    """Return whether the only other ranks are multiples for parameters of experts, with the same scale."""
    ranks, alphas = stored.get("rank_pattern") or {}, stored.get("alpha_pattern") or {}
    rank, alpha = stored.get("r"), stored.get("lora_alpha")
    if not stored.get("target_parameters") or not rank or not alpha or ranks.keys() != alphas.keys():
        return False
    return all(ranks[name] * alpha == alphas[name] * rank and ranks[name] % rank == 0 for name in ranks)


def check_adapter(recipe: RecipePlan) -> None:
    """Check that adapters have the recipe's rank, scale and targets; ConfigError if not, NotFoundError if damaged."""
    lora = recipe.training.adapters
    if recipe.model.adapter is None or lora is None:
        return
    folder = Path(recipe.model.adapter)
    if folder.is_dir():
        there = read_adapter_config(folder)
        check_adapters(folder)
    else:  # a checkpoint, which is exported during data preparation
        trained = read_plan(RunLayout(folder.parents[1])).recipe.training.adapters
        there = {name: getattr(trained, key) for key, name in _LORA_KEYS.items()} if trained else {}
        there |= {"target_modules": list(trained.targets)} if trained else {}
    where, fix = str(recipe.model.source), "Set the values that the adapters were trained with."
    problems = [
        Problem(where, f"training.lora.{key}", f"{getattr(lora, key)} in the recipe, {there[name]} there.", fix)
        for key, name in _LORA_KEYS.items()
        if there.get(name) is not None and there[name] != getattr(lora, key)
    ]
    targets, own = there.get("target_modules"), {*lora.targets}
    idle = _find_idle_targets(folder, targets)
    if isinstance(targets, list):
        targets = {target for target in targets if target not in idle}
        if there.get("target_parameters"):
            parameters = [name.removesuffix(".weight") for name in there["target_parameters"]]
            targets |= {name.rpartition(".")[2] for name in parameters}
            own = _targets_in_peft(recipe, lora)
        if targets != own:
            what = f"[{', '.join(sorted(own))}] in the recipe, [{', '.join(sorted(targets))}] there."
            if wanted := sorted(own & idle):
                what += (
                    f" Its target_modules list {', '.join(wanted)} too, but its file has no such adapters: peft finds "
                    "linear layers by target_modules, and stacked experts by target_parameters."
                )
                fix = "Set the targets that it has adapters of, or train adapters of all of them from the start."
            problems.append(Problem(where, "training.lora.targets", what, fix))
    if problems:
        raise ConfigError(problems)


def _find_idle_targets(folder: Path, targets: object) -> set[str]:
    """Return target modules without an adapter in the folder's file: peft ignores names that match no layer."""
    adapted = {name.partition(".lora_A")[0].rpartition(".")[2] for name in readable_tensors(folder / ADAPTER_FILE)}
    if not adapted or not isinstance(targets, list):
        return set()
    return {target for target in targets if target.rpartition(".")[2] not in adapted}


def _targets_in_peft(recipe: RecipePlan, lora: LoraSpec) -> set[str]:
    """Return the adapted linear layers and parameters of experts: `gate_up_proj` for `gate_proj` and `up_proj`."""
    counts, targets = count_model(recipe.model.architecture), {*lora.targets}
    linears = {each.name for each in counts.linears}
    for matrix in counts.expert_matrices:
        if matrix.num_ranks(lora.targets):
            targets = targets - ({*matrix.parts} - linears) | {matrix.name}
    return targets
