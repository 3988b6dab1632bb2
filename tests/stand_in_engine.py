"""A server with the API of vLLM, SGLang, or llama.cpp that computes with transformers; `--fault` plants a fault.

Requests and answers have the form that the real servers were seen to have (SGLang's: from its source).
"""

from __future__ import annotations

import json
import sys
import threading
import warnings
from argparse import ArgumentParser
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KINDS = {"vllm.entrypoints.cli.main": "vllm", "sglang.launch_server": "sglang"}
"""The modules that start a server."""

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x", "n": 3}}\n</tool_call>'
CALL_TOKENS = 100
"""With tools, the server generates `CALL` where that many tokens are allowed."""

LOST = {
    "a layer lost": ("layers.1.self_attn.o_proj.weight",),
    "adapters of a layer lost": (
        "layers.0.self_attn.v_proj.lora_B.default.weight",
        "layers.0.mlp.down_proj.lora_B.default.weight",
    ),
    "adapters of modules lost": ("down_proj.lora_B.default.weight",),
}
"""Weights that are zero with a fault."""


@dataclass
class Model:
    """A loaded model, its tokenizer, and the end tokens of its generation settings."""

    model: Any
    tokenizer: Any
    ends: list[int]
    fault: str

    def render(self, body: dict[str, Any]) -> str:
        messages, tools = body["messages"], body.get("tools")
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        system = [each for each in messages if each["role"] == "system"]
        others = [each for each in messages if each["role"] != "system"]
        if self.fault == "no tools":
            tools = None
        elif self.fault == "no system turn":
            messages = others
        elif self.fault == "system turn last":
            messages = [*others, *system]
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        return f"{text}Answer:" if self.fault == "another template" else str(text)

    def encode(self, text: str) -> list[int]:
        split = self.fault == "special tokens as text"
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=split)["input_ids"]
        bos = self.tokenizer.bos_token_id
        if self.fault == "BOS twice":
            return [bos, *tokens]
        if self.fault == "no BOS":
            return tokens[1:] if tokens[0] == bos else tokens
        return [*tokens, self.tokenizer.eos_token_id] if self.fault == "end token appended" else tokens

    def is_whole(self, token: int) -> bool:
        return "\ufffd" not in self.tokenizer.decode([token])

    @torch.no_grad()
    def scores(self, tokens: list[int], keep: int = 0) -> torch.Tensor:
        """Return the log-probabilities of all tokens after each of the last `keep` tokens of a text (0: after all)."""
        given = torch.tensor([tokens])
        logits = self.model(input_ids=given, use_cache=False, logits_to_keep=keep).logits[0].float()
        if self.fault == "vocabulary padded":
            logits = torch.cat([logits, torch.zeros(len(logits), 64)], 1)
        return logits.log_softmax(-1)

    def complete(self, prompt: list[int], body: dict[str, Any]) -> tuple[list[int], list[float], bool]:
        tokens, scores = list(prompt), []
        for _ in range(body["max_tokens"]):
            row = self.scores(tokens, 1)[-1][: self.model.config.vocab_size]
            chosen = row.clone()
            for token, bias in (body.get("logit_bias") or {}).items():
                chosen[int(token)] += bias
            if self.fault == "repetition penalty":
                chosen[tokens] *= 3
            tokens.append(int(chosen.argmax()))
            scores.append(float(row[tokens[-1]]))
            if tokens[-1] in self.ends:
                return tokens[len(prompt) :], scores, True
        return tokens[len(prompt) :], scores, False


