"""report.html: made from run folders only, as one file that loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from html.parser import HTMLParser
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ftkit.cli.page.run_report import read_report
from ftkit.cli.page.write import run_page
from ftkit.cli.report import page_handler
from ftkit.runs.records import (
    CheckpointRecord,
    EvaluationRecord,
    FirstStepRecord,
    MemoryRecord,
    Sample,
    StageRecord,
    StartRecord,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Result, RunMaker

    from ftkit.runs.job import SubmittedRun

HOSTILE = "<script>alert(1)</script>"


def trained(run: SubmittedRun, records: Any, num_records: int = 80, pictures: tuple[str | None, ...] = (None,)) -> None:
    """Write the files of a complete run with a restart and a NaN loss."""
    run.layout.manifest.write_text(
        json.dumps({"starts": [{"time": 1.0}, {"time": 60.0, "after": HOSTILE, "host": "n1"}], "command": ["ftkit"]})
    )
    samples = [Sample(HOSTILE, "SELECT 1", "SELECT 2", correct=False, picture=each) for each in pictures]
    right = tuple(replace(each, answer="SELECT 1", correct=True) for each in samples)
    begin = StartRecord(8.0, 400, 0, 2, "fsdp2", "cpu", 1000, {"torch": "2.7"})
    records.write(
        run,
        StageRecord(2.0, "building the model"),
        MemoryRecord(4.0, "building the model", *[1.0] * 3, 1.0, 2.5, 3.0),
        EvaluationRecord(6.0, 0, "before", 5.0, 148.0, tuple(samples), scores={"sql": 0.0}),
        begin,
        FirstStepRecord(8.5, 1, 35.25, {"importing libraries": 14.5, "first forward": 20.75}),
        *(records.step(number, 5 / number) for number in range(1, num_records // 2)),
        CheckpointRecord(50.0, 20, "x", 1.0, 0.5),
        StartRecord(61.0, 400, 20, 2, "fsdp2", "cpu", 1000, {"torch": "2.7"}),
        *(
            records.step(number, float("nan") if number == 30 else 5 / number, time=100.0 + number)
            for number in range(21, num_records)
        ),
        EvaluationRecord(300.0, 79, "after", 0.5, 1.6, right, scores={"sql": 1.0}),
        records.end(),
    )
    run.layout.job_exit_code(run.job_id).write_text("0")


class _Checker(HTMLParser):
    """Collects a page's external resources, ids, and unclosed tags."""

    VOID = ("meta", "path", "use", "rect", "br", "img", "link", "stop")

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and not value.startswith(("#", "data:image/")):
                self.loads.append(value)
            if name == "id" and value:
                self.ids.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def without_clock(page: Path) -> str:
    return re.sub(r"Written by.*", "", page.read_text())


