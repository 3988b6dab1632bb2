"""`python -m ftkit.data PLAN`, as a job's first stage calls it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from ftkit.data.encoding import IGNORED
from ftkit.data.store import PackStore, PreparedData
from ftkit.data.tokenizers import load_saved_tokenizer
from ftkit.plan import RunPlan, plan_run, plan_to_json
from ftkit.specs.load import Surroundings, load_cluster, load_image, load_recipe
from ftkit.specs.request import RunRequest

if TYPE_CHECKING:
    from pathlib import Path

SMALL = (
    "model.weights=random",
    "model.tokenizer={source: trained, vocab_size: 400}",
    "data.source.num_train=12",
    "data.source.num_heldout=4",
    "data.source.binary_bytes={smallest: 1024, largest: 2048}",
)
"""The shipped recipe, but for a tokeniser that is learned here: one of a digit a token, two tokens a byte."""


def prepare(workspace: Path, *overrides: str) -> tuple[RunPlan, str]:
    around = Surroundings.here()
    recipe = load_recipe("olmo3-32b-malware-full", around, (*SMALL, *overrides))
    request = RunRequest("malware", None, None, recipe.image, False, workspace, "python3", datetime.now(UTC), "test")
    cluster, image = load_cluster("slurm", around), load_image(str(recipe.image), around)
    plan = replace(plan_run(recipe, cluster, image, request, ftkit_version="test"), id="malware")
    plan.layout.root.mkdir(parents=True)
    plan.layout.plan.write_text(plan_to_json(plan))
    command = [sys.executable, "-m", "ftkit.data", str(plan.layout.plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return plan, done.stderr


def test_simulated_malware_is_packed_whole_and_its_analysis_is_trained_on(tmp_path: Path) -> None:
    plan, _ = prepare(tmp_path)
    prepared = PreparedData(plan.data_directory)
    manifest = prepared.read_manifest()
    assert (manifest.num_train_documents, manifest.num_heldout_documents, manifest.num_too_long) == (12, 4, 0)
    tokenizer = load_saved_tokenizer(prepared.tokenizer)
    labels = np.asarray(PackStore(prepared.heldout).packs[:, 1])
    trained = tokenizer.decode(labels[labels != IGNORED])
    analyses = [example["analysis"] for example in prepared.read_heldout_examples()]
    assert sorted(trained.split(tokenizer.eos_token)) == sorted(["", *analyses])


def test_binaries_too_large_for_a_pack_are_left_out_and_counted(tmp_path: Path) -> None:
    plan, printed = prepare(tmp_path, "training.sequence_length=3584")
    manifest = PreparedData(plan.data_directory).read_manifest()
    assert 0 < manifest.num_too_long < 16
    assert manifest.num_train_documents + manifest.num_heldout_documents == 16 - manifest.num_too_long
    assert f"{manifest.num_too_long} documents are longer than a pack, and left out" in printed
