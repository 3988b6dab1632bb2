"""What a run needs before it trains: tokenized data, and weights in the hub's cache."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from ftkit import hub
from ftkit.errors import PrerequisiteError
from ftkit.planning.layout import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ftkit.planning.plan import RunPlan


def needs_preparation(plan: RunPlan, environment: Mapping[str, str]) -> bool:
    """Whether a run on Slurm has work to do that needs no GPU; on this machine, the run's own script does it."""
    if plan.cluster.scheduler != "slurm":
        return False
    variables = {**environment, **plan.cluster.environment}
    return not plan.is_data_prepared or not hub.is_fetched(
        plan.recipe.model, variables, Workspace(plan.workspace).hub_home
    )


def prepare_here(
    plan: RunPlan, environment: Mapping[str, str], report: Callable[[str], None], num_workers: int | None = None
) -> None:
    """Prepare data and fetch weights on this machine.

    Raises:
        PrerequisiteError: a package that this needs is missing.
        DataError: the data can't be used as the recipe asks.
        NotFoundError: the weights can't be downloaded.
    """
    missing = [name for name in ("datasets", "numpy", "tokenizers", "transformers") if find_spec(name) is None]
    if missing:
        raise PrerequisiteError(
            f"data can't be prepared here without {', '.join(missing)}",
            meaning="ftkit was installed without what tokenizes",
            fix="pip install 'ftkit[train]'; or leave it to a job: --prepare job",
        )
    from ftkit.data.prepare import prepare  # noqa: PLC0415 - seconds of imports

    prepare(plan, report, num_workers)
    home = Workspace(plan.workspace).hub_home
    if not hub.is_fetched(plan.recipe.model, {**environment, **plan.cluster.environment}, home):
        report(f"fetching the weights of {plan.recipe.model.weights}")
        hub.download_weights(plan.recipe.model, environment, home)
