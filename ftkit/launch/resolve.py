"""Resolve command-line arguments to a plan: load the specs, detect the hardware, plan."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ftkit.config.cluster import ClusterProfile, profile_of_gpu, recognize_gpu
from ftkit.config.image_reference import AnyImage, NamedImage, parse_image
from ftkit.config.layers import COMMAND_LINE, Layers
from ftkit.config.load import Loaded, load_image, read_cluster, read_recipe
from ftkit.config.recipe import RecipePlan, RecipeSpec
from ftkit.config.request import LoadedSettings, Origins, RunRequest, load_settings
from ftkit.errors import ConfigError, FtkitError, NotFoundError, Problem, plural
from ftkit.files import read_json_if_valid
from ftkit.launch.inputs import data_stamp, find_pictures
from ftkit.launch.model import resolve_model, with_vision
from ftkit.models.architecture import ModelSpec
from ftkit.paths import is_path, neighbor_of
from ftkit.planning.choices import least_memory
from ftkit.planning.compatibility import find_data_problems
from ftkit.planning.layout import DataLayout, Workspace
from ftkit.planning.plan import CodePlan, JobPlan, RunPlan
from ftkit.planning.planner import fingerprint, plan_run
from ftkit.process import num_usable_cpus, visible_gpus

if TYPE_CHECKING:
    from ftkit.config.context import Context
    from ftkit.config.image import ImageSpec
    from ftkit.models.architecture import ModelPlan

ResultT = TypeVar("ResultT")
PlanT = TypeVar("PlanT", bound=JobPlan)


class RunArgs(NamedTuple):
    """The arguments of `ftkit run` and `ftkit plan`."""

    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    image: str | None = None
    cluster: str | None = None
    name: str | None = None
    num_nodes: int | None = None
    gpus_per_node: int | None = None
    processes_per_node: int | None = None
    gpu: str | None = None  # plan for nodes with this GPU, in place of a cluster
    code: tuple[CodePlan, ...] = ()

    def sized(self, cluster: ClusterProfile, number: int | None) -> RunArgs:
        """Return these arguments with a number of processes per node, if they set none."""
        if self.gpus_per_node or self.processes_per_node:
            return self
        is_on_gpus = cluster.device == "cuda"
        return self._replace(gpus_per_node=number) if is_on_gpus else self._replace(processes_per_node=number)


def _raise_together(errors: Sequence[FtkitError]) -> None:
    if len(errors) == 1:
        raise errors[0]
    problems = []
    for error in errors:
        what = "; ".join(part for part in (error.what, error.meaning) if part)
        problems += error.problems if isinstance(error, ConfigError) else [Problem("", "", f"{what};", error.fix)]
    if problems:
        raise ConfigError(problems)


def read_settings(args: RunArgs, ctx: Context) -> LoadedSettings:
    """Read the settings, with `--cluster` and `--image` as the last layer."""
    typed = {key: value for key, value in (("cluster", args.cluster), ("image", args.image)) if value}
    return load_settings(ctx, Layers(dict(typed), {(key,): COMMAND_LINE for key in typed}))


class Place(NamedTuple):
    """Where runs go: the settings, the cluster, and the selected image, if any."""

    settings: LoadedSettings
    cluster: ClusterProfile
    image: AnyImage | None


def load_place(args: RunArgs, ctx: Context) -> Place:
    """Load the cluster and the image that options and settings select. Raises as `resolve` does."""
    loaded = read_settings(args, ctx)
    _check_cluster_is_chosen(args, loaded, ctx)
    return Place(loaded, _load_cluster(loaded.settings.cluster, loaded, ctx, args).spec, _image_of(loaded))


def _check_cluster_is_chosen(args: RunArgs, loaded: LoadedSettings, ctx: Context) -> None:
    """Refuse to train on a login node by accident: on one, Slurm is installed, even if its controller is down."""
    if loaded.has_cluster or args.gpu:
        return
    from ftkit.health.site import list_partitions  # noqa: PLC0415 - few commands ask Slurm

    partitions = list_partitions(ctx.environment)
    if partitions == ():
        return
    found = "its controller does not respond now"
    if partitions is not None:
        found = f"partitions {', '.join(dict.fromkeys(each.name for each in partitions))}"
    what = f"none is set, and this machine has Slurm ({found})."
    choice = "Detect it with 'ftkit init', or choose one with --cluster NAME ('ftkit cluster list')"
    raise ConfigError([Problem("", "cluster", what, f"{choice}; --cluster local trains on this machine.")])


def resolve(args: RunArgs, ctx: Context) -> RunPlan:
    """Make a plan from the arguments.

    Raises `NotFoundError` if a selected recipe, cluster, image, or file does not exist; `ConfigError` with every
    problem of recipe, cluster and image, or every reason why they are incompatible.
    """
    loaded = read_settings(args, ctx)
    _check_cluster_is_chosen(args, loaded, ctx)
    # The default profile has no containers, so a plan with --image but no cluster is for any Slurm cluster.
    is_assumed = args.image is not None and not loaded.has_cluster and not args.gpu
    errors: list[FtkitError] = []

    def collect(load: Callable[[], ResultT]) -> ResultT | None:
        try:
            return load()
        except (ConfigError, NotFoundError) as error:
            errors.append(error)
            return None

    site = collect(lambda: _load_cluster("slurm" if is_assumed else loaded.settings.cluster, loaded, ctx, args))
    uses_image = args.image is not None or site is None or site.spec.runtime != "none"
    wanted = collect(lambda: _image_of(loaded)) if uses_image else None
    image = collect(lambda: _load_defined(wanted, ctx))
    name = args.recipe or (image.default_recipe if image else None)
    if name is None:
        _raise_together(errors)
        raise _no_recipe(wanted)
    read = collect(lambda: read_recipe(name, ctx, args.overrides))
    if read and read.spec.image and wanted is None and site and site.spec.runtime != "none":
        wanted = parse_image(read.spec.image, ctx.project)
        image = collect(lambda: _load_defined(wanted, ctx))
    _raise_together(errors)
    if read is None or site is None:
        raise AssertionError("errors of loading were raised above")
    workspace = Workspace(loaded.workspace_folder(ctx))
    origins = Origins(recipe=read.layers, cluster=site.layers, settings=loaded.layers)
    recipe, model = _resolve_model(read.spec, ctx, workspace, origins)
    teacher = _resolve_teacher(recipe, ctx, workspace, origins)
    request = replace(new_request(args, wanted, workspace, origins), teacher=teacher)
    request = build_request(recipe, model, request)
    here = detect_hardware(site.spec, ctx.environment, ctx.root)
    plan = resolve_image_link(plan_run(recipe, here, image, request))
    notes = plan.notes
    if is_assumed:
        gpus = f"{plural(here.max_processes, 'GPU')} of unknown model per node"
        fix = "set one of 'ftkit cluster list' with --cluster or 'cluster:' in ftkit.yaml"
        notes = (f"no cluster is set: this plan is for profile '{here.name}', with {gpus}; {fix}", *notes)
    return replace(plan, code=args.code, notes=notes)


def resolve_recipe(args: RunArgs, ctx: Context) -> RecipePlan:
    """Resolve the recipe without a cluster, for commands that only read its data; `auto` values don't affect the data.

    Raises as `resolve` does, for problems that do not depend on the cluster.
    """
    loaded = read_settings(args, ctx)
    if args.cluster:
        _load_cluster(args.cluster, loaded, ctx, args)  # a mistyped name is an error
    name = recipe_name(args, ctx)
    if name is None:
        raise _no_recipe(_image_of(loaded))
    read = read_recipe(name, ctx, args.overrides)
    origins = Origins(recipe=read.layers, settings=loaded.layers)
    recipe, model = _resolve_model(read.spec, ctx, Workspace(loaded.workspace_folder(ctx)), origins)
    if problems := find_data_problems(recipe, model.architecture):
        raise ConfigError([origins.locate(problem) for problem in problems])
    return RecipePlan.extend(recipe, model=model, training=least_memory(recipe.training))


def _resolve_model(
    recipe: RecipeSpec, ctx: Context, workspace: Workspace, origins: Origins
) -> tuple[RecipeSpec, ModelPlan]:
    """Return the recipe with a length that the model supports and `data.pictures` resolved, and the model."""
    try:
        model = resolve_model(recipe.model, ctx.environment, workspace)
    except ConfigError as error:
        raise ConfigError([origins.locate(problem) for problem in error.problems]) from error
    if recipe.data.pictures is None:
        pictures = find_pictures(recipe.data) if model.vision else False
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"pictures": pictures})})
    if recipe.data.pictures:
        model = with_vision(model, ctx.environment, workspace)
    training, positions = recipe.training, model.architecture.max_position_embeddings
    if "sequence_length" not in training.model_fields_set and training.sequence_length > positions:
        length = positions - positions % training.gpus_per_pack
        recipe = recipe.model_copy(update={"training": training.model_copy(update={"sequence_length": length})})
    return recipe, model


def _resolve_teacher(recipe: RecipeSpec, ctx: Context, workspace: Workspace, origins: Origins) -> ModelPlan | None:
    options, key = recipe.training.distillation, "training.distill.teacher"
    if options is None:
        return None
    if is_path(options.teacher) and not Path(options.teacher).exists():
        place = origins.locate(Problem("", key, f"there is no {options.teacher}"))
        fix = f"{neighbor_of(Path(options.teacher))}give a folder with a model, a hub id, or run:NAME"
        raise NotFoundError(str(place), fix=fix)
    try:
        return resolve_model(ModelSpec(weights=options.teacher), ctx.environment, workspace)
    except ConfigError as error:
        raise ConfigError([origins.locate(replace(problem, key=key)) for problem in error.problems]) from error
    except NotFoundError as error:
        place = origins.locate(Problem("", key, error.what.removeprefix("model.weights: ")))
        raise NotFoundError(str(place), meaning=error.meaning, fix=error.fix) from error


def recipe_name(args: RunArgs, ctx: Context) -> str | None:
    """Return the name of the selected recipe, from the arguments or the image's default; None if there is none."""
    if args.recipe:
        return args.recipe
    image = _load_defined(_image_of(read_settings(args, ctx)), ctx)
    return image.default_recipe if image else None


