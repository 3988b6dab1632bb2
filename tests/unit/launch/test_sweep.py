"""Sweeps: which command lines expand to several runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.config.context import Context
from ftkit.errors import ConfigError
from ftkit.launch.resolve import RunArgs
from ftkit.launch.sweep import MAX_RUNS, expand, plan_sweep, split
from ftkit.planning.plan import parse_plan, plan_to_json

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    environment = {"FTKIT_WORKSPACE": str(tmp_path / "w"), "CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    return Context(tmp_path, tmp_path / "user", environment)


def overrides_of(ctx: Context, *overrides: str, cluster: str | None = None) -> list[tuple[str, ...]]:
    return [trial.args.overrides for trial in expand(RunArgs("demo", overrides, cluster=cluster), ctx)]


@pytest.mark.parametrize(
    "override",
    [
        "training.learning_rate=1e-3",
        "training.betas=[0.9, 0.99]",
        "training.lora={rank: 8, targets: [q_proj, v_proj]}",
        "data.format.system=Be kind, be brief",
        "data.format.system=kind,brief",
        "data.format.system='a,b'",
        "description=one,two",
        "training.learning_rate=1e-3,",
        "training.learning_rate=,",
        "training.betas=0.9,0.99",  # invalid as a whole and in parts: the error shows the whole
        "training.learning_rate=fast,slow",
    ],
)
def test_a_value_that_is_valid_as_a_whole_is_not_split(override: str, ctx: Context) -> None:
    assert overrides_of(ctx, override) == [(override,)]


def test_each_combination_is_a_run_and_the_last_value_changes_fastest(ctx: Context) -> None:
    trials = expand(
        RunArgs("demo", ("training.learning_rate=1e-3,2e-3", "training.betas=[0.9,0.9],[0.8,0.9]", "training.seed=3")),
        ctx,
    )
    assert [trial.args.overrides for trial in trials] == [
        (f"training.learning_rate={rate}", f"training.betas={betas}", "training.seed=3")
        for rate in ("1e-3", "2e-3")
        for betas in ("[0.9,0.9]", "[0.8,0.9]")
    ]
    assert trials[1].values == {"training.learning_rate": "1e-3", "training.betas": "[0.8,0.9]"}


def test_several_clusters_are_a_sweep_with_one_name(ctx: Context) -> None:
    trials = expand(RunArgs("olmo3-7b-full", ("training.max_steps=2,4",), "olmo3:25.02", "a3-megagpu-8g,a4-highgpu-8g",
                            num_nodes=2), ctx)  # fmt: skip
    plans = plan_sweep(trials, ctx)
    assert [plan.cluster.name for plan in plans] == ["a3-megagpu-8g"] * 2 + ["a4-highgpu-8g"] * 2
    assert [plan.name for plan in plans] == [f"olmo3-7b-full-{number}" for number in range(1, 5)]
    assert len({plan.id for plan in plans}) == 4
    (sweep,) = {(plan.sweep.id, plan.sweep.name) for plan in plans if plan.sweep}
    assert sweep[1] == "olmo3-7b-full"
    assert sweep[0].startswith("olmo3-7b-full-2")
    for plan in plans:
        assert plan.id.startswith(f"{plan.name}-2")
        assert parse_plan(plan_to_json(plan), "plan.json").sweep == plan.sweep


def test_one_impossible_run_rejects_the_sweep_with_its_values(ctx: Context) -> None:
    args = RunArgs(
        "demo", ("training.global_batch_size=8,9", "training.seed=1,2"), cluster="local", processes_per_node=2
    )
    with pytest.raises(ConfigError) as caught:
        plan_sweep(expand(args, ctx), ctx)
    assert [problem.where for problem in caught.value.problems] == [
        f"training.global_batch_size=9, training.seed={seed}: command line" for seed in (1, 2)
    ]


def test_too_many_runs_and_duplicate_runs_are_rejected(ctx: Context) -> None:
    many = ",".join(map(str, range(1, MAX_RUNS + 2)))
    with pytest.raises(ConfigError, match="make 201 runs"):
        overrides_of(ctx, f"training.seed={many}")
    with pytest.raises(ConfigError, match=r"training\.seed=1: "):
        overrides_of(ctx, "training.seed=1,2,1")


value = st.recursive(
    st.text("abc01.-", min_size=1, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: f"[{','.join(each)}]")
        | st.lists(inner, max_size=3).map(lambda each: "{" + ",".join(f"k: {one}" for one in each) + "}")
        | st.text("ab,[]{} ", max_size=5).map(lambda text: f"'{text}'")
    ),
    max_leaves=6,
)


@given(st.lists(value, min_size=1, max_size=4))
def test_values_are_split_only_at_top_level_commas(values: list[str]) -> None:
    assert split(",".join(values)) == values


@given(st.text("ab,[]{}'\" "))
def test_splitting_preserves_the_text(text: str) -> None:
    assert ",".join(split(text)) == text
