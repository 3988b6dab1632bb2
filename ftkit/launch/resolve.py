"""Resolve command-line arguments to a plan: load the specs, detect the hardware, plan."""

from __future__ import annotations

import re
import secrets
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ftkit import __version__
from ftkit.config.cluster import ClusterProfile, recognize_gpu
from ftkit.config.image_reference import AnyImage, NamedImage, parse_image
from ftkit.config.layers import COMMAND_LINE, Layers
from ftkit.config.load import Loaded, load_image, read_cluster, read_recipe
from ftkit.config.recipe import RecipePlan
from ftkit.config.request import LoadedSettings, Origins, RunRequest, load_settings
from ftkit.errors import ConfigError, FtkitError, NotFoundError, Problem, plural
from ftkit.files import read_json_if_valid
from ftkit.launch.inputs import data_stamp
from ftkit.launch.model import resolve_model
from ftkit.planning.checks import find_data_problems
from ftkit.planning.choices import least_memory
from ftkit.planning.layout import DataLayout, Workspace
from ftkit.planning.plan import CodePlan, JobPlan
from ftkit.planning.planner import fingerprint, plan_run
from ftkit.process import num_usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ftkit.config.context import Context
    from ftkit.config.image import ImageSpec
    from ftkit.config.recipe import RecipeSpec
    from ftkit.models.architecture import ModelPlan
    from ftkit.planning.plan import RunPlan

ResultT = TypeVar("ResultT")
PlanT = TypeVar("PlanT", bound=JobPlan)

_ANY_SLURM: Final = "slurm"


@dataclass(frozen=True)
class RunArgs:
    """The arguments of `ftkit run` and `ftkit plan`."""

    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    image: str | None = None
    cluster: str | None = None
    name: str | None = None
    num_nodes: int | None = None
    gpus_per_node: int | None = None
    code: tuple[CodePlan, ...] = ()


class _Problems:
    """Collect the problems of several specs, to report them together."""

    def __init__(self) -> None:
        self._errors: list[FtkitError] = []

    def collect(self, load: Callable[[], ResultT]) -> ResultT | None:
        try:
            return load()
        except (ConfigError, NotFoundError) as error:
            self._errors.append(error)
            return None

    def raise_if_any(self) -> None:
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise ConfigError([problem for error in self._errors for problem in _as_problems(error)])


def _as_problems(error: FtkitError) -> list[Problem]:
    if isinstance(error, ConfigError):
        return error.problems
    what = "; ".join(part for part in (error.what, error.meaning) if part)
    return [Problem("", "", f"{what};", error.fix)]


def read_settings(args: RunArgs, ctx: Context) -> LoadedSettings:
    """Read the settings, with `--cluster` and `--image` as the last layer."""
    typed = {key: value for key, value in (("cluster", args.cluster), ("image", args.image)) if value}
    return load_settings(ctx, Layers(dict(typed), {(key,): COMMAND_LINE for key in typed}))


@dataclass(frozen=True)
class Place:
    """Where runs go: the settings, the cluster, and the image if one is chosen."""

    settings: LoadedSettings
    cluster: ClusterProfile
    image: AnyImage | None


def load_place(args: RunArgs, ctx: Context) -> Place:
    """Load the cluster and the image that the options and the settings select. Raises as `resolve` does."""
    loaded = read_settings(args, ctx)
    _check_cluster_is_chosen(loaded, ctx)
    return Place(loaded, _load_cluster(loaded.settings.cluster, loaded, ctx).spec, _image_of(loaded))


def _check_cluster_is_chosen(loaded: LoadedSettings, ctx: Context) -> None:
    """Refuse to train on a cluster's login node by accident.

    Raises:
        ConfigError: no cluster is chosen, and this machine has Slurm, even if its controller does not respond now.
    """
    if loaded.has_cluster:
        return
    from ftkit.health.site import list_partitions  # noqa: PLC0415 - programs of Slurm, for a run without a cluster

    partitions = list_partitions(ctx.environment)
    if partitions != ():
        found = "its controller does not respond now"
        if partitions is not None:
            found = f"partitions {', '.join(dict.fromkeys(each.name for each in partitions))}"
        raise ConfigError(
            [Problem("", "cluster", f"none is set, and this machine has Slurm ({found}).",
                     "Detect it with 'ftkit init', or choose one with --cluster NAME ('ftkit cluster list'); "
                     "--cluster local trains on this machine.")]
        )  # fmt: skip


