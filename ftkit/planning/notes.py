"""Notes of a plan: what does not fit, what would be faster, what is uncertain, and what to change."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ftkit.config.execution import are_quantized
from ftkit.errors import plural
from ftkit.models.families import MEASURED, UNPACKED
from ftkit.models.parameters import count_model
from ftkit.planning.fit import fit
from ftkit.planning.flops import has_linear_attention
from ftkit.planning.step_time import PADDING, predict_step_time
from ftkit.planning.suggestions import suggest_changes, suggest_faster
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.cluster import ClusterProfile
    from ftkit.config.image import ImageSpec
    from ftkit.config.recipe import RecipeSpec
    from ftkit.config.training import TrainingSpec
    from ftkit.models.spec import CountSource, ModelPlan
    from ftkit.planning.fit.memory import MemoryPlan
    from ftkit.planning.training_setup import Setup

LINEAR_KERNELS = "flash-linear-attention"
"""The package with kernels for linear attention."""


def notes_on_fit(
    setup: Setup, cluster: ClusterProfile, memory: MemoryPlan, *, can_divide_packs: bool
) -> tuple[str, ...]:
    """Return notes with suggestions for a run that doesn't fit, or that could be much faster."""
    gpu = setup.gpu
    if gpu is None and cluster.scheduler == "slurm" and setup.device != "cpu":
        names = ", ".join(GPUS)
        note = (
            f"the profile of '{cluster.name}' has no 'gpu', so the settings with the least memory are used, and no "
            f"speed is predicted: set it to one of {names}, if it is one of these"
        )
        return (note,)
    if gpu is None:
        return ()
    if memory.total <= gpu.usable_gib:
        faster = suggest_faster(setup, gpu)
        return () if faster is None else (f"predicted to be faster with the same global batch: {faster}",)
    note = (
        f"predicted peak of {memory.total:.0f} GiB is more than this GPU's {gpu.memory_gib:g} GiB can hold: "
        "expect an out-of-memory error"
    )
    fitting = suggest_changes(setup, cluster, gpu.usable_gib, can_divide_packs=can_divide_packs)
    return (note, *(f"predicted to fit: {suggestion}" for suggestion in fitting))


def notes_on_linear_attention(setup: Setup, image: ImageSpec | None, padding: float) -> tuple[str, ...]:
    """Return a note on what computes linear attention, with the predictions of both cases."""
    gpu, family = setup.gpu, setup.shape.family
    if setup.device == "cpu" or not has_linear_attention(setup.shape):
        return ()
    with_kernel, without = (_describe_prediction(setup, has_kernel, padding) for has_kernel in (True, False))
    if image is not None and not setup.has_linear_kernel:
        note = (
            f"{image.reference} does not list {LINEAR_KERNELS}, so PyTorch computes the linear attention of "
            f"'{family}': {without}; with a kernel that runs on the GPU: {with_kernel}"
        )
        return (note,)
    note = (
        f"the plan assumes a kernel for the linear attention of '{family}' ({LINEAR_KERNELS}): {with_kernel}; where "
        f"none runs, PyTorch computes it: {without}"
    )
    if gpu is None or (gpu.has_fast_attention and not gpu.is_blackwell):
        note += f". On Hopper GPUs, {LINEAR_KERNELS} 0.6.0 needs Triton 3.7.1 or newer, or tilelang"
    return (note,)


def _describe_prediction(setup: Setup, has_kernel: bool, padding: float) -> str:  # noqa: FBT001
    setup = replace(setup, has_linear_kernel=has_kernel)
    text = f"{fit(setup).memory.total:.1f} GiB"
    if setup.gpu is None:
        return text
    speed = predict_step_time(setup, setup.gpu, padding).tokens_per_second / setup.num_processes
    return f"about {speed:,.0f} tokens/s per GPU and {text}"


