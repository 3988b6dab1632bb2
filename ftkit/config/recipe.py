"""A recipe: everything that a training run is, apart from where it runs."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from ftkit.config.data import DataSpec
from ftkit.config.model import ModelPlan, ModelSpec
from ftkit.config.profiler import ProfileSpec
from ftkit.config.strict import Name, Spec
from ftkit.config.tracking import TrackingSpec
from ftkit.config.training import EvaluationSpec, ResourcesSpec, TrainingPlan, TrainingSpec


def _with_weights(value: object) -> object:
    """Take the short form of a model: its weights alone."""
    return {"weights": value} if isinstance(value, str) else value


class RecipeSpec(Spec):
    """A recipe: everything that a training run is, apart from where it runs."""

    name: Name
    """Name of the recipe, and of its runs unless `--name` says otherwise."""
    description: str = ""
    """One line for `ftkit recipes`."""
    image: str | None = None
    """Image to run in if neither the command line nor the settings set one."""
    model: Annotated[ModelSpec, BeforeValidator(_with_weights, json_schema_input_type=str | ModelSpec)]
    """The model to fine-tune: its weights alone (`model: Qwen/Qwen3-8B`), or its fields."""
    data: DataSpec
    """The data to train and evaluate on."""
    training: TrainingSpec
    """The optimization."""
    evaluation: EvaluationSpec = EvaluationSpec.model_construct()
    """What is measured on the validation split."""
    tracking: TrackingSpec = TrackingSpec.model_construct()
    """Experiment trackers that the run's numbers go to."""
    profile: ProfileSpec = ProfileSpec.model_construct()
    """The profiler."""
    resources: ResourcesSpec = ResourcesSpec.model_construct()
    """What the recipe asks of a cluster."""


class RecipePlan(RecipeSpec):
    """A recipe as it is carried out: what `auto` stood for is resolved, and the model's parameters are counted."""

    model: ModelPlan
    """The model to fine-tune."""
    training: TrainingPlan
    """The optimization."""

    @classmethod
    def of(cls, recipe: RecipeSpec, model: ModelPlan, training: TrainingPlan) -> RecipePlan:
        """Put what is resolved in its place."""
        fields = {name: getattr(recipe, name) for name in RecipeSpec.model_fields}
        return cls.model_construct(**fields | {"model": model, "training": training})
