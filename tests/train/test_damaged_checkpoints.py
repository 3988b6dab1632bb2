"""Runs whose checkpoints were damaged or tampered with."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from ftkit.errors import TrainingError
from ftkit.planning.layout import RunLayout
from ftkit.runs.checkpoints import FORMAT_VERSION, MARKER, Marker, SavedFile, TrainState
from ftkit.train.checkpoint.loading import INDEX, check_model, describe_damage, load_newest, read_state
from ftkit.train.checkpoint.saving import delete_oldest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.train.world import World

DATA = "the data"


class OneWeight:
    """An engine with one weight, which is 1 before a checkpoint is loaded."""

    def __init__(self) -> None:
        self.weight = torch.ones(3)

    def load(self, folder: Path) -> None:
        read_state({"weight": self.weight}, folder)


@pytest.fixture
def layout(tmp_path: Path, world: World) -> RunLayout:
    """Checkpoints of steps 9, 10 and 1,000,000, in which the weight is the step."""
    layout = RunLayout(tmp_path)
    for step in (9, 10, 1_000_000):
        write(layout, step, world)
    return layout


def write(layout: RunLayout, step: int, world: World) -> None:
    folder = layout.checkpoints / f".{step}.partial"
    folder.mkdir(parents=True)
    torch.distributed.checkpoint.save({"weight": torch.full((3,), float(step))}, checkpoint_id=folder)
    seal(folder, step, world)
    folder.rename(layout.checkpoint(step))


def seal(folder: Path, step: int, world: World) -> None:
    """Write a completion marker for the files in their current state."""
    files = {path.name: SavedFile.of(path) for path in folder.iterdir() if path.name != MARKER}
    (folder / MARKER).write_text(json.dumps(asdict(Marker(FORMAT_VERSION, TrainState(step, DATA), world.size, files))))


def newest_loaded(layout: RunLayout, world: World) -> float:
    engine: Any = OneWeight()
    progress, _ = load_newest(engine, layout, world, DATA)
    assert progress is not None
    assert engine.weight.tolist() == [float(progress.step)] * 3
    return progress.step


def remove(folder: Path) -> None:
    (folder / MARKER).unlink()


def make_unreadable(folder: Path) -> None:
    (folder / MARKER).unlink()
    (folder / MARKER).mkdir()  # tests may run as root, whom no permission keeps from reading


def write_marker(text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / MARKER).write_text(text, encoding="latin-1")

    return damage


def change_marker(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / MARKER).write_text(json.dumps(json.loads((folder / MARKER).read_text()) | changes))

    return damage


def cut_off_index(folder: Path) -> None:
    (folder / INDEX).write_bytes((folder / INDEX).read_bytes()[:50])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "marker missing": remove,
    "marker unreadable": make_unreadable,
    "marker empty": write_marker(""),
    "marker cut off": write_marker('{"progress": {"step"'),
    "marker not text": write_marker("\xff\xfe"),
    "marker too deep": write_marker("[" * 100_000),
    "marker of another type": write_marker("[1, 2]"),
    "marker of another version": change_marker(version=2),
    "marker without files": write_marker(
        '{"version": 1, "progress": {"step": 1000000, "fingerprint": "the data"}, "world_size": 1}'
    ),
    "marker with odd values": change_marker(files={"__0_0.distcp": 7}),
    "marker of files elsewhere": change_marker(files={"../step-000010/__0_0.distcp": {"size": 1, "sha256": ""}}),
    "marker of another step": change_marker(progress={"step": 10, "fingerprint": DATA}),
    "marker that lists too little": change_marker(files={}),
    "index cut off": cut_off_index,
    "shard missing": lambda folder: (folder / "__0_0.distcp").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_previous_checkpoint_is_loaded_whatever_the_damage_to_the_newest(
    damage: Callable[[Path], None], layout: RunLayout, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    assert newest_loaded(layout, world) == 1_000_000
    damage(layout.checkpoint(1_000_000))
    assert newest_loaded(layout, world) == 10
    assert "step-1000000 is damaged (" in caplog.text


def test_damage_is_described_by_file_and_kind(layout: RunLayout) -> None:
    folder = layout.checkpoint(10)
    assert not describe_damage(folder, 10)
    (folder / "__0_0.distcp").write_bytes(b"")
    assert describe_damage(folder, 10).startswith("__0_0.distcp: ")


def test_a_run_without_an_intact_checkpoint_stops_with_an_error(layout: RunLayout, world: World) -> None:
    for _, folder in layout.list_checkpoints():
        remove(folder)
    with pytest.raises(TrainingError, match=r"step-1000000 \(COMPLETE.json .*step-000009"):
        newest_loaded(layout, world)


def test_checkpoints_of_other_data_are_rejected(layout: RunLayout, world: World) -> None:
    engine: Any = OneWeight()
    with pytest.raises(TrainingError, match="data@5"):
        load_newest(engine, layout, world, "the data@5")


class TwoWeights:
    """An engine with a model of two weights."""

    def __init__(self) -> None:
        self.model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(3)) for name in ("first", "second")})

    def load(self, folder: Path) -> None:
        check_model(self.model, folder)
        read_state({"model": dict(self.model.named_parameters())}, folder)


@pytest.mark.parametrize(
    ("saved", "reason"),
    [(("first",), "Missing key in checkpoint state_dict: model.second"), (("first", "second", "third"), "no 'third'")],
    ids=["too few weights", "too many weights"],
)
def test_checkpoints_of_another_model_are_rejected_on_one_line(
    saved: tuple[str, ...], reason: str, tmp_path: Path, world: World
) -> None:
    layout, engine = RunLayout(tmp_path), TwoWeights()
    folder = layout.checkpoints / ".9.partial"
    folder.mkdir(parents=True)
    state = {"model": {name: torch.zeros(3) for name in saved}}
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)
    seal(folder, 9, world)
    folder.rename(layout.checkpoint(9))
    with pytest.raises(TrainingError) as caught:
        load_newest(engine, layout, world, DATA)  # type: ignore[arg-type]
    assert reason in caught.value.what
    assert "\n" not in caught.value.what
    assert "Traceback" not in caught.value.what


def test_a_run_without_checkpoints_starts_at_step_0(tmp_path: Path, world: World) -> None:
    engine: Any = OneWeight()
    assert load_newest(engine, RunLayout(tmp_path), world, DATA) == (None, ())


def test_a_run_does_not_start_over_if_its_checkpoints_cannot_be_listed(tmp_path: Path, world: World) -> None:
    layout, engine = RunLayout(tmp_path), OneWeight()
    layout.checkpoints.write_text("not a folder")
    with pytest.raises(TrainingError, match="can't be listed"):
        load_newest(engine, layout, world, DATA)  # type: ignore[arg-type]


class Payload:
    """Calls a function when it is unpickled."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> Any:
        return Path.touch, (self.touched,)


