"""Data about a run for its status and its report, besides its records, read from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftkit.planning.plan import PlanError, RunPlan, Script, ScriptPlan, read_job_plan
from ftkit.runs.gpu_samples import GpuSummary, NodeSample, read_samples, summarize_samples
from ftkit.runs.manifest import explain_missing_digests
from ftkit.runs.repeat import Verdict, judge
from ftkit.runs.slow_ranks import Straggler, find_stragglers, read_timings

if TYPE_CHECKING:
    from ftkit.planning.layout import RunLayout


@dataclass(frozen=True)
class RunFacts:
    plan: RunPlan | ScriptPlan | None  # None if unreadable, usually because another version of ftkit wrote it
    plan_problem: str
    stragglers: list[Straggler]
    doubts: list[str]  # why the run can't be repeated exactly
    verdict: Verdict | None  # None if it is not a repetition
    samples: list[NodeSample]
    gpus: GpuSummary | None

    @property
    def trainer(self) -> RunPlan | None:
        return self.plan if isinstance(self.plan, RunPlan) else None

    @property
    def script(self) -> Script | None:
        return self.plan.script if isinstance(self.plan, ScriptPlan) else None


def read_facts(layout: RunLayout) -> RunFacts:
    plan, problem = None, ""
    try:
        plan = read_job_plan(layout)
    except PlanError as error:
        problem = error.what
    samples = read_samples(layout)
    return RunFacts(
        plan=plan,
        plan_problem=problem,
        stragglers=find_stragglers(read_timings(layout)),
        doubts=explain_missing_digests(layout),
        verdict=judge(layout),
        samples=samples,
        gpus=summarize_samples(samples),
    )
