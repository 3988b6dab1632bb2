"""Repetitions of runs: the data kept from the original, and whether the repetition reproduced it.

On the same number of the same devices, losses are equal bit for bit if kernels are deterministic: on CPUs, or with
`training.deterministic`. Elsewhere the order of summation differs: losses within `TOLERANCE` of the original's count as
repeated.

A bundle is one file with a run's inputs and results, without weights and data, to share and to repeat the run: a tar
archive of plain files. The same run folder gives the same bytes: members are sorted, and have neither owner nor time. A
signature is a separate file next to it.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import tarfile
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ftkit.errors import NotFoundError, PrerequisiteError, one_line, plural
from ftkit.files import DamagedFileError, output_file, read_json, read_json_if_valid, read_small, to_json
from ftkit.paths import is_address
from ftkit.planning.layout import DataLayout, RunLayout, Workspace
from ftkit.runs.compare import ComparedRun, Difference, find_differences, read_run
from ftkit.runs.manifest import Values
from ftkit.runs.storage import Store
from ftkit.runs.sync import missing_copy

TOLERANCE = 0.01
"""Largest relative difference of a loss from the original's, on other devices or another number of them."""
_PLACE_KEYS = ("num_nodes", "processes_per_node", "device")
"""Values of a run's placement that determine the order of summation."""


@dataclass(frozen=True)
class Original:
    """A run to repeat; `run.curve` is empty without its metrics."""

    run: ComparedRun
    manifest: dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """Whether a run reproduced the original run."""

    original: str
    num_common: int  # records of both runs after the same number of tokens
    is_complete: bool  # the common records are all of the original's
    is_same_size: bool  # both trained on the same number of devices of the same kind
    first_step: int | None  # with a different loss; None if all are equal, bit for bit
    largest_ratio: float  # relative difference of a loss; infinite if one is NaN
    beyond_step: int | None  # the first step whose loss is outside the tolerance
    differences: tuple[Difference, ...]

    @property
    def is_repeated(self) -> bool:
        """Whether all losses of the original were reproduced, within the tolerance."""
        return self.is_complete and self.num_common > 0 and self.beyond_step is None

    def __str__(self) -> str:
        if not self.num_common:
            return f"{self.original} has no losses to compare with"
        records = plural(self.num_common, "record")
        what = "repeated" if self.is_repeated else "not repeated" if self.beyond_step is not None else "so far repeated"
        if self.first_step is None:
            return f"{what}: the losses of {self.original}, bit for bit ({records})"
        size = "" if self.is_same_size else ", on devices of another kind or number"
        gap = f"by at most {self.largest_ratio:.2g} of the loss" if math.isfinite(self.largest_ratio) else "or are NaN"
        text = f"{what}: losses differ from those of {self.original} from step {self.first_step} on, {gap}"
        if self.beyond_step is not None:
            text += f", and by more than {TOLERANCE:.0%} from step {self.beyond_step} on"
        others = [f"{each.section}: {each.key}".removeprefix("recipe: ") for each in self.differences]
        return f"{text}{size} ({records}). Other recorded differences: {', '.join(others) or 'none'}"


def read_original(place: str) -> Original:
    """Read a run to repeat from its folder, manifest.json, bundle, or copy; DamagedFileError if damaged."""
    path = Path(place)
    with tempfile.TemporaryDirectory(prefix="ftkit-") as temporary:
        # Two levels down: a run's folder is in `runs` of a workspace.
        layout = RunLayout(Path(temporary, "runs", "original"))
        if is_address(place):
            _fetch(place, layout)
        elif path.is_dir():
            layout = RunLayout(path)
        elif not path.is_file():
            raise NotFoundError(f"there is no run, manifest or bundle {place}", fix="list the runs with 'ftkit runs'")
        elif tarfile.is_tarfile(path):
            unpack(path, layout.root)
        elif path.name == layout.manifest.name:
            layout = RunLayout(path.parent)
        elif read_json_if_valid(path, dict[str, object]) is None:
            raise DamagedFileError(path, "it is neither a bundle nor the manifest of a run")
        else:
            layout.root.mkdir(parents=True)
            layout.manifest.write_bytes(path.read_bytes())
        manifest = read_json(layout.manifest, dict[str, Any])
        if manifest is None or not isinstance(manifest.get("run"), str):
            raise NotFoundError(
                f"{place} has no manifest of a run",
                meaning="an early version of ftkit wrote it, or it is not a run",
                fix="give a run, its manifest.json, a bundle of 'ftkit runs bundle', or the address of a copy",
            )
        return Original(replace(read_run(layout), id=str(manifest["run"]), metrics_problem=""), manifest)