def check(page: str) -> str:
    """Run the checks common to all pages; return the page's text in one line."""
    checker = _Checker()
    checker.feed(page)
    assert not checker.open
    assert not checker.loads
    assert len(set(checker.ids)) == len(checker.ids)
    assert HOSTILE not in page
    assert "#010" not in page  # every placeholder was replaced by a color
    assert len(page.encode()) < 500_000
    body = re.sub(r"<style>.*?</style>|<path[^>]*>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def test_an_example_has_its_picture_and_what_was_said_of_it_before(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    run = make_run()
    trained(run, records, pictures=("data:image/jpeg;base64,AAAA", f'data:image/jpeg;base64,BBBB"><i>{HOSTILE}'))
    assert ftkit("report", "last").code == 0
    page = run.layout.report.read_text()
    assert check(page).count("before wrong SELECT 2 after correct SELECT 1") == 2
    assert re.findall(r'<img src="data:image/jpeg;base64,(\w+)', page) == ["AAAA", "BBBB"]


def test_the_report_of_a_run_is_complete(ftkit: Callable[..., Result], make_run: RunMaker, records: Any) -> None:
    run = make_run()
    trained(run, records)
    result = ftkit("report", "last")
    assert (result.code, result.err) == (0, "")
    assert result.out.strip().endswith(f"{run.id}/report.html")
    text = check(run.layout.report.read_text())
    assert ftkit("report", run.id, "-o", "again.html").code == 0
    assert without_clock(Path("again.html")) == without_clock(run.layout.report)
    for part in ("completed", "Learning rate", "Gradient norm", "Throughput", "Memory by stage", "Timeline",
                 "repeated steps", "down between starts", "loss perplexity sql", "1.60 1.000",
                 "before wrong SELECT 2", "after correct SELECT 1",
                 "35.2 s from torchrun to the end of step 1", "importing libraries 14.5 s",
                 f"ftkit rerun {run.id}", "Can't be repeated exactly"):  # fmt: skip
        assert part in text, part


def test_both_sides_of_preferences_are_drawn_also_where_a_step_has_only_one(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    run = make_run()
    both = {"accuracy": 0.5, "margin": 1.5, "kl": 0.25, "desirable": 0.5}
    both |= {f"{name}_{side}": 1.5 for name in ("reward", "log_prob", "length") for side in ("chosen", "rejected")}
    one = {name: value for name, value in both.items() if name != "margin" and not name.endswith("rejected")}
    begin = StartRecord(1.0, 400, 0, 1, "fsdp2", "cpu", 1000, {})
    scores = [both, both, one]
    records.write(run, begin, *(replace(records.step(10 * n, 3.0), scores=each) for n, each in enumerate(scores, 1)))
    assert ftkit("report", run.id).code == 0
    page = run.layout.report.read_text()
    for title in ("Rewards", "Log-probabilities: both falling is a known trap", "Accuracy of preferences"):
        assert title in page
    assert ">chosen<" in page
    assert ">rejected<" in page
    status = " ".join(ftkit("status", run.id).out.split())
    assert (
        "accuracy 50%, rewards 1.5 and -, log-probabilities 1.5 and - (chosen and rejected), reference point 0.25"
        in status
    )


@pytest.mark.parametrize("damage", ["", "{"])
def test_a_run_without_records_or_plan_has_a_report(
    ftkit: Callable[..., Result], make_run: RunMaker, damage: str
) -> None:
    run = make_run()
    if damage:
        run.layout.plan.write_text(damage)
        run.layout.metrics.write_text("no record\n")
    assert ftkit("report", run.id).code == 0
    expected = "No step could be read" if damage else "No step was recorded"
    assert expected in check(run.layout.report.read_text())


def test_several_runs_are_compared_in_one_report(
    ftkit: Callable[..., Result], make_run: RunMaker, records: Any
) -> None:
    for name in ("one", "two"):
        trained(make_run(name), records)
    result = ftkit("report", "one", "two", "-o", "both.html")
    assert (result.code, result.out) == (0, "both.html\n")
    text = check(Path("both.html").read_text())
    assert "2 runs compared" in text
    assert "losses are equal" in text
    assert ftkit("report", "one", "two").out == "comparison.html\n"


def test_a_report_in_a_read_only_folder_is_an_error(ftkit: Callable[..., Result], make_run: RunMaker) -> None:
    make_run()
    result = ftkit("report", "last", "-o", "missing/report.html")
    assert (result.code, "can't write" in result.err, "--output" in result.err) == (5, True, True)


def test_a_live_report_is_served_at_a_secret_address_and_rendered_per_request() -> None:
    pages = iter(["first", "second"])
    with ThreadingHTTPServer(("127.0.0.1", 0), page_handler(lambda: next(pages), "/secret")) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            assert [get(f"{address}/secret") for _ in range(2)] == ["first", "second"]
            for path in ("/", "/secret2", "/secret/"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    get(address + path)
        finally:
            server.shutdown()
            thread.join()


def get(address: str) -> str:
    with urllib.request.urlopen(address) as answer:  # noqa: S310 - a server of this test
        return str(answer.read().decode())


def test_a_live_report_reloads_itself(make_run: RunMaker) -> None:
    page = run_page(read_report(make_run().layout, "running"), refresh_seconds=7)
    assert '<meta http-equiv="refresh" content="7">' in page
