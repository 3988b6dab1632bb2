"""The HTTP servers of vLLM, SGLang and llama.cpp for an export, started here or already running."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ftkit import process
from ftkit.data.completion_metrics import Call, parse_value
from ftkit.data.conversations import for_template
from ftkit.errors import TrainingError, one_line
from ftkit.evaluate.export_formats import find_converter, find_program, run_converter, write_gguf
from ftkit.models.config_json import text_part
from ftkit.models.folder import max_lora_rank, read_model_config

if TYPE_CHECKING:
    import subprocess

    from ftkit.data.conversations import Conversation

_HOST = "127.0.0.1"
_START_SECONDS = 1800.0
_ANSWER_SECONDS = 600.0
_SHOWN_LINES = 8
_MAX_PROMPTS = 256  # prompts per request: vLLM's default number of concurrent sequences
LARGEST_BIAS = 100  # largest bias of a logit in OpenAI's API
_NUM_PROBABILITIES = 2000
"""Number of tokens whose probabilities llama.cpp returns; all tokens if the wanted one is not among them."""
_MODEL = "trained"
_KEY = "VLLM_API_KEY"  # environment variable with the API key of a server, as in vLLM


class EngineError(TrainingError):
    """A server ended, does not answer, or refuses a valid request; `last_line` is the last line of its log."""

    last_line = ""


class RequestError(Exception):
    """A server does not answer a request."""


class RefusedError(RequestError):
    """A server refuses a request, with an HTTP status from 400 on."""


@dataclass(frozen=True)
class Reply:
    """A completion: its prompt's tokens as the server rendered them, its own, and whether an end token ended it.

    `calls` are the tool calls that the server parsed from it.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    calls: list[Call]


@dataclass(frozen=True)
class Setup:
    """An export, and how to serve it.

    Attributes:
        base: folder of the full weights: the export itself, or the base model of its adapters.
        options: the user's arguments for the server.
        python: the Python of the environment with vLLM or SGLang.
        llama_cpp: checkout of llama.cpp; None to look for its programs as `find_program` does.
        scratch: folder for files that only the server needs.
        gguf: file for llama.cpp; None for the export's.
        url: address of a server that serves the export with `options`; empty to start one.
    """

    folder: Path
    base: Path
    precision: str
    options: tuple[str, ...]
    python: str
    llama_cpp: Path | None
    scratch: Path
    gguf: Path | None = None
    url: str = ""

    @cached_property
    def rank(self) -> int:
        """The `max_lora_rank` of the adapters; 0 for a full model."""
        return max_lora_rank(self.folder)


