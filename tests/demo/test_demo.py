"""A shortened demo: from the command to a model that answers questions about unseen tables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import transformers
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from waiting import PATIENCE_SECONDS

from ftkit import assets
from ftkit.runs.metrics_file import read_records
from ftkit.runs.records import EvaluationRecord, StepRecord

pytestmark = pytest.mark.train

FTKIT = Path(sys.executable).with_name("ftkit")


HIDING = """
import os, sys
from importlib.machinery import PathFinder

class OfTheDemo(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in os.environ["HIDDEN"].split() else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = OfTheDemo
"""
"""A sitecustomize.py that hides packages from imports."""


def modules_beside(extra: str) -> list[str]:
    """Return the modules that an installation of ftkit with one extra would lack."""
    normal = {name: canonicalize_name(name) for names in packages_distributions().values() for name in names}
    wanted, todo = set[str](), [("ftkit", extra)]
    while todo:
        name, of_extra = todo.pop()
        for line in requires(name) or []:
            each = Requirement(line)
            found = canonicalize_name(each.name)
            if found in normal.values() and (each.marker is None or each.marker.evaluate({"extra": of_extra})):
                todo += [(found, word) for word in (each.extras or {""}) if f"{found} {word}" not in wanted]
                wanted |= {f"{found} {word}" for word in (each.extras or {""})}
    installed = {each.partition(" ")[0] for each in wanted} | {"ftkit"}
    return [module for module, names in packages_distributions().items() if not installed & {normal[n] for n in names}]


def ftkit(workspace: Path, *arguments: str, typed: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"FTKIT_WORKSPACE": str(workspace), "XDG_CONFIG_HOME": "/nonexistent"} | variables
    return subprocess.run(
        [str(FTKIT), *arguments],
        cwd=workspace,
        env=environment,
        input=typed,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )


def test_the_demo_model_answers_questions_about_unseen_tables(tmp_path: Path) -> None:
    done = ftkit(
        tmp_path, "run", "demo", "--cluster", "local", "training.max_steps=250", "data.source.num_train=4000",
        "evaluation.generation.num_rows=100",
    )  # fmt: skip
    (run,) = json.loads(ftkit(tmp_path, "runs", "--json").stdout)
    assert (run["state"], run["step"]) == ("completed", 250)
    records = [*read_records(Path(run["folder"]) / "metrics.jsonl")]
    before, after = (record for record in records if isinstance(record, EvaluationRecord))
    assert before.scores["sql"] == 0.0
    assert after.scores["sql"] >= 0.2
    assert after.perplexity < before.perplexity / 100
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert steps[-1].loss < steps[0].loss / 10
    # Without a terminal: plain lines on stderr, and only the run id on stdout.
    assert "step 250/250" in done.stderr
    assert "sql 0% →" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    # What it prints to type next needs no package that scripts/demo does not install.
    commands = re.findall(r"^(?:next)? +ftkit (.+)$", done.stderr, re.MULTILINE)
    assert [each.split()[0] for each in commands] == ["chat", "eval", "export", "status"]
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding" / "sitecustomize.py").write_text(HIDING)
    hidden = modules_beside("train")
    assert not {"torch", "transformers", "rich"} & {*hidden}
    for command in commands:
        ftkit(tmp_path, *command.split(), typed="How many ships are there?\n", HIDDEN=" ".join(hidden),
              PYTHONPATH=str(tmp_path / "hiding"))  # fmt: skip


def test_pairs_train_the_model_that_careless_data_taught(tmp_path: Path) -> None:
    short = ("--cluster", "local", "evaluation.generation.num_rows=20")
    ftkit(tmp_path, "run", "careless", *short, "training.max_steps=40", "data.source.num_train=800")
    ftkit(
        tmp_path, "run", "corrected", *short, "model=run:careless", "training.max_steps=8", "data.source.num_train=150"
    )
    found = {run["name"]: run for run in json.loads(ftkit(tmp_path, "runs", "--json").stdout)}
    assert [found[name]["state"] for name in ("careless", "corrected")] == ["completed", "completed"]
    records = [*read_records(Path(found["corrected"]["folder"]) / "metrics.jsonl")]
    before, after = (record for record in records if isinstance(record, EvaluationRecord))
    assert before.scores["margin"] == pytest.approx(0, abs=1e-5)
    assert after.scores["margin"] > 0.01
    assert "sql" in before.scores


@pytest.mark.skipif(not hasattr(transformers, "CLIPImageProcessorPil"), reason="its processors need torchvision")
def test_a_model_that_reads_numbers_is_trained_on_pictures_and_shows_them_in_its_report(tmp_path: Path) -> None:
    model = tmp_path / "reading-model"
    subprocess.run([sys.executable, assets.EXAMPLES / "tasks" / "reading.py", model], check=True, capture_output=True)
    recipe = str(assets.EXAMPLES / "pictures" / "reading.yaml")
    ftkit(
        tmp_path, "run", recipe, "--cluster", "local", f"model={model}", "training.max_steps=4",
        "data.source.num_train=200", "evaluation.generation.num_rows=4",
    )  # fmt: skip
    (run,) = json.loads(ftkit(tmp_path, "runs", "--json").stdout)
    assert run["state"] == "completed"
    folder = Path(run["folder"])
    before, after = (each for each in read_records(folder / "metrics.jsonl") if isinstance(each, EvaluationRecord))
    assert after.perplexity < before.perplexity
    ftkit(tmp_path, "report", run["id"])
    assert '<img src="data:image/jpeg;base64,' in (folder / "report.html").read_text()
    verified = ftkit(tmp_path, "verify", str(folder / "export"))
    assert "processor of pictures" in verified.stdout + verified.stderr
