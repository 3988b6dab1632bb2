"""Plan a run that repeats another: the same recipe, data, image and global batch, here or on another cluster."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ftkit.config.cluster import ClusterProfile
from ftkit.config.image_reference import parse_image
from ftkit.config.layers import Layers
from ftkit.config.load import override_recipe, read_cluster
from ftkit.config.recipe import RecipePlan
from ftkit.config.request import Origins
from ftkit.errors import ConfigError, Problem
from ftkit.files import InvalidJsonError, mapping, parse_json
from ftkit.launch.resolve import RunArgs, build_request, detect_hardware, new_request, resolve_image_link
from ftkit.launch.resume import Change, changes_losses, image_definition, open_values
from ftkit.planning.plan import PlanError, RunPlan, plan_to_json
from ftkit.planning.planner import plan_run
from ftkit.runs.compare import ComparedRun, Difference, describe_inputs, find_differences
from ftkit.runs.manifest import mappings, trained_data

if TYPE_CHECKING:
    from ftkit.config.context import Context
    from ftkit.planning.layout import Workspace
    from ftkit.runs.repeat import Original

SpecT = TypeVar("SpecT", RecipePlan, ClusterProfile)

_SAME = {
    "data": ("train sha256", "validation sha256", "tokenizer sha256"),
    "image": ("image_id", "image_lock_sha256"),
    "code": (),
}
"""Keys that must be equal in a repetition, by section, if both runs have them."""
_EXPECTED = ("ftkit has uncommitted changes", "fingerprint", "image_sha256", "image_size", "image_modified")
"""Keys that may differ for equal content, or that are derived from other keys."""


def plan_rerun(
    original: Original, args: RunArgs, ctx: Context, workspace: Workspace, default: str | None, *, is_own: bool = True
) -> RunPlan:
    """Plan a run that repeats `original`; `default` is the image from the settings, for a run without a container.

    Unless `is_own`, the cluster profile is read here: setup lines of a manifest from elsewhere must not run.

    On the original's nodes, resolved values of `auto` are kept, so that losses can be equal bit for bit. On other
    nodes they are resolved again; the global batch is kept.
    """
    manifest = original.manifest
    if "script" in manifest:
        raise PlanError(
            f"{original.run.id} can't be repeated: it ran a script, whose data and weights ftkit does not know",
            fix=f"start it again, and compare the results: {shlex.join(map(str, manifest.get('command', [])))}",
        )
    recipe = _read(manifest.get("resolved_recipe"), RecipePlan, "resolved_recipe")
    place: dict[str, Any] = mapping(manifest.get("placement"))
    execution: dict[str, Any] = mapping(manifest.get("execution"))
    if args.cluster or not is_own or not manifest.get("cluster_profile"):
        site = read_cluster(args.cluster or str(manifest.get("cluster")), ctx)
        profile, layers = detect_hardware(site.spec, ctx.environment, ctx.root), site.layers
    else:
        profile, layers = _read(manifest["cluster_profile"], ClusterProfile, "cluster_profile"), Layers()
    is_elsewhere = any((args.cluster, args.num_nodes, args.gpus_per_node, args.processes_per_node))
    chosen = execution.get("chosen", []) if is_elsewhere else []
    loaded = override_recipe(open_values(recipe, chosen, str(manifest.get("engine", "auto"))), ())
    name = manifest.get("image") or default
    image = parse_image(str(name), ctx.project) if name and profile.runtime != "none" else None
    stays = args.cluster in (None, manifest.get("cluster"))
    num_nodes = args.num_nodes or (1 if profile.scheduler == "local" else place.get("num_nodes"))
    args = args._replace(name=args.name or f"{recipe.name}-rerun", num_nodes=num_nodes)
    args = args.sized(profile, place.get("processes_per_node") if stays else None)
    request = new_request(args, image, workspace, Origins(recipe=loaded.layers, cluster=layers))
    request = build_request(loaded.spec, recipe.model, replace(request, teacher=recipe.teacher))
    plan = plan_run(loaded.spec, profile, image_definition(image, ctx), request)
    file = Path(str(manifest.get("container_image")))
    is_same = plan.image_file and plan.image_file.suffix == file.suffix and plan.image == manifest.get("image")
    if is_same and file.is_file():  # named by digest, while the tag may now refer to another image
        return replace(plan, container_image=str(file))
    return resolve_image_link(plan)


def changed_inputs(original: Original, plan: RunPlan, manifest: Mapping[str, Any]) -> list[Difference]:
    """Return the differences between a planned run, with its manifest, and its original, before the run starts."""
    inputs = describe_inputs(plan.layout, json.loads(plan_to_json(plan)), manifest, None)
    found = find_differences([original.run, ComparedRun(plan.id, inputs, original.run.results, ())])
    known = [each for each in found if None not in each.values and each.key not in _EXPECTED]
    return [each for each in known if not each.key.startswith("resources.")]


def changes_between_starts(original: Original) -> list[str]:
    """Return the changes made when the original was resumed, which a single run can't repeat."""
    schedule = mapping(mapping(original.manifest.get("resolved_recipe")).get("training")).get("schedule")
    changes = [
        (submission.get("from_step"), Change(key, mapping(values).get("before"), mapping(values).get("after")))
        for submission in mappings(original.manifest.get("submissions"))
        for key, values in mapping(submission.get("changes")).items()
    ]
    return [
        f"the original continued after step {step} with {change.key}={change.after}, {change.before} before: the "
        "repetition has the newest value from step 1 on, so its losses differ"
        for step, change in changes
        if step and changes_losses(change, str(schedule))
    ]


def repetition_record(original: Original, allowed: Sequence[str]) -> dict[str, Any]:
    """Return the manifest's entry for the original run: its id, its data, and the parts that may differ."""
    return {"run": original.run.id, "data": trained_data(original.manifest.get("starts")), "allowed": list(allowed)}


def check_inputs(differences: Sequence[Difference], allowed: Sequence[str]) -> None:
    """Raise ConfigError with each difference that is not allowed, and each unknown section."""
    choices = f"Choose from {', '.join(_SAME)}."
    unknown = [name for name in allowed if name not in _SAME]
    problems = [Problem("", f"--allow {name}", "is not an input that can differ.", choices) for name in unknown]
    for each in differences:
        if each.key in _SAME.get(each.section, ()) and each.section not in allowed:
            fix = f"A run with other inputs is not a repetition; to run it anyway: --allow {each.section}"
            what = f"is {each.values[1]}, was {each.values[0]}."
            problems.append(Problem("", f"{each.section}: {each.key}", what, fix))
    if problems:
        raise ConfigError(problems)


def _read(value: object, kind: type[SpecT], key: str) -> SpecT:
    try:
        return parse_json(json.dumps(value), kind)
    except InvalidJsonError as error:
        raise PlanError(
            f"the manifest's {key} can't be read: {error}",
            meaning="another version of ftkit wrote it, with other rules",
            fix="repeat the run with that version, which is in the manifest's 'ftkit'",
        ) from error