class Engine(ABC):
    """A server that serves an export in the block of `serve`."""

    name: ClassVar[str]
    version_at: ClassVar[tuple[str, str]]  # path of the server's version, and its key
    model = _MODEL
    address = ""
    parses_calls = True

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.tool_settings: dict[str, object] = {}

    @abstractmethod
    def command(self, length: int) -> list[str]:
        """Return the command line to serve texts of up to `length` tokens (0: the model's limit), without the port."""

    def version(self) -> str:
        path, key = self.version_at
        return str(self.call(path)[key])

    @abstractmethod
    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of a text but the first."""

    @property
    def dtype(self) -> str:
        """The dtype that the server was asked to compute in."""
        options = self.setup.options
        return options[options.index("--dtype") + 1] if "--dtype" in options[:-1] else f"auto ({self.setup.precision})"

    def chat(self, conversation: Conversation, max_tokens: int, **settings: object) -> Reply:
        """Complete a conversation greedily through the chat endpoint."""
        turns = [for_template(message, in_parts=False) for message in conversation.messages]
        for turn in turns:
            for call in turn.get("tool_calls", ()):  # OpenAI's API takes arguments as text
                call["function"] = call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}
        body = {
            "model": self.model, "messages": turns, "max_tokens": max_tokens, "temperature": 0,
            "repetition_penalty": 1.0, "logprobs": True, "return_token_ids": True,
        }  # fmt: skip
        if conversation.tools:
            body |= {"tools": list(conversation.tools)} | self.tool_settings
        answer = self.call("/v1/chat/completions", body | settings)
        choice = answer["choices"][0]
        stopped = choice["finish_reason"] in ("stop", "tool_calls")
        content = (choice.get("logprobs") or {}).get("content") or []
        tokens = choice.get("token_ids") or choice.get("response_token_ids")
        if tokens is None:  # llama.cpp omits tokens that are partial UTF-8 characters
            is_whole = len(content) == answer["usage"]["completion_tokens"]
            tokens = [each["id"] for each in content] if is_whole else []
        scored = [(token, each["logprob"]) for token, each in zip(tokens, content, strict=False)]  # with or without end
        functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
        calls: list[Call] = [(each["name"], parse_value(each["arguments"])) for each in functions]
        return Reply(
            self.prompt_of(body, answer), [token for token, _ in scored], [each for _, each in scored], stopped, calls
        )

    def prompt_of(self, body: dict[str, Any], answer: dict[str, Any]) -> list[int]:
        """Return the tokens of the prompt of a chat request and its answer."""
        del body
        tokens: list[int] = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
        return tokens

    def call(self, path: str, body: object = None, num_tokens: int = 0) -> Any:
        """Return the server's JSON response; a request with a body is a POST. The timeout allows a second per token."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(_KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body)
        try:
            connection = http.client.HTTPConnection(self.address, timeout=_ANSWER_SECONDS + num_tokens)
            with closing(connection):
                connection.request("GET" if body is None else "POST", path, data, headers)
                response = connection.getresponse()
                text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(one_line(error)) from error
        if response.status >= http.client.BAD_REQUEST:
            raise RefusedError(f"{path}: {response.status} {one_line(text)}")
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise RequestError(f"{path}: the answer is not JSON: {one_line(text)[:80]}") from error


@contextmanager
def serve(engine: Engine, length: int, report: Callable[[str], None]) -> Iterator[None]:
    """Serve an export in the block, for texts of up to `length` tokens; remove the log only if the block succeeds.

    Raises `EngineError`, with the log's last lines, if the server ends or stops answering.
    """
    if url := engine.setup.url:
        try:
            engine.address = url.removeprefix("http://").rstrip("/")
            try:
                engine.model = str(engine.call("/v1/models")["data"][-1]["id"])  # adapters follow their base
            except (LookupError, TypeError) as error:
                raise RequestError("/v1/models lists no model") from error
            yield
        except RequestError as error:
            raise EngineError(
                f"{engine.name} does not serve {engine.setup.folder} at {url}: {one_line(error)}",
                meaning="it is not http://HOST:PORT, not ready, another engine, or requires a key",
                fix=f"see its log; a key is read from {_KEY}",
            ) from error
        return
    with socket.socket() as free:
        free.bind((_HOST, 0))
        port = free.getsockname()[1]
    engine.address = f"{_HOST}:{port}"
    words = [*engine.command(length), "--host", _HOST, "--port", str(port), *engine.setup.options]
    descriptor, name = tempfile.mkstemp(prefix=f"ftkit-{engine.name}-", suffix=".log")
    os.close(descriptor)
    report(f"starting {engine.name}; its log: {name}")
    with process.running(words, log=Path(name)) as program:
        try:
            _wait_until_ready(engine, program)
            yield
        except RequestError as error:
            lines = [*filter(str.strip, Path(name).read_text(encoding="utf-8", errors="replace").splitlines())]
            failed = EngineError(
                f"{engine.name} does not serve {engine.setup.folder}: {one_line(error)}",
                meaning="it does not take the model, an option, or so long a text, or has too little memory",
                fix="\n".join([f"see {name}; its last lines:", *lines[-_SHOWN_LINES:]]),
            )
            failed.last_line = next(reversed(lines), "").strip()
            raise failed from error
    Path(name).unlink()


