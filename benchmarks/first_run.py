"""Time from `git clone` to the first trained model of one's own, in a fresh Debian without and with package caches.

Usage, as root, with mmdebstrap: python benchmarks/first_run.py [--repeats 2] [--root FOLDER]
The new root has python3-venv, git, and this machine's settings of pip. Its model has random weights.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from recording import CHECKOUT, add_record_option, record_repeats
from transformers import Qwen3Config, Qwen3ForCausalLM

from ftkit.data.tokenizers import learn_tokenizer

COMMANDS = (
    "git clone /ftkit.git && cd ftkit",
    "scripts/ftkit init ~/model ~/chats.jsonl",
    "scripts/ftkit run chats.yaml",
)
CACHES = ("root/.cache", "root/.local")
SETTINGS = ("/etc/hosts", "/etc/pip.conf", "/root/.config/pip/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: a run goes on in a process of its own, which this one must see end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--root", type=Path, help="folder for the new root, which is kept; default: a temporary one")
    add_record_option(parser)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as temporary:
        root = options.root or Path(temporary) / "root"
        if not root.exists():
            make_root(root)
        shutil.rmtree(root / "ftkit.git", ignore_errors=True)
        subprocess.run(["git", "clone", "--bare", str(CHECKOUT), str(root / "ftkit.git")], check=True)
        measured: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for _ in range(options.repeats):
            for cache in CACHES:
                shutil.rmtree(root / cache, ignore_errors=True)
            for row in ("cold", "warm"):
                shutil.rmtree(root / "root/ftkit", ignore_errors=True)
                for name, value in first_run(root).items():
                    measured[row][name].append(value)
        record_repeats(options.record, "first-run", measured)


def make_root(root: Path) -> None:
    """Install a Debian with what the quickstart needs, the settings of this machine's pip, a model, and data."""
    packages = "--include=ca-certificates,git,python3-venv"
    subprocess.run(["mmdebstrap", "--variant=minbase", packages, "bookworm", str(root)], check=True)
    for setting in filter(os.path.exists, SETTINGS):
        (root / setting[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(setting, root / setting[1:])
    home = root / "root"
    turns = [{"role": "user", "content": "Which word follows river?"}, {"role": "assistant", "content": "stone"}]
    (home / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 500)
    tokenizer = learn_tokenizer([each["content"] for each in turns], 512, "chatml")
    tokenizer.save_pretrained(home / "model")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 512}
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads)).save_pretrained(home / "model")


def first_run(root: Path) -> dict[str, float]:
    """Type the commands in the root; return the seconds of each, and of all, with the CPU seconds."""
    seconds, cpu = {}, 0.0
    for number, command in enumerate(COMMANDS):
        load, began, before = os.getloadavg()[0], time.monotonic(), cpu_seconds()
        folder = "~" if number == 0 else "~/ftkit"
        subprocess.run(inside(root, f"cd {folder} && {command}"), check=True)
        with suppress(ChildProcessError):
            while True:
                os.wait()
        seconds[f"{command.split()[1]}, s"] = time.monotonic() - began
        cpu += cpu_seconds() - before
        print(f"{command}: {time.monotonic() - began:.1f} s, load before {load:.2f}", flush=True)
    return seconds | {"total, s": sum(seconds.values()), "CPU, s": cpu}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def inside(root: Path, command: str) -> list[str]:
    """Return a command line that runs a command in the root, with pip's local folders mounted."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    words = listed.stdout.replace("'", " ").replace("file://", " ").replace("\\n", " ").replace(":", " ").split()
    folders = (Path(word) for word in words if word.startswith("/") and Path(word).is_dir())
    shared = {
        str(each.parent if each.name == "simple" else each) for each in folders
    }  # an index links to files beside it
    mounts = ["mount -t proc proc proc", "mount --rbind /dev dev", "mount --bind /etc/resolv.conf etc/resolv.conf"]
    mounts += [f"mkdir -p .{each} && mount --bind {each} .{each}" for each in map(shlex.quote, sorted(shared))]
    kept = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_CERT", "HTTP"))]
    enter = shlex.join(["chroot", ".", "env", "-i", "HOME=/root", "PATH=/usr/bin:/bin", *kept, "bash", "-c", command])
    script = f"cd {shlex.quote(str(root))} && {' && '.join(mounts)} && exec {enter}"
    return ["unshare", "--mount", "bash", "-ec", script]


if __name__ == "__main__":
    main()
