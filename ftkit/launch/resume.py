"""Plan the continuation of a run on other nodes, on another cluster, or with changed recipe values.

Model, data, and checkpoint format stay the same. The order of the data depends only on `training.data_seed` (or else
`training.seed`) and the global batch, so a run that keeps both reads the same packs in the same order with any number
of processes. A changed `training.seed` does not change the order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ftkit.config.image_reference import AnyImage, NamedImage, parse_image
from ftkit.config.layers import COMMAND_LINE, Layers
from ftkit.config.load import load_image, override_recipe, read_cluster
from ftkit.config.recipe import RecipeSpec
from ftkit.config.request import Origins
from ftkit.config.yaml_files import parse_override
from ftkit.errors import ConfigError, NotFoundError, Problem
from ftkit.launch.code import CodeCopy, copy_code
from ftkit.launch.resolve import RunArgs, detect_hardware, new_request, resolve_image_link, with_packs
from ftkit.launch.user_script import copy_script
from ftkit.planning.layout import SCRIPT_CODE, Workspace
from ftkit.planning.plan import RunPlan, ScriptPlan
from ftkit.planning.planner import plan_run
from ftkit.runs.manifest import flat

if TYPE_CHECKING:
    from ftkit.config.context import Context
    from ftkit.config.image import ImageSpec
    from ftkit.config.recipe import RecipePlan

_CHANGEABLE = ("training", "evaluation", "tracking", "profile", "resources")
_FIXED = tuple(
    f"training.{key}" for key in ("method", "lora*", "sequence_length", "optimizer", "engine", "distill.teacher")
)
"""Keys that can't change, because no checkpoint of the run could be loaded."""
_GLOBAL_BATCH = "training.global_batch_size"
"""The position in the data is the step times this; with another value, packs would be repeated or skipped."""
_SEED, _DATA_SEED = "training.seed", "training.data_seed"
_CODE = "code"  # `--allow code` accepts code that differs from the run's copies
_LENGTHS = ("training.max_steps", "training.num_epochs")
_HARMLESS_TRAINING = (
    "activation_checkpointing", "activation_offload", "checkpoint_every_steps", "checkpointed_layers", "collectives",
    "context_parallel", "keep_checkpoints", "keep_every_steps", "log_every_steps", "max_failed_checkpoints",
    "micro_batch_size", "offloaded_layers", "on_nonfinite", "reshard_after_forward", "shard_degree", "sync_gradients",
    "tensor_parallel",
)  # fmt: skip
_HARMLESS = (
    "evaluation.*", "profile.*", "resources.*", "tracking.*", *(f"training.{key}" for key in _HARMLESS_TRAINING),
)  # fmt: skip
"""Keys that change logging, speed or memory, but not the optimizer's inputs."""


@dataclass(frozen=True)
class Change:
    """A value that differs from the run's earlier plan."""

    key: str
    before: object
    after: object

    @property
    def is_harmless(self) -> bool:
        """Whether the optimizer's inputs stay the same."""
        if self.key in _LENGTHS:
            before, after = self.before, self.after
            return isinstance(before, int | float) and isinstance(after, int | float) and after > before
        return any(fnmatchcase(self.key, pattern) for pattern in _HARMLESS)


PlanT = TypeVar("PlanT", bound=RunPlan | ScriptPlan)


@dataclass(frozen=True)
class ResumedPlan(Generic[PlanT]):
    plan: PlanT
    changes: tuple[Change, ...] = ()
    warnings: tuple[str, ...] = ()
    copies: tuple[CodeCopy, ...] = ()  # new copies of the run's code


def renew_code(resumed: ResumedPlan[PlanT]) -> ResumedPlan[PlanT]:
    """Copy a run's code again from its original folders.

    Raises `ConfigError` if the run has no user code; also raises as `copy_code` does.
    """
    plan = resumed.plan
    if not plan.code:
        problem = Problem(COMMAND_LINE, "--allow code", "the run has no copy of your code.", "Omit the option.")
        raise ConfigError([problem])
    copies = []
    for code in plan.code:
        folder = Path(code.source)
        if isinstance(plan, ScriptPlan) and code.name == SCRIPT_CODE:
            copies.append(copy_script(folder / plan.script.path, Workspace(plan.workspace)))
        else:
            is_package = (folder / "__init__.py").is_file()
            copies.append(copy_code(folder, code.name, "--allow code", is_package=is_package))
    changed = [
        Change(f"code: {new.plan.name}", old.sha256[:12], new.plan.sha256[:12])
        for old, new in zip(plan.code, copies, strict=True)
    ]
    new_plan = replace(plan, code=tuple(each.plan for each in copies))
    return ResumedPlan(new_plan, (*resumed.changes, *changed), resumed.warnings, tuple(copies))


