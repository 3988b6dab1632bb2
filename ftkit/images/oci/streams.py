"""The streams of JSON that the docker engine answers with when it builds, pulls and pushes."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ftkit.config.digest import Digest
from ftkit.errors import ImageError, NotFoundError
from ftkit.images.oci import credentials as who
from ftkit.images.oci.retries import TransientError
from ftkit.images.progress import Progress, Report

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftkit.config.image_reference import RegistryImage
    from ftkit.images.oci.credentials import Credentials

_LINES_SHOWN: Final = 15
_STEP_WIDTH: Final = 76
_NOISE: Final = ("--->", "Removing intermediate container", "Successfully built")
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_SETTLED: Final = (
    "Pull complete",
    "Download complete",
    "Pushed",
    "Layer already exists",
    "Already exists",
    "Mounted from",
)
_REFUSED: Final = (
    "unauthorized",
    "authentication required",
    "no basic auth",
    "denied",
    "forbidden",
    "401",
    "incorrect username or password",
)
_UNKNOWN: Final = ("not found", "manifest unknown", "name unknown", "does not exist", "repository name not known")
_TRANSIENT: Final = (
    "connection refused",
    "connection reset",
    "timeout",
    "timed out",
    "eof",
    "no such host",
    "temporary failure",
    "too many requests",
    "bad gateway",
    "service unavailable",
    "internal server error",
    "broken pipe",
    "i/o",
)


def follow_transfer(
    events: Iterable[dict[str, Any]], stage: str, report: Report, reference: RegistryImage, known: Credentials | None
) -> Digest | None:
    """Follow a pull or push to its end; return the digest that it told.

    Raises:
        ImageError: the registry does not let us in.
        NotFoundError: it has no such image.
        TransientError: the connection was lost.
    """
    told = ""
    for event in events:
        if "error" in event:
            raise explain_transfer(str(event["error"]), reference, known)
        status = str(event.get("status", ""))
        if layer := str(event.get("id", "")):
            detail = event.get("progressDetail") or {}
            report(
                Progress(
                    stage,
                    item=layer,
                    text=f"{layer} {status}",
                    done=detail.get("current"),
                    total=detail.get("total"),
                    is_over=status.startswith(_SETTLED),
                )
            )
        told = (event.get("aux") or {}).get("Digest", told)
        if status.startswith("Digest: "):
            told = status.removeprefix("Digest: ")
    return _digest(told)


def _digest(told: object) -> Digest | None:
    try:
        return Digest(str(told))
    except ValueError:
        return None


def explain_transfer(said: str, reference: RegistryImage, known: Credentials | None) -> ImageError | NotFoundError:
    """Turn what the engine says of a registry into an error."""
    lower = said.lower()
    if "no space left" in lower:
        return ImageError(f"the docker engine's disk is full: {said}", fix="make room: docker system df")
    if any(word in lower for word in _REFUSED):
        return who.refused(reference, known, said)
    if any(word in lower for word in _UNKNOWN):
        return NotFoundError(
            f"there is no image {reference}: {said}",
            meaning="the name, tag or digest is wrong, or the repository is private",
            fix=f"see which tags it has; if it is private: docker login {reference.host}",
        )
    if any(word in lower for word in _TRANSIENT):
        return TransientError(
            f"lost the connection to {reference.host}: {said}",
            meaning="the registry or the network between is down, or the host's name is wrong",
            fix="try again: what was transferred is not transferred again",
        )
    return ImageError(f"{reference.host}: {said}", fix="see the registry's log")


@dataclass
class BuildFollower:
    """Follows a build."""

    report: Report
    step: str = "sending the build context"
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_SHOWN))
    image_id: Digest | None = None

    def follow(self, events: Iterable[dict[str, Any]]) -> Digest:
        """Follow the build to its end; return the image's id.

        Raises:
            ImageError: a step failed; with its last lines.
        """
        for event in events:
            if "error" in event:
                raise self._failed(event)
            self._hear(str(event.get("stream", "")))
            self.image_id = _digest((event.get("aux") or {}).get("ID")) or self.image_id
        if not self.image_id:
            raise ImageError("docker ended the build without an image", fix="see the engine's log, and try again")
        return self.image_id

    def _hear(self, text: str) -> None:
        for line in _COLOURS.sub("", text).splitlines():
            if line.startswith("Step "):
                self.step = _one_line(line)
                self.lines.clear()
                self.report(Progress("building", text=self.step))
            elif line.strip() and not line.lstrip().startswith(_NOISE):
                self.lines.append(line.rstrip())
                self.report(Progress("building", item="output", text=line.strip()))

    def _failed(self, event: dict[str, Any]) -> ImageError:
        said = "\n".join(f"    {line}" for line in (*self.lines, str(event["error"]).strip()))
        return ImageError(f"the build failed in {self.step}\n{said}", fix=_advice(said))


def _one_line(step: str) -> str:
    """Shorten a step of a Dockerfile to what fits on a narrow screen."""
    text = " ".join(step.split())
    return text if len(text) <= _STEP_WIDTH else text[: _STEP_WIDTH - 1] + "…"


def _advice(said: str) -> str:
    lower = said.lower()
    if "no space left" in lower:
        return "make room on the docker engine's disk: docker system df"
    if "do not match the hashes" in lower:
        return "a package changed on its index since it was locked: write the lock again with 'ftkit lock NAME:TAG'"
    if any(word in lower for word in ("certificate", "ssl")):
        return "set PIP_CERT to your site's file of certificates: the build takes it along"
    if any(word in lower for word in ("newconnectionerror", "name resolution", "connection refused", "retry(")):
        return "the build could not reach the package index: check the network, or set PIP_INDEX_URL"
    if "python3: not found" in lower or "no module named pip" in lower:
        return "the base needs python3 with pip: take another with --base"
    return "the lines above say what went wrong; --no-cache runs every step anew"
