"""Reruns: what they keep of the original, and the verdict."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.errors import NotFoundError, TrainingError
from ftkit.files import DamagedFileError, write_json
from ftkit.planning.layout import DataLayout, RunLayout, Workspace
from ftkit.planning.plan import read_plan
from ftkit.runs import repeat
from ftkit.runs.compare import ComparedRun, LossPoint, RunResults
from ftkit.runs.manifest import build_manifest, record_start
from ftkit.runs.repeat import TOLERANCE, Original, compare_with, judge, original_to_json, read_original, write_bundle
from ftkit.runs.storage import Store

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunMaker

    from ftkit.runs.job import SubmittedRun


def with_losses(name: str, losses: list[float], num_processes: int = 2) -> ComparedRun:
    inputs: dict[str, dict[str, Any]] = {key: {} for key in ("recipe", "data", "image", "versions")}
    inputs["cluster"] = {"num_nodes": 1, "processes_per_node": num_processes, "device": "cpu"}
    curve = tuple(LossPoint(step, 100 * step, loss) for step, loss in enumerate(losses, start=1))
    return ComparedRun(name, inputs, RunResults(), curve)


losses = st.lists(st.floats(0.01, 1e3) | st.just(math.nan), min_size=1, max_size=20)


@given(losses)
def test_equal_losses_including_nan_are_reproduced_bit_for_bit(values: list[float]) -> None:
    verdict = compare_with(with_losses("a", values), with_losses("b", values, num_processes=4))
    assert verdict.is_repeated
    assert (verdict.first_step, verdict.beyond_step, verdict.largest_ratio) == (None, None, 0.0)
    assert "bit for bit" in str(verdict)


@given(losses, st.data())
def test_the_first_different_loss_is_found_and_classified(values: list[float], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(values) - 1))
    ratio = data.draw(st.sampled_from([TOLERANCE / 2, TOLERANCE * 2]))
    other = [*values[:place], values[place] * (1 + ratio), *values[place + 1 :]]
    verdict = compare_with(with_losses("a", values), with_losses("b", other))
    if math.isnan(values[place]):
        assert verdict.is_repeated
        return
    assert verdict.first_step == place + 1
    assert verdict.is_repeated == (ratio < TOLERANCE)
    assert verdict.beyond_step == (None if ratio < TOLERANCE else place + 1)
    assert f"from step {place + 1} on" in str(verdict)


def test_a_loss_that_became_nan_is_not_reproduced() -> None:
    verdict = compare_with(with_losses("a", [1.0, 1.0]), with_losses("b", [1.0, math.nan]))
    assert (verdict.is_repeated, verdict.beyond_step) == (False, 2)


def test_an_unfinished_rerun_is_compared_up_to_its_last_step() -> None:
    verdict = compare_with(with_losses("a", [1.0, 2.0]), with_losses("b", [1.0]))
    assert not verdict.is_repeated
    assert str(verdict).startswith("so far repeated")
    assert not compare_with(with_losses("a", []), with_losses("b", [1.0])).is_repeated


def made(run: SubmittedRun, records: Any) -> RunLayout:
    """Write a run's manifest, and losses of which one is NaN."""
    write_json(run.layout.manifest, build_manifest(read_plan(run.layout), ["ftkit", "run"], run.layout.root))
    records.write(run, records.step(1, 2.0), records.step(2, math.nan))
    return run.layout


@pytest.mark.parametrize("form", ["folder", "manifest", "lone manifest", "bundle", "copy"])
def test_an_original_is_found_by_its_folder_its_manifest_or_its_bundle(
    form: str, make_run: RunMaker, records: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = made(make_run(), records)
    monkeypatch.setattr(repeat, "Store", lambda address: Store(address.removeprefix("s3://bucket")))
    lone, bundle = tmp_path / "lone.json", tmp_path / "bundle.tar"
    lone.write_bytes(layout.manifest.read_bytes())
    write_bundle(layout, bundle)
    places = {"folder": layout.root, "manifest": layout.manifest, "lone manifest": lone, "bundle": bundle}
    original = read_original(str(places.get(form, f"s3://bucket{layout.root}")))
    expected = read_original(str(layout.root))
    assert original.run.id == layout.root.name
    if form == "lone manifest":
        assert original.run.curve == ()
        assert original.run.inputs["cluster"] == expected.run.inputs["cluster"]
        assert original.run.inputs["recipe"] == expected.run.inputs["recipe"]
    else:
        assert repr(original.run) == repr(expected.run)  # NaN is not equal to itself


def test_data_digests_of_the_original_are_compared_with_the_rerun(make_run: RunMaker, records: Any) -> None:
    layout = made(make_run(), records)
    assert judge(layout) is None
    layout.original.write_text(original_to_json(read_original(str(layout.root))))
    verdict = judge(layout)
    assert verdict is not None
    assert (verdict.is_repeated, verdict.num_common, verdict.differences) == (True, 2, ())


def test_a_path_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"missing\.tar"):
        read_original(str(tmp_path / "missing.tar"))
    with pytest.raises(NotFoundError, match=str(tmp_path)):
        read_original(str(tmp_path))
    for name in ("manifest.json", "notes.tar"):
        damaged = tmp_path / name
        damaged.write_text("{")
        with pytest.raises(DamagedFileError, match=name):
            read_original(str(damaged))


def test_a_rerun_on_other_data_is_rejected_at_its_start(make_run: RunMaker, tmp_path: Path) -> None:
    run = make_run()
    plan = read_plan(run.layout)
    data = DataLayout(Workspace(run.layout.root.parents[1]).data / plan.fingerprint)
    data.root.mkdir(parents=True)
    write_json(data.manifest, {"digests": {"train": "b", "tokenizer": "t"}})
    for expected, allowed, is_refused in (("b", [], False), ("a", [], True), ("a", ["data"], False)):
        repeats = {"run": "other", "data": {"train": expected, "tokenizer": "t"}, "allowed": allowed}
        manifest = build_manifest(plan, ["ftkit"], tmp_path) | {"repeats": repeats}
        run.layout.manifest.write_text(json.dumps(manifest))
        if is_refused:
            with pytest.raises(TrainingError, check=lambda error: error.name == "data-of-rerun"):
                record_start(run.layout.manifest, tmp_path)
        else:
            record_start(run.layout.manifest, tmp_path)


def test_an_original_without_losses_can_be_saved(make_run: RunMaker) -> None:
    layout = make_run().layout
    layout.original.write_text(original_to_json(Original(with_losses("a", []), {})))
    verdict = judge(layout)
    assert verdict is not None
    assert (verdict.num_common, verdict.is_repeated) == (0, False)