def notes_on_packs(training: TrainingSpec, num_packs: int | None) -> tuple[str, ...]:
    batch = training.global_batch_size
    if num_packs is None or num_packs >= batch:
        return ()
    note = (
        f"the data fills {plural(num_packs, 'pack')}, fewer than the {batch:,} of a step: each step repeats documents, "
        "and few steps train; use a smaller training.global_batch_size or sequence_length"
    )
    return (note,)


def notes_on_fp8(setup: Setup, image: ImageSpec | None) -> tuple[str, ...]:
    """Return a note on an image whose torch all-gathers in bf16."""
    version = "" if image is None else image.provided.get("torch", "")
    if image is None or not (setup.gathers_in_fp8 and version.startswith(("2.6", "2.7"))):
        return ()
    note = (
        f"weights are all-gathered in bf16 with torch {version} of '{image.reference}', not in FP8: layers that stay "
        "unsharded take more memory than predicted (training.reshard_after_forward=always avoids it)"
    )
    return (note,)


_ESTIMATED: dict[CountSource, str] = {
    "formula": "parameters are counted exactly, memory and speed are estimates",
    "model": "parameters are counted on the model itself, memory and speed are estimates",
    "config": "parameters and memory are estimates",
    "family": "parameters and memory are estimates",
}


def notes_on_model(
    recipe: RecipeSpec, model: ModelPlan, cluster: ClusterProfile, image: ImageSpec | None, padding: float | None
) -> Iterator[str]:
    """Yield notes on added tokens, and on parts of the plan that are uncertain or slow."""
    shape, rows, training = model.architecture, model.vocab_size_of_weights, recipe.training
    if rows is not None:
        yield f"model.added_tokens: the embedding grows from {rows:,} to {shape.vocab_size:,} rows"
    elif model.new_tokens:
        yield f"model.added_tokens: free rows of the embedding for {plural(len(model.new_tokens), 'new token')}"
    if recipe.data.packing == "off":
        known = "as counted in the prepared data" if padding else "assumed until the data is prepared"
        yield (
            f"data.packing is 'off': each document is a padded row, which takes {padding or PADDING:.2f} times the "
            f"tokens of packs ({known}); the predicted speed includes it"
        )
    elif shape.family in UNPACKED:
        yield (
            f"'{shape.family}' keeps packed documents apart only with kernels of other packages, if at all: if the "
            "check before step 1 finds that it does not, each document becomes a padded row, which is slower; plan "
            "with data.packing=off to see by how much"
        )
    if shape.is_measured:
        return
    counts = count_model(shape)
    quantized = training.precision if training.trains_in_fp8 else training.quantization
    in_8_bits = {are_quantized(training.quantization, each) for each in counts.expert_matrices}
    if counts.experts_per_token and quantized != "none" and in_8_bits != {True}:
        yield (
            f"the experts of '{shape.family}' compute and stay in bf16, not in {quantized}: in transformers 5 they are "
            "not linear layers"
        )
    yield (
        f"'{shape.family}' is none of {', '.join(MEASURED)}: {_ESTIMATED[counts.source]}, and whether it can "
        "be trained is checked when the job starts"
    )
    yield from _notes_on_counts(model)
    if image is not None and cluster.runtime != "none" and shape.family not in image.families:
        yield f"'{image.reference}' is not made for '{shape.family}': its transformers must support it"


def _notes_on_counts(model: ModelPlan) -> Iterator[str]:
    """Yield notes on parameters that are not counted exactly."""
    shape, counts = model.architecture, count_model(model.architecture)
    if counts.source == "family" and counts.experts_per_token:
        yield (
            f"'{shape.family}' is a mixture of experts, and their number can't be read here: the plan assumes the "
            "largest usual one (for an exact plan, download the weights' config.json)"
        )
    elif model.count_error:
        yield f"the parameters of '{shape.family}' can't be counted on its class: {model.count_error}"
    elif not counts.is_exact:
        yield (
            f"to count the parameters of '{shape.family}' exactly, plan with torch and a transformers that has the "
            "family: pip install 'ftkit[train]'"
        )