def resolve_image_link(plan: PlanT) -> PlanT:
    """Resolve the link to an image file now, because it may point to another file when the job starts."""
    file = plan.image_file
    if file is None:
        return plan
    while file.is_symlink() and file.exists():  # only the file itself: folders may be mounted elsewhere on the nodes
        file = file.parent / file.readlink()
    return replace(plan, container_image=str(file))


def _load_cluster(name: str, loaded: LoadedSettings, ctx: Context, args: RunArgs) -> Loaded[ClusterProfile]:
    """Read a profile, or make one for `--gpu`; the error for an unknown profile reports the origin of its name."""
    if args.gpu:
        return Loaded(profile_of_gpu(args.gpu, args.gpus_per_node), Layers())
    try:
        return read_cluster(name, ctx)
    except NotFoundError as error:
        where = loaded.layers.origins.get(("cluster",), "settings")
        key = "--cluster" if where == COMMAND_LINE else f"{where}: cluster"
        raise NotFoundError(f"{key}: {error.what}", meaning=error.meaning, fix=error.fix) from error


def _image_of(loaded: LoadedSettings) -> AnyImage | None:
    text, layers, key = loaded.settings.image, loaded.layers, ("image",)
    if text is None:
        return None
    where = layers.origin(key)
    return parse_image(text, layers.folder(key), where, "--image" if where == COMMAND_LINE else "image")