def resolve(args: RunArgs, ctx: Context) -> RunPlan:
    """Make a plan from the arguments.

    Raises:
        NotFoundError: a selected recipe, cluster, image, or file does not exist.
        ConfigError: with every problem of recipe, cluster and image, or every reason why they are incompatible.
    """
    loaded = read_settings(args, ctx)
    _check_cluster_is_chosen(loaded, ctx)
    assumed = _assumed_cluster(args, loaded)
    problems = _Problems()
    site = problems.collect(lambda: _load_cluster(assumed or loaded.settings.cluster, loaded, ctx))
    cluster = site.spec if site else None
    uses_image = args.image is not None or cluster is None or cluster.runtime != "none"
    wanted = problems.collect(lambda: _image_of(loaded)) if uses_image else None
    image = problems.collect(lambda: _load_defined(wanted, ctx))
    name = args.recipe or (image.default_recipe if image else None)
    if name is None:
        problems.raise_if_any()
        raise _no_recipe(wanted)
    read = problems.collect(lambda: read_recipe(name, ctx, args.overrides))
    recipe = read.spec if read else None
    if recipe and recipe.image and wanted is None and cluster and cluster.runtime != "none":
        wanted = parse_image(recipe.image, ctx.project)
        image = problems.collect(lambda: _load_defined(wanted, ctx))
    problems.raise_if_any()
    if read is None or site is None:
        raise AssertionError("errors of loading were raised above")
    workspace = Workspace(loaded.workspace_folder(ctx))
    origins = Origins(recipe=read.layers, cluster=site.layers, settings=loaded.layers)
    model = _resolve_model(read.spec, ctx, workspace, origins)
    request = build_request(args, read.spec, model, wanted, workspace, origins)
    here = detect_hardware(site.spec, ctx.environment, ctx.root)
    plan = resolve_image_link(plan_run(read.spec, here, image, request, ftkit_version=__version__))
    plan = replace(plan, code=args.code)
    return replace(plan, notes=(_assumption(here), *plan.notes)) if assumed else plan


def resolve_recipe(args: RunArgs, ctx: Context) -> RecipePlan:
    """Resolve the recipe without a cluster, for commands that only read its data.

    Its `auto` values are those with the least memory, which do not change the data.

    Raises:
        NotFoundError: the selected recipe, its model, a file or the cluster of `--cluster` does not exist.
        ConfigError: there is no recipe, or it has problems that do not depend on where it runs.
    """
    loaded = read_settings(args, ctx)
    if args.cluster:
        _load_cluster(args.cluster, loaded, ctx)  # a mistyped name is an error
    name = recipe_name(args, ctx)
    if name is None:
        raise _no_recipe(_image_of(loaded))
    read = read_recipe(name, ctx, args.overrides)
    origins = Origins(recipe=read.layers, settings=loaded.layers)
    model = _resolve_model(read.spec, ctx, Workspace(loaded.workspace_folder(ctx)), origins)
    problems = [origins.locate(problem) for problem in find_data_problems(read.spec, model.architecture)]
    if problems:
        raise ConfigError(problems)
    return RecipePlan.extend(read.spec, model=model, training=least_memory(read.spec.training))


def _resolve_model(recipe: RecipeSpec, ctx: Context, workspace: Workspace, origins: Origins) -> ModelPlan:
    try:
        return resolve_model(recipe.model, ctx.environment, workspace)
    except ConfigError as error:
        raise ConfigError([origins.locate(problem) for problem in error.problems]) from error


def recipe_name(args: RunArgs, ctx: Context) -> str | None:
    """Return the recipe that the arguments select, by name or by the image's default; None if nothing does."""
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


def _assumed_cluster(args: RunArgs, loaded: LoadedSettings) -> str | None:
    """Return the profile to use with `--image` if no cluster is set, since the default profile has no containers."""
    return _ANY_SLURM if args.image and not loaded.has_cluster else None


def _assumption(cluster: ClusterProfile) -> str:
    return (
        f"no cluster is set: this plan is for profile '{cluster.name}', with {plural(cluster.gpus_per_node, 'GPU')} of "
        "unknown model per node; set one of 'ftkit cluster list' with --cluster or 'cluster:' in ftkit.yaml"
    )


def _load_cluster(name: str, loaded: LoadedSettings, ctx: Context) -> Loaded[ClusterProfile]:
    """Read a profile; if it does not exist, the error reports where its name comes from."""
    where = loaded.layers.origins.get(("cluster",), "settings")
    try:
        return read_cluster(name, ctx)
    except NotFoundError as error:
        key = "--cluster" if where == COMMAND_LINE else f"{where}: cluster"
        raise NotFoundError(f"{key}: {error.what}", meaning=error.meaning, fix=error.fix) from error


