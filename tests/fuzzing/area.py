"""The fuzzed areas, and regression cases."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "corpus"
"""A folder for each area, and in it one for each case."""

Case = dict[str, bytes]
"""Files by name."""


@dataclass(frozen=True)
class Area:
    """One kind of input.

    Args:
        name: its name on the command line and in the corpus.
        make: generates a case, deterministic for a state of the generator.
        run: runs ftkit on a case in an empty folder; returns whether it was accepted, and raises if ftkit neither
            accepts nor rejects it.
    """

    name: str
    make: Callable[[random.Random], Case]
    run: Callable[[Case, Path], bool]

    @property
    def corpus(self) -> list[Path]:
        """The folders of the regression cases."""
        return sorted(path for path in (CORPUS / self.name).glob("*") if path.is_dir())


def read_case(folder: Path) -> Case:
    """Read a case of the corpus."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_case(folder: Path, case: Case) -> None:
    """Write the files of a case."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in case.items():
        (folder / name).write_bytes(content)
