"""Which experiment trackers a run's numbers go to, besides metrics.jsonl."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from ftkit.config.strict import OneLine, Spec
from ftkit.errors import PrerequisiteError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

SinkName = Literal["tensorboard", "wandb", "mlflow"]

SINK_PACKAGES: Final[dict[SinkName, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny", "mlflow"),
}
"""The Python packages that a sink needs one of; the first is what to install."""


def sinks_without_package(sinks: Iterable[SinkName], packages: Container[str]) -> list[SinkName]:
    """Return the sinks that can't work where these packages are; names are as the package index compares them."""
    return [sink for sink in sinks if not any(name in packages for name in SINK_PACKAGES[sink])]


class TrackingSpec(Spec):
    """Experiment trackers, fed with what goes to metrics.jsonl. Keys and passwords come from the environment."""

    sinks: tuple[SinkName, ...] = ()
    """Any of `tensorboard`, `wandb` and `mlflow`; each is an extra of ftkit."""
    project: OneLine | None = None
    """W&B's project and MLflow's experiment. `WANDB_PROJECT` and `MLFLOW_EXPERIMENT_NAME`, else `ftkit`, if null."""
    mlflow_uri: OneLine | None = None
    """MLflow's tracking server, without user and password. `MLFLOW_TRACKING_URI` if null."""

    @model_validator(mode="after")
    def _each_sink_once(self) -> Self:
        if len(set(self.sinks)) != len(self.sinks):
            raise ValueError(f"sinks name one twice: {', '.join(self.sinks)}")
        return self

    @model_validator(mode="after")
    def _no_secret_in_a_file(self) -> Self:
        # Of the whole spec, because a problem with a single key shows its value.
        if self.mlflow_uri is not None and "@" in urlsplit(self.mlflow_uri).netloc:
            raise ValueError(
                "mlflow_uri holds a user or a password: export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return self

    @model_validator(mode="after")
    def _uri_has_its_sink(self) -> Self:
        if self.mlflow_uri is not None and self.sinks and "mlflow" not in self.sinks:
            raise ValueError("mlflow_uri has no effect without 'mlflow' among the sinks")
        return self


def check_packages(tracking: TrackingSpec) -> None:
    """Check that this Python has the trackers' packages.

    Raises:
        PrerequisiteError: one is missing.
    """
    for name in tracking.sinks:
        if find_spec(name) is None:
            raise PrerequisiteError(
                f"tracking.sinks names {name}, whose package is not installed",
                meaning="the Python or the image that trains was made without it",
                fix=f"pip install 'ftkit[{name}]', add it to the image's packages, or leave it out of tracking.sinks",
            )


def check_access(tracking: TrackingSpec, environment: Mapping[str, str], *, sees_home: bool) -> None:
    """Check that trackers that need a key or an address have one: before the job is submitted, and again in it.

    Args:
        tracking: the recipe's trackers.
        environment: the job's variables, as far as they are known.
        sees_home: whether the job sees the user's home folder, as no container does.

    Raises:
        PrerequisiteError: a key or an address is missing.
    """
    if "wandb" in tracking.sinks and environment.get("WANDB_MODE", "online") in {"online", "shared"}:
        netrc = Path(environment.get("NETRC") or Path(environment.get("HOME") or "/", ".netrc"))
        has_key = environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE")
        if not has_key and not (sees_home and netrc.is_file()):
            raise PrerequisiteError(
                "tracking.sinks names wandb, and there is no key for it",
                meaning="WANDB_API_KEY is not set where the run is submitted; containers don't see ~/.netrc",
                fix="export WANDB_API_KEY before 'ftkit run', or WANDB_MODE=offline",
            )
    if "mlflow" in tracking.sinks and tracking.mlflow_uri is None and not environment.get("MLFLOW_TRACKING_URI"):
        raise PrerequisiteError(
            "tracking.sinks names mlflow, and there is no address of a server",
            meaning="neither tracking.mlflow_uri nor MLFLOW_TRACKING_URI is set where the run is submitted",
            fix="give tracking.mlflow_uri=https://HOST, or export MLFLOW_TRACKING_URI before 'ftkit run'",
        )