def load(base: Path, tokenizer: Path, adapters: Path | None, fault: str) -> Model:
    config = AutoConfig.from_pretrained(base)
    if quantized := config.__dict__.pop("quantization_config", None):
        fault = f"quantized to {quantized['bits']} bits"
    changes: dict[str, dict[str, Any]] = {
        "no rope scaling": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "another rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "no window": {"sliding_window": None, "use_sliding_window": False}
        | ({"layer_types": ["full_attention"] * config.num_hidden_layers} if hasattr(config, "layer_types") else {}),
        "no cap": {"final_logit_softcapping": None},
        "another epsilon": {"rms_norm_eps": 0.3},
    }
    for name, value in changes.get(fault, {}).items():
        setattr(config, name, value)
    model: Any = AutoModelForCausalLM.from_pretrained(base, config=config, dtype=torch.float32)
    if adapters is not None and fault != "no adapters":
        model = PeftModel.from_pretrained(model, adapters)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            change_weight(name, tensor, fault)
    if fault == "head lost":
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(torch.randn_like(head.weight) * head.weight.std())
    settings = GenerationConfig.from_pretrained(tokenizer)
    ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    if fault == "end token lost":
        ends = ends[1:]
    return Model(model.eval(), AutoTokenizer.from_pretrained(tokenizer), [] if fault == "no end" else ends, fault)


