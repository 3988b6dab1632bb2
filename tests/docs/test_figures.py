"""Figures of README.md and docs come from records of measurements and from today's planner (benchmarks/pages.py)."""

from __future__ import annotations

import html
import os
import re
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

import pages
import pytest
from recording import FOLDER, MEASURED, Record, Row, Training, read_record, record_repeats
from waiting import PATIENCE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

ELSEWHERE = {
    "cli.md", "faults.md", "recipe.md", "image.md", "cluster-profile.md", "many-nodes.md", "mistakes.md", "proofs.md",
}  # fmt: skip
"""Written by scripts/docs, with numbers that are defaults and limits, or from records and tests; many-nodes.md is
arithmetic on bandwidths that vendors state, which test_many_nodes.py repeats."""

NOT_MEASURED = {
    "README.md": {"80 GB"},  # a GPU's size
    "docs/compare.md": {"1%"},  # a tolerance
    "docs/from/function-calling-fault-tolerance-soperator.md": {"3,200"},  # a network's data sheet
    "docs/from/gemma-12b-text-to-sql-a4.md": {"2,500"},  # rows of the tutorial
    "docs/from/gemma-1b-dolly-l4.md": {"20 to 30 min"},  # reported by the guide
    "docs/from/olmo3-32b-h100-b200.md": {"140 MB"},  # size of the data of the original
    "docs/images.md": {"1 MiB", "2 minutes", "1.5 GB"},  # retries; an input's size
    "docs/long-context.md": {"80 GB", "15%", "1.1 times as", "580 GiB"},  # sizes, limits; bytes by arithmetic
    "docs/on-a-cluster.md": {"10 seconds", "15 s", "300 s", "20 seconds", "2 minutes", "1 GiB"},  # intervals and limits
    "docs/reference/architecture.md": set(),
    "docs/reference/benchmarks.md": {"1.5 GB", "4,096"},  # sizes of inputs
    "docs/reference/security.md": {"5 s", "30 s", "512 MiB", "2 GiB"},  # limits
    "docs/use-the-model.md": {"15 minutes", "0.01%", "95%"},  # sizes, limits, tolerances
    "docs/when-something-fails.md": {"10%"},  # a threshold
    "docs/your-own-code.md": {"64 MiB"},  # a limit
}
"""Numbers with a unit that nobody measured: settings, limits, tolerances, sizes of inputs, and arithmetic."""

THRESHOLDS = {"5%", "10%"}
"""Bounds of intervals: the figure is the number of runs within them, which stands in a marker."""

every_page = pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: str(page.relative_to(pages.CHECKOUT)))
every_record = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)


@every_page
def test_a_page_has_the_figures_of_its_records_and_of_todays_planner(page: Path) -> None:
    text = page.read_text()
    assert pages.filled(text) == text, "run scripts/docs"


@every_page
def test_a_figure_without_a_record_is_a_number_that_nobody_measured(page: Path) -> None:
    name = str(page.relative_to(pages.CHECKOUT))
    if page.name in ELSEWHERE:
        return
    allowed = NOT_MEASURED.get(name, set())
    with_interval = THRESHOLDS if "within_5]" in page.read_text() else set()
    found = set(pages.figures_without_record(page.read_text()))
    assert found <= allowed | with_interval, "write the figure into a record, and its field between markers"
    assert allowed <= found, "the page no longer has these numbers: remove them from the list"


@every_page
def test_no_line_of_a_paragraph_begins_with_a_marker(page: Path) -> None:
    # Markdown takes the rest of such a line for HTML.
    assert not re.findall(r"^ *<!--= (?!\{table).*", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("trains at 10,360 tokens/s, TRL at 9,524 on the same packs", ["10,360 tokens/s", "9,524"]),
        ("in 55.3 instead of 88 GiB, 1.55 times as fast", ["88 GiB", "1.55 times as"]),
        ("ready in about four minutes", ["four minutes"]),
        ("within 6% of 120 families", ["6%", "120 families"]),
        ("took 0.3 to 0.7 s", ["0.3 to 0.7 s"]),
        ("packs of 8,192 tokens, `training.x=6 GiB`, ones, 8B, [a](b.md#6-s), Qwen 3.5", []),
        ("<!--= {r[a][b][c]} -->10,360 tokens/s<!--/-->", []),
    ],
)
def test_measured_figures_in_sentences_are_found(text: str, figures: list[str]) -> None:
    assert pages.figures_without_record(text) == figures


def test_figures_that_differ_from_their_records_are_replaced() -> None:
    families = pages.families()
    assert families["tried"] > families["trained"] > 100
    text = "of <!--= {of[families][tried]:,} -->120<!--/--> families"
    assert pages.filled(text) == text.replace("120", str(families["tried"]))


@pytest.mark.parametrize("field", ["{r[none][a][b]}", "{of[planned][none]}", "{table[none]}", "{plan[none].speed}"])
def test_a_field_that_no_record_has_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=re.escape(field)):
        pages.filled(f"a <!--= {field} -->1<!--/-->")


