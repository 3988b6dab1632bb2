"""Runs on a cluster over a real ssh, with dropped connections."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import PATIENCE_SECONDS, wait_until

if TYPE_CHECKING:
    from conftest import Laptop

CHECKOUT = Path(__file__).parents[2]

pytestmark = pytest.mark.train

RECIPE = """\
extends: {tiny}
name: mine
data:
  source: {{kind: files, train: ../../data/chats.jsonl}}
  validation: {{count: 8}}
training: {{max_steps: 4}}
evaluation: {{generation: null}}
"""


def test_a_login_node_without_ftkit_or_with_another_version_is_rejected_with_the_command_to_run(laptop: Laptop) -> None:
    done = laptop.ftkit("--cluster", "far", "runs", expect=5)
    assert "is missing, or differs" in done.stderr
    assert "ftkit cluster connect far" in done.stderr
    half = laptop.there / "venv/bin/ftkit"  # an installation that was cut off
    half.parent.mkdir(parents=True)
    half.write_text("#!/bin/sh\nexit 1\n")
    half.chmod(0o755)
    done = laptop.ftkit("run", "demo", "--cluster", "far", expect=5)
    shutil.rmtree(laptop.there / "venv")
    assert "is missing, or differs" in done.stderr
    assert "ftkit cluster connect far" in done.stderr


def test_a_remote_run_is_submitted_once_and_followed_despite_dropped_connections(ready: Laptop) -> None:
    data = ready.folder / "data/chats.jsonl"
    data.parent.mkdir()
    row = {"sql_context": "CREATE TABLE t (a)", "sql": "SELECT a FROM t"}
    rows = [json.dumps(row | {"sql_prompt": f"question {each}"}) for each in range(200)]
    data.write_text("\n".join(rows))
    (ready.project / "recipes").mkdir()
    (ready.project / "recipes/mine.yaml").write_text(RECIPE.format(tiny=CHECKOUT / "tests/train/tiny.yaml"))
    ready.cut_when(f"{ready.there}/submissions/*/begun")
    done = ready.ftkit("run", "mine", "--cluster", "far", "--no-follow", "--name", "cut", "training.seed=3")
    assert "no connection to" in done.stderr
    assert "Welcome to the cluster" in done.stderr
    run = done.stdout.strip()
    assert "Welcome" not in run
    listed = json.loads(ready.ftkit("--cluster", "far", "runs", "--json").stdout)
    assert [each["id"] for each in listed] == [run]

    ready.cut_when("160")  # after what the login shell prints
    log = ready.ftkit("logs", "cut", "-f").stdout
    there = next(ready.there.glob(f"projects/*/work/runs/{run}"))
    assert log == (there / "logs/job.log").read_text()
    assert not (ready.folder / "cut").exists()

    status = json.loads(ready.ftkit("status", "cut", "--json").stdout)
    assert status["state"] == "completed"
    assert [path.name for path in ready.there.glob("files/**/chats.jsonl")] == ["chats.jsonl"]
    for path in ready.there.rglob("*"):
        if path.is_file() and "venv" not in path.parts:
            assert b"hf_secretsecret" not in path.read_bytes(), path


def test_a_local_script_and_package_are_sent_and_run_on_the_cluster(ready: Laptop) -> None:
    code = ready.folder / "code"
    (code / "mine").mkdir(parents=True)
    (code / "mine/__init__.py").write_text("WORD = 'first'\n")
    (ready.project / "scripts").mkdir()
    (ready.project / "scripts/words.txt").write_text("beside")
    (ready.project / "scripts/.env").write_text("SECRET=1")
    (ready.project / "scripts/train.py").write_text(
        "import sys, mine, ftkit\nprint('said', mine.WORD, open('words.txt').read(), sys.argv[1:], ftkit.__file__)\n"
    )
    (ready.project / "accelerate.yaml").write_text("distributed_type: 'NO'\nmixed_precision: 'no'\n")
    words = ("run", "--script=scripts/train.py", "--with-code", "../code/mine", "--dev", "--accelerate-config")
    place = ("accelerate.yaml", "--cluster", "far", "--no-follow", "--processes-per-node", "1", "--name", "code")
    done = ready.ftkit(*words, *place, "resources.time_limit=1:00:00", "--", "--follow", "1")
    assert "sending code (" in done.stderr
    run = done.stdout.strip()
    there = next(ready.there.glob(f"projects/*/work/runs/{run}"))
    log = ready.ftkit("logs", "code", "-f").stdout
    assert f"said first beside ['--follow', '1'] {there}/code/ftkit/ftkit/__init__.py" in log, log
    manifest = json.loads((there / "manifest.json").read_text())
    assert {name: copy["source"] for name, copy in manifest["code"].items()} == {
        "script": str(ready.project / "scripts"), "with-mine": str(code / "mine"), "ftkit": str(CHECKOUT / "ftkit"),
    }  # fmt: skip
    assert not [*ready.there.rglob("scripts/.env"), *there.rglob(".env")]

    (code / "mine/__init__.py").write_text("WORD = 'second'\n")
    (code / "mine/large.bin").write_bytes(random.Random(0).randbytes(2 << 20))
    refused = ready.ftkit(*words, *place, expect=3)
    assert "MiB of code" in refused.stderr


def test_a_run_that_can_not_be_recorded_here_is_reported_with_the_cluster_to_give(ready: Laptop) -> None:
    records = ready.folder / "laptop/.local/state/ftkit/remote/runs.json"
    kept = records.read_bytes()
    records.unlink()
    records.mkdir()  # nothing can be written here, as on a full disk
    (records / "file").touch()
    try:
        done = ready.ftkit("run", "demo", "--cluster", "far", "--no-follow", "--name", "unrecorded")
        run = done.stdout.strip()
        assert f"could not record {run} on this machine" in done.stderr
        assert f"ftkit --cluster far status {run}" in done.stderr
        ready.ftkit("--cluster", "far", "cancel", run)
    finally:
        shutil.rmtree(records)
        records.write_bytes(kept)


def test_a_terminated_command_does_not_wait_for_the_login_node(ready: Laptop) -> None:
    ssh = ready.folder / "bin/ssh"
    kept = ssh.read_text()
    ssh.write_text("#!/bin/sh\ntouch waiting\nexec sleep 600\n")
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "ftkit", "--cluster", "far", "runs"],
            cwd=ready.project, env=ready.environment, stdout=subprocess.DEVNULL,
        ) as started:  # fmt: skip
            wait_until((ready.project / "waiting").exists)
            started.terminate()
            assert started.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
    finally:
        ssh.write_text(kept)