def _wait_until_ready(engine: Engine, program: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with suppress(RequestError):
            engine.call("/health")
            return
        if program.poll() is not None:
            raise RequestError("it ended")
        if time.monotonic() > deadline:
            raise RequestError("it does not answer")
        time.sleep(0.5)


class Vllm(Engine):
    name, version_at = "vllm", ("/version", "version")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if "--enable-auto-tool-choice" not in setup.options:  # vLLM then accepts tools only without parsing calls
            self.tool_settings, self.parses_calls = {"tool_choice": "none"}, False

    def command(self, length: int) -> list[str]:
        setup, num_heads = self.setup, int(text_part(read_model_config(self.setup.base)).get("num_attention_heads", 1))
        # The largest number of GPUs here that divides the attention heads, as vLLM requires; 1 without GPUs.
        num_gpus = next(num for num in range(max(1, torch.cuda.device_count()), 0, -1) if num_heads % num == 0)
        words = [
            setup.python, "-m", "vllm.entrypoints.cli.main", "serve", str(setup.base), "--tokenizer", str(setup.folder),
            "--generation-config", str(setup.folder), *(("--max-model-len", str(length)) if length else ()),
            "--tensor-parallel-size", str(num_gpus),
            *(() if torch.cuda.is_available() else ("--enforce-eager",)),  # compiling on a CPU takes minutes
        ]  # fmt: skip
        if not setup.rank:
            return [*words, "--served-model-name", _MODEL]
        lora = json.dumps({"name": _MODEL, "path": str(setup.folder)})
        return [*words, "--enable-lora", "--max-lora-rank", str(setup.rank), "--lora-modules", lora]

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        found = self.distributions(tokens, range(len(tokens) - 1), 0)
        return [each[token] for each, token in zip(found, tokens[1:], strict=True)]

    def distributions(self, tokens: Sequence[int], places: Sequence[int], number: int) -> list[dict[int, float]]:
        """Return log-probabilities after `tokens[: place + 1]`: of the next token, and of the top `number`."""
        answer = self._choices(tokens, 1, prompt_logprobs=number)[0]["prompt_logprobs"]
        return [{int(token): each["logprob"] for token, each in answer[place + 1].items()} for place in places]

    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int, **settings: object) -> list[list[int]]:
        """Return the completion of each prompt; greedy unless the request's `settings` change it."""
        settings = {"repetition_penalty": 1.0, "return_token_ids": True} | settings
        parts = [prompts[first : first + _MAX_PROMPTS] for first in range(0, len(prompts), _MAX_PROMPTS)]
        choices = [choice for part in parts for choice in self._choices(part, max_tokens, **settings)]
        return [choice["token_ids"] for choice in choices]

    def _choices(self, prompt: Sequence[object], max_tokens: int, **settings: object) -> list[dict[str, Any]]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = self.call("/v1/completions", body | settings, len(prompt) * max_tokens)
        found: list[dict[str, Any]] = answer["choices"]
        return found


class Sglang(Engine):
    name, version_at = "sglang", ("/server_info", "version")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.parses_calls = "--tool-call-parser" in setup.options

    def command(self, length: int) -> list[str]:
        setup = self.setup
        words = [
            setup.python, "-m", "sglang.launch_server", "--model-path", str(setup.base), "--served-model-name", "base",
            "--tokenizer-path", str(setup.folder), *(("--context-length", str(length)) if length else ()),
        ]  # fmt: skip
        self.model = f"base:{_MODEL}" if setup.rank else "base"
        lora = ["--lora-paths", f"{_MODEL}={setup.folder}", "--max-lora-rank", str(setup.rank)]
        return [*words, *(lora if setup.rank else ())]

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        body = {
            "input_ids": list(tokens), "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True, "logprob_start_len": 0,
            "lora_path": self.model.rpartition(":")[2] if self.setup.rank else None,
        }  # fmt: skip
        return [each[0] for each in self.call("/generate", body)["meta_info"]["input_token_logprobs"][1:]]