def _load_defined(image: AnyImage | None, ctx: Context) -> ImageSpec | None:
    """Read the definition of a `NAME:TAG`, which must not be for serving; None for a file or an address."""
    if not isinstance(image, NamedImage):
        return None
    spec = load_image(image.reference, ctx)
    if spec.purpose == "serving":
        what = f"{spec.reference} serves models, and can't train them."
        fix = f"Use a training image ('ftkit images'); serve with: ftkit serve RUN --image {spec.reference}."
        raise ConfigError([Problem("", "image", what, fix, name="serving-image")])
    return spec


def new_request(args: RunArgs, image: AnyImage | None, workspace: Workspace, origins: Origins) -> RunRequest:
    """Return the inputs of a new run that recipes and scripts share."""
    return RunRequest(
        name=args.name,
        num_nodes=args.num_nodes,
        gpus_per_node=args.gpus_per_node,
        processes_per_node=args.processes_per_node,
        image=image,
        image_is_explicit=args.image is not None,
        workspace=workspace.root,
        python=sys.executable,
        created=datetime.now(UTC),
        suffix=secrets.token_hex(2),
        origins=origins,
    )


def build_request(recipe: RecipeSpec, model: ModelPlan, request: RunRequest) -> RunRequest:
    """Add the recipe's model and data to a request. Raises as `data_stamp` does."""
    stamp = data_stamp(recipe)
    data = DataLayout(Workspace(request.workspace).data / fingerprint(recipe, model, stamp))
    return with_packs(replace(request, model=model, data_stamp=stamp), data)


