"""Which experiment trackers a run's numbers go to, besides metrics.jsonl."""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from ftkit.specs.strict import OneLine, Spec

SinkName = Literal["tensorboard", "wandb", "mlflow"]


class TrackingSpec(Spec):
    """Experiment trackers, fed with what goes to metrics.jsonl. Keys and passwords come from the environment."""

    sinks: tuple[SinkName, ...] = ()
    """Any of `tensorboard`, `wandb` and `mlflow`; each is an extra of ftkit."""
    project: OneLine | None = None
    """W&B's project and MLflow's experiment; none: `WANDB_PROJECT` and `MLFLOW_EXPERIMENT_NAME`, else `ftkit`."""
    mlflow_uri: OneLine | None = None
    """MLflow's tracking server, without user and password; none: `MLFLOW_TRACKING_URI`."""

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