class LlamaCpp(Engine):
    name, version_at = "llama.cpp", ("/props", "build_info")

    @property
    def dtype(self) -> str:
        return self._file.name if self._file else f"GGUF in {self.setup.precision}"

    @cached_property
    def _file(self) -> Path | None:
        """The given file, or the export's; the unquantized one if there are several."""
        files = sorted(self.setup.folder.glob("*.gguf"))
        if len(files) > 1:
            files = [path for path in files if path.stem.endswith(f"-{self.setup.precision}")]
        return self.setup.gguf or next(iter(files), None)

    def command(self, length: int) -> list[str]:
        setup, file = self.setup, self._file
        if file is None:
            file = setup.scratch / "model.gguf"
            write_gguf(setup.base, file, setup.precision, lambda _: None, setup.llama_cpp)
        program = find_program("llama-server", setup.llama_cpp) or "llama-server"
        words = [program, "--model", str(file), "--ctx-size", str(length), "--parallel", "1"]
        if not setup.rank:
            return words
        adapter, template = setup.scratch / "adapter.gguf", setup.folder / "chat_template.jinja"
        script = find_converter(setup.llama_cpp).with_name("convert_lora_to_gguf.py")
        convert = [sys.executable, str(script), str(setup.folder), "--base", str(setup.base), "--outtype", "f32"]
        run_converter("llama.cpp's converter", [*convert, "--outfile"], adapter, adapter)
        words += ["--chat-template-file", str(template)] if template.is_file() else []  # the base may have another
        return [*words, "--lora", str(adapter)]

    def prompt_of(self, body: dict[str, Any], answer: dict[str, Any]) -> list[int]:
        """Render and tokenize the request as the chat endpoint does, which returns only the number of tokens."""
        text = self.call("/apply-template", body)["prompt"]
        tokens: list[int] = self.call("/tokenize", {"content": text, "add_special": True})["tokens"]
        if len(tokens) != answer["usage"]["prompt_tokens"]:
            raise RefusedError(f"it reports {answer['usage']['prompt_tokens']} tokens, and makes {len(tokens)}")
        return tokens

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        found = self.distributions(tokens, range(len(tokens) - 1), 1)
        return [each[token] for each, token in zip(found, tokens[1:], strict=True)]

    @cached_property
    def _letter(self) -> int:
        """A token that is a whole character: the server returns no probabilities for partial ones."""
        tokens: list[int] = self.call("/tokenize", {"content": "a"})["tokens"]
        return tokens[-1]

    def distributions(self, tokens: Sequence[int], places: Sequence[int], number: int) -> list[dict[int, float]]:
        return [self._distribution(tokens[: place + 1], tokens[place + 1], number) for place in places]

    def _distribution(self, prompt: Sequence[int], token: int, number: int) -> dict[int, float]:
        for num_listed in (max(number, _NUM_PROBABILITIES), 2**30):
            # The returned probabilities do not include the bias.
            answer = self._completion(prompt, 1, n_probs=num_listed, logit_bias=[[self._letter, LARGEST_BIAS]])
            listed = answer["completion_probabilities"][0]["top_logprobs"]
            found = {each["id"]: float(each["logprob"]) for each in listed}
            if token in found:
                return dict(list(found.items())[:number]) | {token: found[token]}  # the most probable ones come first
        raise RefusedError(f"token {token} is not in the file's vocabulary")

    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int, **settings: object) -> list[list[int]]:
        return [self._completion(prompt, max_tokens, **settings)["tokens"] for prompt in prompts]

    def _completion(self, prompt: Sequence[int], max_tokens: int, **settings: object) -> dict[str, Any]:
        body = {"prompt": list(prompt), "n_predict": max_tokens, "temperature": 0, "return_tokens": True}
        found: dict[str, Any] = self.call("/completion", body | settings, max_tokens)
        return found


ENGINES: dict[str, type[Engine]] = {each.name: each for each in (Vllm, Sglang, LlamaCpp)}