def _fetch(address: str, layout: RunLayout) -> None:
    store = Store(address)
    names = store.sizes()
    if layout.manifest.name not in names:
        raise missing_copy(address)
    layout.root.mkdir(parents=True)
    for path in (layout.manifest, layout.plan, layout.metrics):
        if path.name in names:
            store.get(path.name, path)


def judge(layout: RunLayout) -> Verdict | None:
    """Compare a run with its original; None if it is not a repetition."""
    original = read_json_if_valid(layout.original, Original)
    return None if original is None else compare_with(original.run, read_run(layout))


def compare_with(original: ComparedRun, run: ComparedRun) -> Verdict:
    expected = {point.tokens: point.loss for point in original.curve}
    common = [(point.step, point.loss, expected[point.tokens]) for point in run.curve if point.tokens in expected]
    ratios = {}
    for step, loss, wanted in common:
        if repr(loss) != repr(wanted):  # two NaN are equal
            is_finite = math.isfinite(loss) and math.isfinite(wanted) and wanted != 0
            ratios[step] = abs(loss - wanted) / abs(wanted) if is_finite else math.inf
    places = [[each.inputs["cluster"].get(key) for key in _PLACE_KEYS] for each in (original, run)]
    return Verdict(
        original=original.id,
        num_common=len(common),
        is_complete=len(common) == len(expected),
        is_same_size=places[0] == places[1],
        first_step=next(iter(ratios), None),
        largest_ratio=max(ratios.values(), default=0.0),
        beyond_step=next((step for step, ratio in ratios.items() if ratio > TOLERANCE), None),
        differences=tuple(find_differences([original, run])),
    )


def original_to_json(original: Original) -> str:
    return json.dumps(asdict(original)) + "\n"


# --- Bundles --------------------------------------------------------------------------------------


_MAX_MEMBER_BYTES = 2**30


def write_bundle(layout: RunLayout, path: Path, lock: Path | None = None) -> list[str]:
    """Write a run's bundle and return the names of its members.

    `lock` is the lock of the image's packages, if it is on this machine. Raises `DamagedFileError` if a file of the run
    can't be read or is too large.
    """
    manifest = read_json(layout.manifest, Values)
    if manifest is None:
        raise NotFoundError(f"{layout.root.name} has no manifest.json", meaning="a bundle without it can't be repeated")
    data = DataLayout(Workspace(layout.root.parents[1]).data / str(manifest.get("data_fingerprint")))
    files = [
        layout.manifest, layout.plan, layout.script, layout.preparation_script, layout.submission, layout.metrics,
        layout.report, layout.code_changes, layout.original,
    ]  # fmt: skip
    sources = {file.name: file for file in files} | {"data-manifest.json": data.manifest}
    sources |= {"requirements.lock": lock} if lock else {}
    contents = {"recipe.json": to_json(manifest.get("resolved_recipe", {})).encode()}
    for name, file in sources.items():
        try:
            if file.is_file():
                contents[name] = read_small(file, _MAX_MEMBER_BYTES)
        except OSError as error:
            raise DamagedFileError(file, one_line(error)) from error
    try:
        with output_file(path) as temporary, tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as archive:
            for name in sorted(contents):
                member = tarfile.TarInfo(f"{layout.root.name}/{name}")
                member.size, member.mode = len(contents[name]), 0o644
                archive.addfile(member, io.BytesIO(contents[name]))
    except OSError as error:
        raise PrerequisiteError(
            f"can't write {path}: {one_line(error)}",
            meaning="the folder does not exist, is full, or belongs to somebody else",
            fix="write the bundle somewhere else: --output FILE",
        ) from error
    return sorted(contents)


def unpack(path: Path, folder: Path) -> None:
    """Write the regular files of a bundle whose names are those of run files; DamagedFileError if it is damaged."""
    layout = RunLayout(folder)
    known = {layout.manifest.name, layout.plan.name, layout.metrics.name, layout.original.name, layout.report.name}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                if not member.isfile() or name not in known:
                    continue
                if member.size > _MAX_MEMBER_BYTES:
                    raise DamagedFileError(path, f"{name} has {member.size:,} bytes")
                if source := archive.extractfile(member):
                    with source, (folder / name).open("wb") as target:
                        shutil.copyfileobj(source, target)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DamagedFileError(path, "it is not a complete tar archive") from error
    if not layout.manifest.is_file():
        raise DamagedFileError(path, "it has no manifest.json")