def replan(
    plan: RunPlan, args: RunArgs, ctx: Context, default_image: AnyImage | None = None, allowed: Sequence[str] = ()
) -> ResumedPlan[RunPlan]:
    """Plan a run again with the same id, model, and data.

    The keys `allowed` may change although they affect the result; `default_image` is for a run without a container.
    """
    values = [parse_override(each).values for each in args.overrides]
    typed = list(dict.fromkeys(key for each in values for key, _ in flat(each, with_empty=True)))
    _check_sections(typed)
    known = open_values(plan.recipe, plan.execution.chosen, plan.engine.name)
    if {_SEED, _DATA_SEED} & {*typed}:  # a changed seed keeps the order of the data, which has its own seed
        known["training"]["data_seed"] = plan.recipe.training.order_seed
    loaded = override_recipe(known, args.overrides)
    recipe = loaded.spec
    before, after = Layers(known), Layers(recipe.model_dump(mode="json", include=set(_CHANGEABLE)))
    paths = {key: tuple(key.split(".")) for key in typed}
    changes = [Change(key, before.value(path), after.value(path)) for key, path in paths.items()]
    cluster, layers = plan.cluster, Layers()
    if args.cluster:
        site = read_cluster(args.cluster, ctx)
        cluster, layers = detect_hardware(site.spec, ctx.environment, ctx.root), site.layers
    image = None
    if cluster.runtime != "none":  # the run's own image, else the recipe's, else the default one
        name = plan.image or plan.recipe.image
        image = parse_image(name, ctx.project) if name else default_image
    if str(image or "") != (plan.image or ""):
        changes.append(Change("image", plan.image, None if image is None else str(image)))
    _check_changes([change for change in changes if change.before != change.after], allowed)
    _check_length(plan, recipe.training.max_steps)
    stays = args.cluster in (None, plan.cluster.name)
    wanted = args._replace(name=plan.name, num_nodes=args.num_nodes or plan.placement.num_nodes)
    wanted = wanted.sized(cluster, plan.placement.processes_per_node if stays else None)
    origins = Origins(recipe=loaded.layers, cluster=layers)
    request = with_packs(new_request(wanted, image, Workspace(plan.workspace), origins), plan.data)
    request = replace(
        request, model=plan.recipe.model, teacher=plan.recipe.teacher, python=plan.python, created=plan.created
    )
    definition = image_definition(image, ctx)
    try:
        new = plan_run(recipe, cluster, definition, request)
    except ConfigError as error:
        fix = "Use a number of GPUs, or a training.micro_batch_size, that divides the run's global batch, which stays."
        problems = [replace(each, fix=fix) if each.key == _GLOBAL_BATCH else each for each in error.problems]
        raise ConfigError(problems) from error
    # Prepared data is not prepared again.
    new = replace(new, id=plan.id, fingerprint=plan.fingerprint, sweep=plan.sweep, code=plan.code)
    is_same_file = (cluster.runtime, cluster.image_format) == (plan.cluster.runtime, plan.cluster.image_format)
    if is_same_file and new.image == plan.image:
        new = replace(new, container_image=plan.container_image)
    else:
        new = resolve_image_link(new)
    old_place, place = plan.placement, new.placement
    changes += [
        Change("cluster", plan.cluster.name, cluster.name),
        Change("nodes", old_place.num_nodes, place.num_nodes),
        Change("processes per node", old_place.processes_per_node, place.processes_per_node),
        Change("device", old_place.device, place.device),
    ]
    kept = tuple(change for change in changes if change.before != change.after)
    return ResumedPlan(new, kept, tuple(_warnings(kept, new)))