def _image_of(loaded: LoadedSettings) -> AnyImage | None:
    """Parse the image from the command line or the settings."""
    text, layers, key = loaded.settings.image, loaded.layers, ("image",)
    if text is None:
        return None
    where = layers.origin(key)
    return parse_image(text, layers.folder(key), where, "--image" if where == COMMAND_LINE else "image")


def _load_defined(image: AnyImage | None, ctx: Context) -> ImageSpec | None:
    """Read the definition of a `NAME:TAG`; None for a file or an address.

    Raises:
        ConfigError: the image is for serving; or as `load_image` does.
    """
    if not isinstance(image, NamedImage):
        return None
    spec = load_image(image.reference, ctx)
    if spec.purpose == "serving":
        raise ConfigError(
            [Problem("", "image", f"{spec.reference} serves models, and can't train them.",
                     f"Use a training image ('ftkit images'); serve with: ftkit serve RUN --image {spec.reference}.")]
        )  # fmt: skip
    return spec


def build_request(
    args: RunArgs,
    recipe: RecipeSpec,
    model: ModelPlan,
    image: AnyImage | None,
    workspace: Workspace,
    origins: Origins,
) -> RunRequest:
    """Collect the inputs of a run besides recipe and profile. Raises as `data_stamp` does."""
    stamp = data_stamp(recipe)
    data = DataLayout(workspace.data / fingerprint(recipe, model, stamp))
    return RunRequest(
        name=args.name,
        num_nodes=args.num_nodes,
        gpus_per_node=args.gpus_per_node,
        image=image,
        image_is_explicit=args.image is not None,
        workspace=workspace.root,
        python=sys.executable,
        created=datetime.now(UTC),
        suffix=secrets.token_hex(2),
        model=model,
        data_stamp=stamp,
        **read_packs(data),
        origins=origins,
    )


def read_packs(data: DataLayout) -> dict[str, Any]:
    """Return the request's fields about packs, from the data's manifest; none if the data is not prepared."""
    prepared = read_json_if_valid(data.manifest, dict[str, Any]) or {}
    names = ("num_train_packs", "num_train_tokens", "sequence_length", "num_row_tokens")
    num_packs, num_tokens, length, num_row_tokens = (prepared.get(name, 0) for name in names)
    if not all(isinstance(value, int) for value in (num_packs, num_tokens, length, num_row_tokens)):
        return {}
    if "num_train_packs" not in prepared:
        return {}
    padding = num_row_tokens / (num_packs * length) if num_packs * length and num_row_tokens else None
    return {"num_packs": num_packs, "num_tokens": num_tokens or None, "padding": padding}


def _no_recipe(image: AnyImage | None) -> FtkitError:
    if image:
        return ConfigError(
            [Problem(COMMAND_LINE, "RECIPE", f"'{image}' is a file or an address, which has no default recipe.",
                     "Give one; 'ftkit config recipes' lists them.")]
        )  # fmt: skip
    return ConfigError(
        [Problem(COMMAND_LINE, "RECIPE", "no recipe is given.",
                 "Try 'ftkit run demo'; 'ftkit config recipes' lists all, and --image NAME:TAG has a default one.")]
    )  # fmt: skip


def detect_hardware(profile: ClusterProfile, environment: Mapping[str, str], root: Path) -> ClusterProfile:
    """Replace `device: auto` with the hardware of this machine; `root` holds its /dev and /proc."""
    if profile.device != "auto":
        return profile
    found: dict[str, object] = {"cpus_per_node": profile.cpus_per_node or num_usable_cpus()}
    num_gpus = _count_gpus(environment, root)
    if num_gpus:
        found |= {"device": "cuda", "gpus_per_node": num_gpus, "gpu": profile.gpu or _gpu_model(root)}
    else:
        found |= {"device": "cpu"}
    return profile.model_copy(update=found)


def _count_gpus(environment: Mapping[str, str], root: Path) -> int:
    """Count the GPUs that are visible to a process started here."""
    present = len(list(root.glob("dev/nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    allowed = [device.strip() for device in visible.split(",")]
    stop = next((i for i, device in enumerate(allowed) if device in ("", "-1")), len(allowed))  # as CUDA reads it
    return min(present, stop)


def _gpu_model(root: Path) -> str | None:
    """Detect the GPU model from the driver's files."""
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        found = re.search(r"(?m)^Model:(.*)$", path.read_text(errors="replace"))
        if found and (model := recognize_gpu(found[1])):
            return model
    return None
