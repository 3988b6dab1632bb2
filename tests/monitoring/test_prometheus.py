"""The shipped dashboard: each of its queries, executed by a real Prometheus that scrapes a run."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from waiting import PATIENCE_SECONDS, wait_until

import ftkit
from ftkit.health import sampler
from ftkit.runs.gpu_samples import GpuSample, NodeSample

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus (apt-get install prometheus)"
)

DASHBOARD = json.loads((Path(ftkit.__file__).parent / "dashboards" / "grafana.json").read_text())
RUN = "demo-20260101T000000Z-abcd"
CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs: [{{job_name: ftkit, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sample(number: int) -> NodeSample:
    """Two GPUs with counters that increase with each sample."""
    gpus = tuple(
        GpuSample(
            index, 97.0, 88.0, 60.5, 650.0 + index, 61.0, 1755.0, 5e6 + 1e3 * number, ("power cap",), 1e9 * number
        )
        for index in range(2)
    )
    return NodeSample(float(number), "n1", 1e8 * number, gpus)


SAMPLE_SECONDS = 0.05
"""Between two samples; not a limit."""


@contextmanager
def watched_run() -> Iterator[int]:
    """Serve the metrics of a run, and yield their port."""
    newest = deque([sample(0)], maxlen=1)
    port, is_over = free_port(), threading.Event()
    sampler.serve_metrics(newest, RUN, port)

    def train() -> None:
        number = 0
        while not is_over.wait(SAMPLE_SECONDS):
            number += 1
            newest.append(sample(number))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield port
    finally:
        is_over.set()
        thread.join()


class Prometheus:
    """The HTTP API of Prometheus."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, **values: str) -> Any:
        query = urllib.parse.urlencode({name.rstrip("_"): value for name, value in values.items()})
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}") as response:
            found = json.load(response)
        assert found["status"] == "success"
        return found["data"]

    def query(self, text: str) -> list[dict[str, Any]]:
        return list(self.get("query", query=text)["result"])

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready"):
                return True
        except OSError:  # not listening yet, or "Service Unavailable"
            return False


def legend(template: str, labels: dict[str, str]) -> str:
    """Return a legend as Grafana formats it; a missing label is an error."""
    return re.sub(r"{{(\w+)}}", lambda name: labels[name[1]], template)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder, api = tmp_path_factory.mktemp("prometheus"), Prometheus(free_port())
    with watched_run() as port, (folder / "log").open("wb") as log:
        (folder / "config.yml").write_text(CONFIG.format(port=port))
        command = [
            "prometheus", f"--config.file={folder}/config.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{api.port}", "--log.level=warn",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                wait_until(lambda: process.poll() is not None or api.is_ready())
                assert process.poll() is None, (folder / "log").read_text()
                wait_until(lambda: len(api.query("ftkit_gpu_energy_joules_total[1m]")) == 2)
                time.sleep(1)  # more scrapes: a rate needs two
                yield api
            finally:
                process.terminate()
                process.wait(PATIENCE_SECONDS)


def test_every_panel_of_the_dashboard_shows_a_run(prometheus: Prometheus) -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables["run"]["query"]["query"] == "label_values(ftkit_gpu_power_watts, run)"
    assert prometheus.get("label/run/values", match="ftkit_gpu_power_watts") == [RUN]
    shown = {}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for runs in (".*", RUN):  # Grafana's values for all runs, and for one
                text = target["expr"].replace("$__rate_interval", "1m").replace("$run", runs)
                found = prometheus.query(text)
                legends = [legend(target["legendFormat"], each["metric"]) for each in found]
                assert legends, panel["title"]
                assert len(set(legends)) == len(found), panel["title"]
                shown[panel["title"]] = [float(each["value"][1]) for each in found]
    assert shown["Power"] == [650.0, 651.0]
    assert shown["Memory used"] == [60.5, 60.5]
    assert [each > 0 for each in shown["NVLink"]] == [True, True]
    assert shown["Energy in the last hour"][0] > 0


def test_the_metrics_are_valid_for_prometheus(prometheus: Prometheus) -> None:  # noqa: ARG001 - provides promtool
    text = sampler.metrics_text(sample(1), RUN)
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr  # 3: style warnings about metric names
    assert "error while linting" not in done.stderr