def forge_index(folder: Path, touched: Path) -> None:
    index = pickle.loads((folder / INDEX).read_bytes())  # noqa: S301 - written by this test
    index.planner_data = Payload(touched)
    (folder / INDEX).write_bytes(pickle.dumps(index))


def test_an_index_with_a_pickled_call_is_rejected_without_calling_it(
    layout: RunLayout, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, touched = layout.checkpoint(1_000_000), tmp_path / "touched"
    forge_index(folder, touched)
    seal(folder, 1_000_000, world)
    assert newest_loaded(layout, world) == 10
    assert not touched.exists()
    assert f"{INDEX}: it contains 'pathlib.Path.touch'" in caplog.text


def test_an_object_in_place_of_a_tensor_is_not_unpickled(layout: RunLayout, world: World, tmp_path: Path) -> None:
    folder, touched = layout.checkpoint(1_000_000), tmp_path / "touched"
    index = pickle.loads((folder / INDEX).read_bytes())  # noqa: S301 - written by this test
    place = next(iter(index.storage_data.values()))
    index.state_dict_metadata = {"weight": BytesStorageMetadata()}
    index.storage_data = {type(next(iter(index.storage_data)))("weight"): place}
    (folder / INDEX).write_bytes(pickle.dumps(index))
    torch.save(Payload(touched), folder / place.relative_path)
    place.offset, place.length = 0, (folder / place.relative_path).stat().st_size
    (folder / INDEX).write_bytes(pickle.dumps(index))
    seal(folder, 1_000_000, world)
    with pytest.raises(TrainingError, match="'weight' is not"):
        newest_loaded(layout, world)
    assert not touched.exists()


def test_damaged_checkpoints_do_not_count_among_the_newest_to_keep(layout: RunLayout) -> None:
    shutil.copytree(layout.checkpoint(10), layout.checkpoint(2_000_000))
    delete_oldest(layout, 1_000_000, keep=2)
    assert [step for step, _ in layout.list_checkpoints()] == [10, 1_000_000, 2_000_000]
