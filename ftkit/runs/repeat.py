"""Repetitions of runs: the data kept from the original, and whether the repetition reproduced it.

On the same number of the same devices, losses are equal bit for bit if kernels are deterministic. Elsewhere the order
of summation differs: losses within `TOLERANCE` of the original's count as repeated.
"""

from __future__ import annotations

import json
import math
import tarfile
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ftkit.errors import NotFoundError, plural
from ftkit.files import DamagedFileError, read_json, read_json_if_valid
from ftkit.paths import is_address
from ftkit.planning.layout import RunLayout
from ftkit.runs.bundle import unpack
from ftkit.runs.compare import ComparedRun, Difference, find_differences, read_run
from ftkit.runs.storage import Store
from ftkit.runs.sync import missing_copy

TOLERANCE = 0.01
"""Largest relative difference of a loss from the original's, on other devices or another number of them."""
_PLACE_KEYS = ("num_nodes", "processes_per_node", "device")
"""Values of a run's placement that determine the order of summation."""


@dataclass(frozen=True)
class Original:
    """A run that is to be repeated; `run.curve` is empty without its metrics."""

    run: ComparedRun
    manifest: dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """Whether a run reproduced its original, the run with that id."""

    original: str
    num_common: int  # records of both runs after the same number of tokens
    is_complete: bool  # these are all of the original's records
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
    """Read a run to be repeated, from its folder, manifest.json, bundle, or copy; DamagedFileError if damaged."""
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
    """Compare a run's losses with those of its original."""
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
    """Return the content of original.json."""
    return json.dumps(asdict(original)) + "\n"
