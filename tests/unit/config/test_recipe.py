from __future__ import annotations

from pathlib import Path

import pytest

from ftkit.config.context import Context
from ftkit.config.load import load_recipe
from ftkit.errors import ConfigError

HERE = Context(Path("/nowhere/project"), Path("/nowhere/user"), {})


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe("demo", HERE, overrides)
    return str(caught.value)


def test_an_override_can_set_the_list_of_sinks() -> None:
    recipe = load_recipe("demo", HERE, ("tracking.sinks=[tensorboard, wandb]", "tracking.project=ours"))
    assert recipe.tracking.sinks == ("tensorboard", "wandb")
    assert load_recipe("demo", HERE).tracking.sinks == ()


def test_settings_without_effect_are_rejected() -> None:
    assert "'wandb'?" in problems("tracking.sinks=[wanbd]")
    assert "wandb, wandb" in problems("tracking.sinks=[wandb, wandb]")
    assert "without 'mlflow'" in problems("tracking.sinks=[wandb]", "tracking.mlflow_uri=http://mlflow")


def test_a_password_in_an_address_is_rejected_without_printing_it() -> None:
    said = problems("tracking.sinks=[mlflow]", "tracking.mlflow_uri=https://me:hunter2@mlflow")
    assert "MLFLOW_TRACKING_PASSWORD" in said
    assert "hunter2" not in said
