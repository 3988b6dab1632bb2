"""Side jobs of a run on a real Slurm cluster: evaluation of its checkpoints, and serving."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from waiting import PATIENCE_SECONDS

if TYPE_CHECKING:
    from conftest import Cluster

VLLM = """#!{python}
import argparse, http.server, pathlib
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("command", choices=["serve"])
parser.add_argument("model", type=pathlib.Path)
for name in ("served-model-name", "host", "max-model-len"):
    parser.add_argument("--" + name, required=True)
for name in ("port", "tensor-parallel-size"):
    parser.add_argument("--" + name, type=int, required=True)
args = parser.parse_args()
assert (args.model / "model.safetensors").is_file()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(args.served_model_name.encode())
http.server.ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
"""
SIZE = (
    "training.max_steps=60", "training.checkpoint_every_steps=20",
    "evaluation.generation=null", "tracking.sinks=[tensorboard]",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(cluster: Cluster) -> str:
    """A run whose checkpoints are evaluated by another job."""
    run = cluster.submit("beside", *SIZE)
    job = cluster.ftkit("eval", run, "--as-job", "--limit", "6", "--max-new-tokens", "4").stdout.strip()
    status = cluster.wait_for_completion(run)
    listed = ("squeue", "--noheader", "--jobs", job)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while cluster.execute(*listed).stdout.strip():
        assert time.monotonic() < deadline, (cluster.folder(run) / "logs" / "evaluation.log").read_text()
        time.sleep(1)
    states = cluster.execute("sacct", "-X", "-n", "-P", "--format=JobName,State", "--jobs", job).stdout
    log = (cluster.folder(run) / "logs" / "evaluation.log").read_text()
    assert states.strip() == "beside-evaluate|COMPLETED", log
    assert f"{status['job_id']}" in (cluster.folder(run) / "evaluate.sbatch").read_text()
    return run


def evaluations(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if record.get("when") == "job"]


def test_checkpoints_are_evaluated_during_training_and_recorded_by_one_writer(cluster: Cluster, run: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = cluster.folder(run)
    measured = evaluations(folder / "evaluations.jsonl")
    assert max(each["step"] for each in measured) == 60
    assert all({"sql", "repetition"} <= each["scores"].keys() for each in measured)
    taken = evaluations(folder / "metrics.jsonl")
    assert [each for each in measured if each in taken] == taken
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "end"
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert {event.step for event in events.Scalars("job_eval/loss")} == {each["step"] for each in measured}
    assert max(event.step for event in events.Scalars("train/loss")) == 60


def test_an_export_is_verified_in_an_engine_by_a_job(cluster: Cluster, run: str, shared_folder: Path) -> None:
    engine = shared_folder / "stand_in_engine.py"
    engine.write_text((Path(__file__).parents[1] / "stand_in_engine.py").read_text())
    program = shared_folder / "bin" / "vllm"
    program.parent.mkdir()
    python = cluster.ftkit_program.with_name("python")
    program.write_text(f'#!/bin/sh\nexec {python} {engine} -m vllm.entrypoints.cli.main "$@"\n')
    program.chmod(0o755)
    path, ftkit = f"PATH={program.parent}:/usr/local/bin:/usr/bin:/bin", str(cluster.ftkit_program)
    words = ("verify", str(cluster.folder(run) / "export"), "--engine", "vllm", "--as-job")
    log, certificate = (cluster.folder(run) / name for name in ("logs/verification.log", "export/certificate.json"))

    def verify(*options: str) -> tuple[str, dict[str, Any]]:
        done = cluster.execute("env", path, ftkit, *words, *options)
        assert done.returncode == 0, done.stderr
        job, deadline = done.stdout.strip(), time.monotonic() + PATIENCE_SECONDS
        while cluster.execute("squeue", "--noheader", "--jobs", job).stdout.strip():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(1)
        found = cluster.execute("sacct", "-X", "-n", "-P", "--format=JobName,State,ExitCode", "--jobs", job)
        assert certificate.is_file(), log.read_text()
        return found.stdout.strip(), json.loads(certificate.read_text())

    state, found = verify()
    assert (state, found["verdict"]) == ("beside-verify|COMPLETED|0:0", "passed"), log.read_text()
    assert [each["engine"] for each in found["engines"]] == ["transformers", "vllm"]
    state, found = verify("--", "--fault", "no end")
    assert (state, found["verdict"]) == ("beside-verify|FAILED|9:0", "failed"), log.read_text()
    assert found["engines"][1]["options"] == ["--fault", "no end"]


def test_the_model_is_served_until_the_job_is_canceled(cluster: Cluster, run: str, shared_folder: Path) -> None:
    python = cluster.execute("which", "python3").stdout.strip()
    program = shared_folder / "vllm"
    program.write_text(VLLM.replace("{python}", python))
    program.chmod(0o755)
    path = f"PATH={shared_folder}:/usr/local/bin:/usr/bin:/bin"
    ftkit = str(cluster.ftkit_program)
    done = cluster.execute("env", path, ftkit, "serve", run, "--", "--max-model-len", "128")
    assert done.returncode == 0, done.stderr
    address = done.stdout.strip()
    assert "ssh -L" in done.stderr
    host, _, port = address.removeprefix("http://").removesuffix("/v1").rpartition(":")
    ask = f"exec 3<>/dev/tcp/{host}/{port}; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
    assert cluster.execute("bash", "-c", ask).stdout.endswith("beside")
    (file,) = cluster.folder(run).glob("serving-*")
    cluster.execute("scancel", file.name.removeprefix("serving-"))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while file.exists():
        assert time.monotonic() < deadline
        time.sleep(1)
    program.write_text("#!/bin/sh\necho 'no such model' >&2; exit 3\n")
    failed = cluster.execute("env", path, ftkit, "serve", run)
    assert failed.returncode == 7
    assert "ended before the server answered" in failed.stderr
