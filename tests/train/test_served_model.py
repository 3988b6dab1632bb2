"""vLLM's server, by a stand-in that fails as it does."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from transformers import GenerationConfig

from ftkit.cli.main import main
from ftkit.evaluate.engines import EngineError, RequestError, Setup, Vllm, serve
from ftkit.evaluate.served_model import ServedModel, served_by_vllm
from ftkit.evaluate.source import ModelFolder
from ftkit.train.components.generation import Generation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from conftest import Run

pytestmark = pytest.mark.train

SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        print(*(f"frame {number}" for number in range(30)), "OutOfMemoryError: CUDA", sep="\\n", flush=True)
        os._exit(1)

if "REFUSED":
    sys.exit("ValueError: REFUSED")
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that installs a server, which ends at once if it gets a reason."""

    def install(refusal: str = "") -> None:
        folder = tmp_path / "packages"
        for name, content in {
            "vllm/__init__": "",
            "vllm/entrypoints/__init__": "",
            "vllm/entrypoints/cli/__init__": "",
            "vllm/entrypoints/cli/main": SERVER.replace("REFUSED", refusal),
        }.items():
            path = folder / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.syspath_prepend(str(folder))

    return install


@pytest.mark.parametrize(("refusal", "last"), [("", "OutOfMemoryError: CUDA"), ("unknown model", "unknown model")])
def test_a_server_that_ends_is_reported_with_its_last_lines(
    refusal: str, last: str, finished_run: Run, program: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    program(refusal)
    words = ["generate", str(finished_run.layout.export), "--input", "Hello", "--engine", "vllm"]
    assert main(words) == 9
    out, err = capfd.readouterr()
    assert not out
    assert "--engine transformers" in err
    assert last in err.splitlines()[-1]
    assert err.count("frame") == (0 if refusal else 7)


def test_servers_of_two_models_share_the_memory_of_gpus(finished_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Sequence[str]] = []

    @contextmanager
    def running(words: Sequence[str], *, log: Path) -> Iterator[SimpleNamespace]:
        del log
        started.append(words)
        yield SimpleNamespace(poll=lambda: 1)

    monkeypatch.setattr("ftkit.evaluate.engines.process.running", running)
    for num_models in (1, 2):
        source = ModelFolder(finished_run.layout.export, "model")
        with pytest.raises(EngineError), served_by_vllm(source, print, num_models):
            pass
    option = "--gpu-memory-utilization"
    alone, together = started
    assert option not in alone
    assert 2 * float(together[together.index(option) + 1]) <= 0.9


def test_a_server_has_a_second_more_for_each_token_that_may_be_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(0.5)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"token_ids": [3]} for _ in body["prompt"]]}).encode())

    monkeypatch.setattr("ftkit.evaluate.engines._ANSWER_SECONDS", 0.2)
    server = HTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    engine = Vllm(Setup(tmp_path, tmp_path, "", (), "", None, tmp_path))
    engine.address = f"127.0.0.1:{server.server_port}"
    assert engine.complete([[1], [2]], 4) == [[3], [3]]
    with pytest.raises(RequestError, match="timed out"):
        engine.call("/version", {"prompt": []})
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("answer", [b"<html>a login page</html>", b'{"models": []}', b'{"data": []}', None])
def test_an_address_that_serves_no_model_is_reported(answer: bytes | None, tmp_path: Path) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer or b"")

    server = HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}" if answer else "https://host"
    engine = Vllm(Setup(tmp_path, tmp_path, "", (), "", None, tmp_path, url=url))
    with pytest.raises(EngineError, match="does not serve"), serve(engine, 1, print):
        pass
    server.shutdown()
    server.server_close()


def test_equal_prompts_are_drawn_with_different_seeds_that_repeat(tmp_path: Path) -> None:
    class Recorded(Vllm):
        def call(self, path: str, body: Any = None, num_tokens: int = 0) -> Any:
            del path, num_tokens
            return {"choices": [{"token_ids": [body["seed"]]} for _ in body["prompt"]]}

    engine = Recorded(Setup(tmp_path, tmp_path, "", (), "", None, tmp_path))
    model = ServedModel("model", cast("Any", None), Generation((2,), 0), engine)
    config = GenerationConfig(do_sample=True, temperature=0.7, max_new_tokens=1)
    torch.manual_seed(0)
    drawn = model.complete([[1], [1], [1]], config) + model.complete([[1]], config)
    assert len({seed for (seed,) in drawn}) == 4
    torch.manual_seed(0)
    assert model.complete([[1], [1], [1]], config) == drawn[:3]
