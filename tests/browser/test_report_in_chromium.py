"""Layout of report.html in a real browser: on a phone, on a wide screen, in dark mode, and printed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from waiting import PATIENCE_SECONDS

from ftkit.cli.page.charts import require_matplotlib
from ftkit.cli.page.run_report import read_report
from ftkit.cli.page.write import run_page
from ftkit.planning.layout import RunLayout
from ftkit.runs import gpu_samples
from ftkit.runs.gpu_samples import GpuSample, NodeSample
from ftkit.runs.records import EvaluationRecord, MemoryRecord, Sample, StageRecord, StartRecord, StepRecord, to_line

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium (apt-get install chromium)")

WIDTHS = {"phone": 390, "screen": 1280}
HARNESS = """<!doctype html><body>%s<script>
onload = () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement;
    const charts = [...page.querySelectorAll("svg")].map(each => each.getBoundingClientRect());
    found[frame.id] = {
      width: root.scrollWidth,
      tables: [...page.querySelectorAll(".scroll")].map(each => each.scrollWidth - each.clientWidth),
      charts: charts.filter(each => each.width > 0).map(each => [each.width, each.height]),
      text: Math.min(...[...page.querySelectorAll("svg text")].map(each => each.getBoundingClientRect().height)
        .filter(height => height > 0)),
      stroke: getComputedStyle(page.querySelector("svg path[style*=series]")).stroke,
    };
  }
  document.body.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>";
};
</script>"""


def chromium(folder: Path, *words: str) -> str:
    options = (
        "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--allow-file-access-from-files", "--virtual-time-budget=5000",
        f"--user-data-dir={folder / 'user'}",
    )  # fmt: skip
    done = subprocess.run(
        ["chromium", *options, *words], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    samples = (Sample("How many? " * 30, "SELECT 1", "SELECT" + "_x" * 200, correct=False),)
    records = [
        StageRecord(2.0, "verifying sharding and document isolation"),
        MemoryRecord(4.0, "verifying sharding and document isolation", *[1.0] * 3, 1.0, 2.5, 3.0),
        StartRecord(8.0, 400, 0, 2, "fsdp2", "cpu", 1000, {"torch": "2.7"}),
        *(
            StepRecord(10.0 + n, n, 90, 0.5, 5 / n, 1e-3, 1.0, n * 8192, n * 4096, 12345.6, 0.5, 0.1, 0.01, 0.4, None)
            for n in range(1, 90)
        ),
        EvaluationRecord(300.0, 90, "after", 0.5, 1.6, samples, scores={"sql": 1.0}),
    ]
    (folder / "metrics.jsonl").write_text("".join(to_line(each) + "\n" for each in records))
    RunLayout(folder).gpu_samples.mkdir()
    samples_of_gpus = [
        NodeSample(10.0 + n, "n1", 0.0, tuple(GpuSample(gpu, 90.0 + gpu, power=600.0 + gpu * n) for gpu in range(2)))
        for n in range(90)
    ]
    (RunLayout(folder).gpu_samples / "n1.jsonl").write_text("".join(map(gpu_samples.to_line, samples_of_gpus)))
    require_matplotlib()
    path = folder / "report.html"
    path.write_text(run_page(read_report(RunLayout(folder), "completed")))
    return path


def test_nothing_overflows_on_a_phone_or_a_wide_screen(page: Path) -> None:
    frames = "".join(
        f'<iframe id="{name}" src="report.html" style="border:0;height:4000px;width:{width}px"></iframe>'
        for name, width in WIDTHS.items()
    )
    harness = page.with_name("harness.html")
    harness.write_text(HARNESS % frames)
    found = json.loads(re.search(r"<pre>(.*)</pre>", chromium(page.parent, "--dump-dom", harness.as_uri()))[1])  # type: ignore[index]
    for name, width in WIDTHS.items():
        assert found[name]["width"] <= width, name
        assert max(found[name]["tables"]) <= 0, name
        assert len(found[name]["charts"]) == 8  # only one of a chart's two variants is shown
        assert min(each[0] for each in found[name]["charts"]) >= 300, name
        assert found[name]["text"] >= 8, name  # pixels
        assert found[name]["stroke"].startswith("rgb("), name  # placeholders were replaced by colors


def test_the_report_can_be_printed(page: Path) -> None:
    target = page.with_name("report.pdf")
    chromium(page.parent, f"--print-to-pdf={target}", page.as_uri())
    assert target.read_bytes().startswith(b"%PDF")
    assert 1 <= target.read_bytes().count(b"/Type /Page\n") <= 8