def test_a_measured_run_is_planned_again_by_the_planner_of_the_checkout() -> None:
    (run,) = (each for each in pages.plan_again() if each.name == "train-h200-llama3-8b-dora-4096")
    assert run.memory_error == pytest.approx(run.gib / 30.43 - 1, abs=1e-3)
    row = next(line for line in pages.table("planned-1").splitlines() if "use_dora" in line)
    assert f"| 30.4 | {run.gib:.1f} |" in row
    text = "<!--= {plan[train-h200-llama3-8b-dora-4096].gib:.1f} -->1.0<!--/-->"
    assert f"-->{run.gib:.1f}<!--" in pages.filled(text)


@pytest.mark.parametrize(
    ("label", "override"),
    [("cudnn", ("training.attention=cudnn",)), ("sdpa, in parts", ("training.attention=sdpa",)), ("flash-attn-4", ())],
)
def test_a_run_is_planned_and_named_with_the_kernel_that_it_chose(label: str, override: tuple[str, ...]) -> None:
    run = pages.with_kernel(Training("gemma3-1b", ("training.sequence_length=8192",)), {"attention": label})
    assert tuple(run.overrides) == ("training.sequence_length=8192", *override)


def test_a_row_names_only_the_last_of_two_values_of_a_key() -> None:
    run = Training("gemma3-1b", ("training.sequence_length=8192", "training.sequence_length=4096"))
    assert pages.describe(run, {}) == "gemma3-1b, sequence_length=4096"


def test_benchmarks_are_at_most_3300_words() -> None:
    text = re.sub(r"<!--.*?-->", "", (pages.CHECKOUT / "docs/reference/benchmarks.md").read_text())
    assert len([word for word in re.split(r"[\s|]+", text) if re.search(r"\w", word)]) <= 3300


@every_record
def test_a_record_has_its_repeats_or_says_that_they_were_not_kept(path: Path) -> None:
    record = read_record(path)
    assert record.command
    assert re.match(r"\d{4}-\d\d-\d\d", record.date)
    for row in record.rows:
        assert (row.repeats is None) == ("repeats were not kept" in record.source)
        if row.repeats is not None:
            for name, values in row.repeats.items():
                assert row.medians[name] == pytest.approx(statistics.median(values))


def test_what_a_program_measured_repeatedly_becomes_a_record_with_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [str(pages.CHECKOUT / "benchmarks" / "startup.py"), "--repeats", "3"])
    record_repeats(None, "nothing", {"a": {"seconds": [1.0]}})
    record_repeats(tmp_path, "startup", {"ftkit runs": {"seconds": [3.0, 1.0, 2.5]}})
    (path,) = tmp_path.iterdir()
    record = read_record(path)
    assert record.command == "python benchmarks/startup.py --repeats 3"
    assert record.rows[0].repeats == {"seconds": [3.0, 1.0, 2.5]}
    assert "| ftkit runs | 2.5 |" in pages.record_table(record)


def test_trainers_of_one_call_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(trainer: str, speed: float, command: str) -> Record:
        medians = {"tokens_per_second": speed, "peak_gib": 9.0}
        row = Row({"trainer": trainer}, medians, {"step_seconds": [1.0]}, Training("llama3-8b", ()))
        return Record("benchmarks/train.py", command, "2026-11-23T23:00:00+00:00", {}, {}, MEASURED, (row,))

    records = {"a": record("ftkit", 300, "one"), "b": record("trl", 200, "one"), "c": record("trl", 100, "another")}
    monkeypatch.setattr(pages, "read_all", lambda: records)
    assert [(name, ratio) for name, _, _, ratio in pages.pairs()] == [("a", 1.5)]
    assert pages.pair_text("a") == "300 tokens/s in 9.0 GiB (trl: 200 in 9.0)"


def test_every_program_that_measures_writes_records() -> None:
    programs = [path for path in (pages.CHECKOUT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    assert len(programs) >= 10
    for path in programs:
        assert re.search(r"record_repeats\(|write_record\(", path.read_text()), path.name


def shown(picture: str) -> str:
    """Return the text of a picture of a terminal, without white space."""
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (pages.CHECKOUT / "docs" / "pictures" / picture).read_text())
    return re.sub(r"\s", "", html.unescape("".join(texts)))


def test_the_picture_of_a_plan_shows_what_the_planner_says_today(tmp_path: Path) -> None:
    text = (pages.CHECKOUT / "docs" / "pictures" / "plan.svg").read_text()
    command = re.search(r"ftkit(?: |&#160;)plan[^<]*", text)
    assert command
    words = html.unescape(command[0]).replace("\xa0", " ").split()
    environment = {**os.environ, "FTKIT_WORKSPACE": str(tmp_path), "COLUMNS": "1000"}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True, text=True, env=environment, check=False, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(("batch", "execution", "memory", "speed"))]
    lines += [line for line in done.stdout.splitlines() if "predicted to fit" in line]
    assert len(lines) > 5, done.stderr
    for line in lines:
        assert re.sub(r"\s", "", line) in shown("plan.svg"), "run scripts/pictures plan"


def test_the_record_of_the_demo_is_the_run_in_its_picture() -> None:
    (row,) = read_record(FOLDER / "demo.json").rows
    minutes, seconds = divmod(int(row.medians["training, s"] or 0), 60)
    assert f"{minutes}min{seconds}softraining" in shown("result.svg")
    assert f"sql{row.medians['accuracy after, %']:.0f}%" in shown("result.svg")
