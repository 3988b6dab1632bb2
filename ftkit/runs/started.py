"""What a job really started: asked in its container, and written into the run's manifest."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from ftkit import __version__
from ftkit.errors import TrainingError

_IMAGE = Path("/opt/ftkit")
"""Where an image that ftkit built says what it is."""


def record_start(manifest: Path, image: Path = _IMAGE) -> None:
    """Add this start to the `starts` of a run's manifest. Only who holds the run's lease may.

    Args:
        manifest: the run's manifest.json; without one nothing is written.
        image: the folder in the container.

    Raises:
        TrainingError: the container holds another image than the manifest says.
    """
    try:
        values = json.loads(manifest.read_bytes())
        starts = [*values.get("starts", []), start := _describe(image)]
    except (OSError, ValueError, AttributeError, TypeError):
        return
    unfinished = manifest.with_name(f".{manifest.name}.{os.getpid()}")
    unfinished.write_text(json.dumps({**values, "starts": starts}, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(manifest)
    expected, found = values.get("image_lock_sha256"), start["image"].get("lock_sha256")
    if expected and found != expected:
        raise TrainingError(
            f"the container holds another image than the run was submitted with: {start['container_image']}",
            meaning=f"the digest of its lock is {found or 'not there'}, the run's manifest says {expected}",
            fix="see what the file is with 'ftkit verify', and import the image again",
        )


def _describe(image: Path) -> dict[str, Any]:
    return {
        "time": time.time(),
        "job_id": os.environ.get("SLURM_JOB_ID", ""),
        "host": socket.gethostname(),
        "container_image": os.environ.get("FTKIT_CONTAINER_IMAGE", ""),
        "ftkit_version": __version__,
        "image": _inside(image),
    }


def _inside(image: Path) -> dict[str, str]:
    """Return what the image says of itself; nothing if it is none of ftkit's, or there is none."""
    try:
        definition = json.loads((image / "image.json").read_bytes())
        reference = f"{definition['name']}:{definition['tag']}"
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    digests = {"lock_sha256": image / "requirements.lock", "sbom_sha256": image / "sbom.cdx.json"}
    return {"reference": reference} | {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in digests.items() if path.is_file()
    }