def with_packs(request: RunRequest, data: DataLayout) -> RunRequest:
    """Add the numbers of packs and tokens to a request, from the data's manifest, if the data is prepared."""
    prepared = read_json_if_valid(data.manifest, dict[str, object]) or {}
    names = ("num_train_packs", "num_train_tokens", "sequence_length", "num_row_tokens", "num_train_targets")
    values = [value for value in (prepared.get(name, 0) for name in names) if isinstance(value, int)]
    if len(values) < len(names) or "num_train_packs" not in prepared:
        return request
    num_packs, num_tokens, length, num_row_tokens, num_targets = values
    padding = num_row_tokens / (num_packs * length) if num_packs * length and num_row_tokens else None
    tokens, targets = num_tokens or None, num_targets or None
    return replace(request, num_packs=num_packs, num_tokens=tokens, num_targets=targets, padding=padding)


def _no_recipe(image: AnyImage | None) -> FtkitError:
    what = "no recipe is given."
    fix = "Try 'ftkit run demo'; 'ftkit config recipes' lists all, and --image NAME:TAG has a default one."
    if image:
        what = f"'{image}' is a file or an address, which has no default recipe."
        fix = "Give one; 'ftkit config recipes' lists them."
    return ConfigError([Problem(COMMAND_LINE, "RECIPE", what, fix)])


def detect_hardware(profile: ClusterProfile, environment: Mapping[str, str], root: Path) -> ClusterProfile:
    """Replace `device: auto` with the hardware of this machine; `root` holds its /dev and /proc."""
    if profile.device != "auto":
        return profile
    num_gpus = len(list(root.glob("dev/nvidia[0-9]*")))
    num_gpus = len(visible_gpus(num_gpus, environment.get("CUDA_VISIBLE_DEVICES")))
    found: dict[str, object] = {"cpus_per_node": profile.cpus_per_node or num_usable_cpus(), "device": "cpu"}
    if num_gpus:
        found |= {"device": "cuda", "gpus_per_node": num_gpus, "gpu": profile.gpu or _gpu_model(root)}
    return profile.model_copy(update=found)


def _gpu_model(root: Path) -> str | None:
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        found = re.search(r"(?m)^Model:(.*)$", path.read_text(errors="replace"))
        if found and (model := recognize_gpu(found[1])):
            return model
    return None