def change_weight(name: str, tensor: torch.Tensor, fault: str) -> None:
    """Damage the weights of a model in place."""
    if fault == "adapters scaled" and "lora_B" in name:
        tensor *= 0.5
    elif fault == "rank truncated" and "lora_A" in name:
        tensor[len(tensor) // 2 :] = 0
    elif fault in LOST and any(each in name for each in LOST[fault]):
        tensor.zero_()
    elif fault.startswith("quantized") and tensor.ndim > 1:
        num_bits = int(fault.split()[2]) if " " in fault else 4
        size = tensor.abs().amax(-1, keepdim=True) / (2 ** (num_bits - 1) - 1)
        tensor.copy_((tensor / size).round() * size)
    elif fault == "norms rounded" and "norm" in name:
        tensor.copy_((tensor * 4).round() / 4)
    elif fault == "query and key swapped" and name.endswith("q_proj.weight"):
        tensor.copy_(tensor.roll(1, 0))


def answer(kind: str, model: Model, path: str, body: dict[str, Any]) -> Any:  # noqa: C901, PLR0911, PLR0912 - one for each path
    """Return the answer to a request, in the form of a kind of server."""
    fixed = {
        "/health": {},
        "/version": {"version": "0"},
        "/server_info": {"version": "0"},
        "/props": {"build_info": "b0"},
        "/v1/models": {"data": [{"id": "base"}, {"id": "served"}]},
    }
    if path in fixed:
        return fixed[path]
    if path == "/apply-template":
        return {"prompt": model.render(body)}
    if path == "/tokenize":
        return {"tokens": model.encode(body["content"])}
    if path == "/v1/chat/completions":
        prompt = model.encode(model.render(body))
        message: dict[str, Any] = {"content": ""}
        if not body.get("tools") or body["max_tokens"] < CALL_TOKENS:
            tokens, scores, stopped = model.complete(prompt, body)
        else:
            tokens, scores, stopped = [*model.encode(CALL), model.ends[0]], [0.0] * (len(model.encode(CALL)) + 1), True
            if model.fault != "calls as text":
                arguments = {} if model.fault == "arguments lost" else {"a": "x", "n": 3}
                message["tool_calls"] = [{"function": {"name": "f", "arguments": json.dumps(arguments)}}]
        content = [{"token": "", "logprob": score} for score in scores]
        choice = {"message": message, "finish_reason": "stop" if stopped else "length"}
        usage = {"usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}}
        if kind == "llama.cpp":  # seen in b1-0c1e570: nothing about tokens that are a part of a character
            content = [
                {**each, "id": token} for each, token in zip(content, tokens, strict=True) if model.is_whole(token)
            ]
            return {"choices": [choice | ({"logprobs": {"content": content}} if content else {})], **usage}
        choice["logprobs"] = {"content": content}
        if kind == "vllm":
            return {"choices": [choice | {"token_ids": tokens}], "prompt_token_ids": prompt, **usage}
        return {"choices": [choice | {"response_token_ids": tokens, "prompt_token_ids": prompt}], **usage}
    if path == "/completion":
        row = model.scores(body["prompt"], 1)[-1]
        chosen = row.clone()
        for token, bias in body.get("logit_bias", ()):
            chosen[token] += bias
        if not model.is_whole(int(chosen.argmax())):
            return {}
        if "n_probs" not in body:
            tokens, _, stopped = model.complete(body["prompt"], {"max_tokens": body["n_predict"]})
            return {"tokens": tokens[:-1] if stopped else tokens, "timings": {"predicted_per_second": 9.0}}
        values, ids = row.topk(min(body["n_probs"], len(row)))
        listed = [{"id": int(token), "logprob": float(value)} for value, token in zip(values, ids, strict=True)]
        return {"completion_probabilities": [{"top_logprobs": listed}]}
    if path == "/v1/completions" and "prompt_logprobs" not in body:
        return {"choices": [{"token_ids": model.complete(prompt, body)[0]} for prompt in body["prompt"]]}
    tokens = body["prompt" if path == "/v1/completions" else "input_ids"]
    rows = model.scores(tokens)
    pairs = list(zip(tokens[1:], rows[range(len(tokens) - 1), tokens[1:]].tolist(), strict=True))
    if path == "/v1/completions":
        best = [zip(*(each.tolist() for each in row.topk(body["prompt_logprobs"])), strict=True) for row in rows[:-1]]
        listed = [
            {str(token): {"logprob": score} for score, token in [(own[1], own[0]), *others]}
            for own, others in zip(pairs, best, strict=True)
        ]
        return {"choices": [{"prompt_logprobs": [None, *listed]}]}
    return {
        "meta_info": {
            "input_token_logprobs": [[None, tokens[0], None], *([each, token, None] for token, each in pairs)]
        }
    }


def parse(words: list[str]) -> tuple[str, Model, int]:
    """Return the kind of server, the model and the port of a command line."""
    parser = ArgumentParser()
    parser.add_argument("-m")
    parser.add_argument("--model")
    for name in ("model-path", "tokenizer", "tokenizer-path", "lora-modules", "lora-paths", "lora", "fault"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--port", type=int)
    known, rest = parser.parse_known_args(words)
    kind = KINDS.get(str(known.m), "llama.cpp")
    if kind == "llama.cpp":
        folder, _, bits = Path(known.model).read_text().partition("\n")
        known.fault = known.fault or (bits and f"quantized to {bits} bits")
        base = tokenizer = Path(folder)
        adapters = Path(Path(known.lora).read_text()) if known.lora else None
        tokenizer = adapters or base
    else:
        base = Path(known.model_path or rest[1])
        tokenizer = Path(known.tokenizer or known.tokenizer_path or base)
        lora = json.loads(known.lora_modules)["path"] if known.lora_modules else (known.lora_paths or "=").split("=")[1]
        adapters = Path(lora) if lora else None
    return kind, load(base, tokenizer, adapters, known.fault or ""), known.port


def handler(kind: str, model: Model) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            try:
                data, status = answer(kind, model, self.path, body), 200
            except Exception as error:  # noqa: BLE001 - as servers do
                data, status = {"error": str(error)}, 400
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(data).encode())

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def running(words: Sequence[str], *, log: Path) -> Iterator[SimpleNamespace]:
    """Serve in a thread of this process, which has imported torch, in place of `process.running`."""
    del log
    kind, model, port = parse([*words[1:]])
    server = HTTPServer(("127.0.0.1", port), handler(kind, model))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield SimpleNamespace(poll=lambda: None)
    server.shutdown()
    thread.join()
    server.server_close()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kind, model, port = parse(sys.argv[1:])
    HTTPServer(("127.0.0.1", port), handler(kind, model)).serve_forever()


if __name__ == "__main__":
    main()
