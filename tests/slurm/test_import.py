"""`ftkit import --on-node` on a real Slurm, with a stand-in for enroot."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Cluster

CHECKOUT = Path(__file__).parents[2]
LOCAL = "/mnt/localssd/import-test"

ENROOT = """#!/bin/bash
[ "$1" = version ] && { echo 4.1.2; exit; }
setsid bash -c 'while echo x >"$0/$RANDOM"; do sleep 0.05; done' "$ENROOT_TEMP_PATH" &
mkdir "$ENROOT_TEMP_PATH/root"
for number in $(seq 300); do echo x >"$ENROOT_TEMP_PATH/root/$number"; done
touch "$RECORD/at-work"
sleep 600
"""

IMPORT = f"""
import sys
from pathlib import Path
from ftkit import process
from ftkit.images import enroot

address = enroot.Address("docker://r.io#a@sha256:1", "docker://r.io#a:1")
node = enroot.ComputeNode(("--ntasks=1", "--nodelist=n1", *sys.argv[2:]), "{LOCAL}")
with process.exit_on_termination():
    enroot.import_to(Path(sys.argv[1]), address, node)
"""

INTERRUPTED = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

folder, number, is_running, *options = sys.argv[1:]
os.environ |= {"RECORD": folder, "PATH": f"{folder}/bin:" + os.environ["PATH"]}

def jobs():
    queue = subprocess.run(["squeue", "-h", "-o", "%j"], capture_output=True, text=True, check=True)
    return queue.stdout.count("ftkit-import")

with subprocess.Popen([sys.executable, f"{folder}/import.py", f"{folder}/x.sqsh", *options]) as process:
    while not (Path(folder, "at-work").exists() if is_running == "yes" else jobs()):
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(int(number))
print(json.dumps({"returncode": process.returncode, "jobs": jobs()}))
"""


@pytest.mark.parametrize("options", [(), ("--begin=now+3600",)], ids=["running", "pending"])
def test_an_interrupted_import_on_a_node_cancels_its_job_and_leaves_no_files(
    cluster: Cluster, shared_folder: Path, options: tuple[str, ...]
) -> None:
    (shared_folder / "bin").mkdir()
    (shared_folder / "bin" / "enroot").write_text(ENROOT)
    (shared_folder / "bin" / "enroot").chmod(0o755)
    (shared_folder / "import.py").write_text(IMPORT)
    shared_folder.chmod(0o777)
    python = str(CHECKOUT / ".venv" / "bin" / "python")
    is_running = "no" if options else "yes"
    done = cluster.execute(python, "-c", INTERRUPTED, str(shared_folder), "15", is_running, *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"returncode": 143, "jobs": 0}
    looked = [str(CHECKOUT / "scripts" / "dev-cluster"), "node", "n1", "--", "find", LOCAL, "-mindepth", "1"]
    found = subprocess.run(looked, capture_output=True, text=True, check=False)
    assert found.stdout == ""
    assert {path.name for path in shared_folder.iterdir()} <= {"bin", "import.py", "at-work"}