def open_values(recipe: RecipePlan, chosen: Collection[str], engine: str) -> dict[str, Any]:
    """Return a planned recipe with the `chosen` keys of `training` reset to `auto`; the planned engine is kept."""
    values = recipe.model_dump(mode="json", include=set(_CHANGEABLE))
    values["training"] |= dict.fromkeys(chosen, "auto") | {"engine": engine}
    if "activation_checkpointing" in chosen:  # it includes the numbers of layers
        values["training"] |= {"checkpointed_layers": None, "offloaded_layers": None}
    return {name: getattr(recipe, name) for name in RecipeSpec.model_fields} | values


def _check_sections(keys: Sequence[str]) -> None:
    """Refuse changes that the checkpoints or the position in the data forbid, before the whole recipe is checked."""
    problems = []
    for key in keys:
        is_fixed = any(fnmatchcase(key, pattern) for pattern in (*_FIXED, _GLOBAL_BATCH))
        if is_fixed or key.partition(".")[0] not in _CHANGEABLE:
            reason = "the run's checkpoints, or its place in the data, depend on the former value"
            fix = "Start a new run; 'model: run:NAME' continues from this run's result."
            problems.append(Problem(COMMAND_LINE, key, f"can't change when a run is resumed: {reason}.", fix))
    if problems:
        raise ConfigError(problems)


def _check_length(plan: RunPlan, max_steps: int | None) -> None:
    """Refuse a run that would end before its newest checkpoint, as the trainer would once the job has started."""
    with suppress(OSError):  # the trainer explains it
        newest = max((step for step, _ in plan.layout.list_checkpoints()), default=0)
        if max_steps is not None and newest > max_steps:
            what = f"{max_steps} is less than the {newest} steps that are trained already."
            fix = f"Use {newest} or more; or use the checkpoint as it is: ftkit export {plan.id}"
            raise ConfigError([Problem(COMMAND_LINE, "training.max_steps", what, fix)])


def _check_changes(changes: Sequence[Change], allowed: Sequence[str]) -> None:
    problems = []
    for change in changes:
        if change.key not in allowed and not change.is_harmless:
            what = f"changes the result: from {change.before!r} to {change.after!r}."
            fix = f"Omit it; or accept that the result differs: --allow {change.key}"
            problems.append(Problem(COMMAND_LINE, change.key, what, fix))
    for key in allowed:
        if key not in (_CODE, *(change.key for change in changes)):
            what = "allows a change that was not requested."
            problems.append(Problem(COMMAND_LINE, f"--allow {key}", what, "Omit it."))
    if problems:
        raise ConfigError(problems)


def changes_losses(change: Change, schedule: str) -> bool:
    """Return whether a resumed run with this change has other losses than a run with the new value from step 1.

    All learning-rate schedules except `constant` stretch over all steps.
    """
    if change.key in _LENGTHS:
        return schedule != "constant"
    return change.key.startswith("training.") and not change.is_harmless


def image_definition(image: AnyImage | None, ctx: Context) -> ImageSpec | None:
    """Read the definition of an image; None for a file, an address, or an image whose definition was removed."""
    try:
        return load_image(image.reference, ctx) if isinstance(image, NamedImage) else None
    except NotFoundError:
        return None


def _warnings(changes: Sequence[Change], plan: RunPlan) -> Iterator[str]:
    training = plan.recipe.training
    effects = {
        _SEED: "dropout changes, and this run can't be repeated as one run; the order of the data stays that of seed "
        f"{training.order_seed}",
        _DATA_SEED: "the data is in another order from here on, so this epoch trains on some examples twice, and on "
        "others not at all",
    }
    if training.schedule != "constant":
        fitted = f"the {training.schedule} schedule of the learning rate is fitted to the new number of steps"
        effects |= dict.fromkeys(_LENGTHS, f"{fitted}, so its next value jumps")
    for change in changes:
        is_harmless = change.is_harmless or not change.key.startswith("training.")
        if change.key in effects or change.key == "image" or not is_harmless:
            effect = effects.get(change.key, "this run can't be repeated as one run")
            yield f"{change.key} changes from {change.before} to {change.after}: {effect}"
