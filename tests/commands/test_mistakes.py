"""Mistakes that people make with trainers: each is typed here, and ftkit says what is wrong and what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from mistakes import ANSWERS, Mistake, read_mistakes
from safetensors.numpy import save_file

from ftkit.data.tokenizers import learn_tokenizer

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from conftest import Machine

SHAPE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 280, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
}  # fmt: skip
LAYER = {
    "input_layernorm": (32,), "post_attention_layernorm": (32,), "self_attn.q_norm": (16,), "self_attn.k_norm": (16,),
    **{f"self_attn.{name}_proj": (32, 32) for name in "qkvo"},
    "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64),
}  # fmt: skip
WEIGHTS = {"embed_tokens": (280, 32), "norm": (32,), **{f"layers.0.{name}": shape for name, shape in LAYER.items()}}
ROW = '{"messages": [{"role": "user", "content": "How many pets?"}, {"role": "assistant", "content": "%d pets"}]}\n'
RECIPE = "model: ./model\ndata: ./chats.jsonl\ntraining:\n  sequence_length: 256\n"
REFUSALS = {
    "gated": (403, "GatedRepo", "Access to model gated/model is restricted"),
    "expired": (401, "", "Invalid credentials in Authorization header"),
    "missing": (401, "RepoNotFound", "Repository not found"),
    "someone": (404, "EntryNotFound", "Entry not found"),
}
"""Answers of the hub by the owner of a model: status, and the headers for the error and its message."""
CHECKOUT = Path(__file__).parents[2]
PLACES = {r"/home/project/(?=\S)": "", r"/home/project": ".", r"/shared/me/ftkit": "/workspace"}
VARYING = {r"\d{8}T\d{6}Z-[0-9a-f]{4}": "20260102T030405Z-ab12", r"http://127\.0\.0\.1:\d+": "https://huggingface.co"}


class Hub(BaseHTTPRequestHandler):
    """Refuses every request."""

    def do_GET(self) -> None:
        code, error, message = next(
            (REFUSALS[each] for each in REFUSALS if f"/{each}/" in self.path), REFUSALS["missing"]
        )
        self.send_response(code)
        for name, value in (("X-Error-Code", error), ("X-Error-Message", message), ("Content-Length", "0")):
            self.send_header(name, value)
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with zeros as weights, and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    learn_tokenizer(["CREATE TABLE pets (name TEXT)"], 280, "chatml").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    weights = {f"model.{name}.weight": np.zeros(shape, np.float32) for name, shape in WEIGHTS.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("case", read_mistakes(), ids=lambda case: case.mistake)
def test_a_mistake_is_answered_with_its_cause_and_what_to_do(
    case: Mistake, machine: Machine, model: Path, hub: str
) -> None:
    if case.hub:
        machine.environment["HF_ENDPOINT"] = hub
    machine.write("ftkit.yaml", "workspace: /shared/me/ftkit\nregistry: registry.example.com/team\n")
    machine.write("mine.yaml", RECIPE)
    machine.write("chats.jsonl", "".join(ROW % number for number in range(8)))
    shutil.copytree(model, machine.project / "model")
    before = machine.type(case.before)
    assert before.returncode == 0, before.stderr
    done = machine.type(case.type)
    answer = answer_of(case, done, machine.root)
    assert done.returncode == case.code, answer
    assert "Traceback" not in done.stderr
    for fact in case.says:
        assert fact in answer
    if os.environ.get("FTKIT_UPDATE_GOLDEN"):
        case.answer.parent.mkdir(exist_ok=True)
        case.answer.write_text(answer)
    assert answer == case.answer.read_text()


def answer_of(case: Mistake, done: subprocess.CompletedProcess[str], root: Path) -> str:
    """Return what the page shows: the selected lines, or stdout and the error, as on any machine."""
    said = done.stderr.splitlines()
    if case.lines:
        lines = [line for line in (*said, *done.stdout.splitlines()) if re.match(case.lines, line)]
    else:
        first = next((place for place, line in enumerate(said) if line.startswith("error: ")), 0)
        lines = [*done.stdout.splitlines(), *said[first:]]
    places = {re.escape(str(root)) + place: shown for place, shown in PLACES.items()}
    text = "".join(f"{line}\n" for line in lines).replace(f"{CHECKOUT}/", "")
    for pattern, shown in (places | VARYING).items():
        text = re.sub(pattern, shown, text)
    return text


def test_the_table_has_mistakes_of_all_kinds_that_are_asked_about_elsewhere() -> None:
    cases = read_mistakes()
    assert len({case.answer for case in cases}) == len(cases) >= 40
    assert {case.answer for case in cases} == set(ANSWERS.iterdir())
    assert all(re.fullmatch(r"([\w.-]+/[\w.-]+#\d+ ?)*", case.asked) and case.says for case in cases)
    assert sum(bool(case.asked) for case in cases) >= 40
